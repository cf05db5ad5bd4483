# Sinks that are PostgreSQL: the same outbox, and another server; and the
# commands for an operator.

import contextlib
import copy
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

import psycopg2

from endpoint import Endpoint
from proxies import Pooler, accept_login
from world import PROGRAM, World, equal, expect, make_server, start_server, stop_server, until

ROUNDS = int(os.environ.get('ROUNDS', '300'))
SEED = int(os.environ.get('SEED', '1'))

APPLY = """
CREATE TABLE effects (id bigserial, message_id uuid, key text, n int);
CREATE FUNCTION apply(message_id uuid, topic text, message_key text, payload jsonb, headers jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF payload ? 'bad' THEN
        RAISE EXCEPTION 'no such order' USING ERRCODE = 'P0002';
    END IF;
    IF payload ? 'slow' THEN
        PERFORM pg_sleep(60);
    END IF;
    INSERT INTO effects (message_id, key, n) VALUES (message_id, message_key, (payload->>'n')::int);
END $$;
"""


TAKES = "SELECT pid FROM pg_stat_activity WHERE state = 'active' AND pid <> pg_backend_pid() AND query LIKE '%idem_outbox_take%'"


class Other(World):
    """Another server with the extension, which can be killed."""

    def __init__(self, world):
        self.data = tempfile.mkdtemp(prefix='other.', dir=world.directory)
        self.relays, self.connection, self.directory = [], None, world.directory
        make_server(self.data)
        self.where = 'host=%s port=5432 user=postgres dbname=postgres' % self.data
        self.query('CREATE EXTENSION idempotency')
        self.query(APPLY)

    def start(self):
        start_server(self.data)

    def stop(self):
        self.connection = None
        stop_server(self.data)

    def copy(self):
        """A copy of this server, which promote() starts without what happens until then."""
        self.control('-m', 'fast', 'stop')
        self.connection = None
        copied = copy.copy(self)
        copied.data += '.copy'
        copied.where = self.where.replace(self.data, copied.data)
        shutil.copytree(self.data, copied.data)
        with open(os.path.join(copied.data, 'postgresql.conf'), 'a') as file:
            file.write("unix_socket_directories = '%s'\n" % copied.data)
        self.start()
        self.become_primary()
        return copied

    def become_primary(self):
        """Clients reach this server through primary()."""
        link = os.path.join(self.directory, 'primary')
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link)
        os.symlink(self.data, link)

    def primary(self):
        return self.where.replace(self.data, os.path.join(self.directory, 'primary'))

    def promote(self):
        open(os.path.join(self.data, 'standby.signal'), 'w').close()
        self.start()
        self.control('-w', 'promote')
        self.become_primary()

    def remove(self):
        self.stop()
        shutil.rmtree(self.data)

    def session(self, text):
        """The process of an idle session whose last query has this text."""
        return until('a session with ' + text, lambda: self.query(
            "SELECT pid FROM pg_stat_activity WHERE state = 'idle' AND strpos(query, %s) > 0", text))[0][0]

    def effects(self):
        return self.query('SELECT key, n FROM effects ORDER BY id')


@contextlib.contextmanager
def two_servers(world):
    """A server, and its copy, which has not started."""
    old = Other(world)
    new = old.copy()
    try:
        yield old, new
    finally:
        old.remove()
        new.remove()


def postgres(world, other, *more):
    return world.relay('--p.sink=postgres', '--p.topics=orders', '--p.database=' + other.where, '--p.function=public.apply',
                       '--p.group=shop', *more)


def in_order(effects):
    last = {}
    for key, n in effects:
        expect('order of %s: %d after %d' % (key, n, last.get(key, -1)), last.get(key, -1) < n)
        last[key] = n


def applied_once(world):
    """Relays and the other server are killed: each effect happens once, in the
    order of its key."""
    other = Other(world)
    chance = random.Random(SEED)
    published = kills = 0
    relays = [postgres(world, other, '--lease=2s', '--wait=600ms') for _ in range(2)]
    try:
        for _ in range(ROUNDS):
            for _ in range(20):
                world.publish('orders', '{"n": %d}' % published, 'k%d' % (published % 7))
                published += 1
            time.sleep(chance.random() * 0.3)
            kind = chance.randrange(10)
            if kind < 6:
                victim = chance.randrange(2)
                relays[victim].kill()
                relays[victim] = postgres(world, other, '--lease=2s', '--wait=600ms')
            elif kind < 9:
                pids = subprocess.run(['pgrep', '-f', 'postgres: postgres postgres .local. (idle|SELECT|BIND|PARSE|COMMIT)',
                                       '-P', open(os.path.join(other.data, 'postmaster.pid')).readline().strip()],
                                      capture_output=True, text=True).stdout.split()
                if pids:
                    os.kill(int(chance.choice(pids)), signal.SIGKILL)
                other.connection = None
            else:
                other.stop()
                other.start()
            kills += 1
        world.all_acked(published, 120)
        until('it answers', lambda: answers(other), 30)
        effects = other.effects()
        equal('effects', len(effects), published)
        in_order(effects)
        for relay in relays:
            equal('the status', relay.started().stop(), 0)
    finally:
        other.stop()
    print('# %d messages, %d kills: each once, in order' % (published, kills), flush=True)


def answers(other):
    try:
        return other.query('SELECT 1')
    except Exception:
        other.connection = None
        return None


def applied_alone(world):
    """A call that fails or takes too long fails alone; the others of its batch
    are delivered."""
    with world.database('other', 'UTF8') as other:
        other.where = 'dbname=other'
        other.query(APPLY)
        bad = world.publish('orders', '{"bad": 1}', 'bad')
        slow = world.publish('orders', '{"slow": 1}', 'slow')
        for n in range(100):
            world.publish('orders', '{"n": %d}' % n, 'k%d' % (n % 50))
        relay = postgres(world, other, '--p.timeout=1s').started()
        until('the others are delivered', lambda: world.states().get('acked') == 100)
        until('reasons', lambda: world.outbox(bad)[3] == 'no such order (SQLSTATE P0002)' and
              'statement timeout' in (world.outbox(slow)[3] or ''))
        effects = other.query('SELECT key, n FROM effects ORDER BY id')
        equal('effects', len(effects), 100)
        in_order(effects)
        world.query("UPDATE idem_outbox SET state = 'pending', in_due_index = true, available_at = now(), attempt = 0 "
                    "WHERE payload ->> 'n' = '5'")
        until('it is acknowledged again', lambda: world.states().get('acked') == 100)
        equal('effects after a repeat', other.query('SELECT count(*) FROM effects'), [(100,)])
        equal('the status', relay.stop(), 0)
        done = subprocess.run([PROGRAM, '--p.sink=postgres', '--p.topics=orders', '--p.database=dbname=other', '--p.group=g',
                               '--p.function=nothing', '--check'], capture_output=True, text=True, timeout=30)
        equal('the status of --check', done.returncode, 69)
        expect(done.stderr, 'function nothing(uuid' in done.stderr)
        other.connection.close()


def hanging_calls(world):
    """Calls that take too long get at most a tenth of the connection's time
    after their first attempts."""
    with world.database('other', 'UTF8') as other:
        other.where = 'dbname=other'
        other.query(APPLY)
        relay = postgres(world, other, '--p.timeout=500ms').started()
        for n in range(4):
            world.publish('orders', '{"slow": 1}', 'bad%d' % n)
        until('each has failed', lambda: world.query('SELECT count(*) FROM idem_outbox WHERE last_error IS NOT NULL') == [(4,)])
        # The sink looks broken until it delivers.
        first = world.publish('orders', '{"n": 0}')
        until('it delivers', lambda: world.outbox(first)[0] == 'acked')
        for n in range(40):
            world.publish('orders', '{"n": %d}' % n, 'k%d' % n)
            time.sleep(0.1)
        until('the others are delivered', lambda: world.states().get('acked') == 41, 5)
        waits = world.query("SELECT count(*) FILTER (WHERE acked_at - created_at > '100 ms'), max(acked_at - created_at)::text "
                            "FROM idem_outbox WHERE state = 'acked' AND message_id <> %s", first)[0]
        print('# of 40 messages beside 4 that hang, %d waited for more than 0.1 s, at most %s' % waits, flush=True)
        expect('%d messages waited' % waits[0], waits[0] < 15)
        expect('they are not tried again', world.query("SELECT max(attempt) FROM idem_outbox WHERE state <> 'acked'")[0][0] > 1)
        equal('the status', relay.stop(), 0)
        other.connection.close()


def lost_lease(world):
    """A message whose lease another relay has taken is not sent again if the
    connection to the sink ends."""
    with world.database('other', 'UTF8') as other:
        other.where = 'dbname=other'
        other.query("""CREATE SEQUENCE calls; CREATE TABLE slow ();
            CREATE FUNCTION apply(uuid, text, text, jsonb, jsonb) RETURNS void LANGUAGE plpgsql AS $$
            BEGIN
                PERFORM nextval('calls');
                IF to_regclass('slow') IS NOT NULL THEN
                    PERFORM pg_sleep(60);
                END IF;
            END $$""")
        world.query("SELECT idem_publish('orders', '1') FROM generate_series(1, 2)")
        relay = postgres(world, other, '--lease=2s', '--wait=600ms', '--p.timeout=60s').started()
        until('it calls', lambda: other.query('SELECT is_called FROM calls') == [(True,)])
        relay.signal(signal.SIGSTOP)
        until('another one takes them', lambda: world.query(
            "SELECT id FROM idem_outbox_take(10, '1 minute')") and world.query('SELECT min(attempt) FROM idem_outbox') == [(2,)])
        relay.signal(signal.SIGCONT)
        until('it reports that', lambda: relay.said().count('is lost: another relay has it') == 2)
        other.query('DROP TABLE slow')
        other.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%%idem_once%%' AND datname = 'other' "
                    'AND pid <> pg_backend_pid()')
        until('its connection is lost', lambda: 'has lost its connection' in relay.said())
        third = world.publish('orders', '1')
        until('another message is delivered', lambda: world.outbox(third)[0] == 'acked')
        equal('calls', other.query('SELECT last_value FROM calls'), [(2,)])
        equal('the status', relay.stop(), 0)
        other.connection.close()


def commit_fails(world):
    """If a commit fails, the cause is found in a few steps, not by one message after
    another between those of later batches."""
    with world.database('other', 'UTF8') as other:
        other.where = 'dbname=other'
        other.query(APPLY)
        other.query('ALTER TABLE effects ADD UNIQUE (n) DEFERRABLE INITIALLY DEFERRED; INSERT INTO effects (n) VALUES (50)')
        world.query("SELECT idem_publish('orders', jsonb_build_object('n', n)) FROM generate_series(1, 4100) AS n")
        relay = postgres(world, other).started()
        until('the others are delivered', lambda: world.states() == {'acked': 4099, 'pending': 1}, 60)
        until('the reason', lambda: world.query(
            "SELECT 1 FROM idem_outbox WHERE payload ->> 'n' = '50' AND last_error LIKE '%%duplicate key%%'"))
        late = world.query("SELECT count(*) FROM idem_outbox WHERE (payload ->> 'n')::int <= 100 AND acked_at > ("
                           'SELECT percentile_disc(0.5) WITHIN GROUP (ORDER BY acked_at) FROM idem_outbox)')
        equal('messages of the first batch that are later than half of all', late, [(0,)])
        equal('the status', relay.stop(), 0)
        other.connection.close()


def prepared_again(world):
    """A function that is replaced, one that removes prepared statements, or a
    server that becomes read-only costs the calls that follow no attempt."""
    with world.database('other', 'UTF8') as other:
        other.where = 'dbname=other'
        other.query(APPLY)
        # The server warns at each login.
        other.query("UPDATE pg_database SET datcollversion = 'none' WHERE datname = 'other'")
        relay = postgres(world, other).started()
        world.publish('orders', '{"n": 0}')
        world.all_acked(1)
        other.query('DROP FUNCTION apply')
        other.query(APPLY[APPLY.index(';') + 1:].replace('void', 'int').replace('END $$', """
            IF payload ? 'forget' THEN
                RAISE WARNING E'a\\nstolen';
                DEALLOCATE ALL;
            ELSIF payload ? 'standby' THEN
                PERFORM set_config('default_transaction_read_only', 'on', false);
            END IF;
            RETURN 1;
        END $$"""))
        for n in range(5):
            world.publish('orders', '{"n": %d}' % n, 'k%d' % n)
        world.all_acked(6, 5)
        for before, damage in ((6, 'forget'), (12, 'standby')):
            world.publish('orders', '{"%s": 1}' % damage)
            world.all_acked(before + 1, 5)
            for n in range(5):
                world.publish('orders', '{"n": %d}' % n, 'k%d' % n)
            world.all_acked(before + 6, 5)
        equal('counted attempts', world.query('SELECT max(attempt - uncounted_attempts) FROM idem_outbox'), [(1,)])
        equal('effects', other.query('SELECT count(*) FROM effects'), [(18,)])
        expect('notices: ' + relay.said(), 'stolen' not in relay.said() and 'collation' not in relay.said())
        equal('the status', relay.stop(), 0)
        other.connection.close()


def idle_sink(world):
    """A sink that has nothing to deliver is not disabled because its server ends
    idle connections."""
    with world.database('other', 'UTF8') as other:
        other.where = 'dbname=other'
        other.query(APPLY)
        other.query("ALTER DATABASE other SET idle_session_timeout = '200ms'")
        relay = postgres(world, other, '--p.disable_after=1s').started()
        until('it is paused three times', lambda: relay.said().count('sink "p" is paused') >= 3 or 'is disabled' in relay.said())
        expect(relay.said(), 'is disabled' not in relay.said())
        world.publish('orders', '{"n": 1}')
        world.all_acked(1)
        equal('the status', relay.stop(), 0)
        other.connection.close()


def session_changed(world):
    """After a call that changes its session, as SET without LOCAL does, the next ones get another."""
    world.query("""
        CREATE FUNCTION change(message_id uuid, topic text, message_key text, payload jsonb, headers jsonb) RETURNS void
        LANGUAGE plpgsql AS $$
        BEGIN
            IF payload ? 'tenant' THEN
                SET search_path = pg_catalog;
            END IF;
        END $$""")
    relay = world.relay('--p.sink=postgres', '--p.topics=*', '--p.database=dbname=' + os.environ['PGDATABASE'], '--p.function=change',
                        '--p.group=g').started()
    world.publish('t', '{"tenant": 1}')
    world.all_acked(1)
    for n in range(10):
        world.publish('t')
    world.all_acked(11)
    equal('the status', relay.stop(), 0)
    world.query('DROP FUNCTION change')


def own_statements(world):
    """Sinks that call different functions prepare statements of different names, so
    that none calls another's function if a pooler changes the session."""
    with world.database('other', 'UTF8') as other:
        other.query('CREATE TABLE statements (name text, of text)')
        for name in 'one', 'two':
            other.query("CREATE FUNCTION %s(uuid, text, text, jsonb, jsonb) RETURNS void LANGUAGE sql AS "
                        "$$ INSERT INTO statements SELECT name, '%s' FROM pg_prepared_statements $$" % (name, name))
        options = []
        for name in 'one', 'two':
            options += ['--%s.sink=postgres' % name, '--%s.topics=%s' % (name, name), '--%s.database=dbname=other' % name,
                        '--%s.function=public.%s' % (name, name), '--%s.group=g' % name]
            world.publish(name)
        relay = world.relay(*options)
        world.all_acked(2)
        equal('names', other.query('SELECT count(*), count(DISTINCT name) FROM statements'), [(2, 2)])
        equal('the status', relay.stop(), 0)
        other.connection.close()


def gone_at_lock(world):
    """The server ends the calls of a relay that is gone, even if they wait for a lock.
    Otherwise they would take messages after that."""
    relay = world.relay('--out.sink=stdout', '--out.topics=t', '--wait=100ms')
    with contextlib.closing(psycopg2.connect('')) as other:
        other.cursor().execute('LOCK TABLE idem_outbox')
        until('a take waits', lambda: world.query(TAKES + " AND wait_event_type = 'Lock'"))
        relay.kill()
        until('it has ended', lambda: not world.query(TAKES))


def silent_after_login(world):
    """A server that answers the login and then nothing delays its sink only up
    to "timeout", and each attempt to connect is logged."""
    def serve(listener):
        connections = []
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            if accept_login(connection):
                connections.append(connection)

    with socket.create_server(('127.0.0.1', 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        other = 'host=127.0.0.1 port=%d user=x sslmode=disable gssencmode=disable' % listener.getsockname()[1]
        relay = world.relay('--p.sink=postgres', '--p.topics=t', '--p.database=' + other, '--p.function=f', '--p.group=g',
                            '--p.timeout=1s')
        until('it is paused twice', lambda: relay.said().count('sink "p" is paused: no answer') == 2, 8)
        equal('the status', relay.stop(), 0)
        listener.shutdown(socket.SHUT_RDWR)


def fans_out(world):
    """One event goes to three webhooks, each with its own order and retries;
    each copy is published once, though relays are killed."""
    good = [Endpoint(), Endpoint()]
    bad = Endpoint(lambda request, number: (500, {}, b'') if number % 3 else (204, {}, b''))
    options = ['--events.sink=outbox', '--events.topics=events', '--events.copies=one, two, three', '--lease=2s', '--wait=600ms']
    for name, endpoint in zip(('one', 'two', 'three'), (*good, bad)):
        options += ['--%s.sink=webhook' % name, '--%s.topics=%s' % (name, name), '--%s.url=%s' % (name, endpoint.url)]
    chance = random.Random(SEED)
    relays = [world.relay(*options) for _ in range(2)]
    rounds = min(ROUNDS, 20)
    for n in range(rounds):
        for i in range(10):
            world.publish('events', '{"n": %d}' % (n * 10 + i), 'k%d' % (i % 3), '{"trace": "x"}')
        time.sleep(chance.random() * 0.3)
        victim = chance.randrange(2)
        relays[victim].kill()
        relays[victim] = world.relay(*options)
    until('the events are copied', lambda: world.query(
        "SELECT count(*) FROM idem_outbox WHERE topic = 'events' AND state = 'acked'") == [(rounds * 10,)], 60)
    equal('copies', world.query("SELECT topic, count(*), count(DISTINCT payload), count(DISTINCT message_id), min(headers->>'trace') "
                                "FROM idem_outbox WHERE topic <> 'events' GROUP BY 1 ORDER BY 1"),
          [(name, rounds * 10, rounds * 10, rounds * 10, 'x') for name in ('one', 'three', 'two')])
    equal('the order of copies', world.query(
        "SELECT count(*) FROM (SELECT (payload->>'n')::int < lag((payload->>'n')::int) OVER "
        "(PARTITION BY topic, message_key ORDER BY id) AS wrong FROM idem_outbox) AS o WHERE wrong"), [(0,)])
    until('two of them have all', lambda: world.query(
        "SELECT count(*) FROM idem_outbox WHERE topic IN ('one', 'two') AND state <> 'acked'") == [(0,)], 60)
    for relay in relays:
        equal('the status', relay.started().stop(), 0)
    for endpoint in (*good, bad):
        endpoint.close()


def run(*arguments):
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


def operates(world):
    """dead, groups, requeue and status."""
    version = world.query('SELECT datcollversion FROM pg_database WHERE datname = current_database()')[0][0]
    set_version = 'UPDATE pg_database SET datcollversion = %s WHERE datname = current_database()'
    world.query("CREATE ROLE relay_operator LOGIN")
    try:
        # The server warns at each login.
        world.query(set_version, 'none')
        world.query("SELECT idem_grant_relay('relay_operator')")
        for n in range(6):
            world.publish('mails' if n % 2 else 'orders', '"secret"', 'k%d\n' % n)
        for id, attempt in world.query('SELECT id, attempt FROM idem_outbox_take()'):
            world.query("SELECT idem_outbox_fail(%s, %s, %s, schedule => '{}')", id, attempt,
                        'status %d: mailbox %s' % (400 + id % 2, '0123abcd-0123-0123-0123-0123456789ab \u009b31m \u00c4'))
        equal('states', world.states(), {'dead': 6})
        where = '--database=user=relay_operator'
        status, out, err = run('dead', where)
        equal('the status', (status, err), (0, ''))
        lines = out.splitlines()
        equal('lines', len(lines), 7)
        expect(out, 'status 400: mailbox ...' in out and 'secret' not in out and lines[0].split()[:4] == [
            'id', 'topic', 'key', 'attempts'])
        expect('control characters in ' + out, '...  31m \u00c4' in out)
        status, out, _ = run('dead', where, '--topic=mails', '--limit=2')
        equal('lines of a topic', (status, len(out.splitlines())), (0, 3))
        status, out, _ = run('groups', where)
        equal('groups', sorted(line.split()[0] for line in out.splitlines()[1:]), ['3', '3'])
        equal('without a selection', run('requeue', where)[0], 64)
        equal('an empty option', run('requeue', where, '--reason=')[0], 64)
        equal('an unknown option', run('requeue', where, '--everything')[0], 64)
        first = world.query('SELECT min(id) FROM idem_outbox')[0][0]
        equal('by id', run('requeue', where, '--id=%d' % first)[1], '1\n')
        equal('by topic and reason', run('requeue', where, '--topic=orders', '--reason=no such')[1], '0\n')
        equal('some of all', run('requeue', where, '--all', '--limit=2')[1], '2\n')
        equal('by reason', int(run('requeue', where, '--reason=status')[1]), 3)
        equal('none is left', run('requeue', where, '--all')[1], '0\n')
        world.query('TRUNCATE idem_outbox')
        world.publish('t', '1', 'k')
        world.publish('t', '2', 'k')
        world.query("SELECT idem_outbox_take(1, '1 hour')")
        status, out, err = run('status', where)
        equal('the status', (status, err), (0, ''))
        equal('what is blocked', out.splitlines()[1].split()[:2], ['t', '1'])
        expect(out, 'leased' in out)
        equal('an option of others', run('status', where, '--topic=t')[0], 64)
        equal('without a database', run('dead', '--database=host=/nowhere')[0], 69)
    finally:
        world.query(set_version, version)
        world.query('DROP OWNED BY relay_operator; DROP ROLE relay_operator')


def operates_in_any_encoding(world):
    """Options and errors are UTF-8, whatever the encoding of the database."""
    for encoding, topic in ('LATIN1', 'k\u00e4se'), ('SQL_ASCII', 'cheese'):
        with world.database('other', encoding) as other:
            other.connection.set_client_encoding('UTF8')
            other.publish(topic)
            other.query("SELECT idem_outbox_fail(id, attempt, convert_from('\\x9b33316d', getdatabaseencoding()), schedule => '{}') "
                        'FROM idem_outbox_take()')
            status, out, err = run('dead', '--database=dbname=other')
            equal('the status', (status, err), (0, ''))
            expect('what is dead: ' + out, topic in out and '\u009b' not in out)
            equal('one is requeued', run('requeue', '--database=dbname=other', '--topic=' + topic)[1], '1\n')
            other.connection.close()


def squatted(world):
    """A role that creates the extension beside an installation of the portable edition does not lead the relay away."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), '../../portable/build/idempotency.sql')
    world.query('CREATE ROLE squatter LOGIN')
    world.query('CREATE DATABASE other')
    try:
        subprocess.run(['psql', '-X', '-q', '-d', 'other', '-f', script], check=True)
        subprocess.run(['psql', '-X', '-q', '-d', 'other', '-c', 'CREATE SCHEMA hers AUTHORIZATION squatter'], check=True)
        subprocess.run(['psql', '-X', '-q', '-d', 'other', '-U', 'squatter', '-c', 'CREATE TABLE hers.idem_keys ()',
                        '-c', "CREATE EXTENSION idempotency SCHEMA hers VERSION 'unpackaged'"], check=True)
        equal('the status', run('status', '--database=dbname=other')[::2], (0, ''))
    finally:
        world.query('DROP DATABASE other WITH (FORCE)')
        world.query('DROP ROLE squatter')


def fails_over(world):
    """A server that is promoted without the last transactions gives their ids to
    other messages, which the relay does not acknowledge for the lost ones."""
    gate = threading.Event()
    endpoint = Endpoint(lambda request, number: gate.wait(60) and (204, {}, b''))
    old = Other(world)
    new = old.copy()
    try:
        relay = world.relay('--database=' + old.primary(), '--w.sink=webhook', '--w.topics=t', '--w.url=' + endpoint.url,
                            '--w.timeout=60s').started()
        for n in range(5):
            old.publish('t', '"old"')
        until('they are in flight', lambda: len(endpoint.requests) == 5)
        relay.signal(signal.SIGSTOP)
        gate.set()
        old.stop()
        new.promote()
        published = {new.publish('t', '"new"') for n in range(5)}
        relay.signal(signal.SIGCONT)
        new.all_acked(5)
        equal('the new ones that arrived', {request.headers['webhook-id'] for request in endpoint.requests} & published, published)
        equal('the status', relay.stop(), 0)
    finally:
        old.remove()
        new.remove()
        endpoint.close()


def takes_late(world):
    """The same if the old server still answers a take after the failover."""
    endpoint = Endpoint()
    old = Other(world)
    new = old.copy()
    try:
        relay = world.relay('--database=' + old.primary(), '--w.sink=webhook', '--w.topics=t', '--w.url=' + endpoint.url).started()
        # It must wait for messages then.  If it stopped within a write, other sessions would wait for it.
        take = until('it takes', lambda: old.query(TAKES + " AND wait_event_type IN ('Extension', 'Timeout')"))[0][0]
        # Only this one is idle since its setup now.
        answers = old.session('outbox_max_attempts')
        os.kill(take, signal.SIGSTOP)
        for n in range(5):
            old.publish('t', '"old"')
        new.promote()
        old.query('SELECT pg_terminate_backend(%s)', answers)
        new.session('outbox_max_attempts')
        published = {new.publish('t', '"new"') for n in range(5)}
        os.kill(take, signal.SIGCONT)
        new.all_acked(5)
        equal('the new ones that arrived', {request.headers['webhook-id'] for request in endpoint.requests} & published, published)
        # One connection that reaches the old server again does not stay there.
        old.become_primary()
        new.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%idem_outbox_take%' "
                  'AND pid <> pg_backend_pid()')
        until('it is refused', lambda: 'another server has a newer timeline; next try in' in relay.said().split('terminating')[-1])
        new.become_primary()
        new.publish('t', '"later"')
        new.all_acked(6)
        equal('the status', relay.stop(), 0)
    finally:
        old.remove()
        new.remove()
        endpoint.close()


def copies_after_failover(world):
    """The sink "outbox" acknowledges no such message either, so each new one is copied."""
    with two_servers(world) as (old, new):
        relay = world.relay('--database=' + old.primary(), '--events.sink=outbox', '--events.topics=t', '--events.copies=copy').started()
        session = old.session('idem_publish_many')
        os.kill(session, signal.SIGSTOP)
        for n in range(5):
            old.publish('t', '"old"')
        until('they are taken', lambda: old.leased() == 5)
        relay.signal(signal.SIGSTOP)
        os.kill(session, signal.SIGKILL)
        old.stop()
        new.promote()
        for n in range(5):
            new.publish('t', '"new"')
        relay.signal(signal.SIGCONT)
        until('they are acknowledged', lambda: new.query("SELECT count(*) FROM idem_outbox WHERE topic = 't' AND state = 'acked'") == [(5,)])
        equal('copies', new.query("SELECT payload, count(*) FROM idem_outbox WHERE topic = 'copy' GROUP BY 1"), [('new', 5)])
        equal('the status', relay.stop(), 0)


def copies_beside_old(world):
    """The sink "outbox" leaves the old server, even if that accepts writes again."""
    with two_servers(world) as (old, new):
        relay = world.relay('--database=host=%s,%s port=5432 user=postgres dbname=postgres' % (old.data, new.data),
                            '--events.sink=outbox', '--events.topics=t', '--events.copies=copy').started()
        old.stop()
        new.promote()
        new.publish('t')
        copies = "SELECT count(*) FROM idem_outbox WHERE topic = 'copy'"
        until('it is copied', lambda: new.query(copies) == [(1,)])
        old.start()
        new.query('SELECT pg_terminate_backend(%s)', new.session('idem_publish_many'))
        for n in range(5):
            new.publish('t')
        until('the others are copied', lambda: new.query(copies) == [(6,)])
        expect('it has not reached the old one', 'sink "events" is paused: the relay uses a server with another' in relay.said())
        equal('the status', relay.stop(), 0)


def sink_goes_first(world):
    """If only the sink "outbox" has reached the new server, the other connections
    follow."""
    with two_servers(world) as (old, new):
        relay = world.relay('--database=' + old.primary(), '--events.sink=outbox', '--events.topics=t', '--events.copies=copy').started()
        session = old.session('idem_publish_many')
        new.promote()
        old.query('SELECT pg_terminate_backend(%s)', session)
        new.publish('t')
        until('it is copied', lambda: new.query("SELECT 1 FROM idem_outbox WHERE topic = 'copy'"))
        equal('the status', relay.stop(), 0)


def older_for_good(world):
    """If clients reach a server with an older timeline for good, the relay does, too."""
    with two_servers(world) as (old, new):
        new.promote()
        relay = world.relay('--database=' + old.primary(), '--out.sink=stdout', '--out.topics=t',
                            environment=world.preload('clock_mock')).started()
        take = until('it takes', lambda: new.query(TAKES))[0][0]
        old.become_primary()
        new.query('SELECT pg_terminate_backend(%s)', take)
        old.publish('t')
        old.all_acked(1, 60)
        expect('it did not wait', 'another server has a newer timeline' in relay.said())
        equal('the status', relay.stop(), 0)


def new_restarts(world):
    """While the new server restarts, the relay does not go back to the old one."""
    with two_servers(world) as (old, new):
        relay = world.relay('--database=host=%s,%s port=5432 user=postgres dbname=postgres' % (old.data, new.data),
                            '--out.sink=stdout', '--out.topics=t').started()
        old.stop()
        new.promote()
        new.publish('t')
        new.all_acked(1)
        old.start()
        old.publish('t')
        new.stop()
        until('both are refused', lambda: relay.said().count('another server has a newer timeline') > 2)
        new.start()
        new.publish('t')
        new.all_acked(2)
        equal('what the old one has', old.states(), {'pending': 1})
        equal('the status', relay.stop(), 0)


def new_behind_pooler(world):
    """The same while a pooler before the new server accepts logins, and fails each query."""
    def server():
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.path.join(new.data, '.s.PGSQL.5432'))
        return connection

    with two_servers(world) as (old, new), tempfile.TemporaryDirectory(dir=world.directory) as pooler:
        new.promote()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.join(pooler, '.s.PGSQL.5432'))
            listener.listen()
            Pooler(listener, server)
            relay = world.relay('--database=host=%s,%s port=5432 user=postgres dbname=postgres' % (pooler, old.data),
                                '--out.sink=stdout', '--out.topics=t', environment=world.preload('clock_mock')).started()
            new.publish('t')
            new.all_acked(1)
            old.publish('t')
            new.stop()
            until('the old one is refused', lambda: 'another server has a newer timeline' in relay.said())
            # After the minute, an older timeline would be accepted at the next try.
            time.sleep(10)
            new.start()
            new.publish('t')
            new.all_acked(2)
            equal('what the old one has', old.states(), {'pending': 1})
            equal('the status', relay.stop(), 0)


def without_timeline(world):
    """A server that does not report its timeline is used as well, but an error does
    not end the reports."""
    world.query('REVOKE EXECUTE ON FUNCTION pg_current_wal_lsn FROM PUBLIC; CREATE ROLE limited LOGIN; '
                'GRANT pg_read_all_data, pg_write_all_data TO limited')
    try:
        world.query('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO limited')
        world.publish('t')
        world.publish('e')
        options = ('--database=user=limited', '--out.sink=stdout', '--out.topics=t')
        relay = world.relay(*options, '--events.sink=outbox', '--events.topics=e', '--events.copies=t').started()
        world.all_acked(3)
        equal('the status', relay.stop(), 0)
        equal('it is reported', relay.said().count('does not report its timeline'), 1)
        world.query('GRANT EXECUTE ON FUNCTION pg_current_wal_lsn TO PUBLIC')
        relay = world.relay(*options, '--events.sink=outbox', '--events.topics=e', '--events.copies=t').started()
        world.publish('t')
        world.all_acked(4)
        world.query("REVOKE EXECUTE ON FUNCTION pg_current_wal_lsn FROM PUBLIC; "
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'limited'")
        until('both are refused', lambda: relay.said().count('permission denied for function') >= 2)
        until('the sink is refused, too', lambda: 'sink "events" is paused: ERROR:  permission denied for function' in relay.said())
        world.query('GRANT EXECUTE ON FUNCTION pg_current_wal_lsn TO PUBLIC')
        world.publish('t')
        world.all_acked(5)
        expect('the timeline is ignored', 'does not report' not in relay.said())
        equal('the status', relay.stop(), 0)
    finally:
        world.query('GRANT EXECUTE ON FUNCTION pg_current_wal_lsn TO PUBLIC; DROP OWNED BY limited; DROP ROLE limited')


def answers_at_once(world):
    """An answer that is there as soon as its query is sent needs no other event to be noticed."""
    for n in range(20):
        world.publish('t', str(n))
    relay = world.relay('--out.sink=stdout', '--out.topics=t', '--max_messages=1', environment=world.preload('answer_mock')).started()
    world.all_acked(20, 10)
    equal('the status', relay.stop(), 0)


TESTS = [
    ('postgres: relays and the other server are killed; each effect once, in order', applied_once),
    ('postgres: a call that fails or takes too long fails alone', applied_alone),
    ('postgres: calls that take too long leave most of the time to others', hanging_calls),
    ('postgres: a message whose lease is lost is not sent again', lost_lease),
    ('postgres: a commit that fails delays the others of its batch little', commit_fails),
    ('postgres: a function that is replaced is called on a new connection', prepared_again),
    ('postgres: a sink that has nothing to deliver is not disabled', idle_sink),
    ('postgres: a call that changes its session does not stop the sink', session_changed),
    ('postgres: statements of different functions have different names', own_statements),
    ('postgres: a server that is silent after the login is given up after timeout', silent_after_login),
    ('outbox: one event goes to three webhooks, each copy once', fans_out),
    ('operators: dead, groups, requeue and status', operates),
    ('operators: a database in any encoding', operates_in_any_encoding),
    ('operators: another role has created the extension', squatted),
    ('database: a failover that loses transactions loses no later message', fails_over),
    ('database: a take that the old server answers after a failover loses no message', takes_late),
    ('outbox: a failover that loses transactions loses no later message', copies_after_failover),
    ('outbox: after a failover, the other connections follow the sink', sink_goes_first),
    ('database: an older timeline is accepted if no other is reached', older_for_good),
    ('database: the calls of a relay that is gone do not wait for a lock', gone_at_lock),
    ('database: a restart of the new server does not lead back to the old one', new_restarts),
    ('database: a pooler before the new server, which is away, does not lead back to the old one', new_behind_pooler),
    ('outbox: after a failover, the old server does not stop the copies', copies_beside_old),
    ('database: a server that reports no timeline is used as well', without_timeline),
    ('database: answers that are there at once delay nothing', answers_at_once),
]
