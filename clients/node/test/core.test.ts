/** Every function of the interface, against a server. */
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import {
  ActionIdAhead, ClaimLost, ClaimNotFound, Idempotency, IdempotencyError, KeyInvalid, RateLimited, type Client, type Core,
} from 'pg-idempotency'
import { idempotent } from 'pg-idempotency/express'
import { MemoryIdempotency } from 'pg-idempotency/memory'
import { key, World } from './support.js'

type Statements = Idempotency['statements']

// It is not exported.
const { intervalMs } = await import(new URL('../../dist/values.js', import.meta.url).href) as { intervalMs(text: string): number | undefined }

let world: World
let idem: Idempotency
before(async () => {
  // A schema that has to be quoted.
  world = await World.make('Idem "potency"'.replaceAll('"', ''))
  idem = world.client()
})
after(() => world.end())

/** Of the extension, but not of its interface. */
const INTERNAL = new Set(`application_functions application_types blocked_seconds check_grantee check_interval cleanup_idle clock_evidence execute_grant
  grant_as_owner grant_monitor_as_owner grant_relay_as_owner granted_functions grantor many_support metric_families monitor_functions monitor_views
  monitoring_data redacted_key relay_functions revoke_as_owner sample_data sequences_behind stats_data table_faults table_stats unfinished_moves unvacuumed_tables
  vacuum_holder warn_of_rest worker_absence outbox_dead outbox_fail outbox_last_error outbox_topics`.split(/\s+/))

/** Each method with all that it can be given. */
const calls: { [Name in keyof Statements]: Parameters<Statements[Name]> } = {
  requestHash: ['POST', '/', 'null'], canonicalJson: ['1'], keyIsValid: ['k'],
  claim: ['s', 'k', { requestHash: Buffer.alloc(1), ttl: '1s', lease: '1s', waitMs: 1, request: { a: 1 } }],
  complete: ['s', 'k', 200, { body: 'b', headers: {}, claimToken: 1 }],
  checkpoint: ['s', 'k', 'p', { recoveryState: 1, lease: '1s', claimToken: 1 }], heartbeat: ['s', 'k', { lease: '1s', claimToken: 1 }],
  fail: ['s', 'k', { error: 'e', claimToken: 1 }], release: ['s', 'k', { claimToken: 1 }], lookup: ['s', 'k'], forget: ['s', 'k'], erase: ['s', 'k'],
  resume: [{ maxClaims: 1, lease: '1s', scopes: ['s'], wait: '1s' }],
  claimMany: ['s', ['k'], { requestHashes: [null], ttl: '1s', lease: '1s' }],
  completeMany: ['s', ['k'], [200], { bodies: ['b'], headers: [{}], claimTokens: [1] }], run: ['s', 'k', 'h(jsonb)', '1', { ttl: '1s', wait: '1s' }],
  tryAdvance: ['u', 'e', '1', 1], toggle: ['u', 'e', '1', 'a', 1], set: ['u', 'e', '1', 'a', true, 1, { excludes: ['b'] }], isActive: ['u', 'e', '1', 'a'],
  actionStates: ['u', 'e', ['1']], forgetUser: ['u'], tryAdvanceMany: [['u'], ['e'], ['1'], [1]], setMany: [['u'], ['e'], ['1'], ['a'], [true], [1]],
  tryAppend: ['a', 'c', 1, { eventCount: 1, expectedVersion: 1, allowGaps: true, wait: '1s' }], lastClientSeq: ['a', 'c'],
  once: ['s', 't', { ttl: '1s' }], onceAt: ['s', 't'], onceMany: ['s', ['t'], { ttl: '1s' }],
  publish: ['t', 1, { messageKey: 'k', headers: 1, deliverAfter: '1s' }], publishMany: [['t'], [1], { messageKeys: ['k'], headers: [1], deliverAfter: '1s' }],
  outboxTake: [{ maxMessages: 1, lease: '1s', topics: ['t'], wait: '1s' }], outboxAck: [[1]], outboxNack: [1, { error: 'e', retryAfter: '1s', attempt: 1 }],
  outboxRequeue: [[1]], outboxExtend: [[1], { lease: '1s', attempts: [1] }], outboxRelease: [[1], { attempts: [1] }], outboxBlocked: [1],
  cleanup: [1], takeExpired: ['keys', 1], repairOutbox: [], stats: [], statsReset: [], metrics: [], metricSamples: [], health: [], abandoned: [{ olderThan: '1s' }], raiseClaimTokens: [1],
  grant: ['r'], grantRelay: ['r'], grantMonitor: ['r'], revoke: ['r'],
}

test('each function of the extension is a method with all its parameters, and each method is one of them', async () => {
  const rows = await world.sql(`SELECT proname, proargnames[:pronargs] AS parameters FROM pg_proc
    WHERE pronamespace = '"${world.schema}"'::regnamespace AND proname !~ '^idem_(p_|configure$)'`)
  const theirs = new Map<string, Set<string>>()
  for (const { proname, parameters } of rows) {
    const name = (proname as string).slice(4).replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase()).replace(/^./, (letter) => letter.toLowerCase())
    if (!INTERNAL.has(proname.slice(5))) theirs.set(name, new Set([...theirs.get(name) ?? [], ...parameters ?? []]))
  }
  // idem_stats is a view.
  theirs.set('stats', new Set())
  const ours = new Map((Object.keys(idem.statements) as (keyof Statements)[]).map((name): [string, Set<string>] => {
    const { text } = (idem.statements[name] as (...given: unknown[]) => { text: string })(...calls[name])
    return [name, new Set([...text.matchAll(/"(\w+)" => /g)].map((match) => match[1]!))]
  }))
  assert.deepEqual([...ours.keys()].sort(), [...theirs.keys()].sort())
  assert.deepEqual(ours, theirs)
  assert.deepEqual(Object.keys(idem.on({ query() {} })).sort(), Object.keys(idem.statements).sort())
})

test('the double has every method, in and out of a transaction', async () => {
  const memory = new MemoryIdempotency()
  const methods = (client: object): string[] => [...Object.keys(client), ...Object.getOwnPropertyNames(Object.getPrototypeOf(client))]
    .filter((name) => typeof (client as Record<string, unknown>)[name] === 'function' && name !== 'constructor').sort()
  for (const name of methods(idem)) assert.equal(typeof (memory as unknown as Record<string, unknown>)[name], 'function', name)
  await memory.transaction((tx) => { assert.deepEqual(Object.keys(memory.on(tx)).sort(), Object.keys(idem.statements).sort()) })
})

/** The same over the server and in memory. */
function both(name: string, run: (core: Core, where: string) => Promise<void>): void {
  test(name, () => run(idem, 'server'))
  test(`${name}, in memory`, () => run(new MemoryIdempotency(), 'memory'))
}

both('a key: claimed, completed, replayed, erased, forgotten', async (core) => {
  const one = key()
  const identity = { method: 'post', path: '/a:b', body: '{"b": 1, "a": [2]}' }
  const claim = await core.claim('scope', one, { ...identity, ttl: '1 hour', leaseMs: 30_000 })
  assert.equal(claim.outcome, 'new')
  assert.equal(typeof claim.claimToken, 'bigint')
  assert.equal(claim.attempt, 1)
  assert.ok(claim.leaseExpiresAt instanceof Date && Math.abs(claim.leaseExpiresAt.getTime() - Date.now() - 30_000) < 20_000)
  assert.equal((await core.claim('scope', one)).outcome, 'in_progress')
  assert.equal((await core.claim('scope', one, { ...identity, body: '{}' })).outcome, 'hash_conflict')
  await assert.rejects(core.complete('scope', one, 200), ClaimLost)
  assert.ok(await core.heartbeat('scope', one, { claimToken: claim.claimToken, lease: '1 minute' }) instanceof Date)
  await core.checkpoint('scope', one, 'half', { recoveryState: { n: 1 }, claimToken: String(claim.claimToken) })
  const headers = { 'Content-Type': 'application/json', Link: ['a', 'b'] }
  assert.equal(await core.complete('scope', one, 201, { body: '{"ž": "\\u0000"}', headers, claimToken: claim.claimToken }), true)
  assert.equal(await core.complete('scope', one, 201, { claimToken: claim.claimToken }), false)
  const replay = await core.claim('scope', one, { ...identity, body: '{"a":[2],"b":1}' })
  assert.deepEqual([replay.outcome, replay.responseStatus, replay.responseHeaders, replay.responseBody, replay.responseBytes],
    ['replay', 201, headers, '{"ž": "\\u0000"}', null])
  const found = await core.lookup('scope', one)
  assert.deepEqual([found!.state, found!.recoveryPoint, found!.recoveryState], ['completed', 'half', { n: 1 }])
  assert.ok(found!.requestHash!.equals(await core.requestHash('POST', '/a:b', '{"a":[2],"b":1}')))
  assert.equal(await core.erase('scope', one), true)
  assert.equal((await core.claim('scope', one)).outcome, 'erased')
  assert.equal(await core.forget('scope', one), true)
  assert.equal(await core.lookup('scope', one), undefined)
  await assert.rejects(core.complete('scope', one, 200, { claimToken: 1n }), ClaimNotFound)
})

async function storesBytes(core: Core): Promise<void> {
  const one = key()
  const bytes = Buffer.from(Array.from({ length: 256 }, (_, at) => at))
  const requestHash = await core.requestHash('PUT', '/', bytes)
  const { claimToken } = await core.claim('scope', one, { requestHash })
  await core.complete('scope', one, 200, { body: bytes, claimToken })
  const replay = await core.claim('scope', one, { requestHash })
  assert.ok(replay.responseBytes!.equals(bytes))
  assert.equal(replay.responseBody, null)
  assert.ok((await core.lookup('scope', one))!.requestHash!.equals(requestHash))
}
both('bytes are stored as they are', storesBytes)

test('bytes are stored as they are by a driver that sends every parameter as text, as pg-native does', async () => {
  const pool = world.pool()
  const textual = {
    async connect() {
      const client = await pool.connect()
      const { release, on, removeListener } = client
      const query = ({ text, values }: { text: string; values: unknown[] }) => client.query({ text, values: values.map((value) => (value === null ? null : String(value))) })
      return { query, release: release.bind(client), on: on.bind(client) as any, removeListener: removeListener.bind(client) }
    },
  }
  await storesBytes(new Idempotency(textual, { schema: world.schema }))
})

both('failed claims are the next attempt\'s, released ones are as new', async (core) => {
  const one = key()
  const first = await core.claim('scope', one)
  assert.equal(await core.fail('scope', one, { error: 'no luck', claimToken: first.claimToken }), true)
  assert.equal((await core.lookup('scope', one))!.error, 'no luck')
  const second = await core.claim('scope', one)
  assert.equal(second.attempt, 2)
  assert.ok(second.claimToken! > first.claimToken!)
  await assert.rejects(core.heartbeat('scope', one, { claimToken: first.claimToken }), ClaimLost)
  assert.equal(await core.release('scope', one, { claimToken: second.claimToken }), true)
  assert.equal((await core.claim('scope', one)).attempt, 1)
})

both('a lease that is over is taken over', async (core) => {
  const one = key()
  await core.claim('scope', one, { leaseMs: 0 })
  const second = await core.claim('scope', one, { wait: '5 seconds' })
  assert.deepEqual([second.outcome, second.attempt], ['new', 2])
})

both('many keys', async (core) => {
  const keys = [key(), key()]
  const claims = await core.claimMany('scope', [...keys, keys[0]!], { lease: '1 minute' })
  assert.deepEqual(claims.map((claim) => [claim.ordinal, claim.key, claim.outcome]),
    [[1, keys[0], 'new'], [2, keys[1], 'new'], [3, keys[0], 'in_progress']])
  const done = await core.completeMany('scope', keys, [200, 201], {
    bodies: ['a "quoted\\ one', null], headers: [{ A: '1' }, null], claimTokens: claims.slice(0, 2).map((claim) => claim.claimToken) })
  assert.deepEqual(done.map((one) => one.completed), [true, true])
  const replay = await core.claim('scope', keys[0]!)
  assert.deepEqual([replay.responseBody, replay.responseHeaders], ['a "quoted\\ one', { A: '1' }])
})

both('user actions', async (core) => {
  const user = key()
  const big = 9007199254740993n
  assert.deepEqual(await core.set(user, 'post', '1', 'like', true, big), { isActive: true, lastActionId: big, processed: true })
  assert.deepEqual(await core.set(user, 'post', '1', 'like', false, big - 1n), { isActive: true, lastActionId: big, processed: false })
  assert.deepEqual(await core.set(user, 'post', '1', 'dislike', true, String(big + 1n), { excludes: ['like'] }),
    { isActive: true, lastActionId: big + 1n, processed: true })
  assert.equal(await core.isActive(user, 'post', '1', 'like'), false)
  assert.equal((await core.toggle(user, 'post', '1', 'like', big + 2n)).isActive, true)
  assert.deepEqual(await core.tryAdvance(user, 'post', '2', 5), { shouldProcess: true, lastActionId: 5n })
  assert.deepEqual(await core.tryAdvanceMany([user], ['post'], ['2', '3'], [5, 1n]),
    [{ ordinal: 1, shouldProcess: false, lastActionId: 5n }, { ordinal: 2, shouldProcess: true, lastActionId: 1n }])
  assert.equal((await core.setMany([user], ['post'], ['4', '5'], ['like'], [true, false], [1, 2])).length, 2)
  assert.deepEqual((await core.actionStates(user, 'post', ['1'])).map((one) => [one.actionType, one.isActive, one.lastActionId]),
    [['dislike', true, big + 2n], ['like', true, big + 2n]])
  assert.ok(await core.forgetUser(user) > 0n)
  assert.equal(await core.isActive(user, 'post', '1', 'like'), false)
})

both('client sequences', async (core) => {
  const cart = key()
  assert.deepEqual(await core.tryAppend(cart, 'phone', 1), { outcome: 'appended', lastClientSeq: 1n, version: 1n })
  assert.equal((await core.tryAppend(cart, 'phone', 1n)).outcome, 'duplicate')
  assert.equal((await core.tryAppend(cart, 'phone', 1, { eventCount: 2 })).outcome, 'overlap')
  assert.equal((await core.tryAppend(cart, 'phone', '3', { allowGaps: false })).outcome, 'gap')
  assert.equal((await core.tryAppend(cart, 'tablet', 1, { expectedVersion: 0 })).outcome, 'version_conflict')
  assert.equal(await core.lastClientSeq(cart, 'phone'), 1n)
})

both('once-only tokens', async (core) => {
  const [a, b, c] = [key(), key(), key()]
  assert.equal(await core.once('forms', a), true)
  assert.equal(await core.once('forms', a), false)
  assert.deepEqual(await core.onceMany('forms', [c, a, b, c], { ttl: '1 day' }), [c, b])
})

both('the outbox', async (core) => {
  const topic = key()
  const id = await core.publish(topic, { n: 1 }, { messageKey: 'k', headers: { h: 1 } })
  assert.match(id, /^[0-9a-f-]{36}$/)
  await core.publish(topic, [1, 'two', null], { messageKey: 'k' })
  assert.equal((await core.publishMany([topic], ['a', 'b'])).length, 2)
  const taken = await core.outboxTake({ maxMessages: 10, topics: [topic], lease: '1 minute' })
  const keyed = taken.filter((message) => message.messageKey === 'k')
  assert.deepEqual(keyed.map((message) => message.payload), [{ n: 1 }, [1, 'two', null]])
  assert.deepEqual([keyed[0]!.messageId, keyed[0]!.headers, keyed[0]!.attempt, typeof keyed[0]!.id], [id, { h: 1 }, 1, 'bigint'])
  const ids = taken.map((message) => message.id)
  assert.deepEqual(await core.outboxExtend(ids, { lease: '1 minute', attempts: [1] }), ids)
  assert.equal(await core.outboxNack(ids[3]!, { error: 'no', retryAfterMs: 0, attempt: 1 }), 'pending')
  assert.equal(await core.outboxRelease([ids[2]!], { attempts: [1] }), 1)
  assert.equal(await core.outboxAck(ids.slice(0, 2)), 2)
  assert.equal((await core.outboxTake({ topics: [topic], waitMs: 100 })).length, 2)
  assert.equal(await core.outboxRequeue(), 0)
})

test('claims that stored a request are resumed, with all that they had', async () => {
  const one = key()
  const request = { to: 'ž', n: 1 }
  const { claimToken } = await idem.claim('resumed', one, { lease: '1 minute', request })
  await idem.claim('resumed', key(), { leaseMs: 0, request: null })
  assert.deepEqual(await idem.resume({ scopes: ['resumed'] }), [])
  await idem.checkpoint('resumed', one, 'half', { recoveryState: [1], claimToken })
  await idem.fail('resumed', one, { claimToken })
  const [found, ...more] = await idem.resume({ maxClaims: 5, lease: '2 minutes', scopes: ['resumed'], waitMs: 10 })
  assert.deepEqual(more, [])
  assert.deepEqual([found!.scope, found!.key, found!.attempt, found!.request, found!.recoveryPoint, found!.recoveryState],
    ['resumed', one, 2, request, 'half', [1]])
  assert.ok(found!.claimToken > claimToken! && found!.leaseExpiresAt.getTime() > Date.now() + 60_000 && found!.createdAt instanceof Date)
  assert.equal(await idem.complete('resumed', one, 200, { claimToken: found!.claimToken }), true)
})

both('the time of the first use of a token', async (core) => {
  const one = key()
  assert.equal(await core.onceAt('used', one), null)
  const before = Date.now()
  await core.once('used', one)
  const at = await core.onceAt('used', one)
  assert.ok(at instanceof Date && Math.abs(at.getTime() - before) < 20_000)
  await core.once('used', one)
  assert.deepEqual(await core.onceAt('used', one), at)
})

test('expired rows are returned as they are deleted', async () => {
  const one = key()
  await idem.claim('taken', one, { ttl: '0' })
  const taken = await idem.takeExpired('keys', 10_000) as { scope: string; key: string }[]
  assert.equal(taken.filter((row) => row.scope === 'taken' && row.key === one).length, 1)
  assert.equal(await idem.repairOutbox(), 0n)
})

test('the keys whose messages wait', async () => {
  const topic = key()
  for (const n of [1, 2]) await idem.publish(topic, n, { messageKey: 'k' })
  const { id } = (await idem.outboxTake({ topics: [topic], maxMessages: 1 }))[0]!
  const blocked = (await idem.outboxBlocked(100)).filter((lane) => lane.topic === topic)
  assert.deepEqual(blocked.map((lane) => [lane.firstId, lane.waiting, lane.reason, lane.pid]), [[id, 1n, 'leased', null]])
  assert.ok(blocked[0]!.until instanceof Date && blocked[0]!.blockedSince instanceof Date)
  await idem.outboxAck([id])
  const memory = new MemoryIdempotency()
  for (const call of [() => memory.outboxBlocked(), () => memory.resume(), () => memory.takeExpired('keys')]) await assert.rejects(call(), /the double does not have/)
})

test('numbers beyond 2^53 keep their digits in the text of a document', async () => {
  const one = key()
  const { claimToken } = await idem.claim('scope', one, { leaseMs: 0 })
  await world.sql(`SELECT "${world.schema}".idem_checkpoint('scope', $1, 'p', '{"n": 9007199254740993}', lease => '0', claim_token => $2)`, [one, claimToken])
  const claim = await idem.claim('scope', one)
  assert.equal(claim.recoveryStateText, '{"n": 9007199254740993}')
  assert.equal(await idem.canonicalJson('{"n": 9007199254740993}'), '{"n":9007199254740993}')
})

test('mistakes in arguments are errors before any call', async () => {
  const wrong: [() => Promise<unknown>, RegExp][] = [
    [() => idem.set('u', 'e', '1', 'like', true, 2 ** 53), /exact integer/],
    [() => idem.once('scope', 'nul\0'), /NUL/],
    [() => idem.once('scope', '\ud800'), /surrogate/],
    [() => idem.once('scope', 7 as never), /must be a string/],
    [() => idem.claim('scope', key(), { wait: 5 as never }), /for milliseconds, use waitMs/],
    [() => idem.claim('scope', key(), { wait: '5s', waitMs: 5 }), /cannot both be set/],
    [() => idem.publish('t', { n: 1n } as never), /bigint/],
    [() => idem.onceMany('scope', 'token' as never), /must be an array/],
    [() => idem.claim('scope', key(), { waitMs: NaN }), /waitMs must be a number of milliseconds, not NaN/],
    [() => idem.claim('scope', key(), { leaseMs: -1 }), /leaseMs must not be negative: -1/],
    [() => idem.claim('scope', key(), { ttlMs: Infinity }), /ttlMs must be a number of milliseconds, not Infinity/],
    [() => idem.claim('scope', key(), { ttlMs: 1e300 }), /ttlMs is too long/],
    [() => idem.claim('scope', key(), { ttl: '5 bananas' }), /ttl is not a valid interval: "5 bananas"/],
    [() => idem.once('scope', key(), { ttl: '-1 day' }), /ttl must not be negative: "-1 day"/],
    [() => idem.outboxTake({ wait: 'a while' }), /wait is not a valid interval/],
    [() => idem.complete('scope', key(), 200, { headers: { 'X-A': 'a\r\nSet-Cookie: b' } }), /headers: X-A contains "\\r"/],
    [() => idem.complete('scope', key(), 200, { headers: { 'X-A': ['a', 'b\0'] } }), /headers: X-A contains/],
    [() => idem.complete('scope', key(), 200, { headers: { 'X A': 'a' } }), /"X A" is not a valid name of a header/],
    [() => idem.completeMany('scope', [key()], [200], { headers: [{ A: '\n' }] }), /A contains "\\n"/],
    [() => idem.request({ scope: 's', key: key(), wait: '1s', waitMs: 1 }, () => ({ status: 200 })), /wait and waitMs cannot both be set/],
    [() => idem.request({ scope: 's', key: key(), timeout: 'soon' }, () => ({ status: 200 })), /timeout is not a valid interval/],
    [() => idem.request({ scope: 's', key: key(), timeoutMs: 0 }, () => ({ status: 200 })), /timeout must not be 0/],
    [() => idem.job({ scope: 's', key: key(), leaseMs: -5 }, () => ({ status: 200 })), /leaseMs must not be negative/],
    [() => idem.request({ scope: 's', key: key(), maxResponseSize: NaN }, () => ({ status: 200 })), /maxResponseSize must be a whole number/],
    [() => idem.request({ scope: 's', key: key(), signal: new AbortController() as never }, () => ({ status: 200 })), /signal must be an AbortSignal, not AbortController/],
    [() => idem.request({ scope: 's', key: key(), ttl: '0 seconds' }, () => ({ status: 200 })), /ttl must not be 0/],
    [() => new MemoryIdempotency().job({ scope: 's', key: key(), ttlMs: 0 }, () => ({ status: 200 })), /ttl must not be 0/],
    [async () => new Idempotency(world.pool(), { wait: '5 bananas' }), /wait is not a valid interval/],
    [async () => new Idempotency(world.pool(), { ttl: '1 day', ttlMs: 1 }), /cannot both be set/],
    [async () => new Idempotency(world.pool(), { maxWaiters: 1.5 }), /maxWaiters must be a whole number/],
    [async () => new MemoryIdempotency({ leaseMs: NaN }), /leaseMs must be a number/],
    [async () => idempotent(idem, { scope: () => 'a', wait: '5 bananas' }), /wait is not a valid interval/],
    [async () => idempotent(idem, { scope: () => 'a', conflictStatus: 400 as never }), /conflictStatus must be 422 or 409/],
    [async () => idempotent(idem, { scope: () => 'a', required: 'no' as never }), /required must be true or false/],
    [async () => idempotent(idem, { scope: () => 'a', store: 1 as never }), /store must be a function/],
    [async () => idempotent(idem, { scope: () => 'a', headers: 'x' as never }), /headers must be a list/],
    [async () => idempotent(idem, {} as never), /scope must be a function/],
  ]
  for (const [call, said] of wrong) await assert.rejects(call(), (error: Error) => said.test(error.message), String(said))
})

both('what the server refuses, with its code', async (core) => {
  const codeOf = (error: Error & { sqlstate?: string; code?: string }): string | undefined =>
    (error instanceof IdempotencyError && error.sqlstate?.startsWith('ID') ? error.sqlstate : error.code)
  const nul = '\0'
  for (const [code, call] of [
    ['22P05', () => core.publish('t', { a: nul })], ['22P05', () => core.publish('t', { [nul]: 1 })], ['22P05', () => core.publishMany(['t'], [[nul]])],
    ['22P05', () => core.publish('t', 1, { headers: { a: nul } })], ['22P05', () => core.canonicalJson('{"a": "\\u0000"}')],
    ['22P05', () => core.claim('scope', key(), { method: 'POST', path: '/', body: '["\\u0000"]' })], ['22P02', () => core.publish('t', '\ud800')],
    ['22P02', () => core.canonicalJson('{')], ['22023', () => core.once('', 'token')], ['22023', () => core.tryAppend('cart', 'phone', 0)],
    ['22008', () => core.claim('scope', key(), { ttl: '1000000 years' })], ['22023', () => core.claim('scope', key(), { lease: '1000000 years' })],
    ['22008', () => core.once('scope', key(), { ttl: '1000000 years' })], ['22008', () => core.publish('t', 1, { deliverAfter: '1000000 years' })],
    ['ID001', () => core.lookup('scope', 'bad key')], ['ID001', () => core.forget('scope', 'bad')], ['ID001', () => core.erase('scope', 'bad')],
    ['ID001', () => core.heartbeat('scope', 'bad', { claimToken: 1n })], ['22023', () => core.lookup('', key())],
  ] as [string, () => Promise<unknown>][]) {
    await assert.rejects(call(), (error: Error) => { assert.equal(codeOf(error), code, String(call)); return true }, String(call))
  }
  const one = key()
  const { claimToken } = await core.claim('scope', one)
  await core.complete('scope', one, 200, { headers: { a: undefined, b: '1' } as never, claimToken })
  assert.deepEqual(Object.keys((await core.claim('scope', one)).responseHeaders!), ['b'])
})

test('intervals are read as PostgreSQL reads them', async () => {
  const intervals = ['0', '5', '1.5', '30s', '30 s', '5 minutes', '1 hour 30 min', '1h30m', '1 day 02:03', '1 2:03', '02:03:04.5', '@ 1 min', '-5 s',
    '1 day -1 hour', '5 min ago', '1 mon', '2 weeks 3 days', '250 ms', '10 us', '1.5 hours', 'P1D', 'PT30S', 'P1DT2H3M4.5S', 'P2W', '1 day, 2 hours',
    '.5 s', '3 hrs', '7 msec', ' 4 seconds ']
  const rows = await world.sql('SELECT extract(epoch FROM i::interval) * 1000 AS ms FROM unnest($1::text[]) WITH ORDINALITY AS t (i, n) ORDER BY n', [intervals])
  assert.deepEqual(intervals.map((one) => [one, Math.round(intervalMs(one)! * 1000) / 1000]), intervals.map((one, at) => [one, Number(rows[at].ms)]))
  for (const wrong of ['', ' ', 'P', 'PT', 'ago', '5 bananas', 'soon', '1 day of rest', '1::2', 'infinity', '5 s 5 bananas', '--5', '1e400']) {
    assert.equal(intervalMs(wrong), undefined, wrong)
  }
})

test('errors of the extension are classes', async () => {
  await assert.rejects(idem.claim('scope', 'short'), (error) => error instanceof KeyInvalid &&
    /too short/.test(error.detail!) && /16 to 128 characters/.test(error.hint!))
  const strict = world.client({}, { max: 1, options: '-c idempotency.max_new_keys_per_minute=1 -c idempotency.max_action_id_lead=1000' })
  await strict.claim('limited', key())
  await assert.rejects(strict.claim('limited', key()), (error) => error instanceof RateLimited && error.retryAfter >= 1 && error.retryAfter <= 120)
  await assert.rejects(strict.set('u', 'e', '1', 'a', true, Date.now() + 1e9), ActionIdAhead)
  await assert.rejects(idem.requestHash('POST', '/', '{'), (error: Error & { code?: string }) => error.code === '22P02')
  assert.ok(IdempotencyError.prototype instanceof Error)
})

test('administration', async () => {
  const counts = await idem.cleanup(10)
  assert.equal(typeof counts.keysDeleted, 'bigint')
  assert.ok((await idem.stats())!['claimsNew']! > 0n)
  assert.match(await idem.metrics(), /# EOF$/)
  const samples = await idem.metricSamples()
  const claims = samples.find((sample) => sample.name === 'idempotency_claims_total' && sample.labels['outcome'] === 'new')!
  assert.deepEqual([typeof claims.value, claims.type, claims.value > 0], ['number', 'counter', true])
  assert.ok((await idem.health()).some((check) => check.checkName === 'clock' && check.status === 'ok'))
  assert.ok(Array.isArray(await idem.abandoned({ olderThan: '0 seconds' })))
  assert.ok(await idem.raiseClaimTokens(1000) >= 1000n)
  await world.sql('CREATE ROLE node_role').catch(() => undefined)
  await idem.grant('node_role')
  await idem.revoke('node_role')
  await idem.grantRelay('node_role')
  const [{ relays }] = await world.sql(`SELECT has_function_privilege('node_role', '"${world.schema}".idem_outbox_ack(bigint[])', 'EXECUTE') AS relays`)
  assert.equal(relays, true)
  await idem.revoke('node_role')
  await idem.grantMonitor('node_role')
  assert.ok(await idem.transaction(async (tx) => {
    await tx.query('SET LOCAL ROLE node_role')
    const watching = idem.on(tx)
    await watching.metricSamples()
    await tx.query('SAVEPOINT before')
    await assert.rejects(watching.once('scope', key()), (error: { code?: string }) => error.code === '42501')
    await tx.query('ROLLBACK TO SAVEPOINT before')
    return true
  }))
  await world.sql('DROP OWNED BY node_role; DROP ROLE node_role')
  // The name as it is.
  await world.sql('CREATE ROLE "Node "" Role"')
  const mayClaim = async (): Promise<boolean> =>
    (await world.sql(`SELECT has_function_privilege('Node " Role', oid, 'EXECUTE') AS may FROM pg_proc WHERE proname = 'idem_claim'`))[0].may
  await idem.grant('Node " Role')
  assert.equal(await mayClaim(), true)
  await idem.revoke('Node " Role')
  assert.equal(await mayClaim(), false)
  await idem.grantMonitor('Node " Role')
  await world.sql('DROP OWNED BY "Node "" Role"; DROP ROLE "Node "" Role"')
  await idem.statsReset()
  assert.equal(await idem.keyIsValid('short'), false)
})

test('run: a whole request in one statement', async () => {
  await world.sql(`CREATE FUNCTION place(request jsonb) RETURNS jsonb LANGUAGE sql AS
    $$ INSERT INTO effects (what) VALUES (request ->> 'what') RETURNING to_jsonb(what) $$`)
  const one = key()
  const first = await idem.run('scope', one, 'place(jsonb)', { what: one })
  assert.deepEqual(first, { outcome: 'new', responseStatus: 200, responseHeaders: null, responseBody: `"${one}"` })
  assert.equal((await idem.run('scope', one, 'place(jsonb)', `{"what": "${one}"}`)).outcome, 'replay')
  assert.equal(await world.effects(one), 1)
  const memory = new MemoryIdempotency({ handlers: { 'place(jsonb)': (request) => request } })
  assert.equal((await memory.run('scope', one, 'place(jsonb)', { a: 1 })).responseBody, '{"a":1}')
  assert.equal((await memory.run('scope', one, 'place(jsonb)', { a: 1 })).outcome, 'replay')
})

test('a wrong schema is named in the error', async () => {
  for (const schema of ['public', 'nowhere']) {
    const wrong = world.client({ schema })
    const ways = [() => wrong.once('a', 'b'), () => wrong.request({ scope: 'a', key: key() }, () => ({ status: 200 }))]
    for (const way of ways) {
      await assert.rejects(way(), (error) => error instanceof IdempotencyError && /42883|3F000/.test(error.sqlstate!) &&
        error.message.startsWith(`the functions of the extension are not in schema ${schema}: set the option schema`))
    }
  }
})

test('on: in the transaction of a pg client', async () => {
  const pool = world.pool()
  const undo = new Error('undo')
  const ways: ((run: (handle: object) => Promise<void>) => Promise<unknown>)[] = [
    async (run) => {
      const client = await pool.connect()
      try {
        await client.query('BEGIN')
        await run(client)
      } finally {
        await client.query('ROLLBACK')
        client.release()
      }
    },
  ]
  for (const way of ways) {
    const token = `what? ${key()}`
    await assert.rejects(way(async (handle) => {
      const core = idem.on(handle)
      assert.deepEqual(await core.onceMany('on', [token, 'b "c"\\']), [token, 'b "c"\\'])
      assert.equal((await core.set(token, 'e', '1', 'a', true, 1n)).processed, true)
      assert.equal((await core.tryAdvance(token, 'f', '1', 1n)).shouldProcess, true)
      assert.match(await core.publish('on?', { token }), /-/)
      await core.claim('on', key(), { requestHash: Buffer.from('hash') })
      assert.equal(await idem.isActive(token, 'e', '1', 'a'), false, 'nobody else sees it')
      throw undo
    }), undo)
    assert.equal(await idem.isActive(token, 'e', '1', 'a'), false, 'it was rolled back')
  }
  for (const way of ways) {
    await assert.rejects(way(async (handle) => { await idem.on(handle).claim('on', 'short') }), KeyInvalid)
  }
  await assert.rejects(idem.on({}).once('a', 'b'), /takes a pg client/)
  // As an entity manager of TypeORM: its query() takes text and values, and returns the rows alone.
  class EntityManager {
    sent: unknown[] = []
    queryRunner = {}
    release() {}
    getRepository() {}
    async query(text: unknown) {
      this.sent.push(text)
      return (await pool.query(text as string)).rows
    }
  }
  const manager = new EntityManager()
  const token = key()
  await assert.rejects(idem.on(manager).once('typeorm', token), /takes a pg client.*not a EntityManager/)
  assert.deepEqual([manager.sent, await idem.onceAt('typeorm', token)], [[], null], 'nothing was sent')
})

test('a connection whose prepared statements are gone, or that raised such an error itself, works again', async () => {
  const pool = world.pool({ max: 1 })
  const client = new Idempotency(pool, { schema: world.schema })
  const runs = (text: string) => client.request({ scope: 'stale', key: key() }, async (tx) => { await tx.query(text); return { status: 201 } })
  await runs('SELECT 1')
  await runs('SELECT 1')
  for (let times = 0; times < 3; times++) assert.equal((await runs('DEALLOCATE ALL')).status, 201)
  await world.sql(`CREATE TABLE late (a int); CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not here' USING ERRCODE = '0A000'; END $$;
    CREATE CONSTRAINT TRIGGER late AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION late()`)
  for (let times = 0; times < 3; times++) await assert.rejects(runs('INSERT INTO late VALUES (1)'), /not here/)
  for (let times = 0; times < 3; times++) assert.equal((await runs('SELECT 1')).status, 201)
})

test('options that do not exist are refused, and so is a request that would be compared only in part', async () => {
  for (const make of [(options: object) => new Idempotency(world.pool(), { schema: world.schema, ...options }), (options: object) => new MemoryIdempotency(options)]) {
    assert.throws(() => make({ wiat: '5 seconds' }), /^TypeError: the client has no option wiat$/)
    assert.throws(() => make({ onOutcome: 'log' }), /onOutcome must be a function/)
    assert.throws(() => make({ traceKeys: 'no' }), /traceKeys must be true or false/)
    const client: Client<any> = make({})
    const given = (): { scope: string; key: string } => ({ scope: 'scope', key: key() })
    const never = (): never => assert.fail('it ran')
    await assert.rejects(client.request({ ...given(), tll: '1 day' } as never, never), /^TypeError: request\(\) has no option tll$/)
    await assert.rejects(client.request({ ...given(), lease: '1 minute' } as never, never), /^TypeError: request\(\) has no option lease$/)
    await assert.rejects(client.job({ ...given(), leas: '1 minute' } as never, never), /^TypeError: job\(\) has no option leas$/)
    await assert.rejects(client.transaction(never, { scopes: 'scope' } as never), /^TypeError: transaction\(\) has no option scopes$/)
    await assert.rejects(client.request({ ...given(), store: (async () => false) as never }, () => ({ status: 404 })), /the option store must return true or false/)
    await assert.rejects(client.job(given(), async (job) => { await job.step('x'.repeat(513), never) }), /name of a step must have 1 to 512 bytes/)
    await assert.rejects(client.transaction(never, 'scope' as never), /^TypeError: the options of transaction\(\) must be an object/)
    for (const part of [{ body: '{}' }, { path: '/' }, { method: 'POST', path: '/', body: '{}', requestHash: Buffer.alloc(32) }]) {
      await assert.rejects(client.request({ ...given(), ...part } as never, never), /^TypeError: a request is compared either by/)
    }
  }
})
