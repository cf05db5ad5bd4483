/**
 * The one interface that the integration of each ORM implements, so that an
 * ORM's transactions replace those on a client of a pool.
 */
import type { EventEmitter } from 'node:events'
import { TransactionEnded } from './errors.js'
import type { Row } from './functions.js'
import { BEGIN, isDead, retryIfDead, type PoolClientLike, type PoolLike, type TransactionHandle } from './postgres.js'

export interface Adapter<Tx> {
  /** A transaction that has begun. */
  begin(): Promise<OpenTransaction<Tx>>
  /** Returns the rows of a statement with $1, $2, in the transaction or alone. All values and columns are text. */
  query(text: string, values: (string | null)[], tx?: Tx): Promise<Row[]>
  /** The size of the ORM's pool. */
  readonly max?: number | undefined
}

export interface OpenTransaction<Tx> {
  /** The ORM's own object, which the handler gets. */
  readonly tx: Tx
  commit(): Promise<unknown>
  rollback(): Promise<unknown>
  /** Whether commit() throws if it was a rollback. */
  readonly reportsRollback?: boolean
  /** Whether a nested transaction has not ended, if it does not begin with the methods transaction() or $transaction() of tx. */
  isNested?(): boolean
  /** Whether a stream is neither read to its end nor closed. Without this, the pg client below is looked at. */
  isUnread?(): boolean
  /** Whether a nested transaction waits for the end of the one before. Otherwise the second one is refused. */
  readonly queues?: boolean
  /** Methods of tx that end it, which the handler is not allowed to call. */
  readonly ends?: readonly string[]
  /** The pg client below, if the ORM shows it. Without it, the statement of a handler that exceeds its timeout cannot be cancelled. */
  readonly client?: PoolClientLike | undefined
}

export const NOT_ENDED = 'the handler must not end the transaction, which the client commits with the response'
/** If two savepoints of one transaction are open at once, the rollback of one can undo the work of the other. */
export const ONE_NESTED = 'await one nested transaction before the next'

/** The pool of an ORM. */
export function poolOver<Tx extends object>(adapter: Adapter<Tx>): PoolLike<Tx> {
  return {
    connect: async () => new AdapterClient(adapter),
    [BEGIN]() {
      const began = performance.now()
      return retryIfDead(async () => {
        const client = new AdapterClient(adapter)
        await client.begin()
        return client
        // A dead connection fails at once. A pool that has no free one fails after its own limit.
      }, (error) => isDead(error) && performance.now() - began < 1000)
    },
    options: { max: adapter.max }, adapter,
  }
}

/** If an ORM does not show its client, a statement might be running. */
const UNKNOWN = { readyForQuery: false }

/** A client whose BEGIN, COMMIT and ROLLBACK are calls of the ORM. */
class AdapterClient<Tx extends object> implements PoolClientLike {
  #handle: ReturnType<typeof limited<Tx>> | undefined
  #open: OpenTransaction<Tx> | undefined
  #client: (PoolClientLike & { connection?: { stream?: { destroy?(): void } } }) | undefined
  #onError: ((error: Error) => void) | undefined

  constructor(readonly adapter: Adapter<Tx>) {}

  get handle(): ReturnType<typeof limited<Tx>> | undefined {
    const open = this.#open
    return this.#handle ??= open && limited(open.tx, open.ends ?? [], open.queues)
  }

  get below(): object {
    return this.#open ? this.#open.client ?? UNKNOWN : this
  }

  get isUnread(): boolean | undefined {
    return this.#open?.isUnread?.()
  }

  async begin(): Promise<void> {
    this.#open = await this.adapter.begin()
    this.#client = this.#open.client
  }

  async query({ text, values }: { text: string; values: (string | null)[] }): Promise<{ command: string; rows: Row[] }> {
    const open = this.#open
    // The pool has begun it.
    if (text === 'BEGIN') return { command: text, rows: [] }
    if (text === 'COMMIT' || text === 'ROLLBACK') {
      if (open?.isNested?.() || this.#handle?.isNested()) {
        if (text === 'COMMIT') throw new TransactionEnded('the handler returned before its nested transaction had ended; await it')
        // Its later statements must not run in another transaction on this connection.
        this.#destroy()
      }
      if (text === 'COMMIT') return { command: await this.#commit(open!), rows: [] }
      this.#open = undefined
      await open?.rollback()
    } else {
      return { command: 'SELECT', rows: await this.adapter.query(text, values, open?.tx) }
    }
    return { command: text, rows: [] }
  }

  /**
   * Commits, and returns the server's command tag. It is ROLLBACK if a statement
   * failed that nothing awaited, and that the ORM sent late. ORMs do not report it.
   * Without a handler, each statement was awaited.
   */
  async #commit(open: OpenTransaction<Tx>): Promise<string> {
    const wire = (open.client as { connection?: EventEmitter } | undefined)?.connection
    const isShown = typeof wire?.on === 'function'
    const [begun] = isShown || open.reportsRollback || !this.#handle ? [] : await this.adapter.query('SELECT pg_catalog.pg_current_xact_id()::text AS id', [], open.tx)
    let tag = isShown ? '' : 'COMMIT'
    const note = ({ text }: { text: string }): void => { tag = text }
    if (isShown) wire.on('commandComplete', note)
    this.#open = undefined
    try {
      await open.commit()
    } finally {
      wire?.removeListener?.('commandComplete', note)
    }
    if (!begun) return tag
    const [ended] = await this.adapter.query('SELECT pg_catalog.pg_xact_status($1::text::xid8) AS status', [begun['id']!])
    return ended!['status'] === 'committed' ? 'COMMIT' : 'ROLLBACK'
  }

  /** Closes a broken connection if the ORM shows it, so that its pool opens another one. */
  release(broken?: boolean): void {
    const client = this.#client
    if (client && this.#onError) client.removeListener('error', this.#onError)
    if (broken) this.#destroy()
    this.#open?.rollback().catch(() => undefined)
    this.#open = this.#client = undefined
  }

  #destroy(): void {
    this.#client?.on('error', () => undefined)
    this.#client?.connection?.stream?.destroy?.()
  }

  on(_: 'error', listener: (error: Error) => void): void {
    this.#onError = listener
    this.#client?.on('error', listener)
  }

  removeListener(): void {}
}

/** The object for the handler, which can neither end the transaction nor use it after its end. */
function limited<Tx extends object>(tx: Tx, ends: readonly string[], queues = false): TransactionHandle<Tx> & { isNested(): boolean } {
  let over = false
  let nested = 0
  const ended = (): void => { nested-- }
  /** The callback of a nested transaction gets such a handle, too, which ends with it. */
  const withHandle = (run: unknown): unknown => (typeof run !== 'function' ? run : (inner: object): unknown => {
    const handle = limited(inner, [], queues)
    const made = run(handle.tx) as PromiseLike<unknown> | undefined
    // In Knex, a callback that returns no promise ends the transaction itself.
    return typeof made?.then === 'function' ? Promise.resolve(made).finally(() => handle.over()) : made
  })
  const checkOpen = (): void => {
    if (over) throw new TransactionEnded('the transaction of this handle has ended')
  }
  const refuse = (): never => {
    throw new TransactionEnded(NOT_ENDED)
  }
  return {
    over: () => { over = true },
    isNested: () => nested > 0,
    tx: new Proxy(tx, {
      get(target, name) {
        if (typeof name === 'string' && name !== 'then') checkOpen()
        if (ends.includes(name as string)) return refuse
        const found: unknown = Reflect.get(target, name, target)
        if (typeof found === 'function' && (name === 'transaction' || name === '$transaction')) {
          return (...given: unknown[]): unknown => {
            if (nested > 0 && !queues) throw new TypeError(ONE_NESTED)
            const made: unknown = Reflect.apply(found, target, given.map(withHandle))
            nested++
            Promise.resolve(made).then(ended, ended)
            return made
          }
        }
        return typeof found === 'function' && name !== 'constructor' ? found.bind(target) : found
      },
      apply(target, _, given) {
        checkOpen()
        return Reflect.apply(target as (...given: unknown[]) => unknown, undefined, given)
      },
    }),
  }
}

/** Turns a transaction that an ORM gives only to a callback into one that begins and ends by calls. */
export function openedBy<Tx>(transaction: (run: (tx: Tx) => Promise<void>) => Promise<unknown>): Promise<OpenTransaction<Tx>> {
  return new Promise((resolve, reject) => {
    const undone = new Error('rolled back')
    const done = transaction((tx) => new Promise((commit, undo) => {
      resolve({
        tx,
        commit: () => { commit(); return done },
        rollback: () => { undo(undone); return done.catch((error: unknown) => { if (error !== undone) throw error }) },
      })
    }))
    done.catch(reject)
  })
}
