/** Requests and jobs in Sequelize 6: new Idempotency(sequelizePool(sequelize)). The handler gets a Transaction, for the option transaction of each call. */
import type { QueryTypes, Sequelize, Transaction } from 'sequelize'
import { poolOver } from './adapter.js'
import type { Row } from './functions.js'
import type { PoolLike } from './postgres.js'

export function sequelizePool(sequelize: Sequelize): PoolLike<Transaction> {
  if (sequelize.getDialect() !== 'postgres') {
    throw new TypeError(`sequelizePool() needs a Sequelize with the dialect postgres, but this one has ${sequelize.getDialect()}`)
  }
  return poolOver<Transaction>({
    max: (sequelize as { options?: { pool?: { max?: number } } }).options?.pool?.max ?? 5,
    async begin() {
      const tx = await sequelize.transaction()
      return {
        tx, ends: ['commit', 'rollback', 'cleanup', 'forceCleanup'], client: (tx as { connection?: any }).connection,
        isNested: () => (tx as unknown as { savepoints: { finished?: string }[] }).savepoints.some(({ finished }) => finished === undefined),
        commit: () => tx.commit(),
        rollback: () => tx.rollback(),
      }
    },
    async query(text, values, tx) {
      // null prevents Sequelize from using the transaction of CLS.
      return await sequelize.query(text, { bind: values, transaction: tx ?? null, type: 'SELECT' as QueryTypes.SELECT, raw: true }) as Row[]
    },
  })
}
