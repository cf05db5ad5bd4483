/**
 * Decides how a request is compared with the first request under its key.
 *
 * The server compares JSON in canonical form (RFC 8785). A multipart form is
 * compared without its boundary, and any other body by its bytes.
 */
import type { RequestIdentity } from './functions.js'
import { requestHashOfBytes } from './keys.js'

/** A larger body is compared by its bytes. */
const MAX_COMPARED = 2 << 20
/** SQLSTATEs of a body that is not JSON, or that jsonb cannot hold. Such a body is compared by its bytes. */
export const NO_JSON = new Set(['22003', '22021', '22P02', '22P05', '54000', '54001'])

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

const JSON_TYPE = /^application\/([^;]*\+)?json\s*(;\s*charset\s*=\s*"?utf-?8"?\s*)?$/i
const MULTIPART = /^multipart\/form-data\b.*;\s*boundary=(?:"([^"]+)"|([^\s;]+))/i
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
  if (typeof fingerprint === 'function') return ofBytes({ ...request, body: Buffer.from(fingerprint(native, body)) })
  if (body.length === 0 || body.length > MAX_COMPARED || contentEncoding !== 'identity') return ofBytes(request)
  if (JSON_TYPE.test(contentType)) {
    const text = storableUtf8(body)
    return text === undefined ? ofBytes(request) : { method, path, body: text, without: leftOut(fingerprint) }
  }
  const [, quoted, bare] = MULTIPART.exec(contentType) ?? []
  const boundary = quoted ?? bare
  return ofBytes(boundary === undefined ? request
    : { ...request, body: Buffer.from(Buffer.from(body).toString('latin1').replaceAll(boundary, ''), 'latin1') })
}

/** The request, compared by its bytes. */
export function ofBytes({ method, path, body }: Compared): RequestIdentity {
  return { requestHash: requestHashOfBytes(method, path, body) }
}

/** The key in a field of a form, or undefined. */
export function formKey({ body, contentType = '', contentEncoding = 'identity' }: Compared, field: string): string | undefined {
  if (body.length > MAX_COMPARED || contentEncoding !== 'identity') return undefined
  const text = Buffer.from(body).toString('latin1')
  if (FORM.test(contentType)) {
    const found = new URLSearchParams(text).getAll(field)
    return found.length === 1 ? found[0] : undefined
  }
  if (!MULTIPART.test(contentType)) return undefined
  const name = field.replace(/[\\^$.*+?()[\]{}|]/g, '\\$&')
  const found = [...text.matchAll(new RegExp(`\\r\\ncontent-disposition: *form-data; *name="${name}" *\\r\\n\\r\\n([^\\r\\n]*)\\r\\n`, 'gi'))]
  return found.length === 1 ? Buffer.from(found[0]![1]!, 'latin1').toString() : undefined
}
