"""
Histories: threads that call freely, and an order that explains their answers.

Six threads call all functions on few keys, in transactions of all isolation
levels, some of which are rolled back; meanwhile another one cancels calls and
breaks connections.  Every call, COMMIT and ROLLBACK is recorded with the times
between which it happened.  Afterwards an order is looked for in the history of
each key, entity, aggregate, token and lane of the outbox by itself: see
orders.py.  And each transaction leaves a trace in tables of its own, which
must be there if and only if what it did with our functions is.

This is done in rounds of two seconds, so that no history gets too long.
"""

import os
import pickle
import random
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict

import psycopg2
import psycopg2.extensions as ext

import progress
import sql
import world                                    # noqa: F401: registers types
from orders import GAVE_UP, Call, End, Snapshot, Transacted, explain
from primitives import COLUMNS, MAX_ATTEMPTS

THREADS = 6
ROUND = 2                       # seconds
ANSWERS = ('ID003', 'ID004')    # errors that say how things are
BROKEN = ('57P01', None)        # the connection is
GONE = ('40001', '40P01', '57014') + BROKEN     # errors that do not
IN_TRANSACTION = (ext.TRANSACTION_STATUS_INTRANS,
                  ext.TRANSACTION_STATUS_INERROR)
MORTAL = ('claim', 'heartbeat', 'act', 'advance', 'append', 'once', 'publish',
          'claim_many', 'advance_many', 'set_many', 'forget_user')
# For many at once, and the call for each.
BATCHES = {'claim_many': 'claim', 'complete_many': 'complete',
           'advance_many': 'advance', 'set_many': 'act'}

SCHEMA = '''
CREATE TABLE effects (key text);
CREATE TABLE events (aggregate text, version bigint, client_id text,
                     client_seq bigint);
CREATE TABLE uses (token text);
CREATE TABLE orders (payload text);
CREATE TABLE winners (key text, claim_token bigint);

-- All sessions go for the same dead leases at once.
CREATE PROCEDURE storm(first int, keys int) LANGUAGE plpgsql AS $$
DECLARE
	claim record;
BEGIN
	FOR n IN first .. first + keys - 1 LOOP
		SELECT * INTO claim FROM idem_claim('storm', 'dead-lease-' || 10000000 + n);
		COMMIT;
		IF claim.outcome = 'new' THEN
			INSERT INTO winners
				VALUES ('dead-lease-' || 10000000 + n, claim.claim_token);
			COMMIT;
		END IF;
	END LOOP;
END $$;
'''
STORM_KEYS = 250

CALLS = 'threads call all functions at once, and no call fails'
KINDS = {
    'keys': 'request keys: an order explains every answer',
    'actions': 'user actions: an order explains every answer',
    'sequences': 'client sequences: an order explains every answer',
    'tokens': 'once-only tokens: an order explains every answer',
    'outbox': 'lanes of the outbox: an order explains every answer',
}
NUMBERS = 'claim tokens and ids: each is above those that were drawn or ' \
    'raised before'
PROGRESS = 'a few takes return all messages that are due, whatever else is ' \
    'there'
RECORDS = 'a record is there if and only if what was done with it is'

# Rows that must exist together, or not at all: each query finds violations.
TOGETHER = {
    'effect and completed key': '''
        SELECT key, n, state FROM (SELECT key, count(*) AS n FROM effects
                                   GROUP BY key) AS e
        FULL JOIN (SELECT key, state FROM idem_keys
                   WHERE scope = 'h' AND state IN ('completed', 'erased'))
            AS k USING (key)
        WHERE (n, state IS NULL) IS DISTINCT FROM (1::bigint, false)''',
    'token and its use': '''
        SELECT token, n, scope FROM (SELECT token, count(*) AS n FROM uses
                                     GROUP BY token) AS u
        FULL JOIN idem_tokens USING (token)
        WHERE (n, scope IS NULL) IS DISTINCT FROM (1::bigint, false)''',
    'message and order': '''
        SELECT o.payload, m.id FROM orders AS o
        FULL JOIN idem_outbox AS m ON m.payload::text = o.payload
        WHERE o.payload IS NULL OR m.id IS NULL''',
    'events and version': '''
        SELECT aggregate, e.versions, a.version
        FROM (SELECT aggregate, array_agg(version ORDER BY version)
              FROM events GROUP BY aggregate) AS e (aggregate, versions)
        FULL JOIN idem_aggregates AS a USING (aggregate)
        WHERE e.versions IS DISTINCT FROM
            ARRAY(SELECT generate_series(1, a.version))''',
    'events and client sequence': '''
        SELECT aggregate, client_id, e.seqs, s.last_client_seq
        FROM (SELECT aggregate, client_id,
                  array_agg(client_seq ORDER BY client_seq)
              FROM events GROUP BY aggregate, client_id)
            AS e (aggregate, client_id, seqs)
        FULL JOIN idem_client_sequences AS s USING (aggregate, client_id)
        WHERE e.seqs IS DISTINCT FROM
            ARRAY(SELECT generate_series(1, s.last_client_seq))''',
}


# Microseconds since 1970, as the server's, but never set back.
ORIGIN = time.time_ns() - time.monotonic_ns()


def now():
    return (ORIGIN + time.monotonic_ns()) // 1000


def ending(answer):
    """Is it committed?  None: nobody knows."""
    if isinstance(answer, list):
        return True
    return None if answer in BROKEN else False


class Lost(Exception):
    """The transaction is over, by an error or with its connection."""


class Caller:

    def __init__(self, seed, name):
        self.rng, self.name = random.Random(seed), name
        self.lock = threading.Lock()    # whoever kills holds it, too
        self.mortal = self.killed = False
        self.seen = 0                   # the highest claim token
        self.connect()

    def connect(self):
        self.connection = psycopg2.connect('', options=(
            '-c timezone=UTC -c deadlock_timeout=10ms '
            '-c idempotency.outbox_max_attempts=3'))
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()
        self.pid = self.connection.get_backend_pid()
        self.killed = False

    def run(self, until):
        self.until, self.done, self.tx = until, [], None
        kinds = (self.request, self.request, self.job, self.job, self.job,
                 self.requests, self.administrate, self.act, self.append,
                 self.use,
                 self.publish, self.relay, self.relay)
        while time.monotonic() < until:
            self.rng.choice(kinds)()

    def kill(self, rng, admin):
        """Called by another thread."""
        with self.lock:
            if self.mortal and not self.killed:
                if rng.random() < 0.8:
                    admin.execute('SELECT pg_cancel_backend(%d)' % self.pid)
                else:
                    admin.execute('SELECT pg_terminate_backend(%d, 10000)'
                                  % self.pid)
                    self.killed = True

    #
    # Transactions and calls
    #

    def execute(self, text):
        self.cursor.execute(text)
        return self.cursor.fetchall() if self.cursor.description else []

    def begin(self, level, mortal):
        with self.lock:
            self.mortal = mortal
        self.tx = Transacted('%s.%d' % (self.name, len(self.done)), level)
        self.done.append(self.tx)
        self.lived = now()
        return self.tx

    def finish(self, asked, committed):
        """The transaction has ended; none of its session is left."""
        with self.lock:
            self.mortal = False
        if self.connection.closed or self.killed:
            # It may have come to its end before we asked for that, even before
            # we heard the last answer, which was on its way to us.
            if not committed:
                asked = min(asked, self.lived)
            self.connection.close()
            self.connect()
        tx, self.tx = self.tx, None
        tx.end = End(tx, asked, now())
        tx.end.committed = committed

    def statement(self, text):
        """Returns rows, or the SQLSTATE of an error that must be expected."""
        try:
            return self.execute(text)
        except psycopg2.Error as error:
            broken = error.pgcode in BROKEN and (error.pgcode or
                                                 self.connection.closed)
            if not broken and error.pgcode not in ANSWERS + GONE:
                raise
            return error.pgcode

    def in_transaction(self, text, call=None):
        asked = now()
        answer = self.statement(text)
        if call and answer not in GONE:
            call.answer = answer
        if call:
            call.told = now()
        if not self.tx.first and isinstance(answer, list):
            self.tx.first = Snapshot(self.tx, asked, now())
        if not isinstance(answer, list):
            raise Lost(asked)
        self.lived = asked
        return answer

    def call(self, name, *args):
        """Returns the rows; or None, if it was alone and ended otherwise."""
        alone = self.tx is None
        tx = self.begin('rc', name in MORTAL) if alone else self.tx
        call = Call(tx, now(), name, args)
        tx.calls.append(call)
        if not alone:
            return self.in_transaction(sql.text(name, args), call)
        answer = self.statement(sql.text(name, args))
        if answer not in GONE:
            call.answer = answer
        self.finish(call.asked, ending(answer))
        call.told = tx.end.told
        return answer if isinstance(answer, list) else None

    def transact(self, work, mortal=True, abort=0.15,
                 levels=('rc', 'rc', 'rr', 'ser')):
        """Returns whether the work is committed, as far as the client knows."""
        tx = self.begin(self.rng.choice(levels), mortal)
        end = 'ROLLBACK' if self.rng.random() < abort else 'COMMIT'
        asked = now()
        try:
            self.in_transaction('BEGIN ISOLATION LEVEL ' + {
                'rc': 'READ COMMITTED', 'rr': 'REPEATABLE READ',
                'ser': 'SERIALIZABLE'}[tx.level])
            tx.first = None
            work()
            if self.rng.random() < 0.2:
                time.sleep(self.rng.random() * 0.003)
            asked = now()
            committed = end == 'COMMIT' and ending(self.statement(end))
        except Lost as lost:
            asked, committed = lost.args[0], False
        while self.connection.info.transaction_status in IN_TRANSACTION:
            self.statement('ROLLBACK')
        self.finish(asked, committed)
        return committed

    #
    # Their calls
    #

    def tick(self, per_second, width):
        """A number that moves with time, so that threads meet at it."""
        left = self.until - time.monotonic()
        return int((1000 - left) * per_second) + self.rng.randrange(width)

    def key(self):
        return (self.rng.choice('hhf'),
                'history-key-%d' % self.tick(100, 3))

    def claim(self, key, lease, wait=0):
        request_hash = self.rng.choice((None, b'\x01' * 32)) \
            if self.rng.random() < 0.9 else b'\x02' * 32
        rows = self.call('claim', key, request_hash, None, lease, wait)
        if not rows:
            return None, None
        outcome, token = rows[0][:2]
        self.seen = max(self.seen, token or 0)
        return outcome, token

    def complete(self, key, token):
        if key[0] == 'h':
            self.in_transaction("INSERT INTO effects VALUES ('%s')" % key[1])
        body = 'response %d' % self.rng.randrange(10 ** 9)
        self.call('complete', key, 200, self.rng.choice(
            (body, body.encode())), None, token)

    def request(self):
        """All in one transaction, maybe with the other tools beside."""
        def work():
            if self.rng.random() < 0.2:
                self.call('lookup', key)
            outcome, token = self.claim(key, 60000000,
                                        self.rng.choice((0, 0, 200000)))
            if outcome != 'new':
                return
            for beside in self.rng.sample((
                    self.publish_one, self.use_some, self.append_some,
                    self.act_once), self.rng.choice((0, 0, 0, 1, 2))):
                beside()
            self.complete(key, self.rng.choice((None, token)))

        key = self.key()
        self.transact(work)

    def requests(self):
        """Many in one transaction, some of them twice."""
        def work():
            rows = self.call('claim_many', scope, keys, hashes, None, 60000000)
            claims = [(key, row[1]) for key, row in zip(keys, rows)
                      if row[0] == 'new']
            if not claims:
                return
            if scope == 'h':
                self.in_transaction('INSERT INTO effects SELECT unnest(%s)'
                                    % sql.array([key for key, _ in claims]))
            self.call('complete_many', scope, [key for key, _ in claims],
                      [200] * len(claims),
                      ['response %d' % self.rng.randrange(10 ** 9)
                       for _ in claims],
                      [token for _, token in claims])

        scope = self.rng.choice('hhf')
        keys = [self.key()[1] for _ in range(self.rng.choice((1, 3)))]
        hashes = [self.rng.choice((None, b'\x01' * 32)) for _ in keys]
        self.transact(work)

    def job(self):
        """In several transactions, under a lease that may run out."""
        key = self.key()
        lease = self.rng.choice((0, 0, 2000, 60000000, 60000000))
        outcome, token = self.claim(key, lease)
        if outcome != 'new':
            return
        if self.rng.random() < 0.3:
            self.call('heartbeat', key, lease, token)
        if self.rng.random() < 0.3:
            self.call('checkpoint', key, 'half', '{"n": 1}', lease, token)
        if self.rng.random() < 0.5:
            time.sleep(self.rng.random() * 0.004)
        chance = self.rng.random()
        if chance < 0.5:
            self.transact(lambda: self.complete(key, token), abort=0.1)
        if chance > 0.4:
            self.call(*self.rng.choice((
                ('fail_claim', key, 'no', token), ('release', key, token),
                ('heartbeat', key, lease, token))))
        elif chance < 0.1 and key[0] == 'f':
            self.call('complete', key, 402, 'again', None, token)

    def administrate(self):
        scope, key = self.key()
        name = self.rng.choice(('lookup', 'erase', 'forget', 'raise_tokens'))
        if name == 'raise_tokens':
            self.call(name, self.seen + self.rng.choice((0, 1, 10, 1000)))
        else:
            self.call(name, ('f' if name == 'forget' else scope, key))

    def entity(self):
        """A user has only one counter, so that idem_forget_user deletes exactly that."""
        return self.rng.choice('12'), 'e', '1'

    def act_once(self):
        entity = self.entity()
        action_id = self.tick(1000, 40)
        kind = self.rng.random()
        if kind < 0.1:
            self.call('is_active', entity, 'like')
        elif kind < 0.2:
            self.call('states', *entity[:2], ['2', '1', '1'])
        elif kind < 0.3:
            self.call('advance', entity, action_id)
        elif kind < 0.35:
            self.call('forget_user', entity[0])
        else:
            wanted = self.rng.choice((True, False, None))   # None: toggle
            action_type, other = self.rng.sample(('like', 'dislike'), 2)
            self.call('act', entity, action_type, wanted, action_id,
                      self.rng.choice((None, [other])) if wanted else None)

    def act_on_many(self):
        n = self.rng.choice((1, 3))
        entities = [self.entity() for _ in range(n)]
        ids = [self.tick(1000, 40) for _ in range(n)]
        if self.rng.random() < 0.3:
            self.call('advance_many', entities, ids)
        else:
            self.call('set_many', entities,
                      [self.rng.choice(('like', 'dislike')) for _ in ids],
                      [self.rng.random() < 0.6 for _ in ids], ids)

    def act(self):
        if self.rng.random() < 0.3:
            self.act_on_many()
        elif self.rng.random() < 0.6:
            self.act_once()
        else:
            self.transact(self.act_once)

    def append_some(self):
        aggregate, client = self.rng.choice('ab'), self.rng.choice('12')
        count = self.rng.choice((1, 1, 2))
        last = self.call('last_client_seq', aggregate, client)[0][0]
        first = max(1, last + self.rng.choice((-1, 0, 1, 1, 1, 1, 2)))
        expected = None
        if self.rng.random() < 0.2:
            expected = self.in_transaction(
                "SELECT coalesce(max(version), 1) FROM idem_aggregates "
                "WHERE aggregate = '%s'" % aggregate)[0][0]
            expected -= self.rng.choice((0, 0, 1))
        outcome, last, version = self.call(
            'append', aggregate, client, first, count, expected, False,
            self.rng.choice((0, 0, 50000)))[0]
        if outcome == 'appended':
            self.in_transaction(
                "INSERT INTO events SELECT '%s', %d - n, '%s', %d - n "
                "FROM generate_series(0, %d) n" % (
                    aggregate, version, client, last, count - 1))

    def append(self):
        self.transact(self.append_some)

    def use_some(self):
        tokens = ['t%d' % self.tick(400, 4)
                  for _ in range(self.rng.choice((1, 3)))]
        if len(tokens) == 1:
            first = tokens if self.call(
                'once', 'h', tokens[0], None)[0][0] else []
        else:
            first = [t for t, in self.call('once_many', 'h', tokens, None)]
        if first:
            self.in_transaction('INSERT INTO uses SELECT unnest(%s)'
                                % sql.array(first))

    def use(self):
        self.transact(self.use_some)

    def publish_one(self):
        payload = '{"n": %d}' % self.rng.randrange(10 ** 12)
        self.call('publish', 't', payload, self.rng.choice('12345'), None,
                  self.rng.choice((None, None, None, 2000)))
        self.in_transaction("INSERT INTO orders VALUES ('%s')" % payload)

    def publish_some(self):
        """Many at once, recorded as single calls whose answers were lost."""
        payloads = ['{"n": %d}' % self.rng.randrange(10 ** 12)
                    for _ in range(self.rng.choice((1, 3)))]
        keys = [self.rng.choice('123') for _ in payloads]
        asked = now()
        self.in_transaction(sql.text('publish_many', (
            ['t'], payloads, keys, None, None)))
        for payload, key in zip(payloads, keys):
            call = Call(self.tx, asked, 'publish',
                        ('t', payload, key, None, None))
            call.told = now()
            self.tx.calls.append(call)
            self.in_transaction("INSERT INTO orders VALUES ('%s')" % payload)

    def publish(self):
        def work():
            for _ in range(self.rng.choice((1, 3))):
                self.rng.choice((self.publish_one, self.publish_some))()

        self.transact(work)

    def relay(self):
        """Take, and then acknowledge some and refuse the others."""
        def take():
            taken.extend(self.call('take', self.rng.choice((1, 3, 100)),
                                   self.rng.choice((0, 2000, 60000000)), None,
                                   self.rng.choice((None, None, 20000))))

        taken = []
        if self.rng.random() < 0.5:
            take()
        elif not self.transact(take, False, levels=('rc', 'rr')):
            return
        time.sleep(self.rng.random() * 0.003)
        for lane in {row[3] for row in taken}:
            self.lease_again([row for row in taken if row[3] == lane])
        failed = set()
        for ident, _, _, lane, _, _, attempt, _ in taken:
            if lane not in failed and self.rng.random() < 0.8:
                self.call('ack', [ident])
                continue
            failed.add(lane)
            if self.call('nack', ident, 'no', self.rng.choice((0, 1000)),
                         self.rng.choice((None, attempt))) == [('dead',)] \
                    and self.rng.random() < 0.8:
                self.call('requeue', [ident])

    def lease_again(self, taken):
        """
        Of one lane, in any order; maybe to deliver them all the same.  Without
        attempts the time decides, for each message by itself, so these calls
        are for few messages: the search tries every combination.
        """
        self.rng.shuffle(taken)
        attempts = [row[6] for row in taken]
        if self.rng.random() < 0.5:
            attempts = None
            taken = taken[:3]
        idents = [row[0] for row in taken]
        chance = self.rng.random()
        if chance < 0.3:
            self.call('extend', idents,
                      self.rng.choice((0, 2000, 60000000)), attempts)
        elif chance < 0.5:
            self.call('give_back', idents, attempts)


#
# Histories
#

def subjects(call, lanes):
    """What the call is about, and the call as it looks from there."""
    name, args, rows = call.name, call.args, call.answer
    if name in ('act', 'advance', 'is_active'):
        yield ('actions', args[0]), call
    elif name in ('states', 'forget_user'):
        yield ('actions', (args[0], 'e', '1')), call
    elif name == 'raise_tokens':
        pass
    elif name in ('append', 'last_client_seq'):
        yield ('sequences', args[0]), call
    elif name == 'once':
        yield ('tokens', args[1]), call
    elif name == 'once_many':
        for token in set(args[1]):
            answer = None if rows is None else [((token,) in rows,)]
            yield ('tokens', token), part(call, answer, 'once', args[0],
                                          token, args[2])
    elif name in BATCHES:
        yield from elements(call)
    elif name == 'take' and rows is None:
        # In the portable edition, a take in a transaction can be the victim of a deadlock.
        assert os.environ.get('EDITION') == 'portable'
    elif name == 'take':
        for lane in set(lanes.values()):
            mine = [row for row in rows if row[3] == lane]
            # Not all that were there, if there was no room for more.
            limit = len(mine) if len(rows) == args[0] else 10 ** 9
            yield ('outbox', lane), part(call, mine, name, limit, *args[1:])
    elif name == 'publish':
        yield ('outbox', args[2]), call
    elif name in ('ack', 'nack', 'requeue', 'extend', 'give_back'):
        ident = args[0] if name == 'nack' else args[0][0]
        yield ('outbox', lanes[ident]), call
    else:
        yield ('keys', args[0]), call


def elements(call):
    """Of a batch that visits each by itself: the single calls."""
    name, args, rows = call.name, call.args, call.answer
    if name == 'claim_many':
        scope, keys, hashes, ttl, lease = args
        singles = [('keys', (scope, key), request_hash, ttl, lease, None)
                   for key, request_hash in zip(keys, hashes)]
    elif name == 'complete_many':
        scope, *columns = args
        singles = [('keys', (scope, key), status, body, None, token)
                   for key, status, body, token in zip(*columns)]
    elif name == 'advance_many':
        singles = [('actions', *element) for element in zip(*args)]
    else:
        singles = [('actions', *element, None) for element in zip(*args)]
    for n, (kind, subject, *others) in enumerate(singles):
        answer = [rows[n]] if isinstance(rows, list) else None
        yield (kind, subject), part(call, answer, BATCHES[name], subject,
                                    *others)


def part(call, answer, name, *args):
    copy = Call(call.tx, call.asked, name, args)
    copy.told, copy.answer = call.told, answer
    return copy


def histories(callers, rows):
    """Subject -> its points, a list for each session."""
    found = defaultdict(lambda: [[] for _ in callers])
    calls = [c for caller in callers for tx in caller.done for c in tx.calls]
    published = {row['payload']: [(row['message_id'], row['id'])]
                 for row in rows['outbox'].values()}
    lanes = {}
    for call in calls:
        if call.name == 'publish':
            # Lost, but it is there; where it is not, it does not matter.
            call.answer = call.answer or published.get(call.args[1])
            if call.answer:
                lanes[call.answer[0][1]] = call.args[2]
    for number, caller in enumerate(callers):
        for tx in caller.done:
            seen = defaultdict(list)
            for call in tx.calls:
                if call.answer or call.name != 'publish':
                    for subject, view in subjects(call, lanes):
                        seen[subject].append(view)
            first = [tx.first] if tx.first and tx.level != 'rc' else []
            for subject, views in seen.items():
                found[subject][number] += first + views + [tx.end]
    mark_twins(calls)
    for subject, lines in found.items():
        if subject[0] == 'outbox':
            mark_takes([point for line in lines for point in line
                        if isinstance(point, Call)])
            found[subject] = [without_idle(line) for line in lines]
    return found


def mark_takes(calls):
    """
    A take may pass a lane by, or the rest of it, in which another one holds
    messages, to see if it may have them, or in which a message is about to
    leave or is committed just now.  And was a message of the lane ever taken
    so often that its last lease could run out?
    """
    busy = [(call.tx, call.tx.end.asked if call.name == 'publish'
             else call.asked, call.tx.end.told) for call in calls]
    takes = [call for call in calls if call.name == 'take']
    buries = any(row[6] >= MAX_ATTEMPTS for call in takes
                 for row in call.answer)
    for call in takes:
        call.buries = buries
        call.crowded = any(
            tx is not call.tx and asked < call.told and call.asked < told
            for tx, asked, told in busy)


def without_idle(line):
    """
    Without takes that say nothing of the lane, and what is left of their
    transactions: no message of it came, and none had to, as there was no more
    room or others may have been in the way, and none can have been declared
    dead.
    """
    def is_idle(point):
        return isinstance(point, Call) and point.name == 'take' and \
            point.answer == [] and not point.buries and \
            (point.args[0] == 0 or point.crowded)

    kept = [point for point in line if not is_idle(point)]
    busy = {point.tx for point in kept if isinstance(point, Call)}
    return [point for point in kept if point.tx in busy]


def mark_twins(calls):
    """An append may be told that it has met another in the middle of it."""
    appends = defaultdict(list)
    for call in calls:
        if call.name == 'append':
            appends[call.args[:2]].append(call)
    for alike in appends.values():
        for call in alike:
            call.twins = call.answer and call.answer[0][0] == 'in_flight' and \
                any(other.asked < call.told and call.asked < other.told
                    for other in alike if other.tx is not call.tx)


def owner(table, row):
    """The subject of a row."""
    if table == 'outbox':
        return table, row['message_key']
    if table in ('action_versions', 'user_actions'):
        return 'actions', (row['user_id'], row['entity_type'],
                           row['entity_id'])
    if table in ('aggregates', 'client_sequences'):
        return 'sequences', row['aggregate']
    return table, row['token'] if table == 'tokens' else \
        (row['scope'], row['key'])


#
# Rounds
#

class Failure(Exception):
    pass


class GaveUp(Failure):
    """The search for an order took too long; that says nothing."""


def keep(lines, rows):
    """Saves a history, to be searched again: test/model/run HISTORY=file."""
    number, name = tempfile.mkstemp('.pickle', 'idempotency-history-')
    with open(number, 'wb') as file:
        pickle.dump((lines, rows), file)
    return name


def search_again(name, too_many):
    """A kept history; needs no server."""
    with open(name, 'rb') as file:
        problem = explain(*pickle.load(file), too_many, float('inf'))
    print(problem or 'There is an order that explains every answer.')
    return problem is None


def in_parallel(callers, work):
    """A thread each; raises the first error that one of them has met."""
    def run(caller):
        try:
            work(caller)
        except Exception as error:
            errors.append(error)

    errors = []
    threads = [threading.Thread(target=run, args=(c,)) for c in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Round:
    """All call for some time, and then all their results are checked."""

    def __init__(self, query, callers, rng):
        self.query, self.callers, self.rng = query, callers, rng

    def run(self, seconds):
        self.query('TRUNCATE effects, events, uses, orders, %s' % ', '.join(
            'idem_' + table for table in COLUMNS))
        until = time.monotonic() + seconds
        killer = threading.Thread(target=self.kill, args=(until,))
        killer.start()
        in_parallel(self.callers, lambda caller: caller.run(until))
        killer.join()
        self.rows = {}
        for table, columns in COLUMNS.items():
            self.rows[table] = {
                (table,) + tuple(row[c] for c in sql.KEYS[table]): row
                for row in (dict(zip(columns, values)) for values in
                            self.query('SELECT %s FROM idem_%s' % (
                                ', '.join(columns), table)))}
        self.calls = [call for caller in self.callers for tx in caller.done
                      for call in tx.calls]
        self.lost = sum(call.answer is None for call in self.calls)
        self.histories = histories(self.callers, self.rows)
        return len(self.calls)

    def kill(self, until):
        connection, cursor = connect()
        while time.monotonic() < until:
            time.sleep(self.rng.random() * 0.02)
            self.rng.choice(self.callers).kill(self.rng, cursor)
        connection.close()

    def check(self, kind):
        """Returns the number of calls that have an order."""
        rows = defaultdict(dict)
        for table in self.rows:
            for key, row in self.rows[table].items():
                rows[owner(table, row)][key] = tuple(row.values())
        count = 0
        for subject in set(self.histories) | set(rows):
            if subject[0] == kind:
                lines = self.histories[subject]
                problem = explain(lines, rows[subject])
                if problem:
                    kept = keep(lines, rows[subject])
                    raise (GaveUp if problem.startswith(GAVE_UP) else Failure)(
                        '%s %s: %s\nkept in %s' % (subject + (problem, kept)))
                count += sum(isinstance(point, Call)
                             for line in lines for point in line)
        return count

    def check_numbers(self):
        """
        By the times of the calls that returned numbers, whether or not their
        transactions committed.
        """
        tokens, ids, raises = [], [], 0
        for call in self.calls:
            if not isinstance(call.answer, list):
                continue
            if call.name in ('claim', 'claim_many'):
                tokens += [(call, row[1], row[1]) for row in call.answer
                           if row[0] == 'new']
            elif call.name == 'publish' and call.told:
                ids.append((call, call.answer[0][1], call.answer[0][1]))
            elif call.name == 'raise_tokens':
                raises += 1
                last, = call.answer[0]
                if last < call.args[0]:
                    raise Failure('not raised: %s' % call)
                # It draws none of its own.
                tokens.append((call, last, last + 1))
        for drawn in tokens, ids:
            check_ascent(drawn)
        return raises

    def check_together(self):
        for what, text in TOGETHER.items():
            apart = self.query(text)
            if apart:
                raise Failure('%s: %s' % (what, apart[:5]))
        return sum(len(rows) for rows in self.rows.values())


def check_ascent(drawn):
    """
    "drawn" has calls, each with the highest number that was drawn until the
    call returned, as it says, and the lowest that could be drawn then.
    """
    told = iter(sorted(drawn, key=lambda one: one[0].told))
    before, highest, earlier = next(told, None), 0, None
    for call, _, lowest in sorted(drawn, key=lambda one: one[0].asked):
        while before and before[0].told < call.asked:
            if before[1] > highest:
                highest, earlier = before[1], before[0]
            before = next(told, None)
        if lowest <= highest:
            raise Failure('%s\nwas told before\n%s' % (earlier, call))
    numbers = [number for call, number, _ in drawn
               if call.name != 'raise_tokens']
    if len(numbers) != len(set(numbers)):
        raise Failure('a number was given twice')


def check_progress(query):
    for gid, in query('SELECT gid FROM pg_prepared_xacts '
                      'WHERE database = current_database()'):
        query("ROLLBACK PREPARED '%s'" % gid)
    query("SELECT idem_publish('due', to_jsonb(i), 'key ' || i) "
          "FROM generate_series(1, 10) AS i")
    stuck = progress.stuck(query, hostile=True)
    if stuck:
        raise Failure('never taken: %s' % stuck[:5])
    return 1


def storms(callers, query, seconds):
    """each abandoned lease has one successor, with any number of concurrent claims"""
    until, rounds = time.monotonic() + seconds, 0
    while rounds == 0 or time.monotonic() < until:
        first, rounds = rounds * STORM_KEYS, rounds + 1
        query("SELECT count(*) FROM generate_series(%d, %d) n, idem_claim("
              "'storm', 'dead-lease-' || 10000000 + n, lease => '0 s')"
              % (first, first + STORM_KEYS - 1))
        in_parallel(callers, lambda caller: caller.execute(
            'CALL storm(%d, %d)' % (first, STORM_KEYS)))
    wrong = query("SELECT key, array_agg(w.claim_token), k.claim_token "
                  "FROM idem_keys k LEFT JOIN winners w USING (key) "
                  "WHERE scope = 'storm' GROUP BY key, k.claim_token HAVING "
                  "array_agg(w.claim_token) <> ARRAY[k.claim_token]")
    if wrong:
        raise Failure('winners and holder: %s' % wrong[:3])
    return rounds * STORM_KEYS


def connect():
    connection = psycopg2.connect('', options='-c timezone=UTC')
    connection.autocommit = True
    return connection, connection.cursor()


def run(seed, seconds):
    """Make histories for so long, check them, and print TAP."""
    connection, cursor = connect()
    cursor.execute(SCHEMA)

    def query(text):
        cursor.execute(text)
        return cursor.fetchall() if cursor.description else []

    def attempt(what, work):
        try:
            counts[what] += work()
        except GaveUp as failure:
            # Another round will tell, but for two, and one in fifty.
            counts['gave up'] += 1
            print('# %s' % str(failure).split('\n')[0], flush=True)
            if counts['gave up'] > 2 + counts['rounds'] // 50:
                failures[what] = failure
        except Failure as failure:
            failures[what] = failure
        except Exception:
            failures[what] = traceback.format_exc()

    callers = [Caller('%d/%d' % (seed, n), str(n)) for n in range(THREADS)]
    counts, failures = Counter(), {}
    began = told = time.monotonic()
    while not failures and (time.monotonic() < began + seconds or not all(
            counts[what] for what in (*KINDS.values(), NUMBERS))):
        this = Round(query, callers, random.Random('%d/%d' % (
            seed, counts['rounds'])))
        attempt(CALLS, lambda: this.run(min(seconds, ROUND)))
        if failures:
            break
        counts['rounds'] += 1
        counts['lost'] += this.lost
        for kind, what in KINDS.items():
            attempt(what, lambda: this.check(kind))
        attempt(NUMBERS, this.check_numbers)
        attempt(RECORDS, this.check_together)
        if time.monotonic() > told + 30:
            told = time.monotonic()
            print('# %d s, %d rounds, %d calls' % (
                told - began, counts['rounds'], counts[CALLS]), flush=True)
    for caller in callers:
        caller.connect()
    attempt(PROGRESS, lambda: check_progress(query))
    attempt(storms.__doc__, lambda: storms(callers, query, seconds / 4))
    for number, what in enumerate([CALLS, *KINDS.values(), NUMBERS, RECORDS,
                                   PROGRESS, storms.__doc__], 2):
        if what not in failures and counts[what] == 0:
            failures[what] = 'nothing was checked'
        print('%sok %d - %s (%d checked)%s' % (
            'not ' if what in failures else '', number, what, counts[what],
            '\n# ' + str(failures[what]).replace('\n', '\n# ')
            if what in failures else ''))
    print('# %d rounds of %d threads, %d calls lost, %d histories too long '
          'to search' % (counts['rounds'], THREADS, counts['lost'],
                         counts['gave up']), flush=True)
    return not failures
