/**
 * Runs handlers: refuses nested connections while a handler's transaction holds
 * one, and ends a handler at its deadline or when its session is lost.
 */
import { AsyncLocalStorage } from 'node:async_hooks'
import { TimedOut } from './errors.js'
import type { Timeout } from './functions.js'
import { spanned } from './observe.js'
import { durationMs, LONGEST_TIMER } from './values.js'

/** A handler that runs, or has run. */
interface HandlerContext {
  open: boolean
  /** The pools whose connections it holds, or might need: with a router, also the router's pool. */
  readonly pools: readonly object[]
  outer: HandlerContext | undefined
}

const currentHandler = new AsyncLocalStorage<HandlerContext>()

/** Throws if the calling handler already holds a connection of the pool. */
export function refuseNested(pool: object, what: string, instead: string): void {
  for (let handler = currentHandler.getStore(); handler; handler = handler.outer) {
    if (handler.open && handler.pools.includes(pool)) {
      throw new TypeError(`${what} in a handler would take a second connection of the pool while the handler holds one, ` +
        `and several such handlers could wait for each other forever; use ${instead}`)
    }
  }
}

/** The handlers that have run for one response, one after another. */
export class Attempts {
  readonly #handlers = new WeakSet<HandlerContext>()

  /** Adds the calling handler, if the caller is one. */
  add(): void {
    const handler = currentHandler.getStore()
    if (handler) this.#handlers.add(handler)
  }

  /** Whether the caller belongs to a handler that has ended. A call from another request's handler, such as a batcher, does not. */
  isLeftBehind(): boolean {
    for (let handler = currentHandler.getStore(); handler; handler = handler.outer) {
      if (this.#handlers.has(handler)) return !handler.open
    }
    return false
  }
}

/** The default for a handler that holds a connection, which a handler that never answers would hold forever. */
const IN_TRANSACTION: Timeout = { timeout: '1 minute' }
const isStated = ({ timeout, timeoutMs }: Timeout): boolean => timeout !== undefined || timeoutMs !== undefined

/** The time limit of a handler with all its tries, from the beginning of the first try. null is no limit. */
export class Deadline {
  readonly #ms: number | undefined
  readonly #isStated: boolean
  #at: number | undefined

  constructor(options: Timeout) {
    this.#isStated = isStated(options)
    this.#ms = durationMs(options.timeout, options.timeoutMs, 'timeout')
    if (this.#ms === 0) throw new TypeError('timeout must not be 0; pass null for no timeout')
  }

  /** The deadline of a handler that holds a connection, with a default. */
  static inTransaction(options: Timeout): Deadline {
    return new Deadline(isStated(options) ? options : IN_TRANSACTION)
  }

  /** The deadline of a job's last step, the only step that holds a connection. */
  ofLastStep(): Deadline {
    return this.#isStated ? this : new Deadline(IN_TRANSACTION)
  }

  /** Calls over() once when the time is over. The function that it returns cancels this. */
  start(over: (error: TimedOut) => void): () => void {
    if (this.#ms === undefined) return () => undefined
    this.#at ??= performance.now() + this.#ms
    let timer: NodeJS.Timeout
    const look = (): void => {
      const left = this.#at! - performance.now()
      if (left <= 0) over(new TimedOut(`the handler took longer than its timeout of ${this.#ms} ms`))
      else timer = setTimeout(look, Math.min(left, LONGEST_TIMER))
    }
    look()
    return () => clearTimeout(timer)
  }
}

/**
 * Run a handler that holds a connection of the pool until it returns, its time
 * is over, or its session is lost. Later calls of the handler find its
 * transaction ended.
 */
export async function runHandler<T>(pools: readonly object[], run: () => Promise<T> | T, deadline: Deadline,
  onLost?: (listener: (error: Error) => void) => void): Promise<T> {
  const handler: HandlerContext = { open: true, pools, outer: currentHandler.getStore() }
  let stop: (() => void) | undefined
  try {
    return await new Promise<T>((resolve, reject) => {
      stop = deadline.start(reject)
      onLost?.(reject)
      Promise.resolve(currentHandler.run(handler, () => spanned('idempotency.handler', run))).then(resolve, reject)
    })
  } finally {
    handler.open = false
    // A handler can start the next one after its end, and so on forever.
    if (!handler.outer?.open) handler.outer = undefined
    stop!()
  }
}
