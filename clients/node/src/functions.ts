/**
 * The statement for each function of the SQL interface. Names are qualified by
 * the schema, parameters are named and cast, and columns are text.
 */
import {
  array, asciiJson, bigint, bool, bytes, describe, headers, int, interval, json, remembered, text,
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

/** The value of a column of each kind. A column whose kind ends in "?" can be null. */
interface Kinds {
  text: string
  int: number
  float: number
  bigint: bigint
  bool: boolean
  bytes: Buffer
  time: Date
  /** Parsed. Another member, whose name ends in Text, has all digits of its numbers. */
  json: Json
  headers: Headers
  labels: { [name: string]: string }
  outcome: Outcome
  state: 'started' | 'completed' | 'failed' | 'erased'
  appended: 'appended' | 'duplicate' | 'overlap' | 'gap' | 'in_flight' | 'version_conflict'
  nacked: 'pending' | 'dead' | 'lost'
  reason: 'leased' | 'paused' | 'held' | 'lost'
  level: 'ok' | 'warning' | 'critical'
}
type Kind = keyof Kinds | `${keyof Kinds}?`
type Columns = Record<string, Kind>
type ValueOf<K> = K extends keyof Kinds ? Kinds[K] : K extends `${infer Known extends keyof Kinds}?` ? Kinds[Known] | null : never
type RecordOf<C> = { -readonly [Name in keyof C]: ValueOf<C[Name]> } &
  { -readonly [Name in keyof C & string as C[Name] extends 'json' | 'json?' ? `${Name}Text` : never]: C[Name] extends 'json' ? string : string | null }

const RESPONSE = { responseStatus: 'int?', responseHeaders: 'headers?', responseBody: 'text?', responseBytes: 'bytes?' } as const
const RECOVERY = { recoveryPoint: 'text?', recoveryState: 'json?', leaseExpiresAt: 'time?' } as const
const CLAIM = { outcome: 'outcome', claimToken: 'bigint?', attempt: 'int?', ...RESPONSE, ...RECOVERY, expiresAt: 'time?' } as const
const LOOKUP = {
  state: 'state', attempt: 'int', requestHash: 'bytes?', ...RESPONSE, error: 'text?', ...RECOVERY,
  createdAt: 'time', completedAt: 'time?', expiresAt: 'time',
} as const
const RESUMED = { scope: 'text', key: 'text', claimToken: 'bigint', attempt: 'int', request: 'json', ...RECOVERY, createdAt: 'time', leaseExpiresAt: 'time' } as const
const LANE = { topic: 'text', firstId: 'bigint', blockedSince: 'time', waiting: 'bigint', reason: 'reason', until: 'time?', pid: 'int?' } as const
const ACTION = { isActive: 'bool', lastActionId: 'bigint', processed: 'bool' } as const
const ADVANCE = { shouldProcess: 'bool', lastActionId: 'bigint' } as const
const APPEND = { outcome: 'appended', lastClientSeq: 'bigint', version: 'bigint' } as const
const MESSAGE = {
  id: 'bigint', messageId: 'text', topic: 'text', messageKey: 'text?', payload: 'json', headers: 'json?', attempt: 'int', createdAt: 'time',
} as const
const SAMPLE = { name: 'text', labels: 'labels', value: 'float', type: 'text', help: 'text' } as const
const CHECK = { checkName: 'text', status: 'level', value: 'float?', threshold: 'float?', detail: 'text' } as const
const STATS = [
  'claims_new', 'claims_replay', 'claims_erased', 'claims_in_progress', 'claims_hash_conflict', 'claims_expired',
  'takeovers', 'completions', 'failures', 'rate_limited', 'advances', 'advances_stale', 'appends_appended', 'appends_duplicate',
  'appends_overlap', 'appends_gap', 'appends_in_flight', 'appends_version_conflict', 'once_first', 'once_seen',
  'messages_published', 'messages_taken', 'messages_acked', 'messages_nacked', 'messages_dead', 'keys_deleted',
  'tokens_deleted', 'messages_deleted', 'cleanup_passes',
] as const

/** The row of idem_claim. */
export type Claim = RecordOf<typeof CLAIM>
export interface HeldClaim extends Claim {
  leaseMs: number | null
  maxResponseSize: number
  /** The encoding of the database. */
  encoding: string
}
export type Lookup = RecordOf<typeof LOOKUP>
/** A claim that was taken over, with its stored request. */
export type ResumedClaim = RecordOf<typeof RESUMED>
/** A message key of which no relay can take a due message. */
export type BlockedLane = RecordOf<typeof LANE>
export type Action = RecordOf<typeof ACTION>
export type Advance = RecordOf<typeof ADVANCE>
export type Message = RecordOf<typeof MESSAGE>
export type Append = RecordOf<typeof APPEND>
export type MetricSample = RecordOf<typeof SAMPLE>
export type HealthCheck = RecordOf<typeof CHECK>

export type ClaimOptions = RequestIdentity & Ttl & Lease & Wait & {
  /** The request that resume() returns if the claim fails or its lease ends; null stores none. */
  request?: Json | undefined
}

type Argument = [parameter: string, type: string, value: Parameter | Nested | undefined]

/** An expression of several parameters as one argument. */
class Nested {
  constructor(readonly call: string, readonly arguments_: Argument[]) {}
}

const snake = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`)
const camel = (name: string) => name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase())
export const quoteIdentifier = (name: string) => `"${name.replaceAll('"', '""')}"`

function column(name: string, kind: Kind): string {
  const source = `c.${quoteIdentifier(snake(name))}`
  const expression = kind.startsWith('bytes') ? `pg_catalog.encode(${source}, 'hex')`
    : kind.startsWith('time') ? `pg_catalog.date_part('epoch', ${source})::text`
    : `${source}::text`
  return `${expression} AS ${quoteIdentifier(name)}`
}

/** Kinds of columns that are not read as text. */
const READ: { [kind: string]: (value: string) => unknown } = {
  int: Number, float: Number, bigint: BigInt, bool: (value) => value === 'true', bytes: (value) => Buffer.from(value, 'hex'),
  json: JSON.parse, headers: JSON.parse, labels: JSON.parse,
  time: (value) => new Date(Math.max(-8.64e15, Math.min(8.64e15, Math.floor(Number(value) * 1000)))),
}
for (const [kind, read] of Object.entries(READ)) READ[`${kind}?`] = read

function parsed(value: string | null | undefined, kind: Kind): unknown {
  const read = READ[kind]
  return read && value != null ? read(value) : value ?? null
}

/** A row as an object. */
function record(row: Row, columns: Columns): Record<string, unknown> {
  const made: Record<string, unknown> = {}
  for (const name in columns) {
    const kind = columns[name]!
    made[name] = parsed(row[name], kind)
    if (kind === 'json' || kind === 'json?') made[`${name}Text`] = row[name] ?? null
  }
  return made
}

type Convert = (value: unknown, name: string) => Parameter
const listOf = (element: Convert): Convert => (values, name) => array(values, name, element)
/** The types of arguments, with the names of those that are not text. */
const TYPES: [type: string, convert: Convert, names: string][] = [
  ['bigint', bigint, 'claimToken actionId clientSeq expectedVersion id atLeast'],
  ['int', int, 'maxClaims eventCount maxMessages attempt batchSize maxRows maxLanes'],
  ['boolean', bool, 'active allowGaps'],
  ['jsonb', json, 'request'],
  ['json', asciiJson, 'recoveryState'],
  ['text[]', listOf(text), 'keys scopes excludes userIds entityTypes entityIds actionTypes tokens topics messageKeys'],
  ['bigint[]', listOf(bigint), 'ids actionIds claimTokens'],
  ['int[]', listOf(int), 'attempts'],
  ['boolean[]', listOf(bool), 'actives'],
  ['bytea', bytes, 'requestHash'],
  ['bytea[]', listOf(bytes), 'requestHashes'],
  // Also given in milliseconds.
  ['interval', text, 'ttl lease wait deliverAfter retryAfter olderThan'],
]
type Known = [parameter: string, type: string, convert: Convert]
const parameters = new Map<string, Known>()
const parameterOf = (name: string): Known => remembered(parameters, Infinity, name, () => {
  const [type, convert] = TYPES.find(([, , names]) => names.split(' ').includes(name)) ?? ['text', text]
  return [snake(name), type, convert]
})

/** Arguments that must be given. */
const required = (given: Record<string, unknown>): Argument[] => Object.entries(given).map(([name, value]) => {
  const [parameter, type, convert] = parameterOf(name)
  return [parameter, type, convert(value, name)]
})

/** An argument that has a default on the server. */
const unlessDefault = (parameter: string, type: string, value: unknown, name: string, convert: Convert): Argument =>
  [parameter, type, value === undefined ? undefined : convert(value, name)]
const optional = (options: object, ...names: string[]): Argument[] => names.map((name) => {
  const [parameter, type, convert] = parameterOf(name)
  const given = options as Record<string, any>
  return type === 'interval' ? [parameter, type, interval(given[name], given[`${name}Ms`], name)] : unlessDefault(parameter, type, given[name], name, convert)
})

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
  function statement<T>(name: string, given: Argument[], select: (call: string) => string, read: (rows: Row[]) => T): Statement<T> {
    const values: Parameter[] = []
    const text = remembered(known, MAX_TEXTS, `${name}(${shape(given, values)}`, () => select(expression(name, given, [])))
    const [parameter, , scope] = given[0] ?? []
    return { text, values, read, scope: SCOPES.has(parameter!) && typeof scope === 'string' ? scope : undefined }
  }
  const select = (columns: Columns) => (call: string): string =>
    `SELECT ${Object.entries(columns).map(([name, kind]) => column(name, kind)).join(', ')} FROM ${call} AS c`
  const value = (kind: Kind) => (call: string): string => `${select({ value: kind })(call)}(value)`
  const rows = <C extends Columns>(name: string, given: Argument[], columns: C): Statement<RecordOf<C>[]> =>
    statement(name, given, select(columns), (found) => found.map((row) => record(row, columns) as RecordOf<C>))
  const row = <C extends Columns>(name: string, given: Argument[], columns: C): Statement<RecordOf<C>> =>
    statement(name, given, select(columns), ([found]) => record(found!, columns) as RecordOf<C>)
  const list = <K extends Kind>(name: string, given: Argument[], kind: K): Statement<ValueOf<K>[]> =>
    statement(name, given, value(kind), (found) => found.map((row) => parsed(row['value'], kind) as ValueOf<K>))
  const one = <K extends Kind>(name: string, given: Argument[], kind: K): Statement<ValueOf<K>> =>
    statement(name, given, value(kind), ([found]) => parsed(found!['value'], kind) as ValueOf<K>)
  const nothing = (name: string, given: Argument[]): Statement<void> => statement(name, given, value('text'), () => undefined)

  const grantee = (role: string): Argument[] => [['grantee', 'regrole', text(role, 'role')]]
  const hashArguments = (method: string, path: string, body: string | Uint8Array | null | undefined, without: string[][] = []): Argument[] => [
    ...required({ method, path }),
    body instanceof Uint8Array ? ['body', 'bytea', bytes(body, 'body')]
      : typeof body !== 'string' ? unlessDefault('body', 'text', body, 'body', text)
      : without.reduce<Argument>(([, , document], members) => ['body', 'jsonb', new Nested('pg_catalog.jsonb_delete_path',
        [['document', 'jsonb', document], ['path', 'text[]', array(members, 'path', text)]])], ['body', 'text', body]),
  ]
  const hash = (options: RequestIdentity): Argument[] => (!('method' in options) ? optional(options, 'requestHash')
    : [['request_hash', 'bytea', new Nested('idem_request_hash', hashArguments(options.method, options.path, options.body, options.without))]])

  return {
    // Request identity

    /** Bytes are hashed unchanged, a string as JSON. */
    requestHash: (method: string, path: string, body?: string | Uint8Array | null) => one('idem_request_hash', hashArguments(method, path, body), 'bytes'),
    /** The canonical form of RFC 8785. The document is JSON text. */
    canonicalJson: (document: string) => one('idem_canonical_json', [['document', 'jsonb', text(document, 'document')]], 'text'),

    // Request keys

    keyIsValid: (key: string | null) => one('idem_key_is_valid', required({ key }), 'bool'),
    claim: (scope: string, key: string, options: ClaimOptions = {}) =>
      row('idem_claim', [...required({ scope, key }), ...hash(options), ...optional(options, 'ttl', 'lease', 'wait', 'request')], CLAIM),
    complete: (scope: string, key: string, status: number, options: { body?: string | Uint8Array | null; headers?: Headers | null } & Held = {}) =>
      one('idem_complete', [...required({ scope, key }), ['response_status', 'int', int(status, 'status')],
        options.body instanceof Uint8Array ? ['response_body', 'bytea', bytes(options.body, 'body')] : ['response_body', 'text', text(options.body ?? null, 'body')],
        unlessDefault('response_headers', 'json', options.headers, 'headers', headers), ...optional(options, 'claimToken')], 'bool'),
    checkpoint: (scope: string, key: string, recoveryPoint: string, options: { recoveryState?: Json } & Lease & Held = {}) =>
      one('idem_checkpoint', [...required({ scope, key, recoveryPoint }), ...optional(options, 'recoveryState', 'lease', 'claimToken')], 'time'),
    heartbeat: (scope: string, key: string, options: Lease & Held = {}) =>
      one('idem_heartbeat', [...required({ scope, key }), ...optional(options, 'lease', 'claimToken')], 'time'),
    fail: (scope: string, key: string, options: { error?: string | null } & Held = {}) =>
      one('idem_fail', [...required({ scope, key }), ...optional(options, 'error', 'claimToken')], 'bool'),
    release: (scope: string, key: string, options: Held = {}) => one('idem_release', [...required({ scope, key }), ...optional(options, 'claimToken')], 'bool'),
    /** The live record, or undefined. */
    lookup: (scope: string, key: string): Statement<Lookup | undefined> => {
      const found = row('idem_lookup', required({ scope, key }), LOOKUP)
      return { ...found, read: (rows) => (rows[0]?.['state'] ? found.read(rows) : undefined) }
    },
    /** Takes over claims with a stored request that have failed or whose lease has ended, the oldest first. */
    resume: (options: { maxClaims?: number; scopes?: string[] | null } & Lease & Wait = {}) =>
      rows('idem_resume', optional(options, 'maxClaims', 'lease', 'scopes', 'wait'), RESUMED),
    forget: (scope: string, key: string) => one('idem_forget', required({ scope, key }), 'bool'),
    erase: (scope: string, key: string) => one('idem_erase', required({ scope, key }), 'bool'),
    claimMany: (scope: string, keys: string[], options: { requestHashes?: (Uint8Array | null)[] | null } & Ttl & Lease = {}) =>
      rows('idem_claim_many', [...required({ scope, keys }), ...optional(options, 'requestHashes', 'ttl', 'lease')], { ordinal: 'int', key: 'text', ...CLAIM }),
    completeMany: (scope: string, keys: string[], statuses: number[],
      options: { bodies?: (string | null)[] | null; headers?: (Headers | null)[] | null; claimTokens?: (Bigint | null)[] | null } = {}) =>
      rows('idem_complete_many', [...required({ scope, keys }), ['response_statuses', 'int[]', array(statuses, 'statuses', int)],
        unlessDefault('response_bodies', 'text[]', options.bodies, 'bodies', listOf(text)),
        unlessDefault('response_headers', 'json[]', options.headers, 'headers', listOf(headers)), ...optional(options, 'claimTokens')], { ordinal: 'int', key: 'text', completed: 'bool' }),
    /** The handler is the signature of an SQL function, such as 'place_order(jsonb)'. A request that is a string is JSON text. */
    run: (scope: string, key: string, handler: string, request: string | { [name: string]: Json | undefined } | Json[], options: Ttl & Wait = {}) =>
      row('idem_run', [...required({ scope, key }), ['handler', 'text::regprocedure', text(handler, 'handler')],
        ['request', 'jsonb', typeof request === 'string' ? text(request, 'request') : json(request, 'request')], ...optional(options, 'ttl', 'wait')],
        { outcome: 'outcome', responseStatus: 'int?', responseHeaders: 'headers?', responseBody: 'text?' }),

    // User actions

    tryAdvance: (userId: string, entityType: string, entityId: string, actionId: Bigint) =>
      row('idem_try_advance', required({ userId, entityType, entityId, actionId }), ADVANCE),
    toggle: (userId: string, entityType: string, entityId: string, actionType: string, actionId: Bigint) =>
      row('idem_toggle', required({ userId, entityType, entityId, actionType, actionId }), ACTION),
    set: (userId: string, entityType: string, entityId: string, actionType: string, active: boolean, actionId: Bigint, options: { excludes?: string[] | null } = {}) =>
      row('idem_set', [...required({ userId, entityType, entityId, actionType, active, actionId }), ...optional(options, 'excludes')], ACTION),
    isActive: (userId: string, entityType: string, entityId: string, actionType: string) =>
      one('idem_is_active', required({ userId, entityType, entityId, actionType }), 'bool'),
    actionStates: (userId: string, entityType: string, entityIds: string[]) => rows('idem_action_states', required({ userId, entityType, entityIds }),
      { entityId: 'text', actionType: 'text', isActive: 'bool', lastActionId: 'bigint' }),
    forgetUser: (userId: string) => one('idem_forget_user', required({ userId }), 'bigint'),
    tryAdvanceMany: (userIds: string[], entityTypes: string[], entityIds: string[], actionIds: Bigint[]) =>
      rows('idem_try_advance_many', required({ userIds, entityTypes, entityIds, actionIds }), { ordinal: 'int', ...ADVANCE }),
    setMany: (userIds: string[], entityTypes: string[], entityIds: string[], actionTypes: string[], actives: boolean[], actionIds: Bigint[]) =>
      rows('idem_set_many', required({ userIds, entityTypes, entityIds, actionTypes, actives, actionIds }), { ordinal: 'int', ...ACTION }),

    // Client sequences

    tryAppend: (aggregate: string, clientId: string, clientSeq: Bigint,
      options: { eventCount?: number; expectedVersion?: Bigint | null; allowGaps?: boolean } & Wait = {}) =>
      row('idem_try_append', [...required({ aggregate, clientId, clientSeq }), ...optional(options, 'eventCount', 'expectedVersion', 'allowGaps', 'wait')], APPEND),
    lastClientSeq: (aggregate: string, clientId: string) => one('idem_last_client_seq', required({ aggregate, clientId }), 'bigint'),

    // Once-only tokens

    once: (scope: string, token: string, options: Ttl = {}) => one('idem_once', [...required({ scope, token }), ...optional(options, 'ttl')], 'bool'),
    /** The time of the token's first use, or null. */
    onceAt: (scope: string, token: string) => one('idem_once_at', required({ scope, token }), 'time?'),
    onceMany: (scope: string, tokens: string[], options: Ttl = {}) => list('idem_once_many', [...required({ scope, tokens }), ...optional(options, 'ttl')], 'text'),

    // Outbox

    publish: (topic: string, payload: Json, options: { messageKey?: string | null; headers?: Json; deliverAfter?: string | null; deliverAfterMs?: number } = {}) =>
      one('idem_publish', [...required({ topic }), ['payload', 'jsonb', json(payload, 'payload') ?? 'null'],
        ...optional(options, 'messageKey'), unlessDefault('headers', 'jsonb', tracedHeaders(options.headers), 'headers', json), ...optional(options, 'deliverAfter')], 'text'),
    publishMany: (topics: string[], payloads: Json[],
      options: { messageKeys?: (string | null)[] | null; headers?: Json[] | null; deliverAfter?: string | null; deliverAfterMs?: number } = {}) => {
      const trace = tracedHeaders(undefined)
      // A single element applies to all messages.
      const traced = options.headers?.map((one) => tracedHeaders(one)) ?? (trace && [trace])
      return rows('idem_publish_many', [...required({ topics }), ['payloads', 'jsonb[]', array(payloads, 'payloads', (value, as) => json(value, as) ?? 'null')],
        unlessDefault('headers', 'jsonb[]', traced, 'headers', listOf(json)), ...optional(options, 'messageKeys', 'deliverAfter')],
        { ordinal: 'int', messageId: 'text' })
    },
    outboxTake: (options: { maxMessages?: number; topics?: string[] | null } & Lease & Wait = {}) =>
      rows('idem_outbox_take', optional(options, 'maxMessages', 'lease', 'topics', 'wait'), MESSAGE),
    outboxAck: (ids: Bigint[]) => one('idem_outbox_ack', required({ ids }), 'int'),
    outboxNack: (id: Bigint, options: { error?: string | null; retryAfter?: string | null; retryAfterMs?: number; attempt?: number | null } = {}) =>
      one('idem_outbox_nack', [...required({ id }), ...optional(options, 'error', 'retryAfter', 'attempt')], 'nacked'),
    outboxRequeue: (ids?: Bigint[] | null) => one('idem_outbox_requeue', optional({ ids }, 'ids'), 'int'),
    outboxExtend: (ids: Bigint[], options: { attempts?: number[] | null } & Lease = {}) =>
      list('idem_outbox_extend', [...required({ ids }), ...optional(options, 'lease', 'attempts')], 'bigint'),
    outboxRelease: (ids: Bigint[], options: { attempts?: number[] | null } = {}) =>
      one('idem_outbox_release', [...required({ ids }), ...optional(options, 'attempts')], 'int'),
    outboxBlocked: (maxLanes?: number) => rows('idem_outbox_blocked', optional({ maxLanes }, 'maxLanes'), LANE),

    // Administration

    cleanup: (batchSize?: number) =>
      row('idem_cleanup', optional({ batchSize }, 'batchSize'), { keysDeleted: 'bigint', tokensDeleted: 'bigint', messagesDeleted: 'bigint' }),
    /** Deletes expired rows and returns them, so that you can archive them in the same transaction. */
    takeExpired: (kind: 'keys' | 'tokens' | 'messages', maxRows?: number) => list('idem_take_expired', [...required({ kind }), ...optional({ maxRows }, 'maxRows')], 'json'),
    /** The counters of this database, or undefined if shared memory has no space for them. */
    stats: (): Statement<Record<string, bigint> | undefined> => ({
      text: `SELECT ${STATS.map((name) => column(camel(name), 'bigint')).join(', ')} FROM ${home}.idem_stats AS c ` +
        'WHERE c.datname = pg_catalog.current_database()',
      values: [],
      read: ([found]) => found &&
        Object.fromEntries(STATS.map((name) => [camel(name), BigInt(found[camel(name)] ?? 0)])),
    }),
    statsReset: () => nothing('idem_stats_reset', []),
    metrics: () => one('idem_metrics', [], 'text'),
    /** The samples of metrics(). */
    metricSamples: () => rows('idem_metric_samples', [], SAMPLE),
    health: () => rows('idem_health', [], CHECK),
    abandoned: (options: { olderThan?: string; olderThanMs?: number } = {}) => rows('idem_abandoned', optional(options, 'olderThan'),
      { scope: 'text', key: 'text', age: 'text', attempt: 'int', recoveryPoint: 'text?', leaseExpiresAt: 'time' }),
    raiseClaimTokens: (atLeast: Bigint) => one('idem_raise_claim_tokens', required({ atLeast }), 'bigint'),
    repairOutbox: () => one('idem_repair_outbox', [], 'bigint'),
    grant: (role: string) => nothing('idem_grant', grantee(role)),
    /** Grants only the functions of a relay. */
    grantRelay: (role: string) => nothing('idem_grant_relay', grantee(role)),
    /** Grants only statistics, metrics and health. */
    grantMonitor: (role: string) => nothing('idem_grant_monitor', grantee(role)),
    revoke: (role: string) => nothing('idem_revoke', grantee(role)),
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
const heldText = (text: string): string => remembered(heldTexts, MAX_TEXTS, text, () => text.replace(' FROM ',
  ", pg_catalog.date_part('epoch', c.lease_expires_at - pg_catalog.clock_timestamp())::text " +
  'AS "leaseSeconds", pg_catalog.current_setting(\'idempotency.max_response_size\', true) AS "maxResponseSize", ' +
  'pg_catalog.current_setting(\'server_encoding\') AS "encoding" FROM '))

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
