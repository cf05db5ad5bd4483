/** The samples of the README run, one after another, in one module. */
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdir, mkdtemp, readFile, rm, symlink, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, test } from 'node:test'
import { pathToFileURL } from 'node:url'
import { promisify } from 'node:util'
import ts from 'typescript'
import { World } from './support.js'

let world: World
before(async () => { world = await World.make() })
after(() => world.end())

const { version } = JSON.parse(await readFile(new URL('../../package.json', import.meta.url), 'utf8')) as { version: string }

/** The samples as a program, which then sends a request twice to each of their routes. */
const program = (samples: string): string => `${samples.match(/^import .*$/gm)!.join('\n')}
const bank = { charge: async ({ key }) => ({ id: 'ch_' + key.length }) }
${samples.replace(/^import .*$/gm, '').replace(/^const app = .*$/m, "$&\napp.use((req, res, next) => { req.user = { id: req.get('X-User') }; next() })")
    .replace('const server = Fastify()', "$&\nserver.addHook('onRequest', async (request) => { request.user = { id: request.headers['x-user'] } })")}

const listening = app.listen(0, '127.0.0.1')
await new Promise((resolve) => listening.on('listening', resolve))
await server.listen({ port: 0, host: '127.0.0.1' })
const post = (port, path, body) => fetch('http://127.0.0.1:' + port + path, { method: 'POST',
  headers: { 'X-User': 'ann', 'Content-Type': 'application/json', 'Idempotency-Key': '"' + key + path.replace('/', ':') + '"' }, body: JSON.stringify(body) })
for (const [port, path, body] of [[listening.address().port, '/orders', { sku: 'cup' }], [listening.address().port, '/payments', { amount: 1 }],
  [server.server.address().port, '/orders', { sku: 'cup' }]]) {
  const answers = [await post(port, path, body), await post(port, path, body)]
  console.log(path, answers.map((one) => one.status + ' ' + one.headers.get('Idempotent-Replayed')).join(', '), await answers[1].text())
  key = idem.newKey()
}
console.log(paid.body, (await idem.request({ scope: 'customer-7', key: '0190f5d0-1d2a-7000' }, () => null)).replayed)
listening.close()
await server.close()
await pool.end()
`

const readme = await readFile(new URL('../../README.md', import.meta.url), 'utf8')
const samples = [...readme.matchAll(/^```js\n([\s\S]*?)^```$/gm)].map((match) => match[1]!).join('\n')

test('the samples of the README are TypeScript, too, under strict', async () => {
  const file = new URL(`../readme.${process.pid}.ts`, import.meta.url).pathname
  // What JavaScript cannot say: the type of a body.
  const text = `${samples.replace("server.post('/orders'", "server.post<{ Body: { sku: string } }>('/orders'")}
declare const bank: { charge(what: { amount: number; key: string; signal?: AbortSignal }): Promise<{ id: string }> }
declare global { namespace Express { interface Request { user: { id: string } } } }
declare module 'fastify' { interface FastifyRequest { user: { id: string } } }`
  assert.ok(text.includes('server.post<'))
  await writeFile(file, text)
  try {
    const program = ts.createProgram([file], { strict: true, noEmit: true, target: ts.ScriptTarget.ES2022, module: ts.ModuleKind.NodeNext,
      moduleResolution: ts.ModuleResolutionKind.NodeNext, types: ['node'], skipLibCheck: true })
    const said = ts.getPreEmitDiagnostics(program).map((one) => `${one.file?.getLineAndCharacterOfPosition(one.start!).line}: ` +
      ts.flattenDiagnosticMessageText(one.messageText, ' '))
    assert.deepEqual(said, [])
  } finally {
    await rm(file, { force: true })
  }
})

test('the samples of the README', async () => {
  await world.sql('CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, sku text NOT NULL)')
  // As in an application that has installed what npm pack makes.
  const home = await mkdtemp(join(tmpdir(), 'readme-'))
  const here = new URL('../..', import.meta.url).pathname
  const run = promisify(execFile)
  await run('npm', ['pack', '--ignore-scripts', '--pack-destination', home], { cwd: here })
  await mkdir(join(home, 'node_modules/pg-idempotency'), { recursive: true })
  await run('tar', ['xzf', `pg-idempotency-${version}.tgz`, '-C', 'node_modules/pg-idempotency', '--strip-components=1'], { cwd: home })
  for (const name of ['pg', 'express', 'fastify']) await symlink(join(here, 'node_modules', name), join(home, 'node_modules', name))
  const file = pathToFileURL(join(home, 'readme.mjs'))
  await writeFile(file, program(samples).replace('const key = idem.newKey()', 'let key = idem.newKey()'))
  try {
    const { stdout, stderr } = await promisify(execFile)(process.execPath, [file.pathname],
      { env: { ...process.env, PGDATABASE: world.database }, timeout: 60_000 })
    assert.equal(stderr, '')
    assert.deepEqual(stdout.trim().split('\n'), [
      '201 false', 'new: msg-1', 'new: msg-2',
      '/orders 201 null, 201 true {"sku":"cup"}',
      '/payments 200 null, 200 true {"id":"ch_32"}',
      '/orders 201 null, 201 true {"sku":"cup"}',
      'ch_32 true',
    ])
  } finally {
    await rm(home, { recursive: true })
  }
  assert.deepEqual(await world.sql('SELECT sku, count(*)::int AS n FROM orders GROUP BY sku ORDER BY sku'),
    [{ sku: 'ch_32', n: 1 }, { sku: 'cup', n: 2 }, { sku: 'teapot', n: 1 }])
  assert.equal((await world.sql('SELECT count(*)::int AS n FROM idem_outbox'))[0].n, 1)
  assert.ok(readme.split('\n').length <= 235, 'two pages')
})

test('the versions in the table of integrations are those that the tests run with', async () => {
  const lock = JSON.parse(await readFile(new URL('../../package-lock.json', import.meta.url), 'utf8')) as { packages: Record<string, { version?: string }> }
  const named = [...readme.matchAll(/^\|.*\| ([^|]+) \|$/gm)].flatMap((line) => line[1]!.split(', ')).filter((one) => / \d/.test(one))
  assert.ok(named.length >= 9)
  for (const one of named) {
    const [, name, version] = /^(\S+) ([\d.]+)$/.exec(one)!
    assert.ok([name, `${name}4`].some((as) => lock.packages[`node_modules/${as}`]?.version === version), one)
  }
})
