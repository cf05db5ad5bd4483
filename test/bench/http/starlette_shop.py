"""POST /payments in Starlette: ours, the handler alone, or with claim and completion written by hand."""

import json
import os
import socket
from contextlib import asynccontextmanager

import uvicorn
from psycopg_pool import AsyncConnectionPool
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from pg_idempotency import AsyncIdempotency
from pg_idempotency.starlette import Guard, install

pool = AsyncConnectionPool(os.environ['DATABASE_URL'], min_size=10, max_size=10, open=False)

CLAIM = "SELECT outcome FROM idem_claim('alice', %s, idem_request_hash('POST', '/payments', %s))"
COMPLETE = "SELECT idem_complete('alice', %s, 201, %s::text, '{\"Content-Type\": \"application/json\"}')"


async def pay(connection, request):
    payment = await request.json()
    cursor = await connection.execute("INSERT INTO payments (owner, amount, currency) VALUES ('alice', %s, %s) "
                                      "RETURNING id", (payment['amount'], payment['currency']))
    identifier, = await cursor.fetchone()
    return JSONResponse({'id': identifier, **payment}, 201, {'Location': '/payments/%d' % identifier})


async def alone(request):
    async with pool.connection() as connection:
        return await pay(connection, request)


async def by_hand(request):
    async with pool.connection() as connection:
        key = json.loads(request.headers['Idempotency-Key'])
        cursor = await connection.execute(CLAIM, (key, (await request.body()).decode()))
        outcome, = await cursor.fetchone()
        assert outcome == 'new'
        response = await pay(connection, request)
        await connection.execute(COMPLETE, (key, response.body.decode()))
    return response


@Guard(scope=lambda request: 'alice')
async def guarded(request):
    return await pay(request.state.idempotency.tx, request)


@asynccontextmanager
async def lifespan(app):
    await pool.open(wait=True)
    print('listening on', listener.getsockname()[1], flush=True)
    yield
    await pool.close()


side = os.environ['SIDE']
handler = {'ours': guarded, 'by_hand': by_hand}.get(side, alone)
app = Starlette(lifespan=lifespan, routes=[Route('/payments', handler, methods=['POST'])])
if side == 'ours':
    install(app, AsyncIdempotency(pool, schema='public'))
listener = socket.create_server(('127.0.0.1', 0), backlog=1024)
uvicorn.Server(uvicorn.Config(app, log_level='warning')).run(sockets=[listener])
