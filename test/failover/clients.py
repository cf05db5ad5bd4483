"""
Clients: those of test/torture, through PgBouncer and HAProxy, and one that
claims all the time, to see for how long nobody can.
"""

import multiprocessing
import os
import sys
import time

import psycopg2

from servers import DATABASE, PORTS, SUPERUSER

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                '..', 'torture'))

import deeds                                                # noqa: E402
import oracles                                              # noqa: E402
from client import Client, Lost, Refused                    # noqa: E402

PAUSE = 0.04                # seconds between two deeds, at most
PROBE_EVERY = 0.05

# A server that only reads, which was the primary, or was not yet; too many
# connections; and what PgBouncer says when it gives up.
ELSEWHERE = ('25006', '0A000', '53300')

# They are set for the database: PgBouncer passes no options on.
SETTINGS = dict(statement_timeout='30s', lock_timeout='300ms', timezone='UTC',
                client_min_messages='error')


class Shared:
    """What all processes see."""

    def __init__(self, clients):
        self.stop = multiprocessing.Value('b', 0)
        self.serial = multiprocessing.Value('q', oracles.POOL)
        self.deeds, self.calls, self.lost, self.cut, self.read_only = (
            multiprocessing.Array('q', clients, lock=False) for _ in range(5))


class Front:
    """The way of all clients: what Client knows as its server."""

    def __init__(self, address, database=DATABASE, port=PORTS['bouncer']):
        self.where = dict(host=address, port=port, dbname=database)

    def connect(self, options=''):
        try:
            connection = psycopg2.connect(
                user=SUPERUSER, connect_timeout=5, **self.where)
        except psycopg2.OperationalError:
            time.sleep(0.1)
            raise
        connection.autocommit = True
        return connection


class FailoverClient(Client):

    def query(self, text, *values):
        """
        What another connection may do is tried there, a moment later: as long
        as there is no primary, PgBouncer accepts each client, and then closes the connection.
        """
        try:
            return super().query(text, *values)
        except Refused as refused:
            code = refused.args[0]
            if code not in ELSEWHERE and not code.startswith('08'):
                raise
            self.shared.read_only[self.number] += code in ELSEWHERE[:2]
            self.hang_up()
        except Lost:
            pass
        time.sleep(0.1)
        raise Lost()

    def commit(self):
        try:
            super().commit()
        except Lost:
            self.shared.cut[self.number] += 1
            raise

    def tell(self, kind, *words):
        super().tell(kind, *words)
        if not self.calm:
            time.sleep(self.rng.random() * PAUSE)


class Prober(FailoverClient):
    """
    Claims, orders, completes and publishes, with a new key each time.  Its
    probes file has a line for each success: when it began and ended, the claim
    token, and the id of the message.  Neither may ever fall.
    """

    def __init__(self, *arguments, probes):
        super().__init__(*arguments)
        self.probes = open(probes, 'w')
        self.last = (0, 0)

    def chance(self, share):
        return False

    def probe(self):
        self.until(self.probe_once, '%012d-probe' % self.serial())
        time.sleep(PROBE_EVERY)

    def probe_once(self, _, key):
        began = time.monotonic()
        self.begin()
        claim = self.claim('shop', key)
        if claim.outcome == 'replay':       # the last answer was lost
            self.roll_back()
            self.tell('response', key, claim.response)
            return True
        self.check(claim.outcome == 'new', key, claim)
        response = deeds.write_order(self, key, 'shop', key, claim)
        deeds.complete(self, 'shop', key, response)
        message = deeds.publish(self, None, 0)
        number = self.value('SELECT id FROM idem_outbox WHERE message_id = %s',
                            message)
        self.commit()
        self.tell('response', key, response)
        self.tell('published', message)
        self.check(claim.claim_token > self.last[0], 'token',
                   claim.claim_token, 'after', self.last)
        self.check(number > self.last[1], 'id', number, 'after', self.last)
        self.last = (claim.claim_token, number)
        self.probes.write('%f %f %d %d\n' % (
            began, time.monotonic(), claim.claim_token, number))
        self.probes.flush()
        return True
