// The page of "make try": the SQL of the quick start and of the guide runs in PGlite.
import assert from 'node:assert/strict'
import { readFile } from 'node:fs/promises'
import { test } from 'node:test'
import { PGlite } from '@electric-sql/pglite'
import { blocks } from '../../examples/try/blocks.js'
import { run, statements, substitute, withoutPsql } from '../../examples/try/psql.js'

const tree = new URL('../../', import.meta.url)

test('a block is split as psql does it', () => {
  assert.deepEqual(statements("SELECT ';' AS a; -- ;\nSELECT 1 \\gset x_\n\\set VERBOSITY terse\nSELECT $$;$$;"),
    [{ text: "SELECT ';' AS a", prefix: undefined }, { text: '-- ;\nSELECT 1', prefix: 'x_' }, { text: 'SELECT $$;$$', prefix: undefined }])
  assert.equal(substitute("SELECT :a, :'b', 'x:a', 1::int", new Map([['a', '7'], ['b', "it's"]])), "SELECT 7, 'it''s', 'x:a', 1::int")
})

test('the SQL of the quick start and of the guide', async () => {
  const db = await PGlite.create()
  await db.exec(withoutPsql(await readFile(new URL('portable/build/idempotency.sql', tree), 'utf8')))
  await db.exec('SET search_path = public, idem')
  const variables = new Map()
  const failed = []
  let results = 0
  for (const { title, blocks: found } of await blocks(tree)) {
    for (const block of found) {
      try {
        for await (const result of run(db, block, variables)) results += result.rows.length
      } catch (error) {
        // One block shows an error.
        if (!block.includes(`error ${error.code}`)) failed.push([title, error.code, block])
        await db.exec('ROLLBACK').catch(() => {})
      }
    }
  }
  assert.deepEqual(failed, [])
  assert.ok(results > 40, `${results} rows`)
  await db.close()
})
