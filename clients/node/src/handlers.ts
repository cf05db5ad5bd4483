/**
 * Where handlers run: what they may not do while their transaction holds a
 * connection, how long they may take, and what ends them besides themselves.
 */
import { AsyncLocalStorage } from 'node:async_hooks'
import { TimedOut } from './errors.js'
import type { Timeout } from './functions.js'
import { spanned } from './observe.js'
import { durationMs, LONGEST_TIMER } from './values.js'

/** A handler that runs, or has run. */
interface HandlerContext {
  open: boolean
  /** Whose connection it holds; a router's, too, if it knows of the shard by that. */
  readonly pools: readonly object[]
  readonly outer: HandlerContext | undefined
}

const currentHandler = new AsyncLocalStorage<HandlerContext>()

/** What takes a connection of the pool in which the handler that calls it holds one. */
export function refuseNested(pool: object, what: string, instead: string): void {
  for (let handler = currentHandler.getStore(); handler; handler = handler.outer) {
    if (handler.open && handler.pools.includes(pool)) {
      throw new TypeError(`${what} in a handler would take a second connection of the pool while the handler holds one, ` +
        `and enough of them wait for each other for ever; use ${instead}`)
    }
  }
}

/** The handlers that have run for one response, one after another. */
export class Attempts {
  readonly #handlers = new WeakSet<HandlerContext>()

  /** The handler that calls this is one of them. */
  add(): void {
    this.#handlers.add(currentHandler.getStore()!)
  }

  /** Whether the caller belongs to one that is over. A call from another request's handler, as of a batcher, does not. */
  isLeftBehind(): boolean {
    for (let handler = currentHandler.getStore(); handler; handler = handler.outer) {
      if (this.#handlers.has(handler)) return !handler.open
    }
    return false
  }
}

/** Of a handler that holds a connection: one that never answers would hold it for ever. */
const IN_TRANSACTION: Timeout = { timeout: '1 minute' }
const isStated = ({ timeout, timeoutMs }: Timeout): boolean => timeout !== undefined || timeoutMs !== undefined

/** How long a handler may take, with all its tries; it counts from when the first begins. null says that it may take as long as it likes. */
export class Deadline {
  readonly #ms: number | undefined
  readonly #isStated: boolean
  #at: number | undefined

  constructor(options: Timeout, defaults: Timeout) {
    this.#isStated = isStated(options) || isStated(defaults)
    const { timeout, timeoutMs } = isStated(options) ? options : defaults
    this.#ms = durationMs(timeout, timeoutMs, 'timeout')
    if (this.#ms === 0) throw new TypeError('timeout is 0, which no handler can keep; leave it out to have none')
  }

  /** Of what holds a connection; that has one by default. */
  static inTransaction(options: Timeout, defaults: Timeout): Deadline {
    return new Deadline(options, isStated(defaults) ? defaults : IN_TRANSACTION)
  }

  /** Of the last step of a job, which holds one as the others do not. */
  ofLastStep(): Deadline {
    return this.#isStated ? this : new Deadline(IN_TRANSACTION, {})
  }

  /** Calls, once, when the time is over, unless the function that it returns is called before. */
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
 * Run a handler that holds a connection of the pool, until it has returned, or
 * its time is over, or its session is lost. What it then still does finds its
 * transaction over.
 */
export async function runHandler<T>(pools: readonly object[], run: () => Promise<T> | T, deadline: Deadline, lost?: Promise<never>): Promise<T> {
  const handler: HandlerContext = { open: true, pools, outer: currentHandler.getStore() }
  let stop: (() => void) | undefined
  try {
    return await new Promise<T>((resolve, reject) => {
      stop = deadline.start(reject)
      currentHandler.run(handler, () => spanned('idempotency.handler', run)).then(resolve, reject)
      lost?.catch(reject)
    })
  } finally {
    handler.open = false
    stop!()
  }
}
