/** Requests and jobs in Knex: new Idempotency(knexPool(knex)). The handler gets a Knex.Transaction. */
import type { Knex } from 'knex'
import { poolOver } from './adapter.js'
import type { PoolLike } from './postgres.js'

export function knexPool<Record extends object = any>(knex: Knex<Record>): PoolLike<Knex.Transaction<Record>> {
  const { dialect, config } = knex.client as { dialect?: string; config?: Knex.Config }
  if (dialect !== 'postgresql') throw new TypeError(`knexPool() needs a Knex with the client 'pg', but this one has the dialect ${dialect}`)
  return poolOver<Knex.Transaction<Record>>({
    max: config?.pool?.max ?? 10,
    async begin() {
      const tx: Knex.Transaction<Record> = await knex.transaction()
      // commit() does not report its own error; this promise does.
      const done = tx.executionPromise
      done.catch(() => undefined)
      // Every nested transaction begins here, also one without a callback, which ends by its own commit().
      const client = tx.client as { transaction(...given: unknown[]): PromiseLike<unknown> }
      const { transaction } = client
      let nested = 0
      const ended = (): void => { nested-- }
      client.transaction = (...given) => {
        const made = transaction.apply(client, given)
        nested++
        made.then(ended, ended)
        return made
      }
      return {
        tx, queues: true, isNested: () => nested > 0, ends: ['commit', 'rollback'], client: await (tx.client as { acquireConnection(): Promise<any> }).acquireConnection(),
        commit: () => tx.commit().then(() => done),
        rollback: () => tx.rollback().then(() => done),
      }
    },
    async query(text, values, tx) {
      // Knex takes parameters as ?, in the order of the text.
      const order: (string | null)[] = []
      const sql = text.replaceAll('?', '\\?').replace(/\$(\d+)/g, (_, number: string) => {
        order.push(values[Number(number) - 1]!)
        return '?'
      })
      return (await (tx ?? knex).raw(sql, order) as { rows: never[] }).rows
    },
  })
}
