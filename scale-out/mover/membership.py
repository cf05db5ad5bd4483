"""Shards are added and removed."""

import os
import subprocess

from psycopg2.errors import CheckViolation, LockNotAvailable

from .copying import look
from .places import TABLES, full_name
from .servers import Failure, Server, read_map, say

SHARD_SQL = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(
    __file__))), 'shard.sql')
# Copies of a server have the same system identifier.
SYSTEM = ("SELECT format('%s %s %s %s', system_identifier, "
          "pg_postmaster_start_time(), current_setting('data_directory'), "
          'current_database()) FROM pg_control_system()')
OPTIONS = ('SELECT substr(o.option_name, 2)::int, o.option_value FROM '
           'pg_foreign_server AS s, pg_options_to_table(s.srvoptions) AS o '
           "WHERE s.srvname = 'idempotency' AND o.option_name ~ '^p[0-9]+$'")


# How long a command waits for another one that changes the shards of a map
WAIT = '5s'


def lock_maps(routers, shards):
    """Until the caller commits, no other command changes which shards these maps
    have.  Raises Failure if they have changed since the caller has read them."""
    for router in routers:
        router.run("SELECT set_config('lock_timeout', %s, true)", WAIT)
        try:
            router.run('LOCK TABLE idem_map.removed IN SHARE ROW EXCLUSIVE MODE')
        except LockNotAvailable as error:
            raise Failure('another command changes the shards of %s' %
                          router.name) from error
    if read_map(routers[0]) != shards.map:
        raise Failure('another command has changed the shards of %s: run this one '
                      'again' % routers[0].name)


def set_string(router, number, string):
    """Set the connection string of a shard in a router's map."""
    known = dict(router.run(OPTIONS))
    router.run('ALTER SERVER idempotency OPTIONS (%s p%d %s)' % (
        'SET' if number in known else 'ADD', number,
        router.literal('%s', string)))
    router.run('DELETE FROM idem_map.removed WHERE shard = %s', number)


def forget(router, number, other):
    """Make the number of a shard free.  PL/Proxy requires numbers without gaps: so
    unless it is the highest number, it gets the connection string of another shard."""
    known = dict(router.run(OPTIONS))
    set_string(router, number, known[other])
    router.run('INSERT INTO idem_map.removed VALUES (%s)', number)
    highest = max(known)
    while router.run('DELETE FROM idem_map.removed WHERE shard = %s RETURNING 1',
                     highest):
        router.run('ALTER SERVER idempotency OPTIONS (DROP p%d)' % highest)
        highest -= 1


def add(routers, shards, string, connection, application):
    """Make a shard of a database that has the extension.  Returns its number.  No
    place lives there yet."""
    shard = Server(string, 'the new shard')
    system = shard.one(SYSTEM)
    shard.rollback()
    for number in shards:
        if shards[number].one(SYSTEM) == system:
            raise Failure('this database is already shard %d' % number)
        shards[number].rollback()
    if not shard.run("SELECT 1 WHERE to_regclass('idem_guard.places') IS NOT NULL"):
        done = subprocess.run(
            ['psql', '-X', '-q', '-d', string, '-v', 'application=' + application,
             '-v', 'slots={}', '-f', SHARD_SQL], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise Failure('shard.sql: ' + done.stdout.strip())
    elif shard.run("SELECT 1 FROM idem_guard.places WHERE state <> 'away' LIMIT 1"):
        raise Failure('the new shard has open gates: was it a shard of another '
                      'router?')
    shard.rollback()
    look(shards[min(shards)], shard)
    shard.run('ALTER TABLE idem_guard.places DROP CONSTRAINT IF EXISTS removed')
    shard.commit()
    lock_maps(routers, shards)
    known = dict(routers[0].run(OPTIONS))
    number = min(shards.removed, default=len(known))
    for router in routers[1:]:
        found = dict(router.run(OPTIONS))
        if set(found) not in (set(known), set(known) | {number}) or \
                read_map(router).get(number, connection) != connection:
            raise Failure('%s and %s have different shards: run scale-out/verify'
                          % (routers[0].name, router.name))
    for router in routers:
        set_string(router, number, connection)
    for router in routers:
        router.commit()
    say('shard %d is added; no slot lives there yet: run rebalance' % number)
    return number


def check_empty(shard):
    """Raises Failure while the shard has places, rows or pending messages."""
    left = shard.run("SELECT count(*) FROM idem_guard.places WHERE state <> 'away'")
    if left[0][0]:
        raise Failure('%d slots and scopes live on %s: run drain first' % (
            left[0][0], shard.name))
    tables = shard.run(TABLES)
    for space, table, *_ in tables:
        if shard.run('SELECT 1 FROM %s LIMIT 1' % full_name(space, table)):
            raise Failure('%s has rows in %s: run verify' % (shard.name, table))
    count = shard.one("SELECT count(*) FROM %s WHERE state = 'pending'"
                      % full_name(tables[0][0], 'idem_outbox'))
    if count:
        raise Failure('%s has messages (%d): let its relay deliver them first' % (
            shard.name, count))
    shard.rollback()


def retire(shard):
    """From now on, no mover, who can know an older map, reserves the shard."""
    shard.run("SELECT set_config('lock_timeout', '5s', true)")
    shard.run('ALTER TABLE idem_guard.places DROP CONSTRAINT IF EXISTS removed')
    try:
        shard.run("ALTER TABLE idem_guard.places ADD CONSTRAINT removed CHECK "
                  "(state = 'away')")
    except CheckViolation as error:
        raise Failure('a move to %s has begun' % shard.name) from error
    shard.commit()


def remove(routers, shards, number, is_lost):
    """Make the routers forget an empty shard.  Its number is free then."""
    others = [other for other in shards if other != number]
    shards.check(number)
    if not others:
        raise Failure('shard %d is the only shard' % number)
    lock_maps(routers, shards)
    if not is_lost:
        check_empty(shards[number])
    for other in others:
        moves = shards[other].one(
            "SELECT count(*) FROM idem_guard.places WHERE state = 'leaving' AND "
            'peer = %s', number)
        shards[other].rollback()
        if moves:
            raise Failure('%d moves from shard %d to shard %d have not ended: run '
                          'scale-out/move --back%s' % (
                              moves, other, number, ' --lost' if is_lost else ''))
    for router in routers:
        places = router.one(
            'SELECT (SELECT count(*) FROM idem_map.slots WHERE %s IN (shard, '
            'moving_to)) + (SELECT count(*) FROM idem_map.scopes WHERE %s IN '
            '(shard, moving_to))', number, number)
        if places:
            raise Failure('the map of %s has %d slots and scopes on shard %d: run '
                          'refresh' % (router.name, places, number))
    if not is_lost:
        retire(shards[number])
        check_empty(shards[number])
    for router in routers:
        forget(router, number, others[0])
    for router in routers:
        router.commit()
    say('shard %d is removed: the next shard that is added can get its number' %
        number)
