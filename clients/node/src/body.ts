/**
 * The body of a request: reads it before any parser, parses it as Express does,
 * makes it readable again, and restores the request for another run of a handler.
 */
import { createHash } from 'node:crypto'
import { readFile } from 'node:fs/promises'
import { IncomingMessage } from 'node:http'
import { Socket } from 'node:net'
import { parse as parseForm } from 'node:querystring'
import { Readable } from 'node:stream'
import { promisify } from 'node:util'
import { brotliDecompress, gunzip, inflate } from 'node:zlib'
import type { Compared } from './comparison.js'

/** The members of an Express request that this file uses. */
export interface ParsedRequest extends IncomingMessage {
  originalUrl: string
  body?: any
  rawBody?: Buffer
}

/** The largest body that the guard reads, in bytes, if no option says otherwise. */
export const BODY_LIMIT = 2 << 20

/** Parses a body that no parser has read as Express would. Returns a function that parses it again. */
export async function parseBody(req: ParsedRequest, raw: Buffer, limit: number): Promise<(() => unknown) | undefined> {
  // Otherwise a parser would wait for bytes that have been read.
  ;(req as { _body?: boolean })._body = true
  const { 'content-type': contentType = '', 'content-length': length, 'transfer-encoding': chunked } = req.headers
  const type = contentType.split(';')[0]!.trim().toLowerCase()
  const isJson = /^application\/([^;]*\+)?json$/.test(type)
  const isForm = type === 'application/x-www-form-urlencoded'
  if (length === undefined && chunked === undefined) {
    // As Express's parsers do: version 4 sets {}.
    if (typeof (req as any).app?.lazyrouter === 'function') req.body ??= {}
    else req.body = undefined
    return undefined
  }
  if (!isJson && !isForm) {
    req.body = raw
    return () => req.rawBody
  }
  const charset = (/;\s*charset\s*=\s*"?([^\s;"]+)/i.exec(contentType)?.[1] ?? 'utf-8').toLowerCase()
  const known = isJson ? ['utf-8', 'utf8', 'utf-16', 'utf-16le', 'utf-16be'] : ['utf-8', 'utf8']
  if (!known.includes(charset)) throw badRequest(415, `unsupported charset "${charset.toUpperCase()}"`, 'charset.unsupported', { charset })
  const text = new TextDecoder(charset).decode(await inflated(raw, (req.headers['content-encoding'] ?? 'identity').toLowerCase(), limit))
  const parse = isJson ? () => parsedJson(text) : () => parsedForm(text)
  req.body = parse()
  return parse
}

/** The document that a parser has made is compared, with the files beside it. */
async function parsedBody(req: Pick<ParsedRequest, 'method' | 'originalUrl' | 'headers' | 'body'> & Files): Promise<Buffer> {
  const document = JSON.stringify(req.body ?? null) ?? 'null'
  const files = filesBeside(req)
  // Express 4 sets {} for a body that it does not parse. express-fileupload, whose files have mv(), sets nothing if there are no fields.
  const isLost = req.body === undefined || (!(req as { _body?: boolean })._body && document === '{}' && Object.getPrototypeOf(req.body) === Object.prototype &&
    !/json/i.test(req.headers['content-type'] ?? ''))
  if (isLost && !(files.length > 0 && files.every((file) => file['mv'])) &&
    (req.headers['transfer-encoding'] !== undefined || Number(req.headers['content-length'] ?? 0) > 0)) {
    throw new TypeError(`${req.method} ${req.originalUrl}: the body was read before the guard, and is not in req.body, so it cannot be compared`)
  }
  const contents = await Promise.all(files.map(describedFile))
  return Buffer.from(files.length === 0 ? document : JSON.stringify({ ...req.body, 'files of the request': contents }))
}

/** The files of multer, express-fileupload and formidable. */
interface Files { file?: any; files?: object }

/** The body of a request in Express or NestJS, as it is compared. unread has its bytes if no parser has read them. */
export async function bodyOf(request: any, limit: number): Promise<Omit<Compared, 'method' | 'path'> & { body: Buffer; form?: object | undefined; unread?: Buffer }> {
  const raw = request.raw ?? request
  const { 'content-type': contentType, 'content-encoding': contentEncoding } = request.headers
  const body = [request.rawBody, request.body].find((one): one is Buffer => Buffer.isBuffer(one))
  if (body) return { body, contentType, contentEncoding }
  if (raw.readableEnded || request._body) {
    const isForm = /^(multipart\/form-data|application\/x-www-form-urlencoded)\b/i.test(contentType ?? '')
    return { body: await parsedBody(request), contentType: 'application/json', form: isForm ? request.body ?? {} : undefined }
  }
  const unread = await wholeBody(raw, limit)
  return { body: unread, contentType, contentEncoding, unread }
}

/** Prepares a request for each run of its handler. If no parser has read the body, bytes has it. */
export function preparation(request: IncomingMessage, bytes: Uint8Array | undefined): { begin(): void; over(): void } {
  let readOver: (() => void) | undefined
  return {
    begin() {
      readOver?.()
      if (bytes) readOver = replayBody(request, Buffer.from(bytes))
      // Otherwise Express would drop the body of a response that the client has cached, before it is stored.
      if (request.method === 'GET' || request.method === 'HEAD') Object.defineProperty(request, 'fresh', { configurable: true, writable: true, value: false })
    },
    over() {
      readOver?.()
      delete (request as { fresh?: boolean }).fresh
    },
  }
}

const filesBeside = ({ file, files }: Files): Record<string, any>[] => [file ?? [], Object.values(files ?? {})].flat(2)

/** The names, the type and the hash of a file in memory or on disk. */
async function describedFile(file: Record<string, any>): Promise<unknown[]> {
  const name: unknown = file['originalname'] ?? file['originalFilename'] ?? file['name']
  const path: unknown = file['path'] ?? file['filepath'] ?? (file['tempFilePath'] || undefined)
  const bytes: unknown = typeof path === 'string' ? await readFile(path).catch(() => undefined) : file['buffer'] ?? file['data']
  if (!(bytes instanceof Uint8Array)) {
    throw new TypeError(`the file ${String(name)} was read before the guard, and is neither in memory nor on disk, so it cannot be compared: ` +
      'let the guard run before its parser')
  }
  return [file['fieldname'], name, file['mimetype'], createHash('sha256').update(bytes).digest('hex')]
}

const INFLATE: Record<string, (bytes: Buffer, options: { maxOutputLength: number }) => Promise<Buffer>> = {
  gzip: promisify(gunzip), deflate: promisify(inflate), br: promisify(brotliDecompress),
}

async function inflated(raw: Buffer, encoding: string, limit: number): Promise<Buffer> {
  if (encoding === 'identity') return raw
  if (!Object.hasOwn(INFLATE, encoding)) throw badRequest(415, `unsupported content encoding "${encoding}"`, 'encoding.unsupported', { encoding })
  try {
    return await INFLATE[encoding]!(raw, { maxOutputLength: Math.max(limit, 1) })
  } catch (cause) {
    if ((cause as { code?: unknown }).code === 'ERR_BUFFER_TOO_LARGE') {
      throw badRequest(413, `the request body is larger than ${limit} bytes`, 'entity.too.large', { cause })
    }
    throw badRequest(400, `the request body is no ${encoding}`, 'encoding.invalid', { cause })
  }
}

/** Like express.json(): a list or an object, and {} for an empty body. */
function parsedJson(body: string): unknown {
  if (body === '') return {}
  try {
    const made: unknown = JSON.parse(body)
    if (typeof made === 'object' && made !== null) return made
  } catch (error) {
    throw badRequest(400, (error as Error).message, 'entity.parse.failed', { body, cause: error })
  }
  throw badRequest(400, 'the request body is JSON, but no object and no list', 'entity.parse.failed', { body })
}

const MOST_FIELDS = 1000

/** Like express.urlencoded(): a repeated field is a list. */
function parsedForm(body: string): unknown {
  if (body.split('&', MOST_FIELDS + 1).length > MOST_FIELDS) throw badRequest(413, 'too many parameters', 'parameters.too.many')
  return Object.fromEntries(Object.entries(parseForm(body, '&', '=', { maxKeys: 0 })).filter(([name]) => name !== '__proto__'))
}

/**
 * Returns a function that restores the request before the next try: it removes
 * members that an earlier try has added or replaced, and copies the original
 * ones. A body that can be parsed again is not copied, because copies cost more
 * and are rarely needed.
 */
export function snapshotOf(request: object, parseAgain?: () => unknown): () => Promise<void> {
  const own = (): string[] => Object.keys(request).filter((name) => !name.startsWith('_') && !PLAIN.has(name))
  const target = request as Record<string, unknown>
  const before = new Map(own().map((name) => [name, target[name]]))
  const copies = new Map(['rawBody', ...(parseAgain ? [] : ['body']), 'params', 'query'].filter((name) => before.has(name))
    .map((name) => [name, copied(before.get(name))]))
  return async () => {
    for (const name of own()) if (!before.has(name)) delete target[name]
    for (const [name, value] of before) if (target[name] !== value) target[name] = value
    for (const [name, copy] of copies) target[name] = copied(copy)
    if (parseAgain) target['body'] = await parseAgain()
  }
}

/** The members of Node's own request. */
const PLAIN = new Set(Object.keys(new IncomingMessage(new Socket())))

/** Copies values that parsers make, and returns other values unchanged. */
function copied(value: unknown, seen = new Map<object, unknown>()): unknown {
  if (Buffer.isBuffer(value)) return Buffer.from(value)
  if (typeof value !== 'object' || value === null) return value
  // A part of @fastify/multipart contains itself.
  if (seen.has(value)) return seen.get(value)
  // Some parsers use an empty prototype of their own.
  const kind = Object.getPrototypeOf(value) as object | null
  if (!Array.isArray(value) && kind !== null && Object.getPrototypeOf(kind) !== null) return value
  const made: any = Array.isArray(value) ? [] : kind === Object.prototype ? {} : Object.create(kind)
  seen.set(value, made)
  for (const [name, one] of Object.entries(value)) {
    // An assignment to __proto__ would not make a member.
    if (name === '__proto__') Object.defineProperty(made, name, { configurable: true, enumerable: true, writable: true, value: copied(one, seen) })
    else made[name] = copied(one, seen)
  }
  return made
}

/** If a parser, such as one of multipart/form-data, pipes the request, it gets the bytes that have been read. */
export function replayPipe(request: object, bytes: () => Uint8Array): void {
  Object.defineProperty(request, 'pipe', {
    configurable: true, writable: true,
    value: (to: NodeJS.WritableStream, options?: { end?: boolean }) => Readable.from([bytes()]).pipe(to, options),
  })
}

/**
 * Makes a request whose body has been read a stream of the same bytes again, for
 * a handler that reads it by events, by pipe() or by iteration. Each call begins
 * again. The function that it returns ends the stream.
 */
export function replayBody(request: Readable, bytes: Uint8Array): () => void {
  const target = request as unknown as { _readableState: object }
  const before = target._readableState
  for (const event of ['data', 'end', 'readable']) request.removeAllListeners(event)
  target._readableState = (new Readable() as unknown as typeof target)._readableState
  if (bytes.length > 0) request.push(bytes)
  request.push(null)
  return () => { target._readableState = before }
}

/** The whole body of a request. Bytes over the limit are read and dropped, so that the client can read the refusal. */
export function wholeBody(stream: Readable, limit: number): Promise<Buffer> {
  return new Promise((resolve, reject) => {
    // Its events have been emitted already.
    if (stream.readableEnded) return reject(new TypeError('the body was read before the guard, so it cannot be compared'))
    const aborted = (): void => reject(badRequest(400, 'the request body did not come whole', 'request.aborted'))
    if (stream.destroyed) return aborted()
    let parts: Buffer[] = []
    let size = 0
    stream.on('data', (part: Buffer) => {
      size += part.length
      if (size <= limit) {
        parts.push(part)
        return
      }
      parts = []
      reject(badRequest(413, `the request body is larger than ${limit} bytes`, 'entity.too.large'))
    })
    stream.on('end', () => resolve(Buffer.concat(parts)))
    stream.on('error', reject)
    stream.on('close', () => {
      // The stack of an error costs more than the rest of this function.
      if (!stream.readableEnded) aborted()
    })
    // A hook can have paused it.
    stream.resume()
  })
}

/** An error such as those of body-parser. */
export function badRequest(status: number, message: string, type: string, more: object = {}): Error {
  return Object.assign(new Error(message), { status, statusCode: status, expose: true, type, ...more })
}
