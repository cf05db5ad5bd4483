/** The sample of docs/http.md that guards the mutations of a GraphQL server. */
import assert from 'node:assert/strict'
import { readFile, rm, writeFile } from 'node:fs/promises'
import { after, before, test } from 'node:test'
import { pathToFileURL } from 'node:url'
import express from 'express'
import { buildSchema } from 'graphql'
import { idempotent } from 'pg-idempotency/express'
import { key, World } from './support.js'

let world: World
before(async () => { world = await World.make() })
after(() => world.end())

test('GraphQL: a mutation has its effect once, a failed one none, and a query needs no key', async () => {
  const page = await readFile(new URL('../../../../docs/http.md', import.meta.url), 'utf8')
  const sample = /^## GraphQL$[\s\S]*?^```js\n([\s\S]*?)^```$/m.exec(page)![1]!
  const file = new URL(`../graphql.${process.pid}.mjs`, import.meta.url)
  await writeFile(file, sample.replace('\n\n', '\n\nexport default (app, express, guarded, schema, pool) => {\n') + '}\n')
  try {
    const schema = buildSchema('type Query { effects(what: String!): Int! } type Mutation { add(what: String!, fails: Boolean): Int! }')
    const count = async (tx: any, what: string): Promise<number> =>
      (await tx.query('SELECT count(*)::int AS n FROM effects WHERE what = $1', [what])).rows[0].n
    Object.assign(schema.getQueryType()!.getFields()['effects']!, { resolve: (_: unknown, { what }: any, { tx }: any) => count(tx, what) })
    Object.assign(schema.getMutationType()!.getFields()['add']!, { resolve: async (_: unknown, { what, fails }: any, { tx }: any) => {
      await tx.query('INSERT INTO effects (what) VALUES ($1)', [what])
      if (fails) throw new Error('no teapots')
      return count(tx, what)
    } })
    const app = express()
    const make = (await import(pathToFileURL(file.pathname).href)).default
    make(app, express, idempotent(world.client(), { scope: () => 'ann' }), schema, world.pool())
    const server = await new Promise<any>((resolve) => { const made = app.listen(0, '127.0.0.1', () => resolve(made)) })
    const post = async (document: object, headers: Record<string, string> = {}): Promise<[number, string | null, any]> => {
      const answer = await fetch(`http://127.0.0.1:${server.address().port}/graphql`,
        { method: 'POST', headers: { 'Content-Type': 'application/json', ...headers }, body: JSON.stringify(document) })
      return [answer.status, answer.headers.get('Idempotent-Replayed'), await answer.json()]
    }
    const query = 'mutation Add($what: String!, $fails: Boolean) { add(what: $what, fails: $fails) }'
    try {
      const one = { 'Idempotency-Key': key() }
      assert.deepEqual(await post({ query, variables: { what: 'cup' } }, one), [200, null, { data: { add: 1 } }])
      assert.deepEqual(await post({ query, variables: { what: 'cup' } }, one), [200, 'true', { data: { add: 1 } }])
      assert.equal((await post({ query, variables: { what: 'pot' } }, one))[0], 422)
      assert.equal((await post({ query, variables: { what: 'cup' } }))[2].type, 'urn:pg-idempotency:key-required')

      const other = { 'Idempotency-Key': key() }
      const [status, , failed] = await post({ query, variables: { what: 'pan', fails: true } }, other)
      assert.deepEqual([status, failed.errors[0].message], [422, 'no teapots'])
      assert.equal(await world.effects('pan'), 0)
      assert.deepEqual(await post({ query, variables: { what: 'pan' } }, other), [200, null, { data: { add: 1 } }])

      assert.deepEqual(await post({ query: '{ effects(what: "cup") }' }), [200, null, { data: { effects: 1 } }])
      assert.match((await post({ query: '{ nonsense' }))[2].errors[0].message, /Syntax Error/)
    } finally {
      server.close()
      server.closeAllConnections()
    }
  } finally {
    await rm(file, { force: true })
  }
})
