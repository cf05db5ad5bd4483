#!/usr/bin/python3
"""The shop in FastAPI; test/http/README.md says what each route does."""

import asyncio
import html
import os
import secrets
import socket
from urllib.parse import parse_qs

import psycopg
import uvicorn
from psycopg import sql
from psycopg_pool import AsyncConnectionPool
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from pydantic import BaseModel, StrictBool, StrictInt, StrictStr

from pg_idempotency import ActionIdAhead, AsyncIdempotency
from pg_idempotency.memory import AsyncMemoryIdempotency
from pg_idempotency.fastapi import Guard, install

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


app = FastAPI()

# Requests

BIGINT = 2**63


def user(x_user: str = Header('')):
    if not x_user:
        raise HTTPException(401, 'who are you?')
    return x_user


def valid(value):
    """What the database can hold."""
    if isinstance(value, int) and not -BIGINT <= value < BIGINT or isinstance(value, str) and '\0' in value:
        raise HTTPException(400, 'malformed body')
    return value


class Payment(BaseModel):
    amount: StrictInt
    currency: StrictStr


class Job(BaseModel):
    ms: StrictInt


class Like(BaseModel):
    active: StrictBool
    action_id: StrictInt


@app.exception_handler(RequestValidationError)
async def malformed(request, error):
    return JSONResponse({'detail': 'malformed request'}, 400)


# Routes

once = dict(scope=lambda request, owner: owner, wait_ms=WAIT_MS)


@app.post('/payments')
@Guard(**once)
async def payments(request: Request, payment: Payment, owner: str = Depends(user)):
    if valid(payment.amount) < 0:
        return JSONResponse({'error': 'a payment is positive'}, 422)
    access = request.state.idempotency
    id = await insert(access.tx, 'payments', owner=owner, amount=payment.amount, currency=valid(payment.currency),
                      key=access.key)
    if payment.currency == 'XXX':
        raise RuntimeError('no such currency')
    if payment.currency == 'XTS':
        raise HTTPException(403, 'not in this currency')
    response = JSONResponse({'id': id, 'amount': payment.amount, 'currency': payment.currency}, 201, {
        'Location': f'/payments/{id}', 'X-Trace': secrets.token_hex(8)})
    response.headers.append('Link', f'</payments/{id}>; rel="self"')
    response.headers.append('Link', '</payments>; rel="collection"')
    response.set_cookie('seen', '1')
    return response


@app.post('/jobs')
@Guard(**once, job=True, lease_ms=LEASE_MS)
async def jobs(request: Request, wanted: Job, owner: str = Depends(user)):
    job = request.state.idempotency.job

    async def charge(step):
        await bank(step.key, wanted.ms)
        return step.key

    return {'id': await job.step('charge', charge), 'attempt': job.attempt}


@app.post('/blobs')
@Guard(**once, required=False)
async def blobs(request: Request, owner: str = Depends(user)):
    body = await request.body()
    await insert(request.state.idempotency.tx, 'blobs', owner=owner, bytes=len(body))
    return Response(body[::-1], media_type='application/octet-stream')


@app.post('/streams')
@Guard(**once)
async def streams(request: Request, owner: str = Depends(user)):
    async def pieces():
        yield b'one'
        yield b'two'

    await insert(request.state.idempotency.tx, 'blobs', owner=owner, bytes=0)
    return StreamingResponse(pieces())


@app.put('/likes/{item}')
async def like(item: str, wanted: Like, owner: str = Depends(user)):
    try:
        state = await idem.set(owner, 'item', item, 'like', wanted.active, valid(wanted.action_id))
    except ActionIdAhead as error:
        return JSONResponse({'error': str(error)}, 400)
    return {'is_active': state.is_active, 'last_action_id': state.last_action_id, 'processed': state.processed}


@app.get('/form')
async def form(owner: str = Depends(user)):
    token = secrets.token_urlsafe(16)
    async with transaction() as tx:
        await insert(tx, 'forms', token=token, owner=owner)
    return HTMLResponse('<!doctype html><title>Order</title><form method="post">'
                        f'<input type="hidden" name="token" value="{html.escape(token)}"><button>Order</button></form>')


@app.post('/form')
async def submit(request: Request, owner: str = Depends(user)):
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


@app.get('/thanks')
async def thanks():
    return HTMLResponse('<!doctype html><title>Thanks</title>Thank you.')


@app.get('/effects')
async def effects():
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
    return dict(zip(('payments', 'charges', 'bank_calls', 'blobs', 'submissions', 'likes'), counts))


@app.get('/ping')
async def ping():
    if not MEMORY:
        async with pool.connection() as connection:
            await connection.execute('SELECT 1')
    return Response(status_code=204)


@app.on_event('startup')
async def opened():
    if not MEMORY:
        await pool.open()
    print('listening on', listener.getsockname()[1], flush=True)


@app.on_event('shutdown')
async def closed():
    if not MEMORY:
        await pool.close()


install(app, idem)

listener = socket.create_server(('127.0.0.1', int(os.environ.get('PORT', 0))), backlog=1024)

if __name__ == '__main__':
    uvicorn.Server(uvicorn.Config(app, log_level='warning')).run(sockets=[listener])
