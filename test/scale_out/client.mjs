//
// node test/scale_out/client.mjs
//
// The client for Node over the router, for clients.py: a line of JSON for each
// thing to do comes in, {id, verb, ...}, and one for what came of it goes out,
// {id, result} or {id, error}.  client.py is the same for Python.
//
import { createRequire } from 'node:module'
import { createInterface } from 'node:readline'
import { setTimeout as sleep } from 'node:timers/promises'
import { Idempotency, IdempotencyError } from '../../clients/node/dist/index.js'

const pg = createRequire(new URL('../../clients/node/package.json', import.meta.url))('pg')

let trips = 0
let questions = 0
const asked = []
const pools = []

function poolOf(options) {
  const pool = new pg.Pool({ ...options, max: Number(process.env.POOL ?? 10) })
  pools.push(pool)
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

function routed() {
  const router = poolOf({ host: process.env.PGHOST, port: Number(process.env.PGPORT), database: 'router', user: 'web' })
  router.on('acquire', () => questions++)
  return new Idempotency(router, {
    schema: 'public',
    shards: (shard, connection) => {
      asked.push(connection)
      return poolOf({ ...shard, user: 'app' })
    },
  })
}

const one = process.env.ONE_SERVER
const idem = one ? new Idempotency(poolOf({ host: one, port: 5432, database: 'postgres', user: 'app' }), { schema: 'public' }) : routed()

/** By its scope and key, what has run of a request, a job or a transaction. */
const runs = new Map()
const stops = new Map()

function noted(scope, key, name) {
  runs.set(`${scope} ${key}`, [...runs.get(`${scope} ${key}`) ?? [], name])
}

/** A place where a handler stops until the test continues it. */
function stopOf(name) {
  if (!stops.has(name)) {
    const stop = {}
    stop.reached = new Promise((resolve) => { stop.reach = resolve })
    stop.gone = new Promise((resolve) => { stop.go = resolve })
    stops.set(name, stop)
  }
  return stops.get(name)
}

/** Run the commands of a handler or a step, each of them [what, ...].  Returns the results of its calls. */
async function act(does, scope, key, tx) {
  const found = []
  const acts = {
    effect: () => tx.query('INSERT INTO effects VALUES ($1, $2)', [scope, key]),
    on: async (name, ...given) => found.push(await idem.on(tx)[name](...given)),
    own: async (name, ...given) => found.push(await idem[name](...given)),
    sql: (text) => tx.query(text),
    sleep,
    stop: (name) => {
      stopOf(name).reach()
      return stopOf(name).gone
    },
    fail: (message) => { throw new Error(message) },
  }
  for (const [what, ...given] of does) await acts[what](...given)
  return found
}

const verbs = {
  /** The body is bytes; a document is hashed by the server. */
  request({ scope, key, body, document, wait, does = [['effect']] }) {
    return idem.request({ scope, key, method: 'POST', path: '/', body: document ?? Buffer.from(body ?? ''), wait }, async (tx) => {
      noted(scope, key, 'handler')
      await act(does, scope, key, tx)
      return { status: 201, body: `done ${key}` }
    })
  },
  /** Commands without a name run between the steps.  Without a last step, the job returns the response. */
  job({ scope, key, lease, wait, steps = [], does = [['effect']], finish = true }) {
    return idem.job({ scope, key, lease, wait }, async (job) => {
      for (const [name, within = []] of steps) {
        const step = async () => {
          if (name) noted(scope, key, name)
          await act(within, scope, key)
          return name
        }
        await (name ? job.step(name, step) : step())
      }
      const response = { status: 201, body: `done ${key}` }
      if (!finish) return response
      await job.finish(async (tx) => {
        noted(scope, key, 'last')
        await act(does, scope, key, tx)
        return response
      })
    })
  },
  transaction({ scope, key, does = [['effect']] }) {
    return idem.transaction((tx) => {
      noted(scope, key, 'handler')
      return act(does, scope, key, tx)
    }, { scope })
  },
  call: ({ name, given, named }) => idem[name](...given, ...(named ? [named] : [])),
  ran: ({ scope, key }) => runs.get(`${scope} ${key}`) ?? [],
  reached: ({ stop }) => stopOf(stop).reached,
  go: ({ stop }) => stopOf(stop).go(),
  /** Since the last time, once all connections are back: round trips, and how often the router was asked. */
  async counted() {
    while (pools.some((pool) => pool.idleCount < pool.totalCount)) await sleep(1)
    const found = { trips, questions, asked }
    trips = questions = 0
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
        message: error.message, hint: error.hint ?? null, own: error instanceof IdempotencyError } }))
    }
  })()
}
process.exit()
