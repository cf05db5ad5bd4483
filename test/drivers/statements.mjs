// The statements of docs/drivers.md with pg, postgres.js, Sequelize, knex and drizzle, on the database that libpq's
// variables name.

import { createRequire } from 'node:module'

// The packages are in the directory that is given, not beside this file.
const load = createRequire(`${process.argv[2]}/`)
const pg = load('pg')
const postgres = load('postgres')
const { QueryTypes, Sequelize } = load('sequelize')
const knex = load('knex')
const { drizzle } = load('drizzle-orm/node-postgres')
const { sql: drizzleSql } = load('drizzle-orm')

const CLAIM = `SELECT outcome, claim_token, response_status, response_body
FROM idem_claim($1::text, $2::text, idem_request_hash($3::text, $4::text, $5::text), wait => make_interval(secs => $6::float8))`
const COMPLETE = 'SELECT idem_complete($1::text, $2::text, $3::int, $4::text, $5::text::json, $6::bigint)'
const COMPLETE_BYTES = 'SELECT idem_complete($1::text, $2::text, $3::int, $4::bytea)'
const PUBLISH = 'SELECT idem_publish($1::text, $2::text::jsonb, $3::text) AS message_id'
const ONCE = 'SELECT token FROM idem_once_many($1::text, $2::text[]) AS token'
const BYTES = 'SELECT response_bytes FROM idem_lookup($1::text, $2::text)'

const host = process.env.PGHOST
const database = process.env.PGDATABASE
const username = process.env.PGUSER
const port = Number(process.env.PGPORT ?? 5432)

/** Each driver: transaction(work) calls work with a function that runs a statement and returns its rows. */
const drivers = {
  async pg() {
    const client = new pg.Client()
    await client.connect()
    return {
      version: load('pg/package.json').version,
      async transaction(work) {
        await client.query('BEGIN')
        try {
          const result = await work(async (sql, values) => (await client.query(sql, values)).rows)
          await client.query('COMMIT')
          return result
        } catch (error) {
          await client.query('ROLLBACK')
          throw error
        }
      },
      sqlstate: (error) => error.code,
      end: () => client.end(),
    }
  },
  async 'postgres.js'() {
    const sql = postgres({ host, database, username, port, max: 1 })
    return {
      version: '3',
      transaction: (work) => sql.begin((tx) => work((text, values) => tx.unsafe(text, values))),
      sqlstate: (error) => error.code,
      end: () => sql.end(),
    }
  },
  async sequelize() {
    const sequelize = new Sequelize(database, username, null, { dialect: 'postgres', dialectModule: pg, host, port, logging: false })
    return {
      version: load('sequelize/package.json').version,
      transaction: (work) => sequelize.transaction((transaction) =>
        work((text, bind) => sequelize.query(text, { bind, transaction, type: QueryTypes.SELECT }))),
      sqlstate: (error) => error.original.code,
      end: () => sequelize.close(),
    }
  },
  async knex() {
    const builder = knex({ client: 'pg', connection: { host, database, user: username, port } })
    return {
      version: load('knex/package.json').version,
      transaction: (work) => builder.transaction((trx) =>
        work(async (text, values) => (await trx.raw(text.replace(/\$\d+/g, '?'), values)).rows)),
      sqlstate: (error) => error.code,
      end: () => builder.destroy(),
    }
  },
  async drizzle() {
    const pool = new pg.Pool()
    const parameters = (values) => values.map((value) => drizzleSql.param(value))
    return {
      version: '0.45',
      transaction: (work) => drizzle(pool).transaction((tx) =>
        work(async (text, values) => (await tx.execute(drizzleSql(text.split(/\$\d+/), ...parameters(values)))).rows)),
      sqlstate: (error) => error.cause.code,
      end: () => pool.end(),
    }
  },
}

for (const [name, connect] of Object.entries(drivers)) {
  const driver = await connect()
  const check = (what, found, wanted) => {
    const same = JSON.stringify(found) === JSON.stringify(wanted)
    console.log(`${same ? 'ok' : 'not ok'} - ${name} ${driver.version}: ${what}`)
    if (!same) console.log(`# ${JSON.stringify(found)} instead of ${JSON.stringify(wanted)}`)
  }
  const key = (number) => `${name}-order-000000${number}`
  const claim = (query, k, body = '{"sku": "teapot"}') => query(CLAIM, ['customer-7', k, 'POST', '/orders', body, 5])

  await driver.transaction(async (query) => {
    const [first] = await claim(query, key(1))
    check('a new claim, and a bigint is a string', [first.outcome, typeof first.claim_token], ['new', 'string'])
    await query(COMPLETE, ['customer-7', key(1), 201, '{"order": 1}', '{"Content-Type": "application/json"}', null])
    const [message] = await query(PUBLISH, ['orders', '{"order": 1}', 'customer-7'])
    check('a message has an id', message.message_id.length, 36)
  })
  await driver.transaction(async (query) => {
    const [again] = await claim(query, key(1), '{ "sku": "teapot" }')
    check('a replay', [again.outcome, again.response_status, again.response_body], ['replay', 201, '{"order": 1}'])
    await claim(query, key(2))
    await query(COMPLETE_BYTES, ['customer-7', key(2), 200, Buffer.from([0, 255])])
  })
  await driver.transaction(async (query) => {
    const [stored] = await query(BYTES, ['customer-7', key(2)])
    check('bytes are bound as bytea', [...stored.response_bytes], [0, 255])
    const tokens = await query(ONCE, [name, ['m1', 'm2', 'm1']])
    check('a list is an array', tokens.map((row) => row.token), ['m1', 'm2'])
  })
  let sqlstate
  await driver.transaction((query) => claim(query, 'short')).catch((error) => { sqlstate = driver.sqlstate(error) })
  check('the SQLSTATE', sqlstate, 'ID001')
  await driver.end()
}
