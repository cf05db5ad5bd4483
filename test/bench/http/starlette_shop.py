"""POST /payments in Starlette: ours, or the handler alone."""

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


async def pay(connection, request):
    payment = await request.json()
    cursor = await connection.execute("INSERT INTO payments (owner, amount, currency) VALUES ('alice', %s, %s) "
                                      "RETURNING id", (payment['amount'], payment['currency']))
    identifier, = await cursor.fetchone()
    return JSONResponse({'id': identifier, **payment}, 201, {'Location': '/payments/%d' % identifier})


async def alone(request):
    async with pool.connection() as connection:
        return await pay(connection, request)


@Guard(scope=lambda request: 'alice')
async def guarded(request):
    return await pay(request.state.idempotency.tx, request)


@asynccontextmanager
async def lifespan(app):
    await pool.open(wait=True)
    print('listening on', listener.getsockname()[1], flush=True)
    yield
    await pool.close()


ours = os.environ['SIDE'] == 'ours'
app = Starlette(lifespan=lifespan, routes=[Route('/payments', guarded if ours else alone, methods=['POST'])])
if ours:
    install(app, AsyncIdempotency(pool, schema='public'))
listener = socket.create_server(('127.0.0.1', 0), backlog=1024)
uvicorn.Server(uvicorn.Config(app, log_level='warning')).run(sockets=[listener])
