/**
 * Requests and jobs in Prisma's interactive transactions: new
 * Idempotency(prismaPool(prisma)). The handler gets the argument that
 * prisma.$transaction() passes to its callback.
 */
import { openedBy, poolOver } from './adapter.js'
import type { Row } from './functions.js'
import { ANSWER_MS, type PoolLike } from './postgres.js'
import { LONGEST_TIMER } from './values.js'

/** The members of a generated PrismaClient that we use. */
export interface PrismaLike {
  $transaction(run: (tx: any) => Promise<any>, options?: { maxWait?: number; timeout?: number }): Promise<any>
  $queryRawUnsafe(text: string, ...values: any[]): PromiseLike<any>
}
type TransactionOf<Prisma> = Prisma extends { $transaction<R>(run: (tx: infer Tx) => Promise<R>, options?: any): Promise<R> } ? Tx & object : any

/** max is the size of the driver adapter's pool, which Prisma does not report. */
export function prismaPool<Prisma extends PrismaLike>(prisma: Prisma, max?: number): PoolLike<TransactionOf<Prisma>> {
  const { _activeProvider: provider } = prisma as { _activeProvider?: string }
  if (provider !== 'postgresql') throw new TypeError(`prismaPool() needs a PrismaClient with the provider postgresql, but this one has ${provider}`)
  return poolOver<TransactionOf<Prisma>>({
    max,
    // By default, these are 2 and 5 seconds. Our own timeout ends the transaction.
    begin: () => openedBy((run) => prisma.$transaction(run, { maxWait: ANSWER_MS, timeout: LONGEST_TIMER })),
    query: async (text, values, tx) => await ((tx ?? prisma) as Prisma).$queryRawUnsafe(text, ...values) as Row[],
  })
}
