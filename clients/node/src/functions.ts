/**
 * The statement for each function of the SQL interface. Names are qualified by
 * the schema, parameters are named and cast, and columns are text.
 */
import {
  array, asciiJson, bigint, bool, bytes, describe, headers, int, interval, json, text,
  type Bigint, type Headers, type Json, type Parameter,
} from './values.js'
import { tracedHeaders } from './observe.js'

export interface Statement<T> {
  text: string
  values: Parameter[]
  read(rows: Row[]): T
  /** The scope that determines the shard. */
  scope?: string | undefined
}

export type Row = Record<string, string | null>

/** The request that a claim compares, or its hash. A body that is a string is JSON. */
export type RequestIdentity =
  | { requestHash?: Uint8Array | null }
  | { method: string; path: string; body?: string | Uint8Array | null; /** Paths of members of the JSON to leave out. */ without?: string[][] }

export interface Ttl { ttl?: string | null | undefined; ttlMs?: number | undefined }
export interface Lease { lease?: string | null | undefined; leaseMs?: number | undefined }
export interface Wait { wait?: string | null | undefined; waitMs?: number | undefined }
/** The time limit of a handler. */
export interface Timeout { timeout?: string | null | undefined; timeoutMs?: number | undefined }
export interface Held { claimToken?: Bigint | null | undefined }

export type Outcome = 'new' | 'replay' | 'erased' | 'in_progress' | 'hash_conflict' | 'expired'

const CLAIM = {
  outcome: 'text', claimToken: 'bigint', attempt: 'int', responseStatus: 'int', responseHeaders: 'json',
  responseBody: 'text', responseBytes: 'bytes', recoveryPoint: 'text', recoveryState: 'json', leaseExpiresAt: 'time',
  expiresAt: 'time',
} as const
const LOOKUP = {
  state: 'text', attempt: 'int', requestHash: 'bytes', responseStatus: 'int', responseHeaders: 'json',
  responseBody: 'text', responseBytes: 'bytes', error: 'text', recoveryPoint: 'text', recoveryState: 'json',
  createdAt: 'time', completedAt: 'time', leaseExpiresAt: 'time', expiresAt: 'time',
} as const
const ACTION = { isActive: 'bool', lastActionId: 'bigint', processed: 'bool' } as const
const ADVANCE = { shouldProcess: 'bool', lastActionId: 'bigint' } as const
const STATS = [
  'claims_new', 'claims_replay', 'claims_erased', 'claims_in_progress', 'claims_hash_conflict', 'claims_expired',
  'takeovers', 'completions', 'failures', 'rate_limited', 'advances', 'advances_stale', 'appends_appended', 'appends_duplicate',
  'appends_overlap', 'appends_gap', 'appends_in_flight', 'appends_version_conflict', 'once_first', 'once_seen',
  'messages_published', 'messages_taken', 'messages_acked', 'messages_nacked', 'messages_dead', 'keys_deleted',
  'tokens_deleted', 'messages_deleted', 'cleanup_passes',
] as const

/** The row of idem_claim. All columns except the outcome can be null. */
export interface Claim {
  outcome: Outcome
  claimToken: bigint | null
  attempt: number | null
  responseStatus: number | null
  responseHeaders: Headers | null
  responseBody: string | null
  responseBytes: Buffer | null
  recoveryPoint: string | null
  /** Parsed; recoveryStateText has all digits of its numbers. */
  recoveryState: Json
  recoveryStateText: string | null
  leaseExpiresAt: Date | null
  expiresAt: Date | null
}
export interface HeldClaim extends Claim {
  leaseMs: number | null
  maxResponseSize: number
  /** The encoding of the database. */
  encoding: string
}
export interface Lookup extends Omit<Claim, 'outcome' | 'claimToken'> {
  state: 'started' | 'completed' | 'failed' | 'erased'
  attempt: number
  requestHash: Buffer | null
  error: string | null
  createdAt: Date
  completedAt: Date | null
  expiresAt: Date
}
/** A claim that was taken over, with its stored request. */
export interface ResumedClaim {
  scope: string
  key: string
  claimToken: bigint
  attempt: number
  /** Parsed; requestText has all digits of its numbers. */
  request: Json
  requestText: string
  recoveryPoint: string | null
  recoveryState: Json
  recoveryStateText: string | null
  createdAt: Date
  leaseExpiresAt: Date
}
/** A message key of which no relay can take a due message. */
export interface BlockedLane {
  topic: string
  firstId: bigint
  blockedSince: Date
  waiting: bigint
  reason: 'leased' | 'paused' | 'held' | 'lost'
  until: Date | null
  pid: number | null
}
export interface Action { isActive: boolean; lastActionId: bigint; processed: boolean }
export interface Advance { shouldProcess: boolean; lastActionId: bigint }
export interface Message {
  id: bigint
  messageId: string
  topic: string
  messageKey: string | null
  /** Parsed; payloadText has all digits of its numbers. */
  payload: Json
  payloadText: string
  headers: Json
  headersText: string | null
  attempt: number
  createdAt: Date
}
export interface Append {
  outcome: 'appended' | 'duplicate' | 'overlap' | 'gap' | 'in_flight' | 'version_conflict'
  lastClientSeq: bigint
  version: bigint
}
export interface MetricSample {
  name: string
  labels: { [name: string]: string }
  value: number
  type: string
  help: string
}
export interface HealthCheck {
  checkName: string
  status: 'ok' | 'warning' | 'critical'
  value: number | null
  threshold: number | null
  detail: string
}

export type ClaimOptions = RequestIdentity & Ttl & Lease & Wait & {
  /** The request that resume() returns if the claim fails or its lease ends; null stores none. */
  request?: Json | undefined
}

type Kind = 'text' | 'int' | 'bigint' | 'bool' | 'json' | 'bytes' | 'time' | 'float'
type Argument = [name: string, type: string, value: Parameter | Nested | undefined]

/** An expression of several parameters as one argument. */
class Nested {
  constructor(readonly call: string, readonly arguments_: Argument[]) {}
}

const snake = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`)
const camel = (name: string) => name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase())
export const quoteIdentifier = (name: string) => `"${name.replaceAll('"', '""')}"`

function column(name: string, kind: Kind): string {
  const source = `c.${quoteIdentifier(snake(name))}`
  const expression =
    kind === 'bytes' ? `pg_catalog.encode(${source}, 'hex')`
    : kind === 'time' ? `pg_catalog.date_part('epoch', ${source})::text`
    : `${source}::text`
  return `${expression} AS ${quoteIdentifier(name)}`
}

function parsed(value: string | null, kind: Kind): unknown {
  if (value === null) return null
  switch (kind) {
    case 'text': return value
    case 'int': case 'float': return Number(value)
    case 'bigint': return BigInt(value)
    case 'bool': return value === 'true'
    case 'json': return JSON.parse(value)
    case 'bytes': return Buffer.from(value, 'hex')
    case 'time': return new Date(Math.max(-8.64e15, Math.min(8.64e15, Math.floor(Number(value) * 1000))))
  }
}

/** A row as an object. The text of json is kept, too, because it has all digits of numbers. */
function record(row: Row, kinds: Record<string, Kind>): Record<string, unknown> {
  const made: Record<string, unknown> = {}
  for (const name in kinds) {
    const kind = kinds[name]!
    const value = row[name] ?? null
    made[name] = parsed(value, kind)
    if (kind === 'json' && name !== 'responseHeaders' && name !== 'labels') made[`${name}Text`] = value
  }
  return made
}

const traced = (headers: Json | undefined): Json[] | undefined => (headers === undefined ? undefined : [headers])

/** An undefined argument gets its default. */
function optional<V, T>(value: V | undefined, name: string, make: (value: V, name: string) => T): T | undefined {
  return value === undefined ? undefined : make(value, name)
}

/** The limit of cached texts of one schema. Only fingerprints that leave out many members can reach it. */
const MAX_TEXTS = 1000

/** Arguments that determine the server of a record. They come first in each function that has records. */
const SCOPES = new Set(['scope', 'user_id', 'aggregate'])
const isScope = (parameter: string): boolean => SCOPES.has(parameter.replace(/s$/, ''))

/** On a shard, each call first asks the guard, which keeps the scope there until the transaction ends. */
export function statements(schema: string, isShard = false) {
  const home = quoteIdentifier(schema)

  function expression(name: string, given: Argument[], values: Parameter[]): string {
    const isBuiltin = name.startsWith('pg_catalog.')
    const list = given.flatMap(([parameter, type, value]) => {
      if (value === undefined) return []
      let passed: string
      if (value instanceof Nested) passed = expression(value.call, value.arguments_, values)
      // A role's name is quoted, so that it keeps its capitals.
      else if (type === 'regrole') passed = `pg_catalog.quote_ident($${values.push(value)}::text)::regrole`
      else passed = `$${values.push(value)}::${type}`
      if (isShard && isScope(parameter)) passed = `${home}.idem_pin_scope(${passed})`
      return [isBuiltin ? passed : `${quoteIdentifier(parameter)} => ${passed}`]
    })
    return `${isBuiltin ? name : `${home}.${quoteIdentifier(name)}`}(${list.join(', ')})`
  }

  /** Returns the key of a statement's text, and appends the values of its parameters in the order of expression(). */
  function shape(given: Argument[], values: Parameter[]): string {
    let made = ''
    for (const [parameter, type, value] of given) {
      if (value === undefined) continue
      if (value instanceof Nested) made += `${parameter}=${value.call}(${shape(value.arguments_, values)}),`
      else {
        values.push(value)
        made += `${parameter}:${type},`
      }
    }
    return made
  }

  const known = new Map<string, string>()
  function textOf(name: string, given: Argument[], values: Parameter[], make: (call: string) => string): string {
    const key = `${name}(${shape(given, values)}`
    let found = known.get(key)
    if (found === undefined) {
      found = make(expression(name, given, []))
      if (known.size < MAX_TEXTS) known.set(key, found)
    }
    return found
  }

  function scopeOf([first]: Argument[]): string | undefined {
    return first && SCOPES.has(first[0]) && typeof first[2] === 'string' ? first[2] : undefined
  }

  function rows<T>(name: string, given: Argument[], kinds: Record<string, Kind>): Statement<T[]> {
    const values: Parameter[] = []
    const text = textOf(name, given, values, (call) =>
      `SELECT ${Object.entries(kinds).map(([one, kind]) => column(one, kind)).join(', ')} FROM ${call} AS c`)
    return {
      text, values, scope: scopeOf(given),
      read: (found) => found.map((row) => record(row, kinds) as T),
    }
  }

  function row<T>(name: string, given: Argument[], kinds: Record<string, Kind>): Statement<T> {
    const statement = rows<T>(name, given, kinds)
    return { ...statement, read: (found) => statement.read(found)[0]! }
  }

  function list<T>(name: string, given: Argument[], kind: Kind): Statement<T[]> {
    const values: Parameter[] = []
    return {
      text: textOf(name, given, values, (call) => `SELECT ${column('value', kind)} FROM ${call} AS c(value)`), values, scope: scopeOf(given),
      read: (found) => found.map((one) => parsed(one['value'] ?? null, kind) as T),
    }
  }

  function one<T>(name: string, given: Argument[], kind: Kind): Statement<T> {
    const statement = list<T>(name, given, kind)
    return { ...statement, read: (found) => statement.read(found)[0]! }
  }

  const nothing = (name: string, given: Argument[]): Statement<void> => ({ ...one(name, given, 'text'), read: () => undefined })

  const scopeAndKey = (scope: string, key: string): Argument[] =>
    [['scope', 'text', text(scope, 'scope')], ['key', 'text', text(key, 'key')]]
  const ttl = (options: Ttl): Argument => ['ttl', 'interval', interval(options.ttl, options.ttlMs, 'ttl')]
  const lease = (options: Lease): Argument => ['lease', 'interval', interval(options.lease, options.leaseMs, 'lease')]
  const wait = (options: Wait): Argument => ['wait', 'interval', interval(options.wait, options.waitMs, 'wait')]
  const token = (options: Held): Argument =>
    ['claim_token', 'bigint', optional(options.claimToken, 'claimToken', bigint)]
  const hashArguments = (method: string, path: string, body: string | Uint8Array | null | undefined): Argument[] => [
    ['method', 'text', text(method, 'method')], ['path', 'text', text(path, 'path')],
    body instanceof Uint8Array ? ['body', 'bytea', bytes(body, 'body')] : ['body', 'text', optional(body, 'body', text)],
  ]
  const withoutMembers = (body: string, paths: string[][]): Argument => paths.reduce<Argument>(
    ([, , document], path) => ['body', 'jsonb', new Nested('pg_catalog.jsonb_delete_path', [['document', 'jsonb', document],
      ['path', 'text[]', array(path, 'path', text)]])], ['body', 'text', text(body, 'body')])
  const hash = (options: RequestIdentity): Argument => ['request_hash', 'bytea',
    'method' in options
      ? new Nested('idem_request_hash', typeof options.body === 'string'
        ? [...hashArguments(options.method, options.path, undefined).slice(0, 2), withoutMembers(options.body, options.without ?? [])]
        : hashArguments(options.method, options.path, options.body))
      : optional(options.requestHash, 'requestHash', bytes)]
  const claimArguments = (scope: string, key: string, options: ClaimOptions): Argument[] =>
    [...scopeAndKey(scope, key), hash(options), ttl(options), lease(options), wait(options),
      ['request', 'jsonb', optional(options.request, 'request', json)]]
  const user = (userId: string): Argument => ['user_id', 'text', text(userId, 'userId')]
  const entity = (userId: string, entityType: string, entityId: string): Argument[] =>
    [user(userId), ['entity_type', 'text', text(entityType, 'entityType')], ['entity_id', 'text', text(entityId, 'entityId')]]
  const texts = (name: string, values: readonly (string | null)[] | null | undefined): Argument =>
    [snake(name), 'text[]', optional(values, name, (list, as) => array(list, as, text))]
  const bigints = (name: string, values: readonly (Bigint | null)[] | null | undefined): Argument =>
    [snake(name), 'bigint[]', optional(values, name, (list, as) => array(list, as, bigint))]
  const ints = (name: string, values: readonly (number | null)[] | null | undefined): Argument =>
    [snake(name), 'int[]', optional(values, name, (list, as) => array(list, as, int))]

  return {
    // Request identity

    /** Bytes are hashed unchanged, a string as JSON. */
    requestHash: (method: string, path: string, body?: string | Uint8Array | null): Statement<Buffer> =>
      one('idem_request_hash', hashArguments(method, path, body), 'bytes'),
    /** The canonical form of RFC 8785. The document is JSON text. */
    canonicalJson: (document: string): Statement<string> =>
      one('idem_canonical_json', [['document', 'jsonb', text(document, 'document')]], 'text'),

    // Request keys

    keyIsValid: (key: string | null): Statement<boolean> =>
      one('idem_key_is_valid', [['key', 'text', text(key, 'key')]], 'bool'),
    claim: (scope: string, key: string, options: ClaimOptions = {}): Statement<Claim> =>
      row('idem_claim', claimArguments(scope, key, options), CLAIM),
    complete: (scope: string, key: string, status: number,
      options: { body?: string | Uint8Array | null; headers?: Headers | null } & Held = {}): Statement<boolean> =>
      one('idem_complete', [
        ...scopeAndKey(scope, key), ['response_status', 'int', int(status, 'status')],
        options.body instanceof Uint8Array ? ['response_body', 'bytea', bytes(options.body, 'body')]
          : ['response_body', 'text', text(options.body ?? null, 'body')],
        ['response_headers', 'json', optional(options.headers, 'headers', headers)], token(options)], 'bool'),
    checkpoint: (scope: string, key: string, recoveryPoint: string,
      options: { recoveryState?: Json } & Lease & Held = {}): Statement<Date> =>
      one('idem_checkpoint', [
        ...scopeAndKey(scope, key), ['recovery_point', 'text', text(recoveryPoint, 'recoveryPoint')],
        ['recovery_state', 'json', optional(options.recoveryState, 'recoveryState', asciiJson)],
        lease(options), token(options)], 'time'),
    heartbeat: (scope: string, key: string, options: Lease & Held = {}): Statement<Date> =>
      one('idem_heartbeat', [...scopeAndKey(scope, key), lease(options), token(options)], 'time'),
    fail: (scope: string, key: string, options: { error?: string | null } & Held = {}): Statement<boolean> =>
      one('idem_fail', [...scopeAndKey(scope, key), ['error', 'text', optional(options.error, 'error', text)],
        token(options)], 'bool'),
    release: (scope: string, key: string, options: Held = {}): Statement<boolean> =>
      one('idem_release', [...scopeAndKey(scope, key), token(options)], 'bool'),
    /** The live record, or undefined. */
    lookup: (scope: string, key: string): Statement<Lookup | undefined> => {
      const statement = row<Lookup>('idem_lookup', scopeAndKey(scope, key), LOOKUP)
      return { ...statement, read: (found) => (found[0]?.['state'] ? statement.read(found) : undefined) }
    },
    /** Takes over claims with a stored request that have failed or whose lease has ended, the oldest first. */
    resume: (options: { maxClaims?: number; scopes?: string[] | null } & Lease & Wait = {}): Statement<ResumedClaim[]> =>
      rows('idem_resume', [['max_claims', 'int', optional(options.maxClaims, 'maxClaims', int)], lease(options),
        texts('scopes', options.scopes), wait(options)],
        { scope: 'text', key: 'text', claimToken: 'bigint', attempt: 'int', request: 'json', recoveryPoint: 'text', recoveryState: 'json',
          createdAt: 'time', leaseExpiresAt: 'time' }),
    forget: (scope: string, key: string): Statement<boolean> => one('idem_forget', scopeAndKey(scope, key), 'bool'),
    erase: (scope: string, key: string): Statement<boolean> => one('idem_erase', scopeAndKey(scope, key), 'bool'),
    claimMany: (scope: string, keys: string[], options: { requestHashes?: (Uint8Array | null)[] | null } & Ttl & Lease = {}):
      Statement<(Claim & { ordinal: number; key: string })[]> =>
      rows('idem_claim_many', [['scope', 'text', text(scope, 'scope')], texts('keys', keys),
        ['request_hashes', 'bytea[]', optional(options.requestHashes, 'requestHashes', (given, as) => array(given, as, bytes))],
        ttl(options), lease(options)], { ordinal: 'int', key: 'text', ...CLAIM }),
    completeMany: (scope: string, keys: string[], statuses: number[], options: {
      bodies?: (string | null)[] | null; headers?: (Headers | null)[] | null; claimTokens?: (Bigint | null)[] | null } = {}):
      Statement<{ ordinal: number; key: string; completed: boolean }[]> =>
      rows('idem_complete_many', [['scope', 'text', text(scope, 'scope')], texts('keys', keys),
        ['response_statuses', 'int[]', array(statuses, 'statuses', int)],
        ['response_bodies', 'text[]', optional(options.bodies, 'bodies', (given, as) => array(given, as, text))],
        ['response_headers', 'json[]', optional(options.headers, 'headers', (given, as) => array(given, as, headers))],
        bigints('claimTokens', options.claimTokens)], { ordinal: 'int', key: 'text', completed: 'bool' }),
    /** The handler is the signature of an SQL function, such as 'place_order(jsonb)'. A request that is a string is JSON text. */
    run: (scope: string, key: string, handler: string, request: string | { [name: string]: Json | undefined } | Json[],
      options: Ttl & Wait = {}):
      Statement<{ outcome: Outcome; responseStatus: number | null; responseHeaders: Headers | null; responseBody: string | null }> =>
      row('idem_run', [...scopeAndKey(scope, key), ['handler', 'text::regprocedure', text(handler, 'handler')],
        ['request', 'jsonb', typeof request === 'string' ? text(request, 'request') : json(request, 'request')],
        ttl(options), wait(options)],
        { outcome: 'text', responseStatus: 'int', responseHeaders: 'json', responseBody: 'text' }),

    // User actions

    tryAdvance: (userId: string, entityType: string, entityId: string, actionId: Bigint): Statement<Advance> =>
      row('idem_try_advance', [...entity(userId, entityType, entityId),
        ['action_id', 'bigint', bigint(actionId, 'actionId')]], ADVANCE),
    toggle: (userId: string, entityType: string, entityId: string, actionType: string, actionId: Bigint): Statement<Action> =>
      row('idem_toggle', [...entity(userId, entityType, entityId), ['action_type', 'text', text(actionType, 'actionType')],
        ['action_id', 'bigint', bigint(actionId, 'actionId')]], ACTION),
    set: (userId: string, entityType: string, entityId: string, actionType: string, active: boolean, actionId: Bigint,
      options: { excludes?: string[] | null } = {}): Statement<Action> =>
      row('idem_set', [...entity(userId, entityType, entityId), ['action_type', 'text', text(actionType, 'actionType')],
        ['active', 'boolean', bool(active, 'active')], ['action_id', 'bigint', bigint(actionId, 'actionId')],
        texts('excludes', options.excludes)], ACTION),
    isActive: (userId: string, entityType: string, entityId: string, actionType: string): Statement<boolean> =>
      one('idem_is_active', [...entity(userId, entityType, entityId),
        ['action_type', 'text', text(actionType, 'actionType')]], 'bool'),
    actionStates: (userId: string, entityType: string, entityIds: string[]):
      Statement<{ entityId: string; actionType: string; isActive: boolean; lastActionId: bigint }[]> =>
      rows('idem_action_states', [user(userId), ['entity_type', 'text', text(entityType, 'entityType')],
        texts('entityIds', entityIds)], { entityId: 'text', actionType: 'text', isActive: 'bool', lastActionId: 'bigint' }),
    forgetUser: (userId: string): Statement<bigint> => one('idem_forget_user', [user(userId)], 'bigint'),
    tryAdvanceMany: (userIds: string[], entityTypes: string[], entityIds: string[], actionIds: Bigint[]):
      Statement<(Advance & { ordinal: number })[]> =>
      rows('idem_try_advance_many', [texts('userIds', userIds), texts('entityTypes', entityTypes),
        texts('entityIds', entityIds), bigints('actionIds', actionIds)], { ordinal: 'int', ...ADVANCE }),
    setMany: (userIds: string[], entityTypes: string[], entityIds: string[], actionTypes: string[], actives: boolean[],
      actionIds: Bigint[]): Statement<(Action & { ordinal: number })[]> =>
      rows('idem_set_many', [texts('userIds', userIds), texts('entityTypes', entityTypes), texts('entityIds', entityIds),
        texts('actionTypes', actionTypes), ['actives', 'boolean[]', array(actives, 'actives', bool)],
        bigints('actionIds', actionIds)], { ordinal: 'int', ...ACTION }),

    // Client sequences

    tryAppend: (aggregate: string, clientId: string, clientSeq: Bigint, options: {
      eventCount?: number; expectedVersion?: Bigint | null; allowGaps?: boolean } & Wait = {}): Statement<Append> =>
      row('idem_try_append', [['aggregate', 'text', text(aggregate, 'aggregate')],
        ['client_id', 'text', text(clientId, 'clientId')], ['client_seq', 'bigint', bigint(clientSeq, 'clientSeq')],
        ['event_count', 'int', optional(options.eventCount, 'eventCount', int)],
        ['expected_version', 'bigint', optional(options.expectedVersion, 'expectedVersion', bigint)],
        ['allow_gaps', 'boolean', optional(options.allowGaps, 'allowGaps', bool)], wait(options)],
        { outcome: 'text', lastClientSeq: 'bigint', version: 'bigint' }),
    lastClientSeq: (aggregate: string, clientId: string): Statement<bigint> =>
      one('idem_last_client_seq', [['aggregate', 'text', text(aggregate, 'aggregate')],
        ['client_id', 'text', text(clientId, 'clientId')]], 'bigint'),

    // Once-only tokens

    once: (scope: string, token: string, options: Ttl = {}): Statement<boolean> =>
      one('idem_once', [['scope', 'text', text(scope, 'scope')], ['token', 'text', text(token, 'token')], ttl(options)], 'bool'),
    /** The time of the token's first use, or null. */
    onceAt: (scope: string, token: string): Statement<Date | null> =>
      one('idem_once_at', [['scope', 'text', text(scope, 'scope')], ['token', 'text', text(token, 'token')]], 'time'),
    onceMany: (scope: string, tokens: string[], options: Ttl = {}): Statement<string[]> =>
      list('idem_once_many', [['scope', 'text', text(scope, 'scope')], texts('tokens', tokens), ttl(options)], 'text'),

    // Outbox

    publish: (topic: string, payload: Json, options: {
      messageKey?: string | null; headers?: Json; deliverAfter?: string | null; deliverAfterMs?: number } = {}): Statement<string> =>
      one('idem_publish', [['topic', 'text', text(topic, 'topic')], ['payload', 'jsonb', json(payload, 'payload') ?? 'null'],
        ['message_key', 'text', optional(options.messageKey, 'messageKey', text)],
        ['headers', 'jsonb', optional(tracedHeaders(options.headers), 'headers', json)],
        ['deliver_after', 'interval', interval(options.deliverAfter, options.deliverAfterMs, 'deliverAfter')]], 'text'),
    publishMany: (topics: string[], payloads: Json[], options: {
      messageKeys?: (string | null)[] | null; headers?: Json[] | null; deliverAfter?: string | null; deliverAfterMs?: number } = {}):
      Statement<{ ordinal: number; messageId: string }[]> =>
      rows('idem_publish_many', [texts('topics', topics),
        ['payloads', 'jsonb[]', array(payloads, 'payloads', (value, as) => json(value, as) ?? 'null')],
        texts('messageKeys', options.messageKeys),
        // A single element applies to all messages.
        ['headers', 'jsonb[]', optional(options.headers?.map((one) => tracedHeaders(one)) ?? options.headers ?? traced(tracedHeaders(undefined)), 'headers',
          (given, as) => array(given, as, json))],
        ['deliver_after', 'interval', interval(options.deliverAfter, options.deliverAfterMs, 'deliverAfter')]],
        { ordinal: 'int', messageId: 'text' }),
    outboxTake: (options: { maxMessages?: number; topics?: string[] | null } & Lease & Wait = {}): Statement<Message[]> =>
      rows('idem_outbox_take', [['max_messages', 'int', optional(options.maxMessages, 'maxMessages', int)], lease(options),
        texts('topics', options.topics), wait(options)],
        { id: 'bigint', messageId: 'text', topic: 'text', messageKey: 'text', payload: 'json', headers: 'json',
          attempt: 'int', createdAt: 'time' }),
    outboxAck: (ids: Bigint[]): Statement<number> => one('idem_outbox_ack', [bigints('ids', ids)], 'int'),
    outboxNack: (id: Bigint, options: { error?: string | null; retryAfter?: string | null; retryAfterMs?: number; attempt?: number | null } = {}):
      Statement<'pending' | 'dead' | 'lost'> =>
      one('idem_outbox_nack', [['id', 'bigint', bigint(id, 'id')], ['error', 'text', optional(options.error, 'error', text)],
        ['retry_after', 'interval', interval(options.retryAfter, options.retryAfterMs, 'retryAfter')],
        ['attempt', 'int', optional(options.attempt, 'attempt', int)]], 'text'),
    outboxRequeue: (ids?: Bigint[] | null): Statement<number> => one('idem_outbox_requeue', [bigints('ids', ids)], 'int'),
    outboxExtend: (ids: Bigint[], options: { attempts?: number[] | null } & Lease = {}): Statement<bigint[]> =>
      list('idem_outbox_extend', [bigints('ids', ids), lease(options), ints('attempts', options.attempts)], 'bigint'),
    outboxRelease: (ids: Bigint[], options: { attempts?: number[] | null } = {}): Statement<number> =>
      one('idem_outbox_release', [bigints('ids', ids), ints('attempts', options.attempts)], 'int'),
    outboxBlocked: (maxLanes?: number): Statement<BlockedLane[]> =>
      rows('idem_outbox_blocked', [['max_lanes', 'int', optional(maxLanes, 'maxLanes', int)]],
        { topic: 'text', firstId: 'bigint', blockedSince: 'time', waiting: 'bigint', reason: 'text', until: 'time', pid: 'int' }),

    // Administration

    cleanup: (batchSize?: number): Statement<{ keysDeleted: bigint; tokensDeleted: bigint; messagesDeleted: bigint }> =>
      row('idem_cleanup', [['batch_size', 'int', optional(batchSize, 'batchSize', int)]],
        { keysDeleted: 'bigint', tokensDeleted: 'bigint', messagesDeleted: 'bigint' }),
    /** Deletes expired rows and returns them, so that you can archive them in the same transaction. */
    takeExpired: (kind: 'keys' | 'tokens' | 'messages', maxRows?: number): Statement<Json[]> =>
      list('idem_take_expired', [['kind', 'text', text(kind, 'kind')], ['max_rows', 'int', optional(maxRows, 'maxRows', int)]], 'json'),
    /** The counters of this database, or undefined if shared memory has no space for them. */
    stats: (): Statement<Record<string, bigint> | undefined> => ({
      text: `SELECT ${STATS.map((name) => column(camel(name), 'bigint')).join(', ')} FROM ${home}.idem_stats AS c ` +
        'WHERE c.datname = pg_catalog.current_database()',
      values: [],
      read: ([found]) => found &&
        Object.fromEntries(STATS.map((name) => [camel(name), BigInt(found[camel(name)] ?? 0)])),
    }),
    statsReset: (): Statement<void> => nothing('idem_stats_reset', []),
    metrics: (): Statement<string> => one('idem_metrics', [], 'text'),
    /** The samples of metrics(). */
    metricSamples: (): Statement<MetricSample[]> =>
      rows('idem_metric_samples', [], { name: 'text', labels: 'json', value: 'float', type: 'text', help: 'text' }),
    health: (): Statement<HealthCheck[]> =>
      rows('idem_health', [], { checkName: 'text', status: 'text', value: 'float', threshold: 'float', detail: 'text' }),
    abandoned: (options: { olderThan?: string; olderThanMs?: number } = {}): Statement<{
      scope: string; key: string; age: string; attempt: number; recoveryPoint: string | null; leaseExpiresAt: Date }[]> =>
      rows('idem_abandoned', [['older_than', 'interval', interval(options.olderThan, options.olderThanMs, 'olderThan')]],
        { scope: 'text', key: 'text', age: 'text', attempt: 'int', recoveryPoint: 'text', leaseExpiresAt: 'time' }),
    raiseClaimTokens: (atLeast: Bigint): Statement<bigint> =>
      one('idem_raise_claim_tokens', [['at_least', 'bigint', bigint(atLeast, 'atLeast')]], 'bigint'),
    repairOutbox: (): Statement<bigint> => one('idem_repair_outbox', [], 'bigint'),
    grant: (role: string): Statement<void> => nothing('idem_grant', [['grantee', 'regrole', text(role, 'role')]]),
    /** Grants only the functions of a relay. */
    grantRelay: (role: string): Statement<void> => nothing('idem_grant_relay', [['grantee', 'regrole', text(role, 'role')]]),
    /** Grants only statistics, metrics and health. */
    grantMonitor: (role: string): Statement<void> => nothing('idem_grant_monitor', [['grantee', 'regrole', text(role, 'role')]]),
    revoke: (role: string): Statement<void> => nothing('idem_revoke', [['grantee', 'regrole', text(role, 'role')]]),
  }
}

export type Statements = ReturnType<typeof statements>

/** The functions of the SQL interface as methods. */
export type Core = {
  [Name in keyof Statements]: Statements[Name] extends (...given: infer Given) => Statement<infer Result>
    ? (...given: Given) => Promise<Result>
    : never
}

/** All functions, over one function that sends a statement. */
export function coreOver(all: Statements, perform: <T>(statement: Statement<T>, name: keyof Statements, given: unknown[]) => Promise<T>): Core {
  const core: Record<string, unknown> = {}
  for (const name of Object.keys(all) as (keyof Statements)[]) {
    core[name] = async (...given: unknown[]) => {
      checkedOptions(name, given)
      return perform(statementOf(all, name, given), name, given)
    }
  }
  return core as Core
}

/** The statement of a function by its name. */
export function statementOf<T>(all: Statements, name: keyof Statements, given: unknown[]): Statement<T> {
  return (all[name] as (...given: unknown[]) => Statement<T>)(...given)
}

/** Refuses misspelled options, which are those that the function does not read. */
function checkedOptions(name: keyof Statements, given: unknown[]): void {
  const at = DECLARED[name].length
  const options = given[at]
  if (options === undefined) return
  const isObject = typeof options === 'object' && options !== null
  const called = isObject ? `${name} ${Object.keys(options).join()}` : name
  if (accepted.has(called)) return
  const read = new Set<string>()
  statementOf(DECLARED, name, given.with(at, new Proxy(isObject ? options : {}, {
    get: (target, option: string) => Reflect.get(read.add(option) && target, option) as unknown,
  })))
  if (!isObject && read.size > 0) throw new TypeError(`the options of ${name}() must be an object, not ${describe(options)}`)
  const unknown = isObject && Object.keys(options).find((option) => !read.has(option))
  if (unknown) throw new TypeError(`${name}() does not use the option ${unknown}; its options are ${[...read].join(', ') || 'none'}`)
  accepted.add(called)
}
const DECLARED = statements('')
/** Calls whose options have been checked. */
const accepted = new Set<string>()

const heldTexts = new Map<string, string>()
function heldText(text: string): string {
  let found = heldTexts.get(text)
  if (found === undefined) {
    found = text.replace(' FROM ', ", pg_catalog.date_part('epoch', c.lease_expires_at - pg_catalog.clock_timestamp())::text " +
      'AS "leaseSeconds", pg_catalog.current_setting(\'idempotency.max_response_size\', true) AS "maxResponseSize", ' +
      'pg_catalog.current_setting(\'server_encoding\') AS "encoding" FROM ')
    if (heldTexts.size < MAX_TEXTS) heldTexts.set(text, found)
  }
  return found
}

/** A claim, with its lease, the largest size of its response, and the encoding. */
export function held(claim: Statement<Claim>): Statement<HeldClaim> {
  return {
    text: heldText(claim.text),
    values: claim.values,
    scope: claim.scope,
    read: (rows) => ({
      ...claim.read(rows),
      leaseMs: rows[0]!['leaseSeconds'] == null ? null : Number(rows[0]!['leaseSeconds']) * 1000,
      maxResponseSize: size(rows[0]!['maxResponseSize'] ?? '1MB'),
      encoding: rows[0]!['encoding']!,
    }),
  }
}

const UNITS: Record<string, number> = { '': 1, B: 1, kB: 1024, MB: 1024 ** 2, GB: 1024 ** 3, TB: 1024 ** 4 }

/** The bytes of a setting as SHOW prints it. */
function size(shown: string): number {
  const [, digits, unit] = /^(\d+)([A-Za-z]*)$/.exec(shown) ?? []
  return Number(digits) * (UNITS[unit ?? ''] ?? 1)
}
