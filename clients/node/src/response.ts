/** A response of Node, such as Express uses, that is held back: its status, headers and body are kept, and sent later. */
import type { OutgoingHttpHeader, ServerResponse } from 'node:http'
import { HeldResponse, type Attempt } from './held.js'
import { HEADER_METHODS, responseOverrides, seemsSent, streamingRefused } from './http.js'
import { describe, type Headers } from './values.js'

export class BufferedResponse extends HeldResponse {
  readonly #before = this.#lines()
  readonly #statusBefore: number
  readonly #messageBefore: string
  /** The status that the handler's reason phrase is for. */
  #phrase: { status: number; message: string } | undefined
  /** Removes our methods, and keeps those of others, such as express-session and compression. */
  readonly #takeBack: () => void

  constructor(res: ServerResponse, route: string) {
    super(res, route, [[res]])
    this.#statusBefore = res.statusCode
    this.#messageBefore = res.statusMessage
    this.#takeBack = responseOverrides(res)
  }

  #lines(): [string, OutgoingHttpHeader][] {
    const names = (this.raw as unknown as { getRawHeaderNames(): string[] }).getRawHeaderNames()
    return names.map((name) => [name, this.raw.getHeader(name)!])
  }

  protected reset(): void {
    this.#takeBack()
    this.raw.statusCode = this.#statusBefore
    this.raw.statusMessage = this.#messageBefore
    for (const name of this.raw.getHeaderNames()) this.raw.removeHeader(name)
    for (const [name, value] of this.#before) this.raw.setHeader(name, value)
  }

  protected hold(attempt: Attempt): () => void {
    const { raw: res, route } = this
    const parts: Buffer[] = []
    const headers: Headers = {}
    let status: number | undefined
    const streaming = (): void => attempt.fail(streamingRefused(route))
    /** Fixes the status and the headers. */
    const fix = (): void => {
      if (status !== undefined) return
      status = res.statusCode
      this.#phrase = { status, message: res.statusMessage }
      for (const [name, value] of this.#lines()) {
        // The body is sent whole, with its length.
        if (!/^(transfer-encoding|trailer)$/i.test(name)) headers[name] = Array.isArray(value) ? value : String(value)
      }
      seemsSent(res, 'headersSent')
      for (const name of HEADER_METHODS) (res as any)[name] = () => { if (!attempt.isLate()) throw attempt.refuseSecond() }
    }
    /** As Node does, calls writeHead() if middleware has wrapped it, such as that of cookie-session, which sets headers then. */
    const begin = (): void => {
      if (status === undefined && res.writeHead !== writeHead) res.writeHead(res.statusCode)
      fix()
    }
    const take = (part: unknown, encoding: unknown): void => {
      if (part === undefined || part === null || typeof part === 'function') return
      if (typeof part !== 'string' && !(part instanceof Uint8Array)) {
        throw new TypeError(`${route} must answer with a string or a Buffer, not ${describe(part)}`)
      }
      parts.push(typeof part === 'string'
        ? Buffer.from(part, typeof encoding === 'string' ? encoding as BufferEncoding : 'utf8')
        : Buffer.from(part))
    }
    const callBack = (given: unknown[]): void => {
      const callback = given.find((one) => typeof one === 'function') as (() => void) | undefined
      if (callback) process.nextTick(callback)
    }
    const writeHead = (code: number, ...rest: unknown[]): ServerResponse => {
      if (attempt.isLate()) return res
      if (status !== undefined) throw attempt.refuseSecond()
      res.statusCode = code
      if (typeof rest[0] === 'string') res.statusMessage = rest[0]
      const given = (rest[1] ?? (typeof rest[0] === 'string' ? {} : rest[0] ?? {})) as Record<string, OutgoingHttpHeader> | OutgoingHttpHeader[]
      if (Array.isArray(given)) {
        if (given.length % 2 !== 0) throw new TypeError('the headers of writeHead() are not a list of names and values')
        for (let at = 0; at < given.length; at += 2) res.removeHeader(String(given[at]))
        for (let at = 0; at < given.length; at += 2) res.appendHeader(String(given[at]), given[at + 1] as string)
      } else {
        for (const [name, value] of Object.entries(given)) res.setHeader(name, value)
      }
      fix()
      return res
    }
    Object.assign(res, {
      writeHead,
      flushHeaders: streaming,
      addTrailers: () => attempt.fail(streamingRefused(route, 'with trailers')),
      write: (part: unknown, ...rest: unknown[]) => {
        callBack(rest)
        if (attempt.isLate()) return false
        if (attempt.isSent()) attempt.refuseSecond()
        // With a Content-Length, it is not a stream of unknown length.
        else if (!res.hasHeader('content-length')) streaming()
        else {
          begin()
          take(part, rest[0])
        }
        return !attempt.isSent()
      },
      end: (...given: unknown[]) => {
        callBack(given)
        if (attempt.isLate()) return res
        if (attempt.isSent()) {
          // As in Node, end() without a body is not a second response.
          if (given[0] !== undefined && given[0] !== null && typeof given[0] !== 'function') attempt.refuseSecond()
          return res
        }
        take(given[0], given[1])
        begin()
        seemsSent(res, 'writableEnded')
        const body = Buffer.concat(parts)
        const length = Number(res.getHeader('content-length') ?? body.length)
        if (length !== body.length && res.req.method !== 'HEAD' && status !== 204 && status !== 304) {
          attempt.fail(new TypeError(`${route} answers with ${body.length} bytes, but its Content-Length is ${length}`))
        } else {
          attempt.answer({ status: status!, headers, body })
        }
        return res
      },
      destroy: (error?: Error) => {
        attempt.fail(error ?? streamingRefused(route, 'by res.destroy()'))
        return res
      },
    })
    return () => undefined
  }

  send(status: number, headers: Iterable<readonly [string, OutgoingHttpHeader]>, body: string | Uint8Array | null): void {
    const { raw: res } = this
    res.statusCode = status
    if (this.#phrase?.status === status) res.statusMessage = this.#phrase.message
    for (const [name, value] of headers) res.setHeader(name, value)
    const bytes = typeof body === 'string' ? Buffer.from(body) : body ?? Buffer.alloc(0)
    if ((res.req as { fresh?: boolean }).fresh) {
      res.statusCode = 304
      for (const name of ['Content-Type', 'Content-Length', 'Transfer-Encoding']) res.removeHeader(name)
    }
    const bodiless = res.statusCode === 204 || res.statusCode === 304 || res.req.method === 'HEAD'
    try {
      if (!bodiless) res.setHeader('Content-Length', bytes.length)
      res.end(bodiless ? undefined : bytes)
      this.isSent = true
    } catch (error) {
      // The answer of the error handler must not have the headers that caused the error.
      if (!res.headersSent) this.reset()
      throw error
    }
  }
}
