#!/usr/bin/python3
"""The shop in Starlette; test/http/README.md says what each route does."""

import asyncio
import html
import json
import os
import secrets
import socket
from contextlib import asynccontextmanager
from urllib.parse import parse_qs

import psycopg
import uvicorn
from psycopg import sql
from psycopg_pool import AsyncConnectionPool
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from pg_idempotency import ActionIdAhead, AsyncIdempotency
from pg_idempotency.memory import AsyncMemoryIdempotency
from pg_idempotency.starlette import Guard, install

URL = os.environ['DATABASE_URL']
MEMORY = URL == 'memory:'
WAIT_MS = int(os.environ.get('WAIT_MS', 0))
LEASE_MS = int(os.environ.get('LEASE_MS', 30000))
# PgBouncer 1.18 does not support prepared statements.
pool = None if MEMORY else AsyncConnectionPool(
    URL, min_size=1, max_size=int(os.environ.get('POOL_SIZE', 10)), open=False, kwargs={'prepare_threshold': None})
idem = AsyncMemoryIdempotency() if MEMORY else AsyncIdempotency(pool, schema="public")


# The effects: rows of tables, or of the double.

def transaction():
    return idem.transaction() if MEMORY else pool.connection()


async def insert(tx, table, **columns):
    """A row, and its id if it has one."""
    if MEMORY:
        return tx.insert(table, **columns)
    names = list(columns)
    cursor = await tx.execute(
        sql.SQL('INSERT INTO {} AS r ({}) VALUES ({}) RETURNING to_jsonb(r) ->> {}').format(
            sql.Identifier(table), sql.SQL(', ').join(map(sql.Identifier, names)),
            sql.SQL(', ').join(sql.Placeholder() * len(names)), sql.Literal('id')), list(columns.values()))
    return int((await cursor.fetchone())[0] or 0)


async def bank(key, ms):
    """Another system, with its own connection, outside of all transactions."""
    await asyncio.sleep(ms / 1000)
    if MEMORY:
        async with idem.transaction() as tx:
            tx.insert('bank_calls', key=key)
        return
    async with await psycopg.AsyncConnection.connect(URL, prepare_threshold=None, autocommit=True) as connection:
        await connection.execute('INSERT INTO charges (key) VALUES (%s) ON CONFLICT (key) '
                                 'DO UPDATE SET calls = charges.calls + 1', (key,))


# Requests

def user(request):
    name = request.headers.get('x-user')
    if not name:
        raise HTTPException(401, 'who are you?')
    return name


async def document(request, **types):
    """The members of the body, which is JSON."""
    try:
        found = json.loads(await request.body())
        values = [found[name] for name in types]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise HTTPException(400, 'malformed body') from None
    for value, wanted in zip(values, types.values()):
        if type(value) is not wanted or wanted is int and not -2**63 <= value < 2**63 or \
                wanted is str and '\0' in value:
            raise HTTPException(400, 'malformed body')
    return values


# Routes

once = dict(scope=user, wait_ms=WAIT_MS)


@Guard(**once)
async def payments(request):
    owner = user(request)
    amount, currency = await document(request, amount=int, currency=str)
    if amount < 0:
        return JSONResponse({'error': 'a payment is positive'}, 422)
    access = request.state.idempotency
    id = await insert(access.tx, 'payments', owner=owner, amount=amount, currency=currency, key=access.key)
    if currency == 'XXX':
        raise RuntimeError('no such currency')
    if currency == 'XTS':
        raise HTTPException(403, 'not in this currency')
    response = JSONResponse({'id': id, 'amount': amount, 'currency': currency}, 201, {
        'Location': f'/payments/{id}', 'X-Trace': secrets.token_hex(8)})
    response.headers.append('Link', f'</payments/{id}>; rel="self"')
    response.headers.append('Link', '</payments>; rel="collection"')
    response.set_cookie('seen', '1')
    return response


@Guard(**once, job=True, lease_ms=LEASE_MS)
async def jobs(request):
    ms, = await document(request, ms=int)
    job = request.state.idempotency.job

    async def charge(step):
        await bank(step.key, ms)
        return step.key

    return JSONResponse({'id': await job.step('charge', charge), 'attempt': job.attempt})


@Guard(**once, required=False)
async def blobs(request):
    body = await request.body()
    await insert(request.state.idempotency.tx, 'blobs', owner=user(request), bytes=len(body))
    return Response(body[::-1], media_type='application/octet-stream')


@Guard(**once)
async def streams(request):
    async def pieces():
        yield b'one'
        yield b'two'

    await insert(request.state.idempotency.tx, 'blobs', owner=user(request), bytes=0)
    return StreamingResponse(pieces())


async def like(request):
    active, action_id = await document(request, active=bool, action_id=int)
    try:
        state = await idem.set(user(request), 'item', request.path_params['item'], 'like', active, action_id)
    except ActionIdAhead as error:
        return JSONResponse({'error': str(error)}, 400)
    return JSONResponse({'is_active': state.is_active, 'last_action_id': state.last_action_id,
                         'processed': state.processed})


async def form(request):
    token = secrets.token_urlsafe(16)
    async with transaction() as tx:
        await insert(tx, 'forms', token=token, owner=user(request))
    return HTMLResponse('<!doctype html><title>Order</title><form method="post">'
                        f'<input type="hidden" name="token" value="{html.escape(token)}"><button>Order</button></form>')


async def submit(request):
    owner = user(request)
    token = parse_qs((await request.body()).decode('latin-1')).get('token', [''])[0].replace('\0', '')
    async with transaction() as tx:
        if MEMORY:
            known = {'token': token, 'owner': owner} in tx.rows('forms')
        else:
            known = await (await tx.execute('SELECT FROM forms WHERE token = %s AND owner = %s',
                                            (token, owner))).fetchone() is not None
        if not known:
            raise HTTPException(400, 'no such form')
        if await idem.on(tx).once('form', token):
            await insert(tx, 'submissions', token=token, owner=owner)
    return RedirectResponse('/thanks', 303)


async def thanks(request):
    return HTMLResponse('<!doctype html><title>Thanks</title>Thank you.')


async def effects(request):
    async with transaction() as tx:
        if MEMORY:
            calls = [row['key'] for row in tx.rows('bank_calls')]
            counts = [len(tx.rows('payments')), len(set(calls)), len(calls), len(tx.rows('blobs')),
                      len(tx.rows('submissions')), idem.active_actions()]
        else:
            counts = await (await tx.execute(
                'SELECT (SELECT count(*) FROM payments), (SELECT count(*) FROM charges), '
                '(SELECT coalesce(sum(calls), 0) FROM charges), (SELECT count(*) FROM blobs), '
                '(SELECT count(*) FROM submissions), (SELECT count(*) FROM idem_user_actions WHERE is_active)'
            )).fetchone()
    return JSONResponse(dict(zip(('payments', 'charges', 'bank_calls', 'blobs', 'submissions', 'likes'), counts)))


async def ping(request):
    if not MEMORY:
        async with pool.connection() as connection:
            await connection.execute('SELECT 1')
    return Response(status_code=204)


@asynccontextmanager
async def lifespan(app):
    if not MEMORY:
        await pool.open()
    print('listening on', listener.getsockname()[1], flush=True)
    yield
    if not MEMORY:
        await pool.close()


app = Starlette(lifespan=lifespan, routes=[
    Route('/payments', payments, methods=['POST']), Route('/jobs', jobs, methods=['POST']),
    Route('/blobs', blobs, methods=['POST']), Route('/streams', streams, methods=['POST']),
    Route('/likes/{item}', like, methods=['PUT']), Route('/form', form), Route('/form', submit, methods=['POST']),
    Route('/thanks', thanks), Route('/effects', effects), Route('/ping', ping)])


install(app, idem)

listener = socket.create_server(('127.0.0.1', int(os.environ.get('PORT', 0))), backlog=1024)

if __name__ == '__main__':
    uvicorn.Server(uvicorn.Config(app, log_level='warning')).run(sockets=[listener])
