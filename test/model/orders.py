"""
Is there an order of the calls that explains all results?

The results of concurrent sessions for one key are a history of points.  Each
point happened at one moment, between two readings of the client's clock,
"asked" and "told".  Points of a session keep their order, and so do two points
if one has "told" before the other has "asked".  Among the remaining orders, the
search looks for one in which the reference model (primitives.py) gives every
result, and has the existing rows at the end.  It searches depth first, and
visits no state twice.  So that states can be equal, a
state is stored without the parts that no later point can see (Possible.frozen).
A point that changes nothing, whenever it happens, is taken as soon as it is
possible and tried no later: an order in which it comes later stays valid if
the point is moved to the place where it is first possible.

Where a session does not know what happened, because its connection broke or
its call was cancelled, the search tries both.
"""

import time
from bisect import bisect_left

from primitives import COLUMNS, Model, is_row, matches
from store import Moment, Refused, Time, Token, Transaction

TOO_MANY = 300000               # places, after which the search gives up
TOO_LONG = 30                   # seconds of the processor, likewise
GAVE_UP = 'gave up'             # how it says so


class Transacted:
    """A transaction of the client: its calls, and how it ended."""

    def __init__(self, number, level):
        self.number, self.level = number, level
        self.calls, self.first, self.end = [], None, None


class Point:

    is_last = False             # of the transaction's calls

    def changes(self, state):
        """May it change anything, in this state or a later one?"""
        return True

    def __init__(self, tx, asked, told=None):
        self.tx, self.asked, self.told = tx, asked, told

    def times(self, origin):
        return '%7d..%7d us, %s (%s)' % (
            self.asked - origin, self.told - origin, self.tx.number,
            self.tx.level)


class Snapshot(Point):
    """The first statement, where that fixes what the others see."""

    def happen(self, model):
        model.begin_statement(model.transaction(self.tx))
        return True

    def __str__(self):
        return 'snapshot'


class End(Point):
    """COMMIT or ROLLBACK; "committed" is None where nobody knows."""

    committed = None

    def happen(self, model):
        committed = self.committed
        if committed is None:
            committed = model.chance()
        model.end(self.tx, committed)
        return True

    def changes(self, state):
        return any(number == self.tx.number and writes
                   for number, _, _, writes, _, _ in state[2])

    def __str__(self):
        return {True: 'committed', False: 'rolled back',
                None: 'committed or not'}[self.committed]


READS = 'lookup', 'is_active', 'states', 'last_client_seq'


class Call(Point):
    """"answer": rows; an SQLSTATE that is an answer; None if it is lost."""

    answer = None
    twins = False               # others appended for this client meanwhile
    crowded = False             # or took, or wrote to messages of this lane
    buries = True               # may a take find a last lease that ran out?

    def __init__(self, tx, asked, name, args):
        super().__init__(tx, asked)
        self.name, self.args = name, args

    def changes(self, state):
        return self.name not in READS and not (
            self.name == 'take' and self.answer == [] and not self.buries)

    def happen(self, model):
        if self.answer is None and not model.chance():
            return True
        tx = model.transaction(self.tx)
        model.begin_statement(tx)
        model.now, model.until = self.asked, self.told
        model.twins, model.crowded = self.twins, self.crowded
        try:
            generator = getattr(model, self.name)(tx, *self.args)
            wait = generator.send(None)
            while wait:
                # It got no result while it waited; or it has waited without
                # result.
                if wait.limit is None or \
                        self.told - self.asked < wait.limit:
                    return False
                wait = generator.send(False)
        except StopIteration as end:
            expected = end.value
        except Refused as refused:
            expected = refused.sqlstate
        model.told(self.told)
        if self.answer is None:
            return not isinstance(expected, str)
        if callable(expected):
            problem = expected(self.answer, lambda ident: model.chance())
            model.told(self.told)
            return problem is None
        if isinstance(expected, (str, list)) or isinstance(self.answer, str):
            return expected == self.answer
        if len(self.answer) != 1 or not matches(expected, self.answer[0]):
            return False
        if self.name == 'claim' and expected[0] == 'new':
            tx.token = self.answer[0][1]
            model.last_token = max(model.last_token, tx.token)
        return True

    def __str__(self):
        return '%s%s: %s' % (self.name, self.args, self.answer)


class Shared(tuple):
    """What stands for a time or a token: the number of what it shares."""


class Possible(Model):
    """The model after some of the points, as it may have been."""

    def __init__(self):
        super().__init__()
        self.open = {}          # number -> transaction
        self.token = 0          # the highest of a claim that was committed
        self.until = 0          # when the call was told, at the latest
        self.acked = frozenset()    # messages
        self.twins = False      # may the call have met one?
        self.crowded = False    # may others have been in a take's way?
        self.past = set()       # times, to the call

    def twin_at(self, key):
        return self.twins and self.chance()

    def may_pass(self, tx, message):
        return self.crowded

    def stands_behind(self):
        return self.chance()

    def check_signpost(self, tx, row):
        """Whether a call has waited for a take is not asked here."""

    def transaction(self, tx):
        if tx.number not in self.open:
            self.open[tx.number] = Transaction(str(tx.number), tx.level)
            self.open[tx.number].token = 0
        return self.open[tx.number]

    def token_before(self, tx):
        """A claim that is rolled back has never been."""
        return max(self.token, tx.token)

    def end(self, tx, committed):
        tx = self.open.pop(tx.number, None)
        if tx:
            (self.commit if committed else self.rollback)(tx)
            self.token = max(self.token, tx.token * committed)

    def frozen(self):
        """
        The state as a plain value, the same for all states that no later
        point can tell apart: without the order in which things came to be,
        versions that no snapshot can see, the numbers of commits but for what
        snapshots see of them, transactions that have written nothing and see
        what all see, and messages that are done with.
        """
        numbers, shared = {}, []        # of moments and tokens

        def number(thing, *value):
            if id(thing) not in numbers:
                numbers[id(thing)] = len(shared)
                shared.append(value)
            return numbers[id(thing)]

        def plain(value):
            if type(value) is Time:
                moment = value.moment
                return Shared((number(moment, moment.low, moment.high),
                               value.after, value.at_most))
            if type(value) is Token:
                return Shared((number(value, value.value or -value.above),))
            return value

        def row_of(key, row):
            return row and tuple([plain(row[c]) for c in COLUMNS[key[0]]])

        old = [tx for tx in self.open.values() if tx.level != 'rc']
        snapshots = sorted({tx.snapshot for tx in old})
        acked, versions = set(), []
        for key in sorted(self.versions):
            seen = {bisect_left(snapshots, commit): row
                    for commit, row in self.versions[key]}
            if len(seen) == 1 and key not in self.holders:
                row, = seen.values()
                if row is None:
                    continue
                if key[0] == 'outbox' and row['state'] == 'acked':
                    acked.add(key)
                    continue
            versions.append((key, tuple([(commit, row_of(key, row)) for
                                         commit, row in seen.items()])))
        opened = []
        for name in sorted(self.open):
            tx = self.open[name]
            if tx.writes or tx.level != 'rc':
                writes = tuple([(key, row_of(key, tx.writes[key]))
                                for key in sorted(tx.writes)])
                opened.append((
                    name, tx.level, None if tx.level == 'rc' else
                    bisect_left(snapshots, tx.snapshot), writes, tx.token,
                    frozenset(numbers[id(token)] for token in tx.claims
                              if id(token) in numbers)))
        return (len(snapshots), tuple(versions), tuple(opened), tuple(shared),
                self.acked | acked, self.token, self.last_token)

    @classmethod
    def thaw(cls, state):
        model = cls()
        (model.commits, versions, opened, shared, model.acked, model.token,
         model.last_token) = state
        shared = [Moment(*value) if len(value) == 2 else value[0]
                  for value in shared]
        for place, value in enumerate(shared):
            if type(value) is int:
                shared[place] = Token(max(-value, 0))
                shared[place].value = value if value > 0 else None

        def fresh(value):
            if type(value) is not Shared:
                return value
            return shared[value[0]] if len(value) == 1 else \
                Time(shared[value[0]], *value[1:])

        def row_of(key, row):
            return row and dict(zip(COLUMNS[key[0]], map(fresh, row)))

        for key, rows in versions:
            model.versions[key] = [(commit, row_of(key, row))
                                   for commit, row in rows]
        for name, level, snapshot, writes, token, claims in opened:
            tx = model.open[name] = Transaction(str(name), level)
            tx.snapshot, tx.token = snapshot, token
            tx.claims = {shared[place] for place in claims}
            for key, row in writes:
                model.write(tx, key, row_of(key, row))
        return model

    def told(self, when):
        for moment in self.moments:
            moment.high = when
        self.moments = []

    def chance(self):
        """What nobody knows; see outcomes()."""
        if self.taken == len(self.chances):
            self.chances += False,
        self.taken += 1
        return self.chances[self.taken - 1]

    def is_past(self, time):
        low, high = time.moment.low, time.moment.high or self.until
        if high + time.at_most <= self.now:
            return True
        if low + time.after > self.until:
            return False
        # In one call, time does not go back.
        this = id(time.moment), time.after, time.at_most
        if this not in self.past and self.chance():
            self.past.add(this)
        return this in self.past

    def shows(self, rows):
        """Are these the committed rows?"""
        found = {key: self.latest(key)[1] for key in self.versions}
        found = {key: row for key, row in found.items() if row is not None}
        state = COLUMNS['outbox'].index('state')
        return found.keys() | self.acked == rows.keys() and all(
            is_row(key[0], row, rows[key])
            for key, row in found.items()) and all(
            rows[key][state] == 'acked' for key in self.acked)


class TookLong(Exception):
    pass


def outcomes(state, point, until):
    """The states to which a point can lead, whatever chance decides."""
    untried, found = [()], []
    while untried:
        if time.process_time() > until:
            raise TookLong()
        model = Possible.thaw(state)
        model.chances, model.taken = untried.pop(), 0
        tried = len(model.chances)
        possible = point.happen(model)
        untried += [model.chances[:n] + (True,)
                    for n in range(tried, len(model.chances))]
        if possible:
            if point.is_last and point.tx.number in model.open:
                model.open[point.tx.number].level = 'rc'
            found.append(model.frozen())
    return found


def successors(lines, done, state, until):
    """What can come next: any that no other one precedes."""
    heads = sorted(((line[n].told, place, line[n]) for place, (line, n) in
                    enumerate(zip(lines, done)) if n < len(line)),
                   key=lambda head: head[0])
    heads = [(place, point) for told, place, point in heads
             if point.asked <= heads[0][0]]

    def after(place):
        return done[:place] + (done[place] + 1,) + done[place + 1:]

    for place, point in heads:
        if not point.changes(state) and state in outcomes(
                state, point, until):
            yield after(place), state
            return
    # The one with the earliest result first.
    for place, point in heads:
        for state_after in reversed(outcomes(state, point, until)):
            yield after(place), state_after


def explain(lines, rows, too_many=TOO_MANY, too_long=TOO_LONG):
    """
    Returns None if there is an order, else what to tell.  "lines" has the
    points of each session, "rows" what the tables have in the end.
    """
    until = time.process_time() + too_long
    lines = [line for line in lines if line]
    for line in lines:
        for point, then in zip(line, line[1:]):
            point.is_last = isinstance(then, End)
    end = tuple(map(len, lines))
    furthest = start = (0,) * len(lines), Possible().frozen()
    been, ways = set(), [iter([start])]
    while ways:
        try:
            here = next(ways[-1], None)
        except TookLong:
            break
        if here is None:
            ways.pop()
            continue
        if hash(here) in been:
            continue
        been.add(hash(here))
        done, state = here
        if sum(done) >= sum(furthest[0]):
            furthest = here
        if done == end and Possible.thaw(state).shows(rows):
            return None
        if len(been) > too_many:
            break
        ways.append(successors(lines, done, state, until))
    else:
        return story(lines, *furthest, rows)
    return '%s after %d places\n%s' % (
        GAVE_UP, len(been), story(lines, *furthest, rows))


def story(lines, done, state, rows, context=10):
    """The points around the one that no order explains, and the rows."""
    before = sorted((p for line, n in zip(lines, done) for p in line[:n]),
                    key=lambda p: p.told)
    after = [p for line, n in zip(lines, done) for p in line[n:n + 2]]
    origin = (before + after)[0].asked
    model = Possible.thaw(state)
    return '\n'.join(
        ['%d points have an order; the last of them:' % len(before)] +
        ['  %s: %s' % (p.times(origin), p) for p in before[-context:]] +
        ['which leaves:'] +
        ['  %s: %s' % (key, versions[-1][1]) for key, versions in
         model.versions.items()] +
        ['  written by %s: %s %s' % (tx, key, row)
         for tx in model.open.values() for key, row in tx.writes.items()] +
        (['and then none of these can come:'] +
         ['  %s: %s' % (p.times(origin), p) for p in after] if after else
         ['but there are:'] + ['  %s: %s' % item for item in rows.items()]))
