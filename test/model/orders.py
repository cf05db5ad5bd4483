"""
Is there an order of what happened that explains all answers?

What concurrent sessions were told about one key is a history of points: each
happened at one moment, known to lie between two readings of the client's
clock, "asked" and "told".  Points of a session keep their order, and so do
two of which one was told before the other was asked.  Among the orders that
are left, the search looks for one in which the reference model (primitives.py)
gives every answer, and has in the end the rows that are there.  It goes depth
first, and to no place twice (Wing and Gong; Lowe).

Most points matter to nobody else, and to try them in all orders would take for
ever.  So two rules leave out orders for which there is another one as good:

- What writes nothing and has its answer already comes now: whatever comes
  after it finds the same as if it came later.
- So does the end of a transaction that has written nothing.

A take that answers with nothing writes nothing as a rule, but may also declare
messages dead.  So where no order is found, the search is made once more, with
the second rule only.

Where a session does not know what happened, because its connection broke or
its call was cancelled, the search tries both.
"""

import pickle
from bisect import bisect

from primitives import COLUMNS, Model, is_row, matches
from store import Refused, Time, Token, Transaction

TOO_MANY = 300000               # places, after which the search gives up


class Transacted:
    """A transaction of the client: its calls, and how it ended."""

    def __init__(self, number, level):
        self.number, self.level = number, level
        self.calls, self.first, self.end = [], None, None


class Point:

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

    def __str__(self):
        return {True: 'committed', False: 'rolled back',
                None: 'committed or not'}[self.committed]


class Call(Point):
    """"answer": rows; an SQLSTATE that is an answer; None if it is lost."""

    answer = None
    twins = False               # others appended for this client meanwhile
    crowded = False             # or took, or wrote to messages of this lane

    def __init__(self, tx, asked, name, args):
        super().__init__(tx, asked)
        self.name, self.args = name, args

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
                # It was not told while it waited; or it has waited in vain.
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


class Possible(Model):
    """The model after some of the points, as it may have been."""

    def __init__(self):
        super().__init__()
        self.open = {}          # number -> transaction
        self.token = 0          # the highest of a claim that was committed
        self.until = 0          # when the call was told, at the latest
        self.acked = set()      # messages
        self.twins = False      # may the call have met one?
        self.crowded = False

    def twin_at(self, key):
        return self.twins and self.chance()

    def may_pass(self, tx, message, taken):
        return self.crowded

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
        # Forget what no snapshot can see, and messages that are done with.
        oldest = min((tx.snapshot for tx in self.open.values()
                      if tx.level != 'rc'), default=self.commits)
        for key, versions in list(self.versions.items()):
            while len(versions) > 1 and versions[1][0] <= oldest:
                del versions[0]
            if key[0] == 'outbox' and versions[0][1]['state'] == 'acked' \
                    and key not in self.holders:
                self.acked.add(key)
                del self.versions[key]

    def told(self, when):
        for moment in self.moments:
            moment.high = when
        self.moments, self.takers = [], []

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
        return self.chance()

    def has_written(self, tx):
        return tx.number in self.open and bool(self.open[tx.number].writes)

    def essence(self):
        """
        All that answers depend on: two that are equal have the same future.  Commits are counted from the first one
        that any row or snapshot is from.
        """
        numbers = sorted({number for versions in self.versions.values()
                          for number, row in versions})
        moments = {}

        def plain(value):
            if isinstance(value, Time):
                moment = value.moment
                return (moments.setdefault(id(moment), len(moments)),
                        moment.low, moment.high, value.after, value.at_most)
            if isinstance(value, Token):
                return value.above, value.value
            return value

        def rows(found):
            return [(key, row and [plain(row[c]) for c in COLUMNS[key[0]]])
                    for key, row in sorted(found.items(), key=repr)]

        state = [
            [(bisect(numbers, number), rows({key: row}))
             for key, versions in sorted(self.versions.items(), key=repr)
             for number, row in versions],
            [(number, tx.level != 'rc' and bisect(numbers, tx.snapshot),
              sorted(tx.claims),
              tx.token, tx.failed, rows(tx.writes))
             for number, tx in sorted(self.open.items())
             if tx.writes or tx.level != 'rc'],
            self.token, self.last_token, sorted(self.acked)]
        return repr(state)

    def shows(self, rows):
        """Are these the committed rows?"""
        found = {key: self.latest(key)[1] for key in self.versions}
        found = {key: row for key, row in found.items() if row is not None}
        state = COLUMNS['outbox'].index('state')
        return found.keys() | self.acked == rows.keys() and all(
            is_row(key[0], row, rows[key])
            for key, row in found.items()) and all(
            rows[key][state] == 'acked' for key in self.acked)


def outcomes(state, point):
    """
    The states to which a point can lead, whatever chance decides, each with
    its essence.
    """
    untried = [()]
    while untried:
        model = pickle.loads(state)
        model.chances, model.taken = untried.pop(), 0
        tried = len(model.chances)
        possible = point.happen(model)
        untried += [model.chances[:n] + (True,)
                    for n in range(tried, len(model.chances))]
        if possible:
            del model.chances, model.taken
            yield model.essence(), pickle.dumps(model, -1)


def explain(lines, rows):
    """
    Returns None if there is an order, else what to tell.  "lines" has the
    points of each session, "rows" what the tables have in the end.
    """
    lines = [line for line in lines if line]
    return search(lines, rows, True) and search(lines, rows, False)


def search(lines, rows, hasty):
    """Likewise; "hasty": by the first rule, too."""
    start = (0,) * len(lines), pickle.dumps(Possible(), -1)
    furthest, places, been = start, [start], set()
    while places:
        done, state = here = places.pop()
        heads = [(line[n].told, place, line[n]) for place, (line, n) in
                 enumerate(zip(lines, done)) if n < len(line)]
        if sum(done) >= sum(furthest[0]):
            furthest = here
        model = pickle.loads(state)
        if not heads and model.shows(rows):
            return None
        # Any that no other one precedes; the one that was told first, first.
        until = min(heads)[0] if heads else 0
        heads = sorted((h for h in heads if h[2].asked <= until),
                       key=lambda h: -h[0])
        now, ways = model.essence(), []
        for told, place, point in heads:
            after = done[:place] + (done[place] + 1,) + done[place + 1:]
            found = [(after, *way) for way in outcomes(state, point)]
            if isinstance(point, End):
                same = found if not model.has_written(point.tx) else []
            else:
                same = hasty and isinstance(point, Call) and \
                    point.answer is not None and \
                    [way for way in found if way[1] == now]
            if same:
                ways = same[:1]
                break
            ways += found
        for after, essence, state_after in ways:
            there = hash((after, essence))
            if there not in been:
                been.add(there)
                places.append((after, state_after))
        if len(been) > TOO_MANY:
            return 'gave up after %d places\n%s' % (
                TOO_MANY, story(lines, *furthest, rows))
    return story(lines, *furthest, rows)


def story(lines, done, state, rows, context=10):
    """The points around the one that no order explains, and the rows."""
    before = sorted((p for line, n in zip(lines, done) for p in line[:n]),
                    key=lambda p: p.told)
    after = [p for line, n in zip(lines, done) for p in line[n:n + 2]]
    origin = (before + after)[0].asked
    model = pickle.loads(state)
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
