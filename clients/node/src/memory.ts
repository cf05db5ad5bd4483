/**
 * A double for unit tests: the same interface, in the memory of one process.
 *
 * Rows belong to the transaction that has written them until it ends. Other
 * transactions see the earlier rows, and wait if they would wait on the server.
 * The double does not have settings (all have their defaults), statistics,
 * resume(), outboxBlocked(), takeExpired(), and the digits of numbers beyond 2^53
 * in JSON.
 */
import { randomUUID } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import { poolOver, type OpenTransaction } from './adapter.js'
import { Idempotency, type Options, type Response } from './client.js'
import { ClaimLost, ClaimNotFound, KeyInvalid, TransactionEnded } from './errors.js'
import {
  statements,
  type Action, type Claim, type ClaimOptions, type Core, type Lease, type Lookup, type Message, type Outcome, type Row, type Statements,
} from './functions.js'
import { requestHashOfBytes } from './keys.js'
import { tracedHeaders } from './observe.js'
import type { PoolLike } from './postgres.js'
import { asciiJson, bigint, durationMs, headers as headerDocument, text, type Bigint, type Headers, type Json } from './values.js'

const MAX_RESPONSE_SIZE = 1 << 20
const DAY = 86_400_000

/** An error of the driver that is not one of our classes: it has a code. */
class DatabaseError extends Error {
  constructor(message: string, readonly code: string, cause?: unknown) {
    super(message, { cause })
  }
}

function refuse(message: string, sqlstate: string, cause?: unknown): never {
  throw new DatabaseError(message, sqlstate, cause)
}

const needsServer = (what: string): never => refuse(`the double does not have ${what}: test it with a server`, '0A000')

/** A transaction of the double. Use onRollback() to undo effects outside of the double. */
export class MemoryTransaction {
  /** Settles when the transaction ends. */
  readonly ended: Promise<void>
  open = true
  /** An error has aborted it, as on the server, so that no more calls run in it. */
  isAborted = false
  waitsFor: MemoryTransaction | undefined
  #end!: () => void
  #atEnd: ((committed: boolean) => void)[] = []

  constructor() {
    this.ended = new Promise((resolve) => { this.#end = resolve })
  }

  /** The transaction itself, which handlers have behind a proxy. */
  get itself(): this {
    return this
  }

  /** Whether it can be committed. */
  checkOpen(): void {
    if (this.isAborted) throw new TransactionEnded('the handler continued after an error of the database, which has undone its work; do not catch the error')
  }

  /** Calls undo if the transaction is rolled back, in reverse order. */
  onRollback(undo: () => void): void {
    this.atEnd((committed) => { if (!committed) undo() })
  }

  atEnd(then: (committed: boolean) => void): void {
    if (!this.open) throw new TransactionEnded('the transaction of this handle has ended')
    this.#atEnd.push(then)
  }

  end(committed: boolean): void {
    if (!this.open) return
    this.open = false
    for (const then of this.#atEnd.reverse()) then(committed)
    this.#end()
  }
}

interface Entry<V> { value: V | undefined; before: V | undefined; owner: MemoryTransaction | undefined }

class Table<V> {
  #entries = new Map<string, Entry<V>>()

  /** Another open transaction that has written the row. */
  writer(tx: MemoryTransaction, id: string): MemoryTransaction | undefined {
    const owner = this.#entries.get(id)?.owner
    return owner === tx ? undefined : owner
  }

  async lock(tx: MemoryTransaction, id: string): Promise<void> {
    for (let writer = this.writer(tx, id); writer; writer = this.writer(tx, id)) {
      for (let other: MemoryTransaction | undefined = writer; other; other = other.waitsFor) {
        if (other === tx) refuse('deadlock detected', '40P01')
      }
      tx.waitsFor = writer
      await writer.ended
      tx.waitsFor = undefined
    }
  }

  get(tx: MemoryTransaction, id: string): V | undefined {
    const entry = this.#entries.get(id)
    return entry && (entry.owner && entry.owner !== tx ? entry.before : entry.value)
  }

  set(tx: MemoryTransaction, id: string, value: V | undefined): void {
    let entry = this.#entries.get(id)
    if (!entry) this.#entries.set(id, entry = { value: undefined, before: undefined, owner: undefined })
    if (entry.owner !== tx) {
      const written = entry
      tx.atEnd((committed) => {
        if (!committed) written.value = written.before
        written.owner = written.before = undefined
        if (written.value === undefined) this.#entries.delete(id)
      })
      entry.before = entry.value
      entry.owner = tx
    }
    entry.value = value
  }

  *all(tx: MemoryTransaction): Generator<[string, V]> {
    for (const id of this.#entries.keys()) {
      const value = this.get(tx, id)
      if (value !== undefined) yield [id, value]
    }
  }
}

interface KeyRow extends Lookup { claimToken: bigint; claimedBy: MemoryTransaction | undefined; hasRequest: boolean }
interface MessageRow extends Message {
  availableAt: number
  state: 'pending' | 'acked' | 'dead'
  leased: boolean
  attemptsBefore: number
  endedAt: number
}

const idOf = (...parts: string[]): string => JSON.stringify(parts)
function idOfKey(scope: string, key: string): string {
  name(scope, 'scope')
  if (key === null || key === undefined) throw new KeyInvalid('the idempotency key is NULL', { sqlstate: 'ID001' })
  return idOf(scope, text(key, 'key')!)
}

const RESPONSE = ['responseStatus', 'responseHeaders', 'responseBody', 'responseBytes', 'expiresAt'] as const
const CLAIMED = ['claimToken', 'attempt', 'recoveryPoint', 'recoveryState', 'recoveryStateText', 'leaseExpiresAt', 'expiresAt'] as const
/** The columns of a claim that are not null. */
const SHOWN: Record<Outcome, readonly (keyof Claim)[]> = {
  new: CLAIMED, replay: RESPONSE, erased: RESPONSE, in_progress: ['leaseExpiresAt'], hash_conflict: [], expired: [],
}
const claimOf = (outcome: Outcome, row: Partial<KeyRow> = {}): Claim => ({
  outcome, ...Object.fromEntries([...RESPONSE, ...CLAIMED].map((column) => [column, SHOWN[outcome].includes(column) ? row[column] ?? null : null])),
}) as Claim

/** The last timestamp. */
const END_OF_TIME = Date.UTC(275_760, 0)
/** The defaults of idempotency.max_lease and idempotency.max_wait. */
const LONGEST: Record<string, number> = { lease: DAY / 2, wait: 600_000 }
const duration = (value: string | null | undefined, ms: number | null | undefined, name: string, otherwise: number): number => {
  const made = durationMs(value, ms, name) ?? otherwise
  if (made > (LONGEST[name] ?? Infinity)) refuse(`${name} is longer than idempotency.max_${name}`, '22023')
  return Date.now() + made < END_OF_TIME ? made : refuse('timestamp out of range', '22008')
}

/** The maximum depth of a document, because the server's stack is limited, too. */
const MAX_DEPTH = 6000

/** The canonical form of RFC 8785, or jsonb's text, without recursion, because a document can be deeper than the stack. */
function canonical(document: Json, isJsonb = false): string {
  const space = isJsonb ? ' ' : ''
  const byLength = (one: string, other: string): number => Buffer.byteLength(one) - Buffer.byteLength(other) || Buffer.compare(Buffer.from(one), Buffer.from(other))
  const parts: string[] = []
  const next: (string | { value: Json | undefined })[] = [{ value: document }]
  for (let one = next.pop(); one !== undefined; one = next.pop()) {
    if (typeof one === 'string' || typeof one.value !== 'object' || one.value === null) {
      parts.push(typeof one === 'string' ? one
        : typeof one.value === 'string' && one.value.startsWith(NUMBER) ? canonicalNumber(one.value.slice(1))
        : isJsonb && typeof one.value === 'number' ? canonicalNumber(String(one.value), true) : JSON.stringify(one.value))
      continue
    }
    const { value } = one
    const [open, shut] = Array.isArray(value) ? '[]' : '{}'
    const items: [string, Json | undefined][] = Array.isArray(value) ? value.map((item) => ['', item])
      : Object.keys(value).sort(isJsonb ? byLength : undefined).map((name) => [`${JSON.stringify(name)}:${space}`, value[name]])
    next.push(shut!)
    for (const [at, [label, item]] of [...items.entries()].reverse()) next.push({ value: item }, `${at > 0 ? `,${space}` : ''}${label}`)
    next.push(open!)
  }
  return parts.join('')
}

/** A prefix for the digits of a number, which no string of jsonb contains. */
const NUMBER = '\0'

/** A number as ECMAScript writes it, but with all its digits if a double would lose some, and without an exponent in jsonb. */
function canonicalNumber(given: string, isJsonb = false): string {
  const [, sign, whole, fraction = '', exponent = '0'] = /^(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?$/.exec(given)!
  const all = whole! + fraction
  const digits = all.replace(/^0+/, '').replace(/0+$/, '')
  if (digits === '') return '0'
  const point = whole!.length - /^0*/.exec(all)![0].length + Number(exponent)
  if (point > 131_072) refuse('value overflows numeric format', '22003')
  const double = Number(given)
  const isRounded = digits.length <= point && point < 400 && Number.isFinite(double) &&
    BigInt(digits.padEnd(point, '0')) !== BigInt(Math.abs(double))
  if (!isJsonb && digits.length <= 17 && double !== 0 && Number.isFinite(double) && !isRounded) return String(double)
  const body = !isJsonb && (point > 21 || point <= -6) ? `${digits[0]!}${digits.length > 1 ? `.${digits.slice(1)}` : ''}e${point > 0 ? '+' : '-'}${Math.abs(point - 1)}`
    : point <= 0 ? `0.${'0'.repeat(-point)}${digits}`
    : digits.length <= point ? digits.padEnd(point, '0') : `${digits.slice(0, point)}.${digits.slice(point)}`
  return `${sign!}${body}`
}

function canonicalText(document: string, without: string[][] = []): string {
  let parsed: Json
  try {
    parsed = JSON.parse(document) as Json
  } catch (cause) {
    return refuse('invalid input syntax for type json', '22P02', cause)
  }
  asJsonb(parsed)
  // Parse again, and keep the digits of numbers.
  const made = JSON.parse(document.replace(/("(?:[^"\\]|\\.)*")|(-?\d[\d.eE+-]*)/g,
    (_, text?: string, number?: string) => text ?? JSON.stringify(NUMBER + number!))) as Json
  for (const path of without) {
    const last = path.at(-1)!
    const parent = path.slice(0, -1).reduce<any>((found, name) => (typeof found === 'object' && found !== null ? found[name] : undefined), made)
    if (Array.isArray(parent)) {
      if (/^\d+$/.test(last)) parent.splice(Number(last), 1)
    } else if (typeof parent === 'object' && parent !== null) {
      delete parent[last]
    }
  }
  return canonical(made)
}

/** Refuses a document that a column of jsonb cannot hold, such as a string with NUL. */
function asJsonb(document: Json): Json {
  const next: [Json | undefined, number][] = [[document, 1]]
  for (let found = next.pop(); found; found = next.pop()) {
    const [one, depth] = found
    if (depth > MAX_DEPTH) refuse('stack depth limit exceeded', '54001')
    if (typeof one === 'string') {
      if (one.includes('\0')) refuse('unsupported Unicode escape sequence', '22P05')
      if (!one.isWellFormed()) refuse('invalid input syntax for type json', '22P02')
    } else if (typeof one === 'object' && one !== null) {
      for (const [at, item] of Object.entries(one)) next.push([at, depth], [item as Json, depth + 1])
    }
  }
  return document
}

function hashed(method: string, path: string, body: string | Uint8Array | null | undefined, without: string[][] = []): Buffer {
  if (!/^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/.test(method)) refuse('the method is no HTTP token', '22023')
  return requestHashOfBytes(method, path, typeof body === 'string' && body !== '' ? Buffer.from(canonicalText(body, without)) : Buffer.from(body ?? ''))
}

const name = (value: string, what: string): string => {
  if (text(value, what) === null) refuse(`${what} is null`, '22004')
  const size = Buffer.byteLength(value)
  if (size < 1 || size > 512) refuse(`${what} has not 1 to 512 bytes`, '22023')
  return value
}

/** The document as a column of JSON returns it. */
const parsed = (document: Json): Json => JSON.parse(JSON.stringify(document)) as Json
const MAX_BIGINT = 2n ** 63n - 1n
function exact(value: Bigint | null, what: string): bigint {
  const made = BigInt(bigint(value, what) ?? refuse(`${what} is null`, '22004'))
  return made >= -MAX_BIGINT - 1n && made <= MAX_BIGINT ? made : refuse(`${what} is out of range for type bigint`, '22003')
}

/** The elements of arrays of the same length. An array of one element applies to all. */
function zip(...arrays: (readonly unknown[] | null | undefined)[]): unknown[][] {
  const length = Math.max(...arrays.map((array) => array?.length ?? 0))
  if (arrays.some((array) => array && array.length !== length && array.length !== 1)) refuse('arrays do not match', '22023')
  return Array.from({ length }, (_, at) => arrays.map((array) => array?.[array.length === 1 ? 0 : at]))
}

export type MemoryHandler = (request: Json) => Response | Json | Promise<Response | Json>
export interface MemoryOptions extends Omit<Options, 'shards'> {
  /** Handlers for run(), by the name in the call. */
  handlers?: Record<string, MemoryHandler>
}

export class MemoryIdempotency extends Idempotency<MemoryTransaction> {
  constructor(options: MemoryOptions = {}) {
    const { handlers = {}, schema: _, ...common } = options
    super(poolOf(new Memory(handlers)), common)
  }
}

/** The double as the pool of an ORM, whose statements have the name of a function as their text, and the list of its arguments as their value. */
function poolOf(memory: Memory): PoolLike<MemoryTransaction> {
  const checks = statements('public') as unknown as Record<string, (...given: unknown[]) => unknown>
  const made = Object.fromEntries(Object.keys(checks).map((name) => [name, (...given: unknown[]) => {
    // Refuses the arguments that the client would not send to the server.
    checks[name]!(...given)
    return { text: name, values: [given], read: ([row]: { value: unknown }[]) => row!.value }
  }]))
  const perform = async (name: string, given: unknown[], tx: MemoryTransaction): Promise<Row[]> => {
    const value = await (memory.on(tx)[name as keyof Core] as (...given: unknown[]) => Promise<unknown>)(...given)
    const ends = (value as Partial<Claim> | undefined)?.leaseExpiresAt
    return [{ value, leaseSeconds: ends ? String((ends.getTime() - Date.now()) / 1000) : null, maxResponseSize: '1MB', encoding: 'UTF8' } as Row]
  }
  const begin = async (): Promise<OpenTransaction<MemoryTransaction>> => {
    const tx = new MemoryTransaction()
    return {
      tx, reportsRollback: true,
      commit: async () => {
        if (tx.isAborted) tx.end(false)
        tx.checkOpen()
        tx.end(true)
      },
      rollback: async () => tx.end(false),
    }
  }
  return {
    ...poolOver<MemoryTransaction>({
      max: Infinity, begin,
      async query(name, [given]: any[], handle) {
        if (handle) return perform(name, given, handle.itself)
        const { tx, commit, rollback } = await begin()
        try {
          const rows = await perform(name, given, tx)
          await commit()
          return rows
        } finally {
          await rollback()
        }
      },
    }),
    statements: made as unknown as Statements,
  }
}

/** The tables, and the functions on them. */
class Memory {
  #tokens = 0n
  #ids = 0n
  #keys = new Table<KeyRow>()
  #once = new Table<{ since: number; until: number }>()
  #counters = new Table<bigint>()
  #actions = new Table<{ isActive: boolean }>()
  #aggregates = new Table<bigint>()
  #clients = new Table<bigint>()
  #messages = new Table<MessageRow>()

  constructor(readonly handlers: Record<string, MemoryHandler>) {}

  async #claim(tx: MemoryTransaction, scope: string, key: string, options: ClaimOptions): Promise<Claim> {
    const id = idOfKey(scope, key)
    const hash = 'method' in options ? hashed(options.method, options.path, options.body, options.without)
      : options.requestHash ? Buffer.from(options.requestHash) : null
    if (hash && (hash.length < 1 || hash.length > 64)) refuse('a request hash has 1 to 64 bytes', '22023')
    const ttl = duration(options.ttl, options.ttlMs, 'ttl', DAY)
    const lease = duration(options.lease, options.leaseMs, 'lease', 60_000)
    const deadline = performance.now() + duration(options.wait, options.waitMs, 'wait', 0)
    for (;;) {
      const now = Date.now()
      const writer = this.#keys.writer(tx, id)
      let row = writer ? undefined : this.#keys.get(tx, id)
      if (row && row.expiresAt.getTime() <= now) row = undefined
      if (!writer && !row) refuseKey(key)
      if (row?.requestHash && hash && !row.requestHash.equals(hash)) return claimOf('hash_conflict')
      if (row?.state === 'completed') return claimOf('replay', row)
      if (row?.state === 'erased') return claimOf('erased', row)
      const held = writer || row?.claimedBy === tx || (row?.state === 'started' && row.leaseExpiresAt!.getTime() > now)
      if (!held) {
        const made: KeyRow = {
          ...(row ?? {
            responseStatus: null, responseHeaders: null, responseBody: null, responseBytes: null, recoveryPoint: null,
            recoveryState: null, recoveryStateText: null, createdAt: new Date(now), completedAt: null,
          }),
          state: 'started', claimToken: ++this.#tokens, attempt: (row?.attempt ?? 0) + 1, requestHash: row?.requestHash ?? hash, error: null,
          expiresAt: new Date(now + ttl), leaseExpiresAt: new Date(Math.min(now + lease, now + ttl)), claimedBy: tx,
          hasRequest: (row?.hasRequest ?? false) || options.request != null,
        }
        this.#keys.set(tx, id, made)
        return claimOf('new', made)
      }
      const left = deadline - performance.now()
      // The lease of a claim that is not committed is not known.
      if (row?.claimedBy === tx) return claimOf('in_progress')
      if (left <= 0) return claimOf('in_progress', row)
      if (writer) await Promise.race([writer.ended, sleep(left)])
      else await sleep(Math.min(10, left))
    }
  }

  /** The row of a key. Without one, the key must keep the rules. */
  #found(tx: MemoryTransaction, scope: string, key: string): KeyRow | undefined {
    const row = this.#keys.get(tx, idOfKey(scope, key))
    if (!row) refuseKey(key)
    return row
  }

  async #locked(tx: MemoryTransaction, scope: string, key: string): Promise<KeyRow | undefined> {
    await this.#keys.lock(tx, idOfKey(scope, key))
    return this.#found(tx, scope, key)
  }

  /** The row of a claim, which its holder is allowed to change. */
  async #heldRow(tx: MemoryTransaction, scope: string, key: string, token: Bigint | null | undefined): Promise<KeyRow> {
    const row = await this.#locked(tx, scope, key)
    if (!row || row.expiresAt.getTime() <= Date.now()) throw new ClaimNotFound('there is no live claim', { sqlstate: 'ID004' })
    const given = token === null || token === undefined ? undefined : exact(token, 'claimToken')
    if (given === undefined ? row.claimedBy !== tx : row.claimToken !== given) {
      throw new ClaimLost('the claim token is missing or is not the current one', { sqlstate: 'ID003' })
    }
    return row
  }

  #started(row: KeyRow): void {
    if (row.state !== 'started') throw new ClaimNotFound('the claim is not in progress', { sqlstate: 'ID004' })
  }

  async #renew(tx: MemoryTransaction, scope: string, key: string, options: Lease & { claimToken?: Bigint | null | undefined },
    more: Partial<KeyRow> = {}): Promise<Date> {
    const lease = duration(options.lease, options.leaseMs, 'lease', 60_000)
    const row = await this.#heldRow(tx, scope, key, options.claimToken)
    this.#started(row)
    const ends = new Date(Math.min(Date.now() + lease, row.expiresAt.getTime()))
    this.#keys.set(tx, idOf(scope, key), { ...row, ...more, leaseExpiresAt: ends })
    return ends
  }

  async #advance(tx: MemoryTransaction, userId: string, entityType: string, entityId: string, actionId: Bigint):
    Promise<{ shouldProcess: boolean; lastActionId: bigint }> {
    const id = idOf(name(userId, 'userId'), name(entityType, 'entityType'), name(entityId, 'entityId'))
    const given = exact(actionId, 'actionId')
    let last = this.#counters.get(tx, id)
    if (last !== undefined && given <= last) return { shouldProcess: false, lastActionId: last }
    await this.#counters.lock(tx, id)
    last = this.#counters.get(tx, id)
    if (last !== undefined && given <= last) return { shouldProcess: false, lastActionId: last }
    this.#counters.set(tx, id, given)
    return { shouldProcess: true, lastActionId: given }
  }

  /** The functions in a transaction of the double. */
  on(tx: MemoryTransaction): Core {
    const self = this
    const held = (row: MessageRow | undefined, attempt: number | undefined): boolean =>
      row?.state === 'pending' && row.leased && (attempt === undefined ? row.availableAt > Date.now() : row.attempt === attempt)
    const core: Core = {
      requestHash: async (method, path, body) => hashed(method, path, body),
      canonicalJson: async (document: string | null) => (document === null ? null as never : canonicalText(document)),
      keyIsValid: async (key) => key !== null && validKey(key),
      claim: (scope, key, options = {}) => self.#claim(tx, scope, key, options),
      async complete(scope, key, status, options = {}) {
        if (status < 100 || status > 599) refuse('the status of a response is 100 to 599', '22023')
        const { body = null, headers = null } = options
        if (Math.max(Buffer.byteLength(body ?? ''), Buffer.byteLength(headerDocument(headers, 'headers') ?? '')) > MAX_RESPONSE_SIZE) {
          refuse('the response is larger than idempotency.max_response_size', '54000')
        }
        const row = await self.#heldRow(tx, scope, key, options.claimToken)
        if (row.state === 'completed' || row.state === 'erased') return false
        self.#started(row)
        self.#keys.set(tx, idOf(scope, key), {
          ...row, state: 'completed', completedAt: new Date(), leaseExpiresAt: null, responseStatus: status, hasRequest: false,
          responseHeaders: parsed(headers) as Headers | null,
          responseBody: typeof body === 'string' ? text(body, 'body') : null,
          responseBytes: body instanceof Uint8Array ? Buffer.from(body) : null,
        })
        return true
      },
      async checkpoint(scope, key, recoveryPoint, options = {}) {
        name(recoveryPoint, 'recoveryPoint')
        const state = asciiJson(options.recoveryState ?? null, 'recoveryState')
        if ((state ?? '').length > MAX_RESPONSE_SIZE) refuse('the recovery state is larger than idempotency.max_response_size', '54000')
        return self.#renew(tx, scope, key, options, {
          recoveryPoint, recoveryState: parsed(options.recoveryState ?? null), recoveryStateText: state,
        })
      },
      heartbeat: (scope, key, options = {}) => self.#renew(tx, scope, key, options),
      async fail(scope, key, options = {}) {
        const row = await self.#heldRow(tx, scope, key, options.claimToken)
        if (row.state === 'failed') return false
        self.#started(row)
        self.#keys.set(tx, idOf(scope, key), { ...row, state: 'failed', error: options.error ?? null, leaseExpiresAt: null, claimedBy: undefined })
        return true
      },
      async release(scope, key, options = {}) {
        const token = options.claimToken == null ? 0n : exact(options.claimToken, 'claimToken')
        if (token > 0n && token <= self.#tokens && !self.#keys.get(tx, idOfKey(scope, key))) return false
        const row = await self.#heldRow(tx, scope, key, options.claimToken)
        self.#started(row)
        self.#keys.set(tx, idOf(scope, key), undefined)
        return true
      },
      async lookup(scope, key) {
        const row = self.#found(tx, scope, key)
        if (!row || row.expiresAt.getTime() <= Date.now()) return undefined
        const { claimToken: _, claimedBy: __, hasRequest: ___, ...shown } = row
        return shown
      },
      async forget(scope, key) {
        const there = await self.#locked(tx, scope, key) !== undefined
        self.#keys.set(tx, idOf(scope, key), undefined)
        return there
      },
      async erase(scope, key) {
        const row = await self.#locked(tx, scope, key)
        if (!row || (row.state !== 'completed' && row.error === null && row.recoveryStateText === null && !row.hasRequest)) return false
        self.#keys.set(tx, idOf(scope, key), {
          ...row, state: row.state === 'completed' ? 'erased' : row.state, responseHeaders: null, responseBody: null,
          responseBytes: null, error: null, recoveryState: null, recoveryStateText: null, hasRequest: false,
        })
        return true
      },
      claimMany: (scope, keys, { requestHashes, ...rest } = {}) => many([keys, requestHashes], async (key, requestHash) =>
        ({ key: key as string, ...await core.claim(scope, key ?? refuse('a key is null', '22004'), { ...rest, requestHash }) })),
      completeMany: (scope, keys, statuses, options = {}) =>
        many([keys, statuses, options.bodies, options.headers, options.claimTokens], async (key, status, body, headers, claimToken) =>
          ({ key: key as string, completed: await core.complete(scope, key, status, { body, headers, claimToken }) })),
      async run(scope, key, handler, request, options = {}) {
        const run = self.handlers[handler] ?? refuse(`function "${handler}" does not exist`, '42883')
        const document = typeof request === 'string' ? request : JSON.stringify(request)
        const claim = await core.claim(scope, key, { wait: '1 minute', ...options, method: 'RUN', path: handler, body: document })
        if (claim.outcome === 'new') {
          const returned = await run(JSON.parse(document) as Json)
          const isResponse = typeof (returned as Response | null)?.status === 'number'
          const response = isResponse ? returned as Response : { status: 200, body: JSON.stringify(returned) }
          await core.complete(scope, key, response.status, { body: response.body ?? null, headers: response.headers ?? null })
          return { outcome: 'new', responseStatus: response.status, responseHeaders: response.headers ?? null, responseBody: String(response.body ?? '') }
        }
        const { outcome, responseStatus, responseHeaders, responseBody } = claim
        return { outcome, responseStatus, responseHeaders, responseBody }
      },

      tryAdvance: (userId, entityType, entityId, actionId) => self.#advance(tx, userId, entityType, entityId, actionId),
      toggle: (userId, entityType, entityId, actionType, actionId) => act(userId, entityType, entityId, actionType, actionId, (isActive) => !isActive),
      async set(userId, entityType, entityId, actionType, active, actionId, { excludes } = {}) {
        if (active === null) refuse('active is null', '22004')
        excludes?.forEach((excluded) => name(excluded, 'excludes'))
        if (excludes?.includes(actionType)) refuse('an action cannot exclude itself', '22023')
        const made = await act(userId, entityType, entityId, actionType, actionId, () => active)
        for (const excluded of made.processed && active ? excludes ?? [] : []) {
          const other = idOf(userId, entityType, entityId, excluded)
          if (self.#actions.get(tx, other)) self.#actions.set(tx, other, { isActive: false })
        }
        return made
      },
      isActive: async (userId, entityType, entityId, actionType) =>
        self.#actions.get(tx, idOf(name(userId, 'userId'), name(entityType, 'entityType'), name(entityId, 'entityId'), name(actionType, 'actionType')))
          ?.isActive ?? false,
      async actionStates(userId, entityType, entityIds) {
        for (const one of [userId, entityType, ...entityIds]) name(one, 'entity')
        const made = []
        for (const [id, { isActive }] of self.#actions.all(tx)) {
          const [user, type, entityId, actionType] = JSON.parse(id) as [string, string, string, string]
          if (user !== userId || type !== entityType || !entityIds.includes(entityId)) continue
          made.push({ entityId, actionType, isActive, lastActionId: self.#counters.get(tx, idOf(user, type, entityId)) ?? 0n })
        }
        return made.sort((one, other) => Buffer.compare(Buffer.from(idOf(one.entityId, one.actionType)), Buffer.from(idOf(other.entityId, other.actionType))))
      },
      async forgetUser(userId) {
        name(userId, 'userId')
        let count = 0n
        for (const table of [self.#counters, self.#actions] as Table<unknown>[]) {
          for (const [id] of [...table.all(tx)]) {
            if ((JSON.parse(id) as string[])[0] !== userId) continue
            await table.lock(tx, id)
            table.set(tx, id, undefined)
            count++
          }
        }
        return count
      },
      tryAdvanceMany: (...lists) => many(lists, core.tryAdvance),
      setMany: (...lists) => many(lists, core.set),

      async tryAppend(aggregate, clientId, clientSeq, options = {}) {
        const id = idOf(name(aggregate, 'aggregate'), name(clientId, 'clientId'))
        const first = exact(clientSeq, 'clientSeq')
        const count = BigInt(options.eventCount ?? 1)
        if (first < 1n || count < 1n) refuse('clientSeq and eventCount are at least 1', '22023')
        const upTo = first + count - 1n
        if (upTo > MAX_BIGINT) refuse('the last client_seq is out of range', '22023')
        const deadline = performance.now() + duration(options.wait, options.waitMs, 'wait', 0)
        for (;;) {
          const last = self.#clients.get(tx, id) ?? 0n
          const version = self.#aggregates.get(tx, aggregate) ?? 0n
          if (upTo <= last) return { outcome: 'duplicate', lastClientSeq: last, version }
          const writer = self.#clients.writer(tx, id)
          const left = deadline - performance.now()
          if (writer && left <= 0) return { outcome: 'in_flight', lastClientSeq: last, version }
          if (writer) await Promise.race([writer.ended, sleep(left)])
          else if (first <= last) return { outcome: 'overlap', lastClientSeq: last, version }
          else if (options.allowGaps === false && first > last + 1n) return { outcome: 'gap', lastClientSeq: last, version }
          else if (self.#aggregates.writer(tx, aggregate)) await self.#aggregates.lock(tx, aggregate)
          else if (options.expectedVersion != null && exact(options.expectedVersion, 'expectedVersion') !== version) {
            return { outcome: 'version_conflict', lastClientSeq: last, version }
          } else {
            self.#clients.set(tx, id, upTo)
            self.#aggregates.set(tx, aggregate, version + count)
            return { outcome: 'appended', lastClientSeq: upTo, version: version + count }
          }
        }
      },
      lastClientSeq: async (aggregate, clientId) => self.#clients.get(tx, idOf(name(aggregate, 'aggregate'), name(clientId, 'clientId'))) ?? 0n,

      async once(scope, token, options = {}) {
        const id = idOf(name(scope, 'scope'), name(token, 'token'))
        await self.#once.lock(tx, id)
        const since = Date.now()
        if ((self.#once.get(tx, id)?.until ?? 0) > since) return false
        self.#once.set(tx, id, { since, until: since + duration(options.ttl, options.ttlMs, 'ttl', 7 * DAY) })
        return true
      },
      async onceAt(scope, token) {
        const found = self.#once.get(tx, idOf(name(scope, 'scope'), name(token, 'token')))
        return found && found.until > Date.now() ? new Date(found.since) : null
      },
      async onceMany(scope, tokens, options = {}) {
        const first = new Set<string>()
        // Sorted, so that two calls do not deadlock.
        for (const token of [...new Set(tokens)].sort()) if (await core.once(scope, token, options)) first.add(token)
        return [...new Set(tokens)].filter((token) => first.has(token))
      },

      async publish(topic, payload, given = {}) {
        const options = { ...given, headers: tracedHeaders(given.headers) }
        const now = Date.now()
        const id = ++self.#ids
        const messageId = randomUUID()
        self.#messages.set(tx, String(id), {
          id, messageId, topic: name(topic, 'topic'), messageKey: options.messageKey == null ? null : name(options.messageKey, 'messageKey'),
          payload: asJsonb(parsed(payload)), payloadText: canonical(parsed(payload), true), headers: asJsonb(parsed(options.headers ?? null)),
          headersText: options.headers == null ? null : canonical(parsed(options.headers), true), attempt: 0, createdAt: new Date(now),
          availableAt: now + duration(options.deliverAfter, options.deliverAfterMs, 'deliverAfter', 0), state: 'pending', leased: false, attemptsBefore: 0, endedAt: 0,
        })
        return messageId
      },
      publishMany: (topics, payloads, { messageKeys, headers, ...rest } = {}) => many([topics, payloads, messageKeys, headers],
        async (topic, payload, messageKey, head) =>
          ({ messageId: await core.publish(topic, payload, { ...rest, messageKey, ...(head === undefined ? {} : { headers: head }) }) })),
      async outboxTake(options = {}) {
        const { maxMessages = 100, topics } = options
        if (maxMessages < 1) refuse('maxMessages is at least 1', '22023')
        topics?.forEach((topic) => name(topic, 'topics'))
        const lease = duration(options.lease, options.leaseMs, 'lease', 30_000)
        const deadline = performance.now() + duration(options.wait, options.waitMs, 'wait', 0)
        for (;;) {
          const now = Date.now()
          const taken: Message[] = []
          const blocked = new Set<string>()
          const rows = [...self.#messages.all(tx)].map(([, row]) => row).filter((row) => row.state === 'pending').sort((one, other) => Number(one.id - other.id))
          for (const row of rows) {
            const lane = row.messageKey === null ? undefined : idOf(row.topic, row.messageKey)
            const free = !self.#messages.writer(tx, String(row.id)) && row.availableAt <= now && taken.length < maxMessages &&
              (!topics || topics.includes(row.topic)) && !(lane && blocked.has(lane))
            if (!free) {
              if (lane) blocked.add(lane)
            } else if (row.attempt - row.attemptsBefore >= MAX_ATTEMPTS) {
              self.#messages.set(tx, String(row.id), { ...row, state: 'dead', leased: false, endedAt: now })
            } else {
              const made = { ...row, attempt: row.attempt + 1, availableAt: now + lease, leased: true }
              self.#messages.set(tx, String(row.id), made)
              const { availableAt: _, state: _1, leased: _2, attemptsBefore: _3, endedAt: _4, ...message } = made
              taken.push(message)
            }
          }
          if (taken.length > 0 || performance.now() >= deadline) return taken
          await sleep(10)
        }
      },
      outboxAck: (ids) => change(ids, undefined, (row) => row.state !== 'acked' && { ...row, state: 'acked', leased: false, endedAt: Date.now() }),
      async outboxNack(id, options = {}) {
        let answer: 'pending' | 'dead' | 'lost' = 'lost'
        await change([id], undefined, (row) => {
          if (row.state !== 'pending' || !row.leased || (options.attempt != null && options.attempt !== row.attempt)) return false
          answer = row.attempt - row.attemptsBefore >= MAX_ATTEMPTS ? 'dead' : 'pending'
          const pause = duration(options.retryAfter, options.retryAfterMs, 'retryAfter', Math.min(3_600_000, 1000 * 2 ** (row.attempt - 1)) * (1 - Math.random() / 2))
          return { ...row, state: answer, leased: false, availableAt: Date.now() + pause, endedAt: Date.now() }
        })
        return answer
      },
      outboxRequeue: (ids) => change(ids ?? [...self.#messages.all(tx)].map(([, row]) => row.id), undefined, (row) =>
        row.state === 'dead' && { ...row, state: 'pending', attemptsBefore: row.attempt, availableAt: Date.now() }),
      async outboxExtend(ids, options = {}) {
        const kept: bigint[] = []
        const lease = duration(options.lease, options.leaseMs, 'lease', 30_000)
        await change(ids, options.attempts, (row, attempt) => {
          if (!held(row, attempt)) return false
          kept.push(row.id)
          return { ...row, availableAt: Date.now() + lease }
        })
        return kept
      },
      outboxRelease: (ids, options = {}) => change(ids, options.attempts, (row, attempt) =>
        held(row, attempt) && { ...row, leased: false, availableAt: 0, attempt: row.attempt, attemptsBefore: row.attemptsBefore + 1 }),

      async cleanup(batchSize) {
        if (batchSize !== undefined && batchSize < 1) refuse('batchSize is at least 1', '22023')
        const now = Date.now()
        const counts = { keysDeleted: 0n, tokensDeleted: 0n, messagesDeleted: 0n }
        const sweep = <V>(table: Table<V>, over: (row: V) => boolean): bigint => {
          let count = 0n
          for (const [id, row] of [...table.all(tx)]) {
            if (table.writer(tx, id) || !over(row)) continue
            table.set(tx, id, undefined)
            count++
          }
          return count
        }
        counts.keysDeleted = sweep(self.#keys, (row) => row.expiresAt.getTime() <= now)
        counts.tokensDeleted = sweep(self.#once, ({ until }) => until <= now)
        counts.messagesDeleted = sweep(self.#messages, (row) => row.state === 'acked' && row.endedAt + DAY <= now)
        return counts
      },
      stats: async () => undefined,
      statsReset: async () => undefined,
      metrics: async () => '# EOF',
      metricSamples: async () => [],
      health: async () => [],
      async abandoned(options = {}) {
        const limit = Date.now() - duration(options.olderThan, options.olderThanMs, 'olderThan', 300_000)
        return [...self.#keys.all(tx)].filter(([, row]) => row.state === 'started' && row.leaseExpiresAt!.getTime() < limit).map(([id, row]) => {
          const [scope, key] = JSON.parse(id) as [string, string]
          return { scope, key, age: `${Date.now() - row.leaseExpiresAt!.getTime()} milliseconds`, attempt: row.attempt,
            recoveryPoint: row.recoveryPoint, leaseExpiresAt: row.leaseExpiresAt! }
        })
      },
      async raiseClaimTokens(atLeast) {
        const given = exact(atLeast, 'atLeast')
        if (given >= 2n ** 62n) refuse('atLeast is out of range', '22023')
        return self.#tokens = given > self.#tokens ? given : self.#tokens
      },
      resume: async () => needsServer('idem_resume'),
      outboxBlocked: async () => needsServer('idem_outbox_blocked'),
      takeExpired: async () => needsServer('idem_take_expired'),
      repairOutbox: async () => 0n,
      grant: async () => undefined,
      grantRelay: async () => undefined,
      grantMonitor: async () => undefined,
      revoke: async () => undefined,
    }

    async function act(userId: string, entityType: string, entityId: string, actionType: string, actionId: Bigint, change: (isActive: boolean) => boolean): Promise<Action> {
      const id = idOf(userId, entityType, entityId, name(actionType, 'actionType'))
      // This locks the counter, which protects the action.
      const { shouldProcess: processed, lastActionId } = await self.#advance(tx, userId, entityType, entityId, actionId)
      const before = self.#actions.get(tx, id)
      const isActive = processed ? change(before?.isActive ?? false) : before?.isActive ?? false
      if (processed && (before || isActive)) self.#actions.set(tx, id, { isActive })
      return { isActive, lastActionId, processed }
    }

    /** Calls run with the elements of each place of the lists, one after another. */
    async function many<T extends object>(lists: (readonly unknown[] | null | undefined)[], run: (...given: any[]) => Promise<T>): Promise<({ ordinal: number } & T)[]> {
      const made = []
      for (const [at, given] of zip(...lists).entries()) made.push({ ordinal: at + 1, ...await run(...given) })
      return made
    }

    /** Change messages one after another, and return their number. */
    async function change(ids: Bigint[], attempts: number[] | null | undefined,
      make: (row: MessageRow, attempt: number | undefined) => MessageRow | false): Promise<number> {
      let count = 0
      for (const [id, attempt] of zip(ids, attempts)) {
        const key = String(exact(id as Bigint, 'id'))
        await self.#messages.lock(tx, key)
        const row = self.#messages.get(tx, key)
        const made = row && make(row, attempt as number | undefined)
        if (!made) continue
        self.#messages.set(tx, key, made)
        count++
      }
      return count
    }
    return Object.fromEntries(Object.entries(core).map(([name, run]) => [name, async (...given: unknown[]) => {
      if (tx.isAborted) refuse('current transaction is aborted, commands ignored until end of transaction block', '25P02')
      try {
        return await (run as (...given: unknown[]) => unknown)(...given)
      } catch (error) {
        tx.isAborted = true
        throw error
      }
    }])) as unknown as Core
  }
}

function refuseKey(key: string): void {
  if (validKey(key)) return
  throw new KeyInvalid(`invalid idempotency key "${key.slice(0, 4)}..." (${key.length} characters)`, {
    sqlstate: 'ID001',
    detail: !/^[A-Za-z0-9_:.-]*$/.test(key) ? 'It contains a character that is not allowed.'
      : key.length < 16 ? 'It is too short.' : 'It is too long.',
    hint: 'Let the client send a UUID, or any key of 16 to 128 characters out of A-Z a-z 0-9 _ - : .',
  })
}

const MAX_ATTEMPTS = 10
const validKey = (key: string): boolean => /^[A-Za-z0-9_:.-]{16,128}$/.test(key)
