/** The middleware where the suite of test/http does not look: errors with a status, parsers, tails of handlers. */
import assert from 'node:assert/strict'
import type { AddressInfo } from 'node:net'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import express5 from 'express'
import Fastify from 'fastify'
import { idempotent } from 'pg-idempotency/express'
import idempotency from 'pg-idempotency/fastify'
import { key, World } from './support.js'

let world: World
before(async () => {
  world = await World.make()
  await world.sql('CREATE SEQUENCE tries')
})
after(() => world.end())

// It has no types of its own.
const { default: express4 } = await import('express4' as string)

const scope = (): string => 'ann'
const teapot = (): Error => Object.assign(new Error('a teapot'), { status: 418, statusCode: 418 })

interface Shop { port: number; close(): Promise<void> }
type Handler = (request: any, answer: { tx: any; job: any; header(name: string): void; send(status: number, body: string): any; fail(error: Error): any }) => any

/** The same routes in each framework: an effect with the path as its name, and then the handler. */
const routes: Record<string, { handler: Handler; own?: object; job?: boolean }> = {
  throws: { handler: async () => { throw teapot() } },
  fails: { handler: async (_, { fail }) => fail(teapot()) },
  tail: { handler: async (_, { send, tx }) => {
    const sent = send(201, 'first')
    await sleep(20)
    await tx.query("INSERT INTO effects (what) VALUES ('tail')")
    return sent
  } },
  again: { handler: async (_, { send, tx, header }) => {
    const { rows: [{ nextval }] } = await tx.query("SELECT nextval('tries')::int")
    header(nextval % 2 ? 'X-First' : 'X-Second')
    if (nextval % 2) await tx.query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
    return send(200, 'x')
  } },
  conflict: { handler: async (_, { send }) => send(200, 'x'), own: { conflictStatus: 409, headers: ['X-Kept'] } },
  missing: { handler: async (_, { send }) => send(200, 'x'), own: { required: false, strict: true } },
  finished: { handler: async (_, { job }) => { await job.finish(async (tx: any) => {
    await tx.query("INSERT INTO effects (what) VALUES ('finished')")
    return { status: 202, headers: { 'Content-Type': 'text/plain' }, body: 'done' }
  }) }, job: true },
  ahead: { handler: async (_, { tx }) => tx.query("DO $$ BEGIN RAISE EXCEPTION 'ahead' USING ERRCODE = 'ID005'; END $$") },
  aheadInJob: { handler: async (_, { job }) => job.finish(async (tx: any) => {
    await tx.query("INSERT INTO effects (what) VALUES ('aheadInJob')")
    await tx.query("DO $$ BEGIN RAISE EXCEPTION 'ahead' USING ERRCODE = 'ID005'; END $$")
  }), job: true },
  lost: { handler: async (request, { job, send }) => {
    await world.client().forget('ann', request.idempotency.key)
    await job.step('late', () => 1)
    return send(200, 'never')
  }, job: true },
}
const effect = async (name: string, tx: any): Promise<void> => { await tx?.query('INSERT INTO effects (what) VALUES ($1)', [name]) }

async function inExpress(express: any): Promise<Shop> {
  const app = express()
  const guarded = idempotent(world.client(), { scope })
  for (const [name, { handler, own = {}, job }] of Object.entries(routes)) {
    app.post(`/${name}`, (job ? guarded.job : guarded)(async (req, res: any, next) => {
      const { tx } = req.idempotency
      await effect(name, tx)
      await handler(req, { ...req.idempotency, fail: next, header: (name: string) => res.set(name, 'x'), send: (status: number, body: string) => res.status(status).set('X-Kept', 'yes').send(body) })
    }, own))
  }
  app.post('/parsed', express.json(), guarded((_req, res: any) => res.send('never')))
  app.post('/kept', express.json({ verify: (req: any, _: unknown, bytes: Buffer) => { req.rawBody = bytes } }), guarded((_req, res: any) => res.send('fine')))
  // As express-session and compression do: what ends the response is theirs.
  const wraps = (_req: unknown, res: any, next: () => void): void => {
    const end = res.end
    res.end = (...given: unknown[]) => { res.setHeader('X-Wrapped', 'yes'); return end.apply(res, given) }
    next()
  }
  app.post('/wrapped', wraps, guarded((_req, res: any) => res.send('fine')))
  app.post('/next', guarded((_req, _res, next) => next()))
  app.post('/callback', guarded((_req, res: any) => { setTimeout(() => res.send('later'), 10) }))
  app.use((error: any, _req: any, res: any, _next: any) => { res.status(error.status ?? 500).json({ error: error.message }) })
  const server = await new Promise<any>((resolve) => { const made = app.listen(0, '127.0.0.1', () => resolve(made)) })
  return { port: (server.address() as AddressInfo).port, close: () => new Promise((resolve) => { server.close(() => resolve()); server.closeAllConnections() }) }
}

async function inFastify(): Promise<Shop> {
  const app = Fastify()
  await app.register(idempotency as any, { client: world.client(), scope })
  for (const [name, { handler, own = {}, job }] of Object.entries(routes)) {
    app.post(`/${name}`, { config: { idempotency: { ...own, job } } as object }, async (request: any, reply) => {
      await effect(name, request.idempotency.tx)
      await handler(request, { ...request.idempotency, fail: (error) => reply.send(error), header: (name) => { reply.header(name, 'x') },
        send: (status, body) => reply.code(status).header('X-Kept', 'yes').send(body) })
      return reply
    })
  }
  app.post('/callback', { config: { idempotency: true } as object }, (_request, reply) => { setTimeout(() => { reply.send('later') }, 10) })
  await app.listen({ port: 0, host: '127.0.0.1' })
  return { port: (app.server.address() as AddressInfo).port, close: () => app.close() }
}

for (const [framework, open] of [['Express 5', () => inExpress(express5)], ['Express 4', () => inExpress(express4)], ['Fastify', inFastify]] as const) {
  test(`routes in ${framework}`, async () => {
    const shop = await open()
    const post = async (path: string, name: string | undefined, body = '{}') => {
      const answer = await fetch(`http://127.0.0.1:${shop.port}/${path}`, { method: 'POST', body,
        headers: { 'Content-Type': 'application/json', ...(name === undefined ? {} : { 'Idempotency-Key': name }) } })
      return { status: answer.status, text: await answer.text(), replayed: answer.headers.get('idempotent-replayed'), kept: answer.headers.get('x-kept'), headers: answer.headers }
    }
    const grows = async (name: string, by: number, run: () => Promise<void>) => {
      const before = await world.effects(name)
      await run()
      assert.equal(await world.effects(name) - before, by, `effects of ${name}`)
    }
    try {
      // An error with a status of 4xx is still an error: rolled back, and not stored.
      for (const name of ['throws', 'fails']) {
        await grows(name, 0, async () => {
          const one = key()
          for (let times = 0; times < 2; times++) {
            const { status, text, replayed } = await post(name, one)
            assert.deepEqual([status, replayed], [418, null], text)
          }
        })
      }
      // Work of a handler after its answer belongs to the transaction.
      await grows('tail', 2, async () => {
        const one = key()
        assert.equal((await post('tail', one)).text, 'first')
        const again = await post('tail', one)
        assert.deepEqual([again.status, again.text, again.replayed], [201, 'first', 'true'])
      })
      // Of a try that was undone, nothing is left in the answer.
      const { headers } = await post('again', key())
      assert.deepEqual([headers.get('x-first'), headers.get('x-second')], [null, 'x'])
      if (framework !== 'Fastify') assert.equal((await post('wrapped', key())).headers.get('x-wrapped'), 'yes')
      assert.equal((await post('callback', key())).text, 'later')
      const one = key()
      assert.equal((await post('conflict', one)).kept, 'yes')
      const again = await post('conflict', one)
      assert.deepEqual([again.kept, again.replayed], ['yes', 'true'])
      assert.equal((await post('conflict', one, '{"other": 1}')).status, 409)
      await grows('missing', 2, async () => {
        for (let times = 0; times < 2; times++) assert.equal((await post('missing', undefined)).status, 200)
        assert.match((await post('missing', key())).text, /key-invalid/)
      })
      await grows('finished', 1, async () => {
        const job = key()
        for (const replayed of [null, 'true']) {
          const answer = await post('finished', job)
          assert.deepEqual([answer.status, answer.text, answer.replayed], [202, 'done', replayed])
        }
      })
      for (const name of ['ahead', 'aheadInJob']) {
        await grows(name, 0, async () => {
          const one = key()
          for (let times = 0; times < 2; times++) {
            const { status, text, replayed } = await post(name, one)
            assert.deepEqual([status, JSON.parse(text).type, replayed], [400, 'urn:pg-idempotency:action-id-ahead', null])
          }
        })
      }
      assert.equal((await post('conflict', key(), `"${'x'.repeat(3 << 20)}"`)).status, 413)
      const lost = await post('lost', key())
      assert.deepEqual([lost.status, JSON.parse(lost.text).type], [409, 'urn:pg-idempotency:in-progress'])
      if (framework !== 'Fastify') {
        assert.equal((await post('parsed', key())).text, 'never')
        assert.equal((await post('kept', key(), '{"a": 1}')).text, 'fine')
        assert.match((await post('next', key())).text, /must not call next/)
      }
    } finally {
      await shop.close()
    }
  })
}
