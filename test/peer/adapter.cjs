// A storage adapter for @node-idempotency/core on our client: what their tests
// take in place of their own in memory.  The value of a request that runs is its
// checkpoint, that of an answered one its response.

const { createHash, randomUUID } = require('node:crypto')

const pg = require('pg')
const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL })
const loaded = import('pg-idempotency').then(({ Idempotency }) => new Idempotency(pool, { schema: 'public' }))

class MemoryStorageAdapter {
  scope = randomUUID()
  tokens = new Map()

  // Theirs have any length.
  name(key) {
    return createHash('sha256').update(key).digest('hex')
  }

  // Without a lease, the holder's transaction is still open: it can roll back, and
  // get() finds nothing.  So claim again until it has ended.
  async setIfNotExists(key, val, { ttl } = {}) {
    const idem = await loaded
    const name = this.name(key)
    for (let waitMs = 0; ; waitMs = 20) {
      const { outcome, leaseExpiresAt } = await idem.transaction(async (tx) => {
        const ours = idem.on(tx)
        const claim = await ours.claim(this.scope, name, { ttlMs: ttl, leaseMs: ttl, waitMs })
        if (claim.outcome === 'new') {
          const { claimToken } = claim
          await ours.checkpoint(this.scope, name, 'stored', { recoveryState: { val }, leaseMs: ttl, claimToken })
          this.tokens.set(key, claimToken)
        }
        return claim
      })
      if (outcome !== 'in_progress' || leaseExpiresAt) return outcome === 'new'
    }
  }

  async set(key, val, { ttl } = {}) {
    const idem = await loaded
    const name = this.name(key)
    await idem.transaction(async (tx) => {
      const ours = idem.on(tx)
      let claimToken = this.tokens.get(key)
      if (claimToken === undefined) {
        await ours.forget(this.scope, name)
        claimToken = (await ours.claim(this.scope, name, { ttlMs: ttl })).claimToken
      }
      await ours.complete(this.scope, name, 200, { body: val, claimToken })
    })
    this.tokens.delete(key)
  }

  async get(key) {
    const found = await (await loaded).lookup(this.scope, this.name(key))
    return found && (found.state === 'completed' ? found.responseBody : found.recoveryState?.val)
  }
}

module.exports = { MemoryStorageAdapter }
