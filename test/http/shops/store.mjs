// The common part of the shops of Node: it keeps the effects in the database that
// DATABASE_URL names or, for "memory:", in this process.  This file is not a shop.

import { setTimeout as sleep } from 'node:timers/promises'
import pg from 'pg'
import { Idempotency, newKey } from 'pg-idempotency'
import { MemoryIdempotency } from 'pg-idempotency/memory'

export const { DATABASE_URL, PORT = '0' } = process.env
const number = (name, otherwise) => Number(process.env[name] ?? otherwise)
const options = { waitMs: number('WAIT_MS', 0), leaseMs: number('LEASE_MS', 30000) }

function inDatabase() {
  const pool = new pg.Pool({ connectionString: DATABASE_URL, max: number('POOL_SIZE', 10) })
  const bankPool = new pg.Pool({ connectionString: DATABASE_URL, max: 1 })
  // Do not stop when the server ends an idle session.
  for (const one of [pool, bankPool]) one.on('error', (error) => console.error(error.message))
  return {
    client: new Idempotency(pool, { ...options, schema: 'public' }),
    async pay(tx, { user, amount, currency, key }) {
      const { rows } = await tx.query(
        'INSERT INTO payments (owner, amount, currency, key) VALUES ($1, $2, $3, $4) RETURNING id', [user, amount, currency, key])
      return Number(rows[0].id)
    },
    async charge(key) {
      await bankPool.query('INSERT INTO charges (key) VALUES ($1) ON CONFLICT (key) DO UPDATE SET calls = charges.calls + 1', [key])
    },
    async addBlob(tx, user, bytes) {
      await tx.query('INSERT INTO blobs (owner, bytes) VALUES ($1, $2)', [user, bytes])
    },
    async addForm(user) {
      const token = newKey()
      await pool.query('INSERT INTO forms (token, owner) VALUES ($1, $2)', [token, user])
      return token
    },
    async knowsForm(tx, token, user) {
      return (await tx.query('SELECT FROM forms WHERE token = $1 AND owner = $2', [token, user])).rowCount > 0
    },
    async addSubmission(tx, token, user) {
      await tx.query('INSERT INTO submissions (token, owner) VALUES ($1, $2)', [token, user])
    },
    async effects() {
      const { rows } = await pool.query(`SELECT (SELECT count(*) FROM payments)::int AS payments,
        (SELECT count(*) FROM charges)::int AS charges,
        (SELECT coalesce(sum(calls), 0) FROM charges)::int AS bank_calls, (SELECT count(*) FROM blobs)::int AS blobs,
        (SELECT count(*) FROM submissions)::int AS submissions,
        (SELECT count(*) FROM idem_user_actions WHERE is_active)::int AS likes`)
      return rows[0]
    },
    async ping() { await pool.query('SELECT 1') },
    async end() { await Promise.all([pool.end(), bankPool.end()]) },
  }
}

function inMemory() {
  const client = new MemoryIdempotency(options)
  const payments = new Map(), blobs = new Map(), charges = new Map(), forms = new Map(), submissions = new Map()
  const likes = new Set()
  let ids = 0
  const add = (tx, table, key, row) => {
    table.set(key, row)
    tx.onRollback(() => table.delete(key))
    return key
  }
  return {
    client, likes,
    async pay(tx, payment) { return add(tx, payments, ++ids, payment) },
    async charge(key) { charges.set(key, (charges.get(key) ?? 0) + 1) },
    async addBlob(tx, user, bytes) { add(tx, blobs, ++ids, { user, bytes }) },
    async addForm(user) {
      const token = newKey()
      forms.set(token, user)
      return token
    },
    async knowsForm(tx, token, user) { return forms.get(token) === user },
    async addSubmission(tx, token, user) { add(tx, submissions, token, user) },
    async effects() {
      return {
        payments: payments.size, charges: charges.size, bank_calls: [...charges.values()].reduce((sum, calls) => sum + calls, 0),
        blobs: blobs.size, submissions: submissions.size, likes: likes.size,
      }
    },
    async ping() {},
    async end() {},
  }
}

const store = DATABASE_URL === 'memory:' ? inMemory() : inDatabase()
export default store

export async function bank(key, ms) {
  await sleep(ms)
  await store.charge(key)
}

export async function like(user, item, active, actionId) {
  const state = await store.client.set(user, 'item', item, 'like', active, actionId)
  // The double has no table, so count here.
  store.likes?.[state.isActive ? 'add' : 'delete'](JSON.stringify([user, item]))
  return { is_active: state.isActive, last_action_id: Number(state.lastActionId), processed: state.processed }
}

// Whether it is a form of this user's, sent for the first time or again.
export async function submit(user, token) {
  return store.client.transaction(async (tx) => {
    if (!token || !await store.knowsForm(tx, token, user)) return false
    if (await store.client.on(tx).once('forms', token)) await store.addSubmission(tx, token, user)
    return true
  })
}

export const isPayment = (body) =>
  Number.isSafeInteger(body?.amount) && typeof body.currency === 'string'

export const formPage = (token) =>
  `<!doctype html><title>Form</title><form method="post"><input type="hidden" name="token" value="${token}"><button>Send</button></form>`

// Listen, say so, and end with SIGTERM: what runs gets its answer.
export async function serve(listen, close) {
  console.log(`listening on ${await listen(Number(PORT))}`)
  process.on('SIGTERM', async () => {
    setTimeout(() => process.exit(1), 10000).unref()
    await close()
    await store.end()
    process.exit(0)
  })
}
