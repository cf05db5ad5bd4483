// Shared by the servers of Node: a pool and the handler's statement.

import pg from 'pg'

export const { SIDE } = process.env
export const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 10 })

export async function pay(client, { amount, currency }) {
  const { rows } = await client.query(
    "INSERT INTO payments (owner, amount, currency) VALUES ('alice', $1, $2) RETURNING id", [amount, currency])
  return { id: Number(rows[0].id), amount, currency }
}

export function ready(port) {
  console.log(`listening on ${port}`)
}
