// The shop of test/http in Fastify.  test/http/README.md says what each route does.

import { randomBytes } from 'node:crypto'
import { Readable } from 'node:stream'
import Fastify from 'fastify'
import idempotency from 'pg-idempotency/fastify'
import store, { bank, formPage, isPayment, like, serve, submit } from './store.mjs'

const app = Fastify({ bodyLimit: 4 << 20, forceCloseConnections: 'idle' })
const user = (request) => request.headers['x-user']
const guarded = (own = true) => ({ config: { idempotency: own } })

const nobody = () => { throw Object.assign(new Error('who are you?'), { statusCode: 401 }) }

app.register(idempotency, { client: store.client, scope: (request) => user(request) || nobody() })

// Treat an empty body of any type as no body.
app.removeContentTypeParser('application/json')
app.addContentTypeParser('application/json', { parseAs: 'string' }, (request, body, done) => {
  try {
    done(null, body === '' ? undefined : JSON.parse(body))
  } catch (error) {
    done(Object.assign(error, { statusCode: 400 }))
  }
})
app.addContentTypeParser('*', { parseAs: 'buffer' }, (request, body, done) => done(null, body))
app.addContentTypeParser('application/x-www-form-urlencoded', { parseAs: 'string' },
  (request, body, done) => done(null, Object.fromEntries(new URLSearchParams(body))))

app.setErrorHandler((error, request, reply) => {
  const status = error.sqlstate === 'ID005' ? 400 : error.statusCode ?? 500
  if (status >= 500) console.error(error)
  reply.code(status).send({ error: status < 500 ? error.message : 'internal' })
})

app.after(() => {
  app.post('/payments', guarded(), async (request, reply) => {
    if (!isPayment(request.body)) return reply.code(400).send({ error: 'not a payment' })
    const { amount, currency } = request.body
    if (amount < 0) return reply.code(422).send({ error: 'a negative amount' })
    const { key, tx } = request.idempotency
    const id = await store.pay(tx, { user: user(request), amount, currency, key })
    if (currency === 'XXX') throw new Error('no such currency')
    if (currency === 'XTS') throw Object.assign(new Error('not in this currency'), { statusCode: 403 })
    reply.code(201).headers({
      'Location': `/payments/${id}`,
      'Link': [`</payments/${id}>; rel="self"`, '</payments>; rel="collection"'],
      'Set-Cookie': 'seen=1',
      'X-Trace': randomBytes(8).toString('hex'),
    })
    return { id, amount, currency }
  })

  app.post('/jobs', guarded({ job: true }), async (request, reply) => {
    if (!Number.isSafeInteger(request.body?.ms)) return reply.code(400).send({ error: 'not a job' })
    const { job } = request.idempotency
    const id = await job.step('charge', async ({ key }) => {
      await bank(key, request.body.ms)
      return key
    })
    return { id, attempt: job.attempt }
  })

  app.post('/blobs', guarded({ required: false }), async (request, reply) => {
    await store.addBlob(request.idempotency.tx, user(request), request.rawBody.length)
    return reply.type('application/octet-stream').send(Buffer.from(request.rawBody).reverse())
  })

  app.post('/streams', guarded(), async (request, reply) => {
    await store.addBlob(request.idempotency.tx, user(request), request.rawBody.length)
    return reply.send(Readable.from(['one piece, ', 'and another']))
  })

  app.put('/likes/:item', async (request, reply) => {
    const { active, action_id } = request.body ?? {}
    if (typeof active !== 'boolean' || !Number.isSafeInteger(action_id)) return reply.code(400).send({ error: 'not a like' })
    return like(user(request), request.params.item, active, action_id)
  })

  app.get('/form', async (request, reply) => reply.type('text/html; charset=utf-8').send(formPage(await store.addForm(user(request)))))
  app.post('/form', async (request, reply) => {
    if (await submit(user(request), request.body?.token)) return reply.redirect('/thanks', 303)
    return reply.code(400).send({ error: 'no such form' })
  })
  app.get('/thanks', async () => 'thanks')
  app.get('/effects', async () => store.effects())
  app.get('/ping', async (request, reply) => {
    await store.ping()
    return reply.code(204).send()
  })
})

await serve(async (port) => {
  await app.listen({ port, host: '127.0.0.1' })
  return app.server.address().port
}, () => app.close())
