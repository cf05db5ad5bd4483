/**
 * The common part of all middleware: the header Idempotency-Key of the IETF
 * draft, which has expired and is not a standard, problem documents, and replays.
 */
import type { ServerResponse } from 'node:http'
import {
  checkedCount, checkedTimes, newResult, problem, RETRIED, storable, type Client, type Job, type Response, type Result,
} from './client.js'
import { compared, formKeys, leftOut, NO_JSON, ofBytes, storableUtf8, type Fingerprint } from './comparison.js'
import {
  ActionIdAhead, asIdempotencyError, ClaimLost, ClaimNotFound, InProgress, KeyExpired, KeyInvalid, KeyReused, RateLimited, ScopeMoving, StreamingRefused,
  sqlstateOf, TimedOut,
} from './errors.js'
import type { Lease, RequestIdentity, Timeout, Ttl, Wait } from './functions.js'
import { hashedKey } from './keys.js'
import { isUnreachable } from './postgres.js'
import { checkedNames, describe, headers as headerDocument, type Headers } from './values.js'

export interface HttpOptions<Request> extends Ttl, Wait, Lease, Timeout {
  /** Returns the owner of the key: the user or tenant, from the login. */
  scope: (request: Request) => string
  /** Whether a request without a key is refused (400); otherwise it runs in a transaction without a key. */
  required?: boolean
  /** Accept only quoted strings. */
  strict?: boolean
  /** Accept any key of 1 to 255 characters, and store a hash of it that fits the key rules. */
  anyKey?: boolean
  /** The field of a form that has the key if the header is missing, _idempotency_key by default; null: no field. */
  formField?: string | null
  /** Requests with other methods run without the guard, and without a transaction. By default all are guarded. */
  methods?: readonly string[]
  /** Changes the comparison of requests. */
  fingerprint?: Fingerprint<Request>
  /** The status if the key was used for another request. */
  conflictStatus?: 422 | 409
  /** The response headers that are stored and replayed. Set-Cookie never is. */
  headers?: readonly string[]
  /** The largest stored response in bytes, if smaller than idempotency.max_response_size. */
  maxResponseSize?: number
  /** Whether a 3xx or 4xx is stored; by default all except 401, 403, 408, 425 and 429. A 2xx always is, and a 5xx never. */
  store?: (status: number) => boolean
}

/** The value of request.idempotency in a handler. */
export interface Context<Tx> {
  /** The unquoted key, or undefined if the request has none. */
  key: string | undefined
  /** The handle of the transaction, except in jobs. */
  tx: Tx
  /** Only in jobs. */
  job: Job<Tx>
}

/** The options of every framework. */
const OPTIONS = ['scope', 'required', 'strict', 'conflictStatus', 'headers', 'maxResponseSize', 'store', 'ttl', 'ttlMs', 'wait', 'waitMs',
  'lease', 'leaseMs', 'timeout', 'timeoutMs', 'anyKey', 'formField', 'methods', 'fingerprint']

/** The options of a route over those of all routes. names are the framework's own options. */
export function routeOptions<O extends HttpOptions<any>>(all: O, own: Partial<O>, ...names: string[]): O {
  if (typeof own !== 'object' || own === null) throw new TypeError(`the options of a guarded route must be an object, not ${describe(own)}`)
  const made = { ...all, ...own }
  checkedOptions(made, ...names)
  return made
}

/** Refuses a guard without a client when it is made. */
export function checkedClient(client: Client<any>): void {
  if (typeof (client as Partial<Client<any>> | undefined)?.request !== 'function') throw new TypeError('a guard needs an Idempotency as its client')
}

/** The header Idempotency-Key. Node joins several lines with commas. */
export const keyOf = (request: { headers: any }): string | undefined => request.headers['idempotency-key']

/** Refuses invalid options when the route is made. names are the framework's own options. */
export function checkedOptions(options: HttpOptions<never>, ...names: string[]): void {
  checkedNames(options, new Set([...OPTIONS, ...names]), 'a guarded route')
  checkedTimes(options)
  for (const name of ['maxResponseSize', 'bodyLimit'] as const) checkedCount((options as { bodyLimit?: number } & typeof options)[name], name)
  leftOut(options.fingerprint)
  const { methods, store, headers, formField, scope } = options
  for (const name of ['required', 'strict', 'anyKey', 'job'] as const) {
    // 'no' would be true.
    if (typeof ((options as { job?: unknown } & typeof options)[name] ?? false) !== 'boolean') throw new TypeError(`the option ${name} must be true or false`)
  }
  if (typeof (formField ?? '') !== 'string') throw new TypeError('the option formField must be the name of a field, or null')
  if (store !== undefined && typeof store !== 'function') throw new TypeError('the option store must be a function that takes the status')
  if (headers !== undefined && !Array.isArray(headers)) throw new TypeError('the option headers must be a list of names')
  if (methods !== undefined && !(Array.isArray(methods) && methods.length > 0 && methods.every((method) => /^[A-Z-]+$/.test(method)))) {
    // Otherwise the guard would silently guard nothing.
    throw new TypeError("the option methods must be a list of HTTP methods in upper case, such as ['POST', 'PATCH']")
  }
  if (typeof scope !== 'function') throw new TypeError('the option scope must be a function that takes the request and returns the user or tenant')
  if (options.conflictStatus !== undefined && options.conflictStatus !== 422 && options.conflictStatus !== 409) {
    throw new TypeError(`the option conflictStatus must be 422 or 409, not ${String(options.conflictStatus)}`)
  }
}

export interface HttpRequest {
  method: string
  /** With the query. */
  path: string
  /** The values of Idempotency-Key. Several lines are an array, or one string with commas. */
  key: string | string[] | undefined
  body: Uint8Array
  contentType?: string | undefined
  contentEncoding?: string | undefined
  /** The fields of a form that a parser has read before the guard. */
  form?: object | undefined
  scope: () => string
  /** Called after scope(). From here on, no success may be sent before COMMIT or a replay, even if the guard itself fails. */
  onScope?: () => void
  /** The framework's request, for the option fingerprint. */
  native?: unknown
}

/** The answer to send. If first is true, the handler's own response is sent whole. Unless it is committed, no success may be sent, whatever middleware makes of it. */
export interface HttpAnswer { first: boolean; committed: boolean; status: number; headers: Headers; body: string | Buffer | null }

export const REPLAYED_HEADERS: readonly string[] = [
  'Content-Type', 'Content-Encoding', 'Content-Language', 'Content-Disposition', 'Location', 'ETag', 'Link', 'Vary',
  'Cache-Control', 'Content-Security-Policy', 'Referrer-Policy', 'X-Content-Type-Options',
]
/** The maximum number of bytes of a scope. */
const MAX_SCOPE = 512
/** The server is a standby, or lacks resources, or is shutting down or starting. */
const UNAVAILABLE = /^(08|25006|53|57P0)/
/** The maximum number of characters of a key with the option anyKey. */
const MAX_KEY = 255

const STRING = String.raw`"(?:[ !#-\[\]-~]|\\["\\])*"`
const NUMBER = String.raw`-?\d{1,12}(?:\.\d{1,3})?`
const PARAMETER = String.raw`; *[a-z*][a-z0-9_.*-]*(?:=(?:${NUMBER}|${STRING}|[A-Za-z*][!#$%&'*+.^_\`|~\w:/-]*|:[\w+/=]*:|\?[01]))?`
const QUOTED = new RegExp(`^(${STRING})(?:${PARAMETER})*$`)
/** An unquoted key that cannot be mistaken for another syntax. */
const BARE = /^[!#-+\--:<-~]+$/

/** The key in a string of RFC 8941, whose parameters are ignored, or without quotes. The server checks the key rules. */
export function parseKey(value: string, strict = false): string | undefined {
  const line = value.replace(/^ +| +$/g, '')
  const quoted = QUOTED.exec(line)?.[1]
  if (quoted !== undefined) return quoted.slice(1, -1).replace(/\\(.)/g, '$1')
  return !strict && BARE.test(line) ? line : undefined
}

/** The names of each allow-list in lower case. */
const lowerCase = new WeakMap<readonly string[], Set<string>>()

/** The headers of the allow-list, under the names that the handler gave them. */
export function allowedHeaders(headers: Iterable<readonly [string, string | number | readonly string[] | undefined]>, allowed: readonly string[]): Headers {
  let names = lowerCase.get(allowed)
  if (!names) {
    names = new Set(allowed.map((name) => name.toLowerCase()))
    names.delete('set-cookie')
    lowerCase.set(allowed, names)
  }
  const made: Headers = {}
  for (const [name, value] of headers) {
    if (value === undefined || !names.has(name.toLowerCase())) continue
    made[name] = typeof value === 'object' ? [...value] : String(value)
  }
  return made
}

/**
 * Run a request of a guarded route. respond() runs the handler and returns its
 * response with all its headers; isFinished() tells whether the handler has
 * finished its job. Errors of respond() are thrown. The guard's own refusals are
 * answers.
 */
export async function serve<Tx>(client: Client<Tx>, request: HttpRequest, options: HttpOptions<never>, kind: 'request' | 'job',
  respond: (context: Context<Tx>, isFinished: () => boolean) => Promise<Response | void>): Promise<HttpAnswer> {
  const line = Array.isArray(request.key) ? request.key.join(', ') : request.key
  const { required = true, strict, headers = REPLAYED_HEADERS, store, maxResponseSize, formField = '_idempotency_key' } = options
  const inForm = line !== undefined || formField === null ? []
    : request.form ? [(request.form as Record<string, unknown>)[formField] ?? []].flat() : formKeys(request, formField)
  if (line === undefined && inForm.length === 0 && (required || kind === 'job')) {
    return refusal('key-required', 'Idempotency-Key required', 400,
      'This request needs a header Idempotency-Key, a quoted string that is new for each request and the same in each of its retries.')
  }
  const key = line !== undefined ? parseKey(line, strict) : inForm.length === 1 && typeof inForm[0] === 'string' ? inForm[0] : undefined
  if (((line !== undefined || inForm.length > 0) && key === undefined) || (options.anyKey && key !== undefined && (key === '' || key.length > MAX_KEY))) {
    return refusal('key-invalid', 'Idempotency-Key invalid', 400,
      options.anyKey ? `The Idempotency-Key is not a string of 1 to ${MAX_KEY} characters.` : line === undefined ? 'The form has more than one key.' : 'The header Idempotency-Key is not one quoted string.')
  }
  const scope = request.scope()
  request.onScope?.()
  if (typeof scope !== 'string' || scope === '') {
    // A rejected promise that is not handled would end the process.
    Promise.resolve(scope as unknown).catch(() => undefined)
    throw new TypeError(`the option scope returned ${scope === '' ? "''" : describe(scope)}, which is not a user or tenant: for a visitor who has ` +
      "not logged in, return the id of a stored session, or throw an error that refuses the visitor")
  }
  if (Buffer.byteLength(scope) > MAX_SCOPE || scope.includes('\0') || !scope.isWellFormed()) {
    return refusal('scope-invalid', 'Invalid scope', 400, `The user of this request is not named by 1 to ${MAX_SCOPE} bytes of text.`)
  }
  const { ttl, ttlMs, wait, waitMs, lease, leaseMs, timeout, timeoutMs } = options
  const common = {
    scope, key: options.anyKey && key !== undefined ? hashedKey(key) : key ?? '',
    ttl, ttlMs, wait, waitMs, timeout, timeoutMs, store, maxResponseSize,
  }
  const storedResponse = (response: Response): Response => {
    if (response.status < 200) throw new TypeError(`the handler answered ${response.status}, after which the client waits for another response`)
    // Invalid headers raise an error here, while the work can still be rolled back.
    headerDocument(response.headers ?? null, 'the response')
    return { ...response, headers: allowedHeaders(Object.entries(response.headers ?? {}), headers), body: asStored(response) }
  }
  let hasRun = false
  let thrown: unknown
  let answer: Result
  const guarded = async (context: Context<Tx>): Promise<Response | void> => {
    let finished = false
    if (context.job) context.job = withFinish(context.job, () => { finished = true })
    hasRun = true
    try {
      const response = await respond(context, () => finished)
      return response && storedResponse(response)
    } catch (error) {
      thrown = error
      throw error
    }
  }
  const perform = (identity: RequestIdentity): Promise<Result> =>
    kind === 'request' ? client.request({ ...common, ...identity }, (tx) => guarded({ key, tx, job: undefined as never }) as Promise<Response>)
    : client.job({ ...common, ...identity, lease, leaseMs }, (job) => guarded({ key, tx: undefined as never, job }))
  try {
    answer = key === undefined
      ? newResult(await client.transaction((tx) => guarded({ key, tx, job: undefined as never }) as Promise<Response>,
        { commits: (response) => storable(response.status, store), timeout, timeoutMs, scope }), false)
      : await perform(compared(request, request.native as never, options.fingerprint)).catch((error: unknown) => {
        if (hasRun || !NO_JSON.has(sqlstateOf(error) ?? '')) throw error
        return perform(ofBytes(request))
      })
  } catch (error) {
    const refused = refusalOf(error, error === thrown, options.conflictStatus ?? 422, kind)
    if (refused) return refused
    const state = sqlstateOf(error)
    if (RETRIED.has(state ?? '') || (error !== thrown && (UNAVAILABLE.test(state ?? '') || (state === undefined && isUnreachable(error))))) {
      console.error(`pg-idempotency: 503 was sent for ${request.method} ${request.path}:`, error)
      return refusal('unavailable', 'Service unavailable', 503, 'The database is not available. Retry with the same key.', 1)
    }
    throw error
  }
  const { status, body, headers: stored } = answer.outcome !== 'erased' ? answer
    : problem('response-erased', 'Response erased', answer.status, 'This request has run, but its response was erased.')
  if (answer.replayed) return { first: false, committed: true, status, body, headers: { ...stored, 'Idempotent-Replayed': 'true' } }
  return { first: true, committed: storable(status, store), status, body, headers: stored }
}

/** The job, which also calls onFinish() when its last step has committed. */
function withFinish<Tx>(job: Job<Tx>, onFinish: () => void): Job<Tx> {
  const finish: Job<Tx>['finish'] = async (last) => {
    const result = await job.finish(last)
    onFinish()
    return result
  }
  return Object.create(job, { finish: { value: finish } }) as Job<Tx>
}

function refusal(type: string, title: string, status: number, detail: string, retryAfter?: number): HttpAnswer {
  const { headers, body } = problem(type, title, status, detail)
  return { first: false, committed: false, status, body, headers: { ...headers, ...(retryAfter === undefined ? {} : { 'Retry-After': String(retryAfter) }) } }
}

/** The answer to an error. The framework answers most errors that the handler has thrown. A lost claim of a job, and its scope's move, are not such errors. */
function refusalOf(error: unknown, isThrown: boolean, conflictStatus: number, kind: 'request' | 'job'): HttpAnswer | undefined {
  const found = asIdempotencyError(error)
  if (error instanceof StreamingRefused) return refusal('streaming-refused', 'Streaming refused', 500, error.message)
  if (error instanceof TimedOut) return refusal('timeout', 'Timed out', 503, 'The request took too long. Retry with the same key.', 1)
  if (found instanceof ActionIdAhead) return refusal('action-id-ahead', 'Action id too far ahead', 400, "The action id is too far ahead of the server's clock.")
  if (isThrown && kind === 'request') return undefined
  const isLost = kind === 'job' && (found instanceof ClaimLost || found instanceof ClaimNotFound)
  if (isLost || (found instanceof InProgress && !isThrown)) {
    return refusal('in-progress', 'Request in progress', 409, 'The first request with this key is still running. Retry with the same key.',
      found instanceof InProgress ? found.retryAfter : 1)
  }
  if (found instanceof ScopeMoving) {
    return refusal('scope-moving', 'Scope is being moved', 503, 'What this request is about is being moved to another server. Retry with the same key.', found.retryAfter)
  }
  if (isThrown) return undefined
  if (found instanceof KeyInvalid) return refusal('key-invalid', 'Idempotency-Key invalid', 400, sentences(found))
  if (found instanceof RateLimited) {
    return refusal('rate-limited', 'Too many new keys', 429, `There were too many new keys. Retry in ${found.retryAfter} seconds.`, found.retryAfter)
  }
  if (found instanceof KeyReused) {
    return refusal('key-reused', 'Idempotency-Key reused', conflictStatus, 'This key was used for another request. Send another request with a new key.')
  }
  return found instanceof KeyExpired ? refusal('key-expired', 'Idempotency-Key expired', 422, 'This key is too old. Use a new one.') : undefined
}

/** The server's whole message. */
function sentences({ message, detail, hint }: KeyInvalid): string {
  const first = message.charAt(0).toUpperCase() + message.slice(1)
  return [first.endsWith('.') ? first : `${first}.`, detail, hint].filter(Boolean).join(' ')
}

const TEXTUAL = /^(text\/|application\/([^;]*\+)?(json|xml)\b|application\/x-www-form-urlencoded\b)/i

/** Text stays text, for people who read the table. All other bodies are bytes. */
function asStored(response: Response): string | Uint8Array | null {
  const { body } = response
  if (!(body instanceof Uint8Array)) return body ?? null
  const type = Object.entries(response.headers ?? {}).find(([name]) => name.toLowerCase() === 'content-type')?.[1]
  return TEXTUAL.test(String(type)) ? storableUtf8(body) ?? body : body
}

/** The error for a response that cannot be held back. */
export function streamingRefused(route: string, how = 'in pieces of unknown length'): StreamingRefused {
  return new StreamingRefused(`${route} answers ${how}, which cannot be stored and replayed; ` +
    'send the response whole, or leave the route unguarded')
}

/** Whether a framework would send the value in pieces. */
export function isStream(value: unknown): boolean {
  const some = (value ?? {}) as { pipe?: unknown; getReader?: unknown; arrayBuffer?: unknown; [Symbol.asyncIterator]?: unknown }
  return [some.pipe, some.getReader, some.arrayBuffer, some[Symbol.asyncIterator]].some((one) => typeof one === 'function')
}

/** The error for a handler that sends a second response. */
export function alreadySent(route: string): Error {
  return Object.assign(new Error(`${route} sends a second response: a handler must send only one`), { code: 'ERR_HTTP_HEADERS_SENT' })
}

/** The methods of a response that send it, and those that change its head. */
export const SENDING_METHODS = ['writeHead', 'flushHeaders', 'write', 'end', 'destroy'] as const
export const HEADER_METHODS = ['setHeader', 'setHeaders', 'appendHeader', 'removeHeader'] as const

/**
 * Returns a function that removes our methods from a response and restores the
 * properties that it had before. names has them in the order in which they are set:
 * if the newest property is deleted first, V8 does not make the object slow.
 */
export function overrides(target: object, names: readonly string[]): () => void {
  const own = target as Record<string, unknown>
  const before = Object.fromEntries(names.filter((name) => Object.hasOwn(own, name)).map((name) => [name, Object.getOwnPropertyDescriptor(own, name)!]))
  return () => {
    for (const name of names.toReversed()) delete own[name]
    Object.defineProperties(own, before)
  }
}

/** Like overrides(), for the methods of Node's response that held responses replace. */
export function responseOverrides(response: ServerResponse): () => void {
  // This property of the prototype becomes an own one before the methods do.
  response.statusCode = Number(response.statusCode)
  return overrides(response, [...SENDING_METHODS, 'addTrailers', 'headersSent', ...HEADER_METHODS, 'writableEnded'])
}

/** Makes a response look sent, by these properties. */
export function seemsSent(target: object, ...names: string[]): void {
  for (const name of names) Object.defineProperty(target, name, { configurable: true, value: true })
}

/** Ignores late calls of a handler, because the response belongs to another try, or has been sent. */
export function ignoreLateCalls(target: any, isLate: (name: string) => boolean, names: readonly string[] = [...SENDING_METHODS, ...HEADER_METHODS]): void {
  for (const name of names) {
    const real = target[name] as ((...given: unknown[]) => unknown) | undefined
    if (real) target[name] = (...given: unknown[]) => (isLate(name) ? target : real.apply(target, given))
  }
  if (!Object.hasOwn(target, 'statusCode')) return
  let status: unknown = target.statusCode
  Object.defineProperty(target, 'statusCode', {
    configurable: true, enumerable: true, get: () => status, set: (given) => { if (!isLate('statusCode')) status = given },
  })
}

/** A handler that listens for the end of its response waits for it, or only for its own work. */
export const GRACE_MS = 1000

/**
 * Returns a function to call when the handler has answered. The response is sent
 * after COMMIT, which waits for the handler. So if the handler does not return,
 * and has added a listener for the end of the response, except by pipe(), refuse()
 * is called.
 */
export function refuseWaiting(response: ServerResponse, route: string, hasReturned: () => boolean, refuse: (error: unknown) => void): () => void {
  const count = (): number => response.listenerCount('finish') + response.listenerCount('close') - 2 * response.listenerCount('unpipe')
  const before = count()
  const waits = (): boolean => !hasReturned() && count() > before
  const error = (): unknown => streamingRefused(route, "and waits until that is sent, or for more than a second with a listener of 'finish' or 'close'")
  return () => {
    if (!hasReturned()) setImmediate(() => { if (waits()) setTimeout(() => { if (waits()) refuse(error()) }, GRACE_MS) })
  }
}

const refusals = new WeakMap<ServerResponse, () => void>()
/** Ends refuseSuccess(), for another run of the guard with the same response. */
export const allowSuccess = (response: ServerResponse): void => refusals.get(response)?.()

/** If the application, such as its error handler, answers 2xx although the work was rolled back, send 500 instead. */
export function refuseSuccess(response: ServerResponse, route: string): void {
  const names = ['writeHead', 'flushHeaders', 'write', 'end', '_storeHeader']
  const { stream } = response as { stream?: any }
  const respond = stream?.respond as ((...given: unknown[]) => unknown) | undefined
  const undo = [overrides(response, names), overrides(stream ?? {}, ['respond'])]
  refusals.set(response, () => {
    refusals.delete(response)
    for (const one of undo) one()
  })
  const target = response as unknown as Record<string, (...given: unknown[]) => unknown>
  const { writeHead, end, _storeHeader: storeHeader } = target
  let body: string | undefined
  let isEnded = false
  const refuse = (): void => {
    console.error(`pg-idempotency: ${route} was rolled back, and the application answered ${response.statusCode}: 500 was sent`)
    for (const header of response.getHeaderNames()) response.removeHeader(header)
    const said = problem('rolled-back', 'Rolled back', 500, 'The request failed, and its work was rolled back.')
    response.statusCode = said.status
    for (const [header, value] of Object.entries(said.headers)) response.setHeader(header, value)
    body = said.body
  }
  const isSuccess = (status: number): boolean => !response.headersSent && status >= 200 && status <= 299
  // Node's own end() calls it, too, so it always sends a head.
  target['writeHead'] = (...given) => {
    if (!isSuccess(Number(given[0]))) return writeHead!.apply(response, given)
    response.statusCode = Number(given[0])
    refuse()
    // The body is the one above, or that of the end() that calls this.
    response.removeHeader('content-length')
    return writeHead!.call(response, 500)
  }
  // Middleware that wrapped writeHead() before us can still change the status.
  if (storeHeader) target['_storeHeader'] = (line, headers) => {
    const made = String(line).replace(/ 2\d\d .*/, ' 500 Internal Server Error')
    // Otherwise Node would not send the body that this head promises in place of a 204.
    if (made !== line) Object.assign(response, { statusCode: 500, _hasBody: response.req.method !== 'HEAD' })
    return storeHeader.call(response, made, headers)
  }
  if (respond) stream.respond = (headers: Headers, options: unknown) =>
    respond.call(stream, /^2/.test(String(headers[':status'])) ? { ...headers, ':status': 500 } : headers, options) as unknown
  for (const name of ['flushHeaders', 'write', 'end']) {
    const real = target[name]!
    target[name] = (...given) => {
      if (body === undefined && isSuccess(response.statusCode)) refuse()
      // Over HTTP/2, end() calls write() with the body, later if middleware defers it.
      if (body === undefined || (name === 'write' && given[0] === body)) return real.apply(response, given)
      if (!isEnded) {
        isEnded = true
        end!.call(response, body, ...given.filter((one) => typeof one === 'function'))
      }
      return name === 'write' ? true : response
    }
  }
}

export { replayBody, replayPipe, snapshotOf, wholeBody } from './body.js'
