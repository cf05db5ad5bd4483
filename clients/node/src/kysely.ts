/** Requests and jobs in Kysely: new Idempotency(kyselyPool(db)). The handler gets a ControlledTransaction, whose transaction() is a savepoint. */
import { CompiledQuery, type ControlledTransaction, type Kysely, type QueryExecutor } from 'kysely'
import { NOT_ENDED, ONE_NESTED, poolOver } from './adapter.js'
import { TransactionEnded } from './errors.js'
import type { Row } from './functions.js'
import type { PoolLike } from './postgres.js'

type Controlled<DB> = ControlledTransaction<DB, any>

/** max is the size of the dialect's pool, which Kysely does not report. */
export function kyselyPool<DB>(db: Kysely<DB>, max?: number): PoolLike<Controlled<DB>> {
  const { adapter } = db.getExecutor()
  // Not instanceof, because CommonJS has another copy of Kysely's classes.
  if (!adapter.supportsReturning || !adapter.supportsTransactionalDdl) throw new TypeError(`kyselyPool() needs a Kysely for PostgreSQL, but this one has a ${adapter.constructor.name}`)
  return poolOver<Controlled<DB>>({
    max,
    async begin() {
      const nested = new Set<object>()
      const streams = new Set<Stream>()
      // A Kysely of its own, whose executor makes the executors of the transaction.
      const own = db.withPlugin({ transformQuery: ({ node }) => node, transformResult: async ({ result }) => result })
      watchStreams(own.getExecutor(), streams)
      const tx = await own.startTransaction().execute()
      const [commit, undo] = [tx.commit.bind(tx), tx.rollback.bind(tx)]
      const rollback = async (): Promise<void> => {
        // The connection is locked until each stream has ended.
        await Promise.all([...streams].map((stream) => stream.return(undefined).catch(() => undefined)))
        await undo().execute()
      }
      return {
        tx: withSavepoints(tx, nested), isNested: () => nested.size > 0, isUnread: () => streams.size > 0,
        // If COMMIT fails, only this returns the connection.
        commit: () => commit().execute().catch((error: unknown) => {
          const failure = tx.isRolledBack ? new TransactionEnded('the server rolled the transaction back', { cause: error }) : error
          return rollback().catch(() => undefined).then(() => { throw failure })
        }),
        rollback,
      }
    },
    async query(text, values, tx) {
      return (await (tx ?? db).withoutPlugins().executeQuery<Row>(CompiledQuery.raw(text, values))).rows
    },
  })
}

type Stream = AsyncGenerator<unknown, void>

/** Adds the streams of an executor, and of those made from it, that have begun and not ended. */
function watchStreams(executor: QueryExecutor, streams: Set<Stream>): void {
  const own = executor as unknown as Record<string, (...given: unknown[]) => unknown>
  const { stream } = own
  own['stream'] = (...given) => {
    const made = stream!.apply(executor, given) as Stream
    const read = async function* (): Stream {
      streams.add(watched)
      try {
        yield* made
      } finally {
        streams.delete(watched)
      }
    }
    const watched = read()
    return watched
  }
  for (const name of ['withConnectionProvider', 'withPlugin', 'withPlugins', 'withPluginAtFront', 'withoutPlugins']) {
    const make = own[name]!
    own[name] = (...given) => {
      const made = make.apply(executor, given) as QueryExecutor
      watchStreams(made, streams)
      return made
    }
  }
}

/**
 * Changes a transaction and all that are made from it: transaction(), which Kysely
 * refuses, is a savepoint, and commit() and rollback() are refused. nested has the
 * transactions that have not ended.
 */
function withSavepoints<DB>(tx: Controlled<DB>, nested: Set<object>): Controlled<DB> {
  const own = tx as unknown as Record<string, (...given: unknown[]) => unknown>
  const derived = (name: string, wrap: (made: any) => unknown): void => {
    const make = own[name]!
    own[name] = (...given) => wrap(make.apply(tx, given))
  }
  for (const name of ['withPlugin', 'withoutPlugins', 'withSchema', 'withTables']) derived(name, (made) => withSavepoints(made, nested))
  for (const name of ['savepoint', 'releaseSavepoint', 'rollbackToSavepoint']) {
    derived(name, (command) => ({ execute: async () => withSavepoints(await command.execute(), nested) }))
  }
  own['commit'] = own['rollback'] = () => { throw new TransactionEnded(NOT_ENDED) }
  let running = false
  const execute = async <T>(run: (inner: Controlled<DB>) => Promise<T>): Promise<T> => {
    if (running) throw new TypeError(ONE_NESTED)
    running = true
    const name = `nested_${nested.size + 1}`
    try {
      const inner = await (tx as ControlledTransaction<DB>).savepoint(name).execute() as Controlled<DB>
      try {
        const result = await run(inner)
        await inner.releaseSavepoint(name as never).execute()
        return result
      } catch (error) {
        await inner.rollbackToSavepoint(name as never).execute()
        throw error
      }
    } finally {
      running = false
    }
  }
  const mode = (): never => {
    throw new TypeError('a savepoint has the isolation level and the access mode of its transaction')
  }
  const counted = <T>(run: (inner: Controlled<DB>) => Promise<T>): Promise<T> => {
    const made = execute(run)
    nested.add(made)
    return made.finally(() => nested.delete(made))
  }
  const builder = { execute: counted, setIsolationLevel: mode, setAccessMode: mode }
  return Object.defineProperty(tx, 'transaction', { configurable: true, value: () => builder })
}
