#!/usr/bin/env node
//
// client.mjs ours|driver SECONDS, called from the folder where the package is installed
//
// Calls a second, one at a time: see client.py.

import pg from 'pg'
import { Idempotency, newKey } from 'pg-idempotency'

const WARM_UP = 2000
const INSERT = "INSERT INTO client_orders (sku) VALUES ('teapot') RETURNING id"

const [side, seconds] = [process.argv[2], Number(process.argv[3])]
const pool = new pg.Pool({ max: 1 })
await pool.query('CREATE TABLE IF NOT EXISTS client_orders (id bigint GENERATED ALWAYS AS IDENTITY, sku text)')
const idem = new Idempotency(pool, { schema: 'public' })
const body = Buffer.from('{"sku": "teapot"}')

const calls = {
  ours: () => idem.request({ scope: 'alice', key: newKey(), method: 'POST', path: '/orders', body }, async (tx) => {
    const { rows } = await tx.query(INSERT)
    return { status: 201, headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(rows[0]) }
  }),
  driver: async () => {
    const client = await pool.connect()
    try {
      await client.query('BEGIN')
      await client.query(INSERT)
      await client.query('COMMIT')
    } finally {
      client.release()
    }
  }
}
for (let count = 0; count < WARM_UP; count++) await calls[side]()
const began = performance.now()
let done = 0
for (; performance.now() < began + seconds * 1000; done++) await calls[side]()
console.log((done / (performance.now() - began) * 1000).toFixed(0))
await pool.end()
