// The README's quick start, with the portable edition in PGlite: PostgreSQL in
// this process.  "make portable" writes the script.
import assert from 'node:assert/strict'
import { readFile } from 'node:fs/promises'
import { test } from 'node:test'
import { PGlite } from '@electric-sql/pglite'

const tree = new URL('../../', import.meta.url)

/** A database with the functions, in schema idem. */
async function database() {
  const script = await readFile(new URL('portable/build/idempotency.sql', tree), 'utf8')
  const db = await PGlite.create()
  // Only psql knows these lines.
  await db.exec(script.replace(/^\\if[^]*?^\\endif$/m, ''))
  await db.exec('SET search_path = public, idem')
  return db
}

test('the quick start of the README', async () => {
  const readme = await readFile(new URL('README.md', tree), 'utf8')
  const section = readme.slice(readme.indexOf('\n## Quick start'), readme.indexOf('\n## Node and Python'))
  const blocks = [...section.matchAll(/^```sql\n([^]*?)^```$/gm)].map((match) => match[1])
  assert.equal(blocks.length, 5)
  // The first block installs the C edition.
  assert.match(blocks[0], /CREATE EXTENSION/)
  const db = await database()
  const outcomes = []
  for (const block of blocks.slice(1)) {
    const expected = [...block.matchAll(/-- (.*)$/gm)].map((match) => match[1])
    const results = await db.exec(block)
    const rows = results.flatMap((result) => result.rows).filter((row) => 'outcome' in row)
    outcomes.push([expected, rows.map((row) => Object.values(row).join(', '))])
  }
  assert.deepEqual(outcomes.map(([expected]) => expected), outcomes.map(([, answered]) => answered))
  assert.deepEqual((await db.query('SELECT sku FROM orders')).rows, [{ sku: 'teapot' }])
  await db.close()
})

test('each primitive answers', async () => {
  const db = await database()
  const one = async (query) => Object.values((await db.query(query)).rows[0])
  assert.deepEqual(await one(`SELECT outcome, last_client_seq, version FROM idem_try_append('order-1', 'phone', 1)`), ['appended', 1, 1])
  assert.deepEqual(await one(`SELECT is_active, processed FROM idem_set('ann', 'post', '1', 'like', true, 10)`), [true, true])
  assert.deepEqual(await one(`SELECT idem_once('inbox', 'message-1') AS first, idem_once('inbox', 'message-1') AS again`), [true, false])
  await db.query(`SELECT idem_publish('orders', '{"order": 1}', 'customer-7')`)
  assert.deepEqual(await one('SELECT payload, attempt FROM idem_outbox_take()'), [{ order: 1 }, 1])
  await db.exec(`CREATE FUNCTION pay(request jsonb) RETURNS jsonb LANGUAGE sql RETURN request || '{"paid": true}'`)
  const run = `SELECT outcome, response_body::json ->> 'paid' FROM idem_run('shop', 'payment-0000000001', 'pay(jsonb)', '{"order": 1}')`
  assert.deepEqual(await one(run), ['new', 'true'])
  assert.deepEqual(await one(run), ['replay', 'true'])
  assert.equal((await one(`SELECT value FROM (SELECT detail AS value FROM idem_health() WHERE check_name = 'edition') AS v`))[0], 'portable')
  await db.close()
})
