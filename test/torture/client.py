"""
A client: one process, one connection, and a journal of its results.

A lost answer is unknown, so the client connects again and repeats the same
call, with the same key, until it has a verdict.  The journal is a file outside
the server, only ever appended to, one line for each answer, written when the
client may rely on it.
"""

import os
import random
import time
import traceback
from collections import namedtuple

import psycopg2

# The transaction surely did not happen; to be tried again.
ABORTED = ('40001', '40P01', '55P03', '53200')
LOST_CODES = (None, '57P01', '57P02', '57P03')

LEVELS = ('READ COMMITTED',) * 6 + ('REPEATABLE READ', 'SERIALIZABLE')

Claim = namedtuple('Claim', 'outcome claim_token attempt response '
                   'recovery_point recovery_state lease_expires_at expires_at')


class Lost(Exception):
    """The connection broke: who knows whether it happened."""


class Refused(Exception):
    """An error of the server's; args[0] is the SQLSTATE."""


class Violation(Exception):
    pass


class Client:

    def __init__(self, number, seed, server, shared, journal, wrong=None):
        self.number, self.server, self.shared = number, server, shared
        self.wrong = wrong
        self.rng = random.Random('%s %d' % (seed, number))
        self.journal = os.open(journal, os.O_WRONLY | os.O_APPEND |
                               os.O_CREAT, 0o600)
        self.parent = os.getppid()
        self.connection = self.cursor = None
        self.in_transaction = False
        self.writing = []       # told of if the transaction is rolled back
        self.nonces = 0
        self.sequences = {}     # aggregate -> the last of ours that is there
        self.floor = 0          # we were told that new claim tokens are above
        self.calm = False       # nothing on purpose: no aborts, no dying

    def run(self, deeds):
        """Do these at random until told to stop; in a process of its own."""
        kinds, weights = list(deeds), list(deeds.values())
        # libpq writes there what a server says that goes down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            while self.alive():
                self.rng.choices(kinds, weights)[0](self)
                self.shared.deeds[self.number] += 1
        except Violation as violation:
            self.tell('violation', str(violation))
        except Exception:
            self.tell('violation', traceback.format_exc())

    def alive(self):
        return self.calm or (not self.shared.stop.value and
                             os.getppid() == self.parent)

    def until(self, deed, *arguments, lost=lambda: None):
        """Do this again and again, until there is a verdict."""
        while self.alive():
            try:
                if deed(self, *arguments):
                    return
                # Somebody else is at it, maybe a prepared transaction.
                if self.chance(0.02):
                    resolve(self)
                time.sleep(self.rng.random() * 0.01)
            except Lost:
                self.shared.lost[self.number] += 1
                lost()
            except Refused as refused:
                self.roll_back_after_error()
                if refused.args[0] not in ABORTED:
                    raise Violation('unexpected error: %s' % (refused,))
                if refused.args[0] in ('55P03', '53200'):
                    self.until(resolve)

    #
    # Chance, names
    #

    def chance(self, share):
        return not self.calm and self.rng.random() < share

    def serial(self):
        """A number that grows, for all clients, by about one each deed."""
        with self.shared.serial.get_lock():
            self.shared.serial.value += 1
            return self.shared.serial.value

    def shared_name(self, kind, clients=3):
        """A name that about this number of clients will use at the same time."""
        return '%012d-%s' % (self.serial() // clients * clients, kind)

    def nonce(self):
        self.nonces += 1
        return 'r%d-%d' % (self.number, self.nonces)

    #
    # The journal
    #

    def tell(self, kind, *words):
        line = '\t'.join((kind,) + tuple(str(word) for word in words))
        os.write(self.journal, (line.replace('\n', ' | ') + '\n').encode())

    def check(self, true, *what):
        if not true:
            raise Violation(' '.join(str(word) for word in what))

    #
    # SQL
    #

    def query(self, text, *values):
        if self.connection is None:
            self.connect()
        if 'idem_' in text:
            self.shared.calls[self.number] += 1
        try:
            self.cursor.execute(text, values or None)
            return self.cursor.fetchall() if self.cursor.description else []
        except psycopg2.Error as error:
            if self.connection.closed or error.pgcode in LOST_CODES:
                self.hang_up()
                raise Lost()
            raise Refused(error.pgcode, str(error))

    def value(self, text, *values):
        return self.query(text, *values)[0][0]

    def connect(self):
        while self.connection is None:
            try:
                # A wait for ever would show as an error.
                self.connection = self.server.connect(
                    options='-c statement_timeout=30s -c lock_timeout=300ms')
            except psycopg2.OperationalError:
                if not self.alive():
                    raise Lost()
                time.sleep(0.005)
        self.cursor = self.connection.cursor()

    def hang_up(self):
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        self.in_transaction = False
        self.writing = []

    def begin(self, level='READ COMMITTED'):
        self.query('BEGIN ISOLATION LEVEL ' + level)
        self.in_transaction = True

    def commit(self):
        self.query('COMMIT')
        self.in_transaction = False
        self.writing = []

    def prepare(self):
        """Leave the transaction to the resolver."""
        self.query('PREPARE TRANSACTION %s', self.nonce())
        self.in_transaction = False
        self.writing = []

    def roll_back(self):
        """What it wrote must never be seen: "undone" in the journal."""
        undone, self.writing = self.writing, []
        self.query('ROLLBACK')
        self.in_transaction = False
        for nonce in undone:
            self.tell('undone', nonce)

    def roll_back_after_error(self):
        if self.in_transaction:
            try:
                self.roll_back()
            except Lost:
                pass

    def claim(self, scope, key, request_hash=None, ttl=None, lease=None,
              wait=None):
        """In a batch of one, where it does not wait, as often as not."""
        args = [scope, key, request_hash, ttl, lease]
        call = 'idem_claim_many(%s, ARRAY[%s], ARRAY[%s::bytea], %s, %s)'
        if wait is not None or self.chance(0.5):
            call = 'idem_claim(%s, %s, %s, %s, %s, %s)'
            args.append(wait)
        claim = Claim(*self.query(
            '''SELECT outcome, claim_token, attempt,
                      coalesce(response_body,
                               convert_from(response_bytes, 'UTF8')),
                      recovery_point, recovery_state::text,
                      lease_expires_at, expires_at
               FROM ''' + call, *args)[0])
        self.check(claim.outcome != 'new' or claim.claim_token > self.floor,
                   key, 'has a token that is not above', self.floor, claim)
        return claim

    def claim_many(self, scope, keys):
        claims = [Claim(*row) for row in self.query(
            '''SELECT outcome, claim_token, attempt, response_body,
                      recovery_point, recovery_state::text,
                      lease_expires_at, expires_at
               FROM idem_claim_many(%s, %s) ORDER BY ordinal''',
            scope, keys)]
        self.check(all(claim.outcome != 'new' or
                       claim.claim_token > self.floor for claim in claims),
                   keys, 'have tokens that are not above', self.floor, claims)
        return claims


def resolve(client):
    """Commit or roll back what other transactions have prepared."""
    for gid, in client.query('SELECT gid FROM pg_prepared_xacts'):
        try:
            client.query(client.rng.choice((
                'COMMIT PREPARED %s', 'ROLLBACK PREPARED %s')), gid)
        except Refused as refused:
            # Another client is at it, or was.
            if refused.args[0] not in ('42704', '55000'):
                raise
    return True
