/** Requests and jobs in Drizzle: new Idempotency(drizzlePool(db)). The handler gets the argument that db.transaction() passes to its callback. */
import { sql } from 'drizzle-orm'
import type { NodePgDatabase, NodePgTransaction } from 'drizzle-orm/node-postgres'
import type { Pool, PoolClient } from 'pg'
import { openedBy, poolOver } from './adapter.js'
import { TransactionEnded } from './errors.js'
import type { Row } from './functions.js'
import type { PoolClientLike, PoolLike } from './postgres.js'

/** The transaction of db.transaction(). */
type TransactionOf<Db> = Db extends { transaction(run: (tx: infer Tx) => Promise<any>, ...more: any[]): any } ? Tx & object : never

export function drizzlePool<Db extends NodePgDatabase<any>>(db: Db): PoolLike<TransactionOf<Db>> {
  const pool = (db as { $client?: Pool }).$client
  if (typeof pool?.connect !== 'function' || typeof pool.totalCount !== 'number') {
    throw new TypeError('drizzlePool() needs a database of drizzle-orm/node-postgres over a pg.Pool: a single client and other drivers are not supported')
  }
  if (!pool.listeners('acquire').includes(listen)) pool.on('acquire', listen)
  type Tx = TransactionOf<Db>
  return poolOver<Tx>({
    max: pool.options.max,
    async begin() {
      let taken: PoolClient | undefined
      const connect = async (): Promise<PoolClient> => taken = await pool.connect()
      // The transactions of withReplicas() are those of its primary.
      const primary = (db as { $primary?: any }).$primary ?? db
      const own = withOwn(primary, 'session', withOwn(primary.session, 'client', withOwn(pool, 'connect', connect)))
      const open = await openedBy<Tx>((run) => own.transaction((tx: Tx) => run(tx))).catch((error: unknown) => {
        // Drizzle keeps a client whose BEGIN has failed.
        taken?.release(true)
        throw error
      })
      const { session } = open.tx as unknown as { session?: { client?: any } }
      const client = session?.client
      if (client) session.client = untilRelease(client)
      return { ...open, client }
    },
    async query(text, values, tx) {
      return (await ((tx ?? db) as NodePgTransaction<any, any>).execute(statement(text, values))).rows as Row[]
    },
  })
}

/** Drizzle does not listen to the client of a transaction, and an 'error' without a listener ends the process. Its statements fail, too. */
function listen(client: PoolClient): void {
  if (!client.listeners('error').includes(ignore)) client.on('error', ignore)
}
const ignore = (): void => undefined

/** An object with another value of one property. */
const withOwn = <T extends object>(object: T, name: string, value: unknown): T => Object.create(object, { [name]: { value } }) as T

/** Turns $1 into a parameter of Drizzle. */
function statement(text: string, values: (string | null)[]): ReturnType<typeof sql> {
  return sql.join(text.split(/\$(\d+)/).map((part, at) => (at % 2 === 0 ? sql.raw(part) : sql`${values[Number(part) - 1]}`)))
}

/**
 * A client that refuses statements after its release. Builders and nested
 * transactions keep it, and would send them in another transaction.
 */
function untilRelease(client: PoolClientLike): PoolClientLike {
  let over = false
  return new Proxy(client, {
    get(target, name) {
      if (over && name === 'query') return () => Promise.reject(new TransactionEnded('the transaction of this handle has ended'))
      const found: unknown = Reflect.get(target, name, target)
      if (typeof found !== 'function') return found
      return (...given: unknown[]): unknown => {
        if (name === 'release') over = true
        return Reflect.apply(found, target, given)
      }
    },
  })
}
