/**
 * Guarded routes for Express 4 and 5:
 *
 *	app.post('/payments', guarded(async (req, res) => { ... req.idempotency.tx ... }))
 *
 * The handler's response is sent after COMMIT. If the handler throws an error or
 * passes one to next(), its work is rolled back, and the error handlers of the
 * application get the error.
 */
import { createHash } from 'node:crypto'
import { readFile } from 'node:fs/promises'
import type { IncomingMessage, OutgoingHttpHeader, ServerResponse } from 'node:http'
import { parse as parseForm } from 'node:querystring'
import { promisify } from 'node:util'
import { brotliDecompress, gunzip, inflate } from 'node:zlib'
import type { PoolClient } from 'pg'
import { checkedCount, type Client, type Response } from './client.js'
import { Attempts } from './handlers.js'
import {
  alreadySent, badRequest, checkedClient, HEADER_METHODS, ignoreLateCalls, keyOf, refuseSuccess, refuseWaiting, replayBody, responseOverrides, routeOptions, seemsSent,
  serve, snapshotOf, streamingRefused, wholeBody, type Context, type HttpOptions,
} from './http.js'
import { describe } from './values.js'

/** The members of an Express request that this file uses. */
export interface ExpressRequest extends IncomingMessage {
  originalUrl: string
  body?: any
  rawBody?: Buffer
  idempotency?: unknown
}
/** An untyped request: members that Express and its middleware add are any. */
export interface AnyRequest extends ExpressRequest { [name: string]: any }
/** The members of an Express response that this file uses. Express's own type is compatible. */
export interface ExpressResponse extends ServerResponse {
  locals: Record<string, any>
  status(code: number): this
  sendStatus(code: number): this
  json(document?: unknown): this
  send(body?: unknown): this
  set(fields: Record<string, unknown>): this
  set(field: string, value?: string | string[]): this
  header(field: string, value?: string | string[]): this
  append(field: string, value?: string | string[]): this
  get(field: string): string | undefined
  type(type: string): this
  location(url: string): this
  redirect(url: string): void
  redirect(status: number, url: string): void
  cookie(name: string, value: unknown, options?: object): this
  clearCookie(name: string, options?: object): this
  vary(field: string): this
  links(links: Record<string, string>): this
  attachment(filename?: string): this
  format(handlers: any): this
  jsonp(document?: unknown): this
  sendFile(path: string, ...more: any[]): void
  download(path: string, ...more: any[]): void
  render(view: string, ...more: any[]): void
}
export type Next = (error?: any) => void
export type GuardedRequest<Request, Tx> = Request & { idempotency: Context<Tx>; rawBody: Buffer }

export interface ExpressOptions<Request> extends HttpOptions<Request> {
  /** The largest request body, in bytes; 2 MB by default. */
  bodyLimit?: number
}

/**
 * A function that guards handlers: guarded(handler) for a handler in one
 * transaction, guarded.job(handler) for a job, and
 * app.use(guarded.middleware()) for all routes after it.
 */
export function idempotent<Request extends ExpressRequest = AnyRequest, Tx = PoolClient>(client: Client<Tx>, options: ExpressOptions<Request>) {
  const settingsOf = (own: Partial<ExpressOptions<Request>>, defaults = {}): ExpressOptions<Request> => {
    const settings = routeOptions({ ...defaults, ...options }, own, 'bodyLimit')
    checkedCount(settings.bodyLimit, 'bodyLimit')
    return settings
  }
  checkedClient(client)
  settingsOf({})
  const guard = (kind: 'request' | 'job') =>
    <Req extends ExpressRequest = Request, Res extends ServerResponse = ExpressResponse>(handler: (req: GuardedRequest<Req, Tx>, res: Res, next: Next) => unknown,
      own: Partial<ExpressOptions<Request>> = {}, ...more: unknown[]) => {
      // If it is used as a middleware, its argument is a request, which would never be answered.
      if (typeof handler !== 'function' || typeof own === 'function' || more.length > 0) {
        throw new TypeError('a guard takes one handler, and options: app.post(path, login, guarded(handler, { wait: \'5 seconds\' }))')
      }
      const settings = settingsOf(own)
      return (req: Req, res: Res, next: Next): void => {
        if (settings.methods && !settings.methods.includes(req.method!)) {
          void (async () => handler(req as never, res, next))().catch(failed(next))
          return
        }
        handle(client, settings, kind, handler as never, req, res).catch(failed(next))
      }
    }
  /** For app.use(): the routes after it run in the transaction, for POST and PATCH. A response of 400 and above is rolled back. */
  const middleware = (own: Partial<ExpressOptions<Request>> = {}) => {
    const settings = settingsOf(own, { methods: ['POST', 'PATCH'], store: (status: number) => status < 400 })
    return (req: Request, res: ServerResponse, next: Next): void => {
      if (!settings.methods!.includes(req.method!)) return next()
      let tries = 0
      // A second next() would continue after the routes, so it cannot run them again.
      const rest = (): void => {
        if (++tries > 1) throw Object.assign(new Error('the transaction must run again, so the client must repeat the request'), { status: 503 })
        next()
      }
      handle(client, { ...settings, isMiddleware: true }, 'request', rest, req, res).catch(failed(next))
    }
  }
  return Object.assign(guard('request'), { job: guard('job'), middleware })
}

/** Passes an error on. Express takes a falsy one, 'route' and 'router' for none, and would go on. */
const failed = (next: Next) => (error: unknown): void =>
  next(error && error !== 'route' && error !== 'router' ? error : new Error('a guarded handler or the option scope failed without an error', { cause: error }))

async function handle(client: Client<any>, options: ExpressOptions<any> & { isMiddleware?: boolean }, kind: 'request' | 'job',
  handler: (req: ExpressRequest, res: ServerResponse, next: Next) => unknown, req: ExpressRequest, res: ServerResponse): Promise<void> {
  const hasBytes = Buffer.isBuffer(req.rawBody) || Buffer.isBuffer(req.body)
  const isParsed = !hasBytes && (req.readableEnded || (req as { _body?: boolean })._body === true)
  const parseAgain = await readBody(req, options.bodyLimit ?? 2 << 20)
  let readOver: (() => void) | undefined
  let again: (() => Promise<void>) | undefined
  const held = new BufferedResponse(res, `${req.method} ${req.originalUrl}`)
  const { next: nextBefore } = req as { next?: Next }
  let whole: Response | undefined
  let answer
  let isUndone = false
  let finished = (): boolean => false
  try {
    answer = await serve(client, {
      method: req.method!, path: req.originalUrl, key: keyOf(req),
      body: req.rawBody!, form: isParsed ? formOf(req) : undefined, contentType: isParsed ? 'application/json' : req.headers['content-type'],
      contentEncoding: isParsed ? undefined : req.headers['content-encoding'], native: req,
      scope: () => options.scope(req), onScope: () => { isUndone = true },
    }, options, kind, async (context, isFinished) => {
      finished = isFinished
      if (again) await again()
      else again = requestSnapshot(req, res, parseAgain)
      readOver?.()
      if (!hasBytes && !isParsed) readOver = replayBody(req, Buffer.from(req.rawBody!))
      req.idempotency = context
      // Otherwise Express would drop the body of a response that the client has cached, before it is stored.
      Object.defineProperty(req, 'fresh', { configurable: true, writable: true, value: false })
      whole = await held.run((fail) => {
        const next: Next = (error) => fail(error ??
          new TypeError('a guarded handler must send the response itself: it must not call next() without an error'))
        // Express's own methods, such as res.format() and res.sendFile(), report their errors to it.
        if (!options.isMiddleware) (req as { next?: Next }).next = next
        return handler(req, res, next)
      }, isFinished)
      // The last step's response is the one that is stored.
      if (isFinished()) whole = undefined
      return whole
    })
    isUndone = false
  } finally {
    readOver?.()
    delete (req as { fresh?: boolean }).fresh
    Object.assign(req, { next: nextBefore })
    held.restore(isUndone && !finished())
  }
  // The handler's own response has headers that are not stored, and its body can be too large to be stored.
  if (answer.first && whole) held.send(whole.status, held.headers, whole.body as Buffer)
  else held.send(answer.status, Object.entries(answer.headers), answer.body)
}

/** The fields of a form that a parser has read. */
const formOf = (req: ExpressRequest): object | undefined =>
  /^(multipart\/form-data|application\/x-www-form-urlencoded)\b/i.test(req.headers['content-type'] ?? '') ? req.body ?? {} : undefined

/** Returns a function that undoes the changes of a try. */
function requestSnapshot(req: ExpressRequest, res: ServerResponse, parseAgain: (() => unknown) | undefined): () => Promise<void> {
  const request = snapshotOf(req, parseAgain)
  const locals = { ...(res as { locals?: object }).locals }
  return async () => {
    await request()
    Object.assign(res, { locals: { ...locals } })
  }
}

/** Reads the body before any parser, and parses it for the handler as Express would. Returns a function that parses it again. */
async function readBody(req: ExpressRequest, limit: number): Promise<(() => unknown) | undefined> {
  if (Buffer.isBuffer(req.rawBody)) return undefined
  if (Buffer.isBuffer(req.body)) {
    req.rawBody = req.body
    return undefined
  }
  if (req.readableEnded || (req as { _body?: boolean })._body) {
    // The application has parsed the body, so the document is compared, with the files beside it.
    const document = JSON.stringify(req.body ?? null) ?? 'null'
    const files = await filesOf(req)
    if (req.body === undefined && files.length === 0 && (req.headers['transfer-encoding'] !== undefined || Number(req.headers['content-length'] ?? 0) > 0)) {
      throw new TypeError(`${req.method} ${req.originalUrl}: the body was read before the guard, and is not in req.body, so it cannot be compared`)
    }
    req.rawBody = Buffer.from(files.length === 0 ? document : JSON.stringify({ ...req.body, 'files of the request': files }))
    return () => JSON.parse(document) as unknown
  }
  const raw = await wholeBody(req, limit)
  req.rawBody = raw
  // Otherwise a parser would wait for bytes that have been read.
  ;(req as { _body?: boolean })._body = true
  const { 'content-type': contentType = '', 'content-length': length, 'transfer-encoding': chunked } = req.headers
  const type = contentType.split(';')[0]!.trim().toLowerCase()
  const isJson = /^application\/([^;]*\+)?json$/.test(type)
  const isForm = type === 'application/x-www-form-urlencoded'
  if (length === undefined && chunked === undefined) {
    // As Express's parsers do: version 4 sets {}.
    if (typeof (req as any).app?.lazyrouter === 'function') req.body ??= {}
    else req.body = undefined
    return undefined
  }
  if (!isJson && !isForm) {
    req.body = raw
    return () => req.rawBody
  }
  const charset = (/;\s*charset\s*=\s*"?([^\s;"]+)/i.exec(contentType)?.[1] ?? 'utf-8').toLowerCase()
  const known = isJson ? ['utf-8', 'utf8', 'utf-16', 'utf-16le', 'utf-16be'] : ['utf-8', 'utf8']
  if (!known.includes(charset)) throw badRequest(415, `unsupported charset "${charset.toUpperCase()}"`, 'charset.unsupported', { charset })
  const text = new TextDecoder(charset).decode(await inflated(raw, (req.headers['content-encoding'] ?? 'identity').toLowerCase(), limit))
  const parse = isJson ? () => parsedJson(text) : () => parsedForm(text)
  req.body = parse()
  return parse
}

/** Returns the names, types and hashes of the files of multer and express-fileupload, in memory or on disk. */
async function filesOf({ file, files }: ExpressRequest & { file?: any; files?: object }): Promise<unknown[]> {
  const found = [file ?? [], Object.values(files ?? {})].flat(2) as Record<string, any>[]
  return Promise.all(found.map(async (one) => {
    const path = one['path'] ?? (one['tempFilePath'] || undefined)
    const bytes: unknown = typeof path === 'string' ? await readFile(path) : one['buffer'] ?? one['data']
    const content = bytes instanceof Uint8Array ? createHash('sha256').update(bytes).digest('hex') : one['size']
    return [one['fieldname'], one['originalname'] ?? one['name'], one['mimetype'], content]
  }))
}

const INFLATE: Record<string, (bytes: Buffer, options: { maxOutputLength: number }) => Promise<Buffer>> = {
  gzip: promisify(gunzip), deflate: promisify(inflate), br: promisify(brotliDecompress),
}

async function inflated(raw: Buffer, encoding: string, limit: number): Promise<Buffer> {
  if (encoding === 'identity') return raw
  if (!Object.hasOwn(INFLATE, encoding)) throw badRequest(415, `unsupported content encoding "${encoding}"`, 'encoding.unsupported', { encoding })
  try {
    return await INFLATE[encoding]!(raw, { maxOutputLength: Math.max(limit, 1) })
  } catch (cause) {
    if ((cause as { code?: unknown }).code === 'ERR_BUFFER_TOO_LARGE') {
      throw badRequest(413, `the request body is larger than ${limit} bytes`, 'entity.too.large', { cause })
    }
    throw badRequest(400, `the request body is no ${encoding}`, 'encoding.invalid', { cause })
  }
}

/** Like express.json(): a list or an object, and {} for an empty body. */
function parsedJson(body: string): unknown {
  if (body === '') return {}
  try {
    const made: unknown = JSON.parse(body)
    if (typeof made === 'object' && made !== null) return made
  } catch (error) {
    throw badRequest(400, (error as Error).message, 'entity.parse.failed', { body, cause: error })
  }
  throw badRequest(400, 'the request body is JSON, but no object and no list', 'entity.parse.failed', { body })
}

const MOST_FIELDS = 1000

/** Like express.urlencoded(): a repeated field is a list. */
function parsedForm(body: string): unknown {
  if (body.split('&', MOST_FIELDS + 1).length > MOST_FIELDS) throw badRequest(413, 'too many parameters', 'parameters.too.many')
  return Object.fromEntries(Object.entries(parseForm(body, '&', '=', { maxKeys: 0 })).filter(([name]) => name !== '__proto__'))
}

type Lines = [string, OutgoingHttpHeader][]

/** A response whose head and body are kept and sent later. */
class BufferedResponse {
  headers: Lines = []
  /** No handler runs. */
  #done = true
  readonly #before: Lines
  readonly #statusBefore: number
  readonly #attempts = new Attempts()
  /** Removes our methods, and keeps those of others, such as express-session and compression. */
  readonly #takeBack: () => void

  constructor(readonly res: ServerResponse, readonly route: string) {
    this.#before = this.#lines()
    this.#statusBefore = res.statusCode
    this.#takeBack = responseOverrides(res)
  }

  #lines(): Lines {
    const names = (this.res as unknown as { getRawHeaderNames(): string[] }).getRawHeaderNames()
    return names.map((name) => [name, this.res.getHeader(name)!])
  }

  #reset(): void {
    this.#takeBack()
    this.res.statusCode = this.#statusBefore
    for (const name of this.res.getHeaderNames()) this.res.removeHeader(name)
    for (const [name, value] of this.#before) this.res.setHeader(name, value)
  }

  /**
   * Run the handler until it has both returned and answered, and return its
   * response. If silent() is true, it does not have to answer.
   */
  async run(handler: (fail: (error: unknown) => void) => unknown, silent: () => boolean): Promise<Response | undefined> {
    const { res } = this
    const parts: Buffer[] = []
    let status: number | undefined
    let ended = false
    this.#reset()
    this.#attempts.add()
    this.#done = false
    const isLate = (): boolean => this.#attempts.isLeftBehind()
    await new Promise<void>((resolve, reject) => {
      let returned = false
      const hasAnswered = refuseWaiting(res, this.route, () => returned, reject)
      const look = (): void => { if (returned && (ended || silent())) resolve() }
      const streaming = (): void => reject(streamingRefused(this.route))
      /** Rejects a second response, and returns the error for methods that throw it in Node, too. */
      const refuse = (): Error => {
        const error = alreadySent(this.route)
        reject(error)
        return error
      }
      /** Fixes the status and the headers. */
      const begin = (): void => {
        if (status !== undefined) return
        status = res.statusCode
        // The body is sent whole, with its length.
        this.headers = this.#lines().filter(([name]) => !/^(transfer-encoding|trailer)$/i.test(name))
        seemsSent(res, 'headersSent')
        for (const name of HEADER_METHODS) (res as any)[name] = () => { if (!isLate()) throw refuse() }
      }
      const take = (part: unknown, encoding: unknown): void => {
        if (part === undefined || part === null || typeof part === 'function') return
        if (typeof part !== 'string' && !(part instanceof Uint8Array)) {
          throw new TypeError(`${this.route} must answer with a string or a Buffer, not ${describe(part)}`)
        }
        parts.push(typeof part === 'string'
          ? Buffer.from(part, typeof encoding === 'string' ? encoding as BufferEncoding : 'utf8')
          : Buffer.from(part))
      }
      const callBack = (given: unknown[]): void => {
        const callback = given.find((one) => typeof one === 'function') as (() => void) | undefined
        if (callback) process.nextTick(callback)
      }
      Object.assign(res, {
        writeHead: (code: number, ...rest: unknown[]) => {
          if (isLate()) return res
          if (status !== undefined) throw refuse()
          res.statusCode = code
          if (typeof rest[0] === 'string') res.statusMessage = rest.shift() as string
          const given = rest[0] as Record<string, OutgoingHttpHeader> | OutgoingHttpHeader[] | undefined
          if (Array.isArray(given)) {
            for (let at = 0; at + 1 < given.length; at += 2) res.appendHeader(String(given[at]), given[at + 1] as string)
          } else {
            for (const [name, value] of Object.entries(given ?? {})) res.setHeader(name, value)
          }
          begin()
          return res
        },
        flushHeaders: streaming,
        addTrailers: () => reject(streamingRefused(this.route, 'with trailers')),
        write: (part: unknown, ...rest: unknown[]) => {
          callBack(rest)
          if (isLate()) return false
          if (ended) refuse()
          // With a Content-Length, it is not a stream of unknown length.
          else if (!res.hasHeader('content-length')) streaming()
          else {
            begin()
            take(part, rest[0])
          }
          return !ended
        },
        end: (...given: unknown[]) => {
          callBack(given)
          if (isLate()) return res
          if (ended) {
            // As in Node, end() without a body is not a second response.
            if (given[0] !== undefined && given[0] !== null && typeof given[0] !== 'function') refuse()
            return res
          }
          take(given[0], given[1])
          begin()
          ended = true
          seemsSent(res, 'writableEnded')
          look()
          hasAnswered()
          return res
        },
        destroy: (error?: Error) => {
          reject(error ?? streamingRefused(this.route, 'by res.destroy()'))
          return res
        },
      })
      const made = handler(reject) as PromiseLike<unknown> | undefined
      const done = (): void => {
        returned = true
        look()
      }
      if (typeof made?.then === 'function') made.then(done, reject)
      else done()
    })
    this.#done = true
    if (!ended) return undefined
    const headers: Record<string, string | string[]> = {}
    for (const [name, value] of this.headers) headers[name] = Array.isArray(value) ? value : String(value)
    return { status: status!, headers, body: Buffer.concat(parts) }
  }

  /** The response as it was before the handler. */
  restore(isUndone: boolean): void {
    this.#reset()
    if (isUndone) refuseSuccess(this.res, this.route)
    if (!this.#done) ignoreLateCalls(this.res, this.#attempts)
  }

  send(status: number, headers: Iterable<readonly [string, OutgoingHttpHeader]>, body: string | Uint8Array | null): void {
    const { res } = this
    res.statusCode = status
    for (const [name, value] of headers) res.setHeader(name, value)
    const bytes = typeof body === 'string' ? Buffer.from(body) : body ?? Buffer.alloc(0)
    if ((res.req as { fresh?: boolean }).fresh) {
      res.statusCode = 304
      for (const name of ['Content-Type', 'Content-Length', 'Transfer-Encoding']) res.removeHeader(name)
    }
    const bodiless = res.statusCode === 204 || res.statusCode === 304 || res.req.method === 'HEAD'
    try {
      if (!bodiless) res.setHeader('Content-Length', bytes.length)
      res.end(bodiless ? undefined : bytes)
    } catch (error) {
      // The answer of the error handler must not have the headers that caused the error.
      if (!res.headersSent) this.#reset()
      throw error
    }
  }
}
