// POST /payments in Fastify: ours, the handler alone, the handler with claim and
// completion written by hand, or with @node-idempotency/core, whose adapter keeps
// its answers in the memory of the process.

import Fastify from 'fastify'
import { keyOf, pay, pool, ready, SIDE, transaction } from './payment.mjs'

const app = Fastify()

const alone = async (request, reply) => {
  const payment = await transaction(request.body, keyOf(request))
  reply.code(201).header('Location', `/payments/${payment.id}`)
  return payment
}

if (SIDE === 'ours') {
  const { Idempotency } = await import('pg-idempotency')
  const { default: plugin } = await import('pg-idempotency/fastify')
  await app.register(plugin, { client: new Idempotency(pool, { schema: 'public' }), scope: () => 'alice' })
  app.post('/payments', { config: { idempotency: true } }, async (request, reply) => {
    const payment = await pay(request.idempotency.tx, request.body)
    reply.code(201).header('Location', `/payments/${payment.id}`)
    return payment
  })
} else if (SIDE === 'peer') {
  const { Idempotency } = (await import('@node-idempotency/core')).default
  const { MemoryStorageAdapter } = (await import('@node-idempotency/storage-adapter-memory')).default
  const core = new Idempotency(new MemoryStorageAdapter())
  const about = ({ method, url, headers, body }) => ({ method, path: url, headers, body })
  app.post('/payments', {
    preHandler: async (request, reply) => {
      const found = await core.onRequest(about(request))
      if (found === undefined) return
      request.replayed = true
      return reply.code(found.additional.status).headers(found.additional.headers).send(found.body)
    },
    onSend: async (request, reply, body) => {
      if (request.replayed) return
      const { location } = reply.getHeaders()
      await core.onResponse(about(request), {
        body, additional: { status: reply.statusCode, headers: { location, 'content-type': 'application/json' } } })
    },
  }, alone)
} else {
  app.post('/payments', alone)
}

await app.listen({ port: 0, host: '127.0.0.1' })
ready(app.server.address().port)
