/** What the server refuses, the double refuses with the same code: the table of test/http, which is Python's, too. */
import assert from 'node:assert/strict'
import { readFile } from 'node:fs/promises'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { ClaimLost, IdempotencyError, sqlstateOf, TransactionEnded, type Client } from 'pg-idempotency'
import { MemoryIdempotency } from 'pg-idempotency/memory'
import { key, World } from './support.js'

let world: World
before(async () => { world = await World.make() })
after(() => world.end())

type Row = [name: string, given: Record<string, unknown>, state: string]
const table: Row[] = JSON.parse(await readFile(new URL('../../../../test/http/arguments.json', import.meta.url), 'utf8'))

/** Those that have a place of their own; all others have names. */
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

async function call(client: Client<any>, [name, given]: Row): Promise<unknown> {
  const places = POSITIONAL[name] ?? ['scope', 'key']
  const positional = places.map((place) => valueOf(given[place]))
  const named = Object.fromEntries(Object.entries(given).filter(([one]) => !places.includes(one)).map(([one, value]) => [camel(one), valueOf(value)]))
  const method = (client as unknown as Record<string, (...all: unknown[]) => Promise<unknown>>)[camel(name)]!
  return method(...positional, ...(Object.keys(named).length > 0 ? [named] : []))
}

const codeOf = (error: unknown): string | undefined => (error instanceof IdempotencyError && error.sqlstate?.startsWith('ID') ? error.sqlstate : sqlstateOf(error))

test('bad arguments: the same refusal by the server and by the double', async () => {
  assert.ok(table.length > 100)
  const wrong: unknown[] = []
  for (const row of table) {
    const found: unknown[] = []
    for (const client of [world.client(), new MemoryIdempotency()] as Client<any>[]) {
      const answer = call(client, row).then(() => 'ok', (error: unknown) => (/^TypeError: (\w+ is negative|not an HTTP method)/.test(String(error)) ? 'local' : codeOf(error) ?? String(error)))
      found.push(await Promise.race([answer, sleep(5000, 'it waits', { ref: false })]))
    }
    // Some of it the client does not even send.
    if (found[0] !== found[1] || (found[0] !== row[2] && found[0] !== 'local')) wrong.push([...found, JSON.stringify(row).slice(0, 200)])
  }
  assert.deepEqual(wrong, [], wrong.join('\n'))
})

const names = (error: unknown): string => (error as Error).constructor.name

test('faults: the same end on the server and in the double', async () => {
  const options = (one: string, more: object = {}) => ({ scope: 'scope', key: one, ...more })
  const swallow = (client: Client<any>) => async (tx: any) => {
    await client.on(tx).once('swallowed', 'token')
    // There is no claim of this key.
    await client.on(tx).complete('scope', key(), 200).catch(() => undefined)
    return { status: 200 }
  }
  const faults: Record<string, (client: Client<any>, one: string) => Promise<unknown>> = {
    'an error that a request swallows': (client, one) => client.request(options(one), swallow(client)),
    'an error that a transaction swallows': (client) => client.transaction(swallow(client)),
    'an error that a last step swallows': (client, one) => client.job(options(one), (job) => job.finish(swallow(client)).then(() => undefined)),
    'a call after an error': (client, one) => client.request(options(one), async (tx) => {
      await client.on(tx).once('', 'token').catch(() => undefined)
      await assert.rejects(client.on(tx).once('swallowed', 'token'), (error) => sqlstateOf(error) === '25P02')
      return { status: 200 }
    }),
    'what is not even sent does not end the transaction': (client, one) => client.request(options(one), async (tx) => {
      await client.on(tx).once(7 as never, 'token').catch(() => undefined)
      return { status: 200 }
    }),
    'a ttl that is over before the handler': (client, one) => client.request(options(one, { ttlMs: 50 }), async () => { await sleep(200); return { status: 200 } }),
    'a ttl that is over before the end of a job': (client, one) => client.job(options(one, { ttlMs: 50 }), async () => { await sleep(200); return { status: 200 } }),
    'a ttl that is over in the last step': (client, one) => client.job(options(one, { ttlMs: 200 }), (job) =>
      job.finish(async () => { await sleep(400); return { status: 200 } }).then(() => undefined)),
    'a status that no response has': (client, one) => client.request(options(one), () => ({ status: 99 })),
    'a status that no record has': (client, one) => client.request(options(one), () => ({ status: 600 })),
    'a scope that is too long': (client, one) => client.request({ scope: 'x'.repeat(513), key: one }, () => assert.fail('it ran')),
    'a key that is too short': (client) => client.request(options('short'), () => assert.fail('it ran')),
  }
  const wrong: unknown[] = []
  for (const [fault, run] of Object.entries(faults)) {
    const ends: string[] = []
    for (const client of [world.client(), new MemoryIdempotency()] as Client<any>[]) {
      const one = key()
      const end = await run(client, one).then((result) => `status ${(result as { status?: number } | undefined)?.status}`,
        // A claim is lost by the clock, or by a heartbeat.
        (error: unknown) => (error instanceof TransactionEnded || error instanceof ClaimLost ? names(error) : `${names(error)} ${codeOf(error) ?? ''}`))
      const seen = [await client.lookup('scope', one).then((row) => row?.state, () => 'no key'), await client.onceAt('swallowed', 'token')]
      ends.push(JSON.stringify([end, ...seen]))
    }
    if (ends[0] !== ends[1]) wrong.push([fault, ...ends])
  }
  assert.deepEqual(wrong, [])
})
