/**
 * A response that is held back until its transaction has ended: the part of the
 * guards that does not depend on the framework.
 */
import type { ServerResponse } from 'node:http'
import type { Client, Response } from './client.js'
import { Attempts } from './handlers.js'
import { allowSuccess, alreadySent, GRACE_MS, ignoreLateCalls, refuseSuccess, refuseWaiting, serve, type HttpAnswer, type HttpOptions, type HttpRequest } from './http.js'

/** One run of a handler, for the methods that replace those of the response. */
export interface Attempt {
  isSent(): boolean
  /** Whether the caller is the handler of an earlier run, whose calls are ignored. */
  isLate(): boolean
  /** Whether the handler does not have to answer. */
  silent(): boolean
  /** Ends the run with an error, which rolls its work back. */
  fail(error: unknown): void
  /** Refuses a second response, and returns the error for methods that throw it. */
  refuseSecond(): Error
  answer(response: Response): void
}

/** A run that an outer interceptor has left does not refuse the response of the next run. */
const latest = new WeakMap<ServerResponse, HeldResponse>()

export abstract class HeldResponse {
  /** Between the first run of a handler and restore(). */
  #isHeld = false
  /** No handler runs. */
  #done = true
  /** Whether no success may be sent, because the work has not been committed. */
  isUndone = (): boolean => false
  readonly #attempts = new Attempts()
  #tries = 0
  /** Whether the response has been sent, apart from middleware that wraps end() and sends it later. */
  protected isSent = false

  /** late has the objects with those of their methods that send or change the response, or the usual ones. */
  constructor(readonly raw: ServerResponse, readonly route: string, readonly late: readonly (readonly [object, (readonly string[])?])[]) {
    latest.set(raw, this)
    allowSuccess(raw)
  }

  /** Makes the response what it was before the handler. */
  protected abstract reset(): void
  /** Replaces the methods of the response. The function that it returns gets the return value of the handler. */
  protected abstract hold(attempt: Attempt): (value: unknown, isPromised: boolean) => void
  abstract send(status: number, headers: Iterable<readonly [string, any]>, body: string | Uint8Array | null): unknown

  /** Run the handler until it has both returned and answered. If silent() is true, it does not have to answer. */
  async run(handler: (fail: (error: unknown) => void, silent: () => boolean) => unknown, silent: () => boolean): Promise<Response | undefined> {
    this.reset()
    if (this.#tries++ > 0) this.#ignoreLate()
    this.#attempts.add()
    this.#isHeld = true
    this.#done = false
    let sent: Response | undefined
    let isOver = false
    await new Promise<void>((resolve, reject) => {
      let returned = false
      const hasAnswered = refuseWaiting(this.raw, this.route, () => returned, reject)
      const look = (): void => { if (returned && (sent || silent())) resolve() }
      const take = this.hold({
        silent, isSent: () => sent !== undefined, isLate: () => this.#attempts.isLeftBehind(), fail: reject,
        refuseSecond: () => {
          const error = alreadySent(this.route)
          reject(error)
          return error
        },
        answer: (response) => {
          sent = response
          hasAnswered()
          look()
        },
      })
      // A stream whose client has gone never ends the response that it has begun.
      const gone = (): void => void setTimeout(() => {
        if (sent || isOver || this.#attempts.isLeftBehind()) return
        if (this.raw.headersSent || this.raw.hasHeader('content-length')) reject(new Error(`the client of ${this.route} has gone before the response was whole`))
        else gone()
      }, GRACE_MS)
      const done = (value: unknown, isPromised: boolean): void => {
        if (this.#attempts.isLeftBehind()) return
        returned = true
        take(value, isPromised)
        look()
        if (sent || silent()) return
        if (this.raw.destroyed) gone()
        else this.raw.once('close', gone)
      }
      const made = handler(reject, silent) as PromiseLike<unknown> | undefined
      if (typeof made?.then === 'function' && !this.late.some(([target]) => target === made)) made.then((value) => done(value, true), reject)
      else done(made, false)
    }).finally(() => { isOver = true })
    this.#done = true
    return sent
  }

  /** Ends the hold. */
  restore(): void {
    if (this.#isHeld) this.reset()
    this.#isHeld = false
    if (this.isUndone() && latest.get(this.raw) === this) refuseSuccess(this.raw, this.route)
    this.isUndone = () => false
    if (!this.#done) this.#ignoreLate()
    this.#done = true
  }

  /** A callback of pg runs outside of its handler's context, so after the end, all calls are late. */
  #ignoreLate(): void {
    // Over HTTP/2, end() sets writableEnded before it sends the head.
    const isLate = (name: string): boolean => this.#attempts.isLeftBehind() || (name === 'writeHead' ? this.raw.headersSent : this.raw.writableEnded) || (this.isSent && /^(write|end|statusCode)$/.test(name))
    for (const [target, names] of this.late) ignoreLateCalls(target, isLate, names)
  }
}

/** The framework's part around the runs of a handler. */
interface Route {
  /** Saves the request before the first run. The function that it returns restores it before the next one. */
  snapshot(): () => Promise<void>
  handler(fail: (error: unknown) => void, isFinished: () => boolean): unknown
  /** After the last run. */
  over?(): void
}

/** Whether the guard itself has answered. */
export const isRefusal = ({ first, committed }: HttpAnswer): boolean => !first && !committed

/** Serves a request of a guarded route. Returns the response, which is not sent yet. */
export async function answerOf(client: Client<any>, request: HttpRequest & { native: any }, options: HttpOptions<any>, kind: 'request' | 'job', held: HeldResponse,
  { snapshot, handler, over }: Route): Promise<HttpAnswer> {
  let whole: Response | undefined
  let again: (() => Promise<void>) | undefined
  // The whole response is stored, and not the range of the first request.
  for (const name of ['range', 'if-range']) delete (request.native.raw ?? request.native).headers[name]
  try {
    const onScope = (): void => { held.isUndone = () => true }
    const answer = await serve(client, { ...request, onScope }, options as HttpOptions<never>, kind, async (context, isFinished) => {
      held.isUndone = () => !isFinished()
      if (again) await again()
      else again = snapshot()
      request.native.idempotency = context
      const sent = await held.run(handler, isFinished)
      // The last step's response is the one that is stored.
      return whole = isFinished() ? undefined : sent
    })
    if (!isRefusal(answer)) held.isUndone = () => !answer.committed
    // The handler's own response has headers that are not stored, and its body can be too large to be stored.
    return answer.first && whole ? { ...answer, headers: whole.headers ?? {}, body: whole.body as Buffer } : answer
  } finally {
    over?.()
    held.restore()
  }
}

/** Serves a request of a guarded route, and sends its response. */
export async function serveHeld(...given: Parameters<typeof answerOf>): Promise<unknown> {
  const { status, headers, body } = await answerOf(...given)
  return given[4].send(status, Object.entries(headers), body)
}
