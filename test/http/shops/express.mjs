// The shop of test/http in Express 5; EXPRESS=4 for 4.  docs/http.md says what
// each route does.

import { randomBytes } from 'node:crypto'
import { idempotent } from 'pg-idempotency/express'
import store, { bank, formPage, isPayment, like, serve, submit } from './store.mjs'

const { default: express } = await import(process.env.EXPRESS === '4' ? 'express4' : 'express')
const app = express()
const guarded = idempotent(store.client, { scope: (req) => user(req) || nobody() })

const user = (req) => req.get('X-User')
const nobody = () => { throw Object.assign(new Error('who are you?'), { status: 401 }) }

app.post('/payments', guarded(async (req, res) => {
  if (!isPayment(req.body)) return res.status(400).json({ error: 'not a payment' })
  const { amount, currency } = req.body
  if (amount < 0) return res.status(422).json({ error: 'a negative amount' })
  const { key, tx } = req.idempotency
  const id = await store.pay(tx, { user: user(req), amount, currency, key })
  if (currency === 'XXX') throw new Error('no such currency')
  if (currency === 'XTS') throw Object.assign(new Error('not in this currency'), { status: 403 })
  res.status(201).location(`/payments/${id}`).set({
    'Link': [`</payments/${id}>; rel="self"`, '</payments>; rel="collection"'],
    'Set-Cookie': 'seen=1',
    'X-Trace': randomBytes(8).toString('hex'),
  }).json({ id, amount, currency })
}))

app.post('/jobs', guarded.job(async (req, res) => {
  if (!Number.isSafeInteger(req.body?.ms)) return res.status(400).json({ error: 'not a job' })
  const { job } = req.idempotency
  const id = await job.step('charge', async ({ key }) => {
    await bank(key, req.body.ms)
    return key
  })
  res.json({ id, attempt: job.attempt })
}))

app.post('/blobs', guarded(async (req, res) => {
  await store.addBlob(req.idempotency.tx, user(req), req.rawBody.length)
  res.type('application/octet-stream').send(Buffer.from(req.rawBody).reverse())
}, { required: false }))

app.post('/streams', guarded(async (req, res) => {
  await store.addBlob(req.idempotency.tx, user(req), req.rawBody.length)
  res.write('one piece, ')
  res.end('and another')
}))

const later = (handler) => (req, res, next) => handler(req, res).catch(next)

app.put('/likes/:item', express.json(), later(async (req, res) => {
  const { active, action_id } = req.body ?? {}
  if (typeof active !== 'boolean' || !Number.isSafeInteger(action_id)) return res.status(400).json({ error: 'not a like' })
  res.json(await like(user(req), req.params.item, active, action_id))
}))

app.get('/form', later(async (req, res) => res.send(formPage(await store.addForm(user(req))))))
app.post('/form', express.urlencoded({ extended: false }), later(async (req, res) => {
  if (await submit(user(req), req.body?.token)) res.redirect(303, '/thanks')
  else res.status(400).json({ error: 'no such form' })
}))
app.get('/thanks', (req, res) => res.type('text/plain').send('thanks'))
app.get('/effects', later(async (req, res) => res.json(await store.effects())))
app.get('/ping', later(async (req, res) => {
  await store.ping()
  res.status(204).end()
}))

app.use((error, req, res, next) => {
  if (res.headersSent) return next(error)
  const status = error.sqlstate === 'ID005' ? 400 : error.status ?? 500
  if (status >= 500) console.error(error)
  res.status(status).json({ error: status < 500 ? error.message : 'internal' })
})

let server
await serve((port) => new Promise((resolve) => {
  server = app.listen(port, '127.0.0.1', () => resolve(server.address().port))
}), () => new Promise((resolve) => {
  server.close(resolve)
  // Close busy connections when they become idle, which would stay open for keepAliveTimeout.
  setInterval(() => server.closeIdleConnections(), 50).unref()
}))
