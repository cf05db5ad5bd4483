/**
 * A plugin for Fastify 5: routes with config: { idempotency: true } are guarded.
 *
 *	app.register(idempotency, { client, scope: (request) => request.user })
 *	app.post('/payments', { config: { idempotency: true } }, async (request, reply) => { ... })
 *
 * The handler's response is sent after COMMIT. If the handler throws, its work
 * is rolled back, and the application's error handler gets the error.
 */
import { Readable } from 'node:stream'
import type {} from 'fastify'
import type { PoolClient } from 'pg'
import type { Client, Response } from './client.js'
import { Attempts } from './handlers.js'
import {
  alreadySent, checkedClient, checkedOptions, ignoreLateCalls, isStream, keyOf, overrides, refuseSuccess, refuseWaiting, replayPipe, responseOverrides, routeOptions, seemsSent, SENDING_METHODS,
  serve, snapshotOf, streamingRefused, wholeBody, type Context, type HttpOptions,
} from './http.js'
import type { Headers } from './values.js'

export interface FastifyOptions<Request = any> extends HttpOptions<Request> {
  client: Client<any>
}
/** config.idempotency of a route: true, or options for this route. */
export type RouteOptions = Partial<HttpOptions<any>> & { job?: boolean }
/** The value of request.idempotency in a guarded handler. */
export type Idempotent<Tx = PoolClient> = Context<Tx>
/** With the client of an ORM, declare module 'pg-idempotency/fastify' { interface Types { tx: ... } } sets the type of tx. */
export interface Types {}

declare module 'fastify' {
  interface FastifyRequest {
    /** Only in guarded routes. */
    idempotency: Idempotent<Types extends { tx: infer Tx } ? Tx : PoolClient>
    rawBody: Buffer
  }
  interface FastifyContextConfig {
    idempotency?: RouteOptions | boolean
  }
}

/** Marks the config of a route that the plugin has guarded. */
const GUARDED = Symbol('guarded by pg-idempotency')
/** Options of each plugin, which Fastify itself uses. */
const PLUGIN_OPTIONS = ['prefix', 'logLevel', 'logSerializers']

async function idempotency(app: any, options: FastifyOptions): Promise<void> {
  const { client, ...defaults } = options
  checkedClient(client)
  checkedOptions(defaults as HttpOptions<never>, ...PLUGIN_OPTIONS)
  app.decorateRequest('idempotency', null)
  app.decorateRequest('rawBody', null)
  // onRoute misses routes that are declared before the plugin is loaded, or outside its context, and they would run unguarded.
  const refuseUnguarded = ({ routeOptions }: any, _reply: unknown, done: (error?: Error) => void): void => {
    if (!routeOptions.config?.idempotency || routeOptions.config[GUARDED]) return done()
    done(new TypeError(`${routeOptions.method} ${routeOptions.url} was declared before the plugin was loaded, or outside the context ` +
      'that registers it: first await register() of pg-idempotency in the context of the route'))
  }
  for (const context of contextsOf(app)) context.addHook('onRequest', refuseUnguarded)
  app.addHook('onRoute', (route: any) => {
    const own = route.config?.idempotency as RouteOptions | boolean | undefined
    if (own === undefined || own === false) return
    const settings = routeOptions<HttpOptions<any> & { job?: boolean }>(defaults, own === true ? {} : own, ...PLUGIN_OPTIONS, 'job')
    const kind = settings.job ? 'job' : 'request'
    const handler = route.handler as (this: unknown, request: any, reply: any) => unknown
    // This is the first hook, so that later hooks can parse.
    route.preParsing = [(request: any, _reply: unknown, payload: Readable, done: (error: Error | null, payload?: Readable) => void) => {
      if (request.headers['content-length'] === undefined && request.headers['transfer-encoding'] === undefined) {
        // To read the end of the request would end Fastify's handlerTimeout.
        request.rawBody = Buffer.alloc(0)
        return done(null, payload)
      }
      wholeBody(payload, request.routeOptions.bodyLimit).then((bytes) => {
        request.rawBody = bytes
        replayPipe(request.raw, () => request.rawBody)
        done(null, new BodyAgain(bytes))
      }, done)
    }, ...[route.preParsing ?? []].flat()]
    route.preValidation = [(request: any, _reply: unknown, done: () => void) => {
      request[PARSED] = request.body
      done()
    }, ...[route.preValidation ?? []].flat()]
    route.handler = function (this: unknown, request: any, reply: any) {
      if (settings.methods && !settings.methods.includes(request.method)) return handler.call(this, request, reply)
      return handle(client, settings, kind, request, reply, (given) => handler.call(this, request, given))
    }
    route.config = { ...route.config, [GUARDED]: true }
  })
}

/** All contexts that the application has so far. Later ones inherit the hooks of their parents. */
function contextsOf(app: any): any[] {
  let root = app
  while (typeof Object.getPrototypeOf(root)?.addHook === 'function') root = Object.getPrototypeOf(root)
  const found = [root]
  // The array grows while it is read.
  for (const context of found) {
    const children = Object.getOwnPropertySymbols(context).find((symbol) => symbol.description === 'fastify.children')
    if (children) found.push(...context[children])
  }
  // For another version of Fastify, which names its children differently.
  return found.includes(app) ? found : [...found, app]
}

/** A body that has been read, as a stream for the parser. */
class BodyAgain extends Readable {
  readonly receivedEncodedLength: number

  constructor(bytes: Buffer) {
    super()
    this.receivedEncodedLength = bytes.length
    if (bytes.length > 0) this.push(bytes)
    this.push(null)
  }
}

type Sent = { status: number; headers: Headers; body: Buffer }

async function handle(client: Client<any>, options: HttpOptions<any>, kind: 'request' | 'job', request: any, reply: any,
  handler: (reply: any) => unknown): Promise<unknown> {
  const before = lines(reply)
  const statusBefore = reply.statusCode as number
  let whole: Sent | undefined
  /** No handler runs. */
  let done = true
  let isUndone = false
  let finished = (): boolean => false
  let again: (() => Promise<void>) | undefined
  const route = `${request.method} ${request.url}`
  const attempts = new Attempts()
  const takeBack = [overrides(reply, ['then', 'send', 'hijack', 'trailer', 'sent']), responseOverrides(reply.raw)]
  const reset = (): void => {
    for (const undo of takeBack) undo()
    for (const name of Object.keys(reply.getHeaders())) reply.removeHeader(name)
    for (const [name, value] of Object.entries(before)) reply.header(name, value)
    reply.code(statusBefore)
  }
  let answer
  try {
    answer = await serve(client, {
      method: request.method, path: request.raw.url, key: keyOf(request),
      body: request.rawBody ?? new Uint8Array(), contentType: request.headers['content-type'],
      contentEncoding: request.headers['content-encoding'], native: request,
      scope: () => options.scope(request), onScope: () => { isUndone = true },
    }, options as HttpOptions<never>, kind, async (context, isFinished) => {
      finished = isFinished
      if (again) {
        await again()
        reset()
      } else {
        again = snapshotOf(request, parserOf(request))
      }
      request.idempotency = context
      attempts.add()
      done = false
      const sent = await bufferedResponse(reply, handler, isFinished, route, attempts)
      done = true
      // The last step's response is the one that is stored.
      whole = isFinished() ? undefined : sent
      return whole as Response | undefined
    })
    isUndone = false
  } finally {
    if (again) reset()
    if (isUndone && !finished()) refuseSuccess(reply.raw, route)
    if (!done) for (const [target, names] of [[reply, ['send', 'hijack', 'trailer']], [reply.raw]] as const) ignoreLateCalls(target, attempts, names)
  }
  const { status, headers, body } = answer.first && whole ? whole : answer
  reply.code(status)
  for (const [name, value] of Object.entries(headers)) reply.header(name, value)
  // For an empty body, Fastify would set a content type of bytes.
  return reply.send(body === null || (body.length === 0 && !reply.hasHeader('content-type')) ? undefined
    : typeof body === 'string' ? Buffer.from(body) : body)
}

/** The body as the parser has made it, by which we notice that a hook has replaced it. */
const PARSED = Symbol('parsed body')

/**
 * Returns a function that parses the body once more, with the route's schema and
 * its parser, which only Fastify's own context of the request has. Returns
 * undefined if a hook has replaced the body.
 */
function parserOf(request: any): (() => unknown) | undefined {
  const { body } = request
  if (typeof body !== 'object' || body === null || body !== request[PARSED]) return undefined
  const context = Object.getOwnPropertySymbols(request).find((symbol) => symbol.description === 'fastify.context')
  const parser = context && request[context]?.contentTypeParser?.getParser?.(request.headers['content-type'] ?? '')
  const validate = request.getValidationFunction?.('body')
  if (typeof parser?.fn !== 'function' || !(parser.asString || parser.asBuffer) || (validate && typeof validate !== 'function')) return undefined
  const members = Array.isArray(body) ? [] : Object.entries(body)
  const bytes = Buffer.from(request.rawBody)
  return async () => {
    const made: any = await new Promise((resolve, reject) => {
      const found = parser.fn(request, parser.asString ? bytes.toString() : bytes, (error: Error | null, again: unknown) => (error ? reject(error) : resolve(again)))
      if (typeof found?.then === 'function') found.then(resolve, reject)
    })
    validate?.(made)
    // Restores members that hooks have added or changed.
    for (const [name, value] of members) if (!Object.hasOwn(made, name) || typeof value !== 'object') made[name] = value
    return made
  }
}

/** The handler's return value, or the argument of reply.send(), as it would be sent. */
function bufferedResponse(reply: any, handler: (reply: any) => unknown, silent: () => boolean, route: string, attempts: Attempts):
  Promise<Sent | undefined> {
  return new Promise((resolve, reject) => {
    let sent: Sent | undefined
    let returned = false
    let tell!: () => void
    const hasAnswered = refuseWaiting(reply.raw, route, () => returned, reject)
    const look = (): void => { if (returned && (sent || silent())) resolve(sent) }
    const take = (payload: unknown): void => {
      if (payload instanceof Error) return reject(payload)
      if (sent) return reject(alreadySent(route))
      try {
        sent = responseOf(route, reply, payload)
      } catch (error) {
        return reject(error)
      }
      seemsSent(reply, 'sent')
      tell()
      seemsSent(reply.raw, 'headersSent', 'writableEnded')
      hasAnswered()
    }
    // A handler can await or return reply until it has answered. The response itself is sent later.
    const answered = new Promise<void>((tellIt) => { tell = tellIt })
    reply.then = (fulfilled: () => unknown, rejected: () => unknown) => (silent() ? Promise.resolve() : answered).then(fulfilled, rejected)
    reply.send = (payload: unknown) => {
      if (attempts.isLeftBehind()) return reply
      take(payload)
      look()
      return reply
    }
    for (const name of ['hijack', 'trailer']) {
      reply[name] = () => {
        reject(streamingRefused(route, `through reply.${name}()`))
        return reply
      }
    }
    for (const name of SENDING_METHODS) {
      reply.raw[name] = () => {
        reject(streamingRefused(route, `through reply.raw.${name}()`))
        return name === 'write' ? true : reply.raw
      }
    }
    const done = (payload: unknown): void => {
      returned = true
      if (payload !== undefined && payload !== reply) take(payload)
      look()
    }
    const made = handler(reply) as PromiseLike<unknown> | undefined
    if (typeof made?.then === 'function' && made !== reply) {
      made.then((payload) => {
        // As in Fastify, a promise of undefined is an empty response.
        if (payload === undefined && !sent && !silent()) take(undefined)
        done(payload)
      }, reject)
    } else {
      done(made)
    }
  })
}

function lines(reply: any): Headers {
  const made: Headers = {}
  for (const [name, value] of Object.entries(reply.getHeaders())) {
    if (value !== undefined) made[name] = Array.isArray(value) ? value.map(String) : String(value)
  }
  return made
}

/** The response as Fastify would send it. */
function responseOf(route: string, reply: any, payload: unknown): Sent {
  const given = reply.getHeader('content-type') as string | undefined
  const type = (otherwise: string): void => { if (!given) reply.header('content-type', otherwise) }
  let body: Buffer
  if (payload === undefined) {
    body = Buffer.alloc(0)
  } else if (ArrayBuffer.isView(payload)) {
    type('application/octet-stream')
    body = Buffer.from(Buffer.from(payload.buffer, payload.byteOffset, payload.byteLength))
  } else if (typeof payload === 'string' && !/json/.test(given ?? '')) {
    type('text/plain; charset=utf-8')
    body = Buffer.from(payload)
  } else if (isStream(payload)) {
    (payload as { destroy?: () => void }).destroy?.()
    throw streamingRefused(route)
  } else {
    type('application/json; charset=utf-8')
    if (given && /json/.test(given) && !/charset/i.test(given)) reply.header('content-type', `${given}; charset=utf-8`)
    body = Buffer.from(typeof payload === 'string' ? payload : reply.serialize(payload) as string)
  }
  reply.removeHeader('content-length')
  return { status: reply.statusCode, headers: lines(reply), body }
}

// Its hooks apply to the application that registers the plugin, not to a context of its own.
Object.assign(idempotency, { [Symbol.for('skip-override')]: true, [Symbol.for('fastify.display-name')]: 'pg-idempotency' })

export { idempotency }
export default idempotency
