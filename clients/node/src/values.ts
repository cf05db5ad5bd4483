/**
 * Values on their way to the server and back. All parameters are text or
 * bytes, cast in the statement, so that no driver has to guess; all columns
 * come back as text, so that no parser of the driver's rounds them.
 */
import { IdempotencyError } from './errors.js'

/** A bigint, its digits, or a number that is still exact. */
export type Bigint = bigint | string | number

/** What JSON.stringify makes a document of. */
export type Json = string | number | boolean | null | Json[] | { [name: string]: Json | undefined }

/** Response headers; several values of one are a list. */
export type Headers = Record<string, string | string[]>

export type Parameter = string | Uint8Array | null

/** Text as PostgreSQL can hold it: an error says what is wrong before anything is sent. */
export function text(value: unknown, name: string): string | null {
  if (value === null) return null
  if (typeof value !== 'string') throw new TypeError(`${name} is no string: ${describe(value)}`)
  if (value.includes('\0')) {
    throw new IdempotencyError(`${name} contains a NUL character, which PostgreSQL cannot store in text`, { sqlstate: '22021' })
  }
  if (!value.isWellFormed()) {
    throw new IdempotencyError(`${name} contains a lone surrogate, which is no character`, { sqlstate: '22021' })
  }
  return value
}

/** A bigint's digits. A number beyond 2^53 has lost some already. */
export function bigint(value: unknown, name: string): string | null {
  if (value === null) return null
  if (typeof value === 'bigint' || (typeof value === 'number' && Number.isSafeInteger(value))) return String(value)
  if (typeof value === 'string' && /^[+-]?\d+$/.test(value)) return value
  throw new TypeError(`${name} is no exact integer: ${describe(value)}; pass a bigint or its digits`)
}

export function int(value: unknown, name: string): string | null {
  if (value === null) return null
  if (typeof value === 'number' && Number.isSafeInteger(value)) return String(value)
  throw new TypeError(`${name} is no integer: ${describe(value)}`)
}

export function bool(value: unknown, name: string): string | null {
  if (value === null) return null
  if (typeof value === 'boolean') return String(value)
  throw new TypeError(`${name} is no boolean: ${describe(value)}`)
}

export function bytes(value: unknown, name: string): Uint8Array | null {
  if (value === null) return null
  if (value instanceof Uint8Array) return Buffer.from(value.buffer, value.byteOffset, value.byteLength)
  throw new TypeError(`${name} is no Buffer: ${describe(value)}`)
}

/** A document's text. */
export function json(value: unknown, name: string): string | null {
  if (value === null) return null
  const document = JSON.stringify(value, (_, part: unknown) => {
    if (typeof part === 'bigint') throw new TypeError(`${name} contains a bigint, which JSON.stringify does not take`)
    return part
  })
  if (document === undefined) throw new TypeError(`${name} is nothing that JSON has: ${describe(value)}`)
  return document
}

/** A list as PostgreSQL writes arrays. Drivers differ in what they make of one. */
export function array(values: unknown, name: string, element: (value: unknown, name: string) => Parameter): string | null {
  if (values === null) return null
  if (!Array.isArray(values)) throw new TypeError(`${name} is no array: ${describe(values)}`)
  const elements = values.map((value, at) => {
    const made = element(value ?? null, `${name}[${at}]`)
    if (made === null) return 'NULL'
    const plain = typeof made === 'string' ? made : `\\x${Buffer.from(made).toString('hex')}`
    return `"${plain.replaceAll('\\', '\\\\').replaceAll('"', '\\"')}"`
  })
  return `{${elements.join(',')}}`
}

/** An interval: text, or milliseconds that say so in their name. */
export function interval(value: string | null | undefined, ms: number | null | undefined, name: string): string | null | undefined {
  if (ms !== undefined && ms !== null) {
    if (value !== undefined && value !== null) throw new TypeError(`${name} and ${name}Ms exclude each other`)
    if (typeof ms !== 'number' || !Number.isFinite(ms)) throw new TypeError(`${name}Ms is no number: ${describe(ms)}`)
    return `${ms.toFixed(3)} milliseconds`
  }
  if (value !== undefined && value !== null && typeof value !== 'string') {
    throw new TypeError(`${name} is no interval such as '30s': ${describe(value)}; milliseconds are ${name}Ms`)
  }
  return value ?? ms
}

function describe(value: unknown): string {
  return typeof value === 'number' || typeof value === 'boolean' || value === undefined ? String(value) : typeof value
}
