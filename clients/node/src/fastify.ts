/**
 * A plugin for Fastify 5: routes with config: { idempotency: true } are guarded.
 *
 *	app.register(idempotency, { client, scope: (request) => request.user })
 *	app.post('/payments', { config: { idempotency: true } }, async (request, reply) => { ... })
 *
 * The handler's response is sent after COMMIT. If the handler throws, its work
 * is rolled back, and the application's error handler gets the error.
 */
import { IncomingMessage } from 'node:http'
import { Readable } from 'node:stream'
import type {} from 'fastify'
import type { PoolClient } from 'pg'
import type { Client } from './client.js'
import { replayPipe, snapshotOf, wholeBody } from './body.js'
import { serveHeld } from './held.js'
import { checkedClient, checkedOptions, keyOf, routeOptions, type Context, type HttpOptions } from './http.js'
import { BufferedReply, internal } from './reply.js'

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
      const { headers, raw } = request
      // Over HTTP/2, in inject() and from another hook, a body needs neither header.
      const isEmpty = payload === raw && (raw instanceof IncomingMessage || (raw.stream?.endAfterHeaders ?? headers['content-type'] === undefined))
      if (isEmpty && Number(headers['content-length'] ?? 0) === 0 && headers['transfer-encoding'] === undefined) {
        // To read the end of the request would end Fastify's handlerTimeout.
        request.rawBody = Buffer.alloc(0)
        return done(null, payload)
      }
      wholeBody(payload, request.routeOptions.bodyLimit).then((bytes) => {
        request.rawBody = bytes
        replayPipe(request.raw, () => request.rawBody)
        done(null, new BodyAgain(bytes, payload))
      }, done)
    }, ...[route.preParsing ?? []].flat()]
    route.preValidation = [(request: any, _reply: unknown, done: () => void) => {
      request[PARSED] = request.body
      done()
    }, ...[route.preValidation ?? []].flat()]
    route.handler = function (this: unknown, request: any, reply: any) {
      if (settings.methods && !settings.methods.includes(request.method)) return handler.call(this, request, reply)
      return handle(client, settings, kind, request, reply, () => handler.call(this, request, reply))
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
    found.push(...internal(context, 'fastify.children') ?? [])
  }
  // For another version of Fastify, which names its children differently.
  return found.includes(app) ? found : [...found, app]
}

/** A body that has been read, as a stream for the parser. */
class BodyAgain extends Readable {
  readonly receivedEncodedLength: number

  /** Another hook can have decompressed the body. */
  constructor(bytes: Buffer, { receivedEncodedLength = bytes.length }: Readable & { receivedEncodedLength?: number }) {
    super()
    this.receivedEncodedLength = receivedEncodedLength
    if (bytes.length > 0) this.push(bytes)
    this.push(null)
  }
}

function handle(client: Client<any>, options: HttpOptions<any>, kind: 'request' | 'job', request: any, reply: any,
  handler: () => unknown): Promise<unknown> {
  return serveHeld(client, {
    method: request.method, path: request.raw.url, key: keyOf(request), body: request.rawBody ?? new Uint8Array(),
    contentType: request.headers['content-type'], contentEncoding: request.headers['content-encoding'],
    native: request, scope: () => options.scope(request),
  }, options, kind, new BufferedReply(reply, `${request.method} ${request.url}`), { snapshot: () => snapshotOf(request, parserOf(request)), handler })
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
  const parser = internal(request, 'fastify.context')?.contentTypeParser?.getParser?.(request.headers['content-type'] ?? '')
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
    for (const [name, value] of members) if (!Object.hasOwn(made, name) || kindOf(value) !== kindOf(made[name])) made[name] = value
    return made
  }
}

/** The prototype of an object. Any other value has a kind of its own. */
const kindOf = (value: unknown): unknown => (typeof value === 'object' && value !== null ? Object.getPrototypeOf(value) : {})

// Its hooks apply to the application that registers the plugin, not to a context of its own.
Object.assign(idempotency, { [Symbol.for('skip-override')]: true, [Symbol.for('fastify.display-name')]: 'pg-idempotency' })

export { idempotency }
export default idempotency
