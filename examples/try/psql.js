// The part of psql that the blocks of the guide use: several statements, \gset
// with variables, and the results as tables.

/** Splits a block into statements; each may end with \gset and a prefix. */
export function statements(block) {
  const token = /--[^\n]*|'(?:[^']|'')*'|"[^"]*"|\$(\w*)\$[^]*?\$\1\$|\bBEGIN ATOMIC\b[^]*?\bEND(?=;)|\\gset(?:[ \t]+(\w+))?|\\\w+[^\n]*|;/g
  const found = []
  let start = 0
  const add = (end, next, prefix) => {
    const text = block.slice(start, end).trim()
    if (text.replace(/--[^\n]*/g, '').trim() !== '') found.push({ text, prefix })
    start = next
  }
  for (let match; (match = token.exec(block)); ) {
    if (match[0] === ';') add(match.index, token.lastIndex)
    else if (match[0].startsWith('\\gset')) add(match.index, token.lastIndex, match[2] ?? '')
    // Other commands of psql change only how it prints.
    else if (match[0].startsWith('\\')) start = token.lastIndex
  }
  add(block.length, block.length)
  return found
}

/** Replaces :name, :'name' and :"name", but not in strings and comments. */
export function substitute(text, variables) {
  return text.replace(/--[^\n]*|'(?:[^']|'')*'|\$(\w*)\$[^]*?\$\1\$|::|:(?:(\w+)|'(\w+)'|"(\w+)")/g,
    (whole, _tag, plain, literal, name) => {
      const value = variables.get(plain ?? literal ?? name)
      if (value === undefined) return whole
      if (literal) return `'${value.replaceAll("'", "''")}'`
      return name ? `"${value.replaceAll('"', '""')}"` : value
    })
}

/** A value as psql shows it. */
export function shown(value) {
  if (value === null || value === undefined) return ''
  if (typeof value === 'boolean') return value ? 't' : 'f'
  if (value instanceof Date) return value.toISOString().replace('T', ' ')
  if (value instanceof Uint8Array) return '\\x' + Array.from(value, (byte) => byte.toString(16).padStart(2, '0')).join('')
  if (Array.isArray(value)) return `{${value.map(shown).join(',')}}`
  return typeof value === 'object' ? JSON.stringify(value) : String(value)
}

/** Runs a block on a PGlite database; yields a table for each statement with a result. */
export async function* run(db, block, variables) {
  for (const { text, prefix } of statements(block)) {
    for (const result of await db.exec(substitute(text, variables))) {
      if (prefix !== undefined) {
        for (const [name, value] of Object.entries(result.rows[0] ?? {})) {
          // psql unsets a variable for NULL.
          if (value === null) variables.delete(prefix + name)
          else variables.set(prefix + name, shown(value))
        }
      } else if (result.fields.length > 0) {
        yield { columns: result.fields.map((field) => field.name), rows: result.rows.map((row) => Object.values(row).map(shown)) }
      }
    }
  }
}

/** The install script without the lines that only psql knows. */
export function withoutPsql(script) {
  return script.replace(/^\\if[^]*?^\\endif$/m, '')
}
