"""
Histories of calls through the router: see test/model/histories.py.

Each call is a transaction of its own on its shard; the order that explains the
answers is looked for in the same way.  Meanwhile shards crash and come back,
and scopes and slots are moved.
"""

import os
import sys
import threading
import time
from collections import defaultdict

import psycopg2

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                '..', 'model'))

import histories                                            # noqa: E402
import sql                                                  # noqa: E402
from orders import GAVE_UP, Call, explain                   # noqa: E402
from primitives import COLUMNS                              # noqa: E402

# Nothing was done: it is being moved, or was looked for in the wrong place.
REFUSED = ('55P03', '55000')
# The shard is gone, as PL/Proxy, the shard itself and PgBouncer say it.
UNKNOWN = ('XX000', '57P01', '57P02', '57P03', '08P01', '08006')
NAMES = [str(n) for n in range(6)]


class Caller(histories.Caller):

    def __init__(self, seed, name):
        self.refused = self.unknown = 0
        super().__init__(seed, name)

    def connect(self):
        self.connection = psycopg2.connect('dbname=router user=web')
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()
        self.killed = False

    def run(self, until):
        self.until, self.done, self.tx = until, [], None
        kinds = (self.job, self.job, self.job, self.jobs, self.look,
                 self.act_once, self.act_on_many, self.append_some,
                 self.use_some)
        while time.monotonic() < until:
            self.rng.choice(kinds)()

    def statement(self, text):
        try:
            return self.execute(text)
        except psycopg2.Error as error:
            if error.pgcode in histories.ANSWERS:
                return error.pgcode
            if error.pgcode in REFUSED:
                self.refused += 1
                time.sleep(0.005)
                return '57014'
            if error.pgcode not in UNKNOWN:
                raise
            self.unknown += 1
            time.sleep(0.02)
            return '57P01'

    def call(self, name, *args):
        rows = super().call(name, *args)
        return rows or []

    def key(self):
        return 'h' + self.rng.choice(NAMES), \
            'history-key-%d' % self.tick(20, 2)

    def job(self):
        key = self.key()
        lease = self.rng.choice((0, 0, 2000, 60000000, 60000000))
        outcome, token = self.claim(key, lease,
                                    self.rng.choice((0, 0, 20000)))
        if outcome != 'new':
            return
        if self.rng.random() < 0.3:
            self.call('heartbeat', key, lease, token)
        if self.rng.random() < 0.3:
            self.call('checkpoint', key, 'half', '{"n": 1}', lease, token)
        for _ in range(self.rng.choice((1, 1, 2))):
            body = 'response %d' % self.rng.randrange(10 ** 9)
            self.call(*self.rng.choice((
                ('complete', key, 200, body, None, token),
                ('complete', key, 200, body.encode(), None, token),
                ('fail_claim', key, 'no', token), ('release', key, token))))

    def jobs(self):
        scope = self.key()[0]
        keys = [self.key()[1] for _ in range(self.rng.choice((1, 3)))]
        rows = self.call('claim_many', scope, keys, [None] * len(keys), None,
                         60000000)
        claims = [(key, row[1]) for key, row in zip(keys, rows)
                  if row[0] == 'new']
        if claims:
            self.call('complete_many', scope, [key for key, _ in claims],
                      [200] * len(claims), ['done'] * len(claims),
                      [token for _, token in claims])

    def look(self):
        self.call('lookup', self.key())

    def entity(self):
        return 'h' + self.rng.choice(NAMES), 'e', '1'

    def act_once(self):
        entity, action_id = self.entity(), self.tick(1000, 40)
        kind = self.rng.random()
        if kind < 0.1:
            self.call('is_active', entity, 'like')
        elif kind < 0.2:
            self.call('advance', entity, action_id)
        else:
            wanted = self.rng.choice((True, False, None))
            action_type, other = self.rng.sample(('like', 'dislike'), 2)
            self.call('act', entity, action_type, wanted, action_id,
                      self.rng.choice((None, [other])) if wanted else None)

    def act_on_many(self):
        # Of one user: after an error the parts of other shards may still run.
        n, user = self.rng.choice((1, 3)), self.entity()[0]
        entities = [(user, 'e', self.rng.choice('12')) for _ in range(n)]
        self.call('set_many', entities,
                  [self.rng.choice(('like', 'dislike')) for _ in entities],
                  [self.rng.random() < 0.6 for _ in entities],
                  [self.tick(1000, 40) for _ in entities])

    def append_some(self):
        aggregate, client = 'h' + self.rng.choice(NAMES), self.rng.choice('12')
        count = self.rng.choice((1, 1, 2))
        last = self.call('last_client_seq', aggregate, client)
        if last:
            first = max(1, last[0][0] + self.rng.choice((-1, 0, 1, 1, 1, 2)))
            self.call('append', aggregate, client, first, count, None, False,
                      self.rng.choice((0, 0, 20000)))

    def use_some(self):
        scope = 'h' + self.rng.choice(NAMES)
        tokens = ['%s-%d' % (scope, self.tick(100, 4))
                  for _ in range(self.rng.choice((1, 3)))]
        if len(tokens) == 1:
            self.call('once', scope, tokens[0], None)
        else:
            self.call('once_many', scope, tokens, None)


def rows_of(servers):
    """The shards' rows, by their table and key; none is on two of them."""
    rows = {table: {} for table in COLUMNS}
    for shard in servers.shards:
        session = shard.session()
        for table, columns in COLUMNS.items():
            for values in session.run('SELECT %s FROM idem_%s' % (
                    ', '.join(columns), table)):
                row = dict(zip(columns, values))
                key = (table,) + tuple(row[c] for c in sql.KEYS[table])
                if key in rows[table]:
                    raise histories.Failure('%s is on two shards' % (key,))
                rows[table][key] = row
        session.close()
    return rows


def check(callers, rows):
    """Returns how many calls have an order, of each kind."""
    found = histories.histories(callers, rows)
    mine = defaultdict(dict)
    for table in rows:
        for key, row in rows[table].items():
            mine[histories.owner(table, row)][key] = tuple(row.values())
    counts = defaultdict(int)
    for subject in set(found) | set(mine):
        lines = found[subject]
        problem = explain(lines, mine[subject])
        if problem and problem.startswith(GAVE_UP):
            counts['gave up'] += 1
        elif problem:
            raise histories.Failure('%s %s: %s\nkept in %s' % (
                *subject, problem, histories.keep(lines, mine[subject])))
        counts[subject[0]] += sum(
            isinstance(point, Call) for line in lines for point in line)
    return counts


class Trouble:
    """Crashes and moves, one of each at a time, until it is over."""

    def __init__(self, servers, rng, scopes):
        self.servers, self.rng, self.scopes = servers, rng, scopes
        self.crashes = self.moves = self.cut_off = 0
        self.errors = []

    def run(self, until, work):
        threads = [threading.Thread(target=self.guard, args=(part, until))
                   for part in (self.crash, self.move)]
        for thread in threads:
            thread.start()
        try:
            work()
        finally:
            for thread in threads:
                thread.join()
        if self.errors:
            raise self.errors[0]

    def guard(self, part, until):
        try:
            part(until)
        except Exception as error:
            self.errors.append(error)

    def crash(self, until):
        while time.monotonic() < until - 0.5:
            time.sleep(self.rng.uniform(0.2, 1))
            shard = self.rng.choice(self.servers.shards)
            shard.kill()
            time.sleep(self.rng.uniform(0, 0.3))
            shard.start()
            self.crashes += 1

    def move(self, until):
        while time.monotonic() < until or not self.moves:
            if self.rng.random() < 0.7:
                what = ['dbname=router', self.rng.choice(self.scopes)]
            else:
                session = self.servers.router('postgres')
                what = ['--slot', 'dbname=router', session.one(
                    'SELECT idem_map.slot(%s)', self.rng.choice(self.scopes))]
                session.close()
            self.move_one(what)

    def move_one(self, what):
        """Until it has come to an end: with crashes, and one of its own."""
        to, back = self.rng.randrange(len(self.servers.shards)), []
        if self.rng.random() < 0.5:
            what = ['--shards', self.servers.direct, *what]
        until = time.monotonic() + 180
        while True:
            process = self.servers.start_move(*what, *(back or [to]))
            if self.rng.random() < 0.4:
                time.sleep(self.rng.uniform(0.05, 0.4))
                process.kill()
                self.cut_off += 1
            output, _ = process.communicate()
            if process.returncode == 0:
                self.moves += not back
                return
            if time.monotonic() > until:
                raise histories.Failure('a move does not end: ' + output)
            if self.rng.random() < 0.3:
                back = ['--back']
            elif back and self.rng.random() < 0.5:
                back = []
