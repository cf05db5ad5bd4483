// The SQL of the README's quick start and of the guide, by heading.
import { readFile } from 'node:fs/promises'

/** [{ title, blocks }] of a tree of this project. */
export async function blocks(tree) {
  const readme = await readFile(new URL('README.md', tree), 'utf8')
  const guide = await readFile(new URL('docs/guide.md', tree), 'utf8')
  const start = readme.slice(readme.indexOf('\n## Quick start'), readme.indexOf('\n## Node and Python'))
  const parts = []
  for (const section of (start + guide).split(/^## /m).slice(1)) {
    const found = [...section.matchAll(/^```sql\n([^]*?)^```$/gm)].map((match) => match[1].trimEnd())
      // The page has installed the portable edition already.
      .filter((block) => !block.includes('CREATE EXTENSION'))
    if (found.length > 0) parts.push({ title: section.slice(0, section.indexOf('\n')), blocks: found })
  }
  return parts
}
