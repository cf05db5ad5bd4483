/** The double does as the server does: the tables of test/http, arguments.json and contract.json, which Python's tests run, too. */
import assert from 'node:assert/strict'
import { readFile } from 'node:fs/promises'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { IdempotencyError, sqlstateOf, type Client } from 'pg-idempotency'
import { MemoryIdempotency } from 'pg-idempotency/memory'
import { key, World } from './support.js'

let world: World
before(async () => { world = await World.make() })
after(() => world.end())

type Row = [name: string, given: Record<string, unknown>, state: string]
const table: Row[] = JSON.parse(await readFile(new URL('../../../../test/http/arguments.json', import.meta.url), 'utf8'))

/** Arguments with a position; all others have names. */
const POSITIONAL: Record<string, string[]> = {
  request_hash: ['method', 'path', 'body'], canonical_json: ['document'], complete: ['scope', 'key', 'response_status'],
  checkpoint: ['scope', 'key', 'recovery_point'], complete_many: ['scope', 'keys', 'response_statuses'], claim_many: ['scope', 'keys'],
  run: ['scope', 'key', 'handler', 'request'], set: ['user_id', 'entity_type', 'entity_id', 'action_type', 'active', 'action_id'],
  toggle: ['user_id', 'entity_type', 'entity_id', 'action_type', 'action_id'], is_active: ['user_id', 'entity_type', 'entity_id', 'action_type'],
  try_advance: ['user_id', 'entity_type', 'entity_id', 'action_id'], action_states: ['user_id', 'entity_type', 'entity_ids'], forget_user: ['user_id'],
  try_advance_many: ['user_ids', 'entity_types', 'entity_ids', 'action_ids'],
  set_many: ['user_ids', 'entity_types', 'entity_ids', 'action_types', 'actives', 'action_ids'],
  try_append: ['aggregate', 'client_id', 'client_seq'], last_client_seq: ['aggregate', 'client_id'],
  once: ['scope', 'token'], once_at: ['scope', 'token'], once_many: ['scope', 'tokens'], publish: ['topic', 'payload'], publish_many: ['topics', 'payloads'],
  outbox_take: [], outbox_ack: ['ids'], outbox_nack: ['id'], outbox_requeue: ['ids'], outbox_extend: ['ids'], outbox_release: ['ids'],
  cleanup: ['batch_size'], abandoned: [], raise_claim_tokens: ['at_least'],
}
const camel = (name: string): string => name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase())

/** {"repeat": [text, times]}, {"nested": depth} of a text, {"bigint": digits}. */
function valueOf(given: any): any {
  if (Array.isArray(given)) return given.map(valueOf)
  if (typeof given !== 'object' || given === null) return given
  if (given.repeat) return given.repeat[0].repeat(given.repeat[1])
  if (given.nested) return '['.repeat(given.nested) + ']'.repeat(given.nested)
  return given.bigint ? BigInt(given.bigint) : given
}

async function call(client: object, [name, given]: [string, Record<string, unknown>, ...unknown[]]): Promise<unknown> {
  const places = POSITIONAL[name] ?? ['scope', 'key']
  const positional = places.map((place) => valueOf(given[place]))
  const named = Object.fromEntries(Object.entries(given).filter(([one]) => !places.includes(one)).map(([one, value]) => [camel(one), valueOf(value)]))
  const method = (client as Record<string, (...all: unknown[]) => Promise<unknown>>)[camel(name)]!
  return method.call(client, ...positional, ...(Object.keys(named).length > 0 ? [named] : []))
}

const codeOf = (error: unknown): string | undefined => (error instanceof IdempotencyError && error.sqlstate?.startsWith('ID') ? error.sqlstate : sqlstateOf(error))

test('bad arguments: the same refusal by the server and by the double', async () => {
  assert.ok(table.length > 100)
  const wrong: unknown[] = []
  const clients = [world.client(), new MemoryIdempotency()] as Client<any>[]
  for (const row of table) {
    const found: unknown[] = []
    for (const client of clients) {
      const answer = call(client, row).then(() => 'ok', (error: unknown) => (/^TypeError: (\w+ must not be negative|not an HTTP method)/.test(String(error)) ? 'local' : codeOf(error) ?? String(error)))
      found.push(await Promise.race([answer, sleep(5000, 'it waits', { ref: false })]))
    }
    // Some of it the client does not even send.
    if (found[0] !== found[1] || (found[0] !== row[2] && found[0] !== 'local')) wrong.push([...found, JSON.stringify(row).slice(0, 200)])
  }
  assert.deepEqual(wrong, [], wrong.join('\n'))
})

type Case = { name: string; scope?: unknown; key?: string; runs: Run[]; state: string | null; kept: boolean }
type Run = { in: string; path?: string; ttl_ms?: number; do: any[]; answer?: { status: number; body?: string }; ends: Record<string, unknown> }
const { cases }: { cases: Case[] } = JSON.parse(await readFile(new URL('../../../../test/http/contract.json', import.meta.url), 'utf8'))

/** As the contract names it: the members in snake case, and small numbers as numbers. */
function plain(given: any): any {
  if (typeof given === 'bigint') return Number(given)
  if (typeof given !== 'object' || given === null) return given
  return Object.fromEntries(Object.entries(given).map(([name, value]) => [name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`), plain(value)]))
}

/** What is expected and not found, of the members that are named. */
function differs(found: any, expected: any): boolean {
  if (expected === null) return false
  if (typeof expected !== 'object') return found !== expected
  return Object.entries(expected).some(([name, value]) => found?.[name] !== value)
}

/** Whether an error has one of these SQLSTATEs or classes. */
const raised = (error: unknown, expected: string | string[] | null): boolean =>
  expected === null || [expected].flat().some((one) => one === codeOf(error) || one === (error as Error).constructor.name)

async function perform(client: Client<any>, run: Run, scope: string, one: string): Promise<any> {
  const filled = (given: object): any => JSON.parse(JSON.stringify(given).replaceAll('$key', one))
  const handler = (target: object, job?: any) => async () => {
    for (const [name, ...rest] of run.do) {
      if (name === 'never') assert.fail('it ran')
      else if (name === 'throw') throw new Error('thrown')
      else if (name === 'sleep') await sleep(rest[0] * 1000)
      else if (name === 'step') assert.equal(await job.step(rest[0], () => rest[1]), rest[2])
      else {
        const [given, expected] = rest
        const found = await call(target, [name, filled(given)]).then(plain, (error: unknown) => {
          if (!expected?.raises || !raised(error, expected.raises)) throw error
          return expected
        })
        if (differs(found, expected)) assert.fail(`${name} gives ${JSON.stringify(found)}`)
      }
    }
    return run.answer ?? { status: 200 }
  }
  const options = { scope, key: one, method: 'POST', path: run.path ?? '/', ttlMs: run.ttl_ms }
  switch (run.in) {
    case 'request': return client.request(options, (tx) => handler(client.on(tx))())
    case 'transaction': return client.transaction((tx) => handler(client.on(tx))())
    case 'job': return client.job(options, (job) => handler(client, job)())
    default: return client.job(options, (job) => job.finish((tx) => handler(client.on(tx))()).then(() => undefined))
  }
}

for (const { name, scope, key: given, runs, state, kept } of cases) {
  test(`server and double: ${name}`, async () => {
    for (const [where, client] of [['server', world.client()], ['double', new MemoryIdempotency()]] as [string, Client<any>][]) {
      const one = given ?? key()
      const owner = valueOf(scope ?? 'scope') as string
      for (const [number, run] of runs.entries()) {
        const said = `${where}, run ${number + 1}`
        const end = await perform(client, run, owner, one).then((result) => plain(result), (error: unknown) => ({ error }))
        if ('raises' in run.ends) assert.ok(end.error && raised(end.error, run.ends['raises'] as string), `${said}: ${String(end.error ?? JSON.stringify(end))}`)
        else assert.ok(!end.error && !differs(end, run.ends), `${said}: ${String(end.error?.stack ?? JSON.stringify(end))}`)
        // The client counts the time from before the claim, the server from the claim.
        if (run.ttl_ms) await sleep(run.ttl_ms)
      }
      const row = await client.lookup(owner, one).catch(() => null)
      assert.deepEqual([row?.state ?? null, await client.onceAt(one, 'effect') !== null], [state, kept], where)
    }
  })
}

test('an option that a function does not have is refused, with the names of its options', async () => {
  const calls: [name: string, given: unknown[], options: string][] = [
    ['publish', ['t', 1], 'messageKey, headers, deliverAfter, deliverAfterMs'], ['once', ['s', 't'], 'ttl, ttlMs'], ['outboxTake', [], 'maxMessages, lease, leaseMs, topics, wait, waitMs'],
    ['complete', ['s', 'k', 200], 'body, headers, claimToken'], ['setMany', [['u'], ['t'], ['e'], ['a'], [true], [1]], 'none'],
    ['claim', ['s', 'k'], 'requestHash, ttl, ttlMs, lease, leaseMs, wait, waitMs, request'],
  ]
  for (const client of [world.client(), new MemoryIdempotency()] as any[]) {
    for (const on of [client, { on: client }]) {
      for (const [name, given, options] of calls) {
        const run = async (): Promise<unknown> => (on === client ? client[name](...given, { message_key: 'x' })
          : client.transaction((tx: unknown) => client.on(tx)[name](...given, { message_key: 'x' })))
        await assert.rejects(run, new RegExp(`^TypeError: ${name}\\(\\) does not use the option message_key; its options are ${options}$`))
      }
    }
    await assert.rejects(client.once('s', 't', 5), /^TypeError: the options of once\(\) must be an object, not 5$/)
    assert.deepEqual(await client.outboxTake({ topics: ['t'] }), [])
  }
})

test('an argument that is not even sent does not end the transaction', async () => {
  for (const client of [world.client(), new MemoryIdempotency()] as Client<any>[]) {
    const result = await client.request({ scope: 'scope', key: key() }, async (tx) => {
      await assert.rejects(client.on(tx).once(7 as never, 'token'), TypeError)
      return { status: 200 }
    })
    assert.equal(result.status, 200)
  }
})

const end = (client: Client<any>, call: (client: Client<any>) => Promise<unknown>): Promise<unknown> => call(client).catch((error: unknown) => sqlstateOf(error) ?? String(error))

test('the double refuses another argument before a key that has no record, as the server does', async () => {
  for (const call of [(client: Client<any>) => client.complete('s', 'short', 99), (client: Client<any>) => client.checkpoint('s', 'short', '')]) {
    assert.deepEqual([await end(new MemoryIdempotency(), call), await end(world.client(), call)], ['22023', '22023'], String(call))
  }
})

test('the double ends a call as the server does', async () => {
  const calls: ((client: Client<any>) => Promise<unknown>)[] = [
    (client) => client.outboxNack(10n ** 12n, { error: 'x' }), (client) => client.claim('s', key(), { requestHash: Buffer.alloc(0) }),
    (client) => client.claimMany('s', [key()], { requestHashes: [Buffer.alloc(65)] }), (client) => client.claim('s', key(), { lease: '1 year' }),
    (client) => client.set('u', 'p', '1', 'like', true, 1, { excludes: ['like'] }), (client) => client.onceMany('s', ['a', null as never]),
    (client) => client.once('s', null as never), (client) => client.publish(null as never, 1), (client) => client.release('s', 'short'),
    (client) => client.completeMany('s', [], []), (client) => client.canonicalJson(null as never),
    (client) => client.job({ scope: 's', key: key() }, async (job) => { await job.step('large', () => 'x'.repeat(1_100_000)) }),
    async (client) => {
      const user = key()
      await client.set(user, 'post', '1', 'like', false, 1)
      return client.actionStates(user, 'post', ['1'])
    },
    async (client) => {
      const one = key()
      return (await client.claimMany('s', [one, one])).map(({ outcome, leaseExpiresAt }) => [outcome, leaseExpiresAt === null])
    },
    async (client) => {
      const one = key()
      await client.claim('s', one)
      const { outcome, leaseExpiresAt, attempt, claimToken } = await client.claim('s', one)
      return [outcome, leaseExpiresAt === null, attempt, claimToken]
    },
    async (client) => {
      const one = key()
      await client.request({ scope: 's', key: one }, () => ({ status: 201, body: 'x' }))
      const { expiresAt, ...claim } = await client.claim('s', one)
      return [claim, expiresAt === null]
    },
    (client) => client.complete('s', null as never, 200), (client) => client.complete('s', key(), 200, { body: 'x'.repeat(1_100_000) }),
    (client) => client.release('s', key(), { claimToken: 10n ** 15n }),
    async (client) => {
      const one = key()
      const { claimToken } = await client.claim('s', one)
      const token = { claimToken }
      return [await client.release('s', one, token), await client.release('s', one, token), await client.release('s', '', token)]
    },
    async (client) => {
      const one = key()
      const { claimToken } = await client.claim('s', one)
      const found = [await client.erase('s', one)]
      for (const recoveryState of [null, { b: 'é', a: 1 }]) {
        await client.checkpoint('s', one, 'charged', { recoveryState, claimToken })
        found.push((await client.lookup('s', one))!.recoveryStateText as never)
      }
      found.push(await client.erase('s', one), await client.complete('s', one, 200, { claimToken }), await client.erase('s', one))
      return [...found, await client.complete('s', one, 200, { claimToken }), (await client.claim('s', one)).recoveryPoint]
    },
    async (client) => {
      const [claimed, completed] = [key(), key()]
      await client.claim('s', claimed, { request: { a: 1 } })
      const found = [await client.erase('s', claimed), await client.erase('s', claimed), Object.keys((await client.lookup('s', claimed))!).sort()]
      const { claimToken } = await client.claim('s', completed, { request: {} })
      await client.fail('s', completed, { claimToken })
      const again = await client.claim('s', completed)
      found.push(await client.erase('s', completed), await client.complete('s', completed, 200, { claimToken: again.claimToken }))
      return [...found, await client.erase('s', completed)]
    },
    async (client) => {
      const user = key()
      await client.set(user, 'post', '1', 'like', true, 1)
      return [await end(client, () => client.set(user, 'post', '1', 'like', null as never, 2)), await client.set(user, 'post', '1', 'like', false, 2)]
    },
    async (client) => {
      const topic = key()
      await client.publish(topic, { bb: 1e21, a: [-1.25e-9, {}], 'é': [] }, { headers: { bb: 1, a: 'ž' } })
      await client.publish(topic, 1, { headers: null })
      return (await client.outboxTake({ topics: [topic] })).map(({ payloadText, headersText }) => [payloadText, headersText])
    },
  ]
  for (const call of calls) assert.deepEqual(await end(new MemoryIdempotency(), call), await end(world.client(), call), String(call))
})
