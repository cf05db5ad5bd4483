/** pg-idempotency: requests, jobs, clicks and messages take effect once. */
export {
  Idempotency, problem,
  type Client, type Job, type JobOptions, type Options, type RequestOptions, type Response, type Result, type Step,
} from './client.js'
export {
  ActionIdAhead, asIdempotencyError, ClaimLost, ClaimNotFound, IdempotencyError, InProgress, KeyExpired, KeyInvalid,
  KeyReused, NotFinished, RateLimited, ScopeMoving, sqlstateOf, StreamingRefused, TimedOut, TransactionEnded,
} from './errors.js'
export type {
  Action, Advance, Append, BlockedLane, Claim, ClaimOptions, Core, HealthCheck, Held, Lease, Lookup, Message, MetricSample, Outcome, RequestIdentity,
  ResumedClaim, Timeout, Ttl, Wait,
} from './functions.js'
export { newKey, stepKey } from './keys.js'
export type { Observers, OutcomeEvent } from './observe.js'
export type { Handle, PoolClientLike, PoolLike } from './postgres.js'
export type { Shard, Shards } from './shards.js'
export type { Bigint, Headers, Json } from './values.js'
