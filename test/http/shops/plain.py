#!/usr/bin/python3
"""The shop without the packages: the functions of the extension called by
hand, from the standard library and psycopg.  It keeps every promise, and shows
what the packages spare."""

import hashlib
import json
import random
import re
import threading
import time
from contextlib import contextmanager

import psycopg

from skeleton import LEASE_MS, POOL_SIZE, WAIT_MS, Bad, Refused, Reply, Shop, json_reply, serve

KEPT_HEADERS = {'content-type', 'content-encoding', 'content-language', 'content-disposition', 'location', 'etag', 'link',
                'vary'}
TITLES = {
    'key-required': (400, 'A key is required'),
    'key-invalid': (400, 'The key is invalid'),
    'in-progress': (409, 'The request is in progress'),
    'key-reused': (422, 'The key belongs to another request'),
    'key-expired': (422, 'The key has expired'),
    'rate-limited': (429, 'Too many new keys'),
    'streaming-refused': (500, 'A response in pieces cannot be stored'),
    'response-erased': (None, 'The response was erased'),
    'response-not-stored': (None, 'The response was too large to be stored'),
}
CLAIM = """SELECT outcome, claim_token, attempt, response_status, response_headers, response_body, response_bytes,
    recovery_state FROM idem_claim(%s::text, %s::text, %s::bytea, lease => make_interval(secs => %s::float8),
    wait => make_interval(secs => %s::float8))"""
COMPLETE = 'SELECT idem_complete(%s::text, %s::text, %s::int, %s::bytea, %s::text::json, %s::bigint)'


def problem(kind, status=None, headers=(), detail=None):
    usual, title = TITLES[kind]
    status = status or usual
    document = {'type': 'urn:pg-idempotency:' + kind, 'title': title, 'status': status, 'detail': detail or title + '.'}
    return Reply(status, json.dumps(document).encode(), 'application/problem+json', headers)


def key_of(request, required=True):
    lines = request.headers.get_all('Idempotency-Key', [])
    if not lines:
        if required:
            raise Refused(problem('key-required'))
        return None
    value = lines[0].strip()
    if value.startswith('"'):
        quoted = re.fullmatch(r'("(?:[ !#-\[\]-~]|\\["\\])*")(?:; *[a-z*][a-z0-9_.*-]*(?:=[^;, ]+)?)*', value)
        if not quoted:
            raise Refused(problem('key-invalid'))
        value = re.sub(r'\\(.)', r'\1', quoted[1][1:-1])
    if len(lines) > 1 or not value.isascii() or '\0' in value:
        raise Refused(problem('key-invalid'))
    return value


class Plain(Shop):
    def __init__(self):
        super().__init__()
        self.waiters = threading.Semaphore(max(1, POOL_SIZE // 2))
        with self.pool.connection() as connection:
            self.most, = connection.execute(
                "SELECT pg_size_bytes(coalesce(current_setting('idempotency.max_response_size', true), '1MB'))").fetchone()

    @contextmanager
    def may_wait(self, lost):
        """How many seconds a claim is allowed to wait in the database."""
        waits = (WAIT_MS > 0 or lost) and self.waiters.acquire(blocking=lost)
        try:
            yield max(WAIT_MS, 2000 if lost else 0) / 1000 if waits else 0
        finally:
            if waits:
                self.waiters.release()

    def claim(self, connection, request, key, lease, wait):
        """The claim's token, attempt and steps; or Refused, with the answer."""
        if not request.user:
            raise Refused(json_reply(401, {'error': 'who are you?'}))
        target = request.target.replace(':', '%3A')
        body = request.body
        if 'json' in request.headers.get('Content-Type', ''):
            try:
                body = connection.execute('SELECT idem_canonical_json(%s::jsonb)', (body.decode(),)).fetchone()[0].encode()
            except (UnicodeDecodeError, psycopg.DataError, psycopg.errors.ProgramLimitExceeded):
                connection.rollback()
        hash_ = hashlib.sha256(('%s:%s:' % (request.method, target)).encode() + body).digest()
        try:
            outcome, token, attempt, status, headers, text, data, steps = connection.execute(
                CLAIM, (request.user, key, hash_, lease, wait)).fetchone()
        except psycopg.Error as error:
            if error.sqlstate == 'ID001':
                raise Refused(problem('key-invalid', detail='%s. %s %s' % (
                    error.diag.message_primary, error.diag.message_detail, error.diag.message_hint)))
            if error.sqlstate == 'ID002':
                seconds = re.search(r'\d+', error.diag.message_hint)[0]
                raise Refused(problem('rate-limited', headers=[('Retry-After', seconds)]))
            raise
        if outcome == 'new':
            return token, attempt, steps or {}
        again = [('Idempotent-Replayed', 'true')]
        raise Refused({
            'replay': lambda: Reply(status, data if data is not None else (text or '').encode(), None,
                                    [tuple(header) for header in headers or []] + again),
            'erased': lambda: problem('response-erased', status, again),
            'in_progress': lambda: problem('in-progress', headers=[('Retry-After', '1')]),
            'hash_conflict': lambda: problem('key-reused'),
            'expired': lambda: problem('key-expired'),
        }[outcome]())

    def complete(self, connection, request, key, token, reply):
        kept = [header for header in reply.headers if header[0].lower() in KEPT_HEADERS]
        body = reply.body
        if len(body) > self.most:
            stored = problem('response-not-stored', reply.status)
            kept, body = stored.headers, stored.body
        connection.execute(COMPLETE, (request.user, key, reply.status, body, json.dumps(kept), token))

    def once(self, request, key, handler):
        """One transaction: claim, handler, complete, COMMIT; then the answer."""
        lost = False
        for turn in range(6):
            try:
                with self.may_wait(lost) as wait, self.pool.connection() as connection:
                    if key is None:
                        return handler(connection)
                    self.claim(connection, request, key, None, wait)
                    reply = handler(connection)
                    self.complete(connection, request, key, None, reply)
                return reply
            except Refused as refused:
                return refused.reply
            except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
                if turn == 5:
                    raise
            except psycopg.OperationalError:
                # The next claim shows whether it was committed.
                lost = True
                if turn == 5:
                    raise
            time.sleep(random.uniform(0, 0.01 * 2 ** turn))

    def payments(self, request):
        key = key_of(request)

        def handler(connection):
            try:
                return self.pay(request, key, connection)
            except Bad as error:
                return json_reply(400, {'error': str(error)})
        return self.once(request, key, handler)

    def blobs(self, request):
        return self.once(request, key_of(request, False), lambda connection: self.reverse(request, connection))

    def streams(self, request):
        def handler(connection):
            self.reverse(request, connection)
            raise Refused(problem('streaming-refused'))
        return self.once(request, key_of(request), handler)

    def submit(self, request):
        for last in (False, True):
            try:
                with self.pool.connection() as connection:
                    token = self.token(request, connection)
                    if connection.execute("SELECT idem_once('form', %s::text)", (token,)).fetchone()[0]:
                        connection.execute('INSERT INTO submissions VALUES (%s, %s)', (token, request.user))
                return Reply(303, headers=[('Location', '/thanks')])
            except psycopg.OperationalError:
                if last:
                    raise

    def like(self, request):
        active, action_id = request.json(active=bool, action_id=int)
        try:
            with self.pool.connection() as connection:
                row = connection.execute(
                    "SELECT * FROM idem_set(%s::text, 'item', %s::text, 'like', %s::boolean, %s::bigint)",
                    (request.user, request.path.split('/')[2], active, action_id)).fetchone()
        except psycopg.Error as error:
            if error.sqlstate == 'ID005':
                raise Bad('the clock of this device is ahead')
            raise
        return json_reply(200, dict(zip(('is_active', 'last_action_id', 'processed'), row)))

    # Two transactions

    def jobs(self, request):
        key = key_of(request)
        ms, = request.json(ms=int)
        try:
            with self.may_wait(False) as wait, self.pool.connection() as connection:
                token, attempt, steps = self.claim(connection, request, key, LEASE_MS / 1000, wait)
        except Refused as refused:
            return refused.reply
        over = threading.Event()
        threading.Thread(target=self.heartbeats, args=(request.user, key, token, over), daemon=True).start()
        try:
            bank_key = hashlib.sha256(json.dumps([request.user, key, 'charge']).encode()).hexdigest()
            if 'charge' not in steps:
                self.bank(bank_key, ms)
                steps['charge'] = bank_key
                self.insist("SELECT idem_checkpoint(%s::text, %s::text, 'charge', %s::text::json, "
                            "make_interval(secs => %s::float8), %s::bigint)",
                            request.user, key, json.dumps(steps), LEASE_MS / 1000, token)
            reply = json_reply(200, {'id': steps['charge'], 'attempt': attempt})
            kept = json.dumps([header for header in reply.headers if header[0].lower() in KEPT_HEADERS])
            self.insist(COMPLETE, request.user, key, reply.status, reply.body, kept, token)
            return reply
        except psycopg.Error as error:
            if error.sqlstate in ('ID003', 'ID004'):
                return problem('in-progress', headers=[('Retry-After', '1')])
            self.insist('SELECT idem_fail(%s::text, %s::text, %s::text, %s::bigint)', request.user, key,
                        str(error)[:200], token)
            raise
        finally:
            over.set()

    def insist(self, statement, *values):
        """A statement that can be sent again if its answer was lost."""
        for last in (False, False, True):
            try:
                with self.pool.connection() as connection:
                    return connection.execute(statement, values).fetchone()[0]
            except psycopg.OperationalError:
                if last:
                    raise

    def heartbeats(self, scope, key, token, over):
        while not over.wait(LEASE_MS / 3000):
            try:
                self.insist('SELECT idem_heartbeat(%s::text, %s::text, make_interval(secs => %s::float8), %s::bigint)',
                            scope, key, LEASE_MS / 1000, token)
            except psycopg.Error:
                return


if __name__ == '__main__':
    serve(Plain())
