// POST /payments in Express: ours, the handler alone, the handler with claim and
// completion written by hand, or with express-idempotency, which keeps its answers
// in the memory of the process.

import express from 'express'
import { keyOf, pay, pool, ready, SIDE, transaction } from './payment.mjs'

const app = express()

const alone = async (req, res) => {
  const payment = await transaction(req.body, keyOf(req))
  res.status(201).location(`/payments/${payment.id}`).json(payment)
}

if (SIDE === 'ours') {
  const { Idempotency } = await import('pg-idempotency')
  const { idempotent } = await import('pg-idempotency/express')
  const guarded = idempotent(new Idempotency(pool, { schema: 'public' }), { scope: () => 'alice' })
  app.post('/payments', guarded(async (req, res) => {
    const payment = await pay(req.idempotency.tx, req.body)
    res.status(201).location(`/payments/${payment.id}`).json(payment)
  }))
} else if (SIDE === 'peer') {
  const { idempotency, getSharedIdempotencyService } = (await import('express-idempotency')).default
  app.post('/payments', express.json(), idempotency(), async (req, res) => {
    if (!getSharedIdempotencyService().isHit(req)) await alone(req, res)
  })
} else {
  app.post('/payments', express.json(), alone)
}

const server = app.listen(0, '127.0.0.1', () => ready(server.address().port))
