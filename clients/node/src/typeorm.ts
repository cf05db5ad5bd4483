/** Requests and jobs in TypeORM: new Idempotency(typeormPool(dataSource)). The handler gets an EntityManager. */
import type { DataSource, EntityManager } from 'typeorm'
import { poolOver } from './adapter.js'
import type { PoolClientLike, PoolLike } from './postgres.js'

export function typeormPool(dataSource: DataSource): PoolLike<EntityManager> {
  const { options } = dataSource
  if (options.type !== 'postgres') throw new TypeError(`typeormPool() needs a DataSource of the type 'postgres', but this one has ${options.type}`)
  return poolOver<EntityManager>({
    max: (options.extra as { max?: number } | undefined)?.max ?? options.poolSize ?? 10,
    async begin() {
      const runner = dataSource.createQueryRunner()
      const end = (how: Promise<void>): Promise<void> => how.finally(() => runner.release())
      try {
        await runner.startTransaction()
      } catch (error) {
        await runner.release()
        throw error
      }
      return {
        tx: runner.manager, ends: ['release'], isNested: () => (runner as unknown as { transactionDepth: number }).transactionDepth > 1, client: await runner.connect() as PoolClientLike,
        commit: () => end(runner.commitTransaction()),
        rollback: () => end(runner.rollbackTransaction()),
      }
    },
    query: (text, values, tx) => (tx ?? dataSource.manager).query(text, values),
  })
}
