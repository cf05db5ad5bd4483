/**
 * NestJS, on Express or Fastify:
 *
 *	IdempotencyModule.forRoot({ client, scope: (request) => request.user.id })
 *	@Post() @Idempotent() create(@Body() order: Order, @Tx() tx: PoolClient) { ... }
 *
 * The guard is an interceptor. Nest's response is sent after COMMIT. After an
 * exception, the work is rolled back, and the exception filters answer.
 */
import {
  applyDecorators, createParamDecorator, HttpException, Inject, Module, ServiceUnavailableException, SetMetadata, StreamableFile,
  UseInterceptors, type CallHandler, type DynamicModule, type ExecutionContext, type NestInterceptor,
} from '@nestjs/common'
import { Reflector } from '@nestjs/core'
import { lastValueFrom, Observable, of, Subject, takeUntil, type Subscriber } from 'rxjs'
import { checkedCount, storable, type Client, type Response } from './client.js'
import { bodyOf, BufferedResponse } from './express.js'
import { BufferedReply } from './fastify.js'
import {
  checkedOptions, ignoreLateCalls, isStream, keyOf, overrides, routeOptions, serve, snapshotOf, streamingRefused, type Context, type HttpOptions,
} from './http.js'

export interface NestOptions<Request = any> extends HttpOptions<Request> {
  client: Client<any>
  /** The largest request body that no parser has read, in bytes: on Express 2 MB by default, on Fastify the limit of the route. */
  bodyLimit?: number
}
export interface AsyncNestOptions {
  imports?: DynamicModule['imports']
  inject?: any[]
  useFactory: (...given: any[]) => NestOptions | Promise<NestOptions>
}
/** Options for one route. */
export type RouteOptions = Partial<Omit<NestOptions, 'client'>> & { job?: boolean }

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
      checkedOptions(settings as HttpOptions<never>, 'bodyLimit')
      checkedCount(options.bodyLimit, 'bodyLimit')
      return options
    }
    return { module: IdempotencyModule, global: true, imports, providers: [{ provide: SETTINGS, inject, useFactory: made }], exports: [SETTINGS] }
  }
}
Module({})(IdempotencyModule)

class IdempotencyInterceptor implements NestInterceptor {
  constructor(readonly options: NestOptions, readonly reflector: Reflector) {}

  intercept(context: ExecutionContext, next: CallHandler): Observable<unknown> {
    const route = context.getHandler()
    const isSse = this.reflector.get<boolean | undefined>('__sse__', route)
    if (context.getType() !== 'http' || isSse) {
      throw new TypeError(`${context.getClass().name}.${route.name}() must not be guarded: @Idempotent() is for HTTP requests with one response, and ` +
        `not for ${isSse ? '@Sse()' : context.getType()}`)
    }
    const { client, job, ...settings } = { ...this.options, ...this.reflector.get<RouteOptions>(ROUTE, route) }
    if (settings.methods && !settings.methods.includes(context.switchToHttp().getRequest().method)) return next.handle()
    return new Observable((outer) => guard(client, settings, job ? 'job' : 'request', context.getArgs(), next, outer))
  }
}
Inject(SETTINGS)(IdempotencyInterceptor, undefined, 0)
Inject(Reflector)(IdempotencyInterceptor, undefined, 1)

/**
 * Run a guarded route, and return the teardown of its observable. The result of
 * the handler goes through the outer interceptors to Nest. Nest's response is
 * kept, stored, and sent after COMMIT. A replay goes the same way, so that the
 * outer interceptors come to their end, but sends the stored response.
 */
function guard(client: Client<any>, settings: Omit<NestOptions, 'client'>, kind: 'request' | 'job', [request, response, nextHandler]: any[], handler: CallHandler,
  outer: Subscriber<unknown>): () => void {
  const isFastify = response.raw !== undefined
  const route = `${request.method} ${request.originalUrl}`
  const held = isFastify ? new BufferedReply(response, route) : new BufferedResponse(response, route)
  const left = new Error('an outer interceptor has answered in place of the handler')
  const gone = new Subject<never>()
  let again: (() => Promise<void>) | undefined
  let readOver: (() => void) | undefined
  let finished = (): boolean => false
  let isUndone = false
  let isEmitted = false
  /** The status that the handler has left. */
  let status: number | undefined
  const emit = (value: unknown): void => {
    isEmitted = true
    of(value).subscribe(outer)
  }
  let restore = (): void => {
    restore = () => undefined
    readOver?.()
    delete request.fresh
    held.restore(isUndone && !finished())
  }
  // If the status has become 4xx after the handler, an outer interceptor has thrown an exception.
  const store = (given: number): boolean => (given < 400 || (status ?? given) === given) && storable(given, settings.store)
  const perform = async (): Promise<void> => {
    const { replay, ...body } = await bodyOf(request, settings.bodyLimit)
    let whole: Response | undefined
    const answer = await serve(client, {
      method: request.method, path: request.originalUrl, key: keyOf(request), ...body,
      native: request, scope: () => settings.scope(request), onScope: () => { isUndone = true },
    }, { ...settings, store } as HttpOptions<never>, kind, async (claimed: Context<any>, isFinished) => {
      finished = isFinished
      if (isEmitted) throw new ServiceUnavailableException('the transaction must run again, so the client must repeat the request')
      if (outer.closed) throw left
      if (again) await again()
      else again = snapshotOf(request)
      readOver?.()
      readOver = replay?.()
      request.idempotency = claimed
      // Otherwise Express would drop the body of a response that the client has cached, before it is stored.
      Object.defineProperty(request, 'fresh', { configurable: true, writable: true, value: false })
      whole = await held.run(() => new Promise((resolve, reject) => {
        lastValueFrom(handler.handle().pipe(takeUntil(gone)), { defaultValue: undefined }).then((value) => {
          if (outer.closed) throw left
          if (response.headersSent || response.sent) throw streamingRefused(route, 'itself, in its handler')
          if (value instanceof StreamableFile || isStream(value)) throw streamingRefused(route)
          status = response.statusCode
          if (!isFinished()) emit(value)
          resolve(response)
        }).catch(reject)
      }), isFinished)
      // The last step's response is the one that is stored.
      if (isFinished()) whole = undefined
      return whole
    })
    if (outer.closed && !isEmitted) return
    isUndone &&= !answer.first && answer.headers['Idempotent-Replayed'] === undefined
    if (isUndone && !isEmitted) {
      restore()
      for (const [name, value] of Object.entries(answer.headers)) response.header(name, value)
      throw new HttpException(JSON.parse(String(answer.body)) as object, answer.status)
    }
    if (!isEmitted) {
      const takeBack = overrides(response, ['render', 'view'])
      response.render = response.view = () => response.send('')
      await held.run(() => { emit(documentOf(answer.body)) }, () => false).catch(() => undefined)
      takeBack()
    }
    restore()
    const { status: code, headers = {}, body: bytes = null } = answer.first && whole ? whole : answer
    held.send(code, Object.entries(headers), bytes)
    // The outer interceptors can still be running.
    if (isUndone) ignoreLateCalls(response, { isLeftBehind: () => true } as never, isFastify ? ['send', 'hijack'] : undefined)
  }
  perform().catch((error: unknown) => {
    restore()
    if (!isEmitted) outer.error(error)
    else if (isFastify) response.send(error)
    else nextHandler(error)
  })
  return () => {
    if (isEmitted) return
    // An outer interceptor answers, for example after its own timeout. Its response must not be held.
    restore()
    gone.error(left)
  }
}

/** The stored response as outer interceptors get it. */
function documentOf(body: string | Buffer | null): unknown {
  try {
    return JSON.parse(String(body))
  } catch {
    return body
  }
}

/** Whether the handler bypasses the interceptor, with @Next() or with @Res() without passthrough. */
function answersItself(target: object, name: string | symbol): boolean {
  const about = (what: string): unknown => (Reflect as any).getMetadata(what, target.constructor, name)
  return !about('__responsePassthrough__') && Object.keys(about('__routeArguments__') ?? {}).some((kind) => /^[12]:/.test(kind))
}

/** Guards a route as a request in one transaction, or with { job: true } as a job. */
export function Idempotent(own: RouteOptions = {}): MethodDecorator {
  checkedCount(routeOptions<RouteOptions & HttpOptions<any>>({ scope: () => '' }, own, 'job', 'bodyLimit').bodyLimit, 'bodyLimit')
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
