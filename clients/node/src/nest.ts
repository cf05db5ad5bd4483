/**
 * NestJS, on Express or Fastify:
 *
 *	IdempotencyModule.forRoot({ client, scope: (request) => request.user.id })
 *	@Post() @Idempotent() create(@Body() order: Order, @Tx() tx: PoolClient) { ... }
 *
 * The guard is an interceptor after the application's guards and its global
 * interceptors, which handle a replay like a first response. The handler's
 * result is sent after COMMIT. If the handler throws, its work is rolled back,
 * and the exception filters get the error.
 */
import {
  applyDecorators, createParamDecorator, HttpException, Inject, Module, SetMetadata, StreamableFile, UseInterceptors,
  type CallHandler, type DynamicModule, type ExecutionContext, type NestInterceptor,
} from '@nestjs/common'
import { HttpAdapterHost, Reflector } from '@nestjs/core'
import { lastValueFrom, of, type Observable } from 'rxjs'
import type { Client, Response } from './client.js'
import { checkedOptions, isStream, overrides, refuseSuccess, routeOptions, SENDING_METHODS, serve, streamingRefused, type Context, type HttpOptions } from './http.js'
import type { Headers } from './values.js'

export interface NestOptions<Request = any> extends HttpOptions<Request> {
  client: Client<any>
}
export interface AsyncNestOptions {
  imports?: DynamicModule['imports']
  inject?: any[]
  useFactory: (...given: any[]) => NestOptions | Promise<NestOptions>
}
/** Options for one route. */
export type RouteOptions = Partial<HttpOptions<any>> & { job?: boolean }

const SETTINGS = Symbol('settings of pg-idempotency')
const ROUTE = 'pg-idempotency:route'

export class IdempotencyModule {
  static forRoot(options: NestOptions): DynamicModule {
    return IdempotencyModule.forRootAsync({ useFactory: () => options })
  }

  static forRootAsync({ imports = [], inject = [], useFactory }: AsyncNestOptions): DynamicModule {
    const made = async (...given: unknown[]): Promise<NestOptions> => {
      const options = await useFactory(...given)
      const { client: _, ...settings } = options
      checkedOptions(settings as HttpOptions<never>)
      return options
    }
    return { module: IdempotencyModule, global: true, imports, providers: [{ provide: SETTINGS, inject, useFactory: made }], exports: [SETTINGS] }
  }
}
Module({})(IdempotencyModule)

class IdempotencyInterceptor implements NestInterceptor {
  constructor(readonly options: NestOptions, readonly host: HttpAdapterHost, readonly reflector: Reflector) {}

  async intercept(context: ExecutionContext, next: CallHandler): Promise<Observable<unknown>> {
    const { client, ...defaults } = this.options
    const { job, ...own } = this.reflector.get<RouteOptions>(ROUTE, context.getHandler())
    const settings = { ...defaults, ...own }
    const request = context.switchToHttp().getRequest()
    const response = context.switchToHttp().getResponse()
    if (settings.methods && !settings.methods.includes(request.method)) return next.handle()
    const route = `${request.method} ${request.originalUrl}`
    const http = this.host.httpAdapter
    const before = { status: response.statusCode as number, headers: { ...response.getHeaders() } as Headers }
    const reset = (): void => {
      http.status(response, before.status)
      for (const name of Object.keys(response.getHeaders())) if (!(name in before.headers)) response.removeHeader(name)
    }
    const raw = response.raw ?? response
    const sending = [[raw, SENDING_METHODS], [response, ['send', 'hijack']]] as const
    const takeBack = sending.map(([target, names]) => overrides(target, names))
    let value: unknown
    let isUndone = false
    let answer
    try {
      answer = await serve(client, {
        method: request.method, path: request.originalUrl, key: (request.raw ?? request).headersDistinct['idempotency-key'],
        native: request, scope: () => settings.scope(request), onScope: () => { isUndone = true }, ...bodyOf(request, route),
      }, settings as HttpOptions<never>, job ? 'job' : 'request', async (claimed: Context<any>, isFinished) => {
        reset()
        request.idempotency = claimed
        value = await new Promise((resolve, reject) => {
          // A response that the handler sends itself would precede COMMIT.
          for (const [target, names] of sending) {
            for (const name of names) target[name] = () => reject(streamingRefused(route, `itself, with response.${name}()`))
          }
          lastValueFrom(next.handle(), { defaultValue: undefined }).then(resolve, reject)
        })
        // The last step's response is the one that is stored.
        return isFinished() ? undefined : responseOf(value, response, route, http.getType() === 'fastify')
      })
      isUndone &&= !answer.first && answer.headers['Idempotent-Replayed'] === undefined
      if (isUndone) reset()
    } finally {
      for (const undo of takeBack) undo()
      if (isUndone) refuseSuccess(raw, route)
    }
    const { status, headers, body, first } = answer
    const isReplayed = headers['Idempotent-Replayed'] !== undefined
    // Nest redirects after this, and chooses the type itself.
    const redirects = isReplayed && this.reflector.get('__redirect__', context.getHandler()) !== undefined
    // Return the stored response of a finished job, and the handler's result for any other first response.
    if (first && (value !== undefined || body === null)) return of(value)
    for (const [name, one] of Object.entries(headers)) if (!redirects || !/^content-type$/i.test(name)) http.setHeader(response, name, one as string)
    http.status(response, status)
    if (body === null) return of(undefined)
    const type = headers['content-type'] ?? headers['Content-Type']
    if (body === '' && type === undefined) return of(null)
    const isJson = /json/i.test(String(type))
    if (typeof body !== 'string' && !isJson && http.getType() === 'fastify') return of(body)
    const text = body.toString()
    if (!first && !isReplayed) throw new HttpException(JSON.parse(text) as object, status)
    return of(isJson ? document(text) : text)
  }
}
Inject(SETTINGS)(IdempotencyInterceptor, undefined, 0)
Inject(HttpAdapterHost)(IdempotencyInterceptor, undefined, 1)
Inject(Reflector)(IdempotencyInterceptor, undefined, 2)

/** The raw bytes, or the document of a parser. */
function bodyOf(request: any, route: string): { body: Uint8Array; contentType?: string; contentEncoding?: string } {
  const { 'content-type': contentType, 'content-encoding': contentEncoding, 'content-length': length, 'transfer-encoding': chunked } = request.headers
  if (Buffer.isBuffer(request.rawBody)) return { body: request.rawBody, contentType, contentEncoding }
  if (request.body !== undefined && request.body !== null) return { body: Buffer.from(JSON.stringify(request.body)), contentType: 'application/json' }
  if (chunked !== undefined || Number(length ?? 0) > 0) {
    throw new TypeError(`${route} has a body that was not read, so it cannot be compared: use NestFactory.create(App, { rawBody: true })`)
  }
  return { body: new Uint8Array() }
}

/** The response as Nest would send it: Express sends only text as text and all else as JSON, and Fastify also sends bytes. */
function responseOf(value: unknown, response: any, route: string, isFastify: boolean): Response {
  if (value instanceof StreamableFile) throw streamingRefused(route, 'with a StreamableFile')
  if (isStream(value)) throw streamingRefused(route)
  const headers = { ...response.getHeaders() } as Headers
  if (isFastify && ArrayBuffer.isView(value)) {
    headers['content-type'] ??= 'application/octet-stream'
    return { status: response.statusCode, headers, body: Buffer.from(value.buffer, value.byteOffset, value.byteLength) }
  }
  if (isFastify && (value === null || typeof value === 'number' || typeof value === 'boolean')) headers['content-type'] ??= 'application/json; charset=utf-8'
  else if (typeof value !== 'object' || value === null) {
    // An empty body without a type is null, and no body is undefined.
    if (value === '') headers['content-type'] ??= `text/${isFastify ? 'plain' : 'html'}; charset=utf-8`
    return { status: response.statusCode, headers, body: value === undefined ? null : String(value ?? '') }
  }
  headers['content-type'] ??= 'application/json; charset=utf-8'
  return { status: response.statusCode, headers, body: JSON.stringify(value) }
}

/** Turns the text of an object into an object again, for outer interceptors. A string that is JSON stays a string. */
function document(text: string): unknown {
  const made: unknown = JSON.parse(text)
  return JSON.stringify(made) === text ? made : text
}

/** Whether the handler bypasses the interceptor, with @Next() or with @Res() without passthrough. */
function answersItself(target: object, name: string | symbol): boolean {
  const about = (what: string): unknown => (Reflect as any).getMetadata(what, target.constructor, name)
  return !about('__responsePassthrough__') && Object.keys(about('__routeArguments__') ?? {}).some((kind) => /^[12]:/.test(kind))
}

/** Guards a route as a request in one transaction, or with { job: true } as a job. */
export function Idempotent(own: RouteOptions = {}): MethodDecorator {
  routeOptions<RouteOptions & HttpOptions<any>>({ scope: () => '' }, own, 'job')
  const apply = applyDecorators(SetMetadata(ROUTE, own), UseInterceptors(IdempotencyInterceptor))
  return (target, name, descriptor) => {
    if (answersItself(target, name)) throw new TypeError(`${String(name)}() is guarded, and must not use @Res() or @Next(): return the response, or use @Res({ passthrough: true })`)
    apply(target, name, descriptor as TypedPropertyDescriptor<any>)
  }
}

const idempotencyOf = (context: ExecutionContext): Context<any> => context.switchToHttp().getRequest().idempotency
/** The handle of the transaction. */
export const Tx: () => ParameterDecorator = createParamDecorator((_: unknown, context: ExecutionContext) => idempotencyOf(context).tx)
/** The job of a route with { job: true }. */
export const Job: () => ParameterDecorator = createParamDecorator((_: unknown, context: ExecutionContext) => idempotencyOf(context).job)
