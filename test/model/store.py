"""
Tables, transactions and time, as far as the model needs them.

A row has its committed versions, numbered by commit, and at most one
transaction that has written it and not ended: its holder.  That is all there
is to PostgreSQL's MVCC when steps are taken one at a time.

Nobody can predict the microsecond at which a call reads the clock.  So a time
in the model is a moment, known to lie between two readings of the client's
clock, plus an interval.  The first answer or row that shows the time pins the
moment down; from then on everything that was computed from it must agree to
the microsecond.
"""

SECOND = 1000000
MARGIN = SECOND * 4 // 10       # a step takes less; all times ahead are later
SLACK = 1000                    # between the two clock readings, microseconds
NONE, PENDING, ROW = 'none', 'pending', 'row'


class ABSENT:
    """No row of the transaction's own; not None, which is a deleted one."""


class Refused(Exception):
    """The call raises an error with this SQLSTATE."""

    def __init__(self, sqlstate):
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


class Ambiguous(Exception):
    """Chance decides what happens next; the episode ends here."""


class Moment:
    """When a call read the clock, in microseconds since 1970."""

    def __init__(self, low, high=None):
        self.low, self.high = low, high

    def meet(self, value):
        if value < self.low - SLACK:
            return False
        if self.high is not None and value > self.high + SLACK:
            return False
        self.low = self.high = value
        return True


class Time:
    """A moment plus an interval, which may be known by its bounds only."""

    def __init__(self, moment, after, at_most=None):
        self.moment, self.after = moment, after
        self.at_most = after if at_most is None else at_most

    def meet(self, value):
        if self.after == self.at_most:
            return self.moment.meet(value - self.after)
        high = self.moment.high
        if value < self.moment.low + self.after - SLACK or \
                (high is not None and value > high + self.at_most + SLACK):
            return False
        self.after = self.at_most
        self.moment = Moment(value - self.after, value - self.after)
        return True

    def is_past(self, now):
        """Whether it has come, for a call made now."""
        if self.at_most <= 0:
            return True
        if self.moment.high is not None and \
                self.moment.high + self.at_most <= now:
            return True
        if self.moment.low + self.after > now + MARGIN:
            return False
        raise Ambiguous('a time is too near')

    def is_before(self, other):
        high = self.moment.high
        return high is not None and \
            high + self.at_most < other.moment.low + other.after

    def __repr__(self):
        return 'Time(%s..%s + %s..%s)' % (self.moment.low, self.moment.high,
                                          self.after, self.at_most)


class Token:
    """A claim token, which the answer tells."""

    def __init__(self, above):
        self.above, self.value = above, None

    def meet(self, value):
        if self.value is None and value is not None and value > self.above:
            self.value = value
        return value == self.value

    def __repr__(self):
        return 'Token(%s, above %s)' % (self.value, self.above)


class Level:
    """
    What a savepoint began, or the whole transaction: what a sleeper waits for.
    Once a savepoint is released, who waits for it waits for the transaction,
    as in any UPDATE, even if an outer savepoint is rolled back to.
    """

    def __init__(self):
        self.ended = self.released = False


class Transaction:
    """Between BEGIN, or a single statement, and its end."""

    def __init__(self, name, level='rc', read_only=False):
        self.name, self.level, self.read_only = name, level, read_only
        self.snapshot = None    # number of the last commit that it sees
        self.began = self.ended = None      # when, in statements of all
        self.writes = {}        # key -> row; None: deleted
        self.undo = []          # (key, row before, level of the new one)
        self.level_of_all = Level()
        self.savepoints = []    # (name, length of undo, level)
        self.claims = set()     # tokens of claims taken here
        self.failed = False
        self.has_slept = False  # until another transaction ended

    def __repr__(self):
        return self.name


class Wait:
    """
    What a call yields to sleep until "holder" lets go of a row.  The portable
    edition might give the answer "instead" at once.
    """

    def __init__(self, holder, key, limit=None, instead=None):
        self.holder, self.key, self.limit = holder, key, limit
        self.instead = instead
        self.level = None       # set by Store.sleep()

    def is_over(self):
        return self.holder.level_of_all.ended or \
            (self.level.ended and not self.level.released)


class LeaseWait(Wait):
    """Likewise, until a committed claim ends, which holds no lock."""

    def __init__(self, key, limit):
        super().__init__(None, key, limit)


class LockWait(Wait):
    """Likewise, until "holder" lets go of a lock, which is for calls only."""

    def __init__(self, holder, key, limit, locks):
        super().__init__(holder, key, limit)
        self.locks = locks

    def is_over(self):
        return self.locks.get(self.key) is not self.holder


class Store:
    """All rows; a key is a tuple of the table's name and the primary key."""

    def __init__(self):
        self.versions = {}      # key -> [(number of the commit, row)]
        self.holders = {}       # key -> transaction
        self.commits = 0
        self.statements = 0
        self.now = 0            # the client's clock as the step began

    def latest(self, key):
        versions = self.versions.get(key)
        return versions[-1] if versions else (0, None)

    def is_past(self, time):
        return time.is_past(self.now)

    def begin_statement(self, tx):
        self.statements += 1
        if tx.began is None:
            tx.began = self.statements
        if tx.snapshot is None or tx.level == 'rc':
            tx.snapshot = self.commits

    def find(self, tx, key):
        """The current row, written by any session: what, the row, its holder."""
        if key in tx.writes:
            row = tx.writes[key]
            return (NONE if row is None else ROW), row, None
        holder = self.holders.get(key)
        number, row = self.latest(key)
        if row is None:
            return (PENDING if holder else NONE), None, holder
        self.check_age(tx, number)
        return ROW, row, holder

    def find_latest(self, tx, key):
        """The newest committed row, or our own: the row, its holder."""
        found, row, holder = self.find(tx, key)
        return row, holder

    def visible(self, tx, key):
        """The row that the statement's snapshot sees."""
        if key in tx.writes:
            return tx.writes[key]
        row = None
        for number, version in self.versions.get(key, ()):
            if number <= tx.snapshot:
                row = version
        return row

    def is_writable(self, tx, key):
        """Can what the snapshot sees be written without waiting?"""
        return key in tx.writes or (key not in self.holders and
                                    self.latest(key)[0] <= tx.snapshot)

    def check_age(self, tx, number):
        if tx.level != 'rc' and number > tx.snapshot:
            raise Refused('40001')

    def write(self, tx, key, row):
        assert self.holders.get(key, tx) is tx
        level = tx.savepoints[-1][2] if tx.savepoints else tx.level_of_all
        tx.undo.append((key, tx.writes.get(key, ABSENT), level))
        tx.writes[key] = row
        self.holders[key] = tx

    def undo(self, tx, length):
        while len(tx.undo) > length:
            key, before, level = tx.undo.pop()
            if before is ABSENT:
                del tx.writes[key]
                del self.holders[key]
            else:
                tx.writes[key] = before

    def sleep(self, wait):
        """
        A sleeper waits for the writer of the version that it has found: of
        the first one after a committed row, and of the first one of a new
        row, since it looks at the newest first and the last one counts.
        """
        if isinstance(wait, LockWait):
            return
        wait.level = next(level for key, before, level in wait.holder.undo
                          if key == wait.key)

    def savepoint(self, tx, name):
        tx.savepoints.append((name, len(tx.undo), Level()))

    def rollback_to(self, tx, place):
        name, length, level = tx.savepoints[place]
        for _, _, inner in tx.savepoints[place:]:
            inner.ended = True
        del tx.savepoints[place:]
        self.undo(tx, length)
        self.savepoint(tx, name)
        tx.failed = False

    def release_savepoint(self, tx, place=0):
        for _, _, level in tx.savepoints[place:]:
            level.released = True
        del tx.savepoints[place:]

    def fail(self, tx):
        """An error: the innermost savepoint's work is undone at once."""
        tx.failed = True
        if tx.savepoints:
            self.undo(tx, tx.savepoints[-1][1])
            tx.savepoints[-1][2].ended = True
        else:
            self.rollback(tx)

    def rollback(self, tx):
        self.undo(tx, 0)
        tx.level_of_all.ended = True

    def commit(self, tx):
        tx.level_of_all.ended = True
        tx.ended = self.statements
        if tx.writes:
            self.commits += 1
        for key, row in tx.writes.items():
            if row is not None or key in self.versions:
                self.versions.setdefault(key, []).append((self.commits, row))
            del self.holders[key]

    def set_row(self, key, row):
        """The administrator's UPDATE."""
        self.commits += 1
        self.versions[key].append((self.commits, row))

    def table(self, name):
        """The committed rows of a table, by key."""
        rows = ((key, self.latest(key)[1]) for key in self.versions
                if key[0] == name)
        return {key: row for key, row in rows if row is not None}
