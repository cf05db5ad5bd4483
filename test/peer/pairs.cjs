// pairs.cjs: of two claims at once, one runs, and the other one finds what the
// first has set.  The core of @node-idempotency runs its handler if get() finds
// nothing.  Prints TAP.

const { MemoryStorageAdapter } = require('./adapter.cjs')

async function main() {
  const adapter = new MemoryStorageAdapter()
  let ran = 0
  const pairs = 60
  const attempt = async (key) => {
    if (await adapter.setIfNotExists(key, 'running', { ttl: 60000 }) || await adapter.get(key) === undefined) ran++
  }
  for (let pair = 0; pair < pairs; pair++) await Promise.all([attempt(`pair-${pair}`), attempt(`pair-${pair}`)])
  console.log(`${ran === pairs ? '' : 'not '}ok - of two parallel claims one runs (${ran} of ${pairs} pairs)`)
  process.exit()
}

main()
