/** A reply of Fastify that is held back: the handler's return value, or the argument of reply.send(), is kept as it would be sent. */
import type { Response } from './client.js'
import { HeldResponse, type Attempt } from './held.js'
import { isStream, overrides, responseOverrides, seemsSent, SENDING_METHODS, streamingRefused } from './http.js'
import { describe, type Headers } from './values.js'

const REPLY_METHODS = ['then', 'send', 'hijack', 'trailer', 'sent']

export class BufferedReply extends HeldResponse {
  readonly #before: Headers
  readonly #statusBefore: number
  readonly #takeBack: (() => void)[]
  /** Other members that Fastify and its plugins keep in the reply, such as cookies. */
  readonly #members: [symbol, unknown][]
  readonly #phrase: string

  constructor(readonly reply: any, route: string) {
    super(reply.raw, route, [[reply, ['send', 'hijack', 'trailer', 'code', 'status', 'header', 'headers', 'removeHeader', 'type', 'serializer', 'redirect']], [reply.raw]])
    this.#before = lines(reply)
    this.#statusBefore = reply.statusCode
    this.#phrase = reply.raw.statusMessage
    this.#members = Object.getOwnPropertySymbols(reply).map((name) => [name, copied(reply[name])])
    this.#takeBack = [overrides(reply, REPLY_METHODS), responseOverrides(reply.raw)]
  }

  protected reset(): void {
    const { reply } = this
    for (const undo of this.#takeBack) undo()
    for (const name of Object.keys(reply.getHeaders())) reply.removeHeader(name)
    for (const [name, value] of Object.entries(this.#before)) reply.header(name, value)
    reply.code(this.#statusBefore)
  }

  protected hold(attempt: Attempt): (value: unknown, isPromised: boolean) => void {
    const { reply, raw, route } = this
    for (const [name, value] of this.#members) reply[name] = copied(value)
    raw.statusMessage = this.#phrase
    let tell!: () => void
    const take = (payload: unknown): void => {
      if (payload instanceof Error) return attempt.fail(payload)
      if (attempt.isSent()) return void attempt.refuseSecond()
      try {
        const response = responseOf(route, reply, payload)
        seemsSent(reply, 'sent')
        tell()
        seemsSent(raw, 'headersSent', 'writableEnded')
        attempt.answer(response)
      } catch (error) {
        attempt.fail(error)
      }
    }
    // A handler can await or return reply until it has answered. The response itself is sent later.
    const answered = new Promise<void>((tellIt) => { tell = tellIt })
    reply.then = (fulfilled: () => unknown, rejected: () => unknown) => (attempt.silent() ? Promise.resolve() : answered).then(fulfilled, rejected)
    reply.send = (payload: unknown) => {
      if (!attempt.isLate()) take(payload)
      return reply
    }
    for (const name of ['hijack', 'trailer']) {
      reply[name] = () => {
        attempt.fail(streamingRefused(route, `through reply.${name}()`))
        return reply
      }
    }
    for (const name of SENDING_METHODS) {
      (raw as any)[name] = () => {
        attempt.fail(streamingRefused(route, `through reply.raw.${name}()`))
        return name === 'write' ? true : raw
      }
    }
    return (value, isPromised) => {
      // As in Fastify, a promise of undefined is an empty response.
      const isEmpty = isPromised && value === undefined && !attempt.isSent() && !attempt.silent()
      if (isEmpty || (value !== undefined && value !== reply)) take(value)
    }
  }

  send(status: number, headers: Iterable<readonly [string, unknown]>, body: string | Uint8Array | null): unknown {
    const { reply } = this
    reply.code(status)
    for (const [name, value] of headers) reply.header(name, value)
    // For an empty body, Fastify would set a content type of bytes.
    return reply.send(body === null || (body.length === 0 && !reply.hasHeader('content-type')) ? undefined
      : typeof body === 'string' ? Buffer.from(body) : body)
  }
}

/** A member of Fastify's objects that has a symbol as its name. */
export function internal(object: any, description: string): any {
  const name = object && Object.getOwnPropertySymbols(object).find((symbol) => symbol.description === description)
  return name && object[name]
}

const copied = (value: unknown): unknown => (value instanceof Map ? new Map(value) : value)

function lines(reply: any): Headers {
  const made: Headers = {}
  for (const [name, value] of Object.entries(reply.getHeaders())) {
    if (value !== undefined) made[name] = Array.isArray(value) ? value.map(String) : String(value)
  }
  return made
}

/** The response as Fastify would send it. */
function responseOf(route: string, reply: any, payload: unknown): Response {
  const given = reply.getHeader('content-type') as string | undefined
  const type = (otherwise: string): void => { if (!given) reply.header('content-type', otherwise) }
  const isText = typeof payload === 'string'
  let body: unknown = payload
  if (payload === undefined) {
    body = ''
  } else if (ArrayBuffer.isView(payload)) {
    type('application/octet-stream')
    body = Buffer.from(payload.buffer, payload.byteOffset, payload.byteLength)
  } else if (isText && !given) {
    type('text/plain; charset=utf-8')
  } else if (isStream(payload)) {
    (payload as { destroy?: () => void }).destroy?.()
    throw streamingRefused(route)
  } else if (internal(reply, 'fastify.reply.serializer')) {
    body = reply.serialize(payload)
  } else if (!given || /json/i.test(given)) {
    type('application/json; charset=utf-8')
    if (given && !/;\s*charset\s*=/i.test(given)) reply.header('content-type', `${given}; charset=utf-8`)
    if (!isText) body = serialized(reply, payload) ?? ''
  }
  if (typeof body !== 'string' && !Buffer.isBuffer(body)) throw new TypeError(`${route} must answer with text or bytes, not ${describe(payload)}`)
  reply.removeHeader('content-length')
  return { status: reply.statusCode, headers: lines(reply), body: Buffer.from(body as string) }
}

/** Serializes as Fastify does, also by the response schema of a media type, which reply.serialize() does not know. */
function serialized(reply: any, payload: unknown): unknown {
  if (!internal(internal(reply.request, 'fastify.context'), 'fastify.replySerializerDefault')) {
    const found = [reply.statusCode, `${String(reply.statusCode)[0]}xx`, 'default'].map((status) => reply.getSerializationFunction(status)).find(Boolean)
    if (typeof found === 'object') {
      const serialize = found[reply.getHeader('content-type').split(';')[0].trim().toLowerCase()] ?? found['*/*'] ?? JSON.stringify
      return serialize(payload)
    }
  }
  return reply.serialize(payload)
}
