/** The sample of the front page runs, as a shop of two lines more. */
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { readFile, rm, writeFile } from 'node:fs/promises'
import { after, before, test } from 'node:test'
import { promisify } from 'node:util'
import { World } from './support.js'

let world: World
before(async () => { world = await World.make('idem') })
after(() => world.end())

const program = (sample: string): string => `
import express from 'express'
import pg from 'pg'
import { Idempotency, newKey } from 'pg-idempotency'
import { idempotent } from 'pg-idempotency/express'

const app = express()
app.use((req, res, next) => { req.user = { id: req.get('X-User') }; next() })
${sample}
const listening = app.listen(0, '127.0.0.1')
await new Promise((resolve) => listening.on('listening', resolve))
const key = newKey()
for (const user of ['ann', 'ann', 'bob']) {
  const answer = await fetch('http://127.0.0.1:' + listening.address().port + '/payments', { method: 'POST', body: '{"amount": 7}',
    headers: { 'X-User': user, 'Content-Type': 'application/json', 'Idempotency-Key': key } })
  console.log(user, answer.status, answer.headers.get('Idempotent-Replayed'), await answer.text())
}
process.exit()
`

test('the sample of the front page', async () => {
  await world.sql('CREATE TABLE payments (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, amount int NOT NULL)')
  const page = await readFile(new URL('../../../../README.md', import.meta.url), 'utf8')
  const samples = [...page.matchAll(/^```js\n([\s\S]*?)^```$/gm)].map((match) => match[1]!)
  assert.equal(samples.length, 1)
  const file = new URL(`./front-page.${process.pid}.mjs`, import.meta.url)
  await writeFile(file, program(samples[0]!))
  try {
    const { stdout, stderr } = await promisify(execFile)(process.execPath, [file.pathname],
      { env: { ...process.env, PGDATABASE: world.database }, timeout: 60_000 })
    assert.equal(stderr, '')
    assert.deepEqual(stdout.trim().split('\n'), ['ann 201 null {"id":"1"}', 'ann 201 true {"id":"1"}', 'bob 201 null {"id":"2"}'])
  } finally {
    await rm(file, { force: true })
  }
  assert.deepEqual(await world.sql('SELECT amount FROM payments'), [{ amount: 7 }, { amount: 7 }])
})
