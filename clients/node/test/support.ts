/** The base of the tests: their own database, and a proxy that counts and cuts connections. */
import { createServer, connect, type Server, type Socket } from 'node:net'
import pg from 'pg'
import { Idempotency, newKey, type Options } from 'pg-idempotency'

export class World {
  readonly pools: pg.Pool[] = []
  proxy: Proxy | undefined
  readonly #superuser: pg.Pool
  private constructor(readonly database: string, readonly schema: string) {
    // An application's own sessions do not have the extension's schema in their search_path.
    this.#superuser = new pg.Pool({ database, options: '-c search_path=public,idem' })
    this.#superuser.on('error', () => undefined)
  }

  static async make(schema = 'idem', encoding = 'UTF8'): Promise<World> {
    const database = `node_${process.pid}_${Math.random().toString(36).slice(2)}`
    const admin = new pg.Client({ database: 'postgres' })
    await admin.connect()
    await admin.query(`CREATE DATABASE ${database}` +
      (encoding === 'UTF8' ? '' : ` ENCODING '${encoding}' LOCALE 'C' TEMPLATE template0`))
    await admin.end()
    const world = new World(database, schema)
    await world.sql(`CREATE SCHEMA IF NOT EXISTS "${schema}"; CREATE EXTENSION idempotency SCHEMA "${schema}";
      CREATE TABLE effects (id bigserial PRIMARY KEY, what text NOT NULL)`)
    return world
  }

  pool(config: pg.PoolConfig = {}): pg.Pool {
    const pool = new pg.Pool({ database: this.database, max: 4, ...config })
    pool.on('error', () => undefined)
    this.pools.push(pool)
    return pool
  }

  client(options: Options = {}, config: pg.PoolConfig = {}): Idempotency {
    return new Idempotency(this.pool(config), { schema: this.schema, ...options })
  }

  /** Through the proxy. */
  async proxied(options: Options = {}): Promise<{ idem: Idempotency; proxy: Proxy; pool: pg.Pool }> {
    this.proxy ??= await Proxy.start()
    const pool = this.pool({ host: '127.0.0.1', port: this.proxy.port })
    return { idem: new Idempotency(pool, { schema: this.schema, ...options }), proxy: this.proxy, pool }
  }

  async sql(text: string, values?: unknown[]): Promise<any[]> {
    return (await this.#superuser.query(text, values)).rows
  }

  async effects(what: string): Promise<number> {
    const [row] = await this.sql('SELECT count(*)::int AS n FROM effects WHERE what = $1', [what])
    return row.n
  }

  async end(): Promise<void> {
    await Promise.all([...this.pools, this.#superuser].map((pool) => pool.end()))
    await this.proxy?.end()
    const admin = new pg.Client({ database: 'postgres' })
    await admin.connect()
    await admin.query(`DROP DATABASE ${this.database} WITH (FORCE)`)
    await admin.end()
  }
}

export const key = (): string => newKey()

/** Between driver and server: counts round trips, and cuts the connection at chosen words of either side. */
export class Proxy {
  roundTrips = 0
  /** Words of a query before which the connection is cut. */
  cutBefore: string | undefined
  /** A command tag that is never answered: the connection is cut in its place. */
  cutAfter: string | undefined
  /** Milliseconds until the server hears of a cut. */
  lingerMs = 0
  /** Words of a query from which on the connection is silent: nothing goes through, and nothing is closed. */
  muteBefore: string | undefined
  muteAfter: string | undefined
  /** The next muteBefore, once cutAfter has cut a connection. */
  muteAfterCut: string | undefined
  #sockets = new Set<Socket>()
  private constructor(readonly server: Server) {}

  get port(): number {
    return (this.server.address() as { port: number }).port
  }

  static async start(): Promise<Proxy> {
    const server = createServer({ noDelay: true })
    const proxy = new Proxy(server)
    server.on('connection', (socket) => proxy.#link(socket))
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve))
    return proxy
  }

  #link(near: Socket): void {
    const far = connect(`${process.env['PGHOST']}/.s.PGSQL.${process.env['PGPORT'] ?? 5432}`)
    let asking = false
    let mute = false
    let lingerMs = 0
    const cut = (): void => {
      near.destroy()
      if (lingerMs > 0) setTimeout(() => far.destroy(), lingerMs)
      else far.destroy()
    }
    for (const socket of [near, far]) {
      this.#sockets.add(socket)
      socket.on('error', cut).on('close', () => { this.#sockets.delete(socket); cut() })
    }
    near.on('data', (data) => {
      if (this.muteBefore && data.includes(this.muteBefore)) {
        this.muteBefore = undefined
        mute = true
      }
      if (mute) return
      if (this.cutBefore && data.includes(this.cutBefore)) {
        this.cutBefore = undefined
        mute = true
        lingerMs = this.lingerMs
        return cut()
      }
      // One after another without an answer between them is one.
      if (!asking) this.roundTrips++
      asking = true
      far.write(data)
    })
    far.on('data', (data) => {
      asking = false
      if (this.muteAfter && data.includes(`${this.muteAfter}\0`)) {
        this.muteAfter = undefined
        mute = true
      }
      if (mute) return
      if (this.cutAfter && data.includes(`${this.cutAfter}\0`)) {
        this.cutAfter = undefined
        this.muteBefore = this.muteAfterCut
        return cut()
      }
      near.write(data)
    })
  }

  async end(): Promise<void> {
    for (const socket of this.#sockets) socket.destroy()
    await new Promise((resolve) => this.server.close(resolve))
  }
}
