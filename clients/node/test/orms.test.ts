/** request(), job() and transaction() in each ORM that has an adapter, against a server. */
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { PrismaPg } from '@prisma/adapter-pg'
import { drizzle } from 'drizzle-orm/node-postgres'
import { bigserial, pgTable, text } from 'drizzle-orm/pg-core'
import express from 'express'
import knex from 'knex'
import { Kysely, PostgresDialect, sql } from 'kysely'
import pg from 'pg'
import { Idempotency, TimedOut, TransactionEnded, type PoolLike } from 'pg-idempotency'
import { drizzlePool } from 'pg-idempotency/drizzle'
import { idempotent } from 'pg-idempotency/express'
import { knexPool } from 'pg-idempotency/knex'
import { kyselyPool } from 'pg-idempotency/kysely'
import { prismaPool } from 'pg-idempotency/prisma'
import { sequelizePool } from 'pg-idempotency/sequelize'
import { typeormPool } from 'pg-idempotency/typeorm'
import { Sequelize } from 'sequelize'
import { DataSource, EntitySchema } from 'typeorm'
import { PrismaClient } from './prisma-client.js'
import { key, Proxy, World } from './support.js'

// It has no types of its own.
const { default: Cursor } = await import('pg-cursor' as string)

let world: World
let proxy: Proxy
before(async () => {
  world = await World.make()
  world.proxy = proxy = await Proxy.start()
})
after(() => world.end())

const MAX = 4
const config = () => ({ host: '127.0.0.1', port: proxy.port, user: process.env['PGUSER'] ?? 'postgres', database: world.database, max: MAX })

interface Orm {
  pool: PoolLike<any>
  /** By the ORM's own means. */
  insert(tx: any, what: string): PromiseLike<unknown>
  /** A statement that is not the ORM's. */
  raw(tx: any, statement: string): PromiseLike<unknown>
  /** The ORM's own transaction in the transaction. */
  nested(tx: any, run: (inner: any) => Promise<void>): Promise<unknown>
  /** A transaction without us. */
  own(run: (tx: any) => Promise<void>): Promise<unknown>
  commit?(tx: any): Promise<unknown>
  /** A nested transaction that its own commit() ends. */
  begin?(tx: any): Promise<unknown>
  /** An insert that is made now, and sent by the function that it returns. */
  prepared?(tx: any, what: string): () => PromiseLike<unknown>
  /** All effects in pieces, if the test of pg's own streams does not cover it. */
  stream?(tx: any): AsyncIterable<unknown>
  /** Ends the connection below our transaction. */
  replace?(tx: any): Promise<unknown>
  end(): Promise<unknown>
  /** Whether it shows the pg client. */
  cancels: boolean
}

const effects = pgTable('effects', { id: bigserial({ mode: 'number' }).primaryKey(), what: text().notNull() })
const Effect = new EntitySchema<{ id: string; what: string }>({ name: 'effects', columns: { id: { type: 'bigint', primary: true, generated: true }, what: { type: 'text' } } })

const orms: Record<string, () => Promise<Orm>> = {
  async Knex() {
    const db = knex({ client: 'pg', connection: config(), pool: { min: 0, max: MAX } })
    return {
      pool: knexPool(db), cancels: true, end: () => db.destroy(),
      insert: (tx, what) => tx('effects').insert({ what }),
      raw: (tx, statement) => tx.raw(statement),
      nested: (tx, run) => tx.transaction(run),
      own: (run) => db.transaction(run),
      commit: (tx) => tx.commit(),
      begin: (tx) => tx.transaction(),
      replace: async (tx) => (await tx.client.acquireConnection()).end(),
    }
  },
  async Drizzle() {
    const pool = new pg.Pool(config())
    pool.on('error', () => undefined)
    const db = drizzle(pool, { schema: { effects } })
    return {
      pool: drizzlePool(db), cancels: true, end: () => pool.end(),
      insert: (tx, what) => tx.insert(effects).values({ what }),
      prepared: (tx, what) => {
        const builder = tx.insert(effects).values({ what })
        return () => builder
      },
      raw: (tx, statement) => tx.execute(statement),
      nested: (tx, run) => tx.transaction(run),
      own: (run) => db.transaction(run),
      replace: (tx) => tx.session.client.end(),
    }
  },
  async Kysely() {
    const pool = new pg.Pool(config())
    pool.on('error', () => undefined)
    // Of those in use, which Kysely does not listen to.
    pool.on('connect', (client) => client.on('error', () => undefined))
    const db = new Kysely<{ effects: { what: string } }>({ dialect: new PostgresDialect({ pool, cursor: Cursor }) })
    return {
      pool: kyselyPool(db, MAX), cancels: false, end: () => db.destroy(),
      insert: (tx, what) => tx.insertInto('effects').values({ what }).execute(),
      raw: (tx, statement) => sql.raw(statement).execute(tx),
      nested: (tx, run) => tx.transaction().execute(run),
      own: (run) => db.transaction().execute(run),
      commit: async (tx) => tx.commit().execute(),
      stream: (tx) => tx.withSchema('public').selectFrom('effects').select('what').stream(1),
    }
  },
  async TypeORM() {
    const { user, ...rest } = config()
    const source = await new DataSource({ type: 'postgres', username: user, ...rest, poolSize: MAX, entities: [Effect], poolErrorHandler: () => undefined }).initialize()
    return {
      pool: typeormPool(source), cancels: true, end: () => source.destroy(),
      insert: (tx, what) => tx.getRepository(Effect).insert({ what }),
      raw: (tx, statement) => tx.query(statement),
      nested: (tx, run) => tx.transaction(run),
      own: (run) => source.transaction(run),
      commit: async (tx) => tx.release(),
      begin: async (tx) => { await tx.queryRunner.startTransaction(); return Object.assign(tx, { commit: () => tx.queryRunner.commitTransaction() }) },
      replace: async (tx) => { await tx.queryRunner.rollbackTransaction(); await tx.queryRunner.release() },
    }
  },
  async Prisma() {
    const prisma = new PrismaClient({ adapter: new PrismaPg(config(), { onPoolError: () => undefined }) })
    return {
      pool: prismaPool(prisma, MAX), cancels: false, end: () => prisma.$disconnect(),
      insert: (tx, what) => tx.effects.create({ data: { what } }),
      raw: (tx, statement) => tx.$executeRawUnsafe(statement),
      nested: (tx, run) => tx.$transaction(run),
      own: (run) => prisma.$transaction(run),
    }
  },
  async Sequelize() {
    const { user, ...rest } = config()
    const sequelize = new Sequelize({ dialect: 'postgres', username: user, ...rest, pool: { max: MAX }, logging: false })
    return {
      pool: sequelizePool(sequelize), cancels: true, end: () => sequelize.close(),
      insert: (transaction, what) => sequelize.query('INSERT INTO effects (what) VALUES ($1)', { bind: [what], transaction }),
      raw: (transaction, statement) => sequelize.query(statement, { transaction }),
      nested: (transaction, run) => sequelize.transaction({ transaction }, run),
      own: (run) => sequelize.transaction(run),
      commit: (tx) => tx.commit(),
    }
  },
}

const options = (one: string, more: object = {}) => ({ scope: 'scope', key: one, ...more })

for (const [name, make] of Object.entries(orms)) {
  test(name, async (context) => {
    const orm = await make()
    const idem = new Idempotency<any>(orm.pool)
    const makes = (what: string) => async (tx: any) => {
      await orm.insert(tx, what)
      return { status: 201, body: what }
    }
    const scenario = (what: string, run: (one: string) => Promise<void>) => context.test(what, () => run(key()))
    try {
      await scenario('a request takes effect once and is replayed, and its messages commit with it', async (one) => {
        for (const replayed of [false, true]) {
          const result = await idem.request(options(one, { method: 'POST', path: '/', body: '{"a": 1}' }), async (tx) => {
            await idem.on(tx).publish(one, { what: 'for ? and $1' }, { headers: { h: 1 } })
            assert.equal(await idem.once('scope', one).catch((error: Error) => error.name), 'TypeError', 'not on a second connection')
            return makes(one)(tx)
          })
          assert.deepEqual([result.status, result.body, result.replayed], [201, one, replayed])
        }
        assert.equal(await world.effects(one), 1)
        const [message] = await idem.outboxTake({ topics: [one] })
        assert.deepEqual([message!.payload, message!.headers], [{ what: 'for ? and $1' }, { h: 1 }])
        const bytes = key()
        await idem.request(options(bytes), () => ({ status: 200, body: Buffer.from([0, 255]) }))
        assert.deepEqual((await idem.lookup('scope', bytes))!.responseBytes, Buffer.from([0, 255]))
      })
      await scenario('an error rolls back, and a response that is not stored', async (one) => {
        await assert.rejects(idem.request(options(one), async (tx) => { await orm.insert(tx, one); throw new Error('no') }), /^Error: no$/)
        assert.equal((await idem.request(options(one), async (tx) => ({ ...await makes(one)(tx), status: 503 }))).stored, false)
        assert.equal(await idem.lookup('scope', one), undefined)
        assert.equal(await world.effects(one), 0)
      })
      await scenario("the ORM's own transaction is a savepoint", async (one) => {
        await idem.request(options(one), async (tx) => {
          await orm.insert(tx, one)
          await assert.rejects(orm.nested(tx, async (inner) => {
            await orm.insert(inner, `${one} undone`)
            throw new Error('undo')
          }), /undo/)
          await assert.rejects(Promise.resolve(orm.nested(tx, async (inner) => { await orm.raw(inner, 'SELECT 1 / 0') })))
          await orm.nested(tx, async (inner) => {
            await orm.insert(inner, `${one} kept`)
            await idem.on(inner).once('scope', one)
          })
          return { status: 200 }
        })
        assert.deepEqual([await world.effects(one), await world.effects(`${one} undone`), await world.effects(`${one} kept`)], [1, 0, 1])
        assert.equal(await idem.once('scope', one), false)
      })
      await scenario('40001 runs again', async (one) => {
        let tries = 0
        await idem.request(options(one), async (tx) => {
          if (++tries < 3) await orm.raw(tx, "DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
          return makes(one)(tx)
        })
        assert.deepEqual([tries, await world.effects(one)], [3, 1])
      })
      await scenario('a handler that swallows an error of the database does not succeed', async (one) => {
        const swallow = async (tx: any) => {
          await orm.insert(tx, one)
          await Promise.resolve(orm.raw(tx, 'SELECT 1 / 0')).catch(() => undefined)
          return { status: 200 }
        }
        await assert.rejects(idem.request(options(one), swallow), TransactionEnded)
        await assert.rejects(idem.transaction(swallow), TransactionEnded)
        assert.equal(await world.effects(one), 0)
      })
      await scenario('the handler can neither end the transaction nor use it behind its end', async (one) => {
        if (orm.commit) await assert.rejects(idem.request(options(one), async (tx) => { await orm.commit!(tx); return { status: 200 } }), TransactionEnded)
        let kept: any
        await idem.request(options(one), (tx) => { kept = tx; return { status: 200 } })
        await assert.rejects(async () => { await orm.insert(kept, one) })
        await assert.rejects(idem.request(options(key()), async (tx) => {
          await orm.insert(tx, one)
          await orm.raw(tx, 'ROLLBACK')
          return { status: 200 }
        }), /rolled its transaction back/)
        assert.equal(await world.effects(one), 0)
      })
      await scenario('a nested transaction that the handler leaves open is rolled back, and reaches no later request', async (one) => {
        let open!: () => void
        const gate = new Promise<void>((resolve) => { open = resolve })
        let floating: Promise<unknown> | undefined
        await assert.rejects(idem.request(options(one), async (tx) => {
          await orm.insert(tx, one)
          await new Promise<void>((entered, failed) => {
            floating = orm.nested(tx, async (inner) => {
              await orm.insert(inner, one)
              entered()
              await gate
              await orm.insert(inner, one)
            }).catch(failed)
          })
          return { status: 201 }
        }), /nested transaction/)
        const others = Array.from({ length: MAX }, (_, at) => `${one}${at}`)
        await Promise.all(others.map((other) => idem.request(options(other), async (tx) => {
          await orm.insert(tx, other)
          open()
          await floating
          return { status: 201 }
        })))
        assert.equal(await world.effects(one), 0)
        for (const other of others) assert.equal(await world.effects(other), 1)
      })
      await scenario('a statement that fails late, and that nothing awaits, is no success', async (one) => {
        for (const late of [0, 1, 2, 5]) {
          const answer = await idem.request(options(`${one}${late}`), async (tx) => {
            await orm.insert(tx, one)
            const fails = async (): Promise<void> => {
              for (let ticks = 0; ticks < late; ticks++) await Promise.resolve()
              await orm.raw(tx, 'SELECT 1 / 0')
            }
            fails().catch(() => undefined)
            return { status: 201 }
          }).then((result) => result.status, (error: unknown) => {
            assert.ok(error instanceof TransactionEnded, String(error))
            return 500
          })
          // If it comes after the transaction, it is refused and changes nothing.
          assert.equal(await world.effects(one), answer === 201 ? 1 : 0)
          await world.sql('DELETE FROM effects WHERE what = $1', [one])
        }
      })
      await scenario('two nested transactions at the same time do not undo each other', async (one) => {
        const answer = await idem.request(options(one), async (tx) => {
          const one_ = orm.nested(tx, async (inner) => { await orm.insert(inner, one); await sleep(20) })
          const other = (async () => orm.nested(tx, async () => { await sleep(60); throw new Error('other') }))()
          const [first] = await Promise.allSettled([one_, other])
          return { status: first.status === 'fulfilled' ? 201 : 500 }
        }).then((result) => result.status, () => 500)
        assert.equal(await world.effects(one), answer === 201 ? 1 : 0)
      })
      await scenario('no transaction that is made from the handle ends it', async (one) => {
        if (name !== 'Kysely') return
        const ways: ((tx: any) => Promise<unknown>)[] = [
          async (tx) => (await tx.savepoint('a').execute()).commit().execute(), async (tx) => tx.withSchema('public').commit().execute(),
          (tx) => tx.transaction().execute((inner: any) => inner.rollback().execute()),
        ]
        for (const way of ways) {
          const own = key()
          await assert.rejects(idem.request(options(own), async (tx) => { await orm.insert(tx, one); await way(tx); return { status: 201 } }), TransactionEnded)
          assert.deepEqual([await world.effects(one), await idem.lookup('scope', own)], [0, undefined])
        }
        await idem.request(options(one), async (tx) => {
          await tx.withSchema('public').transaction().execute((inner: any) => orm.insert(inner, one))
          return { status: 201 }
        })
        assert.equal(await world.effects(one), 1)
      })
      await scenario('a statement that was made in the transaction does not run after it', async (one) => {
        if (!orm.prepared) return
        let kept!: () => PromiseLike<unknown>
        let nested!: () => PromiseLike<unknown>
        await idem.request(options(one), async (tx) => {
          kept = orm.prepared!(tx, one)
          await orm.nested(tx, async (inner) => { nested = orm.prepared!(inner, one) })
          return { status: 201 }
        })
        for (const send of [kept, nested]) await assert.rejects(async () => { await send() }, ({ message, cause }) => /has ended/.test(`${message} ${cause?.message}`))
        assert.equal(await world.effects(one), 0)
      })
      await scenario('a nested transaction that begins without a callback', async (one) => {
        if (!orm.begin) return
        for (const ends of [false, true]) {
          const answer = idem.request(options(key()), async (tx) => {
            await orm.insert(tx, one)
            const inner: any = await orm.begin!(tx)
            await orm.insert(inner, one)
            if (ends) await inner.commit()
            return { status: 201 }
          })
          if (ends) await answer
          else await assert.rejects(answer, /nested transaction/)
          assert.equal(await world.effects(one), ends ? 2 : 0)
        }
      })
      await scenario('a stream that the handler leaves unread ends the request at once', async (one) => {
        if (!orm.stream) return
        const began = performance.now()
        const reads = async (how: 'part' | 'throws' | 'breaks' | 'all') => idem.request(options(key()), async (tx) => {
          await orm.insert(tx, one)
          await orm.insert(tx, one)
          const stream = orm.stream!(tx)
          if (how === 'breaks') for await (const _ of stream) break
          else if (how === 'all') for await (const _ of stream) continue
          else await stream[Symbol.asyncIterator]().next()
          if (how === 'throws') throw new Error('no')
          return { status: 201 }
        })
        await assert.rejects(reads('part'), TransactionEnded)
        await assert.rejects(reads('throws'), /^Error: no$/)
        assert.equal(await world.effects(one), 0)
        for (const how of ['breaks', 'all'] as const) await reads(how)
        assert.equal(await world.effects(one), 4)
        assert.ok(performance.now() - began < 20_000, 'without the time limit of 30 s of an answer')
      })
      await scenario('a handler that ends its connection itself runs once', async (one) => {
        if (!orm.replace) return
        let tries = 0
        await assert.rejects(idem.request(options(one), async (tx) => {
          tries++
          await orm.insert(tx, one)
          await orm.replace!(tx)
          return { status: 201 }
        }))
        assert.deepEqual([tries, await world.effects(one)], [1, 0])
        assert.equal((await idem.request(options(one), makes(one))).status, 201)
      })
      await scenario('a job', async (one) => {
        for (const replayed of [false, true]) {
          const result = await idem.job(options(one), async (job) => {
            const value = await job.step('charge', () => 'ch_1')
            await job.finish((tx) => makes(one + value)(tx))
          })
          assert.deepEqual([result.body, result.replayed], [`${one}ch_1`, replayed])
        }
        assert.equal(await world.effects(`${one}ch_1`), 1)
      })
      await scenario('on(): in a transaction of your own', async (one) => {
        await assert.rejects(orm.own(async (tx) => {
          assert.equal(await idem.on(tx).once('scope', one), true)
          assert.deepEqual(await idem.on(tx).onceMany('scope', [one, 'what? $1']), ['what? $1'])
          throw new Error('undo')
        }), /undo/)
        assert.equal(await idem.once('scope', one), true)
        await orm.own(async (tx) => assert.rejects(idem.on(tx).claim('scope', 'short'), { name: 'KeyInvalid' })).catch(() => undefined)
      })
      await scenario('many duplicates at once', async (one) => {
        const results = await Promise.all(Array.from({ length: 30 }, () => idem.request(options(one, { wait: '20 seconds' }), makes(one))))
        assert.equal(results.filter(({ replayed }) => !replayed).length, 1)
        assert.equal(await world.effects(one), 1)
      })
      await scenario('the answer to COMMIT is lost', async (one) => {
        let tries = 0
        const result = await idem.request(options(one), async (tx) => {
          if (++tries === 1) proxy.cutAfter = 'COMMIT'
          return makes(one)(tx)
        })
        assert.equal(proxy.cutAfter, undefined)
        assert.deepEqual([result.status, result.replayed, tries], [201, true, 1])
        assert.equal(await world.effects(one), 1)
      })
      await scenario('a handler that is out of time', async (one) => {
        const began = performance.now()
        const marked = `SELECT pg_sleep(${orm.cancels ? 30 : 3}) /* ${one} */`
        await assert.rejects(idem.request(options(one, { timeoutMs: 500 }), async (tx) => {
          await orm.insert(tx, one)
          await orm.raw(tx, marked)
          return { status: 200 }
        }), TimedOut)
        assert.ok(performance.now() - began < 2900, 'nobody waits for its statement')
        for (let tries = 0; ; tries++) {
          const [{ n }] = await world.sql("SELECT count(*)::int AS n FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND state <> 'idle' AND query LIKE $1", [`%${one}%`])
          if (n === 0) break
          assert.ok(tries < 100, 'its statement has ended')
          await sleep(100)
        }
        assert.equal(await world.effects(one), 0)
      })
      await scenario('in a middleware', async (one) => {
        const app = express()
        const guarded = idempotent(idem, { scope: () => 'scope' })
        app.post('/', guarded(async (req, res) => {
          await orm.insert(req.idempotency.tx, one)
          res.status(201).json({ what: one })
        }))
        const server = app.listen(0, '127.0.0.1')
        await new Promise((resolve) => server.on('listening', resolve))
        const port = (server.address() as { port: number }).port
        for (const replayed of [null, 'true']) {
          const answer = await fetch(`http://127.0.0.1:${port}/`, { method: 'POST', headers: { 'Idempotency-Key': one } })
          assert.deepEqual([answer.status, answer.headers.get('Idempotent-Replayed'), await answer.json()], [201, replayed, { what: one }])
        }
        server.close()
        server.closeAllConnections()
        assert.equal(await world.effects(one), 1)
      })
      await scenario('all connections have come back', async (one) => {
        for (let tries = 0; ; tries++) {
          const [{ n }] = await world.sql("SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'")
          if (n === 0) break
          assert.ok(tries < 100)
          await sleep(50)
        }
        await Promise.all(Array.from({ length: 2 * MAX }, (_, at) => idem.request(options(`${one}${at}`), makes(one))))
        assert.equal(await world.effects(one), 2 * MAX)
      })
    } finally {
      await orm.end()
    }
  })
}

test('a Kysely of an application in CommonJS is served', () => {
  const commonJs = createRequire(import.meta.url)('kysely') as typeof import('kysely')
  assert.notEqual(commonJs.Kysely, Kysely)
  kyselyPool(new commonJs.Kysely<object>({ dialect: new commonJs.PostgresDialect({ pool: {} as never }) }) as never)
})

test('what no adapter can serve is refused when the pool is made', async () => {
  assert.throws(() => knexPool(knex({ client: 'mysql2' })), /client 'pg', but this one has the dialect mysql/)
  const client = new pg.Client()
  assert.throws(() => drizzlePool(drizzle(client) as never), /a single client and other drivers/)
  assert.throws(() => typeormPool({ options: { type: 'mysql' } } as never), /the type 'postgres', but this one has mysql/)
  assert.throws(() => prismaPool({ _activeProvider: 'mysql' } as never), /provider postgresql, but this one has mysql/)
  assert.throws(() => sequelizePool({ getDialect: () => 'sqlite' } as never), /dialect postgres, but this one has sqlite/)
  const { SqliteDialect } = await import('kysely')
  assert.throws(() => kyselyPool(new Kysely<object>({ dialect: new SqliteDialect({ database: {} as never }) })), /Kysely for PostgreSQL, but this one has a SqliteAdapter/)
})
