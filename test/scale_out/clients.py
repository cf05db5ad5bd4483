"""
Tests of the clients with several shards, which are the same for each language.
A program in the language (client.mjs, client.py) runs the commands of the tests.

Each client runs requests, jobs and transactions on the shard of a scope, and
calls that concern several scopes on the router.  The scenarios of SCENARIOS are
for one client each, and those of TOGETHER for all clients at once.
"""

import itertools
import json
import os
import queue
import random
import subprocess
import threading
import time
from collections import Counter

import routed
from checks import equal

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.join(HERE, '..', '..')
SECONDS = 10                    # of a load; the runner sets it
SEEDS = itertools.count(1)      # one for each load; the runner sets the first
# The errors that are allowed while a scope moves, and while a shard crashes.
MOVING = {'ScopeMoving', 'InProgress'}
CRASHING = {'ClaimLost', 'ClaimNotFound'}
ELSEWHERE = 'does not live on this shard'
ENDED = "the server ended the session of the handler's transaction"


# The error of a wrong program.
FAULTS = {'TypeError', 'RangeError', 'ReferenceError', 'SyntaxError',
          'AssertionError', 'AttributeError', 'KeyError', 'NameError',
          'RuntimeError', 'ValueError'}


class Refused(Exception):
    """An error of the client's."""

    def __init__(self, said):
        super().__init__('%(name)s %(sqlstate)s: %(message)s' % said)
        self.name, self.sqlstate = said['name'], said['sqlstate']
        self.hint = said['hint'] or ''
        self.own = said['own']          # a class of the package's
        # The scope had left the shard
        self.left = self.sqlstate == '55000' and ELSEWHERE in str(self)

    @property
    def is_lost(self):
        """The connection was lost, or could not be made."""
        state = self.sqlstate or ''
        return not self.own and self.name not in FAULTS and (
            state[:2] in ('', '08', '57') or not state[:1].isdigit())


class Client:
    """A program over a client; its methods are the verbs."""

    def __init__(self, language, *command, notices=False, **environment):
        self.language = language
        # Whether the client notices a dead connection before it uses the connection
        self.notices = notices
        # Transactions without a key: the user's, and a route's where those are
        # not the same
        self.unkeyed = ('transaction', 'route')[:1 if notices else 2]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **environment}, cwd=HERE)
        self.numbers = itertools.count()
        self.answers = {}
        self.lock = threading.Lock()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            answer = json.loads(line)
            self.answers[answer['id']].put(answer)
        for answer in list(self.answers.values()):
            answer.put(None)            # The program has ended.

    def start(self, verb, **given):
        """Returns a function that waits for the answer."""
        number, answer = next(self.numbers), queue.Queue()
        self.answers[number] = answer
        with self.lock:
            self.process.stdin.write(
                json.dumps({'id': number, 'verb': verb, **given}) + '\n')
            self.process.stdin.flush()

        def wait(seconds=180):
            try:
                found = answer.get(timeout=seconds)
            except queue.Empty:
                found = None
            if found is None:
                raise AssertionError('%s: no answer to %s %r, and its status is %s'
                                     % (self.language, verb, given,
                                        self.process.poll()))
            del self.answers[number]
            if 'error' in found:
                raise Refused(found['error'])
            return found['result']

        return wait

    def __getattr__(self, verb):
        return lambda **given: self.start(verb, **given)()

    def call(self, name, *given, **named):
        return self.start('call', name=name, given=given,
                          **({'named': named} if named else {}))()

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


class Stop:
    """A place where a handler stops until the test continues it."""

    numbers = itertools.count()

    def __init__(self, client):
        self.client, self.name = client, 'stop-%d' % next(self.numbers)
        self.there = ['stop', self.name]

    def reached(self):
        self.client.reached(stop=self.name)

    def go(self):
        self.client.go(stop=self.name)


def refusal(call, **given):
    """The error of a call."""
    try:
        found = call(**given)
    except Refused as error:
        return error
    raise AssertionError('%r in place of an error' % (found,))


def refused(sqlstate, words, call, **given):
    """Returns the number of checks."""
    error = refusal(call, **given)
    return equal((error.sqlstate, words in str(error)), (sqlstate, True),
                 error)


def lost(call, **given):
    error = refusal(call, **given)
    return equal(error.is_lost, True, error)


def on_shards(servers, text, *args):
    """The rows of a query, of each shard."""
    found = []
    for shard in servers.shards:
        session = shard.session()
        found.append(session.run(text, *args))
        session.close()
    return found


def places(servers, table, value, column):
    """The number of such rows on each shard that has some."""
    found = on_shards(servers, 'SELECT count(*) FROM %s WHERE %s = %%s'
                      % (table, column), value)
    return {n: rows[0][0] for n, rows in enumerate(found) if rows[0][0]}


def of_key(servers, scope, key, table='effects'):
    """The shards of the rows of a key."""
    return places(servers, table, [scope, key], 'ARRAY[scope, key]')


def requests(servers, client, scopes, _):
    """a request runs on its scope's shard, once, and is replayed there"""
    count = 0
    client.counted()
    for home, scope in enumerate(scopes):
        for key in ('request-key-of-a', 'request-key-of-b'):
            first = client.request(scope=scope, key=key, body='1')
            again = client.request(scope=scope, key=key, body='1')
            count += equal((first['outcome'], first['replayed']),
                           ('new', False), key)
            count += equal((again['outcome'], again['body'], again['status']),
                           ('replay', 'done ' + key, 201), key)
            count += equal(refusal(client.request, scope=scope, key=key,
                                   body='2').name, 'KeyReused', key)
            count += equal(of_key(servers, scope, key), {home: 1},
                           'effects of', key)
            count += equal(of_key(servers, scope, key, 'idem_keys'), {home: 1},
                           'records of', key)
        # Rolled back with its transaction
        key = 'request-that-fails'
        for does in ([['effect'], ['fail', 'no work today']],
                     [['effect'], ['own', 'once', scope, 'by another']]):
            error = refusal(client.request, scope=scope, key=key, does=does)
            count += equal('no work today' in str(error)
                           or 'second connection of the pool' in str(error),
                           True, error)
            count += equal(of_key(servers, scope, key), {}, key)
            count += equal(of_key(servers, scope, key, 'idem_keys'), {}, key)
        # Hashed by the server
        for document, outcome in (('{"b": 1, "a": 2}', 'new'),
                                  ('{"a":2,"b":1}', 'replay')):
            count += equal(client.request(scope=scope, key='document-key-0001',
                                          document=document)['outcome'],
                           outcome, scope)
    for scope in scopes:
        key = 'request-key-of-many'     # in each scope another
        both = [client.start('request', scope=scope, key=key,
                             wait='5 seconds',
                             does=[['effect'], ['sleep', 100]])
                for _ in range(4)]
        count += equal(sorted(wait()['outcome'] for wait in both),
                       ['new', 'replay', 'replay', 'replay'], scope)
    found = client.counted()
    count += equal(found['questions'], len(scopes), 'questions')
    count += equal(len(found['asked']), len(set(found['asked'])),
                   'pools', found['asked'])
    return count


def jobs(servers, client, scopes, _):
    """a job's claim, steps and last step are on its scope's shard"""
    count = 0
    client.counted()
    for home, scope in enumerate(scopes):
        key = 'job-key-%08d' % home
        error = refusal(client.job, scope=scope, key=key, steps=[
            ['first'], ['second', [['fail', 'no work today']]]])
        count += equal('no work today' in str(error), True, error)
        found = client.call('lookup', scope, key)
        count += equal((found['state'], found['attempt'],
                        found['recoveryPoint']), ('failed', 1, 'first'), key)
        # Longer than the lease
        steps = [['first'], ['second', [['sleep', 0 if home else 1500]]]]
        done = client.job(scope=scope, key=key, lease='1 s', steps=steps)
        again = client.job(scope=scope, key=key, steps=steps)
        count += equal((done['outcome'], again['outcome'], again['body']),
                       ('new', 'replay', 'done ' + key), key)
        count += equal(client.ran(scope=scope, key=key),
                       ['first', 'second', 'second', 'last'], key)
        count += equal(of_key(servers, scope, key), {home: 1}, key)
        count += equal(of_key(servers, scope, key, 'idem_keys'), {home: 1},
                       key)
        # Without a last step
        key = 'job-of-one-step-%d' % home
        for outcome in ('new', 'replay'):
            done = client.job(scope=scope, key=key, finish=False)
            count += equal((done['outcome'], done['stored'], done['body']),
                           (outcome, True, 'done ' + key), key)
        count += equal(of_key(servers, scope, key, 'idem_keys'), {home: 1},
                       key)
    return count + equal(client.counted()['questions'], len(scopes),
                         'questions')


def functions(servers, client, scopes, _):
    """a function runs on its scope's shard, and a batch over several scopes on all shards"""
    count = 0
    a, b, c, d = scopes
    key = 'function-key-0001'
    topics = ['topic-of-%s' % scope for scope in scopes]
    for name, given, expected in (
            ('once', (a, 'form'), True),
            ('once', (a, 'form'), False),
            ('onceMany', (b, ['x', 'form', 'x']), ['x', 'form']),
            ('tryAdvance', (c, 'post', '7', 5),
             {'shouldProcess': True, 'lastActionId': 5}),
            ('isActive', (c, 'post', '7', 'like'), False),
            ('toggle', (b, 'post', '1', 'like', 5),
             {'isActive': True, 'lastActionId': 5, 'processed': True}),
            ('set', (c, 'post', '1', 'like', True, 5),
             {'isActive': True, 'lastActionId': 5, 'processed': True}),
            ('actionStates', (c, 'post', ['1', '2']),
             [{'entityId': '1', 'actionType': 'like', 'isActive': True,
               'lastActionId': 5}]),
            ('tryAppend', (d, 'c', 1), {'outcome': 'appended',
                                        'lastClientSeq': 1, 'version': 1}),
            ('lastClientSeq', (d, 'c'), 1),
            ('lookup', (a, key), None),
            # Through the router
            ('tryAdvanceMany', ([a, b, c, d, a], ['post'], ['8'],
                                [5, 6, 7, 8, 4]),
             [{'ordinal': n + 1, 'shouldProcess': n < 4,
               'lastActionId': (5, 6, 7, 8, 5)[n]} for n in range(5)]),
            ('setMany', ([d, c, b, a], ['post'], ['2'], ['like'],
                         [True, False, True, True], [9]),
             [{'ordinal': n + 1, 'isActive': n != 1, 'lastActionId': 9,
               'processed': True} for n in range(4)]),
            ('keyIsValid', ('short',), False),
            ('canonicalJson', ('{"b": 1, "a": 2}',), '{"a":2,"b":1}')):
        count += equal(client.call(name, *given), expected, name)
    claim = client.call('claim', a, key)
    count += equal(claim['outcome'], 'new')
    token = {'claimToken': claim['claimToken']}
    count += equal(None in (
        client.call('checkpoint', a, key, 'half', **token),
        client.call('heartbeat', a, key, lease='1 hour', **token)), False)
    count += equal(client.call('complete', a, key, 201, body='body', **token),
                   True)
    found = client.call('lookup', a, key)
    count += equal((found['state'], found['responseBody'],
                    found['recoveryPoint']), ('completed', 'body', 'half'))
    for name in ('release', 'fail'):
        claim = client.call('claim', b, key)
        count += equal(client.call(name, b, key,
                                   claimToken=claim['claimToken']), True, name)
    count += equal(client.call('run', c, key, 'work(jsonb)',
                               {'scope': c, 'key': key})['outcome'], 'new')
    count += equal([one['outcome'] for one in client.call(
        'claimMany', d, [key, key])], ['new', 'in_progress'])
    for home, scope in enumerate(scopes):
        count += equal(of_key(servers, scope, key, 'idem_keys'), {home: 1},
                       'records of', scope)
    count += equal(of_key(servers, c, key), {2: 1}, 'idem_run')
    for home, table, column in ((0, 'idem_tokens', 'scope'),
                                (2, 'idem_action_versions', 'user_id'),
                                (3, 'idem_aggregates', 'aggregate')):
        count += equal(list(places(servers, table, scopes[home], column)),
                       [home], table)
    # A message alone goes where its topic lives, in a transaction where
    # that is.
    client.call('publish', topics[0], {'n': 1})
    client.call('publishMany', topics[1:], [2, 3, 4])
    for topic in topics:
        count += equal(places(servers, 'idem_outbox', topic, 'topic'),
                       {servers.home(topic): 1}, topic)
    for home, scope in enumerate(scopes):
        key, topic = 'transaction-key-%d' % home, 'topic-in-%s' % scope
        found = client.transaction(scope=scope, key=key, does=[
            ['effect'], ['on', 'publish', topic, {'n': 1}],
            ['on', 'once', scope, 'with a message']])
        count += equal(found[1], True, 'in a transaction')
        count += equal(places(servers, 'idem_outbox', topic, 'topic'),
                       {home: 1}, topic)
        count += equal(of_key(servers, scope, key), {home: 1}, key)
    on_shards(servers, "SELECT idem_outbox_ack(ARRAY("
                       "SELECT id FROM idem_outbox_take(100)))")
    for name, given in (('outboxTake', ()), ('cleanup', ()), ('stats', ()),
                        ('health', ()), ('outboxAck', ([1],)),
                        ('statsReset', ()), ('raiseClaimTokens', (1,))):
        error = refusal(lambda: client.call(name, *given))
        count += equal((error.own, 'use a client over' in str(error)),
                       (True, True), name, error)
    error = refusal(client.transaction, key='nowhere', does=[])
    count += equal('scope' in str(error), True, error)
    # The shard's own errors are the same as without a router.
    for name in ('forget', 'erase'):
        error = refusal(lambda: client.call(name, a, key))
        count += equal(error.sqlstate, '42501', name, error)
    error = refusal(lambda: client.call('claim', a, 'short'))
    return count + equal((error.name, error.sqlstate), ('KeyInvalid', 'ID001'))


def elsewhere(servers, client, scopes, _):
    """a scope of another shard is refused in a transaction, nothing stays"""
    count = 0
    a, b = scopes[:2]
    for n, call in enumerate((['once', b, 'strayed'],
                              ['claim', b, 'strayed-key-00001'],
                              ['lookup', b, 'strayed-key-00001'],
                              ['isActive', b, 'post', '1', 'like'],
                              ['set', b, 'post', 'strayed', 'like', True, 9],
                              ['tryAppend', b, 'strayed', 1],
                              ['tryAdvanceMany', [a, b], ['post'], ['strayed'],
                               [9]],
                              ['setMany', [a, b], ['post'], ['strayed'],
                               ['like'], [True], [9]])):
        for verb in ('request', *client.unkeyed):
            key = 'strayed-%s-%d' % (verb, n)
            count += refused('55000', ELSEWHERE, getattr(client, verb),
                             scope=a, key=key,
                             does=[['effect'], ['on', *call]])
            # The handler's own error is not retried.
            count += equal(client.ran(scope=a, key=key), ['handler'], key)
            count += equal(of_key(servers, a, key), {}, call)
    for table, column in (('idem_tokens', 'token'), ('idem_keys', 'key'),
                          ('idem_user_actions', 'entity_id'),
                          ('idem_action_versions', 'entity_id'),
                          ('idem_client_sequences', 'client_id')):
        found = on_shards(
            servers, "SELECT %s FROM %s WHERE %s LIKE 'strayed%%'"
            % (column, table, column))
        count += equal(found, [[]] * len(servers.shards), table)
    once, advanced = client.transaction(scope=a, key='at-home', does=[
        ['on', 'once', a, 'at home'],
        ['on', 'tryAdvanceMany', [a, a], ['post'], ['1', '2'], [1]]])
    return count + equal((once, [one['shouldProcess'] for one in advanced]),
                         (True, [True, True]), 'at home')


def round_trips(servers, client, scopes, start):
    """the client makes as many round trips as with one server, and asks the router once"""
    scope = scopes[0]
    # The program that knows one server only pins no scope.
    admin = servers.shards[0].session()
    demand = 'ALTER DATABASE %s SET idempotency.require_pinned_scope = ' % admin.one('SELECT current_database()')
    admin.run(demand + 'off')
    one = start(COUNTED='1', ONE_SERVER=servers.shards[0].socket)
    many = start(COUNTED='1')

    def trips(program, key):
        found = []
        for number, (verb, given) in enumerate((
                ('request', {}), ('request', {}),
                ('job', {'steps': [['first']]}), ('job', {}),
                ('transaction', {}),
                ('call', {'name': 'once', 'given': [scope, key]}),
                ('transaction', {'does': [
                    ['effect'], ['on', 'once', scope, key + '2']]}))):
            program.counted()
            if verb != 'call':
                given = {'scope': scope, 'key': key + verb, **given}
            program.start(verb, **given)()
            counted = program.counted()
            equal(counted['questions'], 0 if key[-1] == '2' else
                  int(program is many and not number), 'questions', verb)
            found.append(counted['trips'])
        return found

    try:
        for key in ('trips-key-1', 'trips-key-2'):      # it connects first
            found = [trips(program, '%s-%s' % (name, key)) for program, name
                     in ((many, 'many'), (one, 'one'))]
        print('# round trips of a request, a replay, a job, its replay, a '
              'transaction, a function, one in a transaction: %s' % found[0],
              flush=True)
        return equal(*found, 'round trips') + len(found[0])
    finally:
        admin.run(demand + 'on')
        one.stop()
        many.stop()


def a_move(servers, client, scopes, _):
    """calls find their scope that has moved, and wait while it is moved"""
    count, scope, home = 0, scopes[2], 2

    def move(what=scope, *options, by=1):
        nonlocal home
        home = (home + by) % len(servers.shards)
        status, output = servers.move(*options, 'dbname=router', what, home)
        return equal(status, 0, output)

    def asked_once(verb, **given):
        client.counted()
        found = client.start(verb, **given)()
        return found, equal(client.counted()['questions'], 1, 'questions')

    # The client knows the scope, which then moves
    key = 'before-the-move-1'
    client.request(scope=scope, key=key)
    for verb, outcome in (('request', 'replay'), ('request', 'new'),
                          ('job', 'new'), ('call', None),
                          *((verb, None) for verb in client.unkeyed)):
        count += move()
        given = {'scope': scope, 'key': key if outcome == 'replay' else
                 'moved-away-%s-1' % verb}
        if verb == 'call':
            given = {'name': 'once', 'given': [scope, 'moved']}
        found, asked = asked_once(verb, **given)
        count += asked
        if outcome:
            count += equal(found['outcome'], outcome, verb)
        if verb != 'call' and outcome != 'replay':
            count += equal(of_key(servers, scope, given['key']),
                           {home: 1}, verb)
    # During a job: before a checkpoint, the last step and the response
    for finish in (True, False):
        key = 'moved-under-job-%d' % finish
        step, last = Stop(client), Stop(client)
        job = client.start('job', scope=scope, key=key, finish=finish, steps=[
            ['first', [step.there]], [None, [last.there]]])
        for stop in (step, last):
            stop.reached()
            count += move()
            stop.go()
        count += equal(job()['outcome'], 'new', key)
        count += equal(of_key(servers, scope, key),
                       {home: 1} if finish else {}, key)
        count += equal(of_key(servers, scope, key, 'idem_keys'), {home: 1},
                       key)
    # Its slot
    admin, other = servers.router('postgres'), scopes[0]
    slot, home = admin.one('SELECT idem_map.slot(%s)', other), 0
    client.call('once', other, 'form')
    for by in (1, -1):
        count += move(slot, '--slot', by=by)
        count += equal(client.call('once', other, 'form'), False, 'slot')
        key = 'moved-with-slot-%d' % home
        count += equal(client.job(scope=other, key=key)['outcome'], 'new')
        count += equal(of_key(servers, other, key), {home: 1}, key)
    # A move that has closed the gate, and cannot copy
    old = servers.home(scope)
    new = (old + 1) % len(servers.shards)
    step = Stop(client)
    job = client.start('job', scope=scope, key='job-in-its-midst-1',
                       steps=[['first', [step.there]]])
    step.reached()
    process, blocker = servers.closed_move(scope, new)
    waiting = [client.start(verb, **given) for verb, given in all_calls(
        client, scope, 'within-the-move')]
    keys = ['within-the-move-%s' % verb
            for verb in ('request', 'job', *client.unkeyed)]
    step.go()
    time.sleep(0.5)
    for key in keys:
        count += equal(client.ran(scope=scope, key=key), [], key)
    count += equal(client.ran(scope=scope, key='job-in-its-midst-1'),
                   ['first'])
    blocker.run('COMMIT')
    output, _ = process.communicate()
    count += equal(process.returncode, 0, output)
    once, first, second = [wait() for wait in waiting][:3]
    count += equal((first['outcome'], second['outcome'], once,
                    job()['outcome']), ('new', 'new', True, 'new'))
    for key in (*keys, 'job-in-its-midst-1'):
        count += equal(of_key(servers, scope, key), {new: 1}, key)
    return count


FORCE = 'SELECT idem_guard.force(idem_guard.slot(%s), %s, %s)'


def ended_by_hand(servers, client, scopes, _):
    """a handler's own COMMIT releases its scope, and nothing is stored then"""
    scope, count = scopes[0], 0
    guard = servers.shards[0].session()
    # Node refuses a statement that begins with COMMIT.
    for verb, commands in (('request', ['SELECT 1; COMMIT']),
                           ('job', ['SELECT 1; COMMIT', 'SELECT 1; BEGIN'])):
        key, stop = 'ended-by-hand-%s' % verb, Stop(client)
        commit, *more = (['sql', command] for command in commands)
        wait = client.start(verb, scope=scope, key=key,
                            does=[commit, stop.there, *more])
        stop.reached()
        guard.run(FORCE, scope, scope, False)
        stop.go()
        count += refused('55000', ELSEWHERE, wait)
        guard.run(FORCE, scope, scope, True)
        count += equal(client.call('lookup', scope, key)['state'], 'started',
                       key)
    servers.forget(scope)
    return count


def all_calls(client, scope, key):
    """A call of each kind."""
    return [('call', {'name': 'once', 'given': [scope, key]})] + [
        (verb, {'scope': scope, 'key': '%s-%s' % (key, verb)})
        for verb in ('request', 'job', *client.unkeyed)]


def wrong_maps(servers, client, scopes, _):
    """a hole in the map is an error, and a wrong shard is corrected at once"""
    count, admin, home = 0, servers.router('postgres'), 3
    scope = scopes[home]
    slot = admin.one('SELECT idem_map.slot(%s)', scope)

    def refuses(words, questions):
        count = 0
        for verb, given in all_calls(client, scope, 'wrong-map-key'):
            client.counted()
            error = refusal(client.start(verb, **given))
            count += equal((error.sqlstate, words in str(error)),
                           ('55000', True), error)
            count += equal(client.counted()['questions'], questions,
                           'questions', verb)
        return count, error

    admin.run('DELETE FROM idem_map.slots WHERE slot = %s', slot)
    found, error = refuses('no shard is known', 1)
    count += found + equal('Insert the row' in error.hint, True, error.hint)
    admin.run('INSERT INTO idem_map.slots VALUES (%s, %s)', slot,
              (home + 1) % len(servers.shards))
    client.counted()
    questions = 2               # the second one makes the router ask the shards
    for verb, given in all_calls(client, scope, 'wrong-map-key'):
        client.start(verb, **given)()
        count += equal(client.counted()['questions'], questions, verb)
        questions = 0
        if 'key' in given:
            count += equal(client.ran(scope=scope, key=given['key']),
                           ['last' if verb == 'job' else 'handler'], verb)
            count += equal(of_key(servers, scope, given['key']),
                           {home: 1}, verb)
    return count


def lost_connections(servers, client, scopes, start):
    """after a crash or a change of address, the client asks for the shard, and a call takes effect once"""
    count, admin, home = 0, servers.router('postgres'), 0
    shard, scope = servers.shards[home], scopes[home]
    was = admin.one('SELECT connection FROM idem_map.shards WHERE shard = %s',
                    home)
    alias, other = (os.path.join(servers.work, name) for name in ('a', 'b'))
    client = start(POOL='1')        # a connection, which is dead or is not
    fresh = ('%s-%d' % (scope, n) for n in itertools.count())
    keys = ('lost-connection-%d' % n for n in itertools.count())

    def unknown():
        """A scope that the client has not asked for."""
        return next(one for one in fresh if servers.home(one) == home)

    def address(text):
        admin.run("ALTER SERVER idempotency OPTIONS (SET p%d '%s')" % (
            home, text))

    def direct(directory):
        # PgBouncer would know that it has crashed.
        address('host=%s port=5432 dbname=postgres' % directory)

    def restart():
        shard.kill()
        shard.start()

    def questions(number, call):
        """The calls of the router. A dead connection causes none."""
        client.counted()
        call()
        return equal(client.counted()['questions'], number, 'questions')

    def done(verb, questions_of_it, scope=scope, **given):
        key = next(keys)
        found = questions(questions_of_it, lambda: client.start(
            verb, scope=scope, key=key, **given)())
        return found + equal(of_key(servers, scope, key), {home: 1},
                             verb, key)

    def once(scope=scope):
        client.call('once', scope, 'form')

    try:
        # Another isolation level can see the scope on the old shard.
        session = shard.session()
        direct(alias)
        os.symlink(shard.socket, alias)
        session.run("ALTER ROLE app SET default_transaction_isolation = "
                    "'serializable'")
        count += refused('0A000', 'isolation level', once)
        session.run('ALTER ROLE app RESET default_transaction_isolation')
        # The client does not ask for a known scope, although its shard has another address now.
        direct(shard.socket)
        os.unlink(alias)
        count += questions(0, lambda: refusal(once))
        # The connection is dead, and the shard cannot be reached, so the next call asks again
        restart()
        count += lost(once)
        if not client.notices:
            count += lost(client.request, scope=scope, key=next(keys))
        count += done('request', 1)
        # If a connection was dead before anything ran, the same call continues.
        for verb in ('request', 'job', *client.unkeyed):
            client.counted()
            restart()
            count += done(verb, 0)
        # In the midst of a job, before its last step
        stop = Stop(client)
        client.counted()
        key = next(keys)
        wait = client.start('job', scope=scope, key=key, steps=[
            ['first'], [None, [stop.there]]])
        stop.reached()
        restart()
        count += questions(0, lambda: (stop.go(), wait()))
        count += equal(of_key(servers, scope, key), {home: 1}, key)
        # It is unknown whether the function took effect, so the client does not repeat it.
        client.counted()
        restart()
        if not client.notices:
            count += questions(0, lambda: lost(once))
        count += questions(0, once)
        client.counted()
        shard.kill()
        try:
            count += lost(client.request, scope=scope, key=next(keys))
        finally:
            shard.start()
        count += done('request', 1)
        # The connection is lost in a handler, which gets the error.
        direct(other)
        os.symlink(shard.socket, other)
        moved, key, stop = unknown(), next(keys), Stop(client)
        wait = client.start('request', scope=moved, key=key,
                            does=[stop.there, ['effect']])
        stop.reached()
        os.unlink(other)
        direct(shard.socket)
        restart()
        stop.go()
        # Python looks once a second, and can notice it before the handler does.
        error = refusal(wait)
        count += equal(error.is_lost or ENDED in str(error), True, error)
        count += equal(client.ran(scope=moved, key=key), ['handler'], 'runs')
        count += lost(once, scope=moved)
        count += equal(client.request(scope=moved, key=key)['outcome'], 'new')
        # No server is at the address.
        direct(alias)
        gone = unknown()
        count += lost(once, scope=gone)
        address(was)
        count += done('request', 1, gone)
    finally:
        address(was)
        client.stop()
    return count


SCENARIOS = (requests, jobs, functions, elsewhere, round_trips, a_move,
             ended_by_hand, wrong_maps, lost_connections)


def duplicates(servers, clients, scopes):
    """of the clients of all languages, one runs, and the others wait for it or get an error"""
    count = 0
    for number, first in enumerate(clients):
        scope, key, stop = scopes[number], 'of-all-languages-1', Stop(first)
        runs = first.start('request', scope=scope, key=key,
                           does=[['effect'], stop.there])
        stop.reached()
        for other in clients:
            error = refusal(other.request, scope=scope, key=key)
            count += equal(error.name, 'InProgress', other.language)
        waiting = [other.start('request', scope=scope, key=key, wait='20 s')
                   for other in clients]
        stop.go()
        count += equal(runs()['outcome'], 'new', first.language)
        for wait in waiting:
            found = wait()
            count += equal((found['outcome'], found['body']),
                           ('replay', 'done ' + key))
        count += equal(of_key(servers, scope, key), {number: 1})
    return count


def moves_that_do_not_end(servers, clients, scopes):
    """if a move does not end, calls of its scope get an error after ten seconds"""
    count, admin = 0, servers.router('postgres')
    # All clients know the first scope, and the move of the second one ends in time.
    known, back = scopes[:2]
    guards = [shard.session() for shard in servers.shards]
    for client in clients:
        client.call('once', known, client.language)
    for home, scope in enumerate((known, back)):
        admin.run('INSERT INTO idem_map.scopes (scope, shard, moving_to) '
                  'VALUES (%s, %s, 3)', scope, home)
        guards[home].run(FORCE, scope, scope, False)

    def started(scope):
        return [(verb, client.start(verb, **given)) for client in clients
                for verb, given in all_calls(
                    client, scope, 'never-moved-key-' + client.language)]

    began = time.monotonic()
    never, late = started(known), started(back)
    time.sleep(1)
    guards[1].run(FORCE, back, back, True)
    admin.run('UPDATE idem_map.scopes SET moving_to = NULL WHERE scope = %s',
              back)
    for verb, wait in late:
        found = wait()
        if verb in ('request', 'job'):
            count += equal(found['outcome'], 'new', verb)
    count += equal(time.monotonic() - began < 10, True, 'comes back')
    for verb, wait in never:
        error = refusal(wait)
        count += equal((error.name, error.sqlstate, 'is being moved' in
                        str(error), 'scale-out/move' in error.hint),
                       ('ScopeMoving', '55P03', True, True), verb, error)
        count += equal(9.5 < time.monotonic() - began < 20, True, 'patience')
    guards[0].run(FORCE, known, known, True)
    admin.run('UPDATE idem_map.scopes SET moving_to = NULL WHERE scope = %s',
              known)
    for verb, wait in started(known):
        found = wait()
        if verb in ('request', 'job'):
            count += equal(found['outcome'], 'new', verb)
    return count


class Worker:
    """Sends requests and jobs until each of them is confirmed."""

    def __init__(self, clients, scopes, number, until, allowed):
        self.clients, self.scopes, self.until = clients, scopes, until
        self.rng = random.Random(number)
        self.number, self.done, self.errors = number, [], Counter()
        self.allowed = allowed

    def run(self):
        while time.monotonic() < self.until:
            scope = self.rng.choice(self.scopes)
            key = 'trouble-key-%d-%06d' % (self.number, len(self.done))
            verb = self.rng.choice(('request', 'request', 'job'))
            patience = time.monotonic() + 180
            while not self.attempt(verb, scope, key):
                equal(time.monotonic() < patience, True, 'no answer for', key)
                time.sleep(self.rng.uniform(0, 0.05))
            self.done.append((scope, key))

    def attempt(self, verb, scope, key):
        """Sends a request by one client, or by several clients of any languages at once."""
        pause = ['sleep', self.rng.choice((0, 0, 20))]
        given = {'wait': '2 s', 'does': [
            pause, ['on', 'once', scope, key], ['effect']]}
        if verb == 'job':
            given.update(lease='1 s', steps=[['first', [pause]]])
        asked = [(client, client.start(verb, scope=scope, key=key, **given))
                 for client in self.rng.choices(
                     self.clients, k=self.rng.choice((1, 1, 2)))]
        is_done = True
        for client, wait in asked:
            try:
                equal(wait()['body'], 'done ' + key)
            except Refused as error:
                is_done = False
                if not self.allowed(error):
                    raise AssertionError('%s, %s: %s' % (
                        client.language, verb, error)) from error
                self.errors[' '.join((client.language, error.name,
                                      error.sqlstate or ''))] += 1
        return is_done


def once_each(servers, clients, scopes, allowed, crashes):
    """Sends requests and jobs during moves, and then checks their effects."""
    until = time.monotonic() + SECONDS
    workers = [Worker(clients, scopes, n, until, allowed) for n in range(6)]
    trouble = routed.Trouble(servers, random.Random(next(SEEDS)), scopes)
    if not crashes:
        trouble.crash = lambda until: None
    trouble.run(until, lambda: routed.histories.in_parallel(
        workers, lambda worker: worker.run()))
    done = {pair: 1 for worker in workers for pair in worker.done}
    for table, column in (('effects', 'key'), ('idem_tokens', 'token'),
                          ('idem_keys', 'key')):
        found = Counter(pair for rows in on_shards(
            servers, "SELECT scope, %s FROM %s WHERE scope = ANY (%%s) AND "
            "%s LIKE 'trouble-key-%%%%'" % (column, table, column), scopes)
            for pair in rows)
        equal({pair: n for pair, n in found.items() if n != done.get(pair)},
              {}, table, 'doubled, or nobody was told')
        equal(set(done) - set(found), set(), table, 'lost')
    errors = sum((worker.errors for worker in workers), Counter())
    refusals = ', '.join('%s %d' % one for one in sorted(errors.items()))
    print('# %d requests and jobs; %d crashes, %d moves (%d cut off); '
          'refused: %s' % (len(done), trouble.crashes, trouble.moves,
                           trouble.cut_off, refusals or 'none'), flush=True)
    equal((trouble.moves > 0, trouble.crashes > 0, bool(done)),
          (True, crashes, True), 'what has happened')
    return len(done)


def under_moves(servers, clients, scopes):
    """requests and jobs of all languages under moves: each effect once"""
    # A lease of one second can end before a move that was cut off.  A scope can move
    # three times while a client looks for it, and a busy machine can need more than
    # the five seconds in which a pool of Python's makes a connection.
    return once_each(servers, clients, scopes, lambda error: error.name in
                     MOVING | {'ClaimLost', 'PoolTimeout'} or error.left, False)


def under_crashes(servers, clients, scopes):
    """requests and jobs of all languages under crashes and moves: each effect once"""
    def allowed(error):
        return error.is_lost or error.name in MOVING | CRASHING or error.left

    return once_each(servers, clients, scopes, allowed, True)


TOGETHER = (duplicates, moves_that_do_not_end, under_moves, under_crashes)
