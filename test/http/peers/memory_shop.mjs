// The common part of the shops of other packages: routes of test/http/README.md whose
// effects are kept in this process.  This file is not a shop.

import { randomBytes } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'

const payments = new Map(), charges = new Map()
let blobs = 0

export const effects = () => ({
  payments: payments.size, charges: charges.size,
  bank_calls: [...charges.values()].reduce((sum, calls) => sum + calls, 0), blobs,
})

// The answer as { status, headers, body }.
export function pay(user, body) {
  if (!Number.isSafeInteger(body?.amount) || typeof body.currency !== 'string') return answer(400, { error: 'not a payment' })
  if (body.amount < 0) return answer(422, { error: 'a negative amount' })
  if (body.currency === 'XXX') throw new Error('no such currency')
  if (body.currency === 'XTS') throw Object.assign(new Error('not in this currency'), { status: 403, statusCode: 403 })
  const id = payments.size + 1
  payments.set(id, { user, ...body })
  return answer(201, { id, amount: body.amount, currency: body.currency }, {
    'Location': `/payments/${id}`,
    'Link': [`</payments/${id}>; rel="self"`, '</payments>; rel="collection"'],
    'Set-Cookie': 'seen=1',
    'X-Trace': randomBytes(8).toString('hex'),
  })
}

export async function job(body) {
  if (!Number.isSafeInteger(body?.ms)) return answer(400, { error: 'not a job' })
  const key = randomBytes(12).toString('hex')
  await sleep(body.ms)
  charges.set(key, (charges.get(key) ?? 0) + 1)
  return answer(200, { id: key, attempt: 1 })
}

export function addBlob(bytes) {
  blobs++
  return { status: 200, headers: { 'Content-Type': 'application/octet-stream' }, body: Buffer.from(bytes).reverse() }
}

const answer = (status, document, headers = {}) => ({ status, headers, body: document })
