//
// node test/scale_out/client.mjs
//
// The client for Node over the router, for clients.py: a line of JSON for each
// thing to do comes in, {id, verb, ...}, and one for what came of it goes out,
// {id, result} or {id, error}.
//
import { createRequire } from 'node:module'
import { createInterface } from 'node:readline'
import { setTimeout as sleep } from 'node:timers/promises'
import { Idempotency } from '../../clients/node/dist/index.js'

const pg = createRequire(new URL('../../clients/node/package.json', import.meta.url))('pg')

let trips = 0
const asked = []

function poolOf(options) {
  const pool = new pg.Pool({ ...options, max: 10 })
  pool.on('error', () => undefined)
  pool.on('connect', (client) => {
    for (const name of ['sync', 'query']) {
      const real = client.connection[name]
      client.connection[name] = (...given) => {
        trips++
        return real.apply(client.connection, given)
      }
    }
  })
  return pool
}

const one = process.env.ONE_SERVER
const idem = one
  ? new Idempotency(poolOf({ host: one, port: 5432, database: 'postgres', user: 'app' }))
  : new Idempotency(poolOf({ host: process.env.PGHOST, port: Number(process.env.PGPORT), database: 'router', user: 'web' }), {
    shards: (shard, connection) => {
      asked.push(connection)
      return poolOf({ ...shard, user: 'app' })
    },
  })

const effect = (tx, scope, key) => tx.query('INSERT INTO effects VALUES ($1, $2)', [scope, key])

const verbs = {
  async request({ scope, key, body, pause = 0, wait }) {
    return idem.request({ scope, key, method: 'POST', path: '/', body: Buffer.from(body ?? ''), wait }, async (tx) => {
      await effect(tx, scope, key)
      await sleep(pause)
      return { status: 201, body: `done ${key}` }
    })
  },
  /** Two steps, of which the second fails in the first attempt, and a last one. */
  async job({ scope, key, pause = 0, lease, fails, wait }) {
    const ran = []
    const result = await idem.job({ scope, key, lease, wait }, async (job) => {
      for (const name of ['first', 'second']) {
        await job.step(name, async () => {
          if (name === 'second' && fails) throw new Error('no work today')
          ran.push(name)
          await sleep(pause)
          return name
        })
      }
      await job.finish(async (tx) => {
        await effect(tx, scope, key)
        return { status: 200, body: `done ${key}` }
      })
    })
    return { ...result, ran }
  },
  async transaction({ scope, key, calls }) {
    return idem.transaction(async (tx) => {
      await effect(tx, scope ?? '', key)
      const found = []
      for (const [name, ...given] of calls) found.push(await idem.on(tx)[name](...given))
      return found
    }, { scope })
  },
  call: ({ name, given }) => idem[name](...given),
  /** Round trips since the last time, and the shards that a pool was made for. */
  counted() {
    const found = { trips, asked }
    trips = 0
    return found
  },
}

function text(value) {
  return JSON.stringify(value, (_, found) => (typeof found === 'bigint' ? Number(found) : found))
}

for await (const line of createInterface({ input: process.stdin })) {
  const { id, verb, ...given } = JSON.parse(line)
  void (async () => {
    try {
      console.log(text({ id, result: await verbs[verb](given) ?? null }))
    } catch (error) {
      console.log(text({ id, error: { name: error.name, sqlstate: error.sqlstate ?? error.code ?? null,
        message: error.message, hint: error.hint ?? null } }))
    }
  })()
}
process.exit()
