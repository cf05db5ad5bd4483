/** Which requests count as the same, and where a guard finds its key. */
import assert from 'node:assert/strict'
import type { AddressInfo } from 'node:net'
import { after, before, test } from 'node:test'
import express5 from 'express'
import Fastify from 'fastify'
import { Idempotency } from 'pg-idempotency'
import { idempotent } from 'pg-idempotency/express'
import idempotency from 'pg-idempotency/fastify'
import { MemoryIdempotency } from 'pg-idempotency/memory'
import { key, World } from './support.js'

let world: World
let idem: Idempotency
before(async () => {
  world = await World.make()
  idem = world.client()
})
after(() => world.end())

// It has no types of its own.
const { default: express4 } = await import('express4' as string)

const JSON_TYPE = 'application/json'
const FORM = 'application/x-www-form-urlencoded'

interface Answer { status: number; replayed: boolean; text: string }
interface Given { type?: string; key?: string | null; method?: string }
type Send = (body: string | Uint8Array, given?: Given) => Promise<Answer>

/** A shop with one guarded route, which answers with its key. All requests have one key, if they do not say otherwise. */
async function shop(framework: string, client: Idempotency | MemoryIdempotency, options: object, run: (send: Send) => Promise<void>): Promise<void> {
  const answer = (request: any): string => `${request.idempotency?.key} ${request.rawBody?.length}`
  const guard = { scope: () => 'u', ...options }
  let close: () => Promise<unknown>
  let port: number
  if (framework === 'Fastify') {
    const app = Fastify()
    app.addContentTypeParser(/^(application|multipart|text)\/(?!json)/, { parseAs: 'buffer' }, (_request, body, done) => done(null, body))
    app.addContentTypeParser(JSON_TYPE, { parseAs: 'buffer' }, (_request, body, done) => done(null, body))
    await app.register(idempotency, { client: client as Idempotency, ...guard })
    app.route({ method: ['GET', 'POST'], url: '/o', config: { idempotency: true }, handler: async (request) => answer(request) })
    await app.listen({ port: 0, host: '127.0.0.1' })
    port = (app.server.address() as AddressInfo).port
    close = () => app.close()
  } else {
    const app = (framework === 'Express 5' ? express5 : express4)()
    app.all('/o', idempotent(client as Idempotency, guard)(((req: any, res: any) => res.type('text/plain').send(answer(req))) as never))
    const server = await new Promise<any>((resolve) => { const made = app.listen(0, '127.0.0.1', () => resolve(made)) })
    port = server.address().port
    close = () => new Promise((resolve) => { server.close(resolve); server.closeAllConnections() })
  }
  const one = key()
  try {
    await run(async (body, { type = JSON_TYPE, key: other = one, method = 'POST' } = {}) => {
      const found = await fetch(`http://127.0.0.1:${port}/o`, {
        method, headers: { 'Content-Type': type, ...(other === null ? {} : { 'Idempotency-Key': other }) },
        ...(method === 'POST' ? { body: typeof body === 'string' ? body : Buffer.from(body) } : {}),
      })
      return { status: found.status, replayed: found.headers.get('idempotent-replayed') === 'true', text: await found.text() }
    })
  } finally {
    await close()
  }
}

/** In each framework, over the server and over the double. */
function inEach(what: string, options: object, run: (send: Send) => Promise<void>): void {
  for (const framework of ['Express 5', 'Express 4', 'Fastify']) {
    for (const over of ['server', 'double']) {
      test(`${what}: ${framework}, ${over}`, () => shop(framework, over === 'server' ? idem : new MemoryIdempotency(), options, run))
    }
  }
}
const is = (answer: Answer, status: number, replayed = false): void => assert.deepEqual([answer.status, answer.replayed], [status, replayed], answer.text)

inEach('JSON is compared in canonical form', {}, async (send) => {
  is(await send('{"a": 1, "b": [1.0, "\\u0061"]}'), 200)
  is(await send('{"b":[1,"a"],  "a":1e0}'), 200, true)
  is(await send('{"a": 1, "b": [1.0, "a"]}', { type: 'application/json; charset=utf-8' }), 200, true)
  is(await send('{"a": 1, "b": [1.00, "a"]}', { type: 'application/json; profile="x"; charset=utf-8' }), 200, true)
  is(await send('{"a": 2, "b": [1.0, "a"]}'), 422)
})

const OTHERS: [string | Uint8Array, string | Uint8Array][] = [
  ['{"n": 9007199254740993}', '{"n": 9007199254740992}'], ['{"a": "1"}', '{"a": 1}'], ['{"a": "\\u00001"}', '{"a": 1}'],
  ['{"a": "\\u00001"}', '{"a": "\\u00002"}'], ['{"a": null}', '{}'], ['[1]', '[1, 1]'], ['{"n": 0.10000000000000000001}', '{"n": 0.1}'],
  ['{"n": 1e200000}', '{"n": 1e200001}'],
]
for (const [at, [one, other]] of OTHERS.entries()) {
  inEach(`other documents are other requests (${at})`, {}, async (send) => {
    is(await send(one), 200)
    is(await send(one), 200, true)
    is(await send(other), 422)
  })
}

inEach('other types are compared by their bytes', {}, async (send) => {
  is(await send('{"a":1}', { type: 'text/plain' }), 200)
  is(await send('{"a": 1}', { type: 'text/plain' }), 422)
  is(await send(Buffer.from([0xff, 0]), { type: 'application/octet-stream' }), 422)
})

const multipart = (boundary: string, text = 'x'): string =>
  `--${boundary}\r\nContent-Disposition: form-data; name="a"\r\n\r\n${text}\r\n--${boundary}--\r\n`
inEach('multipart forms are compared without their boundary', {}, async (send) => {
  is(await send(multipart('one'), { type: 'multipart/form-data; boundary=one' }), 200)
  is(await send(multipart('two'), { type: 'multipart/form-data; boundary="two"' }), 200, true)
  is(await send(multipart('two', 'y'), { type: 'multipart/form-data; boundary=two' }), 422)
})

const LINES = `1\r\n--\r\nContent-Disposition: form-data; name="b"\r\n\r\n2`
const FORMS: [string, string][] = [
  ['10', '1'], ['0', '00'], ['a0b', 'ab'], [LINES, LINES.replace('--\r\n', '--0\r\n')], ['x', 'x\r\n--0--'], ['\r\n', ''],
]
for (const [at, [one, other]] of FORMS.entries()) {
  inEach(`other forms are other requests, whatever their boundary (${at})`, {}, async (send) => {
    const type = { type: 'multipart/form-data; boundary=0' }
    is(await send(multipart('0', one), type), 200)
    is(await send(multipart('0', one), type), 200, true)
    is(await send(multipart('0', other), type), 422)
  })
}

const traced = (trace: string, more = 1): string => JSON.stringify({ 'meta': { traceId: trace, x: more }, 'a/b': trace, 'list': [{ t: trace }] })
inEach('members can be left out', { fingerprint: ['/meta/traceId', '/a~1b', '/list/0/t'] }, async (send) => {
  is(await send(traced('one')), 200)
  is(await send(traced('two')), 200, true)
  is(await send(traced('two', 2)), 422)
})

inEach('a function can say what is compared', { fingerprint: (_request: unknown, body: Uint8Array) => body.subarray(0, 3) }, async (send) => {
  is(await send('abc1', { type: 'text/plain' }), 200)
  is(await send('abc2', { type: 'text/plain' }), 200, true)
  is(await send('abd2', { type: 'text/plain' }), 422)
})

test('a fingerprint that is none is refused', () => {
  for (const fingerprint of ['/a', ['a'], [1], 7]) {
    assert.throws(() => idempotent(idem, { scope: () => 'u', fingerprint: fingerprint as never }), /JSON pointers/)
  }
})

inEach('a form has its key in a field', {}, async (send) => {
  const own = key()
  const body = `a=1&_idempotency_key=${own}&b=2`
  const form = { type: FORM, key: null }
  const first = await send(body, form)
  is(first, 200)
  assert.ok(first.text.startsWith(own))
  is(await send(body, form), 200, true)
  is(await send(body.replace('a=1', 'a=2'), form), 422)
  is(await send('a=1', form), 400)
  const parts = multipart('B').replace('name="a"\r\n\r\nx', `name="_idempotency_key"\r\n\r\n${key()}`).replace('--B', '\r\n--B')
  is(await send(parts, { type: 'multipart/form-data; boundary=B', key: null }), 200)
  is(await send(parts, { type: 'multipart/form-data; boundary=B', key: null }), 200, true)
})
inEach('a form is guarded however it is written', { required: false }, async (send) => {
  const form = { type: FORM, key: null }
  const part = (head: string, own: string): string => `--B\r\n${head}\r\n\r\n${own}\r\n--B--\r\n`
  const file = '--B\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n' +
    `\r\nContent-Disposition: form-data; name="_idempotency_key"\r\n\r\n${key()}\r\n`
  const own = key()
  for (const [body, type] of [
    [`%5fidempotency%5Fkey=${own}`, FORM], [`${'a=1&'.repeat(900)}_idempotency_key=${own}`, FORM],
    [part('Content-Disposition: form-data; name="_idempotency_key"\r\nContent-Type: text/plain', own), ''],
    [part('Content-Disposition: form-data;\tname=_idempotency_key', own), ''],
    [file + part('content-disposition: form-data; name="_idempotency_key"', own), ''],
  ] as const) {
    const given = { type: type || 'multipart/form-data; boundary=B', key: null }
    const one = key()
    const answer = await send(body.replace(own, one), given)
    is(answer, 200)
    assert.ok(answer.text.startsWith(one), answer.text)
    is(await send(body.replace(own, one), given), 200, true)
  }
  for (const body of [`_idempotency_key=${own}&_idempotency_key=${own}`, '_idempotency_key=']) is(await send(body, form), 400)
  is(await send(file + '--B--\r\n', { type: 'multipart/form-data; boundary=B', key: null }), 200)
  is(await send('a=1', form), 200)
})
test('a form that Express has parsed before the guard has its key in a field, too', async () => {
  for (const express of [express5, express4]) {
    const app = (express as any)()
    app.use((express as any).urlencoded({ extended: true }))
    app.post('/', idempotent(idem, { scope: () => 'u' })(((req: any, res: any) => res.type('text/plain').send(req.idempotency.key)) as never))
    const server = await new Promise<any>((resolve) => { const made = app.listen(0, '127.0.0.1', () => resolve(made)) })
    try {
      const own = key()
      for (const [body, status, replayed] of [[`_idempotency_key=${own}`, 200, null], [`_idempotency_key=${own}`, 200, 'true'], ['_idempotency_key[]=1&_idempotency_key[]=2', 400, null], ['a=1', 400, null]] as const) {
        const answer = await fetch(`http://127.0.0.1:${server.address().port}/`, { method: 'POST', headers: { 'Content-Type': FORM }, body })
        assert.deepEqual([answer.status, answer.headers.get('Idempotent-Replayed')], [status, replayed], await answer.text())
      }
    } finally {
      await new Promise((resolve) => { server.close(resolve); server.closeAllConnections() })
    }
  }
})
inEach('a form field can have another name', { formField: 'once' }, async (send) => is(await send(`once=${key()}`, { type: FORM, key: null }), 200))
inEach('a form field can be none', { formField: null }, async (send) => is(await send(`_idempotency_key=${key()}`, { type: FORM, key: null }), 400))

inEach('any key of up to 255 characters', { anyKey: true }, async (send) => {
  const own = key()
  for (const given of [own.slice(-8), own.padEnd(255, 'k'), `a key, with blanks! ${own}`]) {
    is(await send('[1]', { key: `"${given}"` }), 200)
    const again = await send('[1]', { key: `"${given}"` })
    is(again, 200, true)
    assert.ok(again.text.startsWith(given))
  }
  is(await send('[1]', { key: `"${'k'.repeat(256)}"` }), 400)
  is(await send('[1]', { key: '""' }), 400)
  await send('[1]', { key: '"abc"' })
  // The same key in both languages, and in every format of keys.
  assert.equal((await world.sql("SELECT FROM idem_keys WHERE key = 'ba7816bf-8f01-8fea-8141-40de5dae2223'")).length, 1)
})

inEach('methods that are not guarded', { methods: ['POST'] }, async (send) => {
  for (let n = 0; n < 2; n++) is(await send('', { method: 'GET', key: null }), 200)
  is(await send('[1]', { key: null }), 400)
  is(await send('[1]'), 200)
  is(await send('[1]'), 200, true)
})

for (const [name, express] of [['Express 5', express5], ['Express 4', express4]] as [string, any][]) {
  test(`all routes behind app.use(), and behind a global parser: ${name}`, async () => {
    const guarded = idempotent(idem, { scope: () => 'u' })
    const app = express()
    app.use(express.json())
    app.use(guarded.middleware())
    const insert = async (req: any, what: string): Promise<unknown> => req.idempotency.tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
    const later = (handler: (req: any, res: any) => Promise<unknown>) => (req: any, res: any, next: any): void => { handler(req, res).catch((error: unknown) => { next(error) }) }
    app.post('/orders', later(async (req, res) => {
      await insert(req, req.body.what)
      res.status(201).json({ what: req.body.what })
    }))
    app.post('/fails', later(async (req) => {
      await insert(req, req.body.what)
      throw Object.assign(new Error('not so'), { status: 409 })
    }))
    app.get('/orders', (req: any, res: any) => res.json({ guarded: req.idempotency !== undefined }))
    app.use((error: any, _req: any, res: any, _next: any) => res.status(error.status ?? 500).json({ error: error.message }))
    const server = await new Promise<any>((resolve) => { const made = app.listen(0, '127.0.0.1', () => resolve(made)) })
    const ask = (path: string, body: string, one: string): Promise<Response> => fetch(`http://127.0.0.1:${server.address().port}${path}`,
      { method: 'POST', headers: { 'Content-Type': JSON_TYPE, 'Idempotency-Key': one }, body })
    try {
      const [one, what] = [key(), key()]
      const first = await ask('/orders', `{"what": "${what}", "a": 1}`, one)
      assert.equal(first.status, 201)
      const second = await ask('/orders', `{"a":1,"what":"${what}"}`, one)
      assert.deepEqual([second.status, second.headers.get('idempotent-replayed'), await second.text()], [201, 'true', await first.text()])
      assert.equal((await ask('/orders', `{"what": "${what}", "a": 2}`, one)).status, 422)
      assert.equal(await world.effects(what), 1)
      const failing = key()
      for (let n = 0; n < 2; n++) {
        const refused = await ask('/fails', `{"what": "${failing}"}`, failing)
        assert.deepEqual([refused.status, refused.headers.get('idempotent-replayed')], [409, null])
      }
      assert.equal(await world.effects(failing), 0)
      assert.equal((await ask('/nowhere', '{}', key())).status, 404)
      assert.deepEqual(await (await fetch(`http://127.0.0.1:${server.address().port}/orders`)).json(), { guarded: false })
    } finally {
      await new Promise((resolve) => { server.close(resolve); server.closeAllConnections() })
    }
  })
}
