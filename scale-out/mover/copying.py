"""The rows of a place, from one shard to another."""

import os
import threading
import time

from .places import TABLES, full_name, quoted
from .servers import Failure, clock_lead, say

# Seconds by which the clocks of two shards can differ.  A lease ends early where
# the clock is ahead.
MAX_CLOCK_LEAD = 1


def look(source, target):
    """Raises Failure if a move between them cannot succeed.  Returns the tables."""
    found = []
    for shard in (source, target):
        if not shard.run("SELECT 1 WHERE to_regclass('idem_guard.places') "
                         'IS NOT NULL'):
            raise Failure('%s has no guard: run shard.sql there' % shard.name)
        encoding = shard.one('SELECT getdatabaseencoding()')
        tables = shard.run(TABLES)
        shard.rollback()
        if not tables:
            raise Failure('%s has no tables of ours' % shard.name)
        found.append((encoding, tables))
    if found[0][0] != found[1][0]:
        raise Failure('%s has the encoding %s, %s has %s' % (
            source.name, found[0][0], target.name, found[1][0]))
    if found[0][1] != found[1][1]:
        raise Failure('%s and %s do not have the same tables: they need one '
                      'version of the extension, in one schema' % (
                          source.name, target.name))
    lead = clock_lead(source, target)
    if abs(lead) > MAX_CLOCK_LEAD:
        raise Failure('the clock of %s is %.0f s %s that of %s: set the clocks, as '
                      'leases would end too early or too late' % (
                          target.name, abs(lead),
                          'ahead of' if lead > 0 else 'behind', source.name))
    return found[1][1]


def wait_for_messages(shard, place, timeout, only_old=False):
    """Wait for messages with a key, whose successors another relay would deliver.
    Messages without a key have no order: the old shard's relay delivers them.
    With only_old, wait only for messages that are there at the beginning.  Raises
    Failure after the time-out, and at once if a message is not due before."""
    schema = shard.one("SELECT extnamespace::regnamespace::text FROM "
                       "pg_extension WHERE extname = 'idempotency'")
    told, last, until = False, None, time.monotonic() + timeout
    while True:
        # A relay can acknowledge a message before its lease ends.
        count, newest, due = shard.run(
            "SELECT count(*), max(id), max(available_at) FILTER (WHERE awaiting_ack "
            "IS NOT TRUE AND available_at > clock_timestamp() + interval '%f s') "
            "FROM %s.idem_outbox WHERE state = 'pending' AND key_hash IS NOT NULL AND "
            "%s AND id <= coalesce(%s, id)" % (
                until - time.monotonic(), schema, place.condition(shard, 'topic'),
                last or 'NULL'))[0]
        shard.rollback()
        if count == 0:
            return
        if due:
            raise Failure('a message of %s on %s is not due before %s: a move waits '
                          'for messages with a key' % (place.name, shard.name, due))
        if only_old:
            last = last or newest
        if time.monotonic() > until:
            raise Failure('messages of %s with a key remain on %s: let a relay '
                          'deliver them first (%d)' % (place.name, shard.name, count))
        if not told:
            say('waiting for the relays to deliver messages (%d)' % count)
            told = True
        time.sleep(0.05)


def stream(source, read, target, write):
    """Read and write at once, without a file between them.  Returns the number of
    rows."""
    here, there = (os.fdopen(end, mode) for end, mode in zip(
        os.pipe(), ('rb', 'wb')))
    errors = []

    def send():
        try:
            with there:
                source.cursor.copy_expert(read, there)
        except Exception as error:
            errors.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with here:      # After an error, the sender's pipe is broken.
            target.cursor.copy_expert(write, here)
    finally:
        sender.join()
    if errors:
        raise errors[0]
    return target.cursor.rowcount


def copy(source, target, tables, place):
    """Copy all rows, in the transaction of the target.  Returns their number."""
    total = 0
    for space, table, column, columns in tables:
        name = full_name(space, table)
        total += stream(
            source, 'COPY (SELECT %s FROM %s WHERE %s) TO STDOUT' % (
                columns, name, place.condition(source, column)),
            target, 'COPY %s (%s) FROM STDIN' % (name, columns))
    # The rows came first, so new tokens there are above theirs.
    schema = quoted(tables[0][0])
    floor = source.one('SELECT last_value FROM %s.idem_claim_tokens' % schema)
    target.run('SELECT %s.idem_raise_claim_tokens(%%s)' % schema, floor)
    return total
