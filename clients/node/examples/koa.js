/**
 * A guard for Koa, before any body parser:
 *
 *	const guarded = idempotent(idem, { scope: (ctx) => ctx.state.user.id })
 *	app.use(guarded(async (ctx, tx, body) => ({ status: 201, headers: {}, body: 'made' })))
 *
 * The handler returns its response, which is sent after COMMIT.
 */
import { checkedOptions, keyOf, refuseSuccess, serve, wholeBody } from 'pg-idempotency/http'

const BODY_LIMIT = 2 << 20

export function idempotent(client, options) {
  checkedOptions(options)
  return (handler) => async (ctx) => {
    const body = await wholeBody(ctx.req, BODY_LIMIT)
    let own
    let answer
    try {
      answer = await serve(client, {
        method: ctx.method, path: ctx.originalUrl, key: keyOf(ctx.req), body,
        contentType: ctx.headers['content-type'], contentEncoding: ctx.headers['content-encoding'], native: ctx, scope: () => options.scope(ctx),
      }, options, 'request', async ({ tx }) => own = await handler(ctx, tx, body))
    } finally {
      // Neither an error handler nor another middleware can answer 2xx for work that was rolled back.
      if (!answer?.committed) refuseSuccess(ctx.res, `${ctx.method} ${ctx.originalUrl}`)
    }
    // The handler's own response can have headers that are not stored.
    const response = answer.first ? own : answer
    ctx.body = response.body ?? ''
    ctx.set(response.headers ?? {})
    ctx.status = response.status
  }
}
