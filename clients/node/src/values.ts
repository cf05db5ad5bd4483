/**
 * Conversion of values for the server and back. All parameters are text or
 * bytes and are cast in the statement, so that no driver guesses their types. All
 * columns are returned as text, so that no driver's parser rounds them.
 */
import { IdempotencyError } from './errors.js'

/** A bigint, its digits, or a number that is still exact. */
export type Bigint = bigint | string | number

/** A value that JSON.stringify can write. */
export type Json = string | number | boolean | null | Json[] | { [name: string]: Json | undefined }

/** Response headers; several values of one header are a list. */
export type Headers = Record<string, string | string[]>

export type Parameter = string | Buffer | null

/** A conversion that keeps null. */
const orNull = <T extends Parameter>(convert: (value: unknown, name: string) => T) => (value: unknown, name: string): T | null =>
  (value === null ? null : convert(value, name))

/** Checks that PostgreSQL can hold the text, before anything is sent. */
export const text = orNull((value, name) => {
  if (typeof value !== 'string') throw new TypeError(`${name} must be a string, not ${describe(value)}`)
  const wrong = value.includes('\0') ? 'a NUL character' : value.isWellFormed() ? undefined : 'a lone surrogate'
  if (wrong) throw new IdempotencyError(`${name} contains ${wrong}, which PostgreSQL cannot store in text`, { sqlstate: '22021' })
  return value
})

/** The digits of a bigint. A number beyond 2^53 is refused, because it has lost digits. */
export const bigint = orNull((value, name) => {
  if (typeof value === 'bigint' || (typeof value === 'number' && Number.isSafeInteger(value))) return String(value)
  if (typeof value === 'string' && /^[+-]?\d+$/.test(value)) return value
  throw new TypeError(`${name} must be an exact integer, not ${describe(value)}; pass a bigint or a string of digits`)
})

export const int = orNull((value, name) => {
  if (typeof value === 'number' && Number.isSafeInteger(value)) return String(value)
  throw new TypeError(`${name} must be an integer, not ${describe(value)}`)
})

export const bool = orNull((value, name) => {
  if (typeof value === 'boolean') return String(value)
  throw new TypeError(`${name} must be a boolean, not ${describe(value)}`)
})

export const bytes = orNull((value, name) => {
  if (value instanceof Uint8Array) return Buffer.from(value.buffer, value.byteOffset, value.byteLength)
  throw new TypeError(`${name} must be a Buffer, not ${describe(value)}`)
})

/** A parameter as text. Some drivers, such as pg-native, would send bytes as text that ends at their first NUL. */
export const asText = (value: Parameter): string | null => (Buffer.isBuffer(value) ? `\\x${value.toString('hex')}` : value)

/** A document's text. */
export const json = orNull((value, name) => jsonOf(value, `${name} contains`))

/** A list in PostgreSQL's array syntax, because drivers differ in how they write arrays. */
export function array(values: unknown, name: string, element: (value: unknown, name: string) => Parameter): string | null {
  if (values === null) return null
  if (!Array.isArray(values)) throw new TypeError(`${name} must be an array, not ${describe(values)}`)
  const elements = Array.from(values as unknown[], (value, at) => {
    const made = asText(element(value, `${name}[${at}]`))
    return made === null ? 'NULL' : `"${made.replaceAll('\\', '\\\\').replaceAll('"', '\\"')}"`
  })
  return `{${elements.join(',')}}`
}

/** The JSON text of a value. A part that JSON would leave out or change is an error that names it. */
export function jsonOf(value: unknown, name: string): string {
  const within: object[] = []
  const check = (part: unknown, path: string): void => {
    const refuse = (what: string): never => { throw new TypeError(`${name} a value that JSON cannot represent: ${path === '' ? '' : `${path} is `}${what}`) }
    if (part === undefined) refuse(path === '' ? 'undefined; use null for no value' : 'undefined')
    if (typeof part === 'bigint' || typeof part === 'function' || typeof part === 'symbol') refuse(`a ${typeof part}`)
    if (typeof part === 'number' && !Number.isFinite(part)) refuse(String(part))
    if (typeof part !== 'object' || part === null) return
    if (within.includes(part)) refuse('part of itself')
    // JSON.stringify unwraps these objects.
    if (part instanceof Number) return check(Number(part), path)
    if (part instanceof String || part instanceof Boolean) return
    if (part instanceof Date && Number.isNaN(part.getTime())) refuse('an invalid Date')
    const plain = part as { toJSON?: (at: string) => unknown }
    within.push(part)
    if (typeof plain.toJSON === 'function') check(plain.toJSON(''), path)
    // A Map, a Set, a RegExp or an Error would become {}, and bytes an object of numbers.
    else if (ArrayBuffer.isView(part) || (!isPlain(part) && !Array.isArray(part) && Object.keys(part).length === 0)) refuse(`a ${describe(part)}`)
    else if (Array.isArray(part)) for (const [at, one] of part.entries()) check(one, `${path}[${at}]`)
    else for (const [at, one] of Object.entries(part)) if (one !== undefined) check(one, path === '' ? at : `${path}.${at}`)
    within.pop()
  }
  check(value, '')
  return JSON.stringify(value)
}

function isPlain(value: object): boolean {
  const kind: unknown = Object.getPrototypeOf(value)
  // This also accepts objects of another realm.
  return kind === null || Object.getPrototypeOf(kind) === null
}

const ascii = (text: string): string => text.replace(/[^\0-\x7f]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`)
/** A document's text in ASCII, which a database of any encoding can hold; for parameters of type json, not jsonb. */
export const asciiJson = orNull((value, name) => ascii(jsonOf(value, `${name} contains`)))

/** Refuses headers that are a Map or a Headers object, which would have no names. */
export function headerNames(value: unknown, name: string): void {
  if (typeof value !== 'object' || value === null || !isPlain(value)) {
    throw new TypeError(`${name} must be an object of names and values, not ${describe(value)}`)
  }
}

function checkLine(field: string, line: unknown, name: string): void {
  if (!/^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/.test(field)) throw new TypeError(`${name}: ${JSON.stringify(field)} is not a valid name of a header`)
  if (typeof line !== 'string' && !Number.isFinite(line)) throw new TypeError(`${name}: ${field} must be a string, not ${describe(line)}`)
  const wrong = /[^\t\x20-\x7e\x80-\xff]/.exec(String(line))
  if (wrong) {
    throw new TypeError(`${name}: ${field} contains ${JSON.stringify(wrong[0])}, which is not allowed in a header`)
  }
}

/** The document of headers, which must be valid, so that they can be sent again. */
export const headers = orNull((value, name) => {
  headerNames(value, name)
  for (const [field, given] of Object.entries(value as Headers)) {
    if (given === undefined) continue
    if (Array.isArray(given)) for (const line of given) checkLine(field, line, name)
    else checkLine(field, given, name)
  }
  return ascii(JSON.stringify(value))
})

const SECOND = 1000
const DAY = 86_400 * SECOND
const UNITS: [RegExp, number][] = [
  [/^(us|usecs?|useconds?|microseconds?)$/, 0.001], [/^(ms|msecs?|mseconds?|milliseconds?)$/, 1],
  [/^(s|secs?|seconds?)?$/, SECOND], [/^(m|mins?|minutes?)$/, 60 * SECOND], [/^(h|hrs?|hours?)$/, 3600 * SECOND],
  [/^(d|days?)$/, DAY], [/^(w|weeks?)$/, 7 * DAY], [/^(mons?|months?)$/, 30 * DAY], [/^(y|yrs?|years?)$/, 360 * DAY],
  [/^(decs?|decades?)$/, 3600 * DAY], [/^(c|cent|century|centuries)$/, 36_000 * DAY], [/^(mils?|millennium|millennia)$/, 360_000 * DAY],
]
const ISO = /^P(?!$)(?:([\d.]+)Y)?(?:([\d.]+)M)?(?:([\d.]+)W)?(?:([\d.]+)D)?(?:T(?!$)(?:([\d.]+)H)?(?:([\d.]+)M)?(?:([\d.]+)S)?)?$/
const ISO_UNITS = [360 * DAY, 30 * DAY, 7 * DAY, DAY, 3600 * SECOND, 60 * SECOND, SECOND]

const parsedIntervals = new Map<string, number | undefined>()
/** The milliseconds of an interval as PostgreSQL compares it, with months of 30 days; undefined if it is not an interval. */
export const intervalMs = (interval: string): number | undefined => remembered(parsedIntervals, 100, interval, () => parsedInterval(interval))

function parsedInterval(interval: string): number | undefined {
  const iso = ISO.exec(interval.trim())
  if (iso) {
    const ms = ISO_UNITS.reduce((sum, unit, at) => sum + unit * Number(iso[at + 1] ?? 0), 0)
    return Number.isNaN(ms) ? undefined : ms
  }
  let rest = interval.trim().toLowerCase().replace(/^@/, '').trim()
  const sign = /[^a-z]ago$/.test(rest) ? -1 : 1
  if (sign < 0) rest = rest.slice(0, -3)
  if (rest.trim() === '') return undefined
  let ms = 0
  while (rest.trim() !== '') {
    const time = /^[\s,]*([+-]?)(\d+):(\d\d?)(?::(\d\d?(?:\.\d*)?))?(?=[\s,]|$)/.exec(rest)
    const part = time ?? /^[\s,]*([+-]?)(\d+\.?\d*|\.\d+)\s*([a-z]*)(?=[\s,+-]|\d|$)/.exec(rest)
    if (!part) return undefined
    rest = rest.slice(part[0].length)
    // Before a time, a number without a unit is a number of days.
    const unit = time ? 0 : part[3] === '' && /^\s*\d+:/.test(rest) ? DAY : UNITS.find(([name]) => name.test(part[3]!))?.[1]
    if (unit === undefined) return undefined
    const size = time ? Number(part[2]) * 3600 * SECOND + Number(part[3]) * 60 * SECOND + Number(part[4] ?? 0) * SECOND : Number(part[2]) * unit
    ms += part[1] === '-' ? -size : size
  }
  return sign * ms
}

/** An interval from text, or from milliseconds in an option whose name ends in Ms. Other values are refused before anything is sent. */
export function interval(value: string | null | undefined, ms: number | null | undefined, name: string): string | null | undefined {
  if (ms !== undefined && ms !== null) {
    if (value !== undefined && value !== null) throw new TypeError(`${name} and ${name}Ms cannot both be set`)
    if (typeof ms !== 'number' || !Number.isFinite(ms)) throw new TypeError(`${name}Ms must be a number of milliseconds, not ${describe(ms)}`)
    if (ms < 0) throw new TypeError(`${name}Ms must not be negative: ${ms}`)
    if (ms > 1e14) throw new TypeError(`${name}Ms is too long for PostgreSQL: ${ms}`)
    return `${ms.toFixed(3)} milliseconds`
  }
  if (value === undefined || value === null) return value ?? ms
  if (typeof value !== 'string') {
    throw new TypeError(`${name} must be an interval such as '30s', not ${describe(value)}; for milliseconds, use ${name}Ms`)
  }
  const found = intervalMs(value)
  if (found === undefined) {
    throw new TypeError(`${name} is not a valid interval: ${JSON.stringify(value)}; write it as '30 seconds', '1 day 02:30' or 'PT30S'`)
  }
  if (found < 0) throw new TypeError(`${name} must not be negative: ${JSON.stringify(value)}`)
  return value
}

/** A duration in milliseconds, or undefined if there is none. */
export function durationMs(value: string | null | undefined, ms: number | null | undefined, name: string): number | undefined {
  const given = interval(value, ms, name)
  return given === undefined || given === null ? undefined : intervalMs(given)
}

/** The value of a key in a cache, which keeps only limit values. */
export function remembered<T>(cache: Map<string, T>, limit: number, key: string, make: () => T): T {
  let found = cache.get(key)
  if (found === undefined) {
    found = make()
    if (cache.size < limit) cache.set(key, found)
  }
  return found
}

/** The longest time of Node's timers. */
export const LONGEST_TIMER = 2 ** 31 - 1

/** Refuses options that do not exist, which would be ignored. */
export function checkedNames(options: unknown, known: ReadonlySet<string>, what: string): void {
  if (typeof options !== 'object' || options === null) throw new TypeError(`the options of ${what} must be an object, not ${describe(options)}`)
  const unknown = Object.keys(options).find((name) => !known.has(name))
  if (unknown !== undefined) throw new TypeError(`${what} has no option ${unknown}`)
}

/** Describes a value in an error by its type, not by its content. */
export function describe(value: unknown): string {
  if (typeof value === 'number' || typeof value === 'boolean' || value === undefined || value === null) return String(value)
  if (typeof value !== 'object') return typeof value
  const made: unknown = (value as { constructor?: unknown }).constructor
  return typeof made === 'function' && made !== Object ? made.name || 'object' : 'object'
}
