/** The hook, the channel, and OpenTelemetry's spans and metrics, over a server and over the double. */
import assert from 'node:assert/strict'
import { subscribe } from 'node:diagnostics_channel'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { context, metrics, trace } from '@opentelemetry/api'
import { AsyncLocalStorageContextManager } from '@opentelemetry/context-async-hooks'
import { AggregationTemporality, InMemoryMetricExporter, MeterProvider, PeriodicExportingMetricReader } from '@opentelemetry/sdk-metrics'
import { BasicTracerProvider, InMemorySpanExporter, SimpleSpanProcessor, type ReadableSpan } from '@opentelemetry/sdk-trace-base'
import { InProgress, KeyInvalid, KeyReused, type Client, type Observers, type OutcomeEvent } from 'pg-idempotency'
import { MemoryIdempotency } from 'pg-idempotency/memory'
import { key, World } from './support.js'

const spans = new InMemorySpanExporter()
const exported = new InMemoryMetricExporter(AggregationTemporality.CUMULATIVE)
const reader = new PeriodicExportingMetricReader({ exporter: exported, exportIntervalMillis: 3_600_000 })
let world: World
before(async () => {
  context.setGlobalContextManager(new AsyncLocalStorageContextManager().enable())
  trace.setGlobalTracerProvider(new BasicTracerProvider({ spanProcessors: [new SimpleSpanProcessor(spans)] }))
  metrics.setGlobalMeterProvider(new MeterProvider({ readers: [reader] }))
  world = await World.make()
})
after(async () => {
  await reader.shutdown()
  await world.end()
})

const clients: [string, (options?: Observers) => Client<any>][] = [
  ['server', (options) => world.client(options)], ['double', (options) => new MemoryIdempotency(options)],
]
const done = (): ReadableSpan[] => spans.getFinishedSpans()
const named = (name: string): ReadableSpan => {
  const found = done().filter((span) => span.name === name)
  assert.equal(found.length, 1, `${name}: ${done().map((span) => span.name).join(' ')}`)
  return found[0]!
}

for (const [over, make] of clients) {
  test(`${over}: the hook and the channel get each outcome`, async () => {
    const events: OutcomeEvent[] = []
    const published: unknown[] = []
    const listener = (event: unknown): void => { published.push(event) }
    subscribe('pg-idempotency:outcome', listener)
    const idem = make({ onOutcome: ((event: OutcomeEvent): unknown => {
      events.push(event)
      if (events.length % 2) return Promise.reject(new Error('nor is this'))
      throw new Error('no part of the request')
    }) as () => void })
    const one = { scope: 'ann', key: key(), requestHash: Buffer.from('1'), wait: '10 seconds' }
    const first = idem.request(one, async () => { await sleep(150); return { status: 201 } })
    await Promise.all([first, idem.request(one, () => ({ status: 500 }))])
    await assert.rejects(idem.request({ ...one, requestHash: Buffer.from('2') }, () => ({ status: 201 })), KeyReused)
    await assert.rejects(idem.request({ scope: 'ann', key: key() }, () => { throw new Error('broken') }))
    const job = { scope: 'ann', key: key() }
    await idem.claim(job.scope, job.key)
    await assert.rejects(idem.job(job, () => ({ status: 201 })), InProgress)
    assert.deepEqual(events.map(({ kind, scope, outcome, attempt }) => [kind, scope, outcome, attempt]), [
      ['request', 'ann', 'new', 1], ['request', 'ann', 'replay', events[1]!.attempt], ['request', 'ann', 'hash_conflict', undefined],
      ['request', 'ann', 'failed', 1], ['job', 'ann', 'in_progress', undefined]])
    assert.ok(events[0]!.ms >= 140 && events[0]!.waited === 0 && events[1]!.waited >= 50, JSON.stringify(events))
    assert.deepEqual(published.slice(-5), events)
  })

  test(`${over}: one trace from the request to its message, and replays link to it`, async () => {
    spans.reset()
    const idem = make()
    const one = { scope: 'a secret scope', key: key() }
    const topic = key()
    const handler = async (tx: any) => {
      await idem.on(tx).publish(topic, { a: 1 })
      await idem.on(tx).publish(topic, { a: 2 }, { headers: { mine: true } })
      await idem.on(tx).publish(topic, { a: 3 }, { headers: { traceparent: 'own' } })
      await idem.on(tx).publishMany([topic, topic], [4, 5])
      return { status: 201, headers: { 'X-A': '1' }, body: 'made' }
    }
    const first = await idem.request(one, handler)
    const request = named('idempotency.request')
    const inner = named('idempotency.handler')
    const { traceId } = request.spanContext()
    assert.equal(inner.parentSpanContext!.spanId, request.spanContext().spanId)
    if (over === 'server') for (const name of ['idempotency.claim', 'idempotency.commit']) assert.equal(named(name).spanContext().traceId, traceId)
    const header = `00-${traceId}-${inner.spanContext().spanId}-01`
    const messages = await idem.outboxTake({ topics: [topic] })
    assert.deepEqual(messages.map(({ headers }) => headers),
      [{ traceparent: header }, { mine: true, traceparent: header }, { traceparent: 'own' }, { traceparent: header }, { traceparent: header }])
    spans.reset()
    const again = await idem.request(one, handler)
    assert.deepEqual([first.headers, again.headers, again.replayed], [{ 'X-A': '1' }, { 'X-A': '1' }, true], 'the trace is not sent')
    const replay = named('idempotency.request')
    assert.deepEqual(replay.links.map((link) => [link.context.traceId, link.context.spanId]), [[traceId, request.spanContext().spanId]])
    assert.deepEqual(replay.attributes, { 'db.system.name': 'postgresql', 'idempotency.outcome': 'replay', ...(replay.attributes['idempotency.attempt'] ? { 'idempotency.attempt': 1 } : {}) })
    for (const span of done()) assert.ok(!JSON.stringify([span.attributes, span.events]).includes('secret'))
    spans.reset()
    await assert.rejects(idem.request({ scope: 'a secret scope', key: 'secret key' }, handler), KeyInvalid)
    assert.equal(named('idempotency.request').attributes['error.type'], 'KeyInvalid')
    for (const span of done()) assert.ok(!JSON.stringify([span.attributes, span.events, span.status]).includes('secr'))
  })

  test(`${over}: a job's spans; scope and key only if asked for`, async () => {
    spans.reset()
    const one = { scope: 'ann', key: key() }
    await make({ traceKeys: true }).job(one, async (job) => { await job.finish(() => ({ status: 200 })) })
    const span = named('idempotency.job')
    assert.deepEqual([span.attributes['idempotency.scope'], span.attributes['idempotency.key'], span.attributes['idempotency.outcome']], ['ann', one.key, 'new'])
    assert.equal(done().filter(({ name }) => name === 'idempotency.handler').length, 2, 'the function, and its last step')
  })
}

test('metrics', async () => {
  await reader.forceFlush()
  const found = exported.getMetrics().at(-1)!.scopeMetrics.flatMap((scope) => scope.metrics)
  const points = (name: string) => found.find(({ descriptor }) => descriptor.name === name)!.dataPoints
  const requests = Object.fromEntries(points('idempotency.requests').map((point) => [point.attributes['idempotency.outcome'], point.value]))
  for (const outcome of ['new', 'replay', 'hash_conflict', 'failed', 'in_progress']) assert.ok(Number(requests[outcome]) >= 2, outcome)
  assert.ok(points('idempotency.wait.duration').length >= 1)
  assert.ok(points('idempotency.requests').every((point) => Object.keys(point.attributes).length === 1))
})
