/**
 * Decides how a request is compared with the first request under its key.
 *
 * The server compares JSON in canonical form (RFC 8785). A multipart form is
 * compared without its boundary, and any other body by its bytes.
 */
import type { RequestIdentity } from './functions.js'
import { requestHashOfBytes } from './keys.js'
import { describe } from './values.js'

/** A larger document is compared by its bytes. */
const MAX_COMPARED = 2 << 20
/** SQLSTATEs of a body that is not JSON, that jsonb cannot hold, or that has no members to leave out. Such a body is compared by its bytes. */
export const NO_JSON = new Set(['22003', '22021', '22023', '22P02', '22P05', '54000', '54001'])

/** JSON pointers ('/meta/traceId') to members to leave out, or a function of the framework's request and the body that returns the text or bytes to compare. */
export type Fingerprint<Request> = readonly string[] | ((request: Request, body: Uint8Array) => string | Uint8Array)

export interface Compared {
  method: string
  /** With the query. */
  path: string
  body: Uint8Array
  contentType?: string | undefined
  contentEncoding?: string | undefined
}

/** In UTF-8, with any other parameters. */
const JSON_TYPE = /^application\/([^;]*\+)?json\s*(;(?!\s*charset\s*=(?!\s*"?utf-?8"?\s*(;|$)))[^;]*)*$/i
const MULTIPART = /^multipart\/form-data\b.*;\s*boundary=(?:"([^"]+)"|([^\s;]+))/i
/** The boundary of a multipart form, or undefined. */
function boundaryOf(contentType: string): string | undefined {
  const [, quoted, bare] = MULTIPART.exec(contentType) ?? []
  return quoted ?? bare
}
const FORM = /^application\/x-www-form-urlencoded\b/i

/** The paths of a list of JSON pointers (RFC 6901). */
export function leftOut(fingerprint: Fingerprint<never> | undefined): string[][] {
  if (fingerprint === undefined || typeof fingerprint === 'function') return []
  if (!Array.isArray(fingerprint) || !fingerprint.every((one) => typeof one === 'string' && one.startsWith('/'))) {
    throw new TypeError("the option fingerprint must be a function, or a list of JSON pointers such as '/meta/traceId'")
  }
  return (fingerprint as string[]).map((pointer) => pointer.split('/').slice(1).map((part) => part.replaceAll('~1', '/').replaceAll('~0', '~')))
}

const UTF8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true })

/** The text of bytes, or undefined if they are not UTF-8 or have a NUL, which the database cannot store in text. */
export function storableUtf8(bytes: Uint8Array): string | undefined {
  try {
    return bytes.includes(0) ? undefined : UTF8.decode(bytes)
  } catch {
    return undefined
  }
}

/** The request as a claim compares it. JSON is a string, which the server puts into canonical form. */
export function compared<Request>(request: Compared, native: Request, fingerprint: Fingerprint<Request> | undefined): RequestIdentity {
  const { method, path, body, contentType = '', contentEncoding = 'identity' } = request
  if (typeof fingerprint === 'function') {
    const made: unknown = fingerprint(native, body)
    if (typeof made !== 'string' && !(made instanceof Uint8Array)) throw new TypeError(`the option fingerprint must return a string or bytes, not ${describe(made)}`)
    return ofBytes({ ...request, body: Buffer.from(made) })
  }
  const boundary = boundaryOf(contentType)
  if (body.length === 0 || contentEncoding !== 'identity') return ofBytes(request)
  if (JSON_TYPE.test(contentType) && body.length <= MAX_COMPARED) {
    const text = storableUtf8(body)
    return text === undefined ? ofBytes(request) : { method, path, body: text, without: leftOut(fingerprint) }
  }
  if (boundary === undefined) return ofBytes(request)
  const parts = partsOf(body, boundary)
  // The lengths take the place of the delimiters, so that no part can contain one.
  return ofBytes({ ...request, body: Buffer.from(`${parts.map(({ length }) => length).join()}${parts.join('')}`, 'latin1') })
}

/** The bytes of a multipart form between its delimiters, as latin1. */
const partsOf = (body: Uint8Array, boundary: string): string[] => `\r\n${Buffer.from(body).toString('latin1')}`.split(`\r\n--${boundary}`)

/** The request, compared by its bytes. */
export function ofBytes({ method, path, body }: Compared): RequestIdentity {
  return { requestHash: requestHashOfBytes(method, path, body) }
}

/** The values of a field of a form. A part of a file has none. */
export function formKeys({ body, contentType = '', contentEncoding = 'identity' }: Compared, field: string): string[] {
  const boundary = boundaryOf(contentType)
  if (contentEncoding !== 'identity' || (boundary === undefined && !FORM.test(contentType))) return []
  if (boundary === undefined) {
    const text = Buffer.from(body).toString('latin1')
    // Each byte of the name can be encoded. Other fields are not parsed, because there can be very many.
    const name = Array.from(Buffer.from(field), (byte) => `(?:${escaped(byte === 32 ? '+' : String.fromCharCode(byte))}|%(?:${byte.toString(16).padStart(2, '0')}))`)
    return Array.from(text.matchAll(new RegExp(`(?:^|&)${name.join('')}=([^&]*)`, 'gi')), ([, value]) => new URLSearchParams(`v=${value!}`).get('v')!)
  }
  return partsOf(body, boundary).flatMap((part) => {
    const end = part.indexOf('\r\n\r\n')
    const [, parameters] = DISPOSITION.exec(part.slice(0, Math.max(end, 0))) ?? []
    const [, quoted, bare] = /;[ \t]*name[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))/i.exec(parameters ?? '') ?? []
    if (parameters === undefined || /;[ \t]*filename\*?[ \t]*=/i.test(parameters) || Buffer.from(quoted ?? bare ?? '', 'latin1').toString() !== field) return []
    return [Buffer.from(part.slice(end + 4), 'latin1').toString()]
  })
}

const DISPOSITION = /^content-disposition[ \t]*:[ \t]*form-data[ \t]*(;.*)$/im
const escaped = (text: string): string => text.replace(/[\\^$.*+?()[\]{}|/-]/g, '\\$&')
