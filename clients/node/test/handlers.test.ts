/** Handlers that do not answer, sessions that end under them, second connections, and what no database can hold. */
import assert from 'node:assert/strict'
import { once } from 'node:events'
import type { AddressInfo } from 'node:net'
import { Readable } from 'node:stream'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import express from 'express'
import type pg from 'pg'
import QueryStream from 'pg-query-stream'
import {
  Idempotency, InProgress, TimedOut, TransactionEnded, type Client, type PoolClientLike, type RequestOptions, type Response,
} from 'pg-idempotency'
import { idempotent } from 'pg-idempotency/express'
import { MemoryIdempotency } from 'pg-idempotency/memory'
import { key, Proxy, World } from './support.js'

// It has no types of its own.
const { default: Cursor } = await import('pg-cursor' as string)

let world: World
let idem: Idempotency
let pool: pg.Pool
before(async () => {
  world = await World.make()
  pool = world.pool({ max: 2 })
  idem = new Idempotency(pool)
  afterAMinute = neverAnswered()
  afterAMinute.catch(() => undefined)
  afterHalfAMinute = silentServers()
  afterHalfAMinute.catch(() => undefined)
})
after(() => world.end())

const options = (one: string, more: Partial<RequestOptions> = {}): RequestOptions => ({ scope: 'scope', key: one, ...more })
const effect = (tx: PoolClientLike, what: string) => tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
const makes = (what: string) => async (tx: PoolClientLike): Promise<Response> => {
  await effect(tx, what)
  return { status: 201, body: what }
}
const never = new Promise<never>(() => undefined)
/** The next in the pool gets a connection: as often as it has some. */
const isFree = async (of: pg.Pool) => { for (const client of await Promise.all([of.connect(), of.connect()])) client.release() }

test('a handler that never answers: the session that the server ends gives the slot back', async () => {
  for (const [end, said] of [
    [async (tx: PoolClientLike) => {
      const { rows: [{ pid }] } = await tx.query('SELECT pg_backend_pid() AS pid')
      await world.sql('SELECT pg_terminate_backend($1)', [pid])
    }, /terminating connection due to administrator command/],
    [(tx: PoolClientLike) => tx.query("SET LOCAL idle_in_transaction_session_timeout = '100ms'"), /idle-in-transaction timeout/],
  ] as const) {
    const one = key()
    let late!: Promise<unknown>
    await assert.rejects(idem.request(options(one), async (tx) => {
      late = sleep(1500).then(() => tx.query('SELECT 1'))
      late.catch(() => undefined)
      await effect(tx, one)
      await end(tx)
      return never
    }), said)
    await isFree(pool)
    await assert.rejects(late, TransactionEnded)
    assert.equal((await idem.request(options(one), makes(one))).outcome, 'new')
    assert.equal(await world.effects(one), 1)
  }
  await assert.rejects(idem.transaction(async (tx) => {
    await tx.query("SET LOCAL idle_in_transaction_session_timeout = '100ms'")
    return never
  }), /idle-in-transaction timeout/)
  const job = key()
  await assert.rejects(idem.job(options(job), (task) => task.finish(async (tx) => {
    await tx.query("SET LOCAL idle_in_transaction_session_timeout = '100ms'")
    return never
  }).then(() => undefined)), /idle-in-transaction timeout/)
  assert.equal((await idem.lookup('scope', job))!.state, 'failed')
  await isFree(pool)
})

test('timeout: the transaction is rolled back, and what the handler still does finds it over', async () => {
  const one = key()
  const began = Date.now()
  let late!: Promise<unknown>
  await assert.rejects(idem.request(options(one, { timeoutMs: 200 }), async (tx) => {
    late = sleep(1500).then(() => effect(tx, one))
    late.catch(() => undefined)
    await effect(tx, one)
    return never
  }), (error) => error instanceof TimedOut && /longer than its timeout of 200 ms/.test(error.message))
  assert.ok(Date.now() - began >= 190)
  assert.equal(await idem.lookup('scope', one), undefined)
  await assert.rejects(late, TransactionEnded)
  await isFree(pool)
  const patient = new Idempotency(pool, { timeout: '20 seconds' })
  assert.equal((await patient.request(options(one), makes(one))).outcome, 'new')
  assert.equal(await world.effects(one), 1)
  await assert.rejects(patient.transaction(() => never, { timeoutMs: 100 }), TimedOut)
})

/** Each connection comes back, perhaps a moment after the answer. */
async function areFree(pool: pg.Pool): Promise<void> {
  for (let tries = 0; pool.idleCount < pool.totalCount && tries < 250; tries++) await sleep(20)
  assert.equal(pool.idleCount, pool.totalCount, 'each connection has come back')
}

/** Begun with the file, and looked at behind its other tests: it takes a minute. */
let afterAMinute: Promise<void>
async function neverAnswered(): Promise<void> {
  const own = world.pool({ max: 8 })
  const began = performance.now()
  const clients = [new Idempotency(own), new MemoryIdempotency()] as Client<any>[]
  const app = express()
  app.post('/', idempotent(clients[0]!, { scope: () => 'scope' })(() => undefined))
  const server = app.listen(0, '127.0.0.1')
  const asked = once(server, 'listening').then(() => fetch(`http://127.0.0.1:${(server.address() as AddressInfo).port}/`,
    { method: 'POST', headers: { 'Idempotency-Key': key() } }))
  await Promise.all(clients.flatMap((client) => {
    const job = { ended: false }
    const over = new AbortController()
    const long = client.job(options(key()), () => new Promise((resolve) => over.signal.addEventListener('abort', () => resolve({ status: 204 }))))
      .finally(() => { job.ended = true })
    const patient = client === clients[0] ? new Idempotency(own, { timeout: null }) : new MemoryIdempotency({ timeout: null })
    let waited = false
    const none = patient.request(options(key()), () => new Promise((resolve) => over.signal.addEventListener('abort', () => {
      waited = true
      resolve({ status: 204 })
    })))
    const bounded = [
      client.request(options(key()), () => never), client.transaction(() => never),
      client.job(options(key()), async (made) => { await made.finish(() => never) }),
    ]
    return [Promise.all(bounded.map((one) => assert.rejects(one, TimedOut))).then(async () => {
      assert.ok(performance.now() - began >= 59_000)
      assert.ok(!job.ended && !waited, 'what holds none, or is told to have none, has none')
      over.abort()
      assert.deepEqual([(await none).status, (await long).status], [204, 204])
    })]
  }))
  const { status } = await asked
  server.close()
  assert.equal(status, 503)
  await areFree(own)
}

/** Begun with the file, too: the server has half a minute for each answer. */
let afterHalfAMinute: Promise<void>
async function silentServers(): Promise<void> {
  type Case = (through: Idempotency, one: string, mute: (where: 'cutAfter' | 'muteBefore' | 'muteAfter' | 'muteAfterCut', what: string) => void) => Promise<void>
  const cases: Record<string, Case> = {
    'COMMIT is done, and not answered': async (through, one, mute) => {
      mute('muteAfter', 'COMMIT')
      const result = await through.request(options(one), makes(one))
      assert.deepEqual([result.outcome, result.body], ['replay', one])
    },
    'COMMIT does not arrive': async (through, one, mute) => {
      mute('muteBefore', 'COMMIT')
      let runs = 0
      const result = await through.request(options(one), (tx) => { runs++; return makes(one)(tx) })
      assert.deepEqual([result.outcome, runs], ['new', 2])
    },
    'the last COMMIT of a job': async (through, one, mute) => {
      const result = await through.job(options(one), async (job) => {
        await job.finish((tx) => { mute('muteAfter', 'COMMIT'); return makes(one)(tx) })
      })
      assert.deepEqual([result.outcome, result.body], ['new', one])
    },
    ...Object.fromEntries(['idem_complete', 'idem_lookup'].map((what) => [`${what}, whether the last COMMIT of a job is done`, (async (through, one, mute) => {
      let runs = 0
      const result = await through.job(options(one), async (job) => {
        await job.finish((tx) => { runs++; mute('muteAfterCut', what); mute('cutAfter', 'COMMIT'); return makes(one)(tx) })
      })
      assert.deepEqual([result.outcome, result.body, runs], ['new', one, 1])
    }) satisfies Case])),
    'a claim': async (through, one, mute) => {
      mute('muteBefore', 'idem_claim')
      await assert.rejects(through.request(options(one), () => assert.fail('it ran')), TimedOut)
      await idem.transaction((tx) => effect(tx, one))
    },
    'a claim that waits': async (through, one, mute) => {
      await idem.claim('scope', one, { lease: '5 minutes' })
      mute('muteBefore', 'idem_claim')
      await assert.rejects(through.request(options(one, { waitMs: 1000 }), () => assert.fail('it ran')), InProgress)
      await idem.transaction((tx) => effect(tx, one))
    },
    'a checkpoint': async (through, one, mute) => {
      await through.job(options(one), async (job) => {
        assert.equal(await job.step('a', () => { mute('muteBefore', 'idem_checkpoint'); return 1 }), 1)
        await job.finish(makes(one))
      })
    },
  }
  await Promise.all(Object.entries(cases).map(async ([name, run]) => {
    const proxy = await Proxy.start()
    const own = world.pool({ host: '127.0.0.1', port: proxy.port, max: 2 })
    const through = new Idempotency(own)
    await own.query('SELECT 1')
    const one = key()
    const began = performance.now()
    try {
      await run(through, one, (where, what) => { proxy[where] = what })
    } catch (cause) {
      throw new Error(name, { cause })
    }
    const took = performance.now() - began
    assert.ok(took >= 29_000 && took < 90_000, `${name}: after half a minute, and not ${took} ms`)
    assert.equal(await world.effects(one), 1, name)
    await isFree(own)
    await proxy.end()
  }))
}

test('timeout: a statement that is under way is cancelled, with its locks', async () => {
  const one = key()
  const slow = "SELECT pg_sleep(60), 'nodem'"
  const began = Date.now()
  await assert.rejects(idem.request(options(one, { timeoutMs: 300 }), async (tx) => {
    await effect(tx, one)
    await tx.query(slow)
    return { status: 200 }
  }), TimedOut)
  assert.ok(Date.now() - began < 30_000)
  await isFree(pool)
  for (let tries = 0; ; tries++) {
    const [{ n }] = await world.sql('SELECT count(*)::int AS n FROM pg_stat_activity WHERE query = $1', [slow])
    if (n === 0) break
    assert.ok(tries < 500, 'the server goes on with it')
    await sleep(20)
  }
  assert.equal((await idem.request(options(one, { wait: '20 seconds' }), makes(one))).outcome, 'new')
  assert.equal(await world.effects(one), 1)
})

test('timeout: of all tries together', async () => {
  let tries = 0
  await assert.rejects(idem.request(options(key(), { timeoutMs: 400 }), async (tx) => {
    tries++
    await sleep(150)
    await tx.query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
    return { status: 200 }
  }), TimedOut)
  assert.ok(tries >= 1 && tries <= 3, `${tries} tries`)
})

test('timeout: a job is failed, its signal is aborted, and a last step in time is kept', async () => {
  const one = key()
  let reason: unknown
  await assert.rejects(idem.job(options(one, { timeoutMs: 200 }), (job) => {
    job.signal.addEventListener('abort', () => { reason = job.signal.reason })
    return never
  }), TimedOut)
  assert.ok(reason instanceof TimedOut)
  const found = await idem.lookup('scope', one)
  assert.deepEqual([found!.state, found!.error], ['failed', 'the handler took longer than its timeout of 200 ms'])
  const second = await idem.job(options(one, { timeoutMs: 5000 }), async (job) => {
    await job.finish(makes(one))
    return never
  })
  assert.deepEqual([second.status, second.stored], [201, true])
  assert.equal(await world.effects(one), 1)
  const third = key()
  await assert.rejects(idem.job(options(third, { timeoutMs: 200 }), (job) => job.finish(async (tx) => { await effect(tx, third); return never }).then(() => undefined)), TimedOut)
  assert.equal((await idem.lookup('scope', third))!.state, 'failed')
  assert.equal(await world.effects(third), 0)
  await isFree(pool)
})

test('timeout, in memory', async () => {
  const memory = new MemoryIdempotency({ timeoutMs: 100 })
  const one = key()
  let undone = 0
  await assert.rejects(memory.request(options(one), (tx) => { tx.onRollback(() => undone++); return never }), TimedOut)
  assert.equal(undone, 1)
  await assert.rejects(memory.job(options(one), () => never), TimedOut)
  assert.equal((await memory.request(options(one), () => ({ status: 200 }))).status, 200)
  await assert.rejects(memory.transaction(() => never), TimedOut)
})

test('a second connection of the pool inside of a handler is refused, and only there', async () => {
  const memory = new MemoryIdempotency()
  const other = world.client()
  const clients: [Client<any>, (() => unknown)[]][] = [
    [idem, [
      () => idem.once('scope', key()), () => idem.requestHash('POST', '/', ''), () => idem.metrics(),
      () => idem.on(pool).once('scope', key()), () => new Idempotency(pool).publish('topic', 1),
      () => idem.transaction(() => 1), () => idem.request(options(key()), makes('nested')), () => idem.job(options(key()), () => ({ status: 200 })),
      // By way of another pool's handler.
      () => other.request(options(key()), async () => { await idem.once('scope', key()); return { status: 200 } }),
    ]],
    [memory, [() => memory.once('scope', key()), () => memory.request(options(key()), () => ({ status: 200 })), () => memory.transaction(() => 1)]],
  ]
  for (const [client, calls] of clients) {
    for (const call of calls) {
      const refused = (error: Error): boolean => /in a handler would take a second connection of the pool.*; use .*tx/.test(error.message)
      await assert.rejects(client.request(options(key()), async () => { await call(); return { status: 200 } }), refused, String(call))
      await assert.rejects(client.transaction(async () => { await call() }), refused, String(call))
      await assert.rejects(client.job(options(key()), async (job) => { await job.finish(async () => { await call(); return { status: 200 } }) }), refused)
    }
    // Of a job only the last step holds a connection.
    await client.job(options(key()), async (job) => {
      await job.step('token', async () => client.once('scope', key()))
      return { status: 200 }
    })
    // Work that a handler has started can continue after the handler's end.
    let later!: Promise<unknown>
    await client.request(options(key()), () => { later = sleep(50).then(() => client.once('scope', key())); return { status: 200 } })
    assert.equal(await later, true)
  }
  // Another pool is no deadlock, and neither is tx.
  await idem.request(options(key()), async (tx) => {
    await other.once('scope', key())
    await idem.on(tx).once('scope', key())
    return { status: 200 }
  })
})

test('those that sleep in duplicates are counted over all clients of a pool', async () => {
  const narrow = world.pool({ max: 3 })
  const clients = [1, 2, 3].map(() => new Idempotency(narrow, { maxWaiters: 1, waitMs: 1500 }))
  const keys = [key(), key(), key()]
  for (const one of keys) await idem.claim('scope', one, { lease: '1 minute' })
  const waiting = clients.map((client, at) => client.request(options(keys[at]!), makes('waited')))
  const began = Date.now()
  await assert.rejects(Promise.any(waiting), AggregateError)
  const refused = await Promise.allSettled(waiting)
  assert.ok(refused.every((one) => one.status === 'rejected' && one.reason instanceof InProgress))
  assert.ok(Date.now() - began >= 1000, 'one has waited')
  // The others got their answers at once meanwhile.
  const again = clients.map((client, at) => client.request(options(keys[at]!), makes('waited')).catch(() => performance.now()))
  const ends = (await Promise.all(again) as number[]).sort((a, b) => a - b)
  assert.ok(ends[2]! - ends[1]! > 500, `two were told at once: ${ends}`)
  for (const one of keys) await idem.forget('scope', one)
})

test('a step whose value is not JSON: an error that names it, and nothing is stored', async () => {
  const circle: { self?: unknown } = {}
  circle.self = circle
  for (const memory of [false, true]) {
    const client: Client<any> = memory ? new MemoryIdempotency() : idem
    for (const [value, said] of [
      [1n, /the step odd returned a value that JSON cannot represent: a bigint/], [() => 1, /a function/], [circle, /self is part of itself/],
      [{ a: [1, { b: 2n }] }, /a\[1\]\.b is a bigint/], [NaN, /NaN/], [[undefined], /\[0\] is undefined/], [new Map(), /a Map/], [{ at: Symbol('x') }, /at is a symbol/],
    ] as [unknown, RegExp][]) {
      const one = key()
      await assert.rejects(client.job(options(one), (job) => job.step('odd', () => value as never)), (error: Error) => said.test(error.message) && /the step odd/.test(error.message), String(said))
      const found = await client.lookup('scope', one)
      assert.deepEqual([found!.state, found!.recoveryPoint, found!.recoveryState], ['failed', null, null])
    }
    const fine = await client.job(options(key()), async (job) => {
      const twice = { n: 1 }
      const value = await job.step('fine', () => ({ a: undefined, at: new Date(0), list: [twice, twice], text: 'ž\u2028' }) as never)
      return { status: 200, body: JSON.stringify(value) }
    })
    assert.equal(fine.body, JSON.stringify({ at: '1970-01-01T00:00:00.000Z', list: [{ n: 1 }, { n: 1 }], text: 'ž\u2028' }))
  }
})

test('a document that JSON cannot represent: an error that names the place, and nothing is sent', async () => {
  const circle: { self?: unknown } = {}
  circle.self = [circle]
  for (const client of [idem, new MemoryIdempotency()] as Client<any>[]) {
    for (const [value, said] of [
      [undefined, /undefined; use null/], [NaN, /NaN/], [{ a: [1, { b: Infinity }] }, /a\[1\]\.b is Infinity/], [new Map([[1, 2]]), /a Map/],
      [{ at: new Set() }, /at is a Set/], [{ at: /x/ }, /at is a RegExp/], [{ at: new Error('x') }, /at is a Error/], [{ at: new Date(NaN) }, /at is an invalid Date/],
      // eslint-disable-next-line no-sparse-arrays -- the hole is what is refused
      [{ at: new Uint8Array(2) }, /at is a Uint8Array/], [[, 1], /\[0\] is undefined/], [circle, /self\[0\] is part of itself/], [{ at: 1n }, /at is a bigint/],
      [{ at: new Number(NaN) }, /at is NaN/],
    ] as [any, RegExp][]) {
      const one = key()
      for (const [name, call] of [
        ['payload', () => client.publish('odd', value)], ['payloads\\[1\\]', () => client.publishMany(['odd', 'odd'], [1, value])],
        ['recoveryState', () => client.checkpoint('scope', one, 'p', { recoveryState: value })],
        ['headers', () => client.publish('odd', 1, { headers: value })], ['request', () => client.run('scope', one, 'place(jsonb)', value)],
      ] as [string, () => Promise<unknown>][]) {
        // Left out, it has a default.
        if (value === undefined && ['recoveryState', 'headers'].includes(name)) continue
        await assert.rejects(call(), (error: Error) => error instanceof TypeError && said.test(error.message) &&
          new RegExp(`^${name} contains a value that JSON cannot represent: `).test(error.message), `${name} ${said}`)
      }
    }
    assert.deepEqual(await client.outboxTake({ topics: ['odd'] }), [])
    class Money { constructor(readonly cents: number) {} }
    await client.publish('fine', { at: new Date(0), money: new Money(7), gone: undefined, bare: Object.create(null), boxed: new String('x') } as never)
    const [message] = await client.outboxTake({ topics: ['fine'] })
    assert.deepEqual(message!.payload, { at: '1970-01-01T00:00:00.000Z', money: { cents: 7 }, bare: {}, boxed: 'x' })
  }
})

test('an invalid body, invalid headers or an invalid scope: a TypeError before any call', async () => {
  const circle: { self?: unknown } = {}
  circle.self = circle
  for (const client of [idem, new MemoryIdempotency()] as Client<any>[]) {
    for (const body of [7, 0, new Map(), Readable.from(['x']), circle, [], true] as any[]) {
      const one = key()
      await assert.rejects(client.request(options(one), () => ({ status: 200, body })), /^TypeError: the handler returned a body that is not a string or a Buffer, but a/)
      await assert.rejects(client.job(options(one), () => ({ status: 200, body })), /^TypeError: the job returned a body/)
      await assert.rejects(client.job(options(one), async (job) => { await job.finish(() => ({ status: 200, body })) }), /^TypeError: the last step returned a body/)
      await assert.rejects(client.request(options(key(), { method: 'POST', path: '/', body }), () => assert.fail('it ran')),
        /^TypeError: the body of the request must be a string or a Buffer, not a/)
      await assert.rejects(client.request(options(key(), { requestHash: body }), () => assert.fail('it ran')), /^TypeError: requestHash must be a Buffer/)
    }
    for (const headers of [new Map([['a', 'b']]), new Headers({ a: 'b' }), [['a', 'b']], 'a: b', 7] as any[]) {
      await assert.rejects(client.request(options(key()), () => ({ status: 200, headers })), /^TypeError: the headers that the handler returned must be an object of names/)
    }
    for (const scope of [undefined, null, '', 7] as any[]) {
      await assert.rejects(client.request({ scope, key: key() }, () => assert.fail('it ran')), /^TypeError: scope must be a string, the user or tenant/)
      await assert.rejects(client.job({ scope, key: key() }, () => assert.fail('it ran')), /^TypeError: scope must be a string, the user or tenant/)
    }
  }
})

test('a header that could not be sent again is refused before COMMIT', async () => {
  for (const client of [idem, new MemoryIdempotency()] as Client<any>[]) {
    for (const headers of [{ Location: '/a\r\nSet-Cookie: b=1' }, { Location: ['/a', '/b\n'] }, { Location: 'a\0' }, { 'Bad name': 'a' }, { Location: '/ž' }, { Location: {} as never }]) {
      const one = key()
      await assert.rejects(client.request(options(one), () => ({ status: 200, headers })), /headers: .*(Location|Bad name)/)
      assert.equal(await client.lookup('scope', one), undefined)
    }
    const one = key()
    for (let times = 0; times < 2; times++) {
      assert.deepEqual((await client.request(options(one), () => ({ status: 200, headers: { 'X-Tab': 'a\tb', 'X-Latin': 'é' } }))).headers, { 'X-Tab': 'a\tb', 'X-Latin': 'é' })
    }
  }
})

for (const encoding of ['LATIN1', 'SQL_ASCII', 'EUC_JP']) {
  test(`a database in ${encoding}: what is stored comes back byte for byte`, async () => {
    const elsewhere = await World.make('public', encoding)
    try {
      const client = elsewhere.client()
      const hash = await client.requestHash('POST', '/a', Buffer.from('ž'))
      for (const body of ['plain', 'é', 'žluť ☃ 😀', '日本', '\u0000 ž', Buffer.from([0xff, 0, 0xc3])]) {
        const one = key()
        const identity = { method: 'POST', path: '/a', body: Buffer.from('ž') }
        const first = await client.request(options(one, identity), () => ({ status: 200, headers: { 'X-A': 'é' }, body }))
        const again = await client.request(options(one, identity), () => ({ status: 500 }))
        assert.deepEqual([again.outcome, again.headers], ['replay', { 'X-A': 'é' }])
        assert.ok(Buffer.from(again.body!).equals(Buffer.from(first.body!)), String(body))
        assert.ok((await client.lookup('scope', one))!.requestHash!.equals(hash))
      }
      const one = key()
      const run = (fails: boolean) => client.job(options(one), async (job) => {
        const value = await job.step('žluť', () => ({ 'ž☃': ['é', '😀'] }))
        if (fails) throw new Error('žádný ☃')
        await job.finish(() => ({ status: 200, body: JSON.stringify(value) }))
      })
      await assert.rejects(run(true), /žádný/)
      const failed = await client.lookup('scope', one)
      assert.deepEqual([failed!.state, failed!.error], ['failed', '\\u{17e}\\u{e1}dn\\u{fd} \\u{2603}'])
      assert.equal((await run(false)).body, '{"ž☃":["é","😀"]}')
      assert.ok(Buffer.from((await run(false)).body!).equals(Buffer.from('{"ž☃":["é","😀"]}')))
    } finally {
      await elsewhere.end()
    }
  })
}

test('a cursor or a stream that is not read to its end: no later statement waits for it, and the handler runs once', async () => {
  const rows = 'SELECT generate_series(1, 1000)'
  const leaves: Record<string, (tx: pg.PoolClient) => Promise<unknown>> = {
    cursor: (tx) => tx.query(new Cursor(rows)).read(3),
    stream: (tx) => once(tx.query(new QueryStream(rows, [], { batchSize: 2 })), 'readable'),
    'cursor that waits for another statement': async (tx) => {
      tx.query('SELECT pg_sleep(0.1)').catch(() => undefined)
      tx.query(new Cursor(rows))
    },
  }
  for (const [what, leave] of Object.entries(leaves)) {
    const one = key()
    // The server may still have to notice that the connection of the last request was closed.
    const waiting = { ...options(one), wait: '20 seconds' }
    let runs = 0
    const began = performance.now()
    const leaving = (after: () => Response) => async (tx: pg.PoolClient): Promise<Response> => {
      runs++
      await effect(tx, one)
      await leave(tx)
      return after()
    }
    await assert.rejects(idem.request(waiting, leaving(() => ({ status: 201 }))), { name: 'TransactionEnded', message: /cursor or a stream/ }, what)
    await assert.rejects(idem.request(waiting, leaving(() => { throw new Error('no') })), /^Error: no$/, what)
    await assert.rejects(idem.job(waiting, (job) => job.finish(leaving(() => ({ status: 201 }))).then(() => undefined)), TransactionEnded, what)
    assert.ok(performance.now() - began < 25_000, `${what}: not the time limit of the server's answer`)
    assert.deepEqual([runs, await world.effects(one)], [3, 0], what)
    await isFree(pool)
  }
  const reads: Record<string, (tx: pg.PoolClient) => Promise<unknown>> = {
    closed: async (tx) => {
      const cursor = tx.query(new Cursor(rows))
      await cursor.read(3)
      void cursor.close()
    },
    broken: async (tx) => { for await (const _ of tx.query(new QueryStream(rows))) break },
    whole: async (tx) => { for await (const _ of tx.query(new QueryStream(rows))) continue },
  }
  for (const [what, read] of Object.entries(reads)) {
    const one = key()
    const run = async (tx: pg.PoolClient): Promise<Response> => {
      await read(tx)
      return makes(one)(tx)
    }
    assert.equal((await idem.request(options(one), run)).status, 201, what)
    assert.equal(await world.effects(one), 1, what)
  }
  let kept!: pg.PoolClient
  await idem.request(options(key()), (tx) => { kept = tx; return { status: 200 } })
  assert.throws(() => kept.query(new Cursor(rows)), TransactionEnded)
})

test('a server that goes silent in mid-request holds neither the request nor the connection', () => afterHalfAMinute)

test('timeout: a handler that never answers holds its connection for a minute, unless it is told otherwise', () => afterAMinute)

test('all connections have come back', async () => {
  for (const one of world.pools) await areFree(one)
})

test('handlers that start each other after their end do not stay in memory', async () => {
  setFlagsFromString('--expose-gc')
  const gc = runInNewContext('gc') as () => void
  const pools: WeakRef<object>[] = []
  const alive = await new Promise<number>((resolve, reject) => {
    const run = (left: number): void => {
      const client = { query: async ({ text }: { text: string }) => ({ command: text, rows: [] }), release() {}, on() {}, removeListener() {} }
      const pool = { connect: async () => client }
      pools.push(new WeakRef(pool))
      new Idempotency(pool).transaction(async () => {
        if (left > 0) return void setImmediate(run, left - 1)
        await sleep(50)
        gc()
        resolve(pools.filter((one) => one.deref()).length)
      }).catch(reject)
    }
    run(30)
  })
  assert.ok(alive < 10, `${alive} of 31`)
})
