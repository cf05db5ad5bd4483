/** request(), job() and transaction(), against a server. */
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import type pg from 'pg'
import {
  ClaimLost, ClaimNotFound, Idempotency, InProgress, KeyReused, NotFinished, stepKey, TransactionEnded, type Client, type PoolClientLike, type Response,
} from 'pg-idempotency'
import { MemoryIdempotency } from 'pg-idempotency/memory'
import { key, World } from './support.js'

let world: World
let idem: Idempotency
before(async () => {
  world = await World.make()
  idem = world.client()
})
after(() => world.end())

const effect = (tx: PoolClientLike, what: string) => tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
/** A handler with one effect. */
const makes = (what: string, response: Response = { status: 201, body: what }) => async (tx: PoolClientLike): Promise<Response> => {
  await effect(tx, what)
  return response
}
const options = (one: string, more: object = {}) => ({ scope: 'scope', key: one, ...more })
/** A first request that is under way, in its handler, until `finish` is called. */
const underWay = async (client: Idempotency, one: string) => {
  let finish!: () => void
  const finished = new Promise<void>((resolve) => { finish = resolve })
  let began!: () => void
  const running = new Promise<void>((resolve) => { began = resolve })
  const first = client.request(options(one), async (tx) => { began(); await finished; return makes(one)(tx) })
  await running
  return { first, finish }
}

test('a request takes effect once, and is replayed as it was', async () => {
  const one = key()
  const body = Buffer.from([0, 255, 1])
  const response = { status: 201, headers: { 'Content-Type': 'x/y', Link: ['a', 'b'] }, body }
  const first = await idem.request(options(one, { method: 'POST', path: '/', body }), makes(one, response))
  assert.deepEqual([first.outcome, first.replayed, first.stored, first.status], ['new', false, true, 201])
  const again = await idem.request(options(one, { method: 'POST', path: '/', body }), makes(one))
  assert.deepEqual([again.outcome, again.replayed, again.status, again.headers], ['replay', true, 201, response.headers])
  assert.ok(body.equals(again.body as Buffer))
  await assert.rejects(idem.request(options(one, { method: 'POST', path: '/', body: Buffer.from([0]) }), makes(one)), KeyReused)
  assert.equal(await world.effects(one), 1)
})

test('a body that is a string is compared as JSON, and one with NUL is stored as bytes', async () => {
  const one = key()
  await idem.request(options(one, { method: 'POST', path: '/', body: '{"a": 1, "b": 2}' }), makes(one, { status: 200, body: 'nul\0' }))
  const again = await idem.request(options(one, { method: 'POST', path: '/', body: '{"b":2,"a":1}' }), makes(one))
  assert.ok(Buffer.from('nul\0').equals(again.body as Buffer))
})

test('round trips: none more than the handler\'s own transaction has, and one for a replay', async () => {
  const { idem: counted, proxy, pool } = await world.proxied()
  await pool.query('SELECT 1')
  const one = key()
  await counted.request(options(key()), makes('warm'))
  proxy.roundTrips = 0
  await counted.request(options(one), makes(one))
  // BEGIN and claim; INSERT; complete and COMMIT.
  assert.equal(proxy.roundTrips, 3)
  proxy.roundTrips = 0
  await counted.request(options(one), makes(one))
  assert.equal(proxy.roundTrips, 1, 'the ROLLBACK comes after the answer')
  // Let it come.
  await pool.query('SELECT 1')
})

test('statements are prepared where the process is the connection\'s own, and only there', async () => {
  const prepared = async (client: Idempotency): Promise<number> => {
    let found: { n: number }[] = []
    for (let tries = 0; tries < 2; tries++) {
      await client.request(options(key()), async (tx) => {
        found = (await tx.query<{ n: number }>("SELECT count(*)::int AS n FROM pg_prepared_statements WHERE name LIKE 'idem%'")).rows
        return makes('prepared')(tx)
      })
    }
    return found[0]!.n
  }
  // BEGIN and claim of the second request, complete and COMMIT of the first one.
  const direct = new Idempotency(world.pool({ max: 1 }))
  assert.equal(await prepared(direct), 4)
  assert.equal((await direct.request(options(key()), makes('prepared', { status: 200, body: 'same' }))).body, 'same')
  // As PgBouncer's client, which has another process id than its server.
  const pooled = world.pool({ max: 1 })
  pooled.on('connect', (client) => { (client as unknown as { processID: number }).processID++ })
  assert.equal(await prepared(new Idempotency(pooled)), 0)
})

test('prepared statements that are gone are prepared again', async () => {
  const pool = world.pool({ max: 1 })
  const only = new Idempotency(pool)
  for (let tries = 0; tries < 2; tries++) await only.once('scope', key())
  await pool.query('DISCARD ALL')
  assert.equal(await only.once('scope', key()), true)
  const one = key()
  await pool.query('DEALLOCATE ALL')
  await only.request(options(one), makes(one))
  const other = key()
  let tries = 0
  await only.request(options(other), async (tx) => {
    if (++tries === 1) await tx.query('DEALLOCATE ALL')
    return makes(other)(tx)
  })
  assert.deepEqual([tries, await world.effects(one), await world.effects(other)], [2, 1, 1])
  // One that fails where it is parsed is parsed once more, under the same name.
  for (let again = 0; again < 3; again++) {
    await assert.rejects(only.claim('scope', key(), { requestHash: Buffer.from('x'), ttl: '10000000 years' }))
    await only.claim('scope', key(), { requestHash: Buffer.from('x'), ttl: '1 day' })
  }
})

test('an error rolls back, and a retry runs', async () => {
  const one = key()
  await assert.rejects(idem.request(options(one), async (tx) => { await effect(tx, one); throw new Error('no') }), /^Error: no$/)
  assert.equal(await idem.lookup('scope', one), undefined)
  await idem.request(options(one), makes(one))
  assert.equal(await world.effects(one), 1)
})

test('a response of 5xx, or one that is not final, is not stored', async () => {
  const one = key()
  for (const [status, store] of [[503, undefined], [409, (status: number) => status !== 409]] as const) {
    const first = await idem.request(options(one, { store }), makes(one, { status }))
    assert.deepEqual([first.status, first.stored], [status, false])
  }
  assert.equal((await idem.request(options(one), makes(one))).outcome, 'new')
  assert.equal(await world.effects(one), 1)
})

test('a response that is too large is returned whole, and the record says so', async () => {
  const one = key()
  const first = await idem.request(options(one), makes(one, { status: 200, body: Buffer.alloc(1_048_577) }))
  assert.deepEqual([first.body!.length, first.stored], [1_048_577, false])
  const again = await idem.request(options(one), makes(one))
  assert.equal(again.status, 200)
  assert.equal(JSON.parse(again.body as string).type, 'urn:pg-idempotency:response-not-stored')
  const other = key()
  await idem.request(options(other, { maxResponseSize: 10 }), makes(other, { status: 200, body: 'x'.repeat(11) }))
  assert.match((await idem.request(options(other), makes(other))).body as string, /larger than the 10 bytes/)
  for (const client of [idem, new MemoryIdempotency()] as Client<any>[]) {
    for (const body of ['x'.repeat(10), 'x'.repeat(11)]) {
      const stored = body.length === 10
      for (const last of [false, true]) {
        const wanted = options(key(), { maxResponseSize: 10 })
        const made = await client.job(wanted, async (job) => last ? void await job.finish(() => ({ status: 200, body })) : { status: 200, body })
        assert.deepEqual([made.body, made.stored], [body, stored])
        const replay = await client.job(wanted, () => assert.fail())
        assert.deepEqual([replay.stored, replay.body === body], [true, stored])
      }
      const wanted = options(key(), { maxResponseSize: 10 })
      assert.equal((await client.request(wanted, () => ({ status: 200, body }))).stored, stored)
      assert.equal((await client.request(wanted, () => assert.fail())).replayed, true)
    }
  }
})

test('40001 in the handler: it runs again', async () => {
  const one = key()
  let tries = 0
  await idem.request(options(one), async (tx) => {
    await effect(tx, one)
    if (++tries < 3) await tx.query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
    return { status: 200 }
  })
  assert.equal(tries, 3)
  assert.equal(await world.effects(one), 1)
  await assert.rejects(idem.request(options(key()), async (tx) => {
    await tx.query("DO $$ BEGIN RAISE EXCEPTION 'ever' USING ERRCODE = '40P01'; END $$")
    return { status: 200 }
  }),
    (error: { code?: string }) => error.code === '40P01')
})

test('a handler that swallows an error of the database does not hear of success', async () => {
  const one = key()
  const swallow = async (tx: PoolClientLike): Promise<Response> => {
    await effect(tx, one)
    await tx.query('SELECT 1 / 0').catch(() => undefined)
    return { status: 200 }
  }
  await assert.rejects(idem.request(options(one), swallow), TransactionEnded)
  await assert.rejects(idem.transaction(swallow), TransactionEnded)
  assert.equal(await world.effects(one), 0)
  // With a savepoint, it may.
  await idem.request(options(one), async (tx) => {
    await tx.query('SAVEPOINT before')
    await tx.query('SELECT 1 / 0').catch(() => undefined)
    await tx.query('ROLLBACK TO SAVEPOINT before')
    return makes(one)(tx)
  })
  assert.equal(await world.effects(one), 1)
})

test('a handler cannot end the transaction, nor give the client away', async () => {
  for (const text of ['COMMIT', ' -- first\n/* then */ rollback', 'END', 'abort', 'BEGIN', 'start transaction', "prepare transaction 'x'"]) {
    await assert.rejects(idem.request(options(key()), async (tx) => { await tx.query(text); return { status: 200 } }), TransactionEnded, text)
  }
  await assert.rejects(idem.request(options(key()), (tx) => { tx.release(); return { status: 200 } }), TransactionEnded)
  let kept!: PoolClientLike
  await idem.request(options(key()), (tx) => { kept = tx; return { status: 200 } })
  await assert.rejects(kept.query('SELECT 1'), TransactionEnded, 'the client is somebody else\'s by now')
})

test('a COMMIT that hides in several statements: an error, and the effect is not made again', async () => {
  const one = key()
  await assert.rejects(idem.request(options(one), async (tx) => {
    await tx.query(`INSERT INTO effects (what) VALUES ('${one}'); COMMIT`)
    return { status: 201, body: 'done' }
  }), /committed its transaction/)
  const again = await idem.request(options(one), makes(one))
  assert.deepEqual([again.outcome, again.body], ['replay', 'done'])
  const other = key()
  await assert.rejects(idem.request(options(other), async (tx) => {
    await tx.query(`INSERT INTO effects (what) VALUES ('${other}'); COMMIT; BEGIN; INSERT INTO effects (what) VALUES ('${other}')`)
    return { status: 201, body: 'done' }
  }), /committed its transaction/)
  const { outcome, status, body } = await idem.request(options(other), makes(other))
  assert.deepEqual([outcome, status, body], ['replay', 500, null], 'no success, because the second effect was rolled back')
  const third = key()
  await assert.rejects(idem.request(options(third), async (tx) => {
    await tx.query(`INSERT INTO effects (what) VALUES ('${third}'); ROLLBACK`)
    return { status: 201 }
  }), /rolled its transaction back/)
  assert.equal(await world.effects(one), 1)
  assert.equal(await world.effects(other), 1)
  assert.equal(await world.effects(third), 0)
})

test('what the handler left running cannot write behind COMMIT', async () => {
  await world.sql('CREATE TABLE deferred (id int PRIMARY KEY, parent int REFERENCES deferred DEFERRABLE INITIALLY DEFERRED)')
  const late = key()
  for (const fails of [false, true]) {
    let written: Promise<unknown>[] = []
    const handler = async (tx: PoolClientLike): Promise<Response> => {
      await tx.query('SELECT 1')
      if (fails) await tx.query('INSERT INTO deferred VALUES (1, 2)')
      // In this turn of the loop COMMIT is sent, and in none before the next can it be answered.
      written.push(new Promise((resolve, reject) => { setImmediate(() => { effect(tx, late).then(resolve, reject) }) }))
      written.at(-1)!.catch(() => undefined)
      return { status: 200 }
    }
    for (const call of [
      () => idem.request(options(key()), handler), () => idem.transaction(handler),
      () => idem.job(options(key()), async (job) => { await job.finish(handler) }),
    ]) {
      written = []
      if (fails) await assert.rejects(call(), (error: { code?: string }) => error.code === '23503')
      else await call()
      await assert.rejects(written[0]!, TransactionEnded)
    }
  }
  assert.equal(await world.effects(late), 0)
})

test('a request in the handler of another is refused', async () => {
  await assert.rejects(idem.request(options(key()), () => idem.request(options(key()), makes('x'))), /request\(\) in a handler would take/)
  await assert.rejects(idem.request(options(key()), () => idem.job(options(key()), () => ({ status: 200 }))), /job\(\) in a handler would take/)
  let later!: Promise<unknown>
  await idem.request(options(key()), () => {
    later = sleep(50).then(() => idem.request(options(key()), () => ({ status: 200 })))
    return { status: 200 }
  })
  await later
})

test('a connection lost in the handler: the error, and the pool drops the client', async () => {
  const pool = world.pool({ max: 1 })
  const only = new Idempotency(pool)
  const one = key()
  await assert.rejects(only.request(options(one), async (tx) => {
    const { rows: [{ pid }] } = await tx.query('SELECT pg_backend_pid() AS pid')
    await effect(tx, one)
    await world.sql('SELECT pg_terminate_backend($1)', [pid])
    await sleep(50)
    return makes(one)(tx)
  }))
  assert.equal((await only.request(options(one), makes(one))).outcome, 'new')
  assert.equal(await world.effects(one), 1)
  assert.equal(pool.totalCount, 1)
})

test('a COMMIT whose answer is lost: it is asked what happened', async () => {
  const { idem: through, proxy } = await world.proxied({ maxWaiters: 0 })
  const one = key()
  proxy.cutAfter = 'COMMIT'
  const result = await through.request(options(one), makes(one))
  assert.equal(proxy.cutAfter, undefined, 'it was cut')
  assert.deepEqual([result.outcome, result.status, result.body], ['replay', 201, one])
  // Before it got to the server: the handler runs again.
  const other = key()
  let runs = 0
  proxy.cutBefore = 'COMMIT'
  // The next claim waits for the lost session, even if no duplicate is allowed to wait.
  proxy.lingerMs = 1000
  const second = await through.request(options(other), (tx) => { runs++; return makes(other)(tx) })
  proxy.lingerMs = 0
  assert.deepEqual([second.outcome, runs], ['new', 2])
  assert.equal(await world.effects(one), 1)
  assert.equal(await world.effects(other), 1)
})

test('duplicates get InProgress at once, or wait and get the answer', async () => {
  const one = key()
  const other = world.client()
  const { first, finish } = await underWay(idem, one)
  await assert.rejects(idem.request(options(one), makes(one)), (error) => error instanceof InProgress && error.retryAfter >= 1)
  await assert.rejects(other.request(options(one, { waitMs: 50 }), makes(one)), InProgress)
  // Its lease says little of when it is over.
  for (const client of [idem, new MemoryIdempotency()] as Client<any>[]) {
    for (const [lease, least, most] of [['1 minute', 5, 5], ['3 seconds', 2, 3], ['1400 ms', 1, 1]] as const) {
      const leased = key()
      await client.claim('scope', leased, { lease })
      await assert.rejects(client.job(options(leased), () => assert.fail('it ran')),
        (error) => error instanceof InProgress && error.retryAfter >= least && error.retryAfter <= most, lease)
    }
  }
  const waiting = [idem, idem, other, other].map((client) => client.request(options(one, { wait: '20 seconds' }), makes(one)))
  await sleep(50)
  finish()
  assert.equal((await first).outcome, 'new')
  assert.deepEqual((await Promise.all(waiting)).map((result) => result.outcome), Array(4).fill('replay'))
  assert.equal(await world.effects(one), 1)
})

test('a hundred duplicates that wait leave the pool to others', async () => {
  const one = key()
  const holder = world.client()
  const pool = world.pool({ max: 4 })
  const waiter = new Idempotency(pool, { wait: '30 seconds' })
  const { first, finish } = await underWay(holder, one)
  const others = [key(), key(), key(), key(), key()]
  // Of one key here they wait for each other; of several, two may sleep in the database.
  const waiting = Array.from({ length: 100 }, () => waiter.request(options(one), makes(one)))
  await sleep(50)
  const asked = Date.now()
  await pool.query('SELECT 1')
  for (const another of others) await waiter.request(options(another), makes(another))
  assert.ok(Date.now() - asked < 10_000)
  finish()
  await first
  const outcomes = (await Promise.all(waiting)).map((result) => result.outcome)
  assert.deepEqual(outcomes, Array(100).fill('replay'))
  assert.equal(await world.effects(one), 1)
})

test('a signal ends the waiting, and no connection is lost by it', async () => {
  const one = key()
  const pool = world.pool({ max: 2 })
  const waiter = new Idempotency(pool)
  await idem.claim('scope', one)
  const controller = new AbortController()
  const waiting = waiter.request(options(one, { waitMs: 700, signal: controller.signal }), makes(one))
  await sleep(50)
  const asked = Date.now()
  controller.abort(new Error('enough'))
  await assert.rejects(waiting, /enough/)
  assert.ok(Date.now() - asked < 400, 'at once')
  await waiter.request(options(key()), () => ({ status: 200 }))
  await assert.rejects(waiter.request(options(key(), { signal: AbortSignal.abort(new Error('before')) }), makes('never')), /before/)
  assert.equal(await world.effects('never'), 0)
})

test('a signal ends the waiting in the database, and its connection is free', async () => {
  const one = key()
  const pool = world.pool({ max: 1 })
  const waiter = new Idempotency(pool, { maxWaiters: 1, wait: '5 minutes' })
  const { first, finish } = await underWay(idem, one)
  try {
    for (const call of [
      (signal: AbortSignal) => waiter.request(options(one, { signal }), makes(one)),
      (signal: AbortSignal) => waiter.job(options(one, { signal }), () => ({ status: 200 })),
    ]) {
      const controller = new AbortController()
      const waiting = call(controller.signal)
      for (;;) {
        const [{ n }] = await world.sql("SELECT count(*)::int AS n FROM pg_stat_activity WHERE query LIKE '%idem_claim%' AND wait_event_type = 'Lock'")
        if (n > 0) break
        await sleep(10)
      }
      controller.abort(new Error('enough'))
      await assert.rejects(waiting, /enough/)
      // The first is still running.
      const free = pool.query('SELECT 1').then(() => 'free')
      assert.equal(await Promise.race([free, sleep(20_000, 'held', { ref: false })]), 'free')
    }
  } finally {
    finish()
    await first
  }
  assert.equal((await waiter.request(options(one), makes(one))).outcome, 'replay')
})

test('a wait that statement_timeout or lock_timeout ends is one of which the first is in progress', async () => {
  const one = key()
  const { first, finish } = await underWay(idem, one)
  try {
    for (const setting of ['statement_timeout', 'lock_timeout']) {
      const short = world.client({ wait: '5 minutes' }, { options: `-c ${setting}=200` })
      await assert.rejects(short.request(options(one), makes(one)), InProgress)
      await assert.rejects(short.job(options(one), () => ({ status: 200 })), InProgress)
    }
    // The driver's own leaves the statement to the server, which is to end it, and uses up one connection.
    for (const call of [
      (short: Idempotency) => short.request(options(one), makes(one)), (short: Idempotency) => short.job(options(one), () => ({ status: 200 })),
    ]) {
      const pool = world.pool({ query_timeout: 300 })
      let connections = 0
      pool.on('connect', () => { connections++ })
      await assert.rejects(call(new Idempotency(pool, { wait: '5 minutes' })), InProgress)
      assert.equal(connections, 1)
    }
    for (let tries = 0; ; tries++) {
      const [{ n }] = await world.sql("SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%idem_claim%' AND wait_event_type = 'Lock'")
      if (n === 0) break
      assert.ok(tries < 500, 'it goes on to wait in the server')
      await sleep(20)
    }
  } finally {
    finish()
    await first
  }
})

test('a connection that the server had ended, unseen in the pool: another is taken', async () => {
  const pool = world.pool({ max: 1 })
  const only = new Idempotency(pool)
  /** While this process looks at no socket. */
  const end = async (): Promise<void> => {
    const { rows: [{ pid }] } = await pool.query('SELECT pg_backend_pid() AS pid')
    execFileSync(process.execPath, ['--input-type=module', '-e', `import pg from 'pg'
      const client = new pg.Client(${JSON.stringify({ database: world.database })})
      await client.connect()
      await client.query('SELECT pg_terminate_backend(${pid}, 60000)')
      await client.end()`], { cwd: new URL('../..', import.meta.url) })
  }
  const ways: [string, (one: string) => Promise<unknown>][] = [
    ['request', async (one) => { await end(); await only.request(options(one), makes(one)) }],
    ['transaction', async (one) => { await end(); await only.transaction(makes(one)) }],
    ['job', async (one) => { await end(); await only.job(options(one), (job) => job.finish(makes(one)).then(() => undefined)) }],
    ['last step', (one) => only.job(options(one), async (job) => { await end(); await job.finish(makes(one)) })],
    ['step', (one) => only.job(options(one), async (job) => {
      const value = await job.step('step', async () => { await end(); return 1 })
      await job.finish(makes(one, { status: 200, body: String(value) }))
    })],
  ]
  for (const [name, way] of ways) {
    const one = key()
    await way(one)
    assert.equal(await world.effects(one), 1, name)
  }
})

test('jobs: steps run once over all attempts, and the last one commits with the response', async () => {
  const one = key()
  const calls: string[] = []
  let fails = true
  const run = () => idem.job(options(one, { lease: '30s' }), async (job) => {
    const charge = await job.step('charge', ({ key }) => { calls.push(key); return { id: 'ch_1' } })
    await job.step('mail', () => { calls.push('mail'); if (fails) throw new Error('no mail'); return null })
    return job.finish(async (tx) => makes(one, { status: 200, body: charge.id })(tx)).then(() => undefined)
  })
  await assert.rejects(run(), /no mail/)
  assert.equal((await idem.lookup('scope', one))!.state, 'failed')
  assert.equal((await idem.lookup('scope', one))!.error, 'no mail')
  fails = false
  const result = await run()
  assert.deepEqual([result.outcome, result.body], ['new', 'ch_1'])
  assert.deepEqual(calls, [stepKey('scope', one, 'charge'), 'mail', 'mail'])
  assert.deepEqual((await run()).outcome, 'replay')
  assert.equal(await world.effects(one), 1)
})

test('jobs: a step that returns nothing has run, too', async () => {
  for (const client of [idem, new MemoryIdempotency()] as Client<any>[]) {
    const one = key()
    let mails = 0
    let fails = true
    const run = () => client.job(options(one), async (job) => {
      const nothing: void = await job.step('mail', () => { mails++ })
      assert.equal(nothing, null)
      if (fails) throw new Error('later')
      return { status: 200 }
    })
    await assert.rejects(run(), /later/)
    fails = false
    assert.equal((await run()).outcome, 'new')
    assert.equal(mails, 1)
  }
})

test('jobs: no step begins behind the end of the lease, though no timer has come to tell', async () => {
  for (const client of [idem, new MemoryIdempotency()] as Client<any>[]) {
    let steps = 0
    await assert.rejects(client.job(options(key(), { leaseMs: 200 }), async (job) => {
      for (const until = performance.now() + 300; performance.now() < until;);
      await job.step('charge', () => { steps++; return null })
      return { status: 200 }
    }), ClaimLost)
    assert.equal(steps, 0)
  }
})

test('jobs: heartbeats keep the claim, and its loss aborts', async () => {
  const one = key()
  const result = await idem.job(options(one, { leaseMs: 900 }), async (job) => {
    await sleep(1500)
    await assert.rejects(idem.job(options(one), () => ({ status: 500 })), InProgress)
    assert.equal(job.lost, false)
    return { status: 200 }
  })
  assert.equal(result.status, 200)
  const other = key()
  await assert.rejects(idem.job(options(other, { leaseMs: 300 }), async (job) => {
    await idem.forget('scope', other)
    await new Promise<void>((resolve) => job.signal.addEventListener('abort', () => resolve()))
    assert.equal(job.lost, true)
    await job.step('never', () => { throw new Error('it ran') })
  }), ClaimLost)
})

test('jobs: the end of the lease is noticed, also where no heartbeat gets a connection', async () => {
  const pool = world.pool({ max: 1 })
  const one = key()
  await assert.rejects(new Idempotency(pool).job(options(one, { leaseMs: 600 }), async (job) => {
    const only = await pool.connect()
    await new Promise<void>((resolve) => job.signal.addEventListener('abort', () => resolve()))
    only.release()
    await job.step('never', () => { throw new Error('it ran') })
  }), ClaimLost)
})

test('jobs: a step has a name of its own', async () => {
  const calls: string[] = []
  await assert.rejects(idem.job(options(key()), async (job) => {
    for (const item of ['a', 'b']) await job.step('charge', () => { calls.push(item); return item })
    return { status: 200 }
  }), /charge has already run in this attempt/)
  assert.deepEqual(calls, ['a'])
})

test('jobs: without an end, an error; a response alone is one', async () => {
  const one = key()
  await assert.rejects(idem.job(options(one), () => undefined), NotFinished)
  assert.equal((await idem.job(options(one), ({ attempt }) => ({ status: 200, body: String(attempt) }))).body, '2')
  const other = key()
  const first = await idem.job(options(other), () => ({ status: 503 }))
  assert.equal(first.stored, false)
  assert.equal((await idem.job(options(other), ({ attempt }) => ({ status: 200, body: String(attempt) }))).body, '2')
})

test('jobs: an error in the last step fails the claim, and undoes what it wrote', async () => {
  const one = key()
  await assert.rejects(idem.job(options(one), async (job) => {
    await job.finish(async (tx) => { await effect(tx, one); throw new Error('late') })
  }), /late/)
  assert.equal((await idem.lookup('scope', one))!.state, 'failed')
  assert.equal(await world.effects(one), 0)
})

test("jobs: a change of a step's value changes nothing that is stored", async () => {
  const one = key()
  const seen: unknown[] = []
  const job = (end: () => Promise<Response>) => idem.job(options(one), async (running) => {
    for (let read = 0; read < 2; read++) {
      const value = await running.step(`list ${read}`, () => ({ list: ['a'] }))
      seen.push([...value.list])
      value.list.push('changed')
    }
    return end()
  })
  await assert.rejects(job(() => Promise.reject(new Error('failed'))), /failed/)
  await job(async () => ({ status: 200 }))
  assert.deepEqual(seen, Array(4).fill(['a']))
})

test('jobs: the answer to the last COMMIT is lost', async () => {
  const { idem: through, proxy } = await world.proxied()
  const one = key()
  const result = await through.job(options(one), async (job) => {
    await job.finish((tx) => {
      proxy.cutAfter = 'COMMIT'
      return makes(one)(tx)
    })
  })
  assert.equal(proxy.cutAfter, undefined)
  assert.deepEqual([result.status, result.body], [201, one])
  assert.equal(await world.effects(one), 1)
})

test('jobs: after a lost COMMIT the response of another attempt is not taken for the own one', async () => {
  const { proxy, pool } = await world.proxied()
  const others: ((one: string) => Promise<bigint | null>)[] = [
    // Behind the end of the lease, or of a record that was forgotten, so that it is the first attempt, too.
    async (one) => (await idem.claim('scope', one, { wait: '20 seconds' })).claimToken,
    async (one) => { await idem.forget('scope', one); return (await idem.claim('scope', one)).claimToken },
  ]
  for (const other of others) {
    const one = key()
    let meanwhile: (() => Promise<void>) | undefined
    const through = new Idempotency({ connect: async () => {
      if (meanwhile && proxy.cutBefore === undefined) await meanwhile()
      return pool.connect()
    }, options: pool.options })
    await assert.rejects(through.job(options(one, { leaseMs: 1500 }), async (job) => {
      await job.finish(async (tx) => {
        meanwhile = async () => {
          meanwhile = undefined
          const claimToken = await other(one)
          await idem.complete('scope', one, 200, { body: "another attempt's", claimToken })
        }
        proxy.cutBefore = 'COMMIT'
        return makes(one)(tx)
      })
    }), (error) => error instanceof ClaimLost || error instanceof ClaimNotFound)
    assert.equal(await world.effects(one), 0)
    assert.equal((await idem.lookup('scope', one))!.responseBody, "another attempt's")
  }
})

test('jobs: after a lost COMMIT, an error of the handler for another key is not about the claim', async () => {
  const { idem: through, proxy } = await world.proxied()
  for (const back of ['', 'ROLLBACK TO mine']) {
    const one = key()
    let runs = 0
    await assert.rejects(through.job(options(one), async (job) => {
      await job.finish(async (tx) => {
        await effect(tx, one)
        await tx.query('SAVEPOINT mine')
        if (++runs === 1) proxy.cutBefore = 'COMMIT'
        else await through.on(tx).complete('scope', key(), 200).catch(async (error: unknown) => { if (back) await tx.query(back); throw error })
        return { status: 201 }
      })
    }), ClaimNotFound)
    assert.deepEqual([runs, await world.effects(one), (await idem.lookup('scope', one))!.state], [2, 0, 'started'])
  }
})

test('all connections have come back', async () => {
  for (const pool of world.pools as pg.Pool[]) {
    for (let tries = 0; pool.idleCount < pool.totalCount && tries < 100; tries++) await sleep(20)
    assert.equal(pool.idleCount, pool.totalCount)
  }
})

test('a job whose signal aborts while it claims again keeps the steps of its first attempt', async () => {
  const one = { scope: 'signals', key: key() }
  let charges = 0
  const job = (end: () => Promise<Response>, more = {}) => idem.job({ ...one, ...more }, async (running) => {
    await running.step('charge', () => ++charges)
    return end()
  })
  await assert.rejects(job(() => Promise.reject(new Error('failed'))), /failed/)
  const controller = new AbortController()
  const second = job(() => assert.fail('it ran'), { signal: controller.signal })
  setImmediate(() => controller.abort(new Error('gone')))
  await assert.rejects(second, /gone/)
  let result
  for (let tries = 0; !result && tries < 100; tries++) {
    result = await job(async () => ({ status: 200 })).catch((error: unknown) => { if (!(error instanceof InProgress)) throw error })
    if (!result) await sleep(50)
  }
  assert.deepEqual([result?.status, charges], [200, 1])
})

test('an aborted signal ends no process, and no handler that runs', async () => {
  const aborted = { signal: AbortSignal.abort() }
  await assert.rejects(idem.job({ scope: 'signals', key: key(), ...aborted }, () => assert.fail('it ran')), { name: 'AbortError' })
  const one = { scope: 'signals', key: key(), wait: '10 seconds' }
  let end = (): void => undefined
  let began = (): void => undefined
  const running = new Promise<void>((resolve) => { began = resolve })
  const first = idem.request(one, () => new Promise((resolve) => { end = () => resolve({ status: 200 }); began() }))
  await assert.rejects(idem.request({ ...one, ...aborted }, () => assert.fail('it ran')), { name: 'AbortError' })
  await running
  end()
  await first
  const controller = new AbortController()
  const result = await idem.request({ scope: 'signals', key: key(), signal: controller.signal }, async (tx) => {
    controller.abort()
    await tx.query('SELECT 1')
    return { status: 201 }
  })
  assert.equal(result.status, 201)
})
