/**
 * Access to the database: a pool, a session of request() on one of its clients,
 * and the handle of a transaction that the user has opened.
 *
 * A session sends several statements in one round trip, with one Sync at the end,
 * so that after an error the server runs none of the following statements.
 */
import { setTimeout as sleep } from 'node:timers/promises'
import type { Adapter } from './adapter.js'
import { asIdempotencyError, IdempotencyError, sqlstateOf, TimedOut, TransactionEnded } from './errors.js'
import type { Row, Statement, Statements } from './functions.js'
import { asText, describe, LONGEST_TIMER, remembered, type Parameter } from './values.js'

/** A method of an ORM's pool. A symbol, because a pool that extends pg.Pool can have a begin() of its own. */
export const BEGIN: unique symbol = Symbol('begin')

/** The members of a pg.Pool that we use, or of an ORM's pool. */
export interface PoolLike<Tx = any> {
  connect(): Promise<PoolClientLike>
  /** Of an ORM's pool: a client whose transaction has begun. */
  [BEGIN]?(): Promise<PoolClientLike>
  options?: { max?: number | undefined }
  /** The statements of the double in memory. */
  readonly statements?: Statements
  /** The adapter of an ORM's pool, which also runs the methods of on(handle). */
  readonly adapter?: Adapter<Tx> | undefined
}

/** The members of a pg.PoolClient that we use. */
export interface PoolClientLike {
  query(statement: any, values?: any): any
  release(error?: Error | boolean): void
  on(event: 'error', listener: (error: Error) => void): unknown
  removeListener(event: 'error', listener: (error: Error) => void): unknown
  /** With an ORM, the object for the handler, and the pg client below it. */
  readonly handle?: TransactionHandle<unknown> | undefined
  readonly below?: object | undefined
  readonly isUnread?: boolean | undefined
}

/** The object that a handler uses until over() ends it. */
export interface TransactionHandle<Tx> { readonly tx: Tx; over(): void }

/** A pg client, or a transaction of the ORM whose pool the client has. */
export type Handle = object

/** isSent changes to true if it is present. */
interface Command { text: string; values: Parameter[]; isSent?: boolean }
interface Answer { tag: string; rows: Row[] }

/** The parts of pg's Connection that a custom query class uses. */
interface Wire {
  stream: { cork?(): void; uncork?(): void }
  parse(message: object): void
  bind(message: object): void
  describe(message: object): void
  execute(message: object): void
  sync(): void
  on(event: 'parseComplete', listener: () => void): void
  removeListener(event: 'parseComplete', listener: () => void): void
}

/**
 * The names of the statements that a connection has parsed. Statements have names
 * only if the server process is the connection's own, because behind a pooler the
 * next transaction can get another process.
 */
class Prepared {
  static #of = new WeakMap<object, Prepared>()
  /** The names of all connections, including the names of columns. */
  static readonly #names = new Map<string, string>()
  static readonly columns = new Map<string, string[]>()
  /** Whether the process is the connection's own; undefined before the check. */
  isDirect: boolean | undefined
  readonly parsed = new Set<string>()
  /** Added to the names. It changes if statements are gone, because others of that name can still be there. */
  #suffix = ''

  static of(client: object): Prepared {
    let found = Prepared.#of.get(client)
    if (!found) Prepared.#of.set(client, found = new Prepared())
    return found
  }

  /** '' means no name. */
  nameOf(text: string): string {
    if (!this.isDirect) return ''
    const { size } = Prepared.#names
    const name = remembered(Prepared.#names, MAX_NAMES, text, () => (size < MAX_NAMES ? `idem_${size}` : ''))
    return name === '' ? '' : name + this.#suffix
  }

  forget(): void {
    this.parsed.clear()
    this.#suffix = `_${Number(this.#suffix.slice(1)) + 1}`
  }
}

/** A program has only some dozens of statements. */
const MAX_NAMES = 500
const WHO: Command = { text: 'SELECT pg_catalog.pg_backend_pid()::text AS pid', values: [] }
/** Whether a prepared statement is gone, as after DISCARD ALL, or exists under a name that was to be new, or returns other columns now. */
export function isStale(error: unknown): boolean {
  const state = sqlstateOf(error)
  return state === '26000' || state === '42P05' || (state === '0A000' && (error as { routine?: unknown }).routine === 'RevalidateCachedQuery')
}

/** Several statements in one round trip, as a query class like that of pg. */
class Batch {
  readonly answers: Answer[] = []
  readonly #names: string[] = []
  readonly #parsing: string[] = []
  #connection: Wire | undefined
  #fields: string[] | undefined
  #rows: Row[] = []

  constructor(readonly commands: Command[], readonly prepared: Prepared, public callback: (error: Error | null, answers?: Answer[]) => void) {}

  submit(connection: Wire): null {
    const { parsed } = this.prepared
    const last = this.commands.at(-1)!
    if (last.isSent === false) last.isSent = true
    connection.stream.cork?.()
    try {
      for (const { text, values } of this.commands) {
        const name = this.prepared.nameOf(text)
        this.#names.push(name)
        const isParsed = name !== '' && parsed.has(name)
        if (!isParsed) {
          connection.parse({ name, text, types: [] })
          this.#parsing.push(name)
        }
        connection.bind({ statement: name, values, valueMapper: (value: unknown) => value })
        if (!isParsed || !Prepared.columns.has(text)) connection.describe({ type: 'P', name: '' })
        connection.execute({ portal: '', rows: 0 })
      }
      if (this.#parsing.length > 0) {
        this.#connection = connection
        connection.on('parseComplete', this.#onParsed)
      }
      connection.sync()
    } finally {
      connection.stream.uncork?.()
    }
    return null
  }

  #onParsed = (): void => {
    const name = this.#parsing.shift()
    if (name) this.prepared.parsed.add(name)
  }

  #over(): void {
    this.#connection?.removeListener('parseComplete', this.#onParsed)
  }

  handleRowDescription(message: { fields: { name: string }[] }): void {
    this.#fields = message.fields.map((field) => field.name)
    const at = this.answers.length
    if (this.#names[at] !== '') Prepared.columns.set(this.commands[at]!.text, this.#fields)
  }

  handleDataRow(message: { fields: (string | null)[] }): void {
    const fields = this.#fields ?? Prepared.columns.get(this.commands[this.answers.length]!.text)!
    const row: Row = {}
    for (let at = 0; at < fields.length; at++) row[fields[at]!] = message.fields[at] ?? null
    this.#rows.push(row)
  }

  handleCommandComplete(message: { text: string }): void {
    this.answers.push({ tag: message.text, rows: this.#rows })
    this.#fields = undefined
    this.#rows = []
  }

  handleReadyForQuery(): void {
    this.#over()
    this.callback(null, this.answers)
  }

  handleError(error: Error): void {
    this.#over()
    if (isStale(error)) this.prepared.forget()
    this.callback(error)
  }

  handleEmptyQuery(): void {}
  handlePortalSuspended(): void {}
  handleCopyInResponse(): void {}
  handleCopyData(): void {}
}

/** Whether the connection was lost, so that the result of the statement is unknown. */
function isConnectionLost(error: unknown): boolean {
  const state = sqlstateOf(error)
  return state === undefined ? !(error instanceof IdempotencyError) : /^(08|57P0)/.test(state)
}

/** Whether the error is one of the program and not of a connection, such as a version of an ORM that lacks a method. */
const isMistake = (error: unknown): boolean => /^(Type|Range|Reference)Error$/.test((error as Error | null)?.name ?? '')

/** Errors of a pool that gave no connection, or only dead ones. */
const unreachable = new WeakSet()
export const isUnreachable = (error: unknown): boolean => unreachable.has(error as object)
function asUnreachable(error: unknown): unknown {
  if (typeof error === 'object' && error !== null && !isMistake(error)) unreachable.add(error)
  return error
}

/** Whether the connection was dead, so that another one can be tried. */
export const isDead = (error: unknown): boolean => isConnectionLost(error) && !isMistake(error) && !isUnreachable(error)

/** Repeats a call that can be sent twice if the connection was dead, on up to three connections. */
export async function retryIfDead<T>(send: () => Promise<T>, repeats = isDead): Promise<T> {
  for (let tries = 1; ; tries++) {
    try {
      return await send()
    } catch (error) {
      if (!repeats(error)) throw error
      if (tries === 3) throw asUnreachable(error)
    }
  }
}

/** The time limit for a statement that waits for no other transaction. Behind a proxy that stopped responding, it would never end. */
export const ANSWER_MS = 30_000

/** A promise that also rejects after a time: what tells why. Calls send() at once with the functions that settle it. */
function within<T>(ms: number, what: string, send: (resolve: (value: T) => void, reject: (error: unknown) => void) => void): Promise<T> {
  return new Promise((resolve, reject) => {
    const timer = ms > LONGEST_TIMER ? undefined : setTimeout(() => reject(new TimedOut(`${what} within ${ms} ms`)), ms)
    const settled = <V>(settle: (value: V) => void) => (value: V): void => {
      clearTimeout(timer)
      settle(value)
    }
    send(settled(resolve), settled(reject))
  })
}

/** Whether the server did not answer, which pg's query_timeout also reports. */
const isSilence = (error: unknown): boolean => error instanceof TimedOut || (error as Error | null)?.message === 'Query read timeout'

/** Turns errors into our classes, and explains the errors of a wrong option schema. */
function translated(error: unknown): unknown {
  const known = asIdempotencyError(error)
  if (known) return known
  const state = sqlstateOf(error)
  const [, schema] = state === '42883' ? /^function (.+)\.idem_\w+\(/.exec((error as Error).message) ?? []
    : state === '3F000' ? /^schema "(.+)" does not exist/.exec((error as Error).message) ?? [] : []
  return schema === undefined ? error : new IdempotencyError(`the functions of the extension are not in schema ${schema}: ` +
    'set the option schema to the schema of the extension', { sqlstate: state, cause: error })
}

const ENDS = /^(?:\s|--[^\n]*\n|\/\*[\s\S]*?\*\/|;)*(begin|start\s+transaction|commit|end|abort|prepare\s+transaction|rollback(?!\s+(?:(?:work|transaction)\s+)?to\b))\b/i

const WENT_ON = 'the handler continued after an error of the database, which has undone its work; do not catch the error, or roll back to a savepoint'

interface CallingPool { connect(callback: (error?: Error, client?: PoolClientLike) => void): void }
/** Whether connect() is that of pg-pool, which calls back at once. The one of a subclass might ignore the callback, or also return a promise. */
function callsBack(pool: PoolLike): boolean {
  let holder: PoolLike | null = pool
  while (holder && !Object.hasOwn(holder, 'connect')) holder = Object.getPrototypeOf(holder) as PoolLike | null
  return holder !== null && Object.hasOwn(holder, 'newClient') && holder.connect === pool.connect
}

/** A client of a pool, in use for one transaction or one statement. */
export class Session {
  /** The connection was lost. */
  lost = false
  /** COMMIT was sent before the connection was lost. The transaction might have committed. */
  inDoubt = false
  /** release() does not wait for the running statement. */
  abandoned = false
  #client: PoolClientLike
  #end: Error | undefined
  #onEnd: ((error: Error) => void) | undefined
  #begun = false
  #released = false
  #cancelled = false
  #proxy: TransactionHandle<unknown> | undefined

  private constructor(client: PoolClientLike, readonly pool: PoolLike) {
    this.#client = client
    // A client in use has no other listener, and an 'error' without one ends the process.
    client.on('error', this.#onError)
  }

  /** begins is whether a transaction follows. An ORM begins it when it takes the connection, so the limit of BEGIN includes that wait. */
  static async open(pool: PoolLike, begins: boolean, limitMs = begins && pool[BEGIN] ? ANSWER_MS : Infinity): Promise<Session> {
    const connecting = new Promise<Session>((resolve, reject) => {
      const take = (client: PoolClientLike): void => resolve(new Session(client, pool))
      if (begins && pool[BEGIN]) pool[BEGIN]().then(take).catch(reject)
      else if (!callsBack(pool)) pool.connect().then(take).catch(reject)
      // With a promise, an 'error' could come before our listener.
      else (pool as unknown as CallingPool).connect((error, client) => { if (error) reject(error); else take(client!) })
    })
    try {
      return await within<Session>(limitMs, 'the pool gave no connection', (resolve, reject) => { connecting.then(resolve, reject) })
    } catch (error) {
      if (error instanceof TimedOut) connecting.then((late) => late.release(), () => undefined)
      throw asUnreachable(error)
    }
  }

  #onError = (error: Error): void => {
    this.lost = true
    this.#end = error
    this.#onEnd?.(error)
  }

  /** Calls the listener when the session ends while it is in use. */
  onEnd(listener: (error: Error) => void): void {
    this.#onEnd = listener
    if (this.#end) listener(this.#end)
  }

  /** Run the commands in one round trip if the driver supports it, otherwise one by one. */
  #exchange(commands: Command[], resolve: (answers: Answer[]) => void, reject: (error: unknown) => void): void {
    const client = this.#client as PoolClientLike & { connection?: Partial<Wire>; pipeline?: boolean; processID?: unknown }
    if (typeof client.connection?.parse === 'function' && !client.pipeline) {
      const prepared = Prepared.of(client)
      // COMMIT comes last, because a statement after it would be a transaction of its own.
      const asks = prepared.isDirect === undefined && commands.at(-1)!.text !== 'COMMIT'
      client.query(new Batch(asks ? [...commands, WHO] : commands, prepared, (error, answers) => {
        if (error) return reject(error)
        if (asks) prepared.isDirect = answers!.pop()!.rows[0]!['pid'] === String(client.processID)
        resolve(answers!)
      }))
    } else {
      this.#oneByOne(commands).then(resolve, reject)
    }
  }

  async #oneByOne(commands: Command[]): Promise<Answer[]> {
    const answers: Answer[] = []
    for (const command of commands) {
      const { text, values } = command
      if (command.isSent === false) command.isSent = true
      const result = await this.#client.query({ text, values: values.map(asText) })
      answers.push({ tag: result.command, rows: result.rows })
    }
    return answers
  }

  async #send(commands: Command[], limitMs: number): Promise<Answer[]> {
    try {
      return await within<Answer[]>(limitMs, 'the server did not answer', (resolve, reject) => this.#exchange(commands, resolve, reject))
    } catch (error) {
      if (isSilence(error) || isConnectionLost(error)) this.lost = true
      if (isSilence(error) && !(error instanceof TimedOut)) throw new TimedOut('the server did not answer in time', { cause: error })
      throw translated(error)
    }
  }

  /** Runs a statement outside of a transaction. */
  async perform<T>(statement: Statement<T>, limitMs: number): Promise<T> {
    const [answer] = await this.#send([statement], limitMs).catch((error: unknown) => {
      if (!isStale(error)) throw error
      return this.#send([statement], limitMs)
    })
    return statement.read(answer!.rows)
  }

  /** BEGIN and the first statement. */
  async begin<T = void>(statement?: Statement<T>, limitMs = ANSWER_MS): Promise<T> {
    this.#begun = true
    const [, answer] = await this.#send([{ text: 'BEGIN', values: [] }, ...(statement ? [statement] : [])], limitMs)
    return statement?.read(answer!.rows) as T
  }

  /** The last statement and COMMIT. Later statements of the handler are refused, because after COMMIT they would be transactions of their own. */
  async commit(statement?: Statement<unknown>): Promise<void> {
    this.#proxy?.over()
    if (isUnread(this.#client)) throw new TransactionEnded('the handler returned before it had read a cursor or a stream to its end, or had closed it')
    const commit: Command = { text: 'COMMIT', values: [], isSent: false }
    const answers = await this.#send([...(statement ? [statement] : []), commit], ANSWER_MS).catch((error: unknown) => {
      this.inDoubt = this.lost && commit.isSent === true
      throw sqlstateOf(error) === '25P02' ? new TransactionEnded(WENT_ON, { cause: error }) : error
    })
    this.#begun = false
    if (answers.at(-1)!.tag !== 'COMMIT') throw new TransactionEnded(WENT_ON)
  }

  async rollback(): Promise<void> {
    this.#begun = false
    await this.#send([{ text: 'ROLLBACK', values: [] }], ANSWER_MS)
  }

  /** T in a transaction, E in an aborted one, I outside of one; undefined if the driver does not report it. */
  get status(): string | null | undefined {
    return (wireOf(this.#client) as { getTransactionStatus?(): string | null }).getTransactionStatus?.()
  }

  /**
   * The client for the handler, which can neither end the transaction nor use the
   * client after its return to the pool.
   */
  get tx(): unknown {
    this.#proxy ??= this.#client.handle ?? transactionHandle(this.#client)
    return this.#proxy.tx
  }

  /** Ask the server to end the running statement, whose result is no longer needed. The client is then closed, because the request to cancel can arrive late. */
  cancel(): void {
    if (this.#released || this.#cancelled || !isBusy(this.#client)) return
    this.#cancelled = true
    void cancel(this.#client)
  }

  /** Return the client to the pool, after a ROLLBACK if necessary. Close it if it is broken, or was abandoned in a statement. */
  async release(): Promise<void> {
    if (this.#released) return
    this.#released = true
    this.#proxy?.over()
    if (this.#cancelled) this.lost = true
    if (!this.lost && ((this.abandoned && isBusy(this.#client)) || isUnread(this.#client))) {
      this.lost = true
      await Promise.race([cancel(this.#client), sleep(CANCEL_WAIT)])
    }
    if (!this.lost && (this.#begun || this.status === 'T' || this.status === 'E')) {
      await this.rollback().catch(() => { this.lost = true })
    }
    this.#client.removeListener('error', this.#onError)
    if (this.lost) {
      // Errors of the connection while it closes are irrelevant.
      this.#client.on('error', () => undefined)
      this.#client.release(true)
    } else {
      this.#client.release()
    }
  }
}

/** The time limit for sending the request to cancel. */
const CANCEL_WAIT = 2000

const wireOf = (client: PoolClientLike): object => client.below ?? client

/** Whether a statement is running; false if the driver does not report it. */
function isBusy(client: PoolClientLike): boolean {
  return (wireOf(client) as { readyForQuery?: boolean }).readyForQuery === false
}

/** Whether a cursor or stream is neither read to its end nor closed. All later statements would wait for it. */
function isUnread(client: PoolClientLike): boolean {
  if (client.isUnread !== undefined || !isBusy(client)) return client.isUnread ?? false
  // The names without an underscore are those of older versions of pg, and deprecated in newer ones.
  const wire = wireOf(client) as Record<string, any>
  const queries = ('_activeQuery' in wire ? [wire['_activeQuery'], wire['_queryQueue']] : [wire['activeQuery'], wire['queryQueue']]).flat()
  return queries.some((query) => (query?.close ?? query?.destroy) !== undefined &&
    !(query.destroyed || query.readableEnded || query.writableFinished || query.state === 'done' || query.state === 'error'))
}

/** Ask the server to end the client's statement. If only the connection is closed, the statement continues and keeps its locks. */
async function cancel(client: PoolClientLike): Promise<void> {
  const { connection, host, port, ssl, processID, secretKey } = wireOf(client) as Record<string, any>
  if (typeof connection?.cancel !== 'function') return
  await new Promise<void>((resolve) => {
    const other = new connection.constructor({ ssl })
    const send = (): void => other.cancel(processID, secretKey)
    other.on('error', resolve)
    other.on('end', resolve)
    other.on('sslconnect', send)
    other.on('connect', () => (ssl ? other.requestSsl() : send()))
    if (String(host).startsWith('/')) other.connect(`${host}/.s.PGSQL.${port}`)
    else other.connect(port, host)
    other.stream.unref?.()
  })
}

function transactionHandle(client: PoolClientLike): TransactionHandle<PoolClientLike> {
  let over = false
  const refuse = (why: string, given: unknown[]): unknown => {
    const error = new TransactionEnded(why)
    const callback = given.findLast((one) => typeof one === 'function') as ((error: Error) => void) | undefined
    // The result of a cursor or stream is not a promise, so nothing would handle its rejection.
    if (typeof (given[0] as { submit?: unknown } | undefined)?.submit === 'function') throw error
    if (!callback) return Promise.reject(error)
    callback(error)
    return undefined
  }
  const query = (...given: unknown[]): unknown => {
    if (over) return refuse('the transaction of this handle is over', given)
    const [first] = given
    const text = typeof first === 'string' ? first : (first as { text?: unknown } | undefined)?.text
    const ends = typeof text === 'string' ? ENDS.exec(text) : null
    if (ends) {
      return refuse(`the handler may not ${ends[1]!.toUpperCase()}: the transaction began with the claim and ends with ` +
        'its completion; use a savepoint', given)
    }
    return Reflect.apply(client.query, client, given)
  }
  const release = (): never => {
    throw new TransactionEnded('the handler must not release the client, which belongs to the transaction')
  }
  const tx = new Proxy(client, {
    get(target, name) {
      if (name === 'query') return query
      if (name === 'release' || name === 'end') return release
      const found: unknown = Reflect.get(target, name, target)
      return typeof found === 'function' ? found.bind(target) : found
    },
  })
  return { tx, over: () => { over = true } }
}

/** The functions that jobs call and that wait for no other transaction. */
const PROMPT = new Set(['checkpoint', 'complete', 'heartbeat', 'fail', 'release', 'lookup'])

/** Runs a statement on any connection of the pool. name is its function. */
export async function performOnPool<T>(pool: PoolLike, statement: Statement<T>, name?: string): Promise<T> {
  const session = await Session.open(pool, false)
  try {
    return await session.perform(statement, PROMPT.has(name ?? '') ? ANSWER_MS : Infinity)
  } finally {
    await session.release()
  }
}

/** Runs a statement in the user's own transaction. */
export async function performOn<T>(handle: Handle, statement: Statement<T>, adapter: Adapter<any> | undefined): Promise<T> {
  const [text, values] = [statement.text, statement.values.map(asText)]
  const client = handle as PoolClientLike
  // Other handles, such as TypeORM's, have a query() that would send the statement and return another type.
  if (!adapter && !(typeof client.query === 'function' && typeof client.removeListener === 'function')) {
    throw new TypeError(`on() takes a pg client, or a transaction of the ORM that the client was made with, not a ${describe(handle)}`)
  }
  try {
    return statement.read(adapter ? await adapter.query(text, values, handle) : (await client.query({ text, values })).rows)
  } catch (error) {
    throw translated(error)
  }
}
