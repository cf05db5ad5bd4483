// Shared by the servers of Node: a pool and the handler's statement.

import pg from 'pg'

export const { SIDE } = process.env
export const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 10 })

export async function pay(client, { amount, currency }) {
  const { rows } = await client.query(
    "INSERT INTO payments (owner, amount, currency) VALUES ('alice', $1, $2) RETURNING id", [amount, currency])
  return { id: Number(rows[0].id), amount, currency }
}

/** Pays in one transaction. With a key, it claims the key first, and stores the response last. */
export async function transaction(body, key) {
  const client = await pool.connect()
  try {
    await client.query('BEGIN')
    if (key) await claim(client, key, JSON.stringify(body))
    const payment = await pay(client, body)
    if (key) await complete(client, key, JSON.stringify(payment))
    await client.query('COMMIT')
    return payment
  } finally {
    client.release()
  }
}

async function claim(client, key, body) {
  const text = "SELECT outcome FROM idem_claim('alice', $1, idem_request_hash('POST', '/payments', $2))"
  const { rows: [{ outcome }] } = await client.query({ name: 'claim', text, values: [key, body] })
  if (outcome !== 'new') throw new Error(outcome)
}

async function complete(client, key, answer) {
  const text = `SELECT idem_complete('alice', $1, 201, $2::text, '{"Content-Type": "application/json"}')`
  await client.query({ name: 'complete', text, values: [key, answer] })
}

/** The key of the request, if this server is to claim it by hand. */
export function keyOf({ headers }) {
  return SIDE === 'by_hand' ? JSON.parse(headers['idempotency-key']) : undefined
}

export function ready(port) {
  console.log(`listening on ${port}`)
}
