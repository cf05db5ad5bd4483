/**
 * A plugin for Fastify 5: routes with config: { idempotency: true } are guarded.
 *
 *	app.register(idempotency, { client, scope: (request) => request.user })
 *	app.post('/payments', { config: { idempotency: true } }, async (request, reply) => { ... })
 *
 * The handler's response is held back until COMMIT. What it throws rolls back,
 * and goes on to the application's error handler.
 */
import { Readable } from 'node:stream'
import type {} from 'fastify'
import type { PoolClient } from 'pg'
import type { Client, Response } from './client.js'
import { isHandlerOver } from './handlers.js'
import {
  checkedOptions, ignoreLateCalls, replayPipe, SENDING_METHODS, serve, snapshotOf, streamingRefused, wholeBody, type Context, type HttpOptions,
} from './http.js'
import type { Headers } from './values.js'

export interface FastifyOptions<Request = any> extends HttpOptions<Request> {
  client: Client<any>
}
/** As config.idempotency of a route: true, or what is different there. */
export type RouteOptions = Partial<HttpOptions<any>> & { job?: boolean }
/** What a guarded handler finds as request.idempotency. */
export type Idempotent<Tx = PoolClient> = Context<Tx>

declare module 'fastify' {
  interface FastifyRequest {
    /** In guarded routes. */
    idempotency: Idempotent
    rawBody: Buffer
  }
  interface FastifyContextConfig {
    idempotency?: RouteOptions | boolean
  }
}

/** In the config of a route that the plugin has seen. */
const GUARDED = Symbol('guarded by pg-idempotency')

async function idempotency(app: any, options: FastifyOptions): Promise<void> {
  const { client, ...defaults } = options
  checkedOptions(defaults as HttpOptions<never>)
  app.decorateRequest('idempotency', null)
  app.decorateRequest('rawBody', null)
  // A route that was declared in the same breath, as without an await, was not seen, and would run unguarded.
  app.addHook('onRequest', async ({ routeOptions }: any) => {
    if (!routeOptions.config?.idempotency || routeOptions.config[GUARDED]) return
    throw new TypeError(`${routeOptions.method} ${routeOptions.url} was declared before the plugin was loaded: ` +
      'await app.register() of pg-idempotency first')
  })
  app.addHook('onRoute', (route: any) => {
    const own = route.config?.idempotency as RouteOptions | boolean | undefined
    if (!own) return
    const settings = { ...defaults, ...(own === true ? {} : own) }
    checkedOptions(settings as HttpOptions<never>)
    const kind = own !== true && own.job ? 'job' : 'request'
    const handler = route.handler as (this: unknown, request: any, reply: any) => unknown
    // First of all hooks, so that what comes after may parse.
    route.preParsing = [async (request: any, _reply: unknown, payload: Readable) => {
      request.rawBody = await wholeBody(payload, request.routeOptions.bodyLimit)
      replayPipe(request.raw, () => request.rawBody)
      const again = Readable.from(request.rawBody.length > 0 ? [request.rawBody] : []) as Readable & { receivedEncodedLength?: number }
      again.receivedEncodedLength = request.rawBody.length
      return again
    }, ...[route.preParsing ?? []].flat()]
    route.handler = function (this: unknown, request: any, reply: any) {
      return handle(client, settings, kind, request, reply, (given) => handler.call(this, request, given))
    }
    route.config = { ...route.config, [GUARDED]: true }
  })
}

async function handle(client: Client<any>, options: HttpOptions<any>, kind: 'request' | 'job', request: any, reply: any,
  handler: (reply: any) => unknown): Promise<unknown> {
  const before = lines(reply)
  const statusBefore = reply.statusCode as number
  let whole: { status: number; headers: Headers; body: Buffer } | undefined
  let done = false
  let again: (() => void) | undefined
  const route = `${request.method} ${request.url}`
  // What others have put there.
  const wrapped = Object.fromEntries(SENDING_METHODS.filter((name) => Object.hasOwn(reply.raw, name)).map((name) => [name, reply.raw[name]]))
  const reset = (): void => {
    for (const name of ['send', 'then', 'hijack']) delete reply[name]
    for (const name of SENDING_METHODS) delete reply.raw[name]
    Object.assign(reply.raw, wrapped)
    for (const name of Object.keys(reply.getHeaders())) reply.removeHeader(name)
    for (const [name, value] of Object.entries(before)) reply.header(name, value)
    reply.code(statusBefore)
  }
  let answer
  try {
    answer = await serve(client, {
      method: request.method, path: request.raw.url, key: keyOf(request),
      body: request.rawBody ?? new Uint8Array(), scope: () => options.scope(request),
    }, options as HttpOptions<never>, kind, async (context) => {
      let finished = false
      const job = context.job && Object.create(context.job, {
        finish: { value: async (last: never) => {
          const result = await context.job.finish(last)
          finished = true
          return result
        } },
      })
      again?.()
      again ??= snapshotOf(request)
      request.idempotency = { ...context, job }
      reset()
      whole = undefined
      done = false
      const payload = await bufferedPayload(reply, handler, () => finished, route)
      done = true
      // The last step's response is the one that is stored.
      if (!finished) whole = responseOf(route, reply, payload)
      return whole as Response | undefined
    })
  } finally {
    reset()
    if (!done) for (const [target, names] of [[reply, ['send', 'hijack']], [reply.raw]] as const) ignoreLateCalls(target, names)
  }
  const { status, headers, body } = answer.first && whole ? whole : answer
  reply.code(status)
  for (const [name, value] of Object.entries(headers)) reply.header(name, value)
  // Of no bytes Fastify would say that they are bytes.
  return reply.send(body === null || (body.length === 0 && !reply.hasHeader('content-type')) ? undefined
    : typeof body === 'string' ? Buffer.from(body) : body)
}

/** Each line of the header; requests of app.inject() have no lines. */
const keyOf = (request: any): string | string[] | undefined =>
  request.raw.headersDistinct ? request.raw.headersDistinct['idempotency-key'] : request.headers['idempotency-key']

/** What the handler returns, or gives to reply.send(). */
function bufferedPayload(reply: any, handler: (reply: any) => unknown, silent: () => boolean, route: string): Promise<unknown> {
  return new Promise((resolve, reject) => {
    let sent: { payload: unknown } | undefined
    let returned = false
    const look = (): void => { if (returned && (sent || silent())) resolve(sent?.payload) }
    // A handler may return reply, which would wait for what is sent later.
    reply.then = undefined
    reply.send = (payload: unknown) => {
      if (isHandlerOver()) return reply
      if (payload instanceof Error) reject(payload)
      else sent ??= { payload }
      look()
      return reply
    }
    reply.hijack = () => {
      reject(streamingRefused(route, 'through reply.hijack()'))
      return reply
    }
    for (const name of SENDING_METHODS) {
      reply.raw[name] = () => {
        reject(streamingRefused(route, `through reply.raw.${name}()`))
        return name === 'write' ? true : reply.raw
      }
    }
    const made = handler(reply) as PromiseLike<unknown> | undefined
    if (typeof made?.then === 'function' && made !== reply) {
      made.then((payload) => {
        if (payload !== undefined && payload !== reply) sent ??= { payload }
        // As in Fastify, a promise of nothing is an empty answer.
        else if (payload === undefined && !silent()) sent ??= { payload: undefined }
        returned = true
        look()
      }, reject)
    } else {
      if (made !== undefined && made !== reply) sent ??= { payload: made }
      returned = true
      look()
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
function responseOf(route: string, reply: any, payload: unknown): { status: number; headers: Headers; body: Buffer } {
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

function isStream(payload: unknown): boolean {
  const some = (payload ?? {}) as { pipe?: unknown; getReader?: unknown; arrayBuffer?: unknown; [Symbol.asyncIterator]?: unknown }
  return [some.pipe, some.getReader, some.arrayBuffer, some[Symbol.asyncIterator]].some((one) => typeof one === 'function')
}

// Its hooks are for the application that registers it, not for a context of its own.
Object.assign(idempotency, { [Symbol.for('skip-override')]: true, [Symbol.for('fastify.display-name')]: 'pg-idempotency' })

export { idempotency }
export default idempotency
