/** The module and the decorators for NestJS, against a server. */
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import 'reflect-metadata'
import {
  Body, ClassSerializerInterceptor, Controller, ForbiddenException, Header, HttpException, Module, NotFoundException, Param, Post, Redirect, RequestTimeoutException,
  Res, Scope, Sse, StreamableFile, UploadedFile, UseInterceptors, type ArgumentsHost, type CallHandler, type ExecutionContext,
  type INestApplication, type Type,
} from '@nestjs/common'
import { APP_INTERCEPTOR, ContextIdFactory, createContextId, NestFactory, Reflector, type AbstractHttpAdapter } from '@nestjs/core'
import { ExpressAdapter, FileInterceptor } from '@nestjs/platform-express'
import { FastifyAdapter } from '@nestjs/platform-fastify'
import { catchError, defer, delay, from, lastValueFrom, map, mergeMap, of, retry, startWith, timeout, timer } from 'rxjs'
import type pg from 'pg'
import { newKey, type Idempotency, type Job as JobType } from 'pg-idempotency'
import { IdempotencyModule, Idempotent, Job, Tx } from 'pg-idempotency/nest'
import { World } from './support.js'

let world: World
let idem: Idempotency
let app: INestApplication
let url: string
let conflicts = 0

class User {
  name = 'Ann'
  password = 'secret'
}
/** In place of the package class-transformer. */
const transformer = { classToPlain: (value: object) => (value instanceof User ? { name: value.name } : value), plainToInstance: (_: unknown, value: object) => value }
/** Interceptors of a route, outside of the guard. */
const FAST = { intercept: (_: unknown, next: CallHandler) => next.handle().pipe(timeout(100), catchError(() => { throw new RequestTimeoutException() })) }
/** Answers with its own value after 100 ms, and cannot unsubscribe from the handler below LOGS, whose promise has no end. */
const FALLBACK = { intercept: (_: unknown, next: CallHandler) => next.handle().pipe(timeout(100), catchError(() => of({ late: true }))) }
const LOGS = { intercept: async (_: unknown, next: CallHandler) => of(await lastValueFrom(next.handle())) }
const NONE = { intercept: (_: unknown, next: CallHandler) => next.handle().pipe(map((data) => { if (!data) throw new NotFoundException(); return data })) }

/** An interceptor outside of the guard that fails after the handler, if the request names it: at once, or later. */
const failing = (where: string) => ({ intercept: (context: ExecutionContext, next: CallHandler) => next.handle().pipe(mergeMap((data) => {
  const fails: unknown = context.switchToHttp().getRequest().body?.fails
  if (fails === `${where} at once`) throw new Error(where)
  return fails === `${where} later` ? timer(5).pipe(map(() => { throw new Error(where) })) : of(data)
})) })
const AGAIN = { intercept: (_: unknown, next: CallHandler) => next.handle().pipe(retry(1)) }
const ONCE = { intercept: (_: unknown, next: CallHandler) => next.handle().pipe(map((data) => { if (conflicts-- > 0) throw new Error('once'); return data })) }
const FORBID = { intercept: (context: ExecutionContext, next: CallHandler) => next.handle().pipe(map((data) => {
  if (context.switchToHttp().getRequest().headers['x-forbid']) throw new ForbiddenException()
  return data
})) }
let release = (): void => undefined
/** Leaves its first run, and release()s when its second one waits, too. */
const LEAVES = { intercept: (context: ExecutionContext, next: CallHandler) => {
  let runs = 0
  return defer(() => {
    if (runs++ === 0) return next.handle().pipe(timeout(300))
    setTimeout(() => release(), 300)
    return next.handle()
  }).pipe(retry(1), mergeMap(async (data) => {
    if (!context.switchToHttp().getRequest().headers['x-forbid']) return data
    await sleep(300)
    throw new ForbiddenException()
  }))
} }
const SLOW = { intercept: (_: unknown, next: CallHandler) => next.handle().pipe(delay(60_000)) }

@Controller('orders')
@UseInterceptors(failing('controller'))
class Orders {
  @Post()
  @Header('Location', '/orders/1')
  @Idempotent()
  async create(@Body() body: { what: string; fails?: string }, @Tx() tx: pg.PoolClient, @Res({ passthrough: true }) res: any) {
    await tx.query('INSERT INTO effects (what) VALUES ($1)', [body.what])
    if (conflicts-- > 0) {
      res.setHeader('ETag', 'of the first try')
      await tx.query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
    }
    if (body.fails === 'throws') throw new HttpException('no money', 402)
    if (body.fails === 'status') res.status(402)
    return { what: body.what, 10: 'b', 2: 'a' }
  }

  @Post('text')
  @Idempotent()
  async text(@Body() body: { what: string }) { return `<b>${body.what}</b>` }

  @Post('raw')
  @Header('Content-Type', 'application/json')
  @Idempotent()
  async raw() { return '{"spaces":   1}' }

  @Post('nothing')
  @Idempotent()
  async nothing() {}

  @Post('file')
  @Idempotent()
  async file(@Tx() tx: pg.PoolClient) {
    await tx.query("INSERT INTO effects (what) VALUES ('file')")
    return new StreamableFile(Buffer.from('x'))
  }

  @Post('number')
  @Idempotent()
  async number() { return 7 }

  @Post('empty')
  @Idempotent()
  async empty() { return '' }

  @Post('null')
  @Idempotent()
  async null() { return null }

  @Post('bytes')
  @Idempotent()
  async bytes() { return Buffer.from([97, 255]) }

  @Post('date')
  @Idempotent()
  async date() { return new Date(0) }

  @Post('user')
  @Idempotent()
  async user() { return new User() }

  @Post('left')
  @Idempotent({ wait: '30 seconds' })
  @UseInterceptors(LEAVES)
  async left(@Body() { what }: { what: string }, @Tx() tx: pg.PoolClient) {
    await tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
    return { what }
  }

  @Post('slow')
  @Idempotent()
  @UseInterceptors(FAST)
  async slow(@Tx() tx: pg.PoolClient) {
    await tx.query("INSERT INTO effects (what) VALUES ('slow')")
    return new Promise(() => undefined)
  }

  @Post('missing')
  @Idempotent()
  @UseInterceptors(NONE)
  async missing(@Tx() tx: pg.PoolClient) {
    await tx.query("INSERT INTO effects (what) VALUES ('missing')")
    return null
  }

  @Post('outer')
  @Idempotent()
  @UseInterceptors(failing('method'))
  async outer(@Body() { what }: { what: string }, @Tx() tx: pg.PoolClient) {
    await tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
    return { what }
  }

  @Post('again')
  @Idempotent()
  @UseInterceptors(AGAIN)
  async again(@Body() { what }: { what: string }, @Tx() tx: pg.PoolClient) {
    await tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
    if (conflicts-- > 0) throw new Error('the first time')
    return { what }
  }

  @Post('again/outside')
  @Idempotent()
  @UseInterceptors(AGAIN, ONCE)
  async outside(@Body() { what }: { what: string }, @Tx() tx: pg.PoolClient) {
    await tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
    return { what }
  }

  @Post('forbid')
  @Idempotent()
  @UseInterceptors(FORBID)
  async forbid() { return { secret: 7 } }

  @Post('form')
  @Idempotent()
  async form(@Body() { what }: { what: string }) { return { what } }

  @Post('circular')
  @Idempotent()
  async circular(@Tx() tx: pg.PoolClient) {
    await tx.query("INSERT INTO effects (what) VALUES ('circular')")
    const value: any = {}
    value.self = value
    return value
  }

  @Post('bigint')
  @Idempotent()
  async bigint(@Body() { what }: { what: string }, @Tx() tx: pg.PoolClient) {
    await tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
    if (conflicts-- > 0) await tx.query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
    return { n: 1n }
  }

  @Post('fallback')
  @Idempotent({ wait: '20 seconds' })
  @UseInterceptors(FALLBACK, LOGS)
  async fallback(@Body() { what }: { what: string }, @Tx() tx: pg.PoolClient) {
    await tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
    await sleep(500)
    return { what }
  }

  @Post('gone')
  @Idempotent()
  @UseInterceptors(SLOW)
  gone(@Tx() tx: pg.PoolClient) { return from(tx.query("INSERT INTO effects (what) VALUES ('gone')")).pipe(map(() => 'done')) }

  @Post('upload')
  @Idempotent()
  @UseInterceptors(FileInterceptor('file'))
  async upload(@UploadedFile() file: any) { return { text: file.buffer.toString() } }

  @Post('upload/inside')
  @UseInterceptors(FileInterceptor('file'))
  @Idempotent()
  async inside(@UploadedFile() file: any) { return { text: file.buffer.toString() } }

  @Sse('events')
  @Idempotent()
  events() { return of({ data: 1 }) }

  @Post('redirect')
  @Redirect('/never', 303)
  @Idempotent()
  async redirect() { return { url: '/thanks', statusCode: 302 } }

  @Post('generator')
  @Idempotent()
  async generator(@Tx() tx: pg.PoolClient) {
    await tx.query("INSERT INTO effects (what) VALUES ('file')")
    return (async function* parts() { yield 1 })()
  }

  @Post('sends')
  @Idempotent()
  async sends(@Tx() tx: pg.PoolClient, @Res({ passthrough: true }) res: any) {
    await tx.query("INSERT INTO effects (what) VALUES ('file')")
    res.header('X-Rolled-Back', 'yes')
    res.send({ other: true })
    return { a: 1 }
  }

  @Post('late')
  @Idempotent({ timeoutMs: 200 })
  async late(@Tx() tx: pg.PoolClient) {
    await tx.query("INSERT INTO effects (what) VALUES ('file')")
    await new Promise((resolve) => { setTimeout(resolve, 400) })
    return { a: 1 }
  }

  @Post('jobs/:last')
  @Idempotent({ job: true, lease: '30 seconds' })
  async job(@Job() job: JobType<pg.PoolClient>, @Param('last') last: string) {
    const charge = await job.step('charge', () => ({ id: 'ch_1' }))
    if (last === 'returns') return charge
    await job.finish(async (tx) => {
      await tx.query('INSERT INTO effects (what) VALUES ($1)', [job.key])
      return { status: 202, headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ last: true }) }
    })
    return undefined
  }
}

before(async () => {
  world = await World.make()
  idem = world.client()
  @Module({ controllers: [Orders], imports: [IdempotencyModule.forRootAsync({
    useFactory: async () => ({ client: idem, scope: (request) => request.headers['x-user'] }),
  })] })
  class Shop {}
  app = await NestFactory.create(Shop, { logger: false, rawBody: true })
  // As an application wraps all that it answers.
  app.useGlobalInterceptors({ intercept: (_: unknown, next: CallHandler) => next.handle().pipe(map((data) => (typeof data === 'object' ? { data } : data))) },
    new ClassSerializerInterceptor(app.get(Reflector), { transformerPackage: transformer } as object))
  await app.listen(0, '127.0.0.1')
  url = await app.getUrl()
})
after(async () => {
  await app?.close()
  await world.end()
})

const post = async (path: string, key: string, body: object = {}, more: Record<string, string | undefined> = {}) => {
  const answer = await fetch(url + path, { method: 'POST', body: JSON.stringify(body), redirect: 'manual',
    headers: { 'Content-Type': 'application/json', 'X-User': 'ann', ...(key === '' ? {} : { 'Idempotency-Key': key }), ...JSON.parse(JSON.stringify(more)) } })
  return { status: answer.status, replayed: answer.headers.get('Idempotent-Replayed'), type: answer.headers.get('Content-Type'),
    location: answer.headers.get('Location'), tag: answer.headers.get('ETag'), text: await answer.text() }
}
const twice = async (path: string, body: object = {}) => {
  const key = newKey()
  const first = await post(path, key, body)
  const again = await post(path, key, body)
  assert.deepEqual(again, { ...first, replayed: 'true' })
  assert.equal(first.replayed, null)
  return first
}

test('a first response and its replay are the same, through the interceptors of the application', async () => {
  const what = newKey()
  const { status, text, type, location } = await twice('/orders', { what })
  assert.deepEqual([status, text, location], [201, JSON.stringify({ data: { what, 10: 'b', 2: 'a' } }), '/orders/1'])
  assert.match(type!, /application\/json/)
  assert.equal(await world.effects(what), 1)
  assert.equal((await twice('/orders/text', { what })).text, `<b>${what}</b>`)
  assert.equal((await twice('/orders/raw')).text, '{"spaces":   1}')
  assert.equal((await twice('/orders/nothing')).text, '')
  for (const path of ['number', 'null', 'empty', 'bytes', 'date']) await twice(`/orders/${path}`)
  await twice('/orders/redirect')
})

test('what is thrown is rolled back and not stored; a status that the handler sets is stored', async () => {
  const key = newKey()
  for (let tries = 0; tries < 2; tries++) assert.deepEqual([(await post('/orders', key, { what: key, fails: 'throws' })).status, await world.effects(key)], [402, 0])
  assert.equal((await twice('/orders', { what: key, fails: 'status' })).status, 402)
  assert.equal(await world.effects(key), 1)
})

test('40001 runs again, without what the first try has put on the response', async () => {
  conflicts = 1
  const key = newKey()
  const { status, tag } = await post('/orders', key, { what: key })
  assert.equal(status, 201)
  assert.notEqual(tag, 'of the first try')
  assert.equal(await world.effects(key), 1)
})

test('refusals are problem documents, through the exception filters', async () => {
  const without = await post('/orders', '')
  assert.deepEqual([without.status, JSON.parse(without.text).type], [400, 'urn:pg-idempotency:key-required'])
  assert.match(without.type!, /application\/problem\+json/)
  const key = newKey()
  await post('/orders', key, { what: 'a' })
  assert.equal((await post('/orders', key, { what: 'b' })).status, 422)
  assert.equal((await post('/orders', 'short', { what: 'b' })).status, 400)
})

test('jobs', async () => {
  assert.equal((await twice('/orders/jobs/returns')).text, '{"data":{"id":"ch_1"}}')
  const { status, text } = await twice('/orders/jobs/finishes')
  // The last step stores its response itself.
  assert.deepEqual([status, text], [202, '{"last":true}'])
})

test('what an outer interceptor hides is neither stored nor replayed', async () => {
  const hides = async (text: string): Promise<void> => {
    assert.equal((await twice('/orders/user')).text, text)
    const [{ n }] = await world.sql("SELECT count(*)::int AS n FROM idem.idem_keys k WHERE k::text LIKE '%secret%'")
    assert.equal(n, 0)
  }
  await hides('{"data":{"name":"Ann"}}')
  await withShop(new FastifyAdapter(), (other) => {
    other.useGlobalInterceptors(new ClassSerializerInterceptor(other.get(Reflector), { transformerPackage: transformer } as object))
  }, () => hides('{"name":"Ann"}'))
})

const outer = async (): Promise<void> => {
  for (const [path, status] of [['slow', 408], ['missing', 404]] as const) {
    const key = newKey()
    for (let tries = 0; tries < 2; tries++) {
      const answer = await post(`/orders/${path}`, key)
      assert.deepEqual([answer.status, answer.replayed, await world.effects(path)], [status, null, 0], path)
    }
  }
}
test('an exception of an outer interceptor is answered, and the work is rolled back', async () => {
  await outer()
  await withShop(new FastifyAdapter(), () => undefined, outer)
})

test('an outer interceptor that answers while the handler runs, or waits for the key, is heard at once', async () => {
  const fallback = async (scope: string): Promise<void> => {
    const what = newKey()
    // The second one waits for the key.
    const answers = await Promise.all([1, 2].map(() => post('/orders/fallback', what, { what })))
    assert.deepEqual(answers.map(({ status, text }) => [status, JSON.parse(text).type]), Array(2).fill([500, 'urn:pg-idempotency:rolled-back']))
    // This waits for the end of the transactions.
    assert.deepEqual([(await idem.claim(scope, what, { wait: '30 seconds' })).outcome, await world.effects(what)], ['new', 0])
  }
  await fallback('ann')
  await withShop(new FastifyAdapter(), () => undefined, () => fallback('other'))
})

test('after 40001 in the first run, a value that is no JSON is a failure of the second one', async () => {
  const refused = async (): Promise<void> => {
    conflicts = 1
    const what = newKey()
    assert.deepEqual([(await post('/orders/bigint', what, { what })).status, await world.effects(what)], [500, 0])
    assert.equal(conflicts, -1)
  }
  await refused()
  await withShop(new FastifyAdapter(), () => undefined, refused)
})

test('if COMMIT fails with 40001 after the outer interceptors, the client must repeat the request', async () => {
  await world.sql(`CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'again' USING ERRCODE = '40001'; END $$;
    CREATE CONSTRAINT TRIGGER conflict AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.what = 'conflict') EXECUTE FUNCTION conflict()`)
  const conflict = async (): Promise<void> => {
    const { status } = await post('/orders', newKey(), { what: 'conflict' })
    assert.deepEqual([status, await world.effects('conflict')], [503, 0])
  }
  await conflict()
  await withShop(new FastifyAdapter(), () => undefined, conflict)
})

test('files are compared, whether multer runs before the guard or after it', async () => {
  for (const path of ['upload', 'upload/inside']) {
    const key = newKey()
    const answers: unknown[] = []
    for (const content of ['one', 'one', 'two']) {
      const body = new FormData()
      body.append('file', new Blob([content]), 'f.txt')
      const answer = await fetch(`${url}/orders/${path}`, { method: 'POST', body, headers: { 'X-User': 'ann', 'Idempotency-Key': key } })
      answers.push([answer.status, answer.headers.get('Idempotent-Replayed'), answer.ok && await answer.text()])
    }
    assert.deepEqual(answers, [[201, null, '{"data":{"text":"one"}}'], [201, 'true', '{"data":{"text":"one"}}'], [422, null, false]], path)
  }
})

test('what is no HTTP request with one response is refused', async () => {
  const answer = await fetch(`${url}/orders/events`, { headers: { 'X-User': 'ann', 'Idempotency-Key': newKey() } })
  assert.deepEqual([answer.status, (await answer.text()).includes('data: 1')], [500, false])
  const [Interceptor] = Reflect.getMetadata('__interceptors__', Orders.prototype.text)
  const guard = new Interceptor({ client: idem }, { get: () => undefined })
  for (const kind of ['rpc', 'ws', 'graphql']) {
    assert.throws(() => guard.intercept({ getType: () => kind, getHandler: () => Orders.prototype.text, getClass: () => Orders }),
      new RegExp(`Orders\\.text\\(\\) must not be guarded: .* not for ${kind}$`))
  }
})

test('what cannot be held back is refused', async () => {
  for (const path of ['file', 'generator', 'sends']) {
    const { status, text } = await post(`/orders/${path}`, newKey())
    assert.deepEqual([status, JSON.parse(text).type], [500, 'urn:pg-idempotency:streaming-refused'], path)
  }
  assert.equal(await world.effects('file'), 0)
  assert.throws(() => {
    class Wrong {
      @Idempotent()
      @Post()
      wrong(@Res() res: any) { res.json({}) }
    }
    return Wrong
  }, /is guarded, and must not use @Res\(\)/)
  assert.throws(() => (Idempotent() as any)(Orders), /is for methods, and not for the class Orders/)
  assert.throws(() => Idempotent({ wat: 1 } as object), /no option wat/)
  assert.throws(() => Idempotent(1 as never), /must be an object, not 1/)
  assert.throws(() => Idempotent({ job: 'no' as never }), /the option job must be true or false/)
})

/** Another application with the same routes, for the time of fn. */
async function withShop(adapter: AbstractHttpAdapter | undefined, prepare: (other: INestApplication) => void, fn: () => Promise<void>): Promise<void> {
  @Module({ controllers: [Orders], imports: [IdempotencyModule.forRoot({ client: idem, scope: () => 'other' })],
    providers: [{ provide: APP_INTERCEPTOR, useValue: failing('module') }] })
  class Shop {}
  const other = await (adapter ? NestFactory.create(Shop, adapter, { logger: false }) : NestFactory.create(Shop, { logger: false }))
  prepare(other)
  await other.listen(0, '127.0.0.1')
  const before = url
  url = await other.getUrl()
  try {
    await fn()
  } finally {
    url = before
    await other.close()
  }
}

const SORRY = { catch: (_: unknown, host: ArgumentsHost) => { host.switchToHttp().getResponse().status(201).send({ sorry: true }) } }

test('an exception filter cannot make a success of work that was rolled back', async () => {
  for (const adapter of [undefined, new FastifyAdapter()]) {
    await withShop(adapter, (other) => other.useGlobalFilters(SORRY), async () => {
      for (const path of ['late', 'file', 'sends']) {
        const { status, text } = await post(`/orders/${path}`, newKey())
        assert.deepEqual([status, JSON.parse(text).type], [500, 'urn:pg-idempotency:rolled-back'], path)
      }
    })
  }
  assert.equal(await world.effects('file'), 0)
})

test('an exception that leaves an outer interceptor, or a value that is no JSON, is a failure of the request', async () => {
  for (const adapter of [undefined, new FastifyAdapter()]) {
    await withShop(adapter, (other) => {
      other.useGlobalInterceptors(failing('global'))
      other.useGlobalFilters(SORRY)
    }, async () => {
      const refused = async (path: string, body: { what: string; fails?: string }): Promise<void> => {
        const { status, text } = await post(path, body.what, body)
        assert.deepEqual([status, JSON.parse(text).type, await world.effects(body.what)], [500, 'urn:pg-idempotency:rolled-back', 0], body.fails)
      }
      for (const where of ['module', 'global', 'controller', 'method']) {
        for (const when of ['at once', 'later']) {
          const what = newKey()
          await refused('/orders/outer', { what, fails: `${where} ${when}` })
          assert.deepEqual([(await post('/orders/outer', what, { what })).status, await world.effects(what)], [201, 1])
        }
      }
      await refused('/orders/circular', { what: newKey() })
    })
  }
  assert.equal(await world.effects('circular'), 0)
})

test('an outer interceptor can repeat the request after an error', async () => {
  const again = async (): Promise<void> => {
    for (const path of ['again', 'again/outside']) {
      conflicts = 1
      const what = newKey()
      const { status } = await twice(`/orders/${path}`, { what })
      assert.deepEqual([status, await world.effects(what)], [201, 1], path)
    }
  }
  await again()
  await withShop(new FastifyAdapter(), () => undefined, again)
})

test('a run that an outer interceptor has left, and that waits for the key, does not change the response of the next run', async () => {
  const left = async (scope: string): Promise<void> => {
    for (const forbid of [undefined, 'yes']) {
      const what = newKey()
      const freed = new Promise<void>((resolve) => { release = resolve })
      let holds = (): void => undefined
      const held = new Promise<void>((resolve) => { holds = resolve })
      const holder = idem.request({ scope, key: what, method: 'POST', path: '/orders/left', body: JSON.stringify({ what }) }, async () => {
        holds()
        await freed
        if (!forbid) throw new Error('undone')
        return { status: 201, headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ what }) }
      }).catch(() => undefined)
      await held
      const { status } = await post('/orders/left', what, { what }, { 'X-Forbid': forbid })
      await holder
      assert.deepEqual([status, await world.effects(what)], forbid ? [403, 0] : [201, 1])
      const again = await post('/orders/left', what, { what })
      assert.deepEqual([again.status, again.replayed, JSON.parse(again.text).what], [201, 'true', what])
    }
  }
  await withShop(undefined, () => undefined, () => left('other'))
  await withShop(new FastifyAdapter(), () => undefined, () => left('other'))
})

test('an outer interceptor can refuse a replay', async () => {
  const forbidden = async (): Promise<void> => {
    const what = newKey()
    const answers: unknown[] = []
    for (const forbid of [undefined, 'yes', undefined]) {
      const answer = await post('/orders/forbid', what, {}, { 'X-Forbid': forbid })
      answers.push([answer.status, answer.replayed, JSON.parse(answer.text).secret])
    }
    assert.deepEqual(answers, [[201, null, 7], [403, null, undefined], [201, 'true', 7]])
  }
  await withShop(undefined, () => undefined, forbidden)
  await withShop(new FastifyAdapter(), () => undefined, forbidden)
})

test('the field of a form has the key if the header is missing', async () => {
  const form = async (): Promise<void> => {
    const what = newKey()
    const send = async (other: string) => fetch(`${url}/orders/form`, { method: 'POST', headers: { 'X-User': 'ann' },
      body: new URLSearchParams({ what: other, _idempotency_key: what }) }).then(({ status, headers }) => [status, headers.get('Idempotent-Replayed')])
    assert.deepEqual([await send(what), await send(what), await send('other')], [[201, null], [201, 'true'], [422, null]])
  }
  await form()
  await withShop(new FastifyAdapter(), () => undefined, form)
})

/** Starts an application with these controllers, which fails if one of them has lost its guard, and sends a POST to each path. */
async function statuses(controllers: Type[], ...paths: string[]): Promise<number[]> {
  @Module({ controllers, imports: [IdempotencyModule.forRoot({ client: idem, scope: () => 'u' })] })
  class Shop {}
  const made: number[] = []
  for (const adapter of [new ExpressAdapter(), new FastifyAdapter()]) {
    const shop = await NestFactory.create(Shop, adapter as AbstractHttpAdapter, { logger: false, abortOnError: false })
    try {
      await shop.listen(0, '127.0.0.1')
      for (const path of paths) made.push((await fetch(`${await shop.getUrl()}/${path}`, { method: 'POST', headers: { 'Idempotency-Key': newKey() } })).status)
    } finally {
      await shop.close()
    }
  }
  return made
}

test('a method that another decorator has replaced is refused when the application starts', async () => {
  const replaces: MethodDecorator = (_target, _name, descriptor: any) => ({ ...descriptor, value(...given: unknown[]) { return descriptor.value.apply(this, given) as unknown } })
  @Controller('wrapped')
  class Wrapped {
    @Post()
    @replaces
    @Idempotent()
    async create() {}
  }
  await assert.rejects(statuses([Wrapped]), /^TypeError: Wrapped\.create\(\) is not guarded: put @Idempotent\(\) above/)
})

test('a method of a subclass that replaces a guarded one without a guard is refused', async () => {
  const runs: string[] = []
  class Base {
    @Post()
    @Idempotent()
    async create() { runs.push('base') }
  }
  @Controller('unguarded')
  class Unguarded extends Base {
    @Post()
    override async create() { runs.push('unguarded') }
  }
  @Controller('guarded')
  class Guarded extends Base {
    @Post()
    @Idempotent()
    override async create() { runs.push('guarded') }
    @Post('other')
    async other() { runs.push('other') }
  }
  @Controller('inherits')
  class Inherits extends Base {}
  @Controller('no-route')
  class NoRoute extends Base {
    override async create() { runs.push('no route') }
  }
  await assert.rejects(statuses([Guarded, Unguarded]), /^TypeError: Unguarded\.create\(\) is not guarded/)
  assert.deepEqual(await statuses([Guarded, Inherits, NoRoute], 'guarded', 'guarded/other', 'inherits', 'no-route'), [201, 201, 201, 404, 201, 201, 201, 404])
  assert.deepEqual(runs, ['guarded', 'other', 'base', 'guarded', 'other', 'base'])
})

test('a guarded method that the instance replaces is refused, and its other methods are not', async (context) => {
  const runs: string[] = []
  // For durable controllers, of which there is one for all requests here.
  const tree = createContextId()
  ContextIdFactory.apply({ attach: (id) => ({ resolve: ({ isTreeDurable }) => (isTreeDurable ? tree : id), payload: {} }) })
  context.after(() => ContextIdFactory.apply(undefined as never))
  class Both {
    constructor() {
      const { list } = this
      this.list = async function foreign() { return list() }
    }

    @Post()
    @Idempotent()
    async create() { runs.push('create') }
    @Post('list')
    async list() { runs.push('list') }
    async noRoute() { runs.push('no route') }
  }
  const replacements: ((one: Both) => Both['create'])[] = [(one) => one.create.bind(one), ({ create }) => () => create(), (one) => one.noRoute, (one) => one.list, (one) => one.list.bind(one)]
  for (const replacement of replacements) {
    @Controller('replaced')
    class Replaced extends Both {
      constructor() {
        super()
        this.create = replacement(this)
      }
    }
    await assert.rejects(statuses([Replaced]), /^TypeError: Replaced\.create\(\) is not guarded/)
    @Controller({ path: 'scoped', scope: Scope.REQUEST })
    class Scoped extends Replaced {}
    @Controller({ path: 'durable', scope: Scope.REQUEST, durable: true })
    class Durable extends Replaced {}
    assert.deepEqual(await statuses([Scoped, Durable], 'scoped', 'durable'), Array(4).fill(500))
  }
  @Controller('both')
  class Kept extends Both {}
  @Controller({ path: 'scoped', scope: Scope.REQUEST })
  class ScopedKept extends Both {}
  assert.deepEqual(runs.splice(0), [])
  assert.deepEqual(await statuses([Kept, ScopedKept], 'both', 'both/list', 'scoped', 'scoped/list'), Array(8).fill(201))
  assert.deepEqual(runs, Array(4).fill(['create', 'list']).flat())
})

test('an interceptor that answers without waiting for the handler sends no success', async () => {
  const runs: string[] = []
  const early = (_: unknown, next: CallHandler) => {
    next.handle().subscribe({ error: () => undefined })
    return of({ early: true })
  }
  const EARLY = { intercept: early }
  const LATER = { intercept: async (_: unknown, next: CallHandler) => { const answer = early(_, next); await sleep(100); return answer } }
  const ABSENT = { intercept: () => of({ absent: true }) }
  const FIRST = { intercept: (_: unknown, next: CallHandler) => next.handle().pipe(startWith('not the last value')) }
  const slow = async (what: string): Promise<object> => { runs.push(what); await sleep(500); return { what } }
  @Controller('early')
  class Early {
    @Post('at-once')
    @Idempotent()
    @UseInterceptors(EARLY)
    atOnce() { return slow('at once') }
    @Post('deep')
    @Idempotent()
    @UseInterceptors(EARLY, LOGS, LOGS, LOGS)
    deep() { return slow('deep') }
    @Post('later')
    @Idempotent()
    @UseInterceptors(LATER, LOGS)
    later() { return slow('later') }
    @Post('absent')
    @Idempotent()
    @UseInterceptors(ABSENT)
    absent() { return slow('absent') }
    @Post('first')
    @Idempotent()
    @UseInterceptors(FIRST)
    first() { return slow('first') }
  }
  assert.deepEqual(await statuses([Early], 'early/at-once', 'early/deep', 'early/later', 'early/absent', 'early/first'), [500, 500, 500, 201, 201, 500, 500, 500, 201, 201])
  assert.deepEqual(runs.filter((what) => what !== 'later'), ['first', 'first'])
})

test('if an outer interceptor gives up while the guard waits for the key, the handler does not run', async () => {
  let runs = 0
  @Controller('late')
  class Late {
    @Post()
    @Idempotent({ wait: '10 seconds' })
    @UseInterceptors(FAST, LOGS)
    async create() { runs++ }
  }
  @Module({ controllers: [Late], imports: [IdempotencyModule.forRoot({ client: idem, scope: () => 'late' })] })
  class Shop {}
  const shop = await NestFactory.create(Shop, { logger: false })
  await shop.listen(0, '127.0.0.1')
  try {
    const key = newKey()
    const undone = new Error('undone')
    await assert.rejects(idem.transaction(async (tx) => {
      await idem.on(tx).claim('late', key)
      const { status } = await fetch(`${await shop.getUrl()}/late`, { method: 'POST', headers: { 'Idempotency-Key': key } })
      assert.equal(status, 408)
      throw undone
    }), undone)
    while (await idem.lookup('late', key)) await sleep(10)
    await sleep(300)
    assert.equal(runs, 0)
  } finally {
    await shop.close()
  }
})

test('if Nest drops the response because the client has gone, the transaction ends at once', async () => {
  const open = async (): Promise<number> => (await world.sql("SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = $1 AND state LIKE 'idle in tr%'", [world.database]))[0].n
  const gone = async (): Promise<void> => {
    const client = new AbortController()
    const answer = fetch(`${url}/orders/gone`, { method: 'POST', signal: client.signal, headers: { 'X-User': 'ann', 'Idempotency-Key': newKey() } })
    while (await open() === 0) await sleep(10)
    client.abort()
    await assert.rejects(answer)
    const began = performance.now()
    while (await open() > 0) await sleep(10)
    assert.ok(performance.now() - began < 30_000, 'not after the timeout of the guard')
  }
  await gone()
  await withShop(new FastifyAdapter(), () => undefined, gone)
  assert.equal(await world.effects('gone'), 0)
})

test('on Fastify', async () => {
  await withShop(new FastifyAdapter(), () => undefined, async () => {
    const what = newKey()
    const { status, text } = await twice('/orders', { what })
    assert.deepEqual([status, text, await world.effects(what)], [201, JSON.stringify({ what, 10: 'b', 2: 'a' }), 1])
    assert.equal((await twice('/orders/text', { what })).text, `<b>${what}</b>`)
    assert.equal((await post('/orders', '')).status, 400)
    for (const path of ['number', 'null', 'empty', 'nothing', 'bytes', 'date']) await twice(`/orders/${path}`)
    const redirect = await twice('/orders/redirect')
    assert.deepEqual([redirect.status, redirect.location], [302, '/thanks'])
    assert.equal((await twice('/orders/number')).type, 'application/json; charset=utf-8')
    assert.equal((await twice('/orders/bytes')).type, 'application/octet-stream')
    for (const path of ['generator', 'sends']) assert.equal((await post(`/orders/${path}`, newKey())).status, 500, path)
    assert.equal(await world.effects('file'), 0)
  })
})
