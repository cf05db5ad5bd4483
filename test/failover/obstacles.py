"""
What a client may meet on its way, one thing at a time: a bouncer in statement
mode, a server that only reads, a connection that is cut in COMMIT.  Each is an
error that says so, and nothing is lost or done twice.
"""

import os
import signal
import socket
import threading

import psycopg2

from checks import Broken, check, until
from clients import Front
from servers import PORTS

IDEM_RUN = ("SELECT outcome, response_body FROM idem_run('shop', %s, "
            "'place_order(jsonb)', jsonb_build_object('key', %s))")
WALSENDER = 'walsender '


def error_of(cursor, text, *values):
    try:
        cursor.execute(text, values)
    except psycopg2.Error as error:
        return error.pgcode, str(error).strip()
    raise Broken('no error: ' + text)


def value(cursor, text, *values):
    cursor.execute(text, values)
    return cursor.fetchone()[0]


def orders(cursor, key):
    return value(cursor, 'SELECT count(*) FROM orders WHERE key = %s', key)


def statement_mode(servers):
    """
    It ends a connection at BEGIN.  Its log says why; of a driver it depends
    whether it shows that, too.  idem_run is a statement by itself; a claim is
    one, too, and its completion another, with the token.
    """
    front = Front(servers.address, 'statements')
    key = 'through-statement-mode'

    cursor = front.connect().cursor()
    error_of(cursor, 'BEGIN')
    check(cursor.connection.closed, 'a transaction in statement mode')
    with open(os.path.join(servers.directory, 'pgbouncer.log')) as log:
        check('transaction blocks not allowed in statement pooling mode'
              in log.read(), 'PgBouncer does not say why')

    cursor = front.connect().cursor()
    cursor.execute(IDEM_RUN, (key, key))
    outcome, response = cursor.fetchone()
    check(outcome == 'new', outcome)
    cursor.execute(IDEM_RUN, (key, key))
    check(cursor.fetchone() == ('replay', response), 'no replay')
    check(orders(cursor, key) == 1, 'orders:', orders(cursor, key))

    key += '-2'
    token = value(cursor, "SELECT claim_token FROM idem_claim('gate', %s)",
                  key)
    complete = "SELECT idem_complete('gate', %s, 201, 'done', NULL, %s)"
    code, said = error_of(cursor, complete, key, None)
    check(code == 'ID003', code, said)
    check(value(cursor, complete, key, token) is True, 'not completed')
    return said.splitlines()[0]


def read_only(servers):
    """A standby answers what only reads, and refuses the rest."""
    front = Front(servers.address, port=PORTS['standby'])
    key = 'on-a-standby-first'
    cursor = front.connect().cursor()
    until(lambda: value(cursor, "SELECT to_regproc('idem_lookup')"),
          'the function is on the standby')
    code, said = error_of(cursor, "SELECT * FROM idem_claim('gate', %s)", key)
    check(code == '25006', code, said)
    primary = Front(servers.address).connect().cursor()
    check(value(primary, "SELECT outcome FROM idem_claim('gate', %s)",
                key) == 'new', 'the refused claim is there')
    until(lambda: value(cursor, "SELECT state FROM idem_lookup('gate', %s)",
                        key) == 'started', 'the claim is on the standby')
    return said.splitlines()[0]


def cut_in_commit(servers):
    """
    COMMIT waits for the standby when its session ends, or its client.  A
    duplicate gets in_progress, and later a replay.
    """
    if not servers.synchronous:
        return 'not tried: nobody waits'
    leader = servers.leader()
    watcher = leader.connect().cursor()
    front = Front(servers.address)
    claim = "SELECT outcome, response_body FROM idem_claim('shop', %s)"
    said = []

    for how in ('server', 'client'):
        key = 'cut-in-commit-by-the-' + how
        connection = front.connect()
        cursor = connection.cursor()
        cursor.execute('BEGIN')
        cursor.execute(claim, (key,))
        cursor.execute("INSERT INTO orders (intent, scope, key, response) "
                       "VALUES (%s, 'shop', %s, 'r1')", (key, key))
        cursor.execute("SELECT idem_complete('shop', %s, 201, 'r1'), "
                       'pg_backend_pid()', (key,))
        pid = cursor.fetchone()[1]
        leader.freeze(WALSENDER)
        try:
            waiting = threading.Thread(target=commit, args=(cursor, said))
            waiting.start()
            until(lambda: value(
                watcher, 'SELECT wait_event FROM pg_stat_activity '
                'WHERE pid = %s', pid) == 'SyncRep', 'COMMIT waits')
            twin = front.connect().cursor()
            twin.execute(claim, (key,))
            check(twin.fetchone()[0] == 'in_progress', 'told too early')
            if how == 'server':
                watcher.execute('SELECT pg_terminate_backend(%s)', (pid,))
            else:
                hang_up(connection)
            waiting.join(10)
            check(not waiting.is_alive(), 'COMMIT is not cut')
        finally:
            leader.signal(signal.SIGCONT, WALSENDER)
        until(lambda: value(twin, claim, key) != 'in_progress',
              'the claim has ended')
        twin.execute(claim, (key,))
        outcome = twin.fetchone()
        check(outcome == ('replay', 'r1'), how, outcome)
        check(orders(twin, key) == 1, 'orders:', orders(twin, key))
    check(all(said), 'a COMMIT that was cut was confirmed')
    return said[0].splitlines()[0]


def commit(cursor, said):
    try:
        cursor.execute('COMMIT')
        said.append('')
    except psycopg2.Error as error:
        said.append(str(error).strip())


def hang_up(connection):
    """The socket is shut, under the thread that waits there."""
    duplicate = socket.socket(fileno=connection.fileno())
    duplicate.shutdown(socket.SHUT_RDWR)
    duplicate.detach()


OBSTACLES = {'a bouncer in statement mode': statement_mode,
             'a server that only reads': read_only,
             'a connection that is cut in COMMIT': cut_in_commit}
