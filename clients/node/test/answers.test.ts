/** One response for each request: what a handler sends twice, from elsewhere, or for work that was rolled back. */
import assert from 'node:assert/strict'
import { once } from 'node:events'
import type { AddressInfo } from 'node:net'
import { Readable } from 'node:stream'
import { pipeline } from 'node:stream/promises'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import express5 from 'express'
import Fastify from 'fastify'
import { type Client, type Result } from 'pg-idempotency'
import { idempotent } from 'pg-idempotency/express'
import idempotency from 'pg-idempotency/fastify'
import { MemoryIdempotency } from 'pg-idempotency/memory'
import { key, World } from './support.js'

let world: World
before(async () => { world = await World.make() })
after(() => world.end())

// It has no types of its own.
const { default: express4 } = await import('express4' as string)
const scope = (): string => 'ann'

/** The arguments of a handler in each framework: raw is Node's response. */
interface Kit {
  raw: any
  answer: any
  tx: any
  job: any
  key: string
  send(status: number, body: string): any
  isSent(): boolean
}
interface Route { handler: (kit: Kit) => any; job?: boolean; own?: object }
interface Answer { status: number; text: string; replayed: boolean; ms: number; headers: Headers }
interface Shop { post(path: string, key: string): Promise<Answer>; close(): Promise<void> }

const asked = (port: number) => async (path: string, name: string): Promise<Answer> => {
  const began = performance.now()
  const answer = await fetch(`http://127.0.0.1:${port}/${path}`,
    { method: 'POST', body: '{}', headers: { 'Content-Type': 'application/json', 'Idempotency-Key': name } })
  return {
    status: answer.status, text: await answer.text(), replayed: answer.headers.get('idempotent-replayed') === 'true',
    ms: performance.now() - began, headers: answer.headers,
  }
}
/** Answers an error as the header of the request says. */
type OnError = (error: any) => number

async function inExpress(express: any, client: Client<any>, routes: Record<string, Route>, onError: OnError): Promise<Shop> {
  const app = express()
  const guarded = idempotent<any>(client, { scope })
  for (const [path, name] of [['/wrapped', 'end'], ['/wrapped-head', 'writeHead']] as const) {
    app.use(path, (_req: any, res: any, next: () => void) => {
      const real = res[name]
      res[name] = (...given: unknown[]) => {
        res.statusCode = 200
        return real.apply(res, name === 'end' ? given : [200, ...given.slice(1)])
      }
      next()
    })
  }
  for (const [path, { handler, job, own }] of Object.entries(routes)) {
    app.post(`/${path}`, (job ? guarded.job : guarded)((req, res: any) => handler({
      raw: res, answer: res, ...req.idempotency, send: (status: number, body: string) => res.status(status).type('text').send(body), isSent: () => res.headersSent && res.writableEnded,
    }), own))
  }
  app.use((error: any, _req: any, res: any, _next: any) => { res.status(onError(error)).json({ error: error.code ?? error.message }) })
  const server = await new Promise<any>((resolve) => { const made = app.listen(0, '127.0.0.1', () => resolve(made)) })
  return {
    post: asked((server.address() as AddressInfo).port),
    close: () => new Promise((resolve) => { server.close(() => resolve()); server.closeAllConnections() }),
  }
}

async function inFastify(client: Client<any>, routes: Record<string, Route>, onError: OnError): Promise<Shop> {
  const app = Fastify()
  await app.register(idempotency as any, { client, scope })
  app.addHook('onSend', async (request, reply, payload) => {
    if (!request.url.startsWith('/wrapped')) return payload
    reply.code(200)
    return JSON.stringify({ wraps: payload })
  })
  app.setErrorHandler((error: any, _request, reply) => { void reply.code(onError(error)).send({ error: error.code ?? error.message }) })
  for (const [path, { handler, job, own }] of Object.entries(routes)) {
    app.post(`/${path}`, { config: { idempotency: { ...own, ...(job ? { job } : {}) } } as object }, (request: any, reply: any) => handler({
      raw: reply.raw, answer: reply, ...request.idempotency, send: (status: number, body: string) => reply.code(status).type('text/plain').send(body),
      isSent: () => reply.sent && reply.raw.headersSent && reply.raw.writableEnded,
    }))
  }
  await app.listen({ port: 0, host: '127.0.0.1' })
  return { post: asked((app.server.address() as AddressInfo).port), close: () => app.close() }
}

const frameworks: [string, (client: Client<any>, routes: Record<string, Route>, onError?: OnError) => Promise<Shop>][] = [
  ['Express 5', (client, routes, onError = () => 500) => inExpress(express5, client, routes, onError)],
  ['Express 4', (client, routes, onError = () => 500) => inExpress(express4, client, routes, onError)],
  ['Fastify', (client, routes, onError = () => 500) => inFastify(client, routes, onError)],
]

const effect = (tx: any, what: string) => tx?.query('INSERT INTO effects (what) VALUES ($1)', [what])

for (const [framework, open] of frameworks) {
  test(`${framework}: a second response is refused, and undoes the first`, async () => {
    const twice = async ({ tx, key, send }: Kit) => {
      await effect(tx, key)
      send(402, 'one')
      return send(201, 'two')
    }
    const refused: Record<string, Route> = {
      twice: { handler: twice }, job: { handler: twice, job: true },
      swallowed: { handler: async ({ tx, key, send }) => {
        await effect(tx, key)
        const first = send(402, 'one')
        try { send(201, 'two') } catch (error) { assert.equal((error as { code?: string }).code, 'ERR_HTTP_HEADERS_SENT') }
        return first
      } },
      later: { handler: async ({ tx, key, send }) => {
        await effect(tx, key)
        const first = send(402, 'one')
        await sleep(10)
        send(201, 'two')
        return first
      } },
      ...(framework === 'Fastify' ? { returned: { handler: async ({ tx, key, send }) => {
        await effect(tx, key)
        send(402, 'one')
        return 'two'
      } } satisfies Route } : { head: { handler: async ({ tx, key, raw, send }) => {
        await effect(tx, key)
        raw.writeHead(402)
        send(201, 'two')
      } } satisfies Route }),
    }
    const whole: Record<string, Route> = {
      once: { handler: ({ send, isSent }) => {
        assert.equal(isSent(), false)
        const sent = send(402, 'one')
        return isSent() ? sent : assert.fail('it does not seem to be sent')
      } },
      // Of what was sent nothing changes.
      changed: { handler: ({ answer, send }) => {
        const sent = send(402, 'one')
        answer.status(201)
        return sent
      } },
      ...(framework === 'Fastify' ? {} : { ended: { handler: ({ send, raw }) => { send(402, 'one'); raw.end() } } satisfies Route }),
    }
    const shop = await open(world.client(), { ...refused, ...whole })
    try {
      for (const path of Object.keys(refused)) {
        const one = key()
        for (let times = 0; times < 2; times++) {
          const answer = await shop.post(path, one)
          assert.deepEqual([answer.status, answer.text, answer.replayed], [500, '{"error":"ERR_HTTP_HEADERS_SENT"}', false], path)
        }
        assert.equal(await world.effects(one), 0, path)
      }
      for (const path of Object.keys(whole)) {
        const one = key()
        for (const replayed of [false, true]) {
          const answer = await shop.post(path, one)
          assert.deepEqual([answer.status, answer.text, answer.replayed], [402, 'one', replayed], path)
        }
      }
    } finally {
      await shop.close()
    }
  })

  test(`${framework}: a response that is sent from the handler of another request`, async () => {
    // A batcher, which the first request has started.
    let waiting: (() => void)[] = []
    let timer: NodeJS.Timeout | undefined
    const batched = ({ send, answer }: Kit) => {
      waiting.push(() => send(200, 'batched'))
      timer ??= setInterval(() => { for (const one of waiting.splice(0)) one() }, 20)
      return framework === 'Fastify' ? answer : undefined
    }
    // Of an attempt that was undone, it is ignored.
    let tries = 0
    const retried = async ({ send, tx, answer }: Kit) => {
      const number = ++tries
      setTimeout(() => { send(200, `try ${number}`) }, number === 1 ? 50 : 400)
      if (number === 1) await tx.query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
      return framework === 'Fastify' ? answer : undefined
    }
    const shop = await open(world.client(), { batched: { handler: batched, own: { timeout: '8 seconds' } }, retried: { handler: retried } })
    try {
      for (let times = 0; times < 3; times++) {
        const answer = await shop.post('batched', key())
        assert.deepEqual([answer.status, answer.text], [200, 'batched'], `request ${times + 1}`)
      }
      assert.equal((await shop.post('retried', key())).text, 'try 2')
    } finally {
      clearInterval(timer)
      await shop.close()
      waiting = []
    }
  })

  test(`${framework}: a handler that waits until its own response was sent is refused at once`, async () => {
    const waits: Record<string, Route> = {
      once: { handler: async ({ raw, send, tx, key }) => { await effect(tx, key); send(200, 'x'); await once(raw, 'finish') } },
      first: { handler: async ({ raw, send, tx, key }) => {
        await effect(tx, key)
        const sent = new Promise((resolve) => { raw.on('finish', resolve) })
        send(200, 'x')
        await sent
      } },
      ...(framework === 'Fastify' ? {} : { pipeline: { handler: async ({ raw, tx, key }) => {
        await effect(tx, key)
        raw.setHeader('Content-Length', 4)
        await pipeline(Readable.from(['ab', 'cd']), raw)
      } } satisfies Route }),
    }
    const goesOn: Record<string, Route> = {
      aborts: { handler: async ({ raw, send }) => { raw.on('close', () => undefined); const sent = send(200, 'abcd'); await sleep(50); return sent } },
      listens: { handler: async ({ raw, send }) => { raw.on('finish', () => undefined); raw.on('close', () => undefined); return send(200, 'abcd') } },
      ...(framework === 'Fastify' ? {} : { piped: { handler: ({ raw }) => {
        raw.setHeader('Content-Length', 4)
        Readable.from(['ab', 'cd']).pipe(raw)
      } } satisfies Route, piping: { handler: async ({ raw }) => {
        raw.setHeader('Content-Length', 4)
        await new Promise((resolve) => { const from = Readable.from(['ab', 'cd']); from.pipe(raw); from.on('end', resolve) })
        await sleep(50)
      } } satisfies Route }),
    }
    const shop = await open(world.client(), { ...waits, ...goesOn })
    try {
      for (const path of Object.keys(waits)) {
        const one = key()
        const answer = await shop.post(path, one)
        assert.deepEqual([answer.status, JSON.parse(answer.text).type], [500, 'urn:pg-idempotency:streaming-refused'], path)
        assert.match(answer.text, /waits until that is sent/)
        assert.ok(answer.ms < 20_000, `${path}: at once, and not after ${answer.ms} ms`)
        assert.equal(await world.effects(one), 0, path)
      }
      for (const path of Object.keys(goesOn)) assert.deepEqual([(await shop.post(path, key())).text], ['abcd'], path)
    } finally {
      await shop.close()
    }
  })

  test(`${framework}: statuses that say something of the sender or of the moment are not stored`, async () => {
    const statuses = [401, 403, 408, 425, 429, 500, 503]
    const shop = await open(world.client(), Object.fromEntries([...statuses, 402, 404, 409].map((status): [string, Route] => [String(status), {
      handler: async ({ tx, key, send, answer }) => { await effect(tx, key); answer.header('Retry-After', '7'); return send(status, 'x') },
    }])))
    try {
      for (const status of [...statuses, 402, 404, 409]) {
        const one = key()
        const stored = !statuses.includes(status)
        for (const replayed of [false, stored]) {
          const answer = await shop.post(String(status), one)
          assert.deepEqual([answer.status, answer.replayed], [status, replayed])
          if (!replayed) assert.equal(answer.headers.get('retry-after'), '7')
        }
        assert.equal(await world.effects(one), stored ? 1 : 0)
      }
    } finally {
      await shop.close()
    }
  })

  test(`${framework}: an application that wraps each answer in a 200 does so only for work that is committed`, async () => {
    const paths = framework === 'Fastify' ? ['wrapped'] : ['wrapped', 'wrapped-head']
    const shop = await open(world.client(), Object.fromEntries(paths.flatMap((path) => [401, 404, 500].map((status): [string, Route] => [`${path}/${status}`, {
      handler: async ({ tx, key, send }) => { await effect(tx, key); return send(status, 'x') },
    }]))))
    try {
      for (const path of paths) {
        for (const [status, seen] of [[401, 500], [500, 500], [404, 200]] as const) {
          const one = key()
          for (const replayed of [false, status === 404]) {
            const answer = await shop.post(`${path}/${status}`, one)
            assert.deepEqual([answer.status, answer.replayed], [seen, replayed], `${path} ${status}`)
          }
          assert.equal(await world.effects(one), status === 404 ? 1 : 0)
        }
      }
    } finally {
      await shop.close()
    }
  })

  test(`${framework}: a replay has the headers that protect the answer, and a scope that no server takes is refused`, async () => {
    const protective = { 'Cache-Control': 'private, no-store', 'Content-Security-Policy': "default-src 'none'", 'Referrer-Policy': 'no-referrer', 'X-Content-Type-Options': 'nosniff' }
    let user = 'ann'
    const shop = await open(world.client(), { run: { own: { scope: () => user }, handler: ({ answer, send }) => {
      for (const [name, value] of Object.entries(protective)) answer.header(name, value)
      return send(200, 'x')
    } } })
    try {
      const one = key()
      for (const replayed of [false, true]) {
        const answer = await shop.post('run', one)
        assert.deepEqual([answer.replayed, Object.keys(protective).map((name) => answer.headers.get(name))], [replayed, Object.values(protective)])
      }
      for (user of ['ž'.repeat(257), 'nul\0', '\ud800']) {
        const refused = await shop.post('run', one)
        assert.deepEqual([refused.status, JSON.parse(refused.text).type], [400, 'urn:pg-idempotency:scope-invalid'])
      }
    } finally {
      await shop.close()
    }
  })

  test(`${framework}: no success for work that was rolled back, whatever the application makes of the error`, async () => {
    for (const status of [200, 201, 204, 302, 418, 500]) {
      const shop = await open(world.client(), {
        throws: { handler: async ({ tx, key }) => { await effect(tx, key); throw new Error('no') } },
        swallows: { handler: async ({ tx, send }) => { await tx.query('SELECT 1 / 0').catch(() => undefined); return send(201, 'x') } },
      }, () => status)
      try {
        for (const path of ['throws', 'swallows']) {
          const one = key()
          for (let times = 0; times < 2; times++) {
            const answer = await shop.post(path, one)
            if (status >= 300) assert.equal(answer.status, status)
            else assert.deepEqual([answer.status, JSON.parse(answer.text).type], [500, 'urn:pg-idempotency:rolled-back'])
          }
          assert.equal(await world.effects(one), 0)
        }
      } finally {
        await shop.close()
      }
    }
  })
}

test('if middleware sends 204 for work that was rolled back, a whole 500 is sent, and the callbacks of the error handler are called', async () => {
  for (const express of [express5, express4]) {
    const app = (express as any)()
    app.use((_req: any, res: any, next: () => void) => {
      const { writeHead } = res
      res.writeHead = (_: number, ...given: unknown[]) => writeHead.call(res, 204, ...given)
      next()
    })
    const guarded = idempotent<any>(new MemoryIdempotency() as Client<any>, { scope })
    app.post('/fails', guarded((_req, res: any) => res.status(500).json({ sorry: true })))
    for (const method of ['write', 'end']) app.post(`/${method}`, guarded(() => { throw new Error(method) }))
    const called: string[] = []
    app.use(({ message }: Error, _req: any, res: any, _next: any) => { res.status(200)[message]('hello', () => called.push(message)) })
    const server = await new Promise<any>((resolve) => { const made = app.listen(0, '127.0.0.1', () => resolve(made)) })
    try {
      const post = async (path: string): Promise<unknown[]> => {
        const answer = await fetch(`http://127.0.0.1:${server.address().port}/${path}`, { method: 'POST', headers: { 'Idempotency-Key': key() }, signal: AbortSignal.timeout(4000) })
        return [answer.status, await answer.text()]
      }
      assert.deepEqual(await post('fails'), [500, '{"sorry":true}'])
      for (const method of ['write', 'end']) {
        const [status, text] = await post(method)
        assert.deepEqual([status, JSON.parse(String(text)).type], [500, 'urn:pg-idempotency:rolled-back'])
      }
      for (let tries = 0; called.length < 2 && tries < 1000; tries++) await sleep(10)
      assert.deepEqual(called, ['write', 'end'])
    } finally {
      server.close()
      server.closeAllConnections()
    }
  }
})

test('a success is always stored, and by default a refusal of the sender never', async () => {
  for (const client of [world.client(), new MemoryIdempotency()] as Client<any>[]) {
    const run = (status: number, name: string, store?: (status: number) => boolean): Promise<Result> =>
      client.request({ scope: 'scope', key: name, store }, () => ({ status }))
    for (const [status, store, stored] of [[201, () => false, true], [429, undefined, false], [429, () => true, true], [404, () => false, false], [503, () => true, false]] as const) {
      const one = key()
      assert.deepEqual([(await run(status, one, store)).stored, (await run(status, one, store)).replayed], [stored, stored], String(status))
    }
  }
})

/** Random numbers that a seed repeats. */
function randomOf(seed: number): (below: number) => number {
  let state = seed >>> 0
  return (below) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    return Math.floor(state / 2 ** 32 * below)
  }
}

/** Steps of a random handler. sent says what it has answered so far. */
const steps: ((kit: Kit, random: (below: number) => number) => any)[] = [
  ({ tx, key }) => effect(tx, key),
  ({ tx, key }) => effect(tx, key),
  ({ send }, random) => send([200, 201, 402, 404, 429, 503][random(6)]!, 'answer'),
  ({ send }, random) => send([200, 201][random(2)]!, 'answer'),
  ({ send }) => { try { send(201, 'answer') } catch { /* It continues. */ } },
  ({ tx }) => tx?.query('SELECT 1 / 0').catch(() => undefined),
  ({ tx }) => tx?.query('SELECT 1 / 0'),
  async ({ tx }) => {
    await tx?.query('SAVEPOINT a')
    await tx?.query('SELECT 1 / 0').catch(() => undefined)
    await tx?.query('ROLLBACK TO SAVEPOINT a')
  },
  ({ tx }) => tx?.query('COMMIT').catch(() => undefined),
  () => { throw new Error('no') },
  () => { throw Object.assign(new Error('refused'), { status: 403, statusCode: 403 }) },
  () => sleep(2),
  ({ send }) => { setTimeout(() => { try { send(200, 'late') } catch { /* Nobody hears of it. */ } }, 3) },
  ({ tx }, random) => (random(2) ? tx?.query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$") : undefined),
]
/** One that ends the transaction behind the client: what it writes then has a transaction of its own. */
const rollBack = ({ tx }: Kit) => tx?.query('SELECT 1; ROLLBACK').catch(() => undefined)
steps.push(rollBack)
const ROUNDS = Number(process.env['ROUNDS'] ?? 60)

for (const [framework, open] of frameworks) {
  test(`${framework}: random handlers get no success for work that was rolled back`, async () => {
    const seed = Number(process.env['SEED'] ?? Math.floor(Math.random() * 2 ** 31))
    const random = randomOf(seed)
    const scripts = Array.from({ length: ROUNDS }, () => Array.from({ length: 1 + random(5) }, () => steps[random(steps.length)]!))
    const errors = scripts.map(() => [200, 201, 204, 302, 400, 500][random(6)]!)
    let now = 0
    const run = async (kit: Kit): Promise<void> => {
      for (const step of scripts[now]!) await step(kit, random)
      // Without an answer it would wait until its time is over.
      if (!kit.isSent()) throw new Error('no answer')
    }
    const handler = framework === 'Fastify' ? (kit: Kit) => run(kit).then(() => kit.answer) : run
    const client = world.client()
    const shop = await open(client, { run: { handler } }, () => errors[now]!)
    let successes = 0
    try {
      for (; now < ROUNDS; now++) {
        const one = key()
        const said = `SEED=${seed}, handler ${now}: ${scripts[now]!.map((step) => steps.indexOf(step))}`
        const first = await shop.post('run', one)
        const made = await world.effects(one)
        const row = await client.lookup('ann', one)
        if (first.status >= 200 && first.status < 300) {
          successes++
          assert.equal(row?.state, 'completed', `${first.status} ${first.text}, and nothing is stored; ${said}`)
          const again = await shop.post('run', one)
          assert.deepEqual([again.status, again.text, again.replayed], [first.status, first.text, true], said)
          assert.equal(await world.effects(one), made, said)
        } else if (!row && !scripts[now]!.includes(rollBack)) {
          assert.equal(made, 0, `${first.status}, and the work was committed; ${said}`)
        }
      }
      assert.ok(successes > 0, 'some have success')
    } finally {
      await shop.close()
    }
  })
}

test('the core: random handlers get no success for work that was rolled back', async () => {
  const seed = Number(process.env['SEED'] ?? Math.floor(Math.random() * 2 ** 31))
  const random = randomOf(seed)
  const client = world.client()
  let successes = 0
  for (let now = 0; now < ROUNDS; now++) {
    const script = Array.from({ length: 1 + random(5) }, () => steps[random(steps.length)]!)
    const one = key()
    const said = `SEED=${seed}, handler ${now}: ${script.map((step) => steps.indexOf(step))}`
    const run = async (tx: any) => {
      let response: { status: number; body: string } | undefined
      const send = (status: number, body: string): void => { response = { status, body } }
      for (const step of script) await step({ tx, key: one, send } as unknown as Kit, random)
      return response as { status: number; body: string }
    }
    const ways: ((run: (tx: any) => Promise<any>) => Promise<Result>)[] = [
      (handler) => client.request({ scope: 'core', key: one }, handler),
      (handler) => client.job({ scope: 'core', key: one }, (job) => job.finish(handler).then(() => undefined)),
    ]
    const result = await ways[random(2)]!(run).catch((error: unknown) => error as Error)
    const made = await world.effects(one)
    const row = await client.lookup('core', one)
    if (result instanceof Error) {
      if (!script.includes(rollBack)) assert.equal(made, 0, said)
    } else if (result.status < 300) {
      successes++
      assert.deepEqual([row?.state, made], ['completed', script.filter((step) => step === steps[0] || step === steps[1]).length], said)
      assert.equal((await client.request({ scope: 'core', key: one }, () => assert.fail('it ran again'))).replayed, true, said)
    }
  }
  assert.ok(successes > 0, 'some have success')
})

test('all connections have come back', async () => {
  for (const one of world.pools) {
    for (let tries = 0; one.idleCount < one.totalCount && tries < 100; tries++) await sleep(20)
    assert.equal(one.idleCount, one.totalCount)
  }
})
