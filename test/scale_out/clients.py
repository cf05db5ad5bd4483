"""
The clients with several shards: the same for each language, whose program
(client.mjs, client.py) does what it is told.

Each does requests, jobs and transactions on the shard that a scope lives on,
and asks the router for what concerns several.
"""

import itertools
import json
import os
import queue
import random
import subprocess
import threading
import time

import routed

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.join(HERE, '..', '..')
SECONDS = 10                    # of a load; the runner sets it
# What a scope that moves may answer.
PASSING = ('ScopeMoving', 'InProgress')


class Refused(Exception):
    """An error of the client's."""

    def __init__(self, said):
        super().__init__('%(name)s %(sqlstate)s: %(message)s' % said)
        self.name, self.sqlstate = said['name'], said['sqlstate']
        self.hint = said['hint'] or ''


class Client:
    """A program over a client; its methods are the verbs."""

    def __init__(self, *command, **environment):
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

    def start(self, verb, **given):
        """Returns what waits for the answer."""
        number, answer = next(self.numbers), queue.Queue()
        self.answers[number] = answer
        with self.lock:
            self.process.stdin.write(
                json.dumps({'id': number, 'verb': verb, **given}) + '\n')
            self.process.stdin.flush()

        def wait(seconds=60):
            found = answer.get(timeout=seconds)
            del self.answers[number]
            if 'error' in found:
                raise Refused(found['error'])
            return found['result']

        return wait

    def __getattr__(self, verb):
        return lambda **given: self.start(verb, **given)()

    def call(self, name, *given):
        return self.start('call', name=name, given=given)()

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


def refusal(call, **given):
    """The error of a call."""
    try:
        found = call(**given)
    except Refused as error:
        return error
    raise AssertionError('%r in place of an error' % (found,))


def equal(found, expected, *what):
    if found != expected:
        raise AssertionError('%s: found %r in place of %r'
                             % (' '.join(map(str, what)), found, expected))
    return 1


def on_shards(servers, text, *args):
    """The rows of a query, of each shard."""
    found = []
    for shard in servers.shards:
        session = shard.session()
        found.append(session.run(text, *args))
        session.close()
    return found


def places(servers, table, key, column='key'):
    """On which shards a key has rows, and how many."""
    found = on_shards(servers, 'SELECT count(*) FROM %s WHERE %s = %%s'
                      % (table, column), key)
    return {n: rows[0][0] for n, rows in enumerate(found) if rows[0][0]}


def requests(servers, client, scopes, _):
    """a request runs on its scope's shard, once, and is replayed there"""
    count = 0
    for number, scope in enumerate(scopes):
        for key in ('request-key-of-a-%d' % number, 'request-key-of-b-%d' % number):
            first = client.request(scope=scope, key=key, body='1')
            again = client.request(scope=scope, key=key, body='1')
            count += equal((first['outcome'], first['replayed']),
                           ('new', False), key)
            count += equal((again['outcome'], again['body'], again['status']),
                           ('replay', 'done ' + key, 201), key)
            count += equal(refusal(client.request, scope=scope, key=key,
                                   body='2').name, 'KeyReused', key)
            count += equal(places(servers, 'effects', key),
                           {servers.home(scope): 1}, 'effects of', key)
            count += equal(places(servers, 'idem_keys', key),
                           {servers.home(scope): 1}, 'records of', key)
    for scope in scopes:
        key = 'request-key-of-many'     # in each scope another
        both = [client.start('request', scope=scope, key=key, pause=100,
                             wait='5 seconds') for _ in range(4)]
        count += equal(sorted(wait()['outcome'] for wait in both),
                       ['new', 'replay', 'replay', 'replay'], scope)
    return count


def jobs(servers, client, scopes, _):
    """a job's claim, steps and last step are on its scope's shard"""
    count = 0
    for number, scope in enumerate(scopes):
        key = 'job-key-%08d' % number
        error = refusal(client.job, scope=scope, key=key, fails=True)
        check = 'no work today' in str(error)
        count += equal(check, True, error)
        found = client.call('lookup', scope, key)
        count += equal((found['state'], found['attempt']), ('failed', 1), key)
        done = client.job(scope=scope, key=key, lease='2 seconds', pause=1500)
        count += equal((done['outcome'], done['ran']), ('new', ['second']), key)
        again = client.job(scope=scope, key=key)
        count += equal((again['outcome'], again['ran'], again['body']),
                       ('replay', [], 'done ' + key), key)
        count += equal(places(servers, 'effects', key),
                       {servers.home(scope): 1}, 'effects of', key)
        count += equal(places(servers, 'idem_keys', key),
                       {servers.home(scope): 1}, 'records of', key)
    return count


def functions(servers, client, scopes, _):
    """a function runs where its scope lives, and one of several scopes on all"""
    count = 0
    a, b, c, d = scopes
    key = 'function-key-0001'
    for name, given, expected in (
            ('once', (a, 'form'), True),
            ('once', (a, 'form'), False),
            ('onceMany', (b, ['x', 'form', 'x']), ['x', 'form']),
            ('tryAdvance', (c, 'post', '7', 5),
             {'shouldProcess': True, 'lastActionId': 5}),
            ('isActive', (c, 'post', '7', 'like'), False),
            ('tryAppend', (d, 'c', 1), {'outcome': 'appended',
                                        'lastClientSeq': 1, 'version': 1}),
            ('lastClientSeq', (d, 'c'), 1),
            ('tryAdvanceMany', ([a, b, c, d, a], ['post'], ['8'],
                                [5, 6, 7, 8, 4]),
             [{'ordinal': n + 1, 'shouldProcess': n < 4,
               'lastActionId': (5, 6, 7, 8, 5)[n]} for n in range(5)]),
            ('lookup', (a, key), None),
            ('keyIsValid', ('short',), False),
            ('canonicalJson', ('{"b": 1, "a": 2}',), '{"a":2,"b":1}')):
        count += equal(client.call(name, *given), expected, name)
    claim = client.call('claim', a, key)
    count += equal(claim['outcome'], 'new')
    count += equal(client.call('heartbeat', a, key, {
        'claimToken': claim['claimToken'], 'lease': '1 hour'}) is None, False)
    count += equal(client.call('complete', a, key, 201, {
        'body': 'kept', 'claimToken': claim['claimToken']}), True)
    count += equal(client.call('claim', a, key)['responseBody'], 'kept')
    for scope, table, column in ((a, 'idem_tokens', 'scope'),
                                 (a, 'idem_keys', 'scope'),
                                 (c, 'idem_action_versions', 'user_id'),
                                 (d, 'idem_aggregates', 'aggregate')):
        count += equal(list(places(servers, table, scope, column)),
                       [servers.home(scope)], table)
    # A message alone goes where its topic lives, in a transaction where that is.
    client.call('publish', 'topic-of-clients', {'n': 1})
    count += equal(places(servers, 'idem_outbox', 'topic-of-clients', 'topic'),
                   {servers.home('topic-of-clients'): 1})
    client.transaction(scope=a, key='transaction-key-1', calls=[
        ['publish', 'topic-of-a', {'n': 1}], ['once', a, 'with a message']])
    for table, what, column in (('idem_outbox', 'topic-of-a', 'topic'),
                                ('effects', 'transaction-key-1', 'key')):
        count += equal(places(servers, table, what, column),
                       {servers.home(a): 1}, what)
    on_shards(servers, "SELECT idem_outbox_ack(ARRAY("
                       "SELECT id FROM idem_outbox_take(100)))")
    for name in ('outboxTake', 'cleanup', 'stats'):
        error = refusal(lambda: client.call(name))
        count += equal("each shard's own" in str(error), True, error)
    error = refusal(client.transaction, key='nowhere', calls=[])
    count += equal('scope' in str(error), True, error)
    return count


def elsewhere(servers, client, scopes, _):
    """a scope of another shard is refused in a transaction, and nothing stays"""
    count = 0
    a, b = scopes[:2]
    for n, call in enumerate((['once', b, 'strayed'],
                              ['claim', b, 'strayed-key-00001'],
                              ['isActive', b, 'post', '1', 'like'],
                              ['set', b, 'post', 'strayed', 'like', True, 9],
                              ['tryAdvanceMany', [a, b], ['post'], ['strayed'],
                               [9]],
                              ['lookup', b, 'strayed-key-00001'])):
        key = 'strayed-effect-%d' % n
        error = refusal(client.transaction, scope=a, key=key, calls=[call])
        count += equal(error.sqlstate, '55000', call, error)
        count += equal(places(servers, 'effects', key), {}, call)
    for table, column in (('idem_tokens', 'token'), ('idem_keys', 'key'),
                          ('idem_user_actions', 'entity_id'),
                          ('idem_action_versions', 'entity_id')):
        found = on_shards(servers, "SELECT %s FROM %s WHERE %s LIKE 'strayed%%'"
                          % (column, table, column))
        count += equal(found, [[]] * len(servers.shards), table)
    return count


def round_trips(servers, client, scopes, start):
    """no more round trips than with one server, and the router is asked once"""
    one = start(ONE_SERVER=servers.shards[servers.home(scopes[0])].socket)

    def trips(program, key):
        found = []
        for verb, given in (('request', {'body': '1'}),
                            ('request', {'body': '1'}), ('job', {}),
                            ('transaction', {'calls': []})):
            program.counted()
            getattr(program, verb)(scope=scopes[0], key=key + verb, **given)
            found.append(program.counted()['trips'])
        return found

    try:
        # It opens its connections, and asks for the scope.
        trips(one, 'trips-key-warm-one')
        trips(client, 'trips-key-warm-many')
        with_router, without = trips(client, 'trips-key-many-'), \
            trips(one, 'trips-key-one-')
        return equal(with_router, without, 'round trips') + len(without)
    finally:
        one.stop()


def a_move(servers, client, scopes, _):
    """a request waits for its scope that is being moved, and not for ever"""
    count, admin = 0, servers.router('postgres')
    scope = scopes[2]
    old = servers.home(scope)
    key = 'before-the-move-1'
    client.request(scope=scope, key=key)
    # Known to the client, and somewhere else then.
    new = (old + 1) % len(servers.shards)
    status, output = servers.move('dbname=router', scope, new)
    count += equal(status, 0, output)
    count += equal(client.request(scope=scope, key=key)['outcome'], 'replay')
    count += equal(client.request(scope=scope, key='behind-the-move-1')
                   ['outcome'], 'new')
    count += equal(places(servers, 'effects', 'behind-the-move-1'), {new: 1})
    # One that has closed the gate, and cannot copy
    user, gate = servers.shards[old].session(), servers.shards[new].session()
    user.run('BEGIN')
    user.run('LOCK TABLE idem_tokens IN SHARE MODE')
    process = servers.start_move('dbname=router', scope, old)
    while gate.run('SELECT 1 FROM idem_gate.places WHERE scope = %s AND here',
                   scope):
        time.sleep(0.02)
    key = 'within-the-move-1'
    waiting = [client.start('request', scope=scope, key=key),
               client.start('job', scope=scope, key='job-in-the-move-1'),
               client.start('transaction', scope=scope, calls=[],
                            key='transaction-in-it'),
               client.start('call', name='once', given=[scope, 'in the move'])]
    time.sleep(1)
    count += equal(places(servers, 'effects', key), {})
    user.run('COMMIT')
    output, _ = process.communicate()
    count += equal(process.returncode, 0, output)
    first, job, _, once = (wait() for wait in waiting)
    count += equal((first['outcome'], job['outcome'], once),
                   ('new', 'new', True))
    for done in (key, 'job-in-the-move-1', 'transaction-in-it'):
        count += equal(places(servers, 'effects', done), {old: 1}, done)
    # One that does not end
    admin.run('UPDATE idem_map.scopes SET moving_to = %s WHERE scope = %s',
              new, scope)
    user.run('UPDATE idem_gate.places SET here = false WHERE scope = %s', scope)
    began = time.monotonic()
    error = refusal(client.request, scope=scope, key='never-moved-key-1')
    count += equal((error.name, error.sqlstate), ('ScopeMoving', '55P03'),
                   error)
    count += equal(9 < time.monotonic() - began < 20, True, error)
    user.run('UPDATE idem_gate.places SET here = true WHERE scope = %s', scope)
    admin.run('UPDATE idem_map.scopes SET moving_to = NULL WHERE scope = %s',
              scope)
    count += equal(client.request(scope=scope, key='never-moved-key-1')
                   ['outcome'], 'new')
    return count


def wrong_maps(servers, client, scopes, _):
    """a hole, a wrong shard and another address: an error, and then none"""
    count, admin = 0, servers.router('postgres')
    scope = 'scope-without-a-place-of-its-own'
    slot, home = admin.one('SELECT idem_map.slot(%s)', scope), \
        servers.home(scope)
    admin.run('DELETE FROM idem_map.slots WHERE slot = %s', slot)
    error = refusal(client.request, scope=scope, key='hole-in-the-map-1')
    count += equal(error.sqlstate, '55000', error)
    count += equal('Insert the row' in error.hint, True, error.hint)
    admin.run('INSERT INTO idem_map.slots VALUES (%s, %s)', slot,
              (home + 1) % len(servers.shards))
    error = refusal(client.request, scope=scope, key='hole-in-the-map-1')
    count += equal(error.sqlstate, '55000', error)
    count += equal('does not live on this shard' in str(error), True, error)
    admin.run('UPDATE idem_map.slots SET shard = %s WHERE slot = %s', home,
              slot)
    count += equal(client.request(scope=scope, key='hole-in-the-map-1')
                   ['outcome'], 'new')
    # The shard has another address for a while, where nobody is.
    fresh = next(one for one in ('fresh-scope-%d' % n for n in range(1000))
                 if servers.home(one) == home)
    was = admin.one('SELECT connection FROM idem_map.shards WHERE shard = %s',
                    home)
    admin.run("ALTER SERVER idempotency OPTIONS (SET p%d 'host=%s-gone "
              "dbname=postgres')" % (home, servers.work))
    error = refusal(client.request, scope=fresh, key='another-address-1')
    count += equal(is_lost(error), True, error)
    admin.run("ALTER SERVER idempotency OPTIONS (SET p%d '%s')" % (home, was))
    count += equal(client.request(scope=fresh, key='another-address-1')
                   ['outcome'], 'new')
    count += equal(client.request(scope=scope, key='another-address-2')
                   ['outcome'], 'new')
    return count


def crashes_and_moves(servers, client, scopes, _):
    """requests and jobs under crashes and moves: each effect once"""
    until = time.monotonic() + SECONDS
    trouble = routed.Trouble(servers, random.Random(1), scopes)
    done, refused, lock = [], {}, threading.Lock()

    def work(number):
        rng = random.Random(number)
        for n in itertools.count():
            if time.monotonic() > until:
                return
            scope, key = rng.choice(scopes), 'trouble-key-%d-%06d' % (number, n)
            verb = rng.choice(('request', 'request', 'job'))
            given = {'lease': '2 seconds'} if verb == 'job' else {'body': key}
            while True:
                try:
                    found = [wait() for wait in [
                        client.start(verb, scope=scope, key=key,
                                     pause=rng.choice((0, 0, 20)), **given)
                        for _ in range(rng.choice((1, 1, 2)))]]
                    break
                except Refused as error:
                    with lock:
                        name = '%s %s' % (error.name, error.sqlstate)
                        refused[name] = refused.get(name, 0) + 1
                    if error.name not in PASSING and not is_lost(error):
                        raise
                    time.sleep(rng.uniform(0, 0.05))
            for answer in found:
                equal(answer['body'], 'done ' + key)
            with lock:
                done.append((scope, key))

    failures = []

    def guarded(number):
        try:
            work(number)
        except Exception as error:
            failures.append(error)

    def run():
        threads = [threading.Thread(target=guarded, args=(n,))
                   for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    trouble.run(until, run)
    if failures:
        raise failures[0]
    effects = {}
    for rows in on_shards(servers, "SELECT scope, key FROM effects "
                                   "WHERE key LIKE 'trouble-key-%%'"):
        for pair in rows:
            effects[pair] = effects.get(pair, 0) + 1
    equal({pair: effects.get(pair) for pair in done
           if effects.get(pair) != 1}, {}, 'lost or doubled')
    equal(set(effects) - set(done), set(), 'effects that nobody was told of')
    print('# %d requests and jobs; %d crashes, %d moves (%d cut off); refused: '
          '%s' % (len(done), trouble.crashes, trouble.moves, trouble.cut_off,
                  ', '.join('%s %d' % one for one in sorted(refused.items()))
                  or 'none'), flush=True)
    equal(bool(trouble.moves and trouble.crashes and done), True, 'happened')
    return len(done)


def is_lost(error):
    """The connection, or the server that it led to."""
    return error.sqlstate is None or not error.sqlstate[:1].isdigit() \
        or error.sqlstate[:2] in ('08', '57') or error.sqlstate == '55000'


SCENARIOS = (requests, jobs, functions, elsewhere, round_trips, a_move,
             wrong_maps, crashes_and_moves)
