/** The guards for other frameworks in examples/, each in a server. */
import assert from 'node:assert/strict'
import type { AddressInfo, Server } from 'node:net'
import { after, before, test } from 'node:test'
import { serve } from '@hono/node-server'
import { Hono } from 'hono'
import Koa from 'koa'
import type { PoolClient } from 'pg'
import { Idempotency } from 'pg-idempotency'
import { key, World } from './support.js'

let world: World
let idem: Idempotency
before(async () => {
  world = await World.make()
  idem = world.client()
})
after(() => world.end())

const example = async (name: string): Promise<(client: Idempotency, options: object) => any> =>
  (await import(new URL(`../../examples/${name}.js`, import.meta.url).href) as any).idempotent
const order = async (tx: PoolClient, what: string): Promise<void> => {
  await tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
  if (what.startsWith('fails')) throw new Error('no')
}
const statusOf = (what: string): 201 | 503 => (what.startsWith('refused') ? 503 : 201)

const frameworks: Record<string, () => Promise<Server>> = {
  async koa() {
    const guarded = (await example('koa'))(idem, { scope: (ctx: any) => ctx.get('X-User') })
    const app = new Koa()
    app.use(async (ctx, next) => {
      // An error handler that answers 200.
      await next().catch(() => { ctx.body = 'all is well' })
      if (ctx.status === 503) ctx.status = 200
    })
    app.use(guarded(async (_: unknown, tx: PoolClient, body: Buffer) => {
      const { what } = JSON.parse(body.toString()) as { what: string }
      await order(tx, what)
      return { status: statusOf(what), headers: { 'Content-Type': 'application/json', 'X-Own': 'yes' }, body: JSON.stringify({ what }) }
    }))
    return app.listen(0, '127.0.0.1')
  },
  async hono() {
    const guarded = (await example('hono'))(idem, { scope: (c: any) => c.req.header('X-User') })
    const app = new Hono()
    app.use(async (c, next) => {
      await next()
      if (c.res.status === 503) c.res = new Response('all is well')
    })
    app.post('/orders', guarded(async (c: any, tx: PoolClient) => {
      const { what } = await c.req.json()
      await order(tx, what)
      return c.json({ what }, statusOf(what), { 'X-Own': 'yes' })
    }))
    app.onError((_, c) => c.text('all is well'))
    return serve({ fetch: app.fetch, port: 0, hostname: '127.0.0.1' }) as Server
  },
}

for (const [name, start] of Object.entries(frameworks)) {
  test(`${name}: a request takes effect once and is replayed`, async () => {
    const server = await start()
    if (!server.listening) await new Promise((resolve) => server.once('listening', resolve))
    const { port } = server.address() as AddressInfo
    const post = (one: string, what: string) => fetch(`http://127.0.0.1:${port}/orders`, {
      method: 'POST', headers: { 'Idempotency-Key': one, 'Content-Type': 'application/json', 'X-User': 'ann', Connection: 'close' }, body: JSON.stringify({ what }) })
    try {
      const one = key()
      const what = `${name} ${one}`
      for (const [replayed, own] of [[null, 'yes'], ['true', null]]) {
        const answer = await post(one, what)
        assert.deepEqual([answer.status, answer.headers.get('Idempotent-Replayed'), answer.headers.get('X-Own'), await answer.json()], [201, replayed, own, { what }])
      }
      const other = await post(one, 'another')
      assert.deepEqual([other.status, other.headers.get('Content-Type')], [422, 'application/problem+json'])
      assert.equal(await world.effects(what), 1)
      for (const undone of [`fails ${one}`, `refused ${one}`]) {
        const failed = await post(key(), undone)
        assert.deepEqual([failed.status, (await failed.json() as { type: string }).type], [500, 'urn:pg-idempotency:rolled-back'])
        assert.equal(await world.effects(undone), 0)
      }
    } finally {
      server.close()
    }
  })
}
