/**
 * Reports requests and jobs to a hook, to a channel of node:diagnostics_channel,
 * and as spans and metrics to OpenTelemetry, if the application has its API.
 * Spans have the scope and the key only with traceKeys.
 */
import { AsyncLocalStorage } from 'node:async_hooks'
import { channel } from 'node:diagnostics_channel'
import { createRequire } from 'node:module'
import { InProgress, KeyExpired, KeyReused } from './errors.js'
import type { Claim } from './functions.js'
import type { Headers, Json } from './values.js'

export interface OutcomeEvent {
  kind: 'request' | 'job'
  scope: string
  /** 'failed' if the handler or the database threw. */
  outcome: 'new' | 'replay' | 'erased' | 'in_progress' | 'hash_conflict' | 'expired' | 'failed'
  ms: number
  /** The attempt of the claim, or undefined without a claim. */
  attempt: number | undefined
  /** The milliseconds of ms in which it waited for another request, in this process or in a claim with wait. */
  waited: number
}
export interface Observers {
  /** Called with the outcome of each request and job. Its errors are ignored. */
  onOutcome?: (event: OutcomeEvent) => void
  /** Adds the scope and the key to spans. */
  traceKeys?: boolean
}

/** The state of one request until its outcome. */
interface Observation { attempt: number | undefined; waited: number; of: string | undefined }

type Api = typeof import('@opentelemetry/api')
/** A span of @opentelemetry/api, whose types the application might not have. */
interface Span {
  setAttributes(attributes: Record<string, string | number>): unknown
  addLink?(link: { context: { traceId: string; spanId: string; traceFlags: number; isRemote: boolean } }): unknown
}

const outcomes = channel('pg-idempotency:outcome')
const observing = new AsyncLocalStorage<Observation>()
const NAME = 'pg-idempotency'
const TRACEPARENT = /^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$/

const api = ((): Api | undefined => {
  try {
    return createRequire(import.meta.url)('@opentelemetry/api') as Api
  } catch {
    return undefined
  }
})()

function instruments(meters: import('@opentelemetry/api').MeterProvider) {
  const meter = meters.getMeter(NAME)
  return {
    meters,
    requests: meter.createCounter('idempotency.requests', { description: 'Requests and jobs by outcome' }),
    wait: meter.createHistogram('idempotency.wait.duration', { unit: 's', description: 'Time spent waiting for another request with the key' }),
  }
}
let made: ReturnType<typeof instruments> | undefined

function outcomeOf(error: unknown): OutcomeEvent['outcome'] {
  if (error instanceof InProgress) return 'in_progress'
  if (error instanceof KeyReused) return 'hash_conflict'
  return error instanceof KeyExpired ? 'expired' : 'failed'
}

/** Run a request or job, and report its outcome. */
export function observed<T extends { outcome: OutcomeEvent['outcome'] }>(kind: 'request' | 'job', options: { scope: string; key: string }, observers: Observers,
  run: () => Promise<T>): Promise<T> {
  const { onOutcome, traceKeys } = observers
  if (!api && !onOutcome && !outcomes.hasSubscribers) return run()
  const observation: Observation = { attempt: undefined, waited: 0, of: undefined }
  const began = performance.now()
  const tell = (outcome: OutcomeEvent['outcome'], span?: Span): void => {
    const { attempt, waited, of } = observation
    const event: OutcomeEvent = { kind, scope: options.scope, outcome, ms: performance.now() - began, attempt, waited }
    outcomes.publish(event)
    try {
      Promise.resolve(onOutcome?.(event)).catch(() => undefined)
    } catch {
      // The hook is not a part of the request.
    }
    if (!api) return
    const provider = api.metrics.getMeterProvider()
    if (made?.meters !== provider) made = instruments(provider)
    const attributes = { 'idempotency.outcome': outcome }
    made.requests.add(1, attributes)
    if (waited > 0) made.wait.record(waited / 1000, attributes)
    span?.setAttributes({ ...attributes, ...(attempt === undefined ? {} : { 'idempotency.attempt': attempt }) })
    const [, traceId, spanId, flags] = TRACEPARENT.exec(of ?? '') ?? []
    if (traceId && spanId) span?.addLink?.({ context: { traceId, spanId, traceFlags: parseInt(flags!, 16), isRemote: true } })
  }
  return observing.run(observation, async () => spanned(`idempotency.${kind}`, async (span) => {
    if (traceKeys) span?.setAttributes({ 'idempotency.scope': options.scope, 'idempotency.key': options.key })
    try {
      const result = await run()
      tell(result.outcome, span)
      return result
    } catch (error) {
      tell(outcomeOf(error), span)
      throw error
    }
  }))
}

/** Run a part of a request as a span. */
export function spanned<T>(name: string, run: (span?: Span) => Promise<T> | T): Promise<T> | T {
  if (!api || !observing.getStore()) return run()
  return api.trace.getTracer(NAME).startActiveSpan(name, { attributes: { 'db.system.name': 'postgresql' } }, async (span) => {
    try {
      return await run(span)
    } catch (error) {
      // The text of an error can have a part of the key.
      span.setAttribute('error.type', (error as Error)?.name ?? 'Error')
      span.setStatus({ code: api!.SpanStatusCode.ERROR })
      throw error
    } finally {
      span.end()
    }
  })
}

/** Wait for another request, as a span, and count the time. */
export async function waiting<T>(run: () => Promise<T>): Promise<T> {
  const observation = observing.getStore()
  const began = performance.now()
  try {
    return await spanned('idempotency.wait', run)
  } finally {
    if (observation) observation.waited += performance.now() - began
  }
}

/** Notes the claim of the observed request, and its time if it was allowed to wait. */
export function noteClaim(claim: Claim, ms: number): void {
  const observation = observing.getStore()
  if (!observation) return
  if (claim.outcome !== 'new') observation.waited += ms
  observation.attempt = claim.attempt ?? undefined
  observation.of = claim.responseHeaders?.['traceparent'] as string | undefined
}

/** The active span as the header of W3C's trace context, or undefined. */
export function traceparent(): string | undefined {
  const span = api?.trace.getSpan(api.context.active())?.spanContext()
  return span && api!.isSpanContextValid(span) ? `00-${span.traceId}-${span.spanId}-${span.traceFlags.toString(16).padStart(2, '0')}` : undefined
}

/** A message's headers with its trace. A message that already has a trace keeps it. */
export function tracedHeaders<H extends Json | undefined>(headers: H): H | Json {
  if (!(headers === undefined || (typeof headers === 'object' && headers !== null && !Array.isArray(headers) && !('traceparent' in headers)))) return headers
  const found = traceparent()
  return found === undefined ? headers : { ...headers as object, traceparent: found }
}

/** The headers of a stored response, without the trace that is stored among them. */
export function withoutTrace(headers: Headers | null): Headers {
  const { traceparent: _, ...rest } = headers ?? {}
  return rest
}
