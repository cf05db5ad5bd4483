/** Calls that come too late, and clients that have gone. */
import assert from 'node:assert/strict'
import { connect, type AddressInfo } from 'node:net'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import express from 'express'
import Fastify from 'fastify'
import type pg from 'pg'
import { Idempotency } from 'pg-idempotency'
import { idempotent } from 'pg-idempotency/express'
import idempotency from 'pg-idempotency/fastify'
import { key, World } from './support.js'

let world: World
let pool: pg.Pool
let idem: Idempotency
before(async () => {
  world = await World.make()
  pool = world.pool({ max: 4 })
  idem = new Idempotency(pool)
})
after(() => world.end())

const scope = (): string => 'ann'
const CONFLICT = "DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"
function signal(): { given: Promise<void>; give: () => void } {
  let give!: () => void
  const given = new Promise<void>((resolve) => { give = resolve })
  return { given, give }
}
async function onExpress(app: any, use: (port: number) => Promise<void>): Promise<void> {
  const server = await new Promise<any>((resolve) => { const made = app.listen(0, '127.0.0.1', () => resolve(made)) })
  try {
    await use((server.address() as AddressInfo).port)
  } finally {
    server.closeAllConnections()
    server.close()
  }
}
async function onFastify(routes: (app: any) => void, use: (port: number) => Promise<void>): Promise<void> {
  const app = Fastify()
  await app.register(idempotency as any, { client: idem, scope })
  routes(app)
  await app.listen({ port: 0, host: '127.0.0.1' })
  try {
    await use((app.server.address() as AddressInfo).port)
  } finally {
    await app.close()
  }
}
const ask = async (port: number, path: string, one = key()): Promise<[number, any, Headers]> => {
  const answer = await fetch(`http://127.0.0.1:${port}${path}`, { method: 'POST', body: '{}', headers: { 'Content-Type': 'application/json', 'Idempotency-Key': one } })
  return [answer.status, await answer.json().catch(() => undefined), answer.headers]
}

test('a handler that continues after its timeout cannot make a success of the refusal, even if that is sent later', async () => {
  const [answering, changed] = [signal(), signal()]
  const app = express()
  // As express-session does, which saves the session first.
  app.use((_req: any, res: any, next: any) => {
    const { end } = res
    res.end = (...given: unknown[]) => {
      answering.give()
      void changed.given.then(() => end.apply(res, given))
      return res
    }
    next()
  })
  app.post('/', idempotent(idem, { scope, timeoutMs: 200 })(async (_req: any, res: any) => {
    await answering.given
    res.status(201).json({})
    changed.give()
  }))
  await onExpress(app, async (port) => {
    const [status, { type }] = await ask(port, '/')
    assert.deepEqual([status, type], [503, 'urn:pg-idempotency:timeout'])
  })
  const [sending, late] = [signal(), signal()]
  await onFastify((server) => {
    server.addHook('onSend', async (_request: any, _reply: any, payload: unknown) => {
      sending.give()
      await late.given
      return payload
    })
    server.post('/', { config: { idempotency: { timeoutMs: 200 } } }, async (_request: any, reply: any) => {
      await sending.given
      reply.code(201).send({})
      late.give()
    })
  }, async (port) => {
    const [status, { type }] = await ask(port, '/')
    assert.deepEqual([status, type], [503, 'urn:pg-idempotency:timeout'])
  })
})

test('what makes a success of the refusal outside of the handler gets 500', async () => {
  await onFastify((server) => {
    server.addHook('onSend', async (_request: any, reply: any, payload: unknown) => {
      reply.code(200)
      return payload
    })
    server.post('/', { config: { idempotency: { timeoutMs: 200 } } }, () => new Promise(() => undefined))
  }, async (port) => {
    const [status, { type }] = await ask(port, '/')
    assert.deepEqual([status, type], [500, 'urn:pg-idempotency:rolled-back'])
  })
})

test('a callback that has lost the context of its handler does not throw after the answer', async () => {
  let response: any
  const app = express()
  app.post('/', idempotent(idem, { scope, timeoutMs: 200 })((_req: any, res: any) => {
    response = res
    return new Promise(() => undefined)
  }))
  await onExpress(app, async (port) => {
    assert.equal((await ask(port, '/'))[0], 503)
    assert.doesNotThrow(() => response.status(200).json({}))
  })
})

test('a try that was rolled back does not change the response of the next one', async () => {
  const waiting = signal()
  const set = signal()
  let tries = 0
  const run = async (tx: pg.PoolClient, change: (status: number) => void): Promise<void> => {
    const mine = ++tries
    if (mine === 1) {
      await Promise.all([tx.query(CONFLICT), waiting.given.then(() => { change(202); set.give() })])
    }
    change(201)
    waiting.give()
    await set.given
  }
  const app = express()
  app.post('/', idempotent(idem, { scope })(async (req: any, res: any) => {
    await run(req.idempotency.tx, (status) => res.status(status).set('Location', `/${status}`))
    res.json({})
  }))
  await onExpress(app, async (port) => {
    const [status, , headers] = await ask(port, '/')
    assert.deepEqual([status, headers.get('Location'), tries], [201, '/201', 2])
  })
  const JAR = Symbol('cookies')
  tries = 0
  await onFastify((server) => {
    server.addHook('onRequest', async (_request: any, reply: any) => { reply[JAR] = new Map() })
    server.post('/', { config: { idempotency: true } }, async (request: any, reply: any) => {
      if (++tries === 1) {
        reply[JAR].set('a', 1)
        reply.serializer(() => 'of the first try').code(202)
        await request.idempotency.tx.query(CONFLICT)
      }
      return { cookies: [...reply[JAR].keys()] }
    })
  }, async (port) => assert.deepEqual((await ask(port, '/')).slice(0, 2), [200, { cookies: [] }]))
})

test('a file for a client that has gone does not hold a connection until the timeout', async () => {
  const app = express()
  const begun = signal()
  app.post('/', idempotent(idem, { scope })(async (req: any, res: any) => {
    const closed = new Promise((resolve) => { req.socket.once('close', resolve) })
    begun.give()
    await closed
    res.sendFile(fileURLToPath(import.meta.url))
  }))
  app.use((_error: any, _req: any, res: any, _next: any) => { res.end() })
  await onExpress(app, async (port) => {
    const client = connect(port, '127.0.0.1')
    client.write(`POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nIdempotency-Key: ${key()}\r\n\r\n`)
    await begun.given
    client.destroy()
    const began = performance.now()
    while (pool.idleCount < pool.totalCount) await sleep(20)
    assert.ok(performance.now() - began < 30_000)
  })
})
