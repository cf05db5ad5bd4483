/**
 * The classes of errors, and the search for an error that a query builder has
 * wrapped.
 */

/** The base of all errors of this package. */
export class IdempotencyError extends Error {
  /** The SQLSTATE, if the error came from the database. */
  readonly sqlstate: string | undefined
  /** The server's detail and hint: what is wrong, and what to do. */
  readonly detail: string | undefined
  readonly hint: string | undefined

  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause })
    this.name = new.target.name
    this.sqlstate = options.sqlstate
    this.detail = options.detail
    this.hint = options.hint
  }
}

interface ErrorOptions {
  sqlstate?: string | undefined
  detail?: string | undefined
  hint?: string | undefined
  cause?: unknown
}

/** ID001: the key breaks the key rules. */
export class KeyInvalid extends IdempotencyError {}

/** An error after which the same request can succeed. */
class TryLater extends IdempotencyError {
  /** retryAfter: in how many seconds to try again. */
  constructor(message: string, readonly retryAfter: number, options: ErrorOptions = {}) {
    super(message, options)
  }
}

/** ID002: too many new keys in this scope. */
export class RateLimited extends TryLater {}

/** ID003: another claimant has taken over, or the token is missing. */
export class ClaimLost extends IdempotencyError {}

/** ID004: there is no live claim. */
export class ClaimNotFound extends IdempotencyError {}

/** ID005: the action id is too far in the future. */
export class ActionIdAhead extends IdempotencyError {}

/** The first request is still running. */
export class InProgress extends TryLater {
  constructor(message = 'the request is running', retryAfter = 1) {
    super(message, retryAfter)
  }
}

/** The key was used for another request. */
export class KeyReused extends IdempotencyError {}

/** The key is too old, and idempotency.expired_key_policy is reject. */
export class KeyExpired extends IdempotencyError {}

/** The scope is being moved to another shard, which takes longer than the client waits. Retry with the same key. */
export class ScopeMoving extends TryLater {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, 1, options)
  }
}

/** The handler took longer than its timeout, and its transaction was rolled back; or the server did not answer. */
export class TimedOut extends IdempotencyError {}

/** The handler has ended its transaction, or has continued after an error that aborted it. */
export class TransactionEnded extends IdempotencyError {}

/** The function of a job has neither finished it nor returned a response. */
export class NotFinished extends IdempotencyError {}

/** A handler streams its response. */
export class StreamingRefused extends IdempotencyError {}

const CLASSES: Record<string, new (message: string, options: ErrorOptions) => IdempotencyError> = {
  ID001: KeyInvalid, ID003: ClaimLost, ID004: ClaimNotFound, ID005: ActionIdAhead,
}

/** An error, and then the errors that it wraps. */
function* layers(error: unknown): Generator<Record<string, unknown>> {
  const seen = new Set<unknown>()
  const next = [error]
  while (next.length > 0) {
    const found = next.shift()
    if (typeof found !== 'object' || found === null || seen.has(found)) continue
    seen.add(found)
    const layer = found as Record<string, unknown>
    yield layer
    next.push(layer['cause'], layer['original'], layer['parent'], layer['originalError'], layer['meta'], layer['driverAdapterError'])
  }
}

/** The SQLSTATE of an error or of a wrapped error. */
export function sqlstateOf(error: unknown): string | undefined {
  for (const layer of layers(error)) {
    const code = layer['sqlstate'] ?? layer['originalCode'] ?? layer['code']
    // Node has codes such as ECONN…, and Prisma has P2010.
    if (typeof code === 'string' && /^(?!E[A-Z]{4}$|P[1-9])[0-9A-Z]{5}$/.test(code)) return code
  }
  return undefined
}

/** The error as one of our classes, if it or a wrapped error is one of ID001 to ID005. */
export function asIdempotencyError(error: unknown): IdempotencyError | undefined {
  for (const layer of layers(error)) {
    if (layer instanceof IdempotencyError) return layer
    const code = layer['originalCode'] ?? layer['code']
    if (typeof code !== 'string' || !/^ID00[1-5]$/.test(code)) continue
    const message = String(layer['originalMessage'] ?? layer['message'])
    const said = (name: string): string | undefined => (typeof layer[name] === 'string' ? layer[name] : undefined)
    const options = { sqlstate: code, detail: said('detail'), hint: said('hint'), cause: error }
    if (code === 'ID002') {
      return new RateLimited(message, Number(/\d+/.exec(String(layer['hint']))?.[0] ?? 60), options)
    }
    return new CLASSES[code]!(message, options)
  }
  return undefined
}
