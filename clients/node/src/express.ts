/**
 * Guarded routes for Express 4 and 5:
 *
 *	app.post('/payments', guarded(async (req, res) => { ... req.idempotency.tx ... }))
 *
 * The handler's response is sent after COMMIT. If the handler throws an error or
 * passes one to next(), its work is rolled back, and the error handlers of the
 * application get the error.
 */
import type { ServerResponse } from 'node:http'
import type { PoolClient } from 'pg'
import { BODY_LIMIT, bodyOf, parseBody, preparation, snapshotOf, type ParsedRequest } from './body.js'
import type { Client } from './client.js'
import { serveHeld } from './held.js'
import { checkedClient, keyOf, routeOptions, type Context, type HttpOptions } from './http.js'
import { BufferedResponse } from './response.js'

/** The members of an Express request that this file uses. */
export interface ExpressRequest extends ParsedRequest {
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
  const settingsOf = (own: Partial<ExpressOptions<Request>>, defaults = {}): ExpressOptions<Request> => routeOptions({ ...defaults, ...options }, own, 'bodyLimit')
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
  const limit = options.bodyLimit ?? BODY_LIMIT
  const { unread, ...body } = await bodyOf(req, limit)
  req.rawBody ??= body.body
  const parseAgain = unread && await parseBody(req, unread, limit)
  const { next: nextBefore } = req as { next?: Next }
  const prepared = preparation(req, unread)
  await serveHeld(client, {
    method: req.method!, path: req.originalUrl, key: keyOf(req), ...body,
    native: req, scope: () => options.scope(req),
  }, options, kind, new BufferedResponse(res, `${req.method} ${req.originalUrl}`), {
    snapshot: () => requestSnapshot(req, res, parseAgain),
    handler(fail) {
      prepared.begin()
      const next: Next = (error) => fail(error ??
        new TypeError('a guarded handler must send the response itself: it must not call next() without an error'))
      // Express's own methods, such as res.format() and res.sendFile(), report their errors to it.
      if (!options.isMiddleware) (req as { next?: Next }).next = next
      return handler(req, res, next)
    },
    over() {
      prepared.over()
      Object.assign(req, { next: nextBefore })
    },
  })
}

/** Returns a function that undoes the changes of a try. */
function requestSnapshot(req: ExpressRequest, res: ServerResponse, parseAgain: (() => unknown) | undefined): () => Promise<void> {
  const request = snapshotOf(req, parseAgain)
  const locals = { ...(res as { locals?: object }).locals }
  return async () => {
    await request()
    Object.assign(res, { locals: { ...locals } })
  }
}
