/**
 * request() and job().
 *
 * A request is one transaction: claim, handler, complete, COMMIT. Only then the
 * response is returned. A job is several transactions: the claim commits, each
 * step's value is committed as a checkpoint, and the last step commits together
 * with the response. This file does not depend on HTTP.
 */
import { setTimeout as sleep } from 'node:timers/promises'
import type { PoolClient } from 'pg'
import {
  ClaimLost, ClaimNotFound, IdempotencyError, InProgress, KeyExpired, KeyReused, NotFinished, ScopeMoving, sqlstateOf, TimedOut, TransactionEnded,
} from './errors.js'
import {
  coreOver, held,
  type Claim, type Core, type HeldClaim, type Lease, type Lookup, type RequestIdentity, type Statement, type Statements, type Timeout, type Ttl, type Wait,
} from './functions.js'
import { Deadline, refuseNested, runHandler } from './handlers.js'
import { newKey, requestHashOfBytes, stepKey } from './keys.js'
import { noteClaim, observed, spanned, traceparent, waiting, withoutTrace, type Observers } from './observe.js'
import { ANSWER_MS, BEGIN, isDead, isStale, isUnreachable, performOn, retryIfDead, Session, type Handle, type PoolLike } from './postgres.js'
import { ManyServers, OneServer, type Servers, type Shards } from './shards.js'
import { checkedNames, describe, durationMs, headerNames, headers as headerDocument, interval, jsonOf, LONGEST_TIMER, type Headers, type Json } from './values.js'

const ATTEMPTS = 5
export const RETRIED = new Set(['40001', '40P01'])
/** Raised by statement_timeout and by lock_timeout. */
const ENDED_WAITS = new Set(['57014', '55P03'])
const IN_DOUBT_WAIT = '5 seconds'
const MAX_ERROR = 1000

export interface Options extends Observers {
  /** The schema of the extension, idem by default. */
  schema?: string
  /** Makes the pool of a shard. The pool of the client is then that of a router. */
  shards?: Shards
  /** The maximum number of connections of a pool that sleep in duplicates; half of the pool by default. */
  maxWaiters?: number
  /** The default of request() and job(). */
  wait?: string
  waitMs?: number
  ttl?: string
  ttlMs?: number
  lease?: string
  leaseMs?: number
  /** Limits a handler with all its tries. The default is '1 minute' for handlers that hold a connection; null is no limit. */
  timeout?: string | null
  timeoutMs?: number
}

/** The return value of a handler. The body is stored unchanged: a string as text, a Buffer as bytes. */
export interface Response {
  status: number
  headers?: Headers | undefined
  body?: string | Uint8Array | null | undefined
}

export interface Result {
  outcome: 'new' | 'replay' | 'erased'
  status: number
  headers: Headers
  body: string | Buffer | null
  /** Whether an earlier request made this response. */
  replayed: boolean
  /** Whether a duplicate will get it; a response that is too large is not stored. */
  stored: boolean
}

export type RequestOptions = RequestIdentity & Ttl & Wait & Timeout & {
  scope: string
  key: string
  /** Whether a 3xx or 4xx is stored; by default all except 401, 403, 408, 425 and 429. A 2xx always is, and a 5xx never. */
  store?: ((status: number) => boolean) | undefined
  /** The largest stored response in bytes, if smaller than idempotency.max_response_size. */
  maxResponseSize?: number | undefined
  /** Ends the wait for another request, but not a running handler. */
  signal?: AbortSignal | undefined
}
export type JobOptions = RequestOptions & Lease

export interface Step {
  /** The same in all attempts, so that the other system recognizes a repetition. */
  key: string
  /** Aborted when the claim is lost. */
  signal: AbortSignal
}

/** The argument of a job's function. Tx is the handle of the last step's transaction. */
export interface Job<Tx> {
  readonly scope: string
  readonly key: string
  readonly attempt: number
  /** Aborted when another claimant might have taken over. */
  readonly signal: AbortSignal
  readonly lost: boolean
  /** Runs fn unless an earlier attempt has stored its value. The value is stored and returned as JSON: a Date as text, undefined as null. */
  step<T>(name: string, fn: (step: Step) => Promise<T> | T): Promise<T>
  /** Runs the last step, whose writes with tx commit together with the response. */
  finish(fn: (tx: Tx) => Promise<Response> | Response): Promise<Result>
}

export type TransactionOptions<T> = Timeout & {
  commits?: (result: T) => boolean
  /** Determines the shard, if there are several. */
  scope?: string
}

/** The common interface of the client for a server and of the double in memory. */
export type Client<Tx> = Omit<Idempotency<Tx>, 'statements'>

/** These depend on the sender or on the moment, not on the request. */
const NOT_STORED = new Set([401, 403, 408, 425, 429])

/** Whether a response of this status commits or is rolled back. A success always commits, because the client relies on it. */
export function storable(status: number, store = (given: number) => !NOT_STORED.has(given)): boolean {
  if (status < 300 || status >= 500) return status < 300
  const kept: unknown = store(status)
  // A promise would be true.
  if (typeof kept !== 'boolean') throw new TypeError(`the option store must return true or false, not ${describe(kept)}`)
  return kept
}

/** A problem document of RFC 9457. */
export function problem(type: string, title: string, status: number, detail: string): Response & { body: string; headers: Headers } {
  return {
    status, headers: { 'Content-Type': 'application/problem+json' },
    body: JSON.stringify({ type: `urn:pg-idempotency:${type}`, title, status, detail }),
  }
}

/** The response as it can be stored under a claim. A problem document replaces a response that is too large. */
function storedResponse(response: Response, { encoding, ...claim }: HeldClaim, options: RequestOptions) {
  const { status } = response
  const body = typeof response.body === 'string' ? storableText(response.body, encoding) : response.body ?? null
  const trace = traceparent()
  const given = trace === undefined ? response.headers : { ...response.headers, traceparent: trace }
  const headers = given && Object.keys(given).length > 0 ? given : null
  const limit = Math.min(claim.maxResponseSize, options.maxResponseSize ?? Infinity)
  const size = Math.max(Buffer.byteLength(body ?? ''), Buffer.byteLength(headerDocument(headers, 'headers') ?? ''))
  if (size <= limit) return { status, body, headers, whole: true }
  return { whole: false, ...problem('response-not-stored', 'Response not stored', status,
    `The response to this request was larger than the ${limit} bytes that may be stored.`) }
}

const NOT_ASCII = /[^\0-\x7f]/gu

/** Returns bytes if the database might not hold the text: a NUL, or characters beyond ASCII in another encoding than UTF-8. */
function storableText(body: string, encoding: string): string | Buffer {
  const whole = body.toWellFormed()
  return whole.includes('\0') || (encoding !== 'UTF8' && whole.search(NOT_ASCII) >= 0) ? Buffer.from(whole) : whole
}

/** Text for people, with escapes for characters that the database might not have. */
function printable(said: string, encoding: string): string {
  const whole = said.replaceAll('\0', '').toWellFormed()
  return encoding === 'UTF8' ? whole : whole.replace(NOT_ASCII, (one) => `\\u{${one.codePointAt(0)!.toString(16)}}`)
}

/** Refuses invalid options when they are set, before any request. */
export function checkedTimes(options: Times): void {
  for (const name of ['ttl', 'wait', 'lease'] as const) interval(options[name], options[`${name}Ms`], name)
  if (durationMs(options.ttl, options.ttlMs, 'ttl') === 0) throw new TypeError('ttl must not be 0, because the claim would expire before the handler ends; omit it for the default')
  new Deadline(options)
}

type Times = Ttl & Wait & Lease & Timeout
/** The options of a call, with the client's times in place of those that the call does not state. null is the server's default, or no timeout. */
function withTimes<T extends Times>(options: T, defaults: Times): T {
  const made = { ...options } as Record<string, unknown>
  for (const name of ['ttl', 'wait', 'lease', 'timeout'] as const) {
    const isStated = options[name] !== undefined || options[`${name}Ms`] !== undefined
    for (const one of [name, `${name}Ms`] as const) {
      const value = (isStated ? options : defaults)[one]
      made[one] = name === 'timeout' ? value : value ?? undefined
    }
  }
  return made as T
}

const TIMES = ['ttl', 'ttlMs', 'wait', 'waitMs', 'timeout', 'timeoutMs']
const LEASE = ['lease', 'leaseMs']
const CLIENT = new Set([...TIMES, ...LEASE, 'onOutcome', 'traceKeys'])
const TRANSACTION = new Set(['commits', 'scope', 'timeout', 'timeoutMs'])
const REQUEST = new Set([...TIMES, 'scope', 'key', 'requestHash', 'method', 'path', 'body', 'without', 'store', 'maxResponseSize', 'signal'])
const JOB = new Set([...REQUEST, ...LEASE])

function checkedClient(options: Options): void {
  checkedNames(options, CLIENT, 'the client')
  checkedTimes(options)
  const { onOutcome, traceKeys } = options
  if (onOutcome !== undefined && typeof onOutcome !== 'function') throw new TypeError('the option onOutcome must be a function that takes the outcome')
  if (traceKeys !== undefined && typeof traceKeys !== 'boolean') throw new TypeError('the option traceKeys must be true or false')
}

/** Checks the options of a request or a job. */
function checkedRequest(options: RequestOptions, kind: 'request' | 'job'): void {
  checkedNames(options, kind === 'job' ? JOB : REQUEST, `${kind}()`)
  const { scope } = options as { scope: unknown }
  if (typeof scope !== 'string' || scope === '') {
    throw new TypeError(`scope must be a string, the user or tenant that owns the key, not ${scope === '' ? "''" : describe(scope)}`)
  }
  checkedTimes(options)
  checkedCount(options.maxResponseSize, 'maxResponseSize')
  // Not instanceof, because of other realms, such as Jest's.
  if (options.signal && typeof options.signal.addEventListener !== 'function') throw new TypeError(`signal must be an AbortSignal, not ${describe(options.signal)}`)
}

/** Checks a number of bytes or of connections. */
export function checkedCount(value: number | undefined, name: string): void {
  if (value !== undefined && !(Number.isSafeInteger(value) && value >= 0)) {
    throw new TypeError(`${name} must be a whole number, at least 0: ${String(value)}`)
  }
}

/** The members of a Result that a response does not have. A handler can return the Result of another client. */
const RESULT = new Set(['outcome', 'replayed', 'stored'])

function checked(response: unknown, who: string): Response {
  const status = (response as Response | undefined)?.status
  if (typeof status !== 'number' || !Number.isInteger(status) || status < 100 || status > 599) {
    throw new TypeError(`${who} must return a response: an object with a status, and optionally headers and a body`)
  }
  const { status: _, headers, body, ...others } = response as { status: number; headers?: unknown; body?: unknown }
  const other = Object.entries(others).find(([name, value]) => value !== undefined && !RESULT.has(name))?.[0]
  if (other !== undefined) throw new TypeError(`${who} returned a response with the member ${other}; its members are status, headers and body`)
  if (typeof body !== 'string' && !(body instanceof Uint8Array) && body !== undefined && body !== null) {
    throw new TypeError(`${who} returned a body that is not a string or a Buffer, but a ${describe(body)}; JSON.stringify() makes a string ` +
      'of a document')
  }
  if (headers !== undefined && headers !== null) headerNames(headers, `the headers that ${who} returned`)
  return response as Response
}

export function newResult(response: Response, stored: boolean): Result {
  const body = response.body ?? null
  return {
    outcome: 'new', status: response.status, headers: response.headers ?? {},
    body: body instanceof Uint8Array ? Buffer.from(body.buffer, body.byteOffset, body.byteLength) : body,
    replayed: false, stored,
  }
}

const storedResult = (outcome: Result['outcome'], row: Claim | Lookup): Result => ({
  outcome, status: row.responseStatus!, headers: withoutTrace(row.responseHeaders), body: row.responseBytes ?? row.responseBody, replayed: true, stored: true,
})

/** Returns the result of a claim that is not new, or throws its error. */
function resultOfClaim(claim: HeldClaim): Result {
  switch (claim.outcome) {
    case 'replay': case 'erased': return storedResult(claim.outcome, claim)
    case 'in_progress':
      // Most jobs are over long before their lease.
      throw new InProgress(undefined, Math.max(1, Math.min(5, Math.round((claim.leaseMs ?? 0) / 1000))))
    case 'hash_conflict': throw new KeyReused('the key was used for another request')
    case 'expired': throw new KeyExpired('the key has expired')
    case 'new': throw new TypeError('a new claim has no answer')
  }
}

/** Hashes bytes here, so that they are not sent. A string is JSON, which only the server can hash. */
function identity(options: RequestIdentity): RequestIdentity {
  const { path, body, without, requestHash } = options as Record<string, unknown>
  if (typeof body !== 'string' && !(body instanceof Uint8Array) && body !== undefined && body !== null) {
    throw new TypeError(`the body of the request must be a string or a Buffer, not a ${describe(body)}; pass the bytes as they were received`)
  }
  if (!(requestHash instanceof Uint8Array) && requestHash !== undefined && requestHash !== null) {
    throw new TypeError(`requestHash must be a Buffer, not ${describe(requestHash)}`)
  }
  if (('method' in options ? requestHash : path ?? body ?? without) != null) {
    throw new TypeError('a request is compared either by its method, path and body, or by its requestHash: the rest would be ignored')
  }
  if (!('method' in options)) return options.requestHash === undefined ? {} : { requestHash: options.requestHash }
  if (typeof options.body === 'string') return { method: options.method, path: options.path, body: options.body, without: options.without ?? [] }
  return { requestHash: requestHashOfBytes(options.method, options.path, options.body ?? new Uint8Array()) }
}

/** Repeats after serialization failures, deadlocks and stale statements, with jitter. */
async function withRetries<T>(attempt: () => Promise<T>): Promise<T> {
  for (let number = 1; ; number++) {
    try {
      return await attempt()
    } catch (error) {
      if (number === ATTEMPTS || !(RETRIED.has(sqlstateOf(error) ?? '') || isStale(error))) throw error
    }
    await sleep(Math.random() * 20 * 2 ** number)
  }
}

/** Settles as the promise does, or with the signal's reason if that comes first. Then drop() gets the value, which nobody uses. */
function orAbort<T>(promise: Promise<T>, signal: AbortSignal | undefined, drop?: (value: T) => void): Promise<T> {
  if (!signal) return promise
  return new Promise((resolve, reject) => {
    const abort = (): void => {
      reject(signal.reason)
      promise.then(drop, () => undefined)
    }
    if (signal.aborted) return abort()
    signal.addEventListener('abort', abort, { once: true })
    const over = <V>(settle: (value: V) => void) => (value: V): void => {
      signal.removeEventListener('abort', abort)
      settle(value)
    }
    promise.then(over(resolve), over(reject))
  })
}

const isLoss = (error: unknown): boolean => error instanceof ClaimLost || error instanceof ClaimNotFound

/** Whether another connection can get the answer. */
const isUnanswered = (error: unknown): boolean => isDead(error) || isUnreachable(error) || error instanceof TimedOut

interface Own { session?: Session }
/** Also repeats an attempt whose COMMIT is in doubt. The arguments of the attempt are whether the one before was, and where it puts its session. */
function untilSettled<T>(attempt: (isRepeated: boolean, own: Own) => Promise<T>): Promise<T> {
  let doubts = 0
  return withRetries(async () => {
    for (;;) {
      // The handler's error can come from another session whose COMMIT is in doubt.
      const own: Own = {}
      try {
        return await attempt(doubts > 0, own)
      } catch (error) {
        if (!own.session?.inDoubt || ++doubts === 3) throw error
      }
    }
  })
}

/**
 * Lets one of the waiting duplicates in this process run at a time. The others
 * wait here, without a connection.
 */
class SingleFlight {
  #running = new Map<string, Promise<boolean>>()

  run<T extends RequestOptions>(kind: 'request' | 'job', options: T, observers: Observers, run: (options: T) => Promise<Result>): Promise<Result> {
    const ms = durationMs(options.wait, options.waitMs, 'wait') ?? 0
    return observed(kind, options, observers, () => (ms > 0 ? this.#alone(options, ms, run) : run(options)))
  }

  async #alone<T extends RequestOptions>(options: T, ms: number, run: (options: T) => Promise<Result>): Promise<Result> {
    const hash = identity(options)
    // The request is part of the id, so that another request under the key is refused at once.
    const id = JSON.stringify([options.scope, options.key,
      'method' in hash ? [hash.method, hash.path, hash.body] : Buffer.from(hash.requestHash ?? '').toString('hex')])
    const deadline = performance.now() + ms
    const left = (): number => Math.max(0, deadline - performance.now())
    for (let first = this.#running.get(id); first; first = this.#running.get(id)) {
      const over = new AbortController()
      const running = first
      const stored = await waiting(() => orAbort(Promise.race([running, sleep(Math.min(left(), LONGEST_TIMER), false, { signal: over.signal })]), options.signal)
        .finally(() => over.abort()))
      if (stored || left() === 0) return run({ ...options, wait: undefined, waitMs: 0 })
    }
    const flight = run({ ...options, wait: undefined, waitMs: left() })
    this.#running.set(id, flight.then((result) => result.stored, () => false).finally(() => this.#running.delete(id)))
    return flight
  }
}

export interface Idempotency<Tx = PoolClient> extends Core {}

/** The number of connections of a pool that sleep in duplicates, over all clients that use the pool. */
const waitingConnections = new WeakMap<PoolLike, number>()

/** The client over a pg.Pool or over the pool of an ORM. */
export class Idempotency<Tx = PoolClient> {
  readonly statements: Statements
  #pool: PoolLike
  #servers: Servers
  #defaults: Omit<Options, 'schema' | 'shards' | 'maxWaiters'>
  #maxWaiters: number | undefined
  #singleFlight = new SingleFlight()

  constructor(pool: PoolLike<Tx>, options: Options = {}) {
    const { schema = 'idem', shards, maxWaiters, ...defaults } = options
    if (typeof (pool as Partial<PoolLike> | undefined)?.connect !== 'function' || (pool as { _connected?: unknown })._connected !== undefined) {
      throw new TypeError(`the client takes a pg.Pool, or the pool of an ORM, and not a ${describe(pool)}`)
    }
    checkedClient(defaults)
    checkedCount(maxWaiters, 'maxWaiters')
    this.#pool = pool
    this.#servers = shards ? new ManyServers(pool, schema, shards) : new OneServer(pool, schema)
    this.statements = this.#servers.statements
    this.#defaults = defaults
    this.#maxWaiters = maxWaiters
    Object.assign(this, this.#core())
  }

  /** Each function as a statement of its own. */
  #core(): Core {
    return coreOver(this.statements, (statement, name, given) => {
      refuseNested(this.#pool, `${name}()`, `on(tx).${name}()`)
      return this.#servers.perform(statement, name, given)
    })
  }

  /** The functions in your own transaction, of a pg client or of the ORM. */
  on(handle: Handle): Core {
    if (handle === this.#pool) return this.#core()
    return coreOver(this.statements, (statement) => performOn(handle, statement, this.#pool.adapter))
  }

  newKey(): string {
    return newKey()
  }

  /** A transaction without a key. It commits unless the handler throws or commits() returns false. */
  async transaction<T>(handler: (tx: Tx) => Promise<T> | T, options: TransactionOptions<T> = {}): Promise<T> {
    refuseNested(this.#pool, 'transaction()', 'tx, and savepoints')
    checkedNames(options, TRANSACTION, 'transaction()')
    const deadline = Deadline.inTransaction(withTimes(options, this.#defaults))
    return withRetries(async () => {
      const session = await this.#opened(options.scope, async (opened) => {
        await opened.begin(this.#servers.pin(options.scope))
        return opened
      })
      try {
        const result = await this.#handle(session, handler, deadline)
        if (options.commits?.(result) ?? true) await session.commit()
        return result
      } finally {
        await session.release()
      }
    })
  }

  /** Run the handler of a session's transaction. */
  async #handle<T>(session: Session, handler: (tx: Tx) => Promise<T> | T, deadline: Deadline): Promise<T> {
    try {
      return await runHandler([this.#pool, session.pool], () => handler(session.tx as Tx), deadline, (listener) => session.onEnd(listener))
    } catch (error) {
      session.abandoned = error instanceof TimedOut
      throw error
    }
  }

  async request(options: RequestOptions, handler: (tx: Tx) => Promise<Response> | Response): Promise<Result> {
    refuseNested(this.#pool, 'request()', 'tx, and the methods of on(tx)')
    checkedRequest(options, 'request')
    return this.#singleFlight.run('request', withTimes(options, this.#defaults), this.#defaults, (request) => {
      const deadline = Deadline.inTransaction(request)
      // After a lost answer, the transaction has committed, or will never commit, or has not yet ended.
      return untilSettled((isRepeated, own) => this.#once(isRepeated ? { ...request, wait: IN_DOUBT_WAIT, waitMs: undefined } : request, handler, deadline,
        own, isRepeated ? ANSWER_MS : undefined))
    })
  }

  /** One transaction. */
  async #once(options: RequestOptions, handler: (tx: Tx) => Promise<Response> | Response, deadline: Deadline,
    own: Own, connectMs?: number): Promise<Result> {
    const opened = this.#claimed(options, 'request', connectMs)
    const { session, claim } = await orAbort(opened, options.signal, (late) => void late.session.release())
    own.session = session
    if (claim.outcome !== 'new') {
      // The response does not have to wait for the ROLLBACK.
      void session.release()
      return resultOfClaim(claim)
    }
    try {
      const response = checked(await this.#handle(session, handler, deadline), 'the handler')
      if (!storable(response.status, options.store)) return newResult(response, false)
      const { status, body, headers, whole } = storedResponse(response, claim, options)
      const complete = (claimToken: bigint | null): Statement<boolean> =>
        this.statements.complete(options.scope, options.key, status, { body, headers, claimToken })
      const isOpen = session.status !== 'I'
      try {
        if (!isOpen) throw new ClaimLost('no transaction')
        await spanned('idempotency.commit', () => session.commit(complete(null)))
      } catch (error) {
        if (!isLoss(error)) throw error
        // This is not the transaction of the claim. The work of a later one is rolled back, so a retry gets no success.
        const { claimToken } = claim
        await this.#ended(session, isOpen ? this.statements.complete(options.scope, options.key, 500, { claimToken }) : complete(claimToken))
      }
      return newResult(response, whole)
    } finally {
      await session.release()
    }
  }

  /** The handler has ended the transaction itself. If it committed, so did the claim. Then store the response, so that no retry runs the handler again. */
  async #ended(session: Session, complete: Statement<boolean>): Promise<never> {
    try {
      if (session.status !== 'I') await session.rollback()
      await session.perform(complete, ANSWER_MS)
    } catch (error) {
      if (!(error instanceof IdempotencyError)) throw error
      throw new TransactionEnded('the handler rolled its transaction back, or took longer than the ttl of its claim', { cause: error })
    }
    throw new TransactionEnded('the handler committed its transaction; the key was completed in another one')
  }

  /** Opens a session and claims. The claim waits if fewer than maxWaiters sessions do, and always for an own COMMIT in doubt, which has connectMs. */
  #claimed(options: RequestOptions & Lease, kind: 'request' | 'job', connectMs?: number): Promise<{ session: Session; claim: HeldClaim }> {
    const { ttl, ttlMs, lease, leaseMs, wait, waitMs } = options
    const given = { ...identity(options), ttl, ttlMs, lease, leaseMs }
    const ms = durationMs(wait, waitMs, 'wait') ?? 0
    return this.#opened(options.scope, async (session, pool) => {
      const waiters = waitingConnections.get(pool) ?? 0
      const counts = connectMs === undefined && ms > 0 && waiters < (this.#maxWaiters ?? Math.floor((pool.options?.max ?? 10) / 2))
      const sleeps = counts || connectMs !== undefined
      if (counts) waitingConnections.set(pool, waiters + 1)
      try {
        const statement = held(this.statements.claim(options.scope, options.key, sleeps ? { ...given, wait, waitMs } : given))
        const limitMs = ANSWER_MS + (sleeps ? ms : 0)
        const began = performance.now()
        const claim = await spanned('idempotency.claim', async () => {
          if (kind === 'job' && !pool[BEGIN]) return session.perform(statement, limitMs)
          const made = await session.begin(statement, limitMs)
          if (kind === 'job' && made.outcome === 'new') {
            await session.commit().catch((error: unknown) => {
              // Otherwise the claim would refuse its duplicates until the end of the lease, if it has committed.
              void this.fail(options.scope, options.key, { claimToken: made.claimToken }).catch(() => undefined)
              throw error
            })
          }
          return made
        })
        noteClaim(claim, sleeps ? performance.now() - began : 0)
        return { session, claim }
      } catch (error) {
        // The session's own time-outs can be shorter than the wait.
        if (sleeps && !options.signal?.aborted && (error instanceof TimedOut || ENDED_WAITS.has(sqlstateOf(error) ?? ''))) {
          session.cancel()
          throw new InProgress()
        }
        throw error
      } finally {
        if (counts) waitingConnections.set(pool, waitingConnections.get(pool)! - 1)
      }
    }, connectMs, options.signal)
  }

  /** Begin on a session of the scope's server, or on another one if the server had ended that session. The signal cancels the statement. */
  #opened<T>(scope: string | undefined, begin: (session: Session, pool: PoolLike) => Promise<T>, connectMs?: number, signal?: AbortSignal): Promise<T> {
    return this.#servers.at(scope, (pool) => retryIfDead(async () => {
      const session = await Session.open(pool, true, connectMs)
      const cancel = (): void => session.cancel()
      signal?.addEventListener('abort', cancel, { once: true })
      try {
        if (signal?.aborted) throw signal.reason
        return await begin(session, pool)
      } catch (error) {
        await session.release()
        throw error
      } finally {
        signal?.removeEventListener('abort', cancel)
      }
    }, (error) => !signal?.aborted && isDead(error)))
  }

  async job(options: JobOptions, fn: (job: Job<Tx>) => Promise<Response | void> | Response | void): Promise<Result> {
    refuseNested(this.#pool, 'job()', 'tx, and the methods of on(tx)')
    checkedRequest(options, 'job')
    return this.#singleFlight.run('job', withTimes(options, this.#defaults), this.#defaults, (request) => this.#job(request, fn))
  }

  async #job(options: JobOptions, fn: (job: Job<Tx>) => Promise<Response | void> | Response | void): Promise<Result> {
    const started = performance.now()
    const claim = await orAbort(withRetries(async () => {
      const { session, claim } = await this.#claimed(options, 'job')
      await session.release()
      if (options.signal?.aborted && claim.outcome === 'new') {
        await this.fail(options.scope, options.key, { claimToken: claim.claimToken })
      }
      return claim
    }), options.signal)
    if (claim.outcome !== 'new') return resultOfClaim(claim)
    const deadline = new Deadline(options)
    return runJob(this, options, claim, started, deadline,
      (finish, complete) => this.#finish(options, claim, finish, complete, deadline.ofLastStep()), fn)
  }

  /** Runs the last step. It begins with a heartbeat, which locks the row, so that no other claimant can take over until COMMIT. */
  async #finish(options: JobOptions, claim: HeldClaim, fn: (tx: Tx) => Promise<Response> | Response,
    complete: (response: Response) => Statement<boolean>, deadline: Deadline): Promise<Result> {
    const { scope, key } = options
    const { claimToken } = claim
    return untilSettled(async (isRepeated, own) => {
      try {
        const opened = own.session = await this.#opened(scope, async (one) => {
          await one.begin(this.statements.heartbeat(scope, key, { claimToken, ...leaseOf(options) }))
          return one
        }, isRepeated ? ANSWER_MS : undefined)
        const response = checked(await this.#handle(opened, fn, deadline), 'the last step')
        if (opened.status === 'E' || opened.status === 'I') {
          throw new TransactionEnded('the last step ended its transaction, or continued after an error in it')
        }
        if (!storable(response.status, options.store)) return newResult(response, false)
        await spanned('idempotency.commit', () => opened.commit(complete(response)))
        return newResult(response, storedResponse(response, claim, options).whole)
      } catch (error) {
        // If the record was completed with our token, our transaction committed. An attempt that took over has another token.
        if (own.session || !isRepeated || !isLoss(error) ||
          await retryIfDead(() => this.complete(scope, key, 200, { claimToken }), isUnanswered).catch(() => true)) throw error
        return { ...storedResult('new', (await retryIfDead(() => this.lookup(scope, key), isUnanswered))!), replayed: false }
      } finally {
        await own.session?.release()
      }
    })
  }
}

const leaseOf = ({ lease, leaseMs }: Lease): Lease => ({ lease, leaseMs })

/** Runs the function of a job under its claim. commit runs the last step. */
async function runJob<Tx>(core: Idempotency<Tx>, options: JobOptions, claim: HeldClaim, started: number, deadline: Deadline,
  commit: (fn: (tx: Tx) => Promise<Response> | Response, complete: (response: Response) => Statement<boolean>) => Promise<Result>,
  fn: (job: Job<Tx>) => Promise<Response | void> | Response | void): Promise<Result> {
  const { scope, key } = options
  const claimToken = claim.claimToken!
  const lease = leaseOf(options)
  const leaseMs = claim.leaseMs ?? 60_000
  const controller = new AbortController()
  const state = claim.recoveryState
  const values: Record<string, Json> = Object.assign(Object.create(null) as Record<string, Json>,
    typeof state === 'object' && state !== null && !Array.isArray(state) ? state : {})
  /** The names of this attempt's steps. */
  const seen = new Set<string>()
  let result: Result | undefined
  let finishing: Promise<Result> | undefined
  let isUndone = false
  let running: string | undefined
  let ended = false

  const lose = (error?: unknown): void => {
    if (!controller.signal.aborted && !result) {
      controller.abort(error instanceof ClaimLost ? error : new ClaimLost('the claim was lost', { cause: error }))
    }
  }

  let renewed = started
  const isOver = (): boolean => performance.now() - renewed > leaseMs
  let isBeating = false
  const beat = async (): Promise<void> => {
    const sent = performance.now()
    isBeating = true
    try {
      await core.heartbeat(scope, key, { claimToken, ...lease })
      renewed = sent
    } catch (error) {
      if (running !== FINISH && !ended && (isLoss(error) || isOver())) lose(error)
    }
    isBeating = false
  }
  const pause = Math.min(leaseMs / 3, LONGEST_TIMER)
  let timer = setTimeout(() => watch(), pause)
  /** Sends heartbeats, and detects the end of the lease even if a heartbeat gets no connection or no answer. */
  const watch = (): void => {
    if (ended || controller.signal.aborted) return
    let next = pause
    // The last step sends its own heartbeat, and its transaction holds the row.
    if (running !== FINISH) {
      if (isOver()) return lose()
      if (!isBeating) void beat()
      next = Math.min(pause, renewed + leaseMs - performance.now() + 1)
    }
    timer = setTimeout(watch, next)
  }

  /** Keeps trying while the scope is being moved and the lease lasts, so that the value of a step is not lost. */
  const whileHeld = async <T>(send: () => Promise<T>): Promise<T> => {
    for (;;) {
      try {
        return await send()
      } catch (error) {
        if (!(error instanceof ScopeMoving) || isOver() || ended) throw error
      }
    }
  }

  const enter = (name: string): void => {
    // If the process was frozen for longer than the lease, no timer has run yet. For the last step, the server decides.
    if (name !== FINISH && isOver()) lose()
    if (controller.signal.aborted) throw controller.signal.reason
    if (result || ended) throw new TypeError('the job is finished')
    if (running !== undefined) throw new TypeError(`steps must not run at the same time: ${running} is running`)
    running = name
  }
  const complete = (response: Response): Statement<boolean> => {
    const { status, body, headers } = storedResponse(response, claim, options)
    return core.statements.complete(scope, key, status, { body, headers, claimToken })
  }
  const job: Job<Tx> = {
    scope, key, attempt: claim.attempt ?? 1, signal: controller.signal,
    get lost() { return controller.signal.aborted },
    async step(name, run) {
      const size = Buffer.byteLength(printable(name, claim.encoding))
      if (size < 1 || size > 512) throw new TypeError('the name of a step must have 1 to 512 bytes')
      if (seen.has(name)) throw new TypeError(`the step ${name} has already run in this attempt; each step needs its own name`)
      if (name in values && !running && !controller.signal.aborted) {
        seen.add(name)
        return JSON.parse(JSON.stringify(values[name])) as never
      }
      enter(name)
      try {
        const value = await run({ key: stepKey(scope, key, name), signal: controller.signal }) ?? null
        const copy = JSON.parse(jsonOf(value, `the step ${name} returned`)) as Json
        const sent = performance.now()
        await whileHeld(() => withRetries(() => retryIfDead(() => core.checkpoint(scope, key, printable(name, claim.encoding),
          { recoveryState: { ...values, [name]: copy }, claimToken, ...lease }), isUnanswered)))
        renewed = sent
        values[name] = copy
        seen.add(name)
        if (controller.signal.aborted) throw controller.signal.reason
        return JSON.parse(JSON.stringify(copy)) as never
      } catch (error) {
        if (isLoss(error)) lose(error)
        throw error
      } finally {
        running = undefined
      }
    },
    async finish(run) {
      enter(FINISH)
      try {
        finishing = whileHeld(() => commit(run, complete))
        const made = await finishing
        // Its transaction was rolled back.
        if (!storable(made.status, options.store)) await core.fail(scope, key, { claimToken, error: `status ${made.status}` })
        return result = made
      } catch (error) {
        isUndone = true
        if (isLoss(error)) lose(error)
        throw error
      } finally {
        running = undefined
      }
    },
  }
  try {
    // A job holds a connection only in its last step.
    const returned = await runHandler([controller], () => fn(job), deadline)
    if (!result && returned === undefined) {
      throw new NotFinished('the function of a job must call job.finish() or return a response')
    }
    if (!result) {
      const response = checked(returned, 'the job')
      if (isUndone && response.status < 300) throw new TransactionEnded('the job returned a success, but its last step was rolled back')
      await job.finish(() => response)
    }
    return result!
  } catch (error) {
    if (error instanceof TimedOut) {
      ended = true
      // The last step might have finished in time.
      await finishing?.catch(() => undefined)
      if (result) return result
      controller.abort(error)
    }
    if (!result && (!controller.signal.aborted || error instanceof TimedOut)) {
      // If this fails, too, the claim ends with its lease.
      const said = printable(error instanceof Error ? error.message : String(error), claim.encoding)
      await core.fail(scope, key, { claimToken, error: said.slice(0, MAX_ERROR).toWellFormed() }).catch(() => undefined)
    }
    throw error
  } finally {
    ended = true
    clearTimeout(timer)
  }
}

const FINISH = 'finish()'
