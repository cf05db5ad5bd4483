/** What has to compile in CommonJS, too. */
import pg = require('pg')
import { Idempotency, type Client, type Response } from 'pg-idempotency'
import { idempotent } from 'pg-idempotency/express'
import idempotency from 'pg-idempotency/fastify'
import { parseKey } from 'pg-idempotency/http'
import memory = require('pg-idempotency/memory')

export const clients: Client<any>[] = [new Idempotency(new pg.Pool()), new memory.MemoryIdempotency()]
export const response: Response = { status: 200, body: parseKey('"key"') ?? null }
export const guarded = idempotent(clients[0]!, { scope: (req) => req.get('X-User') })
export const plugin: typeof idempotency = idempotency
// @ts-expect-error: no option of a client
export const wrong = new Idempotency(new pg.Pool(), { wat: 1 })
