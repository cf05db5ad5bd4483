/** The client's handling of shards, without a shard; test/scale_out has real ones. */
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Idempotency, ScopeMoving, type Client, type PoolLike, type Shard } from 'pg-idempotency'
import { serve } from 'pg-idempotency/http'

type Answer = (text: string, values: unknown[]) => Record<string, string>[] | Promise<Record<string, string>[]>

/** A pool whose server is a function. */
function poolOf(answer: Answer): PoolLike & { asked: string[] } {
  const asked: string[] = []
  return {
    asked,
    async connect() {
      return {
        async query({ text, values }: { text: string; values: unknown[] }) {
          asked.push(text)
          return { command: 'SELECT', rows: await answer(text, values) }
        },
        release() {}, on() {}, removeListener() {},
      }
    },
  }
}
const seen: Answer = () => [{ value: 'true' }]
const guard = (): Error => Object.assign(new Error('scope "a" does not live on this shard'), { code: '55000', schema: 'idem_guard' })

test('a connection string of libpq, in the words of pg', async () => {
  const got: Shard[] = []
  const strings = [
    "host=shard0 port=6432 dbname=app connect_timeout=5 application_name='an app'",
    "host = '/var/run/my dir' dbname=it\\'s sslmode=require user='o b' ", 'sslmode=verify-full host=::1 password=a\\ b',
    'dbname=only sslmode=prefer', 'hostaddr=10.0.0.1 host=shard0 options=-cjit=off', 'host=a,b port=1,2',
  ]
  const router = poolOf((_, [scope]) => [{ connection: strings[Number(scope)]! }])
  const idem = new Idempotency(router, { shards: (shard, connection) => { got.push({ ...shard, connection } as Shard); return poolOf(seen) } })
  for (const scope of ['0', '1', '2', '3', '4', '0']) await idem.once(scope, 'x')
  await assert.rejects(idem.once('5', 'x'), /several hosts/)
  assert.deepEqual(got, [
    { host: 'shard0', port: 6432, database: 'app', connectionTimeoutMillis: 5000, application_name: 'an app' },
    { host: '/var/run/my dir', database: "it's", user: 'o b', ssl: { rejectUnauthorized: false } },
    { host: '::1', password: 'a b', ssl: true },
    { database: 'only' },
    { host: '10.0.0.1', options: '-cjit=off' },
  ].map((shard, at) => ({ ...shard, connection: strings[at] })))
})

test('the router is asked once for each scope, of ten thousand at most, and a pool is made once', async () => {
  const router = poolOf(() => [{ connection: 'host=one' }])
  let pools = 0
  const idem = new Idempotency(router, { shards: async () => { pools++; return poolOf(seen) } })
  await Promise.all(Array.from({ length: 20 }, () => idem.once('first', 'x')))
  const asked = router.asked.length
  assert.equal(pools, 1)
  for (let n = 0; n < 10_000; n++) await idem.once(`scope-${n}`, 'x')
  await idem.once('scope-0', 'x')
  assert.deepEqual([router.asked.length - asked, pools], [10_000, 1])
  await idem.once('first', 'x')
  assert.equal(router.asked.length - asked, 10_001)
})

test('a scope that a shard refuses is asked for again, three times at most', async () => {
  const router = poolOf(() => [{ connection: `host=s${router.asked.length}` }])
  let refusals = 2
  const shard = poolOf(() => { if (refusals-- > 0) throw guard(); return [{ value: 'true' }] })
  const idem = new Idempotency(router, { shards: () => shard })
  assert.equal(await idem.once('a', 'x'), true)
  assert.equal(router.asked.length, 3)
  refusals = 4
  await assert.rejects(idem.once('a', 'x'), /does not live on this shard/)
  // The next call finds it: nothing that was refused is remembered.
  refusals = 0
  assert.equal(await idem.once('a', 'x'), true)
})

test('another 55000, as of a handler, is not the guard\'s', async () => {
  const router = poolOf(() => [{ connection: 'host=one' }])
  const shard = poolOf(() => { throw Object.assign(new Error('currval is not yet defined'), { code: '55000' }) })
  await assert.rejects(new Idempotency(router, { shards: () => shard }).run('a', 'key-of-16-or-more', 'f(jsonb)', {}), /currval/)
  assert.deepEqual([router.asked.length, shard.asked.length], [1, 1])
})

test('a router or a function that fails is asked again by the next call', async () => {
  let fails = true
  const router = poolOf(() => { if (fails) throw Object.assign(new Error('no row'), { code: '55000' }); return [{ connection: 'host=one' }] })
  const idem = new Idempotency(router, { shards: () => { if (fails) throw new Error('no password'); return poolOf(seen) } })
  await assert.rejects(idem.once('a', 'x'), /no row/)
  fails = false
  assert.equal(await idem.once('a', 'x'), true)
  const other = new Idempotency(poolOf(() => [{ connection: 'host=one' }]), { shards: () => { if (fails) throw new Error('no password'); return poolOf(seen) } })
  fails = true
  await assert.rejects(other.once('a', 'x'), /no password/)
  fails = false
  assert.equal(await other.once('a', 'x'), true)
})

test('a question that is never answered holds up nobody else', async () => {
  let answers = false
  const router = poolOf(() => (answers ? [{ connection: 'host=one' }] : new Promise(() => undefined)))
  const idem = new Idempotency(router, { shards: () => poolOf(seen) })
  void idem.once('a', 'x')
  answers = true
  assert.equal(await idem.once('a', 'y'), true)
})

test('a question on a dead connection is asked again', async () => {
  const router = poolOf(() => {
    if (router.asked.length < 3) throw new Error('Connection terminated unexpectedly')
    return [{ connection: 'host=one' }]
  })
  assert.equal(await new Idempotency(router, { shards: () => poolOf(seen) }).once('a', 'x'), true)
})

test('a shard that cannot be reached is asked for again, and one whose session has died is not', async () => {
  const router = poolOf(() => [{ connection: 'host=one' }])
  let fault: 'none' | 'dead' | 'unreachable' = 'none'
  const shard = poolOf(() => { if (fault === 'dead') throw new Error('Connection terminated unexpectedly'); return [{ value: 'true' }] })
  const connect = shard.connect.bind(shard)
  shard.connect = async () => { if (fault === 'unreachable') throw new Error('connect ECONNREFUSED'); return connect() }
  const idem = new Idempotency(router, { shards: () => shard })
  await idem.once('a', 'x')
  fault = 'dead'
  await assert.rejects(idem.once('a', 'x'), /terminated/)
  fault = 'none'
  await idem.once('a', 'x')
  assert.equal(router.asked.length, 1)
  fault = 'unreachable'
  await assert.rejects(idem.once('a', 'x'), /ECONNREFUSED/)
  fault = 'none'
  await idem.once('a', 'x')
  assert.equal(router.asked.length, 2)
})

test('a function that returns no pool is told so, and is called again', async () => {
  let pool: PoolLike | undefined
  const idem = new Idempotency(poolOf(() => [{ connection: 'host=one' }]), { shards: () => pool as PoolLike })
  await assert.rejects(idem.once('a', 'x'), /shards\(\) must return a pool for "host=one"/)
  pool = poolOf(seen)
  assert.equal(await idem.once('a', 'x'), true)
})

test('a handler that holds a connection of a shard is refused another one, by whichever client', async () => {
  const shard = poolOf(seen)
  const many = new Idempotency(poolOf(() => [{ connection: 'host=one' }]), { shards: () => shard })
  const one = new Idempotency(shard)
  await many.transaction(async () => {
    await assert.rejects(one.stats(), /second connection/)
    await assert.rejects(many.once('a', 'x'), /second connection/)
  }, { scope: 'a', commits: () => false })
})

test('on a shard the guard is passed with the call, and on one server there is none', async () => {
  const shard = poolOf(seen)
  const many = new Idempotency(poolOf(() => [{ connection: 'host=one' }]), { schema: 'of it', shards: () => shard })
  await many.once('a', 'x')
  assert.match(shard.asked[0]!, /"of it"\."idem_once"\("scope" => "of it"\.idem_pin_scope\(\$1::text\), "token" => \$2::text\)/)
  const one = poolOf(seen)
  await new Idempotency(one).once('a', 'x')
  assert.match(one.asked[0]!, /"idem"\."idem_once"\("scope" => \$1::text, "token" => \$2::text\)/)
  await assert.rejects(many.transaction(() => null), /needs a scope/)
})

test('over HTTP a scope that is being moved is 503, with a key and without', async () => {
  const moving = (): Promise<never> => Promise.reject(new ScopeMoving('scope "ann" is being moved to another shard', { sqlstate: '55P03' }))
  const scopes: unknown[] = []
  const client = {
    request: moving, job: moving, transaction: (_: unknown, { scope }: { scope: string }) => { scopes.push(scope); return moving() },
  } as unknown as Client<unknown>
  for (const [kind, key] of [['request', '"0190f5d0-1d2a-7000"'], ['job', '"0190f5d0-1d2a-7000"'], ['request', undefined]] as const) {
    const answer = await serve(client, { method: 'POST', path: '/', key, body: Buffer.from(''), scope: () => 'ann' },
      { scope: () => 'ann', required: false }, kind, async () => ({ status: 200 }))
    assert.deepEqual([answer.status, answer.headers['Retry-After'], JSON.parse(String(answer.body)).type],
      [503, '1', 'urn:pg-idempotency:scope-moving'])
  }
  assert.deepEqual(scopes, ['ann'])
})
