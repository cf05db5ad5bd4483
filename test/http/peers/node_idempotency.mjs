// The shop of test/http in Fastify with @node-idempotency/core and its adapter
// for memory.  Its plugin for Fastify cannot be installed from the registry, so
// the hooks here call the core.

import Fastify from 'fastify'
import core from '@node-idempotency/core'
import memory from '@node-idempotency/storage-adapter-memory'
import { addBlob, effects, job, pay } from './memory_shop.mjs'

const app = Fastify({ bodyLimit: 5_000_000 })
app.addContentTypeParser('application/octet-stream', { parseAs: 'buffer' }, (request, body, done) => done(null, body))
const idempotency = new core.Idempotency(new memory.MemoryStorageAdapter(), { cacheKeyPrefix: 'shop' })
const STATUS = { REQUEST_IN_PROGRESS: 409, IDEMPOTENCY_FINGERPRINT_MISSMATCH: 422 }
const about = (request) => ({
  method: request.method, path: request.url, headers: request.headers, body: request.body,
  options: { cacheKeyPrefix: request.headers['x-user'] },
})

const guard = {
  preHandler: async (request, reply) => {
    if (!request.headers['x-user']) return reply.code(401).send({ error: 'who are you?' })
    if (request.url !== '/blobs' && !request.headers['idempotency-key']) return reply.code(400).send({ error: 'no key' })
    try {
      const found = await idempotency.onRequest(about(request))
      request.guarded = found === undefined
      if (found) return reply.code(found.additional.status).headers(found.additional.headers).send(found.body)
    } catch (error) {
      return reply.code(STATUS[error.code] ?? 400).send({ error: error.message })
    }
  },
  onSend: async (request, reply, body) => {
    if (!request.guarded) return
    const { location, link, 'content-type': type } = reply.getHeaders()
    const headers = Object.fromEntries(Object.entries({ location, link, 'content-type': type }).filter(([, value]) => value))
    await idempotency.onResponse(about(request), { body, additional: { status: reply.statusCode, headers } })
  },
}
const guarded = (path, work) => app.post(path, guard, async (request, reply) => {
  const { status, headers, body } = await work(request)
  return reply.code(status).headers(headers).send(body)
})

guarded('/payments', (request) => pay(request.headers['x-user'], request.body))
guarded('/jobs', (request) => job(request.body))
guarded('/blobs', (request) => addBlob(request.body ?? ''))
app.get('/effects', async () => effects())
app.get('/thanks', async () => 'thanks')
app.get('/ping', async (request, reply) => reply.code(204).send())

await app.listen({ port: 0, host: '127.0.0.1' })
console.log(`listening on ${app.server.address().port}`)
