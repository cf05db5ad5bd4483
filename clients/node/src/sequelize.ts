/** Requests and jobs in Sequelize 6: new Idempotency(sequelizePool(sequelize)). The handler gets a Transaction, for the option transaction of each call. */
import type { QueryTypes, Sequelize, Transaction } from 'sequelize'
import { ONE_NESTED, poolOver } from './adapter.js'
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
      refuseTwoSavepoints(tx as unknown as Nested)
      return {
        tx, ends: ['commit', 'rollback', 'cleanup', 'forceCleanup'], client: (tx as { connection?: any }).connection,
        isNested: () => (tx as unknown as Nested).savepoints.some(isOpen),
        commit: () => tx.commit(),
        rollback: () => tx.rollback(),
      }
    },
    async query(text, values, tx) {
      // null prevents Sequelize from using the transaction of CLS. useMaster, which its types do not have, prevents it from using a replica.
      return await sequelize.query(text, { bind: values, transaction: tx ?? null, type: 'SELECT' as QueryTypes.SELECT, raw: true, ...{ useMaster: true } }) as Row[]
    },
  })
}

/** The members of a transaction of Sequelize that its types do not have. */
interface Nested { finished?: string; savepoints: Nested[] }
const isOpen = ({ finished }: Nested): boolean => finished === undefined

function refuseTwoSavepoints({ savepoints }: Nested): void {
  savepoints.push = (nested) => {
    if (savepoints.some(isOpen)) throw new TypeError(ONE_NESTED)
    refuseTwoSavepoints(nested)
    return Array.prototype.push.call(savepoints, nested)
  }
}
