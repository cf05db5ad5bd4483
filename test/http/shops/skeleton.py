"""What naive.py and plain.py share: HTTP by the standard library, a pool, and
the routes that need no care."""

import html
import json
import os
import queue
import secrets
import signal
import sys
import threading
import time
import urllib.parse
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg

URL = os.environ['DATABASE_URL']
POOL_SIZE = int(os.environ.get('POOL_SIZE', 10))
WAIT_MS = int(os.environ.get('WAIT_MS', 0))
LEASE_MS = int(os.environ.get('LEASE_MS', 30000))


class Pool:
    def __init__(self, size):
        self.size = size
        self.free = queue.LifoQueue()
        for _ in range(size):
            self.free.put(None)

    @contextmanager
    def connection(self):
        """A transaction: committed at the end, rolled back on an error."""
        connection = self.free.get()
        try:
            # Detects a session that the server has ended here, and not in a handler.
            try:
                if connection is not None:
                    connection.execute('SELECT 1')
            except psycopg.OperationalError:
                connection.close()
                connection = None
            if connection is None:
                connection = psycopg.connect(URL, prepare_threshold=None)
            yield connection
            connection.commit()
        except BaseException:
            if connection is not None and not connection.closed:
                try:
                    connection.rollback()
                except psycopg.Error:
                    connection.close()
            raise
        finally:
            if connection is not None and connection.closed:
                connection = None
            self.free.put(connection)


class Bad(Exception):
    """A request that is answered with 400."""


class Refused(Exception):
    """Ends a request with this answer, and rolls back."""

    def __init__(self, reply):
        self.reply = reply


class Request:
    def __init__(self, method, target, headers, body):
        self.method, self.target, self.headers, self.body = method, target, headers, body
        self.path = target.split('?')[0]
        self.user = headers.get('X-User', '')

    def json(self, **types):
        try:
            document = json.loads(self.body)
            values = [document[name] for name in types]
        except (ValueError, TypeError, KeyError, UnicodeDecodeError):
            raise Bad('not the JSON that this route takes')
        for value, type_ in zip(values, types.values()):
            if type(value) is not type_:
                raise Bad('not the JSON that this route takes')
        return values


class Reply:
    def __init__(self, status, body=b'', type_=None, headers=()):
        self.status, self.body = status, body
        self.headers = ([('Content-Type', type_)] if type_ else []) + list(headers)


def json_reply(status, document, headers=()):
    return Reply(status, json.dumps(document).encode(), 'application/json', headers)


class Shop:
    """The routes.  A subclass has the guarded ones."""

    takes_half = False                  # a body that did not come whole

    def sent(self, request, reply):
        """The client has got it, as far as can be known."""

    def __init__(self):
        self.pool = Pool(POOL_SIZE)
        self.bank_pool = Pool(1)

    def bank(self, key, ms):
        time.sleep(ms / 1000)
        with self.bank_pool.connection() as connection:
            connection.execute('INSERT INTO charges (key) VALUES (%s) '
                               'ON CONFLICT (key) DO UPDATE SET calls = charges.calls + 1', (key,))

    def route(self, request):
        name = (request.method, '/' + request.path.split('/')[1])
        handler = {
            ('POST', '/payments'): self.payments, ('POST', '/jobs'): self.jobs, ('POST', '/blobs'): self.blobs,
            ('POST', '/streams'): self.streams, ('PUT', '/likes'): self.like, ('GET', '/form'): self.form,
            ('POST', '/form'): self.submit, ('GET', '/effects'): self.effects, ('GET', '/ping'): self.ping,
            ('GET', '/thanks'): lambda request: Reply(200, b'thanks', 'text/plain'),
        }.get(name)
        if handler is None:
            return Reply(404)
        try:
            return handler(request)
        except Refused as refused:
            return refused.reply
        except Bad as error:
            return json_reply(400, {'error': str(error)})
        except Exception as error:
            print('%s: %s' % (type(error).__name__, error), file=sys.stderr, flush=True)
            return json_reply(500, {'error': 'internal'})

    def pay(self, request, key, connection):
        amount, currency = request.json(amount=int, currency=str)
        if amount < 0:
            return json_reply(422, {'error': 'a negative amount'})
        identifier, = connection.execute(
            'INSERT INTO payments (owner, amount, currency, key) VALUES (%s, %s, %s, %s) RETURNING id',
            (request.user, amount, currency, key)).fetchone()
        if currency == 'XXX':
            raise RuntimeError('no such currency')
        if currency == 'XTS':
            raise Refused(json_reply(403, {'error': 'not in this currency'}))
        location = '/payments/%d' % identifier
        return json_reply(201, {'id': identifier, 'amount': amount, 'currency': currency}, [
            ('Location', location), ('Link', '<%s>; rel="self"' % location),
            ('Link', '</payments>; rel="collection"'), ('Set-Cookie', 'seen=1'), ('X-Trace', secrets.token_hex(8))])

    def reverse(self, request, connection):
        connection.execute('INSERT INTO blobs (owner, bytes) VALUES (%s, %s)', (request.user, len(request.body)))
        return Reply(200, request.body[::-1], 'application/octet-stream')

    def form(self, request):
        token = secrets.token_urlsafe(16)
        with self.pool.connection() as connection:
            connection.execute('INSERT INTO forms VALUES (%s, %s)', (token, request.user))
        return Reply(200, ('<!doctype html><form method="post"><input type="hidden" name="token" value="%s">'
                           '<button>Send</button></form>' % html.escape(token)).encode(), 'text/html; charset=utf-8')

    def token(self, request, connection):
        """The token of a form, which must belong to this user."""
        fields = urllib.parse.parse_qs(request.body.decode('utf-8', 'replace'))
        token = fields.get('token', [''])[0]
        if not connection.execute('SELECT 1 FROM forms WHERE token = %s AND owner = %s',
                                  (token, request.user)).fetchone():
            raise Bad('no such form')
        return token

    def effects(self, request):
        with self.pool.connection() as connection:
            counts = connection.execute("""SELECT
                (SELECT count(*) FROM payments), (SELECT count(*) FROM charges),
                (SELECT coalesce(sum(calls), 0) FROM charges), (SELECT count(*) FROM blobs),
                (SELECT count(*) FROM submissions),
                (SELECT count(*) FROM idem_user_actions WHERE is_active)""").fetchone()
        return json_reply(200, dict(zip(('payments', 'charges', 'bank_calls', 'blobs', 'submissions', 'likes'), counts)))

    def ping(self, request):
        with self.pool.connection() as connection:
            connection.execute('SELECT 1')
        return Reply(204)


def serve(shop):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'
        disable_nagle_algorithm = True
        wbufsize = -1

        def log_message(self, *_):
            pass

        def answer(self):
            length = int(self.headers.get('Content-Length', 0))
            body = self.rfile.read(length)
            if len(body) < length:
                self.close_connection = True
                if not shop.takes_half:
                    return
            request = Request(self.command, self.path, self.headers, body)
            reply = shop.route(request)
            self.send_response(reply.status)
            for header in reply.headers:
                self.send_header(*header)
            if reply.status != 204:
                self.send_header('Content-Length', str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)
            self.wfile.flush()
            shop.sent(request, reply)

        do_GET = do_POST = do_PUT = answer

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 300

        def handle_error(self, *_):
            pass

    server = Server(('127.0.0.1', int(os.environ.get('PORT', 0))), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print('listening on %d' % server.server_port, flush=True)
    server.serve_forever()
