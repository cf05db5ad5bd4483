// The shop of test/http with express-idempotency, as its README shows it: the
// stored responses are in the memory of the process.

import express from 'express'
import packages from 'express-idempotency'
import { addBlob, effects, job, pay } from './memory_shop.mjs'

const { idempotency, getSharedIdempotencyService } = packages
const app = express()
app.use(express.json(), express.raw({ type: 'application/octet-stream', limit: '5mb' }))

const guarded = (work) => [
  (req, res, next) => req.get('X-User') ? next() : res.status(401).json({ error: 'who are you?' }),
  (req, res, next) => req.path === '/blobs' || req.get('Idempotency-Key') ? next() : res.status(400).json({ error: 'no key' }),
  idempotency(),
  async (req, res, next) => {
    const service = getSharedIdempotencyService()
    if (service.isHit(req)) return
    try {
      const { status, headers, body } = await work(req)
      res.status(status).set(headers).send(body)
    } catch (error) {
      service.reportError(req)
      next(error)
    }
  },
]

app.post('/payments', guarded((req) => pay(req.get('X-User'), req.body)))
app.post('/jobs', guarded((req) => job(req.body)))
app.post('/blobs', guarded((req) => addBlob(Buffer.isBuffer(req.body) ? req.body : '')))
app.get('/effects', (req, res) => res.json(effects()))
app.get('/thanks', (req, res) => res.send('thanks'))
app.get('/ping', (req, res) => res.status(204).end())
app.use((error, req, res, next) => res.headersSent ? next(error) : res.status(error.status ?? 500).json({ error: error.message }))

const server = app.listen(0, '127.0.0.1', () => console.log(`listening on ${server.address().port}`))
