/** New keys, the keys of steps, and hashes of requests. */
import { createHash, randomBytes } from 'node:crypto'

let last = 0n

/**
 * A new key: a UUID of version 7, so that keys made at the same time are close
 * in the index. The keys of one process ascend, even if its clock does not advance.
 */
export function newKey(): string {
  const now = BigInt(Math.floor((performance.timeOrigin + performance.now()) * 4096))
  last = now > last ? now : last + 1n
  const random = randomBytes(8).readBigUInt64BE() >> 2n
  return uuid(7n, (last >> 12n) << 80n | (last & 0xfffn) << 64n | random)
}

/** The key that stands for any text: a UUID of version 8 made of its SHA-256, which every format of keys accepts. */
export function hashedKey(text: string): string {
  return uuid(8n, BigInt(`0x${createHash('sha256').update(text).digest('hex').slice(0, 32)}`))
}

/** A UUID of these 128 bits, whose bits of version and variant are replaced. */
function uuid(version: bigint, bits: bigint): string {
  const hex = (bits & ~(0xfn << 76n | 3n << 62n) | version << 76n | 2n << 62n).toString(16).padStart(32, '0')
  return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-${hex.slice(12, 16)}-${hex.slice(16, 20)}-${hex.slice(20)}`
}

/**
 * The key of a step of a job: the same in all attempts, and another one for
 * each scope, key and step. 32 hexadecimal digits.
 */
export function stepKey(scope: string, key: string, step: string): string {
  const parts = [scope, key, step].map((part) => `${Buffer.byteLength(part)}:${part}`).join('')
  return createHash('sha256').update(parts).digest('hex').slice(0, 32)
}

/** Returns the result of idem_request_hash(method, path, body::bytea) without a call of the server. */
export function requestHashOfBytes(method: string, path: string, body: Uint8Array): Buffer {
  if (!/^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/.test(method)) throw new TypeError(`not an HTTP method: ${method}`)
  return createHash('sha256').update(`${method.toUpperCase()}:${path.replaceAll(':', '%3A')}:`).update(body).digest()
}
