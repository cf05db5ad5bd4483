"""
One step at a time, in the model and on the server, compared.

A step is a tuple of plain values, so that a list of them can be printed,
replayed and shortened.  It names claim tokens and messages by what they are
("the current one", "the third published") rather than by number.  A step that
makes no sense as things stand is left out: apply() returns False.

Each session has an asynchronous connection.  Where the model says that a call
sleeps, the server must say so too, and whom it waits for; the answer is read
in the step that ends the wait.  At most one call waits for any transaction:
the order in which several would wake up is the server's choice.
"""

import select
import os
import time
from datetime import datetime, timedelta, timezone

import psycopg2
import psycopg2.extensions as ext

import progress
import sql
from primitives import COLUMNS, Model, is_row, matches
from store import (MARGIN, SECOND, Ambiguous, LeaseWait, Moment, Refused,
                   Time, Transaction)

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MICROSECOND = timedelta(microseconds=1)
PATIENCE = 30                   # seconds; then a call counts as hanging
LIMIT_MS = 4                    # of a wait that is meant to time out


IS_PORTABLE = os.environ.get('EDITION') == 'portable'
READERS = ('lookup', 'is_active', 'last_client_seq', 'action_states',
           'once_at')
ANSWERS = ('ack', 'nack', 'extend', 'give_back', 'requeue')
UNCHANGED = (None, False, 0, 'replay', 'erased', 'in_progress',
             'hash_conflict', 'expired', 'duplicate', 'overlap', 'gap',
             'in_flight', 'version_conflict', 'lost')


class Difference(Exception):
    """The server does not do what the model does."""


def microseconds(value, cursor):
    if value is None:
        return None
    return (datetime.fromisoformat(value) - EPOCH) // MICROSECOND


def as_bytes(value, cursor):
    return None if value is None else bytes.fromhex(value[2:])


for oids, name, cast in (((1184,), 'MICROSECONDS', microseconds),
                         ((17,), 'BYTES', as_bytes),
                         ((114, 3802, 2950), 'AS_TEXT', lambda v, c: v)):
    ext.register_type(ext.new_type(oids, name, cast))


class Session:
    """A connection, and the transaction that it is in."""

    def __init__(self, name):
        self.name, self.tx, self.blocked = name, None, None
        self.connect()

    def connect(self):
        self.connection = psycopg2.connect(
            '', application_name='model ' + self.name, async_=1, options=(
                '-c timezone=UTC -c deadlock_timeout=1h '
                '-c idempotency.outbox_max_attempts=3 '
                '-c idempotency.max_attempts=4 '
                '-c idempotency.max_action_id_lead=1h'))
        self.poll(PATIENCE)
        self.cursor = self.connection.cursor()
        self.pid = self.connection.get_backend_pid()

    def poll(self, patience):
        """Returns False if the server is still at it."""
        connection = self.connection
        while True:
            state = connection.poll()
            if state == ext.POLL_OK:
                return True
            wanted = ([connection], []) if state == ext.POLL_READ \
                else ([], [connection])
            if not any(select.select(*wanted, [], patience)):
                return False

    def send(self, text):
        self.cursor.execute(text)

    def receive(self, patience=PATIENCE):
        """Rows; or an SQLSTATE; or None: nothing yet."""
        try:
            if not self.poll(patience):
                return None
            if self.cursor.description is None:
                return []
            return self.cursor.fetchall()
        except psycopg2.Error as error:
            self.error = str(error)
            return error.pgcode or 'lost'

    def run(self, text):
        self.send(text)
        return self.receive()


class Blocked:
    """A call that sleeps: its generator, what it waits for, since when."""

    def __init__(self, call, wait):
        self.call, self.wait, self.since = call, wait, time.monotonic()


class Call:
    """A call of a function, under way in the model."""

    def __init__(self, session, tx, generator, text, name, args):
        self.session, self.tx, self.text = session, tx, text
        self.generator, self.name, self.args = generator, name, args
        self.moments, self.mark = [], len(tx.undo)
        self.expected = self.instead = None


class World:

    def __init__(self, count=4):
        self.sessions = [Session('s%d' % i) for i in range(count)]
        self.admin = Session('admin')
        self.settings = None
        self.stats = {}
        self.reset()

    #
    # Episodes
    #

    def reset(self, settings=('reuse', 0, 'week')):
        """An empty database, a new model, and settings for the episode."""
        self.model = Model()
        self.prepared = {}
        self.has_forgotten = False      # a user
        self.messages = []      # ids, in order of publishing
        self.tokens = {}        # key -> tokens, ascending
        self.aged = 0
        self.model.last_token, self.model.last_id = self.drawn()
        policy, tombstones, retention = settings
        self.model.policy, self.model.tombstones = policy, tombstones
        if retention == 'none':
            self.model.retention = 0
        for session in self.sessions:
            session.tx = session.blocked = None
            if settings != self.settings:
                for text in sql.settings(settings):
                    self.check(session.run(text))
        self.settings = settings

    def drawn(self):
        """The last claim token and the last message's id."""
        return self.check(self.admin.run(
            'SELECT t.last_value - (NOT t.is_called)::int, '
            'i.last_value - (NOT i.is_called)::int '
            'FROM idem_claim_tokens AS t, idem_outbox_ids AS i'))[0]

    def start_over(self):
        """After a failure, whatever state things are in."""
        self.settings = None
        for session in self.sessions + [self.admin]:
            session.connection.close()
        self.admin = Session('admin')
        self.check(self.admin.run(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE application_name LIKE 'model s%' "
            "AND datname = current_database()"))
        for gid, in self.check(self.admin.run(
                'SELECT gid FROM pg_prepared_xacts '
                'WHERE database = current_database()')):
            self.check(self.admin.run("ROLLBACK PREPARED '%s'" % gid))
        self.empty()
        for session in self.sessions:
            session.connect()

    def finish(self):
        """End all transactions, compare, and leave empty tables."""
        ended = True
        while ended:
            ended = False
            for number, session in enumerate(self.sessions):
                if session.tx and not session.blocked:
                    self.apply(('commit', number))
                    ended = True
            for name in list(self.prepared):
                self.apply(('commit prepared', name))
                ended = True
        assert not any(session.blocked for session in self.sessions)
        self.compare()
        self.progress(hostile=True)
        self.empty()

    def empty(self):
        for table in COLUMNS:
            self.check(self.admin.run('DELETE FROM idem_' + table))

    def check(self, answer):
        if not isinstance(answer, list):
            raise RuntimeError('%s: %s' % (answer, self.admin.error))
        return answer

    def compare(self):
        """The committed rows are the model's."""
        for table, columns in COLUMNS.items():
            expected = self.model.table(table)
            found = self.check(self.admin.run('SELECT %s FROM idem_%s' % (
                ', '.join(columns), table)))
            rows = {tuple(row[columns.index(c)] for c in sql.KEYS[table]): row
                    for row in found}
            for key in {key[1:] for key in expected} | set(rows):
                wanted = expected.get((table,) + key)
                # A lane may need what is left of a message.
                if table == 'outbox' and wanted is None and \
                        self.model.retention == 0:
                    row = dict(zip(columns, rows[key]))
                    if row['state'] == 'acked' and row['message_key']:
                        continue
                if wanted is None or key not in rows or \
                        not is_row(table, wanted, rows[key]):
                    raise Difference('row of idem_%s\nexpected %s\nfound    %s'
                                     % (table, wanted, rows.get(key)))

    def progress(self, hostile=False):
        """
        If no transaction is open, some takes return all messages that are due
        and not behind others, perhaps beside "hostile" ones.  Takes it back.
        """
        if self.prepared or any(session.tx or session.blocked
                                for session in self.sessions):
            return
        stuck = progress.stuck(
            lambda text: self.check(self.admin.run(text)), hostile)
        if stuck:
            raise Difference('never taken: %s' % stuck)
        self.count('progress')

    #
    # Steps
    #

    def apply(self, step):
        """Returns False if the step makes no sense now."""
        self.model.now = time.time_ns() // 1000
        done = getattr(self, 'step_' + step[0].replace(' ', '_'))(*step[1:])
        if done is not False:
            self.wake()
        return done is not False

    def free(self, number, in_transaction):
        session = self.sessions[number]
        if session.blocked or bool(session.tx) != in_transaction:
            return None
        return session

    def command(self, session, text):
        """Returns False if it ended in a serialization failure."""
        answer = session.run(text)
        if isinstance(answer, list):
            return True
        if self.is_write_skew(session, answer):
            return False
        raise Difference('%s: %s' % (text, answer and session.error))

    def is_write_skew(self, session, answer):
        """Predicting these would take a model of PostgreSQL's own."""
        skew = answer == '40001' and session.tx and \
            session.tx.level == 'ser' and \
            'read/write dependencies' in session.error
        self.count('write skew', skew)
        return skew

    def met_what_is_left(self, call, answer):
        """What a lane needs of a message, or has parked, may be newer than
        the snapshot that sees the message."""
        met = answer == '40001' and \
            call.session.tx and call.session.tx.level != 'rc' and \
            call.name in ('ack', 'nack', 'extend', 'give_back', 'requeue')
        self.count('met what a lane needs of a message', met)
        return met

    def differs_by_design(self, call, expected, answer):
        """The portable edition answers from an old snapshot where the C edition
        raises 40001, and raises it where the C edition skips a row.  An answer
        must not say that it has changed anything."""
        if self.is_instead(call, answer):
            return True
        if not IS_PORTABLE or call.tx.level == 'rc':
            return False
        is_unchanged = isinstance(answer, list) and all(
            row[0] in UNCHANGED or row[-1] is False for row in answer)
        differs = answer == '40001' or (
            expected == '40001' and (
                answer in ('ID003', 'ID004') if isinstance(answer, str)
                else call.name in READERS or is_unchanged))
        # An old snapshot has the versions of a user who was forgotten since.
        differs = differs or (self.has_forgotten and is_unchanged and call.name in (
            'advance', 'advance_many', 'act', 'set_many'))
        # A test can let a token expire that an old snapshot has as valid.
        differs = differs or (call.name == 'once' and answer == [(False,)]) \
            or (call.name == 'once_many' and isinstance(answer, list)
                and isinstance(expected, list) and set(answer) < set(expected)) \
            or (call.name == 'once_many' and isinstance(answer, list)
                and expected == '40001' and len(answer) < len(set(call.args[1])))
        self.count('differs by design', differs)
        return differs

    def is_instead(self, call, answer):
        """The portable edition did not wait for an append that creates the
        aggregate: the version that the call expects does not exist yet."""
        met = IS_PORTABLE and call.instead is not None and \
            answer == [call.instead]
        self.count('did not wait for a new aggregate', met)
        return met

    def count(self, what, condition=True):
        if condition:
            self.stats[what] = self.stats.get(what, 0) + 1

    def step_begin(self, number, level, read_only):
        session = self.free(number, False)
        if not session:
            return False
        session.tx = Transaction(session.name, level, read_only)
        self.command(session, 'BEGIN ISOLATION LEVEL %s %s' % (
            {'rc': 'READ COMMITTED', 'rr': 'REPEATABLE READ',
             'ser': 'SERIALIZABLE'}[level],
            'READ ONLY' if read_only else ''))

    def step_commit(self, number):
        return self.end(number, 'COMMIT')

    def step_rollback(self, number):
        return self.end(number, 'ROLLBACK')

    def end(self, number, text):
        session = self.free(number, True)
        if not session:
            return False
        tx = session.tx
        committed = self.command(session, text) and text == 'COMMIT' and \
            not tx.failed
        if committed != (session.cursor.statusmessage == 'COMMIT'):
            raise Difference('%s of %s: %s' % (text, 'a failed transaction'
                             if tx.failed else 'a transaction',
                             session.cursor.statusmessage))
        session.tx = None
        (self.model.commit if committed else self.model.rollback)(tx)
        self.count(text)

    def step_savepoint(self, number, name):
        session = self.free(number, True)
        if not session or session.tx.failed:
            return False
        self.command(session, 'SAVEPOINT ' + name)
        self.model.savepoint(session.tx, name)

    def savepoint(self, session, name):
        names = [savepoint[0] for savepoint in session.tx.savepoints]
        return len(names) - 1 - names[::-1].index(name) if name in names \
            else None

    def step_rollback_to(self, number, name):
        session = self.free(number, True)
        place = session and self.savepoint(session, name)
        if place is None:
            return False
        self.command(session, 'ROLLBACK TO ' + name)
        self.model.rollback_to(session.tx, place)
        self.count('ROLLBACK TO')

    def step_release(self, number, name):
        session = self.free(number, True)
        place = session and self.savepoint(session, name)
        if place is None or session.tx.failed:
            return False
        self.command(session, 'RELEASE ' + name)
        self.model.release_savepoint(session.tx, place)

    def step_prepare(self, number):
        session = self.free(number, True)
        if not session or session.tx.failed or len(self.prepared) > 1:
            return False
        tx = session.tx
        name = 'p%d' % self.model.now
        if self.command(session, "PREPARE TRANSACTION '%s'" % name):
            self.model.release_savepoint(tx)
            self.prepared[name] = tx
            tx.name = 'prepared'
            self.count('PREPARE')
        else:
            self.model.rollback(tx)
        session.tx = None

    def step_commit_prepared(self, name=None):
        return self.end_prepared(name, 'COMMIT')

    def step_rollback_prepared(self, name=None):
        return self.end_prepared(name, 'ROLLBACK')

    def end_prepared(self, name, text):
        if not self.prepared:
            return False
        name = name or min(self.prepared)
        tx = self.prepared.pop(name)
        self.check(self.admin.run("%s PREPARED '%s'" % (text, name)))
        (self.model.commit if text == 'COMMIT' else self.model.rollback)(tx)

    def step_cancel(self, number):
        """The user cancels a call that sleeps."""
        session = self.sessions[number]
        if not session.blocked:
            return False
        self.check(self.admin.run('SELECT pg_cancel_backend(%d)'
                                  % session.pid))
        call, session.blocked = session.blocked.call, None
        call.generator.close()
        self.receive(call, '57014')
        self.count('cancelled')

    def step_terminate(self, number):
        """A connection breaks, at whatever it is."""
        session = self.sessions[number]
        self.check(self.admin.run('SELECT pg_terminate_backend(%d, 5000)'
                                  % session.pid))
        if session.blocked:
            session.blocked.call.generator.close()
            self.model.rollback(session.blocked.call.tx)
        if session.tx:
            self.model.rollback(session.tx)
        session.tx = session.blocked = None
        session.connection.close()
        session.connect()
        settings, self.settings = self.settings, None
        for text in sql.settings(settings):
            self.check(session.run(text))
        self.settings = settings
        self.count('terminated')

    def step_age(self, table, number, column, how_far):
        """
        Time passes for one row: the administrator moves a time back.  Not
        by a second, or a take could have passed it (see due_low_water.c).
        """
        keys = sorted(self.model.table(table))
        if number >= len(keys):
            return False
        key = keys[number]
        row = self.model.latest(key)[1]
        if row[column] is None or key in self.model.holders:
            return False
        # A take may have parked it, or removed it as a signpost.
        if table == 'outbox' and not self.check(self.admin.run(
                'SELECT FROM idem_outbox WHERE id = %d FOR UPDATE SKIP LOCKED'
                % key[1])):
            return False
        self.aged += 1
        value = self.model.now - how_far - SECOND // 2 + self.aged
        columns = [column]
        if column == 'lease_expires_at' and row['resume_at'] is not None:
            columns.append('resume_at')
        # Nor does a signpost of its lane know of that.
        self.check(self.admin.run(
            "UPDATE idem_%s SET %s%s WHERE %s" % (
                table, ', '.join(
                    "%s = 'epoch'::timestamptz "
                    "+ %d * '1 microsecond'::interval" % (c, value)
                    for c in columns),
                ", in_due_index = in_due_index OR state = 'pending'"
                if table == 'outbox' else '', ' AND '.join(
                    '%s = %s' % (c, sql.literal(v))
                    for c, v in zip(sql.KEYS[table], key[1:])))))
        self.model.set_row(key, {**row, **{
            c: Time(Moment(value, value), 0) for c in columns}})
        self.count('aged')

    def step_compare(self):
        self.compare()

    #
    # Calls
    #

    def step_call(self, number, name, args, limit=None):
        """limit: how a wait that would be endless is ended, if at all."""
        session = self.sessions[number]
        if session.blocked:
            return False
        args = sql.resolve(self, session, name, args)
        if args is None:
            return False
        self.has_forgotten |= name == 'forget_user'
        tx = session.tx or Transaction(session.name)
        if tx.failed:
            answer = session.run(sql.text(name, args))
            if answer != '25P02':
                raise Difference('expected 25P02, found %s' % (answer,))
            return None
        first = tx.snapshot is None
        self.model.begin_statement(tx)
        call = Call(session, tx, getattr(self.model, name)(tx, *args),
                    sql.text(name, args), name, args)
        wait = self.advance(call)
        short = wait and wait.limit is not None and wait.limit < MARGIN
        deadlock = wait and self.leads_to(wait.holder, tx)
        if short:
            limit = None
        # Whose patience ends first, or who wakes first, would be chance.
        if wait and wait.holder and (
                deadlock if short else not deadlock and any(
                    s.blocked and s.blocked.wait.holder is wait.holder
                    for s in self.sessions)):
            call.generator.close()
            self.model.undo(tx, call.mark)
            if first:
                tx.snapshot = None
            return False
        if wait and limit:
            self.check(session.run('SET %s = %d' % (limit, LIMIT_MS)))
        # Only who closes the circle looks for one.
        if wait and deadlock:
            self.check(session.run('SET LOCAL deadlock_timeout = 1'))
        session.send(call.text)
        if wait is None:
            self.receive(call, call.expected)
        elif deadlock:
            call.generator.close()
            self.receive(call, '40P01' if not limit else
                         ('40P01', '57014', '55P03'))
            self.count('deadlock')
        elif short:
            self.advance(call, False)
            self.receive(call, call.expected)
            self.count('waited in vain')
        elif limit:
            call.generator.close()
            self.receive(call, {'lock_timeout': '55P03',
                                'statement_timeout': '57014'}[limit])
            self.count(limit)
        elif isinstance(wait, LeaseWait):
            self.interrupt(call)
        else:
            self.sleep(call, wait)
        if wait and limit and not session.tx:
            self.check(session.run('RESET ' + limit))

    def leads_to(self, holder, tx):
        """Does "holder" wait, by whatever way, for "tx"?"""
        seen = []
        while holder not in seen:
            if holder is tx:
                return True
            seen.append(holder)
            for session in self.sessions:
                if session.blocked and session.blocked.call.tx is holder:
                    holder = session.blocked.wait.holder
        return False

    def advance(self, call, value=None):
        """Run the model's call until it waits (the Wait) or ends (None)."""
        self.model.moments = call.moments
        call.instead = None
        try:
            wait = call.generator.send(value)
            call.instead = wait.instead
            return wait
        except StopIteration as answer:
            call.expected = answer.value
        except Refused as refused:
            call.expected = refused.sqlstate
        return None

    def sleep(self, call, wait):
        """The call must sleep now, and wait for the right transaction."""
        session = call.session
        call.tx.has_slept = True
        pids = [s.pid for s in self.sessions if wait.holder is s.tx or
                (s.blocked and s.blocked.call.tx is wait.holder)] or [0]
        self.model.sleep(wait)
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = session.receive(0)
            if self.is_write_skew(session, answer):
                call.generator.close()
                self.model.fail(call.tx)
                return
            if answer is not None and \
                    self.differs_by_design(call, None, answer):
                raise Ambiguous('the portable edition did not wait')
            if answer is not None:
                raise Difference('%s\nexpected to wait for %s\nfound    %s' % (
                    call.text, wait.holder, answer))
            found = self.check(self.admin.run(
                'SELECT pg_blocking_pids(pid), waitstart FROM pg_locks '
                'WHERE pid = %d AND NOT granted' % session.pid))
            # The portable edition can have waited for this one all the time.
            if found and found[0][0] == pids and \
                    (IS_PORTABLE or (found[0][1] or 0) >= self.model.now):
                break
            # A claim of a key whose committed lease has not expired polls.
            if IS_PORTABLE and call.name.startswith('claim') and self.check(self.admin.run(
                    "SELECT FROM pg_stat_activity WHERE pid = %d AND wait_event = 'PgSleep'" % session.pid)) != []:
                break
            if IS_PORTABLE and call.name in ANSWERS and found:
                raise Ambiguous('an answer waits for another one of its lane')
            if time.monotonic() > deadline:
                raise Difference('%s\nexpected to wait for %s %s\nwaits for %s'
                                 % (call.text, wait.holder, pids, found))
        session.blocked = Blocked(call, wait)
        self.count('slept')

    def interrupt(self, call):
        """The call must sleep on a lease now, and be cancelled."""
        call.generator.close()
        deadline = time.monotonic() + PATIENCE
        while self.check(self.admin.run(
                'SELECT pg_cancel_backend(pid) FROM pg_stat_activity '
                "WHERE pid = %d AND (wait_event_type = 'Extension' "
                "OR wait_event = 'PgSleep')"
                % call.session.pid)) == []:
            if time.monotonic() > deadline:
                raise Difference('%s\ndoes not wait for a lease' % call.text)
        self.receive(call, '57014')
        self.count('waited for a lease')

    def wake(self):
        """Go on with the calls whose holder has let go of the row."""
        while True:
            woken = [s for s in self.sessions
                     if s.blocked and s.blocked.wait.is_over()]
            if not woken:
                return
            session = woken[0]
            call, session.blocked = session.blocked.call, None
            wait = self.advance(call, True)
            if wait is None:
                self.receive(call, call.expected)
                continue
            if isinstance(wait, LeaseWait):
                self.interrupt(call)
                continue
            if self.leads_to(wait.holder, call.tx) or any(
                    s.blocked and s.blocked.wait.holder is wait.holder
                    for s in self.sessions):
                raise Ambiguous('who wakes first')
            self.sleep(call, wait)

    def receive(self, call, expected):
        """Read the answer, compare, and end the statement in the model."""
        session, model = call.session, self.model
        # With an old snapshot, a call can meet a newer row only in the unique index.
        # An UPDATE that slept and then changes nothing keeps its lock of the row.
        others = [s.tx for s in self.sessions if s.tx] + list(self.prepared.values())
        may_wait = IS_PORTABLE and (call.name in ANSWERS or call.tx.level != 'rc' or any(
            tx.has_slept for tx in others if tx is not call.tx))
        answer = session.receive(3 if may_wait else PATIENCE)
        if answer is None and may_wait:
            raise Ambiguous('it waits for another writer')
        if answer is None:
            raise Difference('%s\nexpected %s\nhangs, waiting for %s' % (
                call.text, expected, self.check(self.admin.run(
                    "SELECT pg_blocking_pids(pid), wait_event_type, "
                    "wait_event FROM pg_stat_activity WHERE pid = %d"
                    % session.pid))))
        now = time.time_ns() // 1000
        for moment in call.moments:
            moment.high = now
        failed = isinstance(answer, str)
        if failed and answer != expected and (
                self.is_write_skew(session, answer) or
                self.met_what_is_left(call, answer)):
            expected = answer
        problem = None
        if callable(expected) and not failed:
            model.moments = call.moments = []
            problem = expected(answer, lambda ident: self.is_dead(session,
                                                                  ident))
            for moment in call.moments:
                moment.high = now
            if call.name == 'publish' and problem is None:
                self.messages.append(answer[0][1])
            if call.name == 'publish_many' and problem is None:
                self.messages += [last - len(answer) + ordinal
                                  for ordinal, _, last in answer]
        elif isinstance(expected, tuple) and not failed:
            ok = len(answer) == 1 and matches(expected, answer[0])
            problem = None if ok else 'not that'
        elif isinstance(expected, tuple):
            problem = None if answer in expected else 'not that'
        elif isinstance(expected, list) and not failed:
            problem = None if matches(expected, answer) else 'not that'
        elif not (expected == answer):
            problem = 'not that'
        if problem:
            if self.differs_by_design(call, expected, answer):
                raise Ambiguous('the portable edition has another snapshot')
            if now - model.now > MARGIN and not failed:
                raise Ambiguous('the step took too long')
            raise Difference('%s\nexpected %s\nfound    %s%s\n%s' % (
                call.text, expected, answer,
                ' ' + session.error if failed else '', problem))
        self.count(call.name + ' ' + sql.label(call.name, answer))
        if failed:
            if session.tx:
                model.fail(call.tx)
            else:
                model.rollback(call.tx)
            return
        if call.name == 'resume':
            for scope, key, token, *_ in answer:
                self.tokens.setdefault((scope, key), []).append(token)
        if call.name in ('claim', 'claim_stored') and answer[0][0] == 'new':
            token = answer[0][1]
            model.last_token = token
            self.tokens.setdefault(sql.key_of(call), []).append(token)
        if call.name == 'claim_many':
            scope, keys = call.args[:2]
            for key, row in sorted(zip(keys, answer), key=lambda c: c[0]):
                if row[0] == 'new':
                    model.last_token = max(model.last_token, row[1])
                    self.tokens.setdefault((scope, key), []).append(row[1])
        if not session.tx:
            model.commit(call.tx)

    def is_dead(self, session, ident):
        session.send("SELECT state = 'dead' FROM idem_outbox WHERE id = %d"
                     % ident)
        rows = session.receive()
        return bool(rows) and rows[0][0]
