/** Tests that need no server. */
import assert from 'node:assert/strict'
import { EventEmitter } from 'node:events'
import { readFile } from 'node:fs/promises'
import { createRequire } from 'node:module'
import { createServer, type AddressInfo } from 'node:net'
import { test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { drizzle } from 'drizzle-orm/node-postgres'
import { withReplicas } from 'drizzle-orm/pg-core'
import pg from 'pg'
import {
  asIdempotencyError, ClaimLost, Idempotency, IdempotencyError, InProgress, KeyInvalid, KeyReused, newKey, RateLimited, sqlstateOf, stepKey, TimedOut,
  TransactionEnded, type Client, type PoolLike,
} from 'pg-idempotency'
import { drizzlePool } from 'pg-idempotency/drizzle'
import { allowedHeaders, parseKey, serve } from 'pg-idempotency/http'
import { MemoryIdempotency } from 'pg-idempotency/memory'
import { prismaPool } from 'pg-idempotency/prisma'
import { sequelizePool } from 'pg-idempotency/sequelize'
import { typeormPool } from 'pg-idempotency/typeorm'

test('a new key is a UUIDv7, and later ones are greater', () => {
  const keys = Array.from({ length: 10_000 }, newKey)
  for (const key of keys) assert.match(key, /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/)
  assert.deepEqual([...keys].sort(), keys)
  assert.equal(new Set(keys).size, keys.length)
  const made = Number.parseInt(keys[0]!.replaceAll('-', '').slice(0, 12), 16)
  assert.ok(Math.abs(made - Date.now()) < 60_000, 'it begins with the time')
})

test('the key of a step differs by scope, key and step, wherever one ends', () => {
  const keys = [stepKey('a', 'bc', 'd'), stepKey('ab', 'c', 'd'), stepKey('a', 'b', 'cd'), stepKey('a', 'bc', 'e')]
  assert.equal(new Set(keys).size, 4)
  assert.match(keys[0]!, /^[0-9a-f]{32}$/)
  assert.equal(stepKey('a', 'bc', 'd'), keys[0])
})

test('errors are found where a query builder has wrapped them', () => {
  const driver = Object.assign(new Error('claim lost'), { code: 'ID003' })
  for (const wrapped of [driver, new Error('query failed', { cause: driver }), { original: driver }, { parent: { cause: driver } }]) {
    assert.ok(asIdempotencyError(wrapped) instanceof ClaimLost)
    assert.equal(asIdempotencyError(wrapped)!.sqlstate, 'ID003')
    assert.equal(sqlstateOf(wrapped), 'ID003')
  }
  const limited = asIdempotencyError({ code: 'ID002', message: 'too many', hint: 'Retry in 37 seconds.' })
  assert.ok(limited instanceof RateLimited)
  assert.equal(limited.retryAfter, 37)
  assert.equal(asIdempotencyError(Object.assign(new Error(), { code: 'ECONNRESET' })), undefined)
  assert.equal(sqlstateOf(Object.assign(new Error(), { code: 'EPIPE' })), undefined, 'an error code of the system is not a SQLSTATE')
  const round: { cause?: unknown } = {}
  round.cause = round
  assert.equal(asIdempotencyError(round), undefined)
  assert.ok(new KeyInvalid('x') instanceof IdempotencyError)
})

test('Idempotency-Key: a quoted string, whose parameters are ignored, or one without quotes', () => {
  for (const [line, key] of [
    ['"8e03978e-40d5-43dd"', '8e03978e-40d5-43dd'], ['8e03978e-40d5-43dd', '8e03978e-40d5-43dd'],
    ['"with \\"quotes\\" and \\\\"', 'with "quotes" and \\'], ['  "blanks around"  ', 'blanks around'], ['""', ''],
    ['"a";p=1', 'a'], ['"a";p', 'a'], ['"a"; p="x;\\"y"; q=?1;r=:YQ==:;s=-1.5;t=tok/en', 'a'], [' bare-token ', 'bare-token'], ['a/b', 'a/b'],
    ['', undefined], ['"', undefined], ['"open', undefined], ['shut"', undefined], ['"a", "b"', undefined],
    ['"a" "b"', undefined], ['"bad \\escape"', undefined], ['"ends in \\"', undefined], ['"\u00e9"', undefined], ['"tab\there"', undefined],
    ['"a";', undefined], ['"a";P=1', undefined], ['"a";p="open', undefined], ['"a" ;p=1', undefined], ['a;p=1', undefined], ['two words', undefined],
  ] as const) assert.equal(parseKey(line), key, line)
  assert.equal(parseKey('8e03978e-40d5-43dd', true), undefined, 'strict takes none without quotes')
})

test('of the headers only the listed are kept, and Set-Cookie never', () => {
  assert.deepEqual(allowedHeaders([['Content-Type', 'text/plain'], ['LINK', ['a', 'b']], ['Set-Cookie', 'x=1'], ['X-Trace', '1']],
    ['content-type', 'Link', 'Set-Cookie']), { 'Content-Type': 'text/plain', LINK: ['a', 'b'] })
})

test('CommonJS loads each part with require()', () => {
  const require = createRequire(import.meta.url)
  assert.equal(require('pg-idempotency').Idempotency.name, 'Idempotency')
  assert.equal(typeof require('pg-idempotency/express').idempotent, 'function')
  assert.equal(typeof require('pg-idempotency/fastify').default, 'function')
  assert.equal(typeof require('pg-idempotency/http').serve, 'function')
  assert.equal(typeof require('pg-idempotency/memory').MemoryIdempotency, 'function')
})

test('the client takes a pool', () => {
  for (const pool of [undefined, null, 'pool', {}, Promise.resolve(), new pg.Client()] as any[]) {
    assert.throws(() => new Idempotency(pool), /takes a pg\.Pool/)
  }
})

test('the types need no optional package', async () => {
  const dist = new URL('../../dist/', import.meta.url)
  for (const name of ['index', 'client', 'functions', 'postgres', 'observe', 'http']) {
    const types = await readFile(new URL(`${name}.d.ts`, dist), 'utf8')
    assert.doesNotMatch(types, /(?:from|import\() ?'(?!\.|node:|pg')/, name)
  }
})

test('if the database is not available, the guard answers 503, and passes on other errors', async (t) => {
  t.mock.method(console, 'error', () => undefined)
  const failed = (code: string): Error => Object.assign(new Error(code), { code })
  const double = (code: string): any => Object.assign(new MemoryIdempotency(), { request: () => Promise.reject(failed(code)) })
  const answered = (client: any, respond = async () => ({ status: 200 })): Promise<unknown> =>
    serve(client, { method: 'POST', path: '/', key: newKey(), body: Buffer.alloc(0), scope: () => 'ann' }, { scope: () => 'ann' }, 'request', respond).then(
      ({ status, headers, body }) => [status, headers['Retry-After'], JSON.parse(String(body)).type], (error: Error) => error.message)
  const unavailable = [503, '1', 'urn:pg-idempotency:unavailable']
  const unreachable = new pg.Pool({ host: '127.0.0.1', port: 1 })
  assert.deepEqual(await answered(new Idempotency(unreachable)), unavailable)
  for (const code of ['25006', '53100', '53200', '53300', '57P01', '57P03', '40001', '40P01']) assert.deepEqual(await answered(double(code)), unavailable, code)
  for (const code of ['42501', '3D000', '28P01', 'ECONNREFUSED']) assert.equal(await answered(double(code)), code)
  let tries = 0
  const raise = (code: string) => async (): Promise<never> => { tries++; throw failed(code) }
  assert.deepEqual(await answered(new MemoryIdempotency(), raise('40001')), unavailable)
  assert.equal(tries, 5)
  for (const code of ['25006', '53100', 'ECONNREFUSED']) assert.equal(await answered(new MemoryIdempotency(), raise(code)), code)
  await unreachable.end()
})

test('a member that no response has is refused, and nothing is stored; one that is undefined is not, nor is the result of another client', async () => {
  const double = new MemoryIdempotency()
  const other = await new MemoryIdempotency().request({ scope: 'ann', key: newKey() }, () => ({ status: 201, body: 'x' }))
  for (const response of [other, { status: 201, body: 'x', data: undefined }]) {
    const { status, body, outcome } = await double.request({ scope: 'ann', key: newKey() }, () => response)
    assert.deepEqual([status, body, outcome], [201, 'x', 'new'])
  }
  for (const member of ['data', 'header', 'statusCode']) {
    const options = { scope: 'ann', key: newKey() }
    await assert.rejects(double.request(options, () => ({ status: 201, [member]: 'x' })),
      new RegExp(`^TypeError: the handler returned a response with the member ${member}; its members are status, headers and body$`))
    assert.equal(await double.lookup('ann', options.key), undefined)
  }
})

const fakeOrm = (startTransaction: () => Promise<void>, ended: string[] = []): Idempotency => new Idempotency(typeormPool({
  options: { type: 'postgres' },
  createQueryRunner: () => ({
    startTransaction, manager: {}, connect: async () => new pg.Client(),
    rollbackTransaction: async () => { ended.push('rolled back') }, release: async () => { ended.push('released') },
  }),
} as never) as PoolLike)
const serveOn = (client: Client<any>, kind: 'request' | 'job' = 'request', respond: () => Promise<{ status: number }> = async () => ({ status: 200 })) =>
  serve(client, { method: 'POST', path: '/', key: newKey(), body: Buffer.alloc(0), scope: () => 'a' }, { scope: () => 'a' }, kind, respond)

test("if an ORM's pool gives the connection after the limit, it gets it back", async (context) => {
  context.mock.timers.enable({ apis: ['setTimeout'] })
  const ended: string[] = []
  let begin = (): void => undefined
  const idem = fakeOrm(() => new Promise((resolve) => { begin = resolve }), ended)
  for (const kind of ['request', 'job'] as const) {
    const answer = assert.rejects(idem[kind]({ scope: 'a', key: newKey() }, () => assert.fail('it ran')), TimedOut)
    await new Promise(setImmediate)
    context.mock.timers.tick(30_000)
    await answer
    begin()
    await new Promise(setImmediate)
    assert.deepEqual(ended.splice(0), ['rolled back', 'released'], kind)
  }
})

test('if no connection comes from a pool, the guard answers 503, and waits for a busy pool once', async (context) => {
  context.mock.method(console, 'error', () => undefined)
  for (const [code, ms, tries] of [['ECONNREFUSED', 0, 3], ['TIMEOUT', 1100, 1]] as const) {
    let count = 0
    const answer = await serveOn(fakeOrm(async () => {
      count++
      await sleep(ms)
      throw Object.assign(new Error(code), { code })
    }))
    assert.deepEqual([answer.status, count], [503, tries], code)
  }
  // As an ORM of another version, a wrong port and a wrong password.
  for (const error of [new TypeError('own.startTransaction is not a function'), new RangeError('port'), Object.assign(new Error('password'), { code: '28P01' })]) {
    let count = 0
    const fails = async (): Promise<never> => { count++; throw error }
    for (const client of [fakeOrm(fails), new Idempotency({ connect: fails })]) {
      for (const kind of ['request', 'job'] as const) await assert.rejects(serveOn(client, kind), error)
    }
    assert.equal(count, 4)
  }
  // As PgBouncer refuses, if its server is down.
  const bouncer = { connect: () => Promise.reject(Object.assign(new Error('server login has been failing'), { code: '08P01' })) }
  assert.equal((await serveOn(new Idempotency(bouncer))).status, 503)
})

test('a refusal of another key in the handler of a job is not that of its own key', async () => {
  const double = new MemoryIdempotency() as Client<any>
  for (const error of [new KeyReused('of another'), new InProgress()]) await assert.rejects(serveOn(double, 'job', () => Promise.reject(error)), error)
  assert.equal((await serveOn(double, 'job', () => Promise.reject(new ClaimLost('its own')))).status, 409)
})

test('in the double, a transaction() whose handler swallows an error of the database ends', async () => {
  const double = new MemoryIdempotency()
  await assert.rejects(double.transaction(async (tx) => {
    await double.on(tx).once('s', 'token')
    await double.on(tx).once('', 'token').catch(() => undefined)
  }), TransactionEnded)
  assert.equal(await double.once('s', 'token'), true)
})

test('a session that the server ends in the moment in which it becomes ready ends no process, and is 503', async () => {
  const message = (type: string, body: string): Buffer => {
    const head = Buffer.alloc(5)
    head.write(type)
    head.writeInt32BE(body.length + 4, 1)
    return Buffer.concat([head, Buffer.from(body)])
  }
  // AuthenticationOk, BackendKeyData, ReadyForQuery and FATAL 57P01 in one packet.
  const packet = Buffer.concat([message('R', '\0\0\0\0'), message('K', '\0\0\0\x01\0\0\0\x02'), message('Z', 'I'), message('E', 'SFATAL\0C57P01\0Mshutdown\0\0')])
  let connections = 0
  const server = createServer((socket) => {
    connections++
    socket.on('error', () => undefined).once('data', () => socket.end(packet))
  })
  await new Promise<void>((done) => { server.listen(0, '127.0.0.1', done) })
  const { error: log } = console
  console.error = () => undefined
  try {
    for (const poolOf of [(one: pg.Pool) => one, (one: pg.Pool) => drizzlePool(drizzle(one)), (one: pg.Pool) => drizzlePool(withReplicas(drizzle(one), [drizzle(one)]))]) {
      const pool = new pg.Pool({ host: '127.0.0.1', port: (server.address() as AddressInfo).port, user: 'u', database: 'd' })
      pool.on('error', () => undefined)
      const client: Client<any> = new Idempotency<any>(poolOf(pool))
      const options = { scope: 's', key: newKey() }
      for (const [call, tries] of [
        [() => client.request(options, () => ({ status: 200 })), 3], [() => client.job(options, () => undefined), 3], [() => client.once('s', 'k'), 1],
      ] as const) {
        connections = 0
        await assert.rejects(call, (error) => !(error instanceof IdempotencyError))
        assert.equal(connections, tries)
      }
      for (const kind of ['request', 'job'] as const) assert.equal((await serveOn(client, kind)).status, 503)
      assert.equal(pool.totalCount, 0)
      await pool.end()
    }
  } finally {
    console.error = log
    server.close()
  }
})

test('a COMMIT in doubt in a handler is not that of the request or job around it', async () => {
  let [runs, debits] = [0, 0]
  const inner = new Idempotency({ connect: async () => ({
    on: () => undefined, removeListener: () => undefined, release: () => undefined,
    async query({ text }: { text: string }) {
      if (text !== 'COMMIT') return { command: text, rows: [] }
      debits++
      throw new Error('Connection terminated unexpectedly')
    },
  }) })
  const outer = new MemoryIdempotency()
  const handler = async (): Promise<{ status: number }> => {
    runs++
    await inner.transaction(() => undefined)
    return { status: 200 }
  }
  const options = (): { scope: string; key: string } => ({ scope: 's', key: newKey() })
  for (const call of [() => outer.request(options(), handler), () => outer.job(options(), async (job) => { await job.finish(handler) })]) {
    runs = debits = 0
    await assert.rejects(call, /Connection terminated/)
    assert.deepEqual({ runs, debits }, { runs: 1, debits: 1 })
  }
})

test('a subclass of pg.Pool with its own connect() or begin() loses no connection, no setting and no listener', async (t) => {
  class Client extends EventEmitter {
    _queryable = true
    isSet = false
    connect(done: () => void): void { setImmediate(done) }
    end(done?: () => void): void { done?.() }
    async query({ text }: { text: string }): Promise<unknown> { return { command: text, rows: [{ set: String(this.isSet) }] } }
  }
  type Connected = (error: any, client: any, release: any) => void
  const set = (client: unknown): pg.PoolClient => Object.assign(client as pg.PoolClient, { isSet: true })
  class Mine extends pg.Pool {
    override async connect(...given: []): Promise<any> { return set(await super.connect(...given)) }
  }
  class Ignoring extends pg.Pool {
    override connect(done?: Connected): any { return done ? super.connect(done) : super.connect().then(set) }
  }
  class Both extends pg.Pool {
    override connect(done?: Connected): any {
      const made = super.connect().then(set)
      if (done) made.then<unknown, unknown>((client) => done(undefined, client, client.release), (error: unknown) => done(error, undefined, undefined))
      return made
    }
  }
  class Begin extends pg.Pool {
    async begin<T>(run: (client: pg.PoolClient) => Promise<T>): Promise<T> { return run(set(await this.connect())) }
  }
  for (const [One, isSet] of [[pg.Pool, 'false'], [Mine, 'true'], [Ignoring, 'true'], [Both, 'true'], [Begin, 'false']] as const) {
    await t.test(One.name, async () => {
      const pool = new One({ Client: Client as never, max: 2 })
      const client = new Idempotency(pool)
      for (let call = 0; call < 4; call++) {
        const { rows } = await client.transaction(async (tx) => tx.query({ text: 'SELECT' }), { timeout: '5 seconds' })
        assert.deepEqual(rows, [{ set: isSet }])
      }
      await new Promise(setImmediate)
      assert.deepEqual([pool.totalCount, pool.idleCount], [1, 1])
      // Only the one of pg-pool for idle clients.
      assert.equal((pool as any)._clients[0].listenerCount('error'), 1)
    })
  }
})

test('Sequelize sends calls outside of a transaction to the primary', async () => {
  const query = async (_: string, options: { useMaster?: boolean }): Promise<object[]> => [{ value: String(options.useMaster) }]
  assert.equal(await new Idempotency(sequelizePool({ getDialect: () => 'postgres', query } as never) as PoolLike).once('s', 'token'), true)
})

test("TypeORM's pool has the size of its driver", () => {
  for (const [extra, max] of [[undefined, 7], [{ max: 4 }, 4]] as const) {
    assert.equal((typeormPool({ options: { type: 'postgres', poolSize: 7, extra } } as never) as PoolLike).options!.max, max)
  }
})

test('a claim without a body leaves out no members', () => {
  const { text } = new Idempotency(new pg.Pool()).statements.claim('s', 'k', { method: 'POST', path: '/', without: [['a']] })
  assert.doesNotMatch(text, /jsonb_delete_path/)
})

test("with an ORM that hides its client, only a job's new claim commits, needs no second connection, and fails if COMMIT does", async () => {
  for (const [outcome, failure, expected] of [
    ['new', undefined, ['idem_claim', 'COMMIT']], ['new', new Error('no connection'), ['idem_claim', 'no COMMIT', 'alone idem_fail']],
    ['in_progress', undefined, ['idem_claim', 'ROLLBACK']],
  ] as const) {
    const log: string[] = []
    const query = (prefix: string) => async (text: string): Promise<object[]> => {
      log.push(prefix + /idem_[a-z]+|pg_\w*xact\w*/.exec(text.replaceAll('"', ''))![0])
      return [{ outcome, claimToken: '1', attempt: '1', leaseSeconds: '60', maxResponseSize: '1MB', encoding: 'UTF8', value: 'true' }]
    }
    const client = new Idempotency(prismaPool({
      _activeProvider: 'postgresql', $queryRawUnsafe: query('alone '),
      async $transaction(run: (tx: object) => Promise<void>, { maxWait }: { maxWait?: number } = {}) {
        assert.equal(maxWait, 30_000)
        try {
          await run({ $queryRawUnsafe: query('') })
        } catch (error) {
          log.push('ROLLBACK')
          throw error
        }
        log.push(failure ? 'no COMMIT' : 'COMMIT')
        if (failure) throw failure
      },
    }))
    const stop = new Error('stop')
    const seen: string[] = []
    await assert.rejects(client.job({ scope: 's', key: newKey() }, () => { seen.push(...log); throw stop }), failure ?? (outcome === 'new' ? stop : InProgress))
    await new Promise(setImmediate)
    assert.deepEqual(seen.length > 0 ? seen : log.slice(0, expected.length), expected)
  }
})
