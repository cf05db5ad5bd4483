"""What a test stands on: a shop, its database, requests and what to expect."""

import contextlib
import itertools
import json
import os
import secrets
import subprocess
import time

try:
    import psycopg
except ImportError:                     # a server at a URL needs none
    psycopg = None

import wire
from process import HERE, PgBouncer, Shop

PROMISES = []
NUMBERS = itertools.count(1)
# The statements that set a setting of a database, and reset it
CONFIGURE = ("SELECT idem_configure('%(name)s', '%(value)s')", "SELECT idem_configure('%(name)s', NULL)") \
    if os.environ.get('EDITION') == 'portable' else \
    ("ALTER DATABASE %(database)s SET idempotency.%(name)s = '%(value)s'", 'ALTER DATABASE %(database)s RESET idempotency.%(name)s')
PROBLEM = 'urn:pg-idempotency:'
# Which answers a promise expects: those of docs/http.md, or only the status
# codes, bodies and effects that any server with idempotency keys has.
STRICT = True
# What GET /effects counts.
EFFECTS = {'payments', 'charges', 'bank_calls', 'blobs', 'submissions', 'likes'}


class Broken(AssertionError):
    """A promise that was not kept."""


class NotOffered(Broken):
    """The server has no such route."""


def promise(name, needs='', why=''):
    """Declare a test.  needs: 'database', which the doubles lack, and why;
    'process', of a server that the suite starts itself; or 'ours', a rule of
    docs/http.md that other servers need not have."""
    def declare(function):
        PROMISES.append((name, needs, why, function))
        return function
    return declare


class Exchange:
    """A request and its answer."""

    def __init__(self, request, answer):
        self.request = request
        self.answer = answer
        if answer.status in (404, 405, 501):
            raise NotOffered('%s %s: %d\n--- request\n%s\n--- answer\n%s' % (
                request.method, request.path, answer.status, request, answer))

    def unless(self, kept, expected):
        if not kept:
            raise Broken('expected %s\n--- request\n%s\n--- answer\n%s' % (expected, self.request, self.answer))
        return self

    def is_(self, status):
        return self.unless(self.answer.status == status, 'status %d' % status)

    def is_first(self, status):
        self.is_(status)
        return self.unless(not STRICT or not self.answer.all('Idempotent-Replayed'), 'no Idempotent-Replayed')

    def is_problem(self, status, kind):
        """Expect one of our problem documents."""
        self.is_(status)
        if not STRICT:
            return self
        self.unless((self.answer.one('Content-Type') or '').split(';')[0] == 'application/problem+json',
                    'Content-Type: application/problem+json')
        document = self.answer.json() or {}
        self.unless(document.get('type') == PROBLEM + kind, 'a problem of type ' + PROBLEM + kind)
        self.unless(document.get('status') == status and document.get('title') and document.get('detail'),
                    'status, title and detail in the problem')
        return self

    def waits(self):
        if not STRICT:
            return self
        seconds = self.answer.one('Retry-After') or ''
        return self.unless(seconds.isdigit() and int(seconds) >= 1, 'Retry-After with whole seconds')

    def runs(self):
        """The first request is running.  How long its lease is says little of when to ask again."""
        self.is_problem(409, 'in-progress').waits()
        return self.unless(not STRICT or int(self.answer.one('Retry-After')) <= 5, 'Retry-After of 5 seconds at most')

    def replays(self, first):
        """The first answer once more, byte for byte."""
        if isinstance(first, Exchange):
            first = first.answer
        self.is_(first.status)
        self.unless(self.answer.body == first.body, 'the body ' + wire.shown(first.body))
        if not STRICT:
            return self.unless(self.answer.all('Content-Type') == first.all('Content-Type'),
                               'Content-Type: %s' % first.one('Content-Type'))
        self.unless(self.answer.all('Idempotent-Replayed') == ['true'], 'Idempotent-Replayed: true')
        self.unless(not self.answer.all('Set-Cookie'), 'no Set-Cookie')
        # Replays of replays have lost these before.
        made_once = ('set-cookie', 'x-trace', 'idempotent-replayed')
        return self.unless(self.answer.kept(*made_once) == first.kept(*made_once),
                           'the headers %r' % (first.kept(*made_once),))


def quoted(key):
    return '"%s"' % key.replace('\\', '\\\\').replace('"', '\\"')


def new_key():
    return 'key-' + secrets.token_hex(12)


def payment(key, amount=1200, currency='EUR', user='alice', headers=()):
    return post('/payments', json.dumps({'amount': amount, 'currency': currency}), key, user, headers)


def job(key, ms=0, user='alice'):
    return post('/jobs', json.dumps({'ms': ms}), key, user)


def blob(key, data, user='alice'):
    return post('/blobs', data, key, user, content='application/octet-stream')


def post(path, body, key=None, user='alice', headers=(), content='application/json'):
    lines = [('X-User', user), ('Content-Type', content)]
    if key is not None:
        lines.append(('Idempotency-Key', quoted(key)))
    return wire.Request('POST', path, lines + list(headers), body if isinstance(body, bytes) else body.encode())


def get(path, user='alice'):
    return wire.Request('GET', path, [('X-User', user)])


class World:
    remote = False                      # a server that the suite did not start

    def __init__(self, name, via, **variables):
        self.name = name
        self.variables = variables      # of all shops here
        self.via = via
        self.memory = via == 'memory'
        self.pgbouncer = None
        self._shop = None
        self._connection = None
        self.database = 'shop_%d_%d' % (os.getpid(), next(NUMBERS))
        if self.memory:
            return
        self.admin('DROP DATABASE IF EXISTS %s WITH (FORCE)' % self.database)
        self.admin('CREATE DATABASE ' + self.database)
        subprocess.run(['psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', self.database,
                        '-f', os.path.join(HERE, 'schema.sql')], check=True, stdout=subprocess.DEVNULL)
        if via == 'pgbouncer':
            self.pgbouncer = PgBouncer(self.database)

    def lacks(self, needs):
        """Whether promises with these needs are left out."""
        return needs == 'database' and self.memory

    def end(self):
        if self._shop:
            self._shop.kill()
        if self.pgbouncer:
            self.pgbouncer.end()
        if self._connection:
            self._connection.close()
        if not self.memory:
            self.admin('DROP DATABASE IF EXISTS %s WITH (FORCE)' % self.database)

    def log_end(self):
        return '\n--- the end of the log of the shop\n' + self._shop.log_end() if self._shop else ''

    # The database, as a superuser

    def admin(self, statement):
        with psycopg.connect('dbname=postgres', autocommit=True) as connection:
            connection.execute(statement)

    def connect(self):
        return psycopg.connect('dbname=' + self.database, autocommit=True)

    def sql(self, statement, *values):
        """The rows, or none where the statement has none to give."""
        for last in (False, True):
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = self.connect()
                cursor = self._connection.execute(statement, values or None)
                return cursor.fetchall() if cursor.description else []
            except psycopg.OperationalError:
                self._connection = None
                if last:
                    raise
                time.sleep(0.2)

    def value(self, statement, *values):
        return self.sql(statement, *values)[0][0]

    @contextlib.contextmanager
    def settings(self, **values):
        """Settings of the extension for shops that start from now on."""
        for name, value in values.items():
            self.sql(CONFIGURE[0] % {'database': self.database, 'name': name, 'value': value})
        self.new_sessions()
        try:
            yield
        finally:
            for name in values:
                self.sql(CONFIGURE[1] % {'database': self.database, 'name': name})
            self.new_sessions()

    def new_sessions(self):
        if self.pgbouncer:
            self.pgbouncer.reconnect()

    @contextlib.contextmanager
    def failing(self, table, sqlstate, times, deferred=False):
        """Let the next "times" INSERTs into a table fail, or their COMMITs."""
        self.sql('CREATE SEQUENCE failures')
        self.sql('GRANT USAGE ON SEQUENCE failures TO shop')
        self.sql("""CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN
				IF nextval('failures') <= %d THEN
					RAISE EXCEPTION 'made to fail' USING ERRCODE = '%s';
				END IF;
				RETURN NEW;
			END $$""" % (times, sqlstate))
        self.sql('CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON %s DEFERRABLE INITIALLY %s '
                 'FOR EACH ROW EXECUTE FUNCTION fail()' % (table, 'DEFERRED' if deferred else 'IMMEDIATE'))
        try:
            yield lambda: self.value('SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM failures')
        finally:
            self.sql('DROP TRIGGER fail ON ' + table)
            self.sql('DROP FUNCTION fail()')
            self.sql('DROP SEQUENCE failures')

    @contextlib.contextmanager
    def locked(self, table):
        """Who inserts into the table waits."""
        with self.connect() as connection:
            connection.autocommit = False
            connection.execute('LOCK TABLE %s IN SHARE MODE' % table)
            yield
            connection.rollback()

    def url(self, port=None):
        """For a shop: straight to the server, or through what listens there."""
        if self.memory:
            return 'memory:'
        if port is None and self.pgbouncer:
            port = self.pgbouncer.port
        if port is not None:
            return 'postgresql://shop@127.0.0.1:%d/%s' % (port, self.database)
        return 'postgresql://shop@localhost:%s/%s?host=%s' % (
            os.environ['PGPORT'], self.database, os.environ['PGHOST'].replace('/', '%2F'))

    # Shops

    def start(self):
        self.shop.port

    @property
    def shop(self):
        """The one that most tests use."""
        if self._shop is None or self._shop.process.poll() is not None:
            self._shop = self.open()
        return self._shop

    def open(self, port=None, **variables):
        """Another one, for a "with"."""
        return Shop(self.name, self.url(port), **{**self.variables, **variables})

    def ask(self, request, shop=None):
        return Exchange(request, wire.send((shop or self.shop).port, request))

    def insist(self, request, shop=None):
        """As a patient client: again while it runs, or when the line was cut
        or the server is in trouble.  The answer that is final."""
        deadline = time.monotonic() + wire.PATIENCE
        pause = 0.02
        while True:
            try:
                exchange = self.ask(request, shop)
                if exchange.answer.status not in (409, 500, 502, 503) or time.monotonic() > deadline:
                    return exchange
                if exchange.answer.status == 409:
                    exchange.runs()
            except (wire.HungUp, OSError) as error:
                if time.monotonic() > deadline:
                    raise Broken('no answer to\n%s\n%s' % (request, error))
            time.sleep(pause)
            pause = min(pause * 1.5, 0.3)

    def effects(self, shop=None):
        exchange = self.ask(get('/effects'), shop).is_(200)
        counts = exchange.answer.json()
        if self.remote and isinstance(counts, dict):
            counts = {**dict.fromkeys(EFFECTS, 0), **counts}
        exchange.unless(isinstance(counts, dict) and set(counts) == EFFECTS, 'the counts of all tables')
        return counts

    @contextlib.contextmanager
    def adds(self, shop=None, **wanted):
        """These effects and no others."""
        before = self.effects(shop)
        yield
        after = self.effects(shop)
        added = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        if added != {name: count for name, count in wanted.items() if count}:
            raise Broken('expected the effects %r, found %r' % (wanted, added))
