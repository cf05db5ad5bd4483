"""
Histories: threads that call freely, and what must be true of their answers.

Every call is recorded with the times between which it happened: "asked" and
"told", and "ending" and "ended" around the COMMIT or ROLLBACK that decides
about it.  In between its place is unknown, so one thing came before another
only if the one had ended before the other was asked.  Afterwards the history
of each key, counter, sequence, token and lane is checked for an order that
explains all answers.
"""

import random
import threading
import time
from collections import Counter, defaultdict

import psycopg2

from sql import array, literal

THREADS = 6
RETRY = ('40001', '40P01')      # the transaction did not happen

SCHEMA = '''
CREATE TABLE effects (key text, claim_token bigint);
CREATE TABLE events (aggregate text, version bigint, client_id text,
                     client_seq bigint);
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


class Event:
    """One call: when, of what, with which answer, and how it ended."""

    def __init__(self, kind, subject, **details):
        self.kind, self.subject, self.committed = kind, subject, False
        self.__dict__.update(details)

    def __repr__(self):
        return str(self.__dict__)


class Caller:

    def __init__(self, seed, until):
        self.rng, self.until = random.Random(seed), until
        self.events = []
        self.connection = psycopg2.connect('', options='-c timezone=UTC')
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()

    def run(self):
        kinds = (self.one_transaction, self.two_transactions,
                 self.two_transactions, self.two_transactions, self.advance,
                 self.append, self.once, self.publish, self.relay)
        while time.monotonic() < self.until:
            self.rng.choice(kinds)()

    def execute(self, text):
        self.cursor.execute(text)
        return self.cursor.fetchall() if self.cursor.description else []

    def ask(self, event, text):
        event.asked = time.monotonic_ns()
        event.answer = self.execute(text)
        event.told = time.monotonic_ns()
        return event.answer

    def transact(self, work, abort=0.15, expected=RETRY):
        """Do some work in a transaction; its events end with it."""
        level = self.rng.choice(('READ COMMITTED', 'READ COMMITTED',
                                 'REPEATABLE READ', 'SERIALIZABLE'))
        self.execute('BEGIN ISOLATION LEVEL ' + level)
        end = 'ROLLBACK' if self.rng.random() < abort else 'COMMIT'
        events = []
        ending = None
        try:
            work(events)
            if self.rng.random() < 0.2:
                time.sleep(self.rng.random() * 0.003)
            ending = time.monotonic_ns()
            self.execute(end)
            committed = end == 'COMMIT'
        except psycopg2.Error as error:
            if error.pgcode not in expected:
                raise
            committed = False
            self.execute('ROLLBACK')
        for event in events:
            # After an error nothing was held for sure.
            event.ending = ending or getattr(event, 'told', 0)
            event.ended = time.monotonic_ns()
            event.committed = committed
            if hasattr(event, 'told'):
                self.events.append(event)
        return committed

    def alone(self, event, text):
        """A statement that commits by itself."""
        self.ask(event, text)
        event.ending, event.ended = event.asked, event.told
        event.committed = True
        self.events.append(event)
        return event.answer

    def claim(self, lease, wait):
        key = 'history-%08d' % (int((self.until - time.monotonic()) * 100)
                                + self.rng.randrange(3))
        event = Event('claim', key)
        return event, ("SELECT outcome, claim_token, response_body FROM "
                       "idem_claim('h', '%s', lease => '%d ms', "
                       "wait => '%d ms')" % (key, lease, wait))

    def complete(self, events, key, token):
        body = '%s %d %d' % (key, token, self.rng.randrange(10 ** 9))
        self.execute("INSERT INTO effects VALUES ('%s', %d)" % (key, token))
        event = Event('complete', key, body=body, token=token)
        events.append(event)
        self.ask(event, "SELECT idem_complete('h', '%s', 200, '%s', "
                 "claim_token => %d)" % (key, body, token))
        assert event.answer[0][0] is True

    def one_transaction(self):
        def work(events):
            event, text = self.claim(60000, self.rng.choice((0, 0, 200)))
            events.append(event)
            outcome, token, body = self.ask(event, text)[0]
            if outcome == 'new':
                self.complete(events, event.subject, token)

        self.transact(work)

    def two_transactions(self):
        lease = self.rng.choice((0, 0, 2, 60000, 60000))
        event, text = self.claim(lease, 0)
        outcome, token, body = self.alone(event, text)[0]
        if outcome != 'new':
            return
        if lease:
            time.sleep(self.rng.random() * 0.002)
        chance = self.rng.random()
        ok = False
        # Only a lease that may be over can have been taken over.
        expected = RETRY + ('ID003', 'ID004')
        if lease > 1000:
            event.ending = time.monotonic_ns()
            expected = RETRY
        elif chance < 0.7:
            return
        if self.rng.random() < 0.5:
            ok = self.transact(lambda events: self.complete(
                events, event.subject, token), 0.1, expected)
        if not ok:
            # Give up, if it is still ours; a lease of a minute must not stay.
            name = 'idem_fail' if chance < 0.9 else 'idem_release'
            try:
                self.execute("SELECT %s('h', '%s', claim_token => %d)"
                             % (name, event.subject, token))
            except psycopg2.Error as error:
                if error.pgcode not in expected:
                    raise

    def advance(self):
        """Action ids are drawn from a window that moves with time."""
        entity = self.rng.choice('12')
        base = int((5000 - (self.until - time.monotonic())) * 1000)
        wanted = self.rng.random() < 0.5
        event = Event('advance', entity, wanted=wanted,
                      action_id=base + self.rng.randrange(40))
        text = ("SELECT * FROM idem_set('u', 'e', '%s', 'like', %s, %d)"
                % (entity, literal(wanted), event.action_id))
        if self.rng.random() < 0.5:
            self.alone(event, text)
        else:
            self.transact(lambda events: events.append(event) or
                          self.ask(event, text))

    def append(self):
        aggregate, client = self.rng.choice('ab'), self.rng.choice('12')
        count = self.rng.choice((1, 1, 2))

        def work(events):
            last = self.execute("SELECT idem_last_client_seq('%s', '%s')"
                                % (aggregate, client))[0][0]
            first = max(1, last + self.rng.choice((-1, 1, 1, 1, 2)))
            event = Event('append', (aggregate, client), first=first,
                          count=count)
            events.append(event)
            outcome, last, version = self.ask(
                event, "SELECT * FROM idem_try_append('%s', '%s', %d, %d, "
                "NULL, false, '%d ms')" % (aggregate, client, first, count,
                                           self.rng.choice((0, 0, 50))))[0]
            if outcome == 'appended':
                self.execute(
                    "INSERT INTO events SELECT '%s', %d - n, '%s', %d - n "
                    "FROM generate_series(0, %d) n" % (
                        aggregate, version, client, last, count - 1))

        self.transact(work)

    def once(self):
        now = int(time.monotonic() * 400)
        tokens = ['t%d' % (now + self.rng.randrange(4))
                  for _ in range(self.rng.choice((1, 3)))]

        def work(events):
            asked = time.monotonic_ns()
            first = self.execute("SELECT idem_once('h', %s::text[])"
                                 % array(tokens))
            told = time.monotonic_ns()
            for token in set(tokens):
                events.append(Event('once', token, asked=asked, told=told,
                                    first=(token,) in first))

        self.transact(work)

    def publish(self):
        def work(events):
            for _ in range(self.rng.choice((1, 3))):
                lane = self.rng.choice('12345')
                event = Event('publish', lane)
                events.append(event)
                self.ask(event, "SELECT idem_publish('t', '{}', '%s'), "
                         "currval('idem_outbox_ids')" % lane)
                event.id = event.answer[0][1]

        self.transact(work)

    def relay(self):
        """Take, and then acknowledge some and give back the others."""
        event = Event('take', None)
        rows = self.alone(event, "SELECT id, attempt, message_key FROM "
                          "idem_outbox_take(%d, '1 minute')"
                          % self.rng.choice((1, 3, 100)))
        time.sleep(self.rng.random() * 0.003)
        failed = set()
        for ident, attempt, lane in rows:
            done = lane not in failed and self.rng.random() < 0.9
            if not done:
                failed.add(lane)
            given = Event('ack' if done else 'nack', ident)
            self.alone(given, "SELECT idem_outbox_ack('{%d}')" % ident
                       if done else "SELECT idem_outbox_nack(%d, NULL, "
                       "'0 s', %d)" % (ident, attempt))


def earlier(events, by, of):
    """
    For each event the highest value "by" of those that, committed, had ended
    before it was asked, as pairs; None where there is none.
    """
    ended = sorted((e.ended, by(e)) for e in events
                   if e.committed and by(e) is not None)
    highest, at = None, 0
    for event in sorted(of, key=lambda e: e.asked):
        while at < len(ended) and ended[at][0] < event.asked:
            value = ended[at][1]
            highest = value if highest is None else max(highest, value)
            at += 1
        yield event, highest


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


def storms(callers, query, seconds):
    """dead leases have one heir each, however many go for them at once"""
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
    must(wrong == [], 'winners and holder', *wrong[:3])
    return rounds * STORM_KEYS


class Failure(Exception):
    pass


def must(condition, *why):
    if not condition:
        raise Failure('\n# '.join(str(w) for w in why))


def by_subject(events, *kinds):
    groups = defaultdict(list)
    for event in events:
        if event.kind in kinds:
            groups[event.subject].append(event)
    return groups


def check_keys(events, query):
    """one claimant at a time, tokens grow, a response never changes"""
    effects = Counter(row[0] for row in query('SELECT key FROM effects'))
    for key, history in by_subject(events, 'claim', 'complete').items():
        claims = [e for e in history if e.kind == 'claim']
        new = [e for e in claims if e.answer[0][0] == 'new']
        for event in new:
            event.token = event.answer[0][1]
        must(len(set(e.token for e in new)) == len(new), 'token given twice',
             *new)
        tokens = sorted((e.told, e.token) for e in new)
        for event in new:
            for told, token in tokens:
                must(told >= event.asked or token < event.token,
                     'token does not grow', event, token)
            for other in new:
                # Each is the claimant from "told" to "ending", at least.
                must(other is event or other.told > event.ending or
                     event.told > other.ending or
                     other.told > other.ending or event.told > event.ending,
                     'two claimants at a time', event, other)
        done = [e for e in history if e.kind == 'complete' and e.committed]
        must(len(done) <= 1, 'completed twice', *done)
        must(effects[key] == len(done), '%d effects' % effects[key], *done)
        for event in claims:
            outcome, token, body = event.answer[0]
            if outcome == 'replay':
                must(done and body == done[0].body and
                     (event.told > done[0].ending or
                      done[0].ended == event.ended), 'replay of what?', event)
            if done and event.asked > done[0].ended:
                must(outcome == 'replay', 'claim after the completion', event,
                     *done)
    return len(effects)


def check_actions(events, query):
    """last_action_id never falls, the last intent wins"""
    count = 0
    for entity, history in by_subject(events, 'advance').items():
        count += len(history)
        for event in history:
            event.active, event.last, event.processed = event.answer[0]
        by_id = {e.last: e for e in history if e.processed and e.committed}
        must(len(by_id) == sum(e.processed and e.committed for e in history),
             'an id was processed twice')
        for event, last in earlier(history, lambda e: e.last, history):
            must(event.last >= max(event.action_id, last or 0) and
                 (event.processed == (event.last == event.action_id and
                                      event.action_id > (last or 0))
                  or not event.processed), 'it fell', event, last)
            if not event.processed:
                source = by_id.get(event.last)
                must(source and source.ending < event.told and
                     source.wanted == event.active,
                     'the state of which action?', event, source)
        last = max(by_id)
        must(query("SELECT last_action_id FROM idem_action_versions "
                   "WHERE entity_id = '%s'" % entity) == [(last,)] and
             query("SELECT idem_is_active('u', 'e', '%s', 'like')" % entity)
             == [(by_id[last].wanted,)], 'another intent won', by_id[last])
    return count


def check_sequences(events, query):
    """each event is appended once, in order, and versions have no holes"""
    for key, history in by_subject(events, 'append').items():
        for event in history:
            event.outcome, event.last, event.version = event.answer[0]
        appended = [e for e in history
                    if e.outcome == 'appended' and e.committed]
        for event, last in earlier(appended, lambda e: e.last, history):
            must(event.last >= (last or 0), 'last_client_seq fell', event)
            must(event.outcome != 'appended' or
                 event.first == event.last - event.count + 1 > (last or 0),
                 'appended twice', event, last)
        for event in history:
            must(event.outcome != 'duplicate' or any(
                e.last >= event.first + event.count - 1 and
                e.ending < event.told for e in appended),
                'a duplicate of what?', event)
    for aggregate, version in query('SELECT aggregate, version '
                                    'FROM idem_aggregates'):
        must(query("SELECT version FROM events WHERE aggregate = '%s' "
                   "ORDER BY version" % aggregate) ==
             [(n + 1,) for n in range(version)], 'versions of ' + aggregate)
    must(query('SELECT 1 FROM events GROUP BY aggregate, client_id '
               'HAVING count(*) <> max(client_seq) OR '
               'count(DISTINCT client_seq) <> count(*)') == [],
         'holes in a sequence')
    return query('SELECT count(*) FROM events')[0][0]


def check_tokens(events, query):
    """a token is new once"""
    groups = by_subject(events, 'once')
    for token, history in groups.items():
        first = [e for e in history if e.first and e.committed]
        must(len(first) <= 1, 'twice the first time', *first)
        for event in history:
            must(event.first or (first and first[0].ending < event.told),
                 'seen where?', event)
            must(not (event.first and first and
                      first[0].ended < event.asked), 'first again', event)
    return len(groups)


def check_outbox(events, query):
    """messages of committed transactions are handed out in order, each once"""
    published = {e.id: e for e in events if e.kind == 'publish'}
    acked = {e.subject: e for e in events if e.kind == 'ack'}
    taken, order = Counter(), defaultdict(list)
    for event in events:
        if event.kind == 'take':
            for ident, attempt, lane in event.answer:
                taken[ident, attempt] += 1
                order[lane].append((ident, event))
                source = published[ident]
                must(source.committed and source.ending < event.told,
                     'a message out of nothing', source, event)
    must(all(n == 1 for n in taken.values()), 'taken twice',
         taken.most_common(3))
    for lane, takes in order.items():
        for ident, event in takes:
            batch = [row[0] for row in event.answer if row[2] == lane]
            must(batch == sorted(batch), 'out of order', event)
            for other, source in published.items():
                if other < ident and source.subject == lane and \
                        other not in batch and source.committed and \
                        source.ended < published[ident].asked:
                    must(other in acked and acked[other].asked < event.told,
                         'overtaken: %d' % other, event)
    rest = dict(query('SELECT id, state FROM idem_outbox'))
    must(set(rest) == {i for i, e in published.items() if e.committed},
         'messages are missing, or too many')
    must({i for i, state in rest.items() if state == 'acked'} == set(acked),
         'acknowledgements are missing, or too many')
    return len(rest)


CHECKS = (check_keys, check_actions, check_sequences, check_tokens,
          check_outbox)


def run(seed, seconds):
    """Make histories for so long, check them, and print TAP."""
    connection = psycopg2.connect('')
    connection.autocommit = True
    cursor = connection.cursor()
    cursor.execute(SCHEMA)

    def query(text):
        cursor.execute(text)
        return cursor.fetchall()

    until = time.monotonic() + seconds
    callers = [Caller('%d/%d' % (seed, n), until) for n in range(THREADS)]
    problem = ''
    try:
        in_parallel(callers, Caller.run)
    except Exception as error:
        problem = '\n# ' + repr(error)
    print('%sok 2 - %d threads make %d calls without an error%s' % (
        'not ' if problem else '', THREADS,
        sum(len(c.events) for c in callers), problem))
    ok = not problem
    events = [event for caller in callers for event in caller.events]
    for number, check in enumerate(CHECKS + (storms,), 3):
        try:
            size = check(callers, query, seconds / 4) if check is storms \
                else check(events, query)
            must(size > 0, 'nothing was checked')
            verdict, detail = 'ok', ' (%d checked)' % size
        except Failure as failure:
            ok, verdict, detail = False, 'not ok', '\n# %s' % failure
        print('%s %d - %s%s' % (verdict, number, check.__doc__, detail),
              flush=True)
    return ok
