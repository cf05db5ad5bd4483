/** Rules of test/lint. Types are left to tsc, and the layout to the reader. */
import js from '@eslint/js'
import { parser, plugin } from 'typescript-eslint'

const named = (names) => Object.fromEntries(names.split(' ').map((name) => [name, 'readonly']))

export default [
  { ignores: ['**/node_modules/', 'site/', '**/dist/', '**/build/', '**/tmp_check/'] },
  js.configs.recommended,
  {
    languageOptions: {
      globals: named('Buffer console crypto fetch performance process Response setInterval setTimeout URL URLSearchParams'),
    },
    // "== null" is null or undefined.
    rules: { eqeqeq: ['error', 'always', { null: 'ignore' }] },
  },
  { files: ['**/*.cjs', 'test/fuzz/documents.js'], languageOptions: { sourceType: 'commonjs' } },
  { files: ['examples/playground/*.js', 'examples/try/*.js'], languageOptions: { globals: named('document location') } },
  {
    files: ['**/*.ts'],
    languageOptions: { parser, parserOptions: { projectService: true } },
    plugins: { '@typescript-eslint': plugin },
    rules: {
      '@typescript-eslint/await-thenable': 'error',
      '@typescript-eslint/no-floating-promises': ['error', {
        // The runner of node:test awaits its tests.
        allowForKnownSafeCalls: [{ from: 'package', package: 'node:test', name: ['test', 'suite', 'after', 'afterEach', 'before', 'beforeEach'] }],
      }],
      '@typescript-eslint/no-for-in-array': 'error',
      '@typescript-eslint/no-implied-eval': 'error',
      '@typescript-eslint/no-misused-promises': 'error',
      '@typescript-eslint/prefer-promise-reject-errors': ['error', { allowThrowingAny: true, allowThrowingUnknown: true }],
      '@typescript-eslint/restrict-plus-operands': 'error',
      '@typescript-eslint/return-await': 'error',
      '@typescript-eslint/switch-exhaustiveness-check': 'error',
      // tsc does these.
      'no-undef': 'off',
      'no-redeclare': 'off',
      'no-unused-vars': 'off',
    },
  },
]
