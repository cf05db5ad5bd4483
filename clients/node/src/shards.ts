/**
 * Finds the server of a scope: the only server, or one of several, which a router
 * knows. The router's answers are cached. A stale answer does no harm, because
 * each shard's guard refuses a scope that does not live there.
 */
import { setTimeout as sleep } from 'node:timers/promises'
import { IdempotencyError, ScopeMoving, sqlstateOf } from './errors.js'
import { quoteIdentifier, statementOf, statements, type Statement, type Statements } from './functions.js'
import { isUnreachable, performOnPool, retryIfDead, type PoolLike } from './postgres.js'
import { describe } from './values.js'

/** A shard as the router describes it, with the option names of pg.Pool. Add the user and certificates. */
export interface Shard {
  host?: string
  port?: number
  database?: string
  user?: string
  password?: string
  application_name?: string
  options?: string
  connectionTimeoutMillis?: number
  ssl?: boolean | { rejectUnauthorized: boolean }
}

/** Makes a shard's pool, once for each connection string of the router, which is the second argument. */
export type Shards = (shard: Shard, connection: string) => PoolLike | Promise<PoolLike>

export interface Servers {
  readonly statements: Statements
  /** Pins a scope to its server until the transaction ends. Undefined if scopes cannot move. */
  pin(scope: string | undefined): Statement<unknown> | undefined
  /** Call begin with the pool of the scope's server. If the server refuses the scope, which it does before any work, try again with another server. */
  at<T>(scope: string | undefined, begin: (pool: PoolLike) => Promise<T>): Promise<T>
  /** Call a function in a transaction of its own. */
  perform<T>(statement: Statement<T>, name: keyof Statements, given: unknown[]): Promise<T>
}

/** One server. */
export class OneServer implements Servers {
  readonly statements: Statements
  #pool: PoolLike

  constructor(pool: PoolLike, schema: string) {
    this.statements = pool.statements ?? statements(schema)
    this.#pool = pool
  }

  pin(): undefined {}

  at<T>(_scope: string | undefined, begin: (pool: PoolLike) => Promise<T>): Promise<T> {
    return begin(this.#pool)
  }

  perform<T>(statement: Statement<T>, name: keyof Statements): Promise<T> {
    return performOnPool(this.#pool, statement, name)
  }
}

/** The schema of the router's functions. */
const ROUTER = 'idempotency'
/** The schema in the errors of a shard's guard. */
const GUARD = 'idem_guard'
/** The router's SQLSTATE while the scope is being moved. */
const MOVING = '55P03'
/** The maximum wait for a move. */
const MOVE_WAIT_MS = 10_000
const MISSING = new Set(['42883', '42P01'])
/** The number of tries to find a scope that shards refuse. */
const TRIES = 3
/** The maximum number of cached scopes. */
const MAX_KNOWN_SCOPES = 10_000

/** Several servers, and a router that knows the server of each scope. */
export class ManyServers implements Servers {
  readonly statements: Statements
  #pinText: string
  #router: PoolLike
  #routed = statements(ROUTER)
  #shards: Shards
  #pools = new Map<string, Promise<PoolLike>>()
  #scopes = new Map<string, PoolLike>()
  /** The scopes that a shard has refused, because the router's map might be old. */
  #refused = new Set<string>()

  constructor(router: PoolLike, schema: string, shards: Shards) {
    this.statements = statements(schema, true)
    this.#pinText = `SELECT ${quoteIdentifier(schema)}.idem_pin_scope($1::text)`
    this.#router = router
    this.#shards = shards
  }

  pin(scope: string): Statement<unknown> {
    return { text: this.#pinText, values: [scope], read: () => undefined }
  }

  async at<T>(scope: string | undefined, begin: (pool: PoolLike) => Promise<T>): Promise<T> {
    if (typeof scope !== 'string') throw new TypeError('with several shards, a transaction needs a scope: transaction(handler, { scope })')
    for (let tries = 1; ; tries++) {
      const pool = await this.#of(scope)
      try {
        return await begin(pool)
      } catch (error) {
        const isElsewhere = (error as { schema?: unknown } | null)?.schema === GUARD
        // A shard that cannot be reached might have another address now.
        if ((isElsewhere || isUnreachable(error)) && this.#scopes.get(scope) === pool) this.#scopes.delete(scope)
        if (isElsewhere) this.#refused.add(scope)
        if (!isElsewhere || tries === TRIES) throw error
      }
    }
  }

  async perform<T>(statement: Statement<T>, name: keyof Statements, given: unknown[]): Promise<T> {
    if (statement.scope !== undefined) return this.at(statement.scope, (pool) => performOnPool(pool, statement, name))
    try {
      return await performOnPool(this.#router, statementOf<T>(this.#routed, name, given))
    } catch (error) {
      if (!MISSING.has(sqlstateOf(error) ?? '')) throw error
      throw new IdempotencyError(`the router has no ${name}(): use a client over the pool of each shard`,
        { sqlstate: sqlstateOf(error), cause: error })
    }
  }

  async #of(scope: string): Promise<PoolLike> {
    const known = this.#scopes.get(scope)
    if (known) return known
    const found = await this.#poolOf(await this.#ask(scope))
    if (this.#scopes.size === MAX_KNOWN_SCOPES) this.#scopes.delete(this.#scopes.keys().next().value!)
    this.#scopes.set(scope, found)
    return found
  }

  /** Ask the router, and repeat this for some time while the scope is being moved. */
  async #ask(scope: string): Promise<string> {
    const until = performance.now() + MOVE_WAIT_MS
    const question: Statement<string> = {
      text: `SELECT ${ROUTER}.${this.#refused.delete(scope) ? 'idem_find_shard' : 'idem_shard'}($1::text) AS connection`, values: [scope], read: ([row]) => row!['connection']!,
    }
    for (;;) {
      try {
        return await retryIfDead(() => performOnPool(this.#router, question))
      } catch (error) {
        if (sqlstateOf(error) !== MOVING) throw error
        if (performance.now() > until) {
          const { message, detail, hint } = error as IdempotencyError
          throw new ScopeMoving(message, { sqlstate: MOVING, detail, hint, cause: error })
        }
      }
      await sleep(50 + Math.random() * 200)
    }
  }

  #poolOf(connection: string): Promise<PoolLike> {
    let pool = this.#pools.get(connection)
    if (!pool) {
      pool = (async () => {
        const made = await this.#shards(shardOf(connection), connection) as PoolLike | undefined
        if (typeof made?.connect !== 'function') throw new TypeError(`shards() must return a pool for "${connection}", not ${describe(made)}`)
        return made
      })()
      this.#pools.set(connection, pool)
      pool.catch(() => this.#pools.delete(connection))
    }
    return pool
  }
}

const WORD = /([^\s=]+)\s*=\s*(?:'((?:[^'\\]|\\.)*)'|((?:[^\s\\]|\\.)*))/gs

/** Parses libpq's connection string of keywords and values. */
export function shardOf(connection: string): Shard {
  const said = Object.fromEntries(Array.from(connection.matchAll(WORD), ([, word, quoted, plain]) =>
    [word!, (quoted ?? plain!).replace(/\\(.)/gs, '$1')]))
  const { host: name, hostaddr, port, dbname, user, password, application_name, options, connect_timeout, sslmode } = said
  const host = hostaddr || name
  if (`${host} ${port}`.includes(',')) throw new TypeError(`the shard "${connection}" has several hosts, but pg connects to only one`)
  return {
    ...(host ? { host } : {}), ...(port ? { port: Number(port) } : {}), ...(dbname ? { database: dbname } : {}),
    ...(user ? { user } : {}), ...(password ? { password } : {}), ...(application_name ? { application_name } : {}), ...(options ? { options } : {}),
    ...(connect_timeout ? { connectionTimeoutMillis: Number(connect_timeout) * 1000 } : {}),
    // Like libpq, which verifies a certificate only with these two.
    ...(sslmode === 'require' ? { ssl: { rejectUnauthorized: false } } : sslmode?.startsWith('verify-') ? { ssl: true } : {}),
  }
}
