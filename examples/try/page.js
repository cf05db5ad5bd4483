import { PGlite } from './pglite/index.js'
import { run, withoutPsql } from './psql.js'

const variables = new Map()
const status = document.querySelector('#status')
const main = document.querySelector('main')
let db

/** A new element with a text. */
function element(name, text, properties = {}) {
  return Object.assign(document.createElement(name), { textContent: text, ...properties })
}

function table({ columns, rows }) {
  const result = element('table', '')
  const head = result.createTHead().insertRow()
  for (const column of columns) head.append(element('th', column, { scope: 'col' }))
  const body = result.createTBody()
  for (const row of rows) {
    const line = body.insertRow()
    for (const value of row) line.insertCell().textContent = value
  }
  return result
}

/** An editor for a block, with its button and its output. */
function example(block) {
  const section = element('section', '')
  const text = element('textarea', '', { value: block, rows: block.split('\n').length, spellcheck: false })
  text.setAttribute('aria-label', 'SQL')
  const button = element('button', 'Run', { type: 'button' })
  const output = element('div', '', { className: 'output' })
  output.setAttribute('aria-live', 'polite')
  button.addEventListener('click', async () => {
    button.disabled = true
    output.replaceChildren()
    try {
      let tables = 0
      for await (const result of run(db, text.value, variables)) {
        output.append(table(result))
        tables++
      }
      if (tables === 0) output.append(element('p', 'Done.'))
    } catch (error) {
      output.append(element('p', `ERROR ${error.code ?? ''}: ${error.message}`, { className: 'error' }))
      // Leave a transaction that has failed.
      await db.exec('ROLLBACK').catch(() => {})
    }
    button.disabled = false
  })
  section.append(text, button, output)
  return section
}

async function begin() {
  const [script, parts] = await Promise.all([
    fetch('idempotency.sql').then((response) => response.text()),
    fetch('guide.json').then((response) => response.json()),
  ])
  db = await PGlite.create()
  await db.exec(withoutPsql(script))
  await db.exec('SET search_path = public, idem')
  for (const { title, blocks } of parts) {
    main.append(element('h2', title))
    for (const block of blocks) main.append(example(block))
  }
  status.textContent = 'Ready. Run the examples from the top; you can change them.'
}

begin().catch((error) => {
  status.textContent = `PGlite could not start: ${error.message}`
})
