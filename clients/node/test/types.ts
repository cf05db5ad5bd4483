/** Code that must compile in strict mode; it is not run. */
import { drizzle, type NodePgDatabase } from 'drizzle-orm/node-postgres'
import { pgTable, text } from 'drizzle-orm/pg-core'
import express from 'express'
import Fastify from 'fastify'
import type { Knex } from 'knex'
import type { Kysely } from 'kysely'
import type pg from 'pg'
import { Idempotency, type Client } from 'pg-idempotency'
import { drizzlePool } from 'pg-idempotency/drizzle'
import { idempotent } from 'pg-idempotency/express'
import idempotency, { type RouteOptions } from 'pg-idempotency/fastify'
import { knexPool } from 'pg-idempotency/knex'
import { kyselyPool } from 'pg-idempotency/kysely'
import { MemoryIdempotency } from 'pg-idempotency/memory'
import { sequelizePool } from 'pg-idempotency/sequelize'
import { typeormPool } from 'pg-idempotency/typeorm'
import type { Sequelize } from 'sequelize'
import type { DataSource } from 'typeorm'

interface Charge { id: string; amount: number }
declare const pool: pg.Pool
const table = pgTable('t', { a: text() })

/** A repository as it was before. */
async function order(client: pg.PoolClient): Promise<string> {
  const { rows } = await client.query<{ id: string }>('SELECT 1 AS id')
  return rows[0]!.id
}

export async function core(): Promise<void> {
  const idem = new Idempotency(pool)
  await idem.job({ scope: 'a', key: 'b' }, async (job) => {
    const charge = await job.step('charge', async (): Promise<Charge> => ({ id: 'x', amount: 1 }))
    await job.step('mail', async () => { console.log(charge.id) })
    await job.finish(async (tx) => ({ status: 200, body: await order(tx) }))
  })
  await idem.request({ scope: 'a', key: 'b' }, async (tx) => {
    await drizzle(tx).execute('SELECT 1')
    return { status: 200, body: await order(tx) }
  })
  const body: string = await idem.transaction(order)
  console.log(body)
}

/** In an ORM, the handler gets the ORM's own object. */
export async function orms(db: NodePgDatabase<{ t: typeof table }>, builder: Knex, kysely: Kysely<{ t: { a: string } }>, source: DataSource, sequelize: Sequelize) {
  const options = { scope: 'a', key: 'b' }
  await new Idempotency(drizzlePool(db)).request(options, async (tx) => {
    await tx.insert(table).values({ a: 'x' })
    const found: { a: string | null } | undefined = await tx.query.t.findFirst()
    return { status: 200, body: found?.a }
  })
  await new Idempotency(knexPool(builder)).request(options, async (tx) => ({ status: 200, body: (await tx<{ a: string }>('t').first())?.a }))
  await new Idempotency(kyselyPool(kysely)).request(options, async (tx) => ({ status: 200, body: (await tx.selectFrom('t').select('a').executeTakeFirstOrThrow()).a }))
  await new Idempotency(typeormPool(source)).request(options, async (manager) => ({ status: 200, body: String(await manager.count('t')) }))
  const idem = new Idempotency(sequelizePool(sequelize))
  await idem.request(options, async (transaction) => {
    await sequelize.query('SELECT 1', { transaction })
    return { status: 200 }
  })
  idempotent(idem, { scope: () => 'a' })(async (req, res) => {
    await sequelize.query('SELECT 1', { transaction: req.idempotency.tx })
    res.json({})
  })
}

/** What is to run over either. */
const place = (client: Client<any>) => client.request({ scope: 'a', key: 'b' }, () => ({ status: 200 }))
export const either = () => [place(new Idempotency(pool)), place(new MemoryIdempotency())]

export function routes(idem: Idempotency): void {
  const app = express()
  const guarded = idempotent(idem, { scope: (req) => req.get('X-User') })
  app.post('/any', guarded(async (req, res) => {
    const { tx, key } = req.idempotency
    const { rows } = await tx.query<Charge>('SELECT 1', [req.body.sku, key, req.user.id])
    res.status(201).json(rows[0]!.amount)
  }))
  app.post('/response', guarded(async (_req, res) => {
    res.status(201).location('/a').set({ 'X-A': '1' }).type('text').json({ a: 1 })
    // @ts-expect-error: no method of a response
    res.jsn({ a: 1 })
    // @ts-expect-error: no status
    res.status('201')
  }))
  // @ts-expect-error: what the guard does not know
  app.post('/wrong', guarded(async (_req, res) => { res.end() }, { wat: 1 }))
  app.post('/typed/:id', guarded(async (req: express.Request, res: express.Response) => { res.json(req.params['id']) }))
  app.post('/job', guarded.job(async (req, res) => {
    res.json(await req.idempotency.job.step('charge', async ({ key }): Promise<Charge> => ({ id: key, amount: 1 })))
  }, { lease: '1 minute' }))
  const typed = idempotent(idem, { scope: (req: express.Request) => req.get('X-User') ?? 'nobody' })
  app.post('/said', typed(async (req, res) => { res.json([req.get('X-User'), req.idempotency.key, req.rawBody.length]) }))
}

export async function plugin(idem: Idempotency): Promise<void> {
  const server = Fastify()
  await server.register(idempotency, { client: idem, scope: (request) => String(request.headers['x-user']) })
  server.post<{ Body: { sku: string } }>('/orders', { config: { idempotency: true } }, async (request, reply) => {
    await order(request.idempotency.tx)
    return reply.code(201).send({ sku: request.body.sku, bytes: request.rawBody.length })
  })
  const own: RouteOptions = { job: true, lease: '1 minute' }
  server.post('/payments', { config: { idempotency: own } }, async (request) => request.idempotency.job.step('charge', ({ key }) => key))
  // @ts-expect-error: what the plugin does not know
  server.post('/wrong', { config: { idempotency: { lease: 5 } } }, async () => 'never')
  // Fastify infers the type of a config from what it is, so that this is refused when the route is made, unless it says what it is.
  server.post('/wrong', { config: { idempotency: { wat: 1 } } }, async () => 'never')
  // @ts-expect-error: what the plugin does not know
  server.post('/wrong', { config: { idempotency: { wat: 1 } satisfies RouteOptions } }, async () => 'never')
  // @ts-expect-error: what the plugin does not know
  await server.register(idempotency, { client: idem, scope: () => 'ann', wat: 1 })
}

export async function records(idem: Idempotency): Promise<void> {
  for (const message of await idem.outboxTake()) message.payload = null
}
