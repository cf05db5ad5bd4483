"""The statements of docs/drivers.md with a driver for Python: psycopg, psycopg2, asyncpg or sqlalchemy."""

import asyncio
import sys

CLAIM = """SELECT outcome, response_status, response_body
FROM idem_claim($1::text, $2::text, idem_request_hash($3::text, $4::text, $5::text), wait => make_interval(secs => $6::float8))"""
COMPLETE = 'SELECT idem_complete($1::text, $2::text, $3::int, $4::text, $5::text::json, $6::bigint)'
COMPLETE_BYTES = 'SELECT idem_complete($1::text, $2::text, $3::int, $4::bytea)'
PUBLISH = 'SELECT idem_publish($1::text, $2::text::jsonb, $3::text)::text AS message_id'
ONCE = 'SELECT token FROM idem_once_many($1::text, $2::text[]) AS token'
BYTES = 'SELECT response_bytes FROM idem_lookup($1::text, $2::text)'


class Driver:
    """A connection; each list of statements is a transaction, and returns the rows of all of them."""

    def run(self, statements):
        raise NotImplementedError

    def sqlstate(self, error):
        raise NotImplementedError


class DBAPI(Driver):
    """psycopg or psycopg2."""

    def __init__(self, module):
        self.version = module.__version__
        self.connection = module.connect('')

    def run(self, statements):
        with self.connection, self.connection.cursor() as cursor:
            rows = []
            for sql, *values in statements:
                for number in range(len(values)):
                    sql = sql.replace('$%d' % (number + 1), '%s')
                cursor.execute(sql, values)
                rows += cursor.fetchall()
            return rows

    def sqlstate(self, error):
        return getattr(error, 'sqlstate', None) or error.pgcode


class Psycopg(DBAPI):

    def run(self, statements):
        with self.connection.transaction(), self.connection.cursor() as cursor:
            rows = []
            for sql, *values in statements:
                for number in range(len(values)):
                    sql = sql.replace('$%d' % (number + 1), '%s')
                rows += cursor.execute(sql, values).fetchall()
            return rows


class Asyncpg(Driver):

    def __init__(self, module):
        self.version = module.__version__
        self.loop = asyncio.new_event_loop()
        self.connection = self.loop.run_until_complete(module.connect())

    def run(self, statements):
        async def transaction():
            async with self.connection.transaction():
                rows = []
                for sql, *values in statements:
                    rows += await self.connection.fetch(sql, *values)
                return rows
        return [tuple(row) for row in self.loop.run_until_complete(transaction())]

    def sqlstate(self, error):
        return error.sqlstate


class SQLAlchemy(Driver):

    def __init__(self, module):
        self.version = module.__version__
        self.module = module
        self.engine = module.create_engine('postgresql+psycopg2://')

    def run(self, statements):
        with self.engine.begin() as connection:
            rows = []
            for sql, *values in statements:
                # A parameter before "::" is not seen as one, hence CAST.
                for number in range(len(values)):
                    for kind in ('text[]', 'text', 'int', 'float8', 'bytea', 'bigint'):
                        sql = sql.replace('$%d::%s' % (number + 1, kind), 'CAST(:v%d AS %s)' % (number + 1, kind))
                values = {'v%d' % (number + 1): value for number, value in enumerate(values)}
                rows += connection.execute(self.module.text(sql), values).fetchall()
            return [tuple(row) for row in rows]

    def sqlstate(self, error):
        return error.orig.pgcode


def check(name, found, wanted):
    print('%s - %s: %s' % ('ok' if found == wanted else 'not ok', TITLE, name))
    if found != wanted:
        print('# %r instead of %r' % (found, wanted))


def claim(key, body='{"sku": "teapot"}'):
    return (CLAIM, 'customer-7', key, 'POST', '/orders', body, 5)


NAME = sys.argv[1]
MODULE = __import__(NAME)
DRIVER = {'psycopg': Psycopg, 'psycopg2': DBAPI, 'asyncpg': Asyncpg, 'sqlalchemy': SQLAlchemy}[NAME](MODULE)
TITLE = '%s %s' % (NAME, DRIVER.version)
KEY = NAME + '-order-000000'

ROWS = DRIVER.run([
    claim(KEY + '1'),
    (COMPLETE, 'customer-7', KEY + '1', 201, '{"order": 1}', '{"Content-Type": "application/json"}', None),
    (PUBLISH, 'orders', '{"order": 1}', 'customer-7')])
check('a new claim', ROWS[0][0], 'new')
check('a message has an id', len(ROWS[2][0]), 36)
check('a replay', tuple(DRIVER.run([claim(KEY + '1', '{ "sku": "teapot" }')])[0]), ('replay', 201, '{"order": 1}'))
DRIVER.run([claim(KEY + '2'), (COMPLETE_BYTES, 'customer-7', KEY + '2', 200, b'\0\xff')])
check('bytes are bound as bytea', bytes(DRIVER.run([(BYTES, 'customer-7', KEY + '2')])[0][0]), b'\0\xff')
check('a list is an array', [row[0] for row in DRIVER.run([(ONCE, NAME, ['m1', 'm2', 'm1'])])], ['m1', 'm2'])
try:
    DRIVER.run([claim('short')])
    check('the SQLSTATE', None, 'ID001')
except Exception as error:
    check('the SQLSTATE', DRIVER.sqlstate(error), 'ID001')
