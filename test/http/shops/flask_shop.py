#!/usr/bin/python3
"""The shop in Flask; test/http/README.md says what each route does."""

import html
import os
import secrets
import time

import psycopg
from flask import Flask, abort, g, jsonify, make_response, redirect, request
from gunicorn.app.base import BaseApplication
from psycopg import sql
from psycopg_pool import ConnectionPool

from pg_idempotency import ActionIdAhead, Idempotency
from pg_idempotency.memory import MemoryIdempotency
from pg_idempotency.flask import Guard, install

URL = os.environ['DATABASE_URL']
MEMORY = URL == 'memory:'
WAIT_MS = int(os.environ.get('WAIT_MS', 0))
LEASE_MS = int(os.environ.get('LEASE_MS', 30000))
# PgBouncer 1.18 does not support prepared statements.
pool = None if MEMORY else ConnectionPool(
    URL, min_size=1, max_size=int(os.environ.get('POOL_SIZE', 10)), open=False, kwargs={'prepare_threshold': None})
idem = MemoryIdempotency() if MEMORY else Idempotency(pool, schema="public")


# The effects: rows of tables, or of the double.

def transaction():
    return idem.transaction() if MEMORY else pool.connection()


def insert(tx, table, **columns):
    """A row, and its id if it has one."""
    if MEMORY:
        return tx.insert(table, **columns)
    names = list(columns)
    cursor = tx.execute(
        sql.SQL('INSERT INTO {} AS r ({}) VALUES ({}) RETURNING to_jsonb(r) ->> {}').format(
            sql.Identifier(table), sql.SQL(', ').join(map(sql.Identifier, names)),
            sql.SQL(', ').join(sql.Placeholder() * len(names)), sql.Literal('id')), list(columns.values()))
    return int((cursor.fetchone())[0] or 0)


def bank(key, ms):
    """Another system, with its own connection, outside of all transactions."""
    time.sleep(ms / 1000)
    if MEMORY:
        with idem.transaction() as tx:
            tx.insert('bank_calls', key=key)
        return
    with psycopg.Connection.connect(URL, prepare_threshold=None, autocommit=True) as connection:
        connection.execute('INSERT INTO charges (key) VALUES (%s) ON CONFLICT (key) '
                           'DO UPDATE SET calls = charges.calls + 1', (key,))


app = Flask(__name__)


# Requests

def user():
    return request.headers.get('X-User') or abort(401, 'who are you?')


def document(**types):
    """The members of the body, which is JSON."""
    found = request.get_json(force=True)
    if not isinstance(found, dict) or not types.keys() <= found.keys():
        abort(400, 'malformed body')
    values = [found[name] for name in types]
    for value, wanted in zip(values, types.values()):
        if type(value) is not wanted or wanted is int and not -2**63 <= value < 2**63 or \
                wanted is str and '\0' in value:
            abort(400, 'malformed body')
    return values


# Routes

once = dict(scope=lambda request: user(), wait_ms=WAIT_MS)


@app.post('/payments')
@Guard(**once)
def payments():
    owner = user()
    amount, currency = document(amount=int, currency=str)
    if amount < 0:
        return {'error': 'a payment is positive'}, 422
    id = insert(g.idempotency.tx, 'payments', owner=owner, amount=amount, currency=currency, key=g.idempotency.key)
    if currency == 'XXX':
        raise RuntimeError('no such currency')
    if currency == 'XTS':
        abort(403, 'not in this currency')
    response = make_response({'id': id, 'amount': amount, 'currency': currency}, 201)
    response.autocorrect_location_header = False
    response.headers['Location'] = f'/payments/{id}'
    response.headers['X-Trace'] = secrets.token_hex(8)
    response.headers.add('Link', f'</payments/{id}>; rel="self"')
    response.headers.add('Link', '</payments>; rel="collection"')
    response.set_cookie('seen', '1')
    return response


@app.post('/jobs')
@Guard(**once, job=True, lease_ms=LEASE_MS)
def jobs():
    user()
    ms, = document(ms=int)
    job = g.idempotency.job

    def charge(step):
        bank(step.key, ms)
        return step.key

    return {'id': job.step('charge', charge), 'attempt': job.attempt}


@app.post('/blobs')
@Guard(**once, required=False)
def blobs():
    body = request.get_data()
    insert(g.idempotency.tx, 'blobs', owner=user(), bytes=len(body))
    return body[::-1], 200, {'Content-Type': 'application/octet-stream'}


@app.post('/streams')
@Guard(**once)
def streams():
    def pieces():
        yield b'one'
        yield b'two'

    insert(g.idempotency.tx, 'blobs', owner=user(), bytes=0)
    return pieces()


@app.put('/likes/<item>')
def like(item):
    active, action_id = document(active=bool, action_id=int)
    try:
        state = idem.set(user(), 'item', item, 'like', active, action_id)
    except ActionIdAhead as error:
        return {'error': str(error)}, 400
    return {'is_active': state.is_active, 'last_action_id': state.last_action_id, 'processed': state.processed}


@app.get('/form')
def form():
    token = secrets.token_urlsafe(16)
    with transaction() as tx:
        insert(tx, 'forms', token=token, owner=user())
    return ('<!doctype html><title>Order</title><form method="post">'
            f'<input type="hidden" name="token" value="{html.escape(token)}"><button>Order</button></form>')


@app.post('/form')
def submit():
    owner = user()
    token = request.form.get('token', '').replace('\0', '')
    with transaction() as tx:
        if MEMORY:
            known = {'token': token, 'owner': owner} in tx.rows('forms')
        else:
            known = tx.execute('SELECT FROM forms WHERE token = %s AND owner = %s', (token, owner)).rowcount == 1
        if not known:
            abort(400, 'no such form')
        if idem.on(tx).once('form', token):
            insert(tx, 'submissions', token=token, owner=owner)
    return redirect('/thanks', 303)


@app.get('/thanks')
def thanks():
    return '<!doctype html><title>Thanks</title>Thank you.'


@app.get('/effects')
def effects():
    with transaction() as tx:
        if MEMORY:
            calls = [row['key'] for row in tx.rows('bank_calls')]
            counts = [len(tx.rows('payments')), len(set(calls)), len(calls), len(tx.rows('blobs')),
                      len(tx.rows('submissions')), idem.active_actions()]
        else:
            counts = tx.execute(
                'SELECT (SELECT count(*) FROM payments), (SELECT count(*) FROM charges), '
                '(SELECT coalesce(sum(calls), 0) FROM charges), (SELECT count(*) FROM blobs), '
                '(SELECT count(*) FROM submissions), (SELECT count(*) FROM idem_user_actions WHERE is_active)'
            ).fetchone()
    return jsonify(dict(zip(('payments', 'charges', 'bank_calls', 'blobs', 'submissions', 'likes'), counts)))


@app.get('/ping')
def ping():
    if not MEMORY:
        with pool.connection() as connection:
            connection.execute('SELECT 1')
    return '', 204


install(app, idem)


class Server(BaseApplication):
    """A server with one process and many threads."""

    def load_config(self):
        settings = {'bind': '127.0.0.1:%s' % os.environ.get('PORT', 0), 'worker_class': 'gthread', 'threads': 80,
                    'backlog': 1024, 'keepalive': 60, 'loglevel': 'warning', 'graceful_timeout': 10,
                    'post_worker_init': self.ready}
        for name, value in settings.items():
            self.cfg.set(name, value)

    def load(self):
        return app

    @staticmethod
    def ready(worker):
        # Connections do not outlive a fork.
        if not MEMORY:
            pool.open()
        print('listening on', worker.sockets[0].getsockname()[1], flush=True)


if __name__ == '__main__':
    Server().run()
