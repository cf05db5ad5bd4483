/**
 * NestJS, on Express or Fastify:
 *
 *	IdempotencyModule.forRoot({ client, scope: (request) => request.user.id })
 *	@Post() @Idempotent() create(@Body() order: Order, @Tx() tx: PoolClient) { ... }
 *
 * The guard is an interceptor. Nest's response is sent after COMMIT. After an
 * exception, the work is rolled back, and the exception filters answer.
 */
import { AsyncResource } from 'node:async_hooks'
import {
  applyDecorators, createParamDecorator, HttpException, Inject, Module, ServiceUnavailableException, SetMetadata, StreamableFile,
  UseInterceptors, type CallHandler, type DynamicModule, type ExecutionContext, type NestInterceptor,
} from '@nestjs/common'
import { ApplicationConfig, Reflector } from '@nestjs/core'
import { catchError, lastValueFrom, Observable, of, Subject, takeUntil, tap, type Subscriber } from 'rxjs'
import { BODY_LIMIT, bodyOf, preparation, snapshotOf } from './body.js'
import type { Client } from './client.js'
import { answerOf, isRefusal } from './held.js'
import { checkedClient, checkedOptions, ignoreLateCalls, isStream, keyOf, overrides, routeOptions, streamingRefused, type Context, type HttpOptions } from './http.js'
import { BufferedReply } from './reply.js'
import { BufferedResponse } from './response.js'

export interface NestOptions<Request = any> extends HttpOptions<Request> {
  client: Client<any>
  /** The largest request body that no parser has read, in bytes: on Express 2 MB by default, on Fastify the limit of the route. */
  bodyLimit?: number
}
export interface AsyncNestOptions extends Pick<DynamicModule, 'imports'> {
  inject?: any[]
  useFactory: (...given: any[]) => NestOptions | Promise<NestOptions>
}
/** Options for one route. */
export type RouteOptions = Partial<Omit<NestOptions, 'client'>> & { job?: boolean }

const SETTINGS = Symbol('settings of pg-idempotency')
const ROUTE = 'pg-idempotency:route'
/** The decorated methods, which others can replace without a guard. */
const guarded: [target: any, name: string][] = []

export class IdempotencyModule {
  static forRoot(options: NestOptions): DynamicModule {
    return IdempotencyModule.forRootAsync({ useFactory: () => options })
  }

  static forRootAsync({ imports = [], inject = [], useFactory }: AsyncNestOptions): DynamicModule {
    const made = async (...given: unknown[]): Promise<NestOptions> => {
      const { client, ...settings } = await useFactory(...given)
      checkedClient(client)
      checkedOptions(settings as HttpOptions<never>, 'bodyLimit')
      return { client, ...settings }
    }
    return { module: IdempotencyModule, global: true, imports, providers: [Outermost, { provide: SETTINGS, inject, useFactory: made }], exports: [SETTINGS] }
  }
}
Module({})(IdempotencyModule)

/** For each request that has a transaction: ends it with an error, and waits until the work is rolled back. */
const failures = new WeakMap<object, (error: unknown) => Promise<void>>()
/** For each request: ends it if it has given no value to the interceptors, because they have one of their own. */
const leaving = new WeakMap<object, (error?: unknown) => void>()
const left = new Error('an outer interceptor has answered in place of the handler, or the client has gone')

/** The first of the application's interceptors: an exception that leaves the others is a failure of the request. */
class Outermost implements NestInterceptor {
  constructor(config: ApplicationConfig) {
    config.getGlobalInterceptors().unshift(this)
    const off = guarded.find(([target, name]) => !Reflect.getMetadata(ROUTE, target[name]))
    if (off) throw new TypeError(`${off[0].constructor.name}.${off[1]}() is not guarded: put @Idempotent() above the decorator that replaces the method`)
  }

  intercept(context: ExecutionContext, next: CallHandler): Observable<unknown> {
    if (context.getType() !== 'http') return next.handle()
    const [request, route, { name, prototype }] = [context.getArgByIndex<object>(0), context.getHandler(), context.getClass()]
    // The name of the method that Nest calls. The instance can have its own function, such as one that the constructor has bound, or a method that is no route.
    const called = (one: object | null): string => (one === null ? route.name.replace(/^bound /, '')
      : Object.entries(Object.getOwnPropertyDescriptors(one)).find(([, { value }]) => value === route)?.[0] ?? called(Object.getPrototypeOf(one) as object | null))
    const replaces = ([target, method]: (typeof guarded)[0]): boolean => (prototype === target || prototype instanceof target.constructor) &&
      (called(prototype as object) === method || !Reflect.hasMetadata('path', Object(prototype[called(prototype as object)]) as object))
    if (!Reflect.getMetadata(ROUTE, route) && guarded.some(replaces)) {
      throw new TypeError(`${name}.${route.name}() is not guarded: it replaces a guarded method, and needs @Idempotent(), too`)
    }
    const fail = async (error: unknown): Promise<void> => (failures.get(request) ?? leaving.get(request))?.(error)
    return next.handle().pipe(tap({ complete: () => leaving.get(request)?.(), unsubscribe: () => void fail(left) }), catchError((error: unknown) => fail(error).then(() => { throw error })))
  }
}
Inject(ApplicationConfig)(Outermost, undefined, 0)

class IdempotencyInterceptor implements NestInterceptor {
  constructor(readonly options: NestOptions, readonly reflector: Reflector) {}

  intercept(context: ExecutionContext, next: CallHandler): Observable<unknown> {
    const route = context.getHandler()
    const kind = this.reflector.get('__sse__', route) ? '@Sse()' : context.getType()
    if (kind !== 'http') throw new TypeError(`${context.getClass().name}.${route.name}() must not be guarded: @Idempotent() is for HTTP requests with one response, and not for ${kind}`)
    const { client, job, ...settings } = { ...this.options, ...this.reflector.get<RouteOptions>(ROUTE, route) }
    if (settings.methods && !settings.methods.includes(context.switchToHttp().getRequest().method)) return next.handle()
    // Otherwise retry() would subscribe again in the context of the handler that it leaves.
    return new Observable(AsyncResource.bind((outer: Subscriber<unknown>) => guard(client, settings, job ? 'job' : 'request', context.getArgs(), next, outer)))
  }
}
Inject(SETTINGS)(IdempotencyInterceptor, undefined, 0)
Inject(Reflector)(IdempotencyInterceptor, undefined, 1)

/**
 * Run a guarded route, and return the teardown of its observable. The handler's result goes through the outer interceptors to
 * Nest, whose response is stored, and sent after COMMIT. A replay goes the same way, but sends the stored response.
 */
function guard(client: Client<any>, settings: Omit<NestOptions, 'client'>, kind: 'request' | 'job', [request, response, nextHandler]: any[], next: CallHandler,
  outer: Subscriber<unknown>): () => void {
  const isFastify = response.raw !== undefined
  const route = `${request.method} ${request.originalUrl}`
  let held: BufferedReply | BufferedResponse | undefined
  const gone = new Subject<never>()
  let [isEmitted, hasLeft] = [false, false]
  const emit = (value: unknown): void => { isEmitted = true; of(value).subscribe(outer) }
  const check = (): void => { if (isEmitted || hasLeft) throw isEmitted ? new ServiceUnavailableException('the transaction must run again, so the client must repeat the request') : left }
  const noteFailure = (fail: (error: unknown) => void) => failures.set(request, (error) => { hasLeft = true; fail(error); return ended })
  const perform = async (): Promise<void> => {
    // The run that an outer interceptor, such as retry(), has left.
    await failures.get(request)?.(left)
    held = isFastify ? new BufferedReply(response, route) : new BufferedResponse(response, route)
    const { unread, ...body } = await bodyOf(request, settings.bodyLimit ?? request.routeOptions?.bodyLimit ?? BODY_LIMIT)
    const { begin, over } = preparation(request.raw ?? request, unread)
    const { json } = response
    const takeBack = overrides(response, ['json', 'render', 'view'])
    const answer = await answerOf(client, {
      method: request.method, path: request.originalUrl, key: keyOf(request), ...body, native: request, scope: () => settings.scope(request),
    }, settings, kind, held, {
      snapshot: () => { check(); const again = snapshotOf(request); return () => again().then(check) },
      async handler(fail, isFinished) {
        begin()
        // Otherwise an exception filter would answer for a value that is no JSON.
        response.json &&= (value: unknown) => void new Promise((sent) => { sent(json.call(response, value)) }).catch(fail)
        noteFailure(fail)
        const value = await lastValueFrom(next.handle().pipe(takeUntil(gone)), { defaultValue: undefined })
        if (hasLeft) throw left
        if (response.headersSent || response.sent) throw streamingRefused(route, 'itself, in its handler')
        if (value instanceof StreamableFile || isStream(value)) throw streamingRefused(route)
        if (!isFinished()) emit(value)
        return response
      },
      over: () => { takeBack(); over() },
    })
    const isRefused = isRefusal(answer)
    const document = isEmitted || isRefused ? undefined : await Promise.resolve(String(answer.body)).then((text) => JSON.parse(text) as unknown).catch(() => answer.body)
    if (hasLeft) return
    failures.delete(request)
    if (!isEmitted) {
      if (isRefused) {
        for (const [name, value] of Object.entries(answer.headers)) response.header(name, value)
        throw new HttpException(JSON.parse(String(answer.body)) as object, answer.status)
      }
      response.render = response.view = () => response.send('')
      await held.run((fail) => { noteFailure(fail); emit(document) }, () => false).catch(() => undefined)
      takeBack()
      held.restore()
      if (hasLeft) return
    }
    held.send(answer.status, Object.entries(answer.headers), answer.body)
    // The outer interceptors can still be running.
    if (isRefused) ignoreLateCalls(response, () => true, isFastify ? ['send', 'hijack'] : ['json', 'send', 'redirect', 'render', 'write', 'end'])
  }
  const ended = perform().catch((error: unknown) => {
    if (hasLeft) return
    if (!isEmitted) outer.error(error)
    else if (isFastify) response.send(error)
    else nextHandler(error)
  })
  const leave = (): void => {
    if (isEmitted) return
    hasLeft = true
    // An outer interceptor answers, for example after its own timeout. Its response must not be held.
    held?.restore()
    gone.error(left)
  }
  leaving.set(request, leave)
  return leave
}

/** Whether the handler bypasses the interceptor, with @Next() or with @Res() without passthrough. */
const answersItself = (target: object, name: string | symbol): boolean => !Reflect.getMetadata('__responsePassthrough__', target.constructor, name) &&
  Object.keys(Reflect.getMetadata('__routeArguments__', target.constructor, name) as object ?? {}).some((kind) => /^[12]:/.test(kind))

/** Guards a route as a request in one transaction, or with { job: true } as a job. */
export function Idempotent(own: RouteOptions = {}): MethodDecorator {
  routeOptions<RouteOptions & HttpOptions<any>>({ scope: () => '' }, own, 'job', 'bodyLimit')
  return (target, name, descriptor) => {
    if ((name as unknown) === undefined) throw new TypeError(`@Idempotent() is for methods, and not for the class ${String((target as { name?: unknown }).name)}`)
    if (answersItself(target, name)) throw new TypeError(`${String(name)}() is guarded, and must not use @Res() or @Next(): return the response, or use @Res({ passthrough: true })`)
    applyDecorators(SetMetadata(ROUTE, own), UseInterceptors(IdempotencyInterceptor))(target, name, descriptor as TypedPropertyDescriptor<any>)
    guarded.push([target, String(name)])
  }
}

const idempotencyOf = (context: ExecutionContext): Context<any> => context.switchToHttp().getRequest().idempotency
/** The handle of the transaction. */
export const Tx: () => ParameterDecorator = createParamDecorator((_: unknown, context: ExecutionContext) => idempotencyOf(context).tx)
/** The job of a route with { job: true }. */
export const Job: () => ParameterDecorator = createParamDecorator((_: unknown, context: ExecutionContext) => idempotencyOf(context).job)
