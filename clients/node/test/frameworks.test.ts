/** A guarded handler gets and gives what the same handler does alone, and cannot slip past. */
import assert from 'node:assert/strict'
import { createReadStream } from 'node:fs'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { Agent, request as send } from 'node:http'
import { connect } from 'node:http2'
import type { AddressInfo } from 'node:net'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { PassThrough, Readable, Writable } from 'node:stream'
import { pipeline } from 'node:stream/promises'
import { after, before, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { brotliCompressSync, createGunzip, deflateSync, gzipSync } from 'node:zlib'
import express5 from 'express'
import Fastify from 'fastify'
import type pg from 'pg'
import { Idempotency } from 'pg-idempotency'
import { idempotent } from 'pg-idempotency/express'
import idempotency from 'pg-idempotency/fastify'
import { MemoryIdempotency } from 'pg-idempotency/memory'
import { key, World } from './support.js'

let world: World
let pool: pg.Pool
let idem: Idempotency
before(async () => {
  world = await World.make()
  pool = world.pool({ max: 2 })
  idem = new Idempotency(pool)
})
after(() => world.end())

// It has no types of its own.
const { default: express4 } = await import('express4' as string)

const scope = (): string => 'ann'
interface Answer { status: number; headers: Record<string, string | string[] | undefined>; text: string }
interface Shop { port: number; close(): Promise<void> }

/** Headers and bytes as they are given, with a length, or in chunks where it is none. */
function post(shop: Shop, path: string, body: Buffer | string | undefined, headers: Record<string, string> = {}, chunked = false): Promise<Answer> {
  return new Promise((resolve, reject) => {
    const bytes = body === undefined ? undefined : Buffer.from(body as string)
    const asked = send({ port: shop.port, host: '127.0.0.1', path, method: 'POST', agent: false,
      headers: { ...headers, ...(bytes && !chunked ? { 'Content-Length': bytes.length } : {}) } }, (answer) => {
      const parts: Buffer[] = []
      answer.on('data', (part: Buffer) => parts.push(part))
      answer.on('end', () => resolve({ status: answer.statusCode!, headers: answer.headers, text: Buffer.concat(parts).toString('latin1') }))
      answer.on('error', reject)
    })
    asked.on('error', reject)
    if (!bytes) {
      // Node would say that there is a body of unknown length.
      asked.removeHeader('Transfer-Encoding')
      asked.useChunkedEncodingByDefault = false
    }
    asked.end(bytes)
  })
}
const keyed = (headers: Record<string, string> = {}, one = key()): Record<string, string> => ({ 'Content-Type': 'application/json', ...headers, 'Idempotency-Key': one })

async function listening(app: any): Promise<Shop> {
  const server = await new Promise<any>((resolve) => { const made = app.listen(0, '127.0.0.1', () => resolve(made)) })
  return { port: (server.address() as AddressInfo).port, close: () => new Promise((resolve) => { server.close(() => resolve()); server.closeAllConnections() }) }
}
const shown = (error: any, _req: any, res: any, _next: any): void => { res.status(error.status ?? 500).json({ type: error.type, message: error.message }) }

for (const [name, express] of [['Express 5', express5], ['Express 4', express4]] as [string, any][]) {
  test(`the body in ${name}, as its own parsers have it`, async () => {
    const app = express()
    const echo = (req: any, res: any): void => {
      res.json(req.body === undefined ? { none: true } : { body: req.body, plain: Object.getPrototypeOf(req.body) === Object.prototype })
    }
    app.post('/alone', express.json({ limit: 5000 }), express.urlencoded({ extended: false, limit: 5000 }), echo)
    app.post('/guarded', idempotent(idem, { scope, bodyLimit: 5000 })(echo))
    app.use(shown)
    const shop = await listening(app)
    const json = 'application/json'
    const form = 'application/x-www-form-urlencoded'
    const object = JSON.stringify({ a: 1, list: ['ž', null], 'b': { __proto__: null, c: 2 } })
    const cases: [what: string, body: Buffer | string | undefined, headers: Record<string, string>, chunked?: boolean][] = [
      ['an object', object, { 'Content-Type': json }],
      ['with a charset', object, { 'Content-Type': `${json}; charset="UTF-8"` }],
      ['UTF-16', Buffer.from(object, 'utf16le'), { 'Content-Type': `${json}; charset=utf-16le` }],
      ['UTF-8 with a byte order mark', Buffer.from(`\ufeff${object}`), { 'Content-Type': json }],
      ['no object', '"text"', { 'Content-Type': json }],
      ['malformed', '{"a": ', { 'Content-Type': json }],
      ['Latin 1', object, { 'Content-Type': `${json}; charset=latin1` }],
      ['an unknown charset', object, { 'Content-Type': `${json}; charset=klingon` }],
      ['no bytes', '', { 'Content-Type': json }],
      ['no bytes, in chunks', '', { 'Content-Type': json }, true],
      ['no body', undefined, { 'Content-Type': json }],
      ['no body and no type', undefined, {}],
      ['gzip', gzipSync(object), { 'Content-Type': json, 'Content-Encoding': 'gzip' }],
      ['GZIP', gzipSync(object), { 'Content-Type': json, 'Content-Encoding': 'GZIP' }],
      ['deflate', deflateSync(object), { 'Content-Type': json, 'Content-Encoding': 'deflate' }],
      ['a bomb', gzipSync(JSON.stringify(['x'.repeat(100_000)])), { 'Content-Type': json, 'Content-Encoding': 'gzip' }],
      ['no gzip', object, { 'Content-Type': json, 'Content-Encoding': 'gzip' }],
      ['an unknown encoding', object, { 'Content-Type': json, 'Content-Encoding': 'constructor' }],
      ['too large', JSON.stringify(['x'.repeat(6000)]), { 'Content-Type': json }],
      ['a form', `a=1&b=%C5%BE+%2B&a=2&c[d]=3&e&a=3${name === 'Express 5' ? '&__proto__=4' : ''}&hasOwnProperty=5`, { 'Content-Type': form }],
      ['an empty form', '', { 'Content-Type': form }],
      ['a gzipped form', gzipSync('a=1&a=2'), { 'Content-Type': form, 'Content-Encoding': 'gzip' }],
      ['a form in an unknown charset', 'a=1', { 'Content-Type': `${form}; charset=koi8-r` }],
      ['many fields', 'a&'.repeat(1001), { 'Content-Type': form }],
    ]
    try {
      for (const [what, body, headers, chunked] of cases) {
        const alone = await post(shop, '/alone', body, headers, chunked)
        const guarded = await post(shop, '/guarded', body, { ...headers, 'Idempotency-Key': key() }, chunked)
        assert.equal(guarded.status, alone.status, `${what}: ${guarded.text}, alone ${alone.text}`)
        if (alone.status === 200) {
          // The querystring of Express 4 has no prototype, which nobody is to rely on.
          const plain = (text: string): unknown => ({ ...JSON.parse(text), plain: undefined })
          assert.deepEqual(plain(guarded.text), plain(alone.text), what)
          if (name === 'Express 5') assert.equal(guarded.text, alone.text, what)
        } else if (alone.status !== 400) {
          assert.equal(JSON.parse(guarded.text).type, JSON.parse(alone.text).type, what)
        }
      }
      const brotli = await post(shop, '/guarded', brotliCompressSync(object), keyed({ 'Content-Encoding': 'br' }))
      assert.deepEqual(JSON.parse(Buffer.from(brotli.text, 'latin1').toString()).body, JSON.parse(object))
      // What is neither JSON nor a form, is bytes.
      assert.equal(JSON.parse((await post(shop, '/guarded', 'abc', keyed({ 'Content-Type': 'text/plain' }))).text).body.type, 'Buffer')
    } finally {
      await shop.close()
    }
  })

  test(`answers in ${name}, as the handler's alone`, async () => {
    const app = express()
    const guarded = idempotent(idem, { scope })
    const answers: Record<string, (res: any) => unknown> = {
      object: (res) => res.json({ a: 'ž' }), text: (res) => res.send('text'), nothing: (res) => res.end(), empty: (res) => res.send(''),
      bytes: (res) => res.send(Buffer.from([1, 255])), created: (res) => res.status(201).location('/a').end(), none: (res) => res.status(204).end(),
      sendStatus: (res) => res.sendStatus(202), redirect: (res) => res.redirect(303, '/thanks'), typed: (res) => res.type('html').send('<p>'),
      head: (res) => { res.writeHead(418, { 'Content-Type': 'text/tea' }); res.end('tea') }, null: (res) => res.json(null),
      gzip: (res) => { res.set({ 'Content-Encoding': 'gzip', 'Content-Disposition': 'attachment; filename=a.csv', Vary: 'Accept-Encoding' }); res.send(gzipSync('a')) },
      twoPieces: (res) => { res.setHeader('Content-Length', 4); res.write('ab'); res.end('cd') },
    }
    for (const [path, answer] of Object.entries(answers)) {
      app.post(`/alone/${path}`, (_req: any, res: any) => { answer(res) })
      app.post(`/guarded/${path}`, guarded((_req: any, res: any) => { answer(res) }))
    }
    await same(await listening(app), Object.keys(answers))
  })

  test(`what a handler of ${name} cannot do: answer past the transaction, or be asked again about what it has changed`, async () => {
    const app = express()
    const guarded = idempotent(idem, { scope })
    let tries = 0
    const conflict = async (tx: any): Promise<void> => {
      if (++tries % 2) await tx.query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
    }
    const change = async (req: any, res: any): Promise<void> => {
      const found = JSON.stringify([req.body, req.params, req.mark ?? null, res.locals.mark ?? null, req.user, req.rawBody.toString()])
      req.body.list?.push('again')
      req.body.amount = 0
      req.params.id = 'other'
      req.mark = res.locals.mark = 'mine'
      req.user = 'eve'
      req.rawBody.fill(0)
      await conflict(req.idempotency.tx)
      res.send(found)
    }
    const login = (req: any, _res: any, next: () => void): void => { req.user = 'ann'; next() }
    app.post('/change/:id', login, guarded(change))
    app.post('/parsed/:id', login, express.json({ verify: (req: any, _: unknown, bytes: Buffer) => { req.rawBody = bytes } }), guarded(change))
    const validate = (req: any, _res: any, next: () => void): void => { req.body.tags = new Set(req.body.list); next() }
    const textOf = express.json({ verify: (req: any, _: unknown, bytes: Buffer) => { req.rawBody = String(bytes) } })
    app.post('/validated', textOf, validate, guarded(async (req, res: any) => {
      const found = JSON.stringify([[...req.body.tags], req.body.list, req.rawBody])
      req.body.list.push('again')
      req.body.tags = req.rawBody = null as never
      await conflict(req.idempotency.tx)
      res.send(found)
    }))
    app.post('/left', guarded(async (req, res: any) => {
      if (tries % 2 === 0) setTimeout(() => { res.send('too late') }, 500)
      await conflict(req.idempotency.tx)
      await sleep(1000)
      res.send('in time')
    }))
    app.post('/never', guarded(async (req, res: any) => {
      await req.idempotency.tx.query("INSERT INTO effects (what) VALUES ('never')")
      setTimeout(() => { res.setHeader('X-Late', 'yes'); res.send('late') }, 500)
      setTimeout(() => { res.status(201).json({ late: true }) }, 600)
    }, { timeoutMs: 300 }))
    app.post('/pipe', guarded((_req, res: any) => { createReadStream(process.execPath, { highWaterMark: 1 << 16, end: 3 << 20 }).pipe(res) }))
    app.post('/destroy', guarded((_req, res: any) => { res.destroy() }))
    app.post('/lost', guarded(async (req, res: any) => {
      await req.idempotency.tx.query("SET LOCAL idle_in_transaction_session_timeout = '50ms'")
      setTimeout(() => res.send('late'), 200)
    }))
    app.post('/nested', guarded(async (_req, res: any) => { await idem.once('scope', key()); res.send('never') }))
    app.post('/header', guarded((_req, res: any) => { res.set('Location', '/ž'); res.send('never') }))
    app.use(shown)
    const shop = await listening(app)
    try {
      for (const path of ['change', 'parsed']) {
        const { text } = await post(shop, `/${path}/7`, '{"amount": 5, "list": []}', keyed())
        assert.deepEqual(JSON.parse(text), [{ amount: 5, list: [] }, { id: '7' }, null, null, 'ann', '{"amount": 5, "list": []}'])
      }
      const validated = await post(shop, '/validated', '{"list":  [1, 2]}', keyed())
      assert.deepEqual([validated.status, JSON.parse(validated.text)], [200, [[1, 2], [1, 2], '{"list":  [1, 2]}']], 'it has what the parser and the validator have made')
      const left = await post(shop, '/left', '{}', keyed())
      assert.deepEqual([left.status, left.text], [200, 'in time'])
      const one = key()
      for (let times = 0; times < 2; times++) {
        const never = await post(shop, '/never', '{}', keyed({}, one))
        assert.deepEqual([never.status, JSON.parse(never.text).type, never.headers['retry-after'], never.headers['x-late']], [503, 'urn:pg-idempotency:timeout', '1', undefined])
      }
      assert.equal(await world.effects('never'), 0)
      for (const [path, said] of [['pipe', /in pieces/], ['destroy', /res\.destroy\(\)/]] as const) {
        const refused = await post(shop, `/${path}`, '{}', keyed())
        assert.deepEqual([refused.status, JSON.parse(refused.text).type], [500, 'urn:pg-idempotency:streaming-refused'])
        assert.match(refused.text, said)
      }
      assert.match((await post(shop, '/lost', '{}', keyed())).text, /idle-in-transaction timeout/)
      assert.match((await post(shop, '/nested', '{}', keyed())).text, /use on\(tx\)\.once\(\)/)
      assert.equal((await post(shop, '/header', '{}', keyed())).status, 500)
      await sleep(600)
      // Nothing of it has ended the process, or kept a connection.
      for (const client of await Promise.all([pool.connect(), pool.connect()])) client.release()
    } finally {
      await shop.close()
    }
  })
}

/** Alone, guarded, and replayed. */
async function same(shop: Shop, paths: string[]): Promise<void> {
  const told = ({ status, headers, text }: Answer): unknown => {
    const kept = Object.fromEntries(['content-type', 'content-encoding', 'content-disposition', 'location', 'vary'].map((name) => [name, headers[name]]))
    // It has a length, too, where the handler did not know it.
    return { status, text, kept, length: headers['transfer-encoding'] ? String(text.length) : headers['content-length'] }
  }
  try {
    for (const path of paths) {
      const alone = await post(shop, `/alone/${path}`, '{}', { 'Content-Type': 'application/json' })
      const one = key()
      for (const time of ['first', 'replay']) {
        const guarded = await post(shop, `/guarded/${path}`, '{}', keyed({}, one))
        assert.deepEqual(told(guarded), told(alone), `${path}, ${time}`)
        assert.equal(guarded.headers['idempotent-replayed'], time === 'first' ? undefined : 'true', path)
      }
    }
  } finally {
    await shop.close()
  }
}

async function fastifyShop(routes: (app: any) => void): Promise<Shop> {
  const app = Fastify()
  await app.register(idempotency as any, { client: idem, scope })
  routes(app)
  await app.listen({ port: 0, host: '127.0.0.1' })
  return { port: (app.server.address() as AddressInfo).port, close: () => app.close() }
}
const guardedRoute = { config: { idempotency: true } }

test('a guarded route of Fastify that was declared before the plugin was there does not run', async () => {
  const app = Fastify()
  let runs = 0
  void app.register(idempotency as any, { client: idem, scope })
  app.post('/early', guardedRoute, async () => { runs++ })
  app.post('/plain', async () => 'plain')
  await app.after()
  app.post('/guarded', guardedRoute, async () => 'guarded')
  const answers = []
  for (const url of ['/early', '/plain', '/guarded']) answers.push(await app.inject({ method: 'POST', url, payload: '{}', headers: keyed() }))
  assert.deepEqual(answers.map((one) => one.statusCode), [500, 200, 200])
  assert.match(answers[0]!.json().message, /POST \/early was declared before the plugin was loaded, or outside the context that registers it: first await register\(\)/)
  assert.equal(runs, 0)
  await app.close()
})

test('a guarded route of Fastify outside the context that registers the plugin does not run', async () => {
  const app = Fastify()
  let runs = 0
  const route = async (): Promise<object> => ({ runs: ++runs })
  app.post('/root', guardedRoute, route)
  await app.register(async (context) => {
    context.post('/before', guardedRoute, route)
    await context.register(async (nested) => { nested.post('/nested', guardedRoute, route) })
  })
  await app.register(async (context) => {
    await context.register(idempotency as any, { client: idem, scope })
    context.post('/own', guardedRoute, async () => 'guarded')
    await context.register(async (nested) => { nested.post('/below', guardedRoute, async () => 'guarded') })
  })
  await app.register(async (context) => { context.post('/after', guardedRoute, route) })
  // A second interface, with the plugin's options of its own.
  await app.register(async (context) => {
    await context.register(idempotency as any, { client: idem, scope })
    context.post('/other', guardedRoute, async () => 'guarded')
  })
  try {
    for (const url of ['/root', '/before', '/nested', '/after']) {
      const answer = await app.inject({ method: 'POST', url, payload: '{}', headers: keyed() })
      assert.equal(answer.statusCode, 500, url)
      assert.match(answer.json().message, /outside the context that registers it/)
    }
    for (const url of ['/own', '/below', '/other']) assert.equal((await app.inject({ method: 'POST', url, payload: '{}', headers: keyed() })).payload, 'guarded')
    assert.equal(runs, 0)
  } finally {
    await app.close()
  }
})

test('a handler of Fastify that returns an error is rolled back', async () => {
  const what = key()
  const work = (request: any): Promise<unknown> => request.idempotency.tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
  const shop = await fastifyShop((app) => {
    app.post('/returns', guardedRoute, async (request: any) => { await work(request); return new Error('no money') })
    app.post('/sends', guardedRoute, async (request: any, reply: any) => { await work(request); return reply.code(201).send(new Error('no money')) })
  })
  try {
    for (const path of ['/returns', '/sends']) {
      const { status, text } = await post(shop, path, '{}', keyed())
      assert.deepEqual([status, JSON.parse(text).message], [500, 'no money'], path)
    }
    assert.equal(await world.effects(what), 0)
  } finally {
    await shop.close()
  }
})

test('no success is sent if the guard itself fails', async () => {
  const broken = world.pool({ host: '/nonexistent' })
  const app = express5()
  app.post('/', idempotent(new Idempotency(broken), { scope })(() => assert.fail('it ran')))
  app.use((_error: any, _req: any, res: any, _next: any) => { res.status(201).json({}) })
  const fastify = Fastify()
  await fastify.register(idempotency as any, { client: new Idempotency(broken), scope })
  fastify.setErrorHandler((_error, _, reply) => { void reply.code(201).send({}) })
  fastify.post('/', guardedRoute, () => assert.fail('it ran'))
  await fastify.listen({ port: 0, host: '127.0.0.1' })
  for (const shop of [await listening(app), { port: (fastify.server.address() as AddressInfo).port, close: () => fastify.close() }]) {
    try {
      const { status, text } = await post(shop, '/', '{}', keyed())
      assert.deepEqual([status, JSON.parse(text).type], [503, 'urn:pg-idempotency:unavailable'])
    } finally {
      await shop.close()
    }
  }
})

test('a status of 1xx is refused and rolled back', async () => {
  const what = key()
  const work = (request: any): Promise<unknown> => request.idempotency.tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
  const app = express5()
  app.post('/', idempotent(idem, { scope })(async (req, res: any) => { await work(req); res.status(102).end() }))
  app.use(shown)
  for (const shop of [await listening(app), await fastifyShop((app) => {
    app.post('/', guardedRoute, async (request: any, reply: any) => { await work(request); return reply.code(102).send() })
  })]) {
    try {
      assert.equal((await post(shop, '/', '{}', keyed())).status, 500)
    } finally {
      await shop.close()
    }
  }
  assert.equal(await world.effects(what), 0)
})

test('a body that a parser of files has read before the guard is compared with its files', async (t) => {
  const path = `${await mkdtemp(join(tmpdir(), 'idempotency-'))}/upload`
  t.after(() => rm(dirname(path), { recursive: true }))
  for (const express of [express5, express4] as any[]) {
    const app = express()
    // As multer and express-fileupload do, in memory and on disk.
    app.use((req: any, _res: any, next: any) => {
      const parts: Buffer[] = []
      req.on('data', (part: Buffer) => parts.push(part)).on('end', async () => {
        const bytes = Buffer.concat(parts)
        const file = { fieldname: 'photo', originalname: 'a.png', mimetype: 'image/png', size: bytes.length }
        if (!/lost|mv/.test(req.path)) req.body = { title: 'a' }
        // As Express 4 does in express.json().
        if (req.path === '/lostFields') req.body = {}
        if (req.path.startsWith('/lost')) req.fields = { title: 'a' }
        if (req.path === '/mv') req.files = { photo: { ...file, data: bytes, mv: () => undefined } }
        if (req.path === '/lostFiles') req.files = { photo: [{ ...file, filepath: path }] }
        if (req.path === '/elsewhere') req.file = { ...file, bucket: 'a', etag: String(bytes) }
        if (req.path === '/url') req.file = { ...file, path: 'https://example.org/a' }
        if (req.path === '/one') req.file = { ...file, buffer: bytes }
        if (req.path === '/list') req.files = [{ ...file, buffer: bytes }]
        if (req.path === '/fields') req.files = { photo: [{ ...file, buffer: bytes }] }
        if (req.path === '/data') req.files = { photo: { ...file, data: bytes, tempFilePath: '' } }
        if (req.path === '/disk' || req.path === '/formidable') {
          await writeFile(path, bytes)
          req.files = req.path === '/disk' ? [{ ...file, path }] : { photo: [{ filepath: path, originalFilename: 'a.png', size: bytes.length }] }
        }
        next()
      })
    })
    app.post('/:way', idempotent(idem, { scope })((req: any, res: any) => { res.json(req.body) }))
    app.use(shown)
    const shop = await listening(app)
    const form = { 'Content-Type': 'multipart/form-data; boundary=a' }
    try {
      for (const way of ['/one', '/list', '/fields', '/data', '/mv', '/disk', '/formidable']) {
        const one = key()
        const statuses = []
        for (const bytes of ['red', 'red', 'sky']) statuses.push((await post(shop, way, bytes, keyed(form, one))).status)
        assert.deepEqual(statuses, [200, 200, 422], way)
      }
      for (const way of ['/lost', '/lostFields', '/lostFiles', '/elsewhere', '/url']) {
        const lost = await post(shop, way, 'red', keyed(form))
        assert.equal(lost.status, 500, way)
        assert.match(lost.text, /was read before the guard/)
      }
    } finally {
      await shop.close()
    }
  }
})

test('Express: headers that middleware sets when the head is written, and all forms of writeHead()', async () => {
  for (const express of [express5, express4] as any[]) {
    const app = express()
    app.use('/guarded', idempotent(idem, { scope }).middleware())
    // As the package on-headers does, for cookie-session.
    app.use((_req: any, res: any, next: any) => {
      const { writeHead } = res
      res.writeHead = function wrapped(this: any, ...given: unknown[]) {
        res.setHeader('X-Last', 'set')
        return writeHead.apply(this, given)
      }
      next()
    })
    const ways: Record<string, (res: any) => void> = {
      json: (res) => res.json({}), write: (res) => { res.setHeader('Content-Length', 2); res.write('a'); res.end('b') },
      list: (res) => { res.type('html'); res.writeHead(201, ['Content-Type', 'text/plain', 'X-A', '1']).end('a') },
      third: (res) => res.writeHead(201, undefined, { 'x-a': '1' }).end('a'), phrase: (res) => res.writeHead(201, 'Made it', { 'x-a': '1' }).end('a'),
    }
    for (const [way, answer] of Object.entries(ways)) for (const path of ['alone', 'guarded']) app.post(`/${path}/${way}`, (_req: any, res: any) => answer(res))
    app.post('/guarded/short', (_req: any, res: any) => { res.setHeader('Content-Length', '10').end('abc') })
    app.post('/file', idempotent(idem, { scope })((_req: any, res: any) => { res.sendFile(fileURLToPath(import.meta.url)) }))
    app.post('/fails', idempotent(idem, { scope })((_req: any, res: any) => { res.writeHead(201, 'Made it'); throw new Error('after') }))
    app.use(shown)
    const shop = await listening(app)
    try {
      for (const way of Object.keys(ways)) {
        const [alone, guarded] = [await post(shop, `/alone/${way}`, '{}', keyed()), await post(shop, `/guarded/${way}`, '{}', keyed())]
        for (const name of ['x-last', 'x-a', 'content-type']) assert.equal(guarded.headers[name], alone.headers[name], `${way}: ${name}`)
        assert.deepEqual([guarded.status, guarded.text], [alone.status, alone.text])
      }
      assert.equal((await post(shop, '/guarded/short', '{}', keyed())).status, 500)
      const [one, whole] = [key(), await readFile(new URL(import.meta.url), 'latin1')]
      for (const headers of [keyed({ Range: 'bytes=0-1' }, one), keyed({}, one)]) {
        const file = await post(shop, '/file', '{}', headers)
        assert.deepEqual([file.status, file.text === whole], [200, true], 'the guard ignores Range')
      }
      const failed = await fetch(`http://127.0.0.1:${shop.port}/fails`, { method: 'POST', body: '{}', headers: keyed() })
      assert.deepEqual([failed.status, failed.statusText], [500, 'Internal Server Error'])
    } finally {
      await shop.close()
    }
  }
})

test("answers in Fastify, as the handler's alone", async () => {
  const answers: Record<string, (reply: any) => unknown> = {
    object: () => ({ a: 'ž' }), list: () => [1], text: () => 'text', empty: (reply) => reply.send(''), undefined: (reply) => reply.send(),
    nothing: () => undefined, null: () => null, sendNull: (reply) => reply.send(null), zero: () => 0, false: () => false,
    bytes: () => Buffer.from([1, 255]), noBytes: () => Buffer.alloc(0), words: (reply) => reply.send(new Uint16Array([1, 258])),
    created: (reply) => reply.code(201).header('location', '/a').send(), none: (reply) => reply.code(204).send(),
    redirect: (reply) => reply.redirect('/thanks', 303), typed: (reply) => reply.type('text/html').send('<p>'),
    json: (reply) => reply.type('application/json').send('{"a": 1}'), hal: (reply) => reply.type('application/hal+json').send({ a: 1 }),
    serializer: (reply) => reply.type('text/csv').serializer((rows: string[]) => rows.join(',')).send(['a', 'b']),
    gzip: (reply) => reply.headers({ 'content-encoding': 'gzip', 'content-disposition': 'attachment; filename=a.csv', vary: 'accept-encoding' }).send(gzipSync('a')),
    later: async (reply) => { setTimeout(() => reply.send({ a: 1 }), 10); return reply },
    awaited: async (reply) => { setTimeout(() => reply.code(201).send({ a: 1 }), 10); await reply },
    serializedText: (reply) => reply.type('application/xml').serializer((text: string) => `<${text}/>`).send('a'),
    charset: (reply) => reply.type('Application/JSON; Charset=utf-8').send({ a: 1 }),
    schema: (reply) => reply.code(201).send({ a: 1, hidden: true }), other: (reply) => reply.code(202).send({ a: 1, hidden: true }),
    vendor: (reply) => reply.code(203).type('application/vnd.a+json').send({ a: 1, hidden: true }),
  }
  const document = { type: 'object', properties: { a: { type: 'number' } } }
  const content = (type: string): object => ({ content: { [type]: { schema: document } } })
  const schemas = { response: { 201: content('application/json'), 202: content('*/*'), 203: content('application/vnd.a+json') } }
  const shop = await fastifyShop((app) => {
    for (const [path, answer] of Object.entries(answers)) {
      const schema = ['schema', 'other', 'vendor'].includes(path) ? { schema: schemas } : {}
      app.post(`/alone/${path}`, schema, async (_request: any, reply: any) => answer(reply))
      app.post(`/guarded/${path}`, { ...guardedRoute, ...schema }, async (_request: any, reply: any) => answer(reply))
    }
  })
  await same(shop, Object.keys(answers))
})

test('what a handler of Fastify cannot do: answer past the transaction, or be asked again about what it has changed', async () => {
  let tries = 0
  const shop = await fastifyShop((app) => {
    app.decorateRequest('user', null)
    app.addHook('preHandler', async (request: any) => { request.user = 'ann' })
    app.post('/change/:id', guardedRoute, async (request: any) => {
      const found = [request.body, request.params, request.query, request.user, request.mark ?? null, request.rawBody.toString()]
      const text = JSON.stringify(found)
      request.body.list.push('again')
      request.body = { other: true }
      request.params.id = 'other'
      request.query.a = 'other'
      request.user = 'eve'
      request.mark = 'mine'
      request.rawBody.fill(0)
      if (++tries % 2) await request.idempotency.tx.query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
      return text
    })
    const past: Record<string, (reply: any) => unknown> = {
      end: (reply) => { reply.raw.end('past') }, write: (reply) => { reply.raw.writeHead(200); reply.raw.write('past'); reply.raw.end() },
      hijack: (reply) => { reply.hijack(); reply.raw.end('past') }, trailer: (reply) => { reply.trailer('X-Sum', async () => '1'); return reply.send('x') }, destroy: (reply) => { reply.raw.destroy() },
      pipe: (reply) => { createReadStream(process.execPath, { end: 3 << 20 }).pipe(reply.raw) },
      stream: (reply) => reply.send(createReadStream(process.execPath)),
    }
    for (const [path, answer] of Object.entries(past)) {
      // Neither waits for what comes.
      app.post(`/${path}`, guardedRoute, (request: any, reply: any) => {
        request.idempotency.tx.query("INSERT INTO effects (what) VALUES ('past')").then(() => answer(reply))
      })
    }
    app.post('/never', { config: { idempotency: { timeoutMs: 300 } } }, (request: any, reply: any) => {
      request.idempotency.tx.query("INSERT INTO effects (what) VALUES ('past')").catch(() => undefined)
      setTimeout(() => reply.code(201).header('x-late', 'yes').send('late'), 500)
      setTimeout(() => { reply.raw.setHeader?.('x', 'y') }, 600).unref()
    })
    app.post('/header', guardedRoute, async (_request: any, reply: any) => reply.header('x-any', 'a\nb').send('never'))
  })
  try {
    const { text } = await post(shop, '/change/7?a=1', '{"list": []}', keyed())
    assert.deepEqual(JSON.parse(text), [{ list: [] }, { id: '7' }, { a: '1' }, 'ann', null, '{"list": []}'])
    for (const path of ['end', 'write', 'hijack', 'trailer', 'destroy', 'pipe', 'stream']) {
      for (let times = 0; times < 2; times++) {
        const refused = await post(shop, `/${path}`, '{}', keyed())
        assert.deepEqual([refused.status, JSON.parse(refused.text).type], [500, 'urn:pg-idempotency:streaming-refused'], path)
        if (path === 'hijack') assert.match(refused.text, /reply\.hijack\(\)/)
        if (path === 'end') assert.match(refused.text, /reply\.raw\.end\(\)/)
      }
    }
    const never = await post(shop, '/never', '{}', keyed())
    assert.deepEqual([never.status, JSON.parse(never.text).type, never.headers['x-late']], [503, 'urn:pg-idempotency:timeout', undefined])
    const header = await post(shop, '/header', '{}', keyed())
    assert.equal(header.status, 500)
    assert.match(header.text, /x-any contains/)
    await sleep(800)
    assert.equal(await world.effects('past'), 0)
    for (const client of await Promise.all([pool.connect(), pool.connect()])) client.release()
  } finally {
    await shop.close()
  }
})

test('a body in Fastify is parsed again for another try, and not copied for the first', async () => {
  let looks = 0
  let tries = 0
  const again = async ({ idempotency }: any): Promise<void> => {
    if (++tries % 2) await idempotency.tx.query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
  }
  const change = async (request: any): Promise<string> => {
    const text = JSON.stringify(request.body)
    if (Array.isArray(request.body)) request.body.push('again')
    else Object.assign(request.body, { amount: 0, more: 'mine', deep: null })
    await again(request)
    return text
  }
  const schema = { body: { type: 'object', properties: { amount: { type: 'integer' }, kind: { type: 'string', default: 'plain' } } } }
  const shop = await fastifyShop((app) => {
    app.addContentTypeParser('application/large', { parseAs: 'string' }, (_request: unknown, text: string, done: any) => {
      done(null, { list: new Proxy(JSON.parse(text), { get: (list, at) => { if (at === '0') looks++; return list[at] } }) })
    })
    app.post('/large', guardedRoute, async (request: any) => { await again(request); return request.body.list.length })
    app.post('/change', guardedRoute, change)
    app.post('/schema', { ...guardedRoute, schema }, change)
    app.post('/hooks', { ...guardedRoute, preHandler: async (request: any) => { request.body.by = 'ann'; request.body.owner = { id: 7 } } }, change)
    app.post('/validated', { ...guardedRoute, preHandler: async ({ body }: any) => { body.tags = new Set(body.tags); body.note = null } }, async (request: any) => {
      const text = JSON.stringify([request.body.tags.size, request.body.note])
      Object.assign(request.body, { tags: 'mine', note: 'mine' })
      await again(request)
      return text
    })
    app.post('/replaced', { ...guardedRoute, preHandler: async (request: any) => { request.body = { instead: [request.body.amount] } } }, async (request: any) => {
      const text = JSON.stringify(request.body)
      request.body.instead.push('again')
      await again(request)
      return text
    })
  })
  try {
    assert.equal((await post(shop, '/large', '[1, 2, 3]', keyed({ 'Content-Type': 'application/large' }))).text, '3')
    assert.equal(looks, 0)
    for (const [path, body, found] of [
      ['/change', '{"amount": 5, "deep": {"a": [1]}}', { amount: 5, deep: { a: [1] } }], ['/change', '[1, {"a": 2}]', [1, { a: 2 }]],
      ['/schema', '{"amount": "5"}', { amount: 5, kind: 'plain' }], ['/hooks', '{"amount": 5}', { amount: 5, by: 'ann', owner: { id: 7 } }],
      ['/replaced', '{"amount": 5}', { instead: [5] }],
      ['/validated', '{"tags": ["a", "b"], "note": {}}', [2, null]],
    ] as const) {
      tries = 0
      const { text } = await post(shop, path, body, keyed())
      assert.deepEqual([JSON.parse(text), tries], [found, 2], path)
    }
  } finally {
    await shop.close()
  }
})

test('what pipes the request, as parsers of multipart/form-data do, gets its bytes', async () => {
  const bytes = Buffer.from('--a\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--a--\r\n')
  const collect = (request: any) => new Promise<string>((resolve) => {
    const parts: Buffer[] = []
    request.pipe(new Writable({ write: (part, _, done) => { parts.push(part); done() }, final: (done) => { resolve(Buffer.concat(parts).toString()); done() } }))
  })
  const app = express5()
  app.post('/', idempotent(idem, { scope })(async (req, res: any) => { res.send(await collect(req)) }))
  for (const shop of [await listening(app), await fastifyShop((app) => {
    app.addContentTypeParser('multipart/form-data', (_request: unknown, _payload: unknown, done: () => void) => done())
    app.post('/', guardedRoute, async (request: any) => collect(request.raw))
  })]) {
    try {
      const answer = await post(shop, '/', bytes, keyed({ 'Content-Type': 'multipart/form-data; boundary=a' }))
      assert.deepEqual([answer.status, answer.text], [200, bytes.toString()])
    } finally {
      await shop.close()
    }
  }
})

for (const [name, express] of [['Express 5', express5], ['Express 4', express4]] as [string, any][]) {
  test(`a handler of ${name} that reads the request itself gets its bytes, in each try`, async () => {
    const collected = async (parts: AsyncIterable<Buffer>): Promise<string> => {
      const all = []
      for await (const part of parts) all.push(part)
      return Buffer.concat(all).toString()
    }
    const through = (): PassThrough => new PassThrough()
    const ways: Record<string, (req: any) => Promise<string>> = {
      iterated: (req) => collected(req),
      events: (req) => new Promise((resolve, reject) => {
        const parts: Buffer[] = []
        req.on('data', (part: Buffer) => parts.push(part)).on('end', () => resolve(Buffer.concat(parts).toString())).on('error', reject)
      }),
      readable: (req) => new Promise((resolve) => {
        let text = ''
        req.setEncoding('utf8')
        req.on('readable', () => { for (let part; (part = req.read()) !== null;) text += part }).on('end', () => resolve(text))
      }),
      piped: (req) => collected(req.pipe(through())),
      pipeline: (req) => { const to = through(); return Promise.all([collected(to), pipeline(req, to)]).then(([text]) => text) },
      unread: async (req) => req.rawBody.toString(),
    }
    let tries = 0
    let closed = 0
    const app = express()
    for (const [path, way] of Object.entries(ways)) {
      app.post(`/${path}`, idempotent(idem, { scope })(async (req, res: any) => {
        const text = await way(req)
        if (++tries % 2) await req.idempotency.tx.query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
        res.send(text)
      }))
    }
    const server = await new Promise<any>((resolve) => { const made = app.listen(0, '127.0.0.1', () => resolve(made)) })
    server.on('connection', (socket: any) => { socket.on('close', () => { closed++ }) })
    try {
      // On one connection, which the requests before have left as it was.
      const one = new Agent({ keepAlive: true, maxSockets: 1 })
      for (const path of [...Object.keys(ways), ...Object.keys(ways)]) for (const body of ['{"a": 1}', 'ž'.repeat(300_000), '']) {
        const answer = await new Promise<string>((resolve, reject) => {
          const asked = send({ port: server.address().port, host: '127.0.0.1', path: `/${path}`, method: 'POST', agent: one,
            headers: keyed({ 'Content-Type': 'text/csv', 'Content-Length': String(Buffer.byteLength(body)) }) }, (got) => { collected(got).then(resolve, reject) })
          asked.on('error', reject)
          asked.end(body)
        })
        assert.equal(answer, body, path)
      }
      assert.equal(closed, 0)
      one.destroy()
    } finally {
      server.closeAllConnections()
      await new Promise((resolve) => { server.close(resolve) })
    }
  })
}

test('a conditional GET of Express: 304 is for who has it, and what is stored is whole', async () => {
  for (const express of [express5, express4] as any[]) {
    const app = express()
    const handler = (_req: unknown, res: any): void => { res.json({ a: 1 }) }
    app.get('/alone', handler)
    app.get('/', idempotent(idem, { scope })(handler))
    const shop = await listening(app)
    try {
      const one = key()
      const get = async (headers: Record<string, string> = {}): Promise<unknown[]> => {
        const answer = await fetch(`http://127.0.0.1:${shop.port}/`, { headers: { ...headers, 'Idempotency-Key': one, 'Cache-Control': 'max-age=9' } })
        return [answer.status, answer.headers.get('content-type'), answer.headers.get('etag'), await answer.text()]
      }
      const etag = (await fetch(`http://127.0.0.1:${shop.port}/alone`)).headers.get('etag')!
      const has = { 'If-None-Match': etag }
      assert.deepEqual(await get(has), [304, null, etag, ''])
      assert.deepEqual(await get(), [200, 'application/json; charset=utf-8', etag, '{"a":1}'])
      assert.deepEqual(await get(has), [304, null, etag, ''])
    } finally {
      await shop.close()
    }
  }
})

test('a missing scope is an error, and the application answers the error that refuses a visitor', async () => {
  for (const [found, said] of [[undefined, 'undefined'], [null, 'null'], ['', "''"], [7, '7'], [Promise.resolve('u'), 'Promise'], [new Error('who'), undefined]] as [any, string | undefined][]) {
    const scope = (): any => { if (found instanceof Error) throw Object.assign(found, { status: 401, statusCode: 401 }); return found }
    let seen: any
    const never = (): never => assert.fail('it ran')
    for (const express of [express5, express4]) {
      const app = express()
      app.post('/', idempotent(idem, { scope })(never))
      app.use((error: any, _req: any, res: any, _next: any) => { seen = error; res.status(error.status ?? 500).end() })
      const shop = await listening(app)
      assert.equal((await post(shop, '/', '{}', keyed())).status, said ? 500 : 401)
      assert.match(String(seen), said ? new RegExp(`^TypeError: the option scope returned ${said}, which`) : /who/)
      await shop.close()
    }
    const app = Fastify()
    await app.register(idempotency, { client: idem, scope })
    app.setErrorHandler((error: any, _, reply) => { seen = error; void reply.code(error.statusCode ?? 500).send() })
    app.post('/', { config: { idempotency: true } }, never)
    const answer = await app.inject({ method: 'POST', url: '/', payload: '{}', headers: keyed() })
    assert.equal(answer.statusCode, said ? 500 : 401)
    assert.match(String(seen), said ? new RegExp(`^TypeError: the option scope returned ${said}, which`) : /who/)
    await app.close()
  }
})

test('a scope that is a rejected promise does not end the process', async () => {
  const rejections: unknown[] = []
  const note = (error: unknown): void => { rejections.push(error) }
  process.on('unhandledRejection', note)
  const app = Fastify()
  try {
    await app.register(idempotency as any, { client: idem, scope: async () => { throw new Error('no user') } })
    app.post('/', guardedRoute, async () => 'never')
    assert.equal((await app.inject({ method: 'POST', url: '/', payload: '{}', headers: keyed() })).statusCode, 500)
    await sleep(10)
    assert.deepEqual(rejections, [])
  } finally {
    process.off('unhandledRejection', note)
    await app.close()
  }
})

for (const [version, express] of [['5', express5], ['4', express4]] as const) {
  test(`Express ${version}: errors that Express itself reports, and headers of a body of unknown length`, async () => {
    const app = (express as any)()
    const guarded = idempotent(idem, { scope })
    const insert = (req: any): Promise<unknown> => req.idempotency.tx.query('INSERT INTO effects (what) VALUES ($1)', [req.path])
    app.post('/format', guarded(async (req: any, res: any) => { await insert(req); res.format({ json: () => res.json({}) }) }))
    app.post('/file', guarded(async (req: any, res: any) => { await insert(req); res.sendFile('/no/such/file') }))
    app.post('/trailers', guarded(async (req: any, res: any) => {
      await insert(req)
      res.setHeader('Trailer', 'X-Sum')
      res.addTrailers({ 'X-Sum': '1' })
      res.end('x')
    }))
    app.post('/chunked', guarded(async (req: any, res: any) => {
      await insert(req)
      res.writeHead(201, { 'Transfer-Encoding': 'chunked', Trailer: 'X-Sum', 'Content-Type': 'text/plain' })
      res.end('x')
    }))
    app.use(shown)
    const shop = await listening(app)
    try {
      for (const [path, status] of [['/format', 406], ['/file', 404], ['/trailers', 500]] as const) {
        const one = keyed()
        const headers = { ...one, Accept: 'text/csv' }
        for (let times = 0; times < 2; times++) {
          const answer = await post(shop, path, '{}', headers)
          assert.deepEqual([answer.status, answer.headers['idempotent-replayed'], await world.effects(path)], [status, undefined, 0], path)
        }
      }
      const one = keyed()
      for (const replayed of [undefined, 'true']) {
        const answer = await post(shop, '/chunked', '{}', one)
        assert.deepEqual([answer.status, answer.text, answer.headers['idempotent-replayed'], answer.headers['transfer-encoding']], [201, 'x', replayed, undefined])
      }
    } finally {
      await shop.close()
      await world.sql("DELETE FROM effects WHERE what LIKE '/%'")
    }
  })
}

test('Express: an error that is nothing does not lead past the guard', async () => {
  const app = express5()
  for (const [path, error] of [['/nothing', undefined], ['/null', null], ['/route', 'route'], ['/router', 'router']] as const) {
    const throws = (): string => { throw error }
    app.post(path, idempotent(idem, { scope: throws })(() => assert.fail('it ran')))
    app.post(`${path}/handler`, idempotent(idem, { scope })(async () => throws()))
    app.post(`${path}/middleware`, idempotent(idem, { scope: throws }).middleware())
  }
  app.use((_req: unknown, res: any, _next: unknown) => { res.status(200).send('past the guard') })
  app.use(shown)
  const shop = await listening(app)
  try {
    for (const path of ['/nothing', '/null', '/route', '/router']) {
      for (const more of ['', '/handler', '/middleware']) assert.equal((await post(shop, path + more, '{}', keyed())).status, 500, path + more)
    }
  } finally {
    await shop.close()
  }
})

test('a key is found where a server has only the plain headers', async () => {
  const app = express5()
  app.use((req: any, _res, next) => { Object.defineProperty(req, 'headersDistinct', { value: {} }); next() })
  app.post('/', idempotent(idem, { scope, required: false })((req: any, res: any) => res.send(req.idempotency.key)))
  const shop = await listening(app)
  try {
    const one = key()
    for (const replayed of [undefined, 'true']) {
      const answer = await post(shop, '/', '{}', keyed({}, one))
      assert.deepEqual([answer.text, answer.headers['idempotent-replayed']], [one, replayed])
    }
  } finally {
    await shop.close()
  }
})

test('Fastify: a property of the response that only has a getter', async () => {
  const shop = await fastifyShop((app) => {
    // As @fastify/express does.
    app.addHook('onRequest', async (_request: unknown, reply: any) => { Object.defineProperty(reply.raw, 'headersSent', { get: () => false, configurable: true }) })
    app.post('/getter', { config: { idempotency: true } }, async (_request: unknown, reply: any) => reply.code(201).send({ made: true }))
  })
  try {
    const one = key()
    for (const replayed of [null, 'true']) {
      const answer = await fetch(`http://127.0.0.1:${shop.port}/getter`, { method: 'POST', headers: { 'Idempotency-Key': one } })
      assert.deepEqual([answer.status, answer.headers.get('Idempotent-Replayed'), await answer.text()], [201, replayed, '{"made":true}'])
    }
  } finally {
    await shop.close()
  }
})

test("Fastify: a request without a body keeps Fastify's own time limit", async () => {
  const shop = await fastifyShop((app) => {
    app.route({ method: ['GET', 'POST'], url: '/slow', config: { idempotency: true }, handlerTimeout: 200, handler: async (request: any) => {
      await new Promise((resolve) => { request.signal.addEventListener('abort', resolve); setTimeout(resolve, 10_000).unref() })
      return 'late'
    } } as never)
  })
  try {
    for (const method of ['GET', 'POST']) {
      const answer = await fetch(`http://127.0.0.1:${shop.port}/slow`, { method, headers: { 'Idempotency-Key': key() } })
      assert.deepEqual([answer.status, JSON.parse(await answer.text()).code], [503, 'FST_ERR_HANDLER_TIMEOUT'], method)
    }
  } finally {
    await shop.close()
  }
})

test('Fastify: a body that another hook has decompressed, and one that contains itself', async () => {
  const shop = await fastifyShop((app) => {
    // As @fastify/compress does if it is registered after the guard, and @fastify/multipart with attachFieldsToBody.
    app.addHook('onRoute', (route: any) => {
      route.preParsing = [async (_request: any, _reply: any, payload: any) => {
        const inflated: any = payload.pipe(createGunzip())
        inflated.receivedEncodedLength = 0
        payload.on('data', (part: Buffer) => { inflated.receivedEncodedLength += part.length })
        return inflated.pause()
      }, ...[route.preParsing ?? []].flat()]
    })
    app.post('/', { ...guardedRoute, preHandler: async (request: any) => { request.body.part = { fields: request.body } } }, async (request: any) => request.body.a)
  })
  try {
    const one = key()
    const answers = []
    for (const a of [1, 2]) answers.push((await post(shop, '/', gzipSync(`{"a":${a}}`), keyed({ 'Content-Encoding': 'gzip' }, one))).status)
    assert.deepEqual(answers, [200, 422])
  } finally {
    await shop.close()
  }
})

test('Fastify over HTTP/2, and inject(): a body without Content-Length is compared, and no success is sent after an error', async () => {
  const app = Fastify({ http2: true })
  await app.register(idempotency, { client: idem, scope })
  app.post('/', { config: { idempotency: true } }, async (request: any) => ({ raw: String(request.rawBody) }))
  app.post('/throws', { config: { idempotency: true } }, async () => { throw new Error('no') })
  app.post('/fails', { config: { idempotency: true } }, async (_request, reply) => reply.code(503).send({ sorry: true }))
  let wrapped: number | undefined
  app.addHook('onRequest', async (_request, { raw }) => {
    const { writeHead } = raw as any
    if (wrapped) raw.writeHead = (_: number, ...given: unknown[]) => writeHead.call(raw, wrapped, ...given)
  })
  app.setErrorHandler((_error, _request, reply) => { void reply.code(200).send({ all: 'well' }) })
  await app.listen({ port: 0, host: '127.0.0.1' })
  const session = connect(`http://127.0.0.1:${(app.server.address() as AddressInfo).port}`)
  const [one, injected] = [key(), key()]
  const ask = (body: string, path = '/'): Promise<[number, string]> => new Promise((resolve, reject) => {
    let status = 0
    let text = ''
    const stream = session.request({ ':method': 'POST', ':path': path, 'content-type': 'application/json', 'idempotency-key': path === '/' ? one : key() })
    stream.on('response', (headers) => { status = headers[':status']! }).on('data', (part) => { text += String(part) })
      .on('end', () => resolve([status, text])).on('error', reject)
    stream.end(body)
  })
  try {
    for (const [a, status] of [[1, 200], [2, 422]]) {
      const answer = await app.inject({ method: 'POST', url: '/', payload: Readable.from([`{"a":${a}}`]), headers: keyed({}, injected) })
      assert.equal(answer.statusCode, status)
    }
    assert.deepEqual(await ask('{"a":1}'), [200, '{"raw":"{\\"a\\":1}"}'])
    assert.equal((await ask('{"a":2}'))[0], 422)
    for (wrapped of [undefined, 200, 204]) {
      const [status, text] = await ask('{}', '/throws')
      assert.deepEqual([status, JSON.parse(text).type], [500, 'urn:pg-idempotency:rolled-back'])
      assert.deepEqual(await ask('{}', '/fails'), [wrapped ? 500 : 503, '{"sorry":true}'])
    }
  } finally {
    session.close()
    await app.close()
  }
})

test('Fastify over HTTP/2: an error handler can answer on reply.raw, also if middleware defers end()', async () => {
  let raws = true
  for (const defers of [false, true]) {
    const app = Fastify({ http2: true })
    await app.register(idempotency, { client: idem, scope })
    app.addHook('onRequest', async (_request, { raw }) => {
      const end = raw.end as (...given: unknown[]) => unknown
      if (defers) raw.end = ((...given: unknown[]) => setTimeout(() => end.apply(raw, given), 5)) as never
    })
    app.post('/:status', { config: { idempotency: true } }, async () => { throw new Error('no') })
    app.setErrorHandler((_error, request, reply) => {
      const status = Number((request.params as any).status)
      if (!raws) return void reply.code(status).send('text')
      void reply.hijack()
      reply.raw.statusCode = status
      reply.raw.end(...(status === 404 ? [] : ['text']) as [])
    })
    await app.listen({ port: 0, host: '127.0.0.1' })
    const session = connect(`http://127.0.0.1:${(app.server.address() as AddressInfo).port}`)
    try {
      for (raws of [true, false]) {
        for (const status of [404, 200, 204]) {
          const found = await new Promise<[number, string]>((resolve, reject) => {
            let [answered, text] = [0, '']
            session.request({ ':method': 'POST', ':path': `/${status}`, 'idempotency-key': key() })
              .on('response', (headers) => { answered = headers[':status']! }).on('data', (part) => { text += String(part) })
              .on('end', () => resolve([answered, text])).on('error', reject).end()
          })
          if (status === 404) assert.deepEqual(found, [404, raws ? '' : 'text'])
          else assert.deepEqual([found[0], JSON.parse(found[1]).type], [500, 'urn:pg-idempotency:rolled-back'], `${status} ${raws} ${defers}`)
        }
      }
    } finally {
      session.close()
      await app.close()
    }
  }
})

test('nonsense in the options of a route is refused when it is made', async () => {
  await assert.rejects(async () => { await Fastify().register(idempotency as any, { client: idem, scope, ttl: '5 bananas' }) }, /ttl is not a valid interval/)
  await assert.rejects(fastifyShop((app) => { app.post('/a', { config: { idempotency: { waitMs: -1 } } }, async () => 'never') }), /waitMs must not be negative/)
  await assert.rejects(fastifyShop((app) => { app.post('/a', { config: { idempotency: { wat: 1 } } }, async () => 'never') }), /has no option wat/)
  await assert.rejects(async () => { await Fastify().register(idempotency as any, { client: idem, scope, wat: 1 }) }, /has no option wat/)
  assert.throws(() => idempotent(idem, { scope, wat: 1 } as any), /has no option wat/)
  assert.throws(() => idempotent(idem, { scope })(() => undefined, { wat: 1 } as any), /has no option wat/)
  // These would guard nothing.
  for (const methods of [['post'], [], 'POST', ['POST', 1]] as any[]) {
    assert.throws(() => idempotent(idem, { scope, methods }), /methods must be a list of HTTP methods in upper case/)
  }
  assert.throws(() => idempotent(idem, { scope })(() => undefined, { lease: '1s', leaseMs: 1 }), /lease and leaseMs cannot both be set/)
  for (const client of [undefined, pool] as any[]) {
    assert.throws(() => idempotent(client, { scope }), /a guard needs an Idempotency as its client/)
    await assert.rejects(async () => { await Fastify().register(idempotency as any, { client, scope }) }, /a guard needs an Idempotency as its client/)
  }
  const guarded: any = idempotent(idem, { scope })
  const handler = (): void => undefined
  // Several handlers, as Express itself takes them.
  for (const given of [[], [{}], [handler, handler], [handler, {}, handler]]) assert.throws(() => guarded(...given), /a guard takes one handler/)
  for (const own of [1, 'yes', null, 0]) {
    assert.throws(() => guarded(handler, own), /options of a guarded route must be an object/)
    assert.throws(() => guarded.middleware(own), /options of a guarded route must be an object/)
    await assert.rejects(fastifyShop((app) => { app.post('/a', { config: { idempotency: own as never } }, async () => 'never') }), /options of a guarded route must be an object/)
  }
  // The options of another framework.
  for (const own of [{ job: true }, { prefix: '/a' }]) assert.throws(() => idempotent(idem, { scope, ...own } as any), /has no option (job|prefix)/)
  await assert.rejects(fastifyShop((app) => { app.post('/a', { config: { idempotency: { bodyLimit: 1 } as never } }, async () => 'never') }), /has no option bodyLimit/)
  await assert.rejects(fastifyShop((app) => { app.post('/a', { config: { idempotency: { job: 'no' as never } } }, async () => 'never') }), /the option job must be true or false/)
  assert.throws(() => idempotent(idem, { scope, formField: 1 as never }), /the option formField must be/)
})

test('a job reports no success after its last step was rolled back', async () => {
  for (const client of [idem, new MemoryIdempotency()] as Idempotency[]) {
    const answering = (status: number) => client.job({ scope: 'ann', key: key() }, async (job) => {
      await job.finish(() => { throw new Error('no money') }).catch(() => undefined)
      return { status }
    })
    await assert.rejects(answering(201), /its last step was rolled back/)
    // A response that is not stored rolls the last step back, whether it is returned or the argument of finish().
    for (const finishes of [true, false]) {
      for (const status of [500, 401, 429]) {
        const one = key()
        for (let attempt = 1; attempt <= 2; attempt++) {
          const made = await client.job({ scope: 'ann', key: one }, async (job) => {
            assert.equal(job.attempt, attempt)
            const last = async (tx: any) => { await client.on(tx).once('ann', one); return { status } }
            if (finishes) await job.finish(last)
            else return { status }
          })
          assert.deepEqual([made.status, made.replayed, made.stored, await client.onceAt('ann', one)], [status, false, false, null])
        }
      }
    }
    assert.equal((await answering(402)).status, 402)
  }
})
