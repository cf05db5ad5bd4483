/**
 * NestJS, on Express or Fastify. The guard is an interceptor. Nest's response is sent after COMMIT.
 * After an exception, the work is rolled back, and the exception filters answer.
 */
import { AsyncResource } from 'node:async_hooks'
import {
  applyDecorators, createParamDecorator, HttpException, Inject, Module, ServiceUnavailableException, SetMetadata, StreamableFile,
  UseInterceptors, type CallHandler, type DynamicModule, type ExecutionContext, type NestInterceptor,
} from '@nestjs/common'
import { ApplicationConfig, ContextIdFactory, ModulesContainer, type ContextId } from '@nestjs/core'
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
const guarded: [target: object, name: string][] = []
/** The checks of the controllers that have an instance for each request. */
const perRequest = new WeakMap<object, (id: ContextId) => void>()

/** Refuses a controller with a route that has lost its guard. Nest takes the path from the prototype, and calls the method of the instance. */
function checkGuards(controller: any): void {
  const prototype = Object.getPrototypeOf(Object(controller))
  const off = guarded.find(([target, name]) => Object.prototype.isPrototypeOf.call(target, controller) &&
    Reflect.hasMetadata('path', prototype[name]) && !Reflect.hasMetadata(ROUTE, controller[name]))
  if (off) throw new TypeError(`${prototype.constructor.name}.${off[1]}() is not guarded: put @Idempotent() above a decorator that replaces the method, and on a method that replaces it`)
}

/** For each request: ends its run with an error, and waits until the work is rolled back. Without an error, ends a run that has given no value. */
const runs = new WeakMap<object, (error?: unknown) => Promise<void>>()
const left = new Error('an outer interceptor has answered in place of the handler, or the client has gone')

/** Also the first of the application's interceptors: an exception that leaves the others is a failure of the request. */
export class IdempotencyModule implements NestInterceptor {
  constructor(config: ApplicationConfig, readonly modules: ModulesContainer) {
    config.getGlobalInterceptors().unshift(this)
  }

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
    return { module: IdempotencyModule, global: true, imports, providers: [{ provide: SETTINGS, inject, useFactory: made }], exports: [SETTINGS] }
  }

  /** Nest calls this when it has made the controllers, and before it registers their routes. */
  configure(): void {
    for (const one of [...this.modules.values()].flatMap(({ controllers }) => [...controllers.values()])) {
      checkGuards(one.instance)
      if (one.isDependencyTreeStatic()) continue
      const host = { token: one.token, isTreeDurable: one.isDependencyTreeDurable() }
      perRequest.set(one.metatype!, (id) => checkGuards(one.getInstanceByContextId(id.getParent?.(host) ?? id).instance))
    }
  }

  intercept(context: ExecutionContext, next: CallHandler): Observable<unknown> {
    if (context.getType() !== 'http') return next.handle()
    const request: object = context.getArgByIndex(0)
    perRequest.get(context.getClass())?.(ContextIdFactory.getByRequest(request))
    const end = async (error?: unknown): Promise<void> => runs.get(request)?.(error)
    return next.handle().pipe(tap({ complete: () => void end(), unsubscribe: () => void end(left) }), catchError((error: unknown) => end(error ?? left).then(() => { throw error })))
  }
}
Module({})(IdempotencyModule)
for (const [at, token] of [ApplicationConfig, ModulesContainer].entries()) Inject(token)(IdempotencyModule, undefined, at)

class IdempotencyInterceptor implements NestInterceptor {
  constructor(readonly options: NestOptions) {}

  intercept(context: ExecutionContext, next: CallHandler): Observable<unknown> {
    const route = context.getHandler()
    const kind = Reflect.getMetadata('__sse__', route) ? '@Sse()' : context.getType()
    if (kind !== 'http') throw new TypeError(`${context.getClass().name}.${route.name}() must not be guarded: @Idempotent() is for HTTP requests with one response, and not for ${kind}`)
    const { client, job, ...settings } = { ...this.options, ...Reflect.getMetadata(ROUTE, route) as RouteOptions }
    if (settings.methods && !settings.methods.includes(context.switchToHttp().getRequest().method)) return next.handle()
    // Otherwise retry() would subscribe again in the context of the handler that it leaves.
    return new Observable(AsyncResource.bind((outer: Subscriber<unknown>) => guard(client, settings, job ? 'job' : 'request', context.getArgs(), next, outer)))
  }
}
Inject(SETTINGS)(IdempotencyInterceptor, undefined, 0)

/** The handler's value goes through the outer interceptors to Nest, whose response is stored, and sent after COMMIT. A replay goes the same way. */
function guard(client: Client<any>, settings: Omit<NestOptions, 'client'>, kind: 'request' | 'job', [request, response, nextHandler]: any[], next: CallHandler,
  outer: Subscriber<unknown>): () => void {
  const isFastify = response.raw !== undefined
  const route = `${request.method} ${request.originalUrl}`
  let held: BufferedReply | BufferedResponse | undefined
  let fail: ((error: unknown) => void) | undefined
  const gone = new Subject<never>()
  let [isEmitted, hasLeft] = [false, false]
  const emit = (value: unknown): void => { isEmitted = true; of(value).subscribe(outer) }
  const check = (): void => { if (isEmitted || hasLeft) throw isEmitted ? new ServiceUnavailableException('the transaction must run again, so the client must repeat the request') : left }
  const before = runs.get(request)
  const perform = async (): Promise<void> => {
    // The transaction of a run that an outer interceptor, such as retry(), has left.
    if (before) await before(left)
    held = isFastify ? new BufferedReply(response, route) : new BufferedResponse(response, route)
    held.isUndone = () => hasLeft
    const { unread, ...body } = await bodyOf(request, settings.bodyLimit ?? request.routeOptions?.bodyLimit ?? BODY_LIMIT)
    check()
    const { begin, over } = preparation(request.raw ?? request, unread)
    const { json } = response
    const takeBack = overrides(response, ['json', 'render', 'view'])
    const answer = await answerOf(client, {
      method: request.method, path: request.originalUrl, key: keyOf(request), ...body, native: request, scope: () => settings.scope(request),
    }, settings, kind, held, {
      snapshot: () => { check(); const again = snapshotOf(request); return () => again().then(check) },
      async handler(refuse, isFinished) {
        begin()
        fail = refuse
        // Otherwise an exception filter would answer for a value that is no JSON.
        response.json &&= (value: unknown) => void new Promise((sent) => { sent(json.call(response, value)) }).catch(refuse)
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
    fail = undefined
    if (!isEmitted) {
      if (isRefused) {
        for (const [name, value] of Object.entries(answer.headers)) response.header(name, value)
        throw new HttpException(JSON.parse(String(answer.body)) as object, answer.status)
      }
      response.render = response.view = () => response.send('')
      await held.run((refuse) => { fail = refuse; emit(document) }, () => false).catch(() => undefined)
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
    held = undefined
    if (!isEmitted) outer.error(error)
    else if (isFastify) response.send(error)
    else nextHandler(error)
  })
  const end = async (error?: unknown): Promise<void> => {
    if (isEmitted && error === undefined) return
    hasLeft = true
    // An outer interceptor answers, for example after its own timeout. Its response must not be held.
    if (!isEmitted) held?.restore()
    gone.error(left)
    if (fail) { fail(error ?? left); await ended }
  }
  runs.set(request, end)
  return () => void end()
}

/** Guards a route as a request in one transaction, or with { job: true } as a job. */
export function Idempotent(own: RouteOptions = {}): MethodDecorator {
  routeOptions<RouteOptions & HttpOptions<any>>({ scope: () => '' }, own, 'job', 'bodyLimit')
  return (target, name, descriptor) => {
    if ((name as unknown) === undefined) throw new TypeError(`@Idempotent() is for methods, and not for the class ${String((target as { name?: unknown }).name)}`)
    const [isPassthrough, args] = ['__responsePassthrough__', '__routeArguments__'].map((one) => Reflect.getMetadata(one, target.constructor, name) as object | undefined)
    const answersItself = !isPassthrough && Object.keys(args ?? {}).some((kind) => /^[12]:/.test(kind))
    if (answersItself) throw new TypeError(`${String(name)}() is guarded, and must not use @Res() or @Next(): return the response, or use @Res({ passthrough: true })`)
    applyDecorators(SetMetadata(ROUTE, own), UseInterceptors(IdempotencyInterceptor))(target, name, descriptor as TypedPropertyDescriptor<any>)
    guarded.push([target, String(name)])
  }
}
const idempotencyOf = (context: ExecutionContext): Context<any> => context.switchToHttp().getRequest().idempotency
/** The handle of the transaction. */
export const Tx: () => ParameterDecorator = createParamDecorator((_: unknown, context: ExecutionContext) => idempotencyOf(context).tx)
/** The job of a route with { job: true }. */
export const Job: () => ParameterDecorator = createParamDecorator((_: unknown, context: ExecutionContext) => idempotencyOf(context).job)
