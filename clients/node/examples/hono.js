/**
 * A guard for Hono:
 *
 *	const guarded = idempotent(idem, { scope: (c) => c.get('user') })
 *	app.post('/orders', guarded(async (c, tx) => c.json({ sku: 'teapot' }, 201)))
 *
 * The handler returns its response, which is sent after COMMIT. Errors go to
 * app.onError(). Hono's bodyLimit() limits the body. The server must be the one of
 * @hono/node-server.
 */
import { Buffer } from 'node:buffer'
import { checkedOptions, refuseSuccess, serve } from 'pg-idempotency/http'

export function idempotent(client, options) {
  checkedOptions(options)
  return (handler) => async (c) => {
    const { pathname, search } = new URL(c.req.url)
    const { outgoing } = c.env
    let own
    let answer
    try {
      answer = await serve(client, {
        method: c.req.method, path: pathname + search, key: c.req.header('Idempotency-Key'), body: Buffer.from(await c.req.arrayBuffer()),
        contentType: c.req.header('Content-Type'), contentEncoding: c.req.header('Content-Encoding'), native: c, scope: () => options.scope(c),
      }, options, 'request', async ({ tx }) => {
        own = await handler(c, tx)
        return { status: own.status, headers: Object.fromEntries(own.headers), body: Buffer.from(await own.clone().arrayBuffer()) }
      })
    } finally {
      // Neither onError() nor a middleware can answer 2xx for work that was rolled back.
      if (!answer?.committed) refuseSuccess(outgoing, `${c.req.method} ${pathname}`)
    }
    // The handler's own response can have headers that are not stored.
    return answer.first && own ? own : new Response(answer.body?.length ? answer.body : null, { status: answer.status, headers: answer.headers })
  }
}
