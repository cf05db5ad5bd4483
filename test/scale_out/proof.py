#!/usr/bin/python3
"""
Everything at once, with clients that remember each result.

    proof.py WORK SECONDS SEED [MISTAKE]

Two routers, and four shards with a synchronous standby each, whose servers set
synchronous_commit = off; one clock is half a second ahead.  A fifth shard, in a
network of its own, is added, and the first one is drained and removed.
Meanwhile, movers of both routers are killed, standbys are promoted, shards and a
router crash, the fifth shard's network is cut, and relays lose leases.

Each client asks again for what it knows: a key that was completed is replayed with
its answer, a token is not first twice, a sequence does not fall, a stale action is
stale, claim tokens rise.  Messages of a key are delivered in order, each at least
once.  At the end, each effect is there once, and scale-out/verify finds nothing.

With a MISTAKE, the tools have a bug, which the clients must find.
"""

import os
import random
import shutil
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] + [os.path.join(HERE, *path) for path in (
    ('..', 'lib'), ('..', 'failover'))]
sys.dont_write_bytecode = True

import psycopg2                                             # noqa: E402

import network                                              # noqa: E402
from checks import Broken, Session, check, equal            # noqa: E402
from servers import (APPLICATION, RELAY, SCALE_OUT, Server,  # noqa: E402
                     prepare, program, run)

CLIENTS, SCOPES, HOST = 6, 24, 10
AHEAD = 0.5                     # seconds, of one clock
FAKETIME = '/usr/lib/%s-linux-gnu/faketime/libfaketime.so.1' % os.uname().machine
REFUSED = ('55P03', '55000')
UNKNOWN = ('XX000', '57P01', '57P02', '57P03', '08P01', '08006', '57014', '25P02',
           None)
# Options of the connection strings in the maps, which detect a network that loses packets.
CAREFUL = ('connect_timeout=4 keepalives_idle=2 keepalives_interval=1 '
           'keepalives_count=2 tcp_user_timeout=3000')

# Of each bug: a file of scale-out/, a text in it, and what replaces this text
MISTAKES = {
    # The guard lets every scope pass.
    'guard': ('shard.sql', 'IF is_here IS NOT TRUE THEN', 'IF false THEN'),
    # The mover does not wait for transactions that use the scope.
    'lock': ('mover/steps.py', 'self.place.lock_users_out(source, self.timeout)',
             'pass'),
    # It opens the new gate before the last rows have arrived.
    'rest': ('mover/replication.py', 'while not self.target.run(',
             'while False and self.target.run('),
    # Updates of rows that were copied do not arrive.
    'updates': ('mover/replication.py', "update, delete')", "delete')"),
    # The mover's commits are asynchronous.
    'commit': ('mover/servers.py', "('synchronous_commit', 'on')",
               "('synchronous_commit', 'off')"),
}


def start(data, log, *words, clock=0):
    environment = dict(os.environ)
    if clock:
        environment.update(LD_PRELOAD=FAKETIME, FAKETIME='+%ss' % clock,
                           FAKETIME_DONT_FAKE_MONOTONIC='1')
    run(*words, program('pg_ctl'), '-D', data, '-l', log, '-w', '-t', '60', 'start',
        env=environment)


class Pair(Server):
    """A shard and its standby, behind one socket directory, a link."""

    def __init__(self, work, name, template, clock=0):
        super().__init__(work, name, template)
        self.work, self.clock, self.count = work, clock, 0
        self.lock = threading.Lock()        # of who stops and starts it
        os.rmdir(self.socket)
        self.socket_of = self.directory()
        self.configure(self.data, self.socket_of)
        self.point()

    def directory(self):
        self.count += 1
        path = os.path.join(self.work, '%s-%d' % (self.name, self.count))
        os.mkdir(path)
        return path

    @staticmethod
    def configure(data, socket):
        with open(os.path.join(data, 'postgresql.conf'), 'a') as conf:
            conf.write("unix_socket_directories = '%s'\nsynchronous_commit = off\n"
                       'wal_writer_delay = 10s\nhot_standby = on\n'
                       'wal_sender_timeout = 20s\n' % socket)

    def point(self):
        link = self.socket + '.new'
        os.symlink(self.socket_of, link)
        os.replace(link, self.socket)

    def start(self):
        start(self.data, self.log, clock=self.clock)

    def attach(self):
        """Makes a standby, for which commits then wait."""
        self.standby, socket = self.data + str(self.count), self.directory()
        run(program('pg_basebackup'), '-h', self.socket, '-p', '5432', '-U',
            'postgres', '-D', self.standby, '-R', '-c', 'fast', '--no-sync')
        self.configure(self.standby, socket)
        self.standby_socket = socket
        start(self.standby, self.log, clock=self.clock)
        self.set_standbys('*')
        self.catch_up()

    def set_standbys(self, names):
        session = self.session()
        session.run("ALTER SYSTEM SET synchronous_standby_names = '%s'" % names)
        session.run('SELECT pg_reload_conf()')
        session.close()

    def catch_up(self):
        """What survives a crash of the old one is on the standby, too."""
        session = self.session()
        now, until = session.one('SELECT pg_current_wal_lsn()'), time.monotonic() + 60
        while not session.run("SELECT 1 FROM pg_stat_replication WHERE sync_state "
                              "= 'sync' AND flush_lsn >= %s", now):
            check(time.monotonic() < until, self.name, 'has no standby')
            time.sleep(0.05)
        session.close()

    def crash(self):
        with self.lock:
            self.kill()
            self.start()
            self.catch_up()

    def promote(self):
        """Promotes the standby, and makes a new standby."""
        with self.lock:
            self.kill()
            old = self.data
            run(program('pg_ctl'), '-D', self.standby, '-w', 'promote')
            self.data, self.socket_of = self.standby, self.standby_socket
            self.point()
            self.set_standbys('')
            shutil.rmtree(old)
            self.attach()

    def stop(self):
        super().stop()
        self.data = getattr(self, 'standby', self.data)
        super().stop()


class World:

    def __init__(self, work, seconds, seed, cables, mistake):
        self.tools = SCALE_OUT
        if mistake:
            self.tools = os.path.join(work, 'scale-out')
            shutil.copytree(SCALE_OUT, self.tools)
            file, old, new = MISTAKES[mistake]
            file = os.path.join(self.tools, file)
            with open(file) as tool:
                text = tool.read()
            if text.count(old) != 1:
                raise ValueError(mistake + ' does not fit its file')
            with open(file, 'w') as tool:
                tool.write(text.replace(old, new))
        self.work, self.rng, self.cables = work, random.Random(seed), cables
        self.began = time.monotonic()
        self.until = self.began + seconds
        self.targets, self.problems, self.events = [0, 1, 2, 3], [], {}
        self.template = os.path.join(work, 'template')
        run(program('initdb'), '-D', self.template, '-U', 'postgres', '-A', 'trust',
            '--no-sync', '--locale=C.UTF-8')
        self.routers = [Server(work, 'r%d' % n, self.template) for n in (1, 2)]
        self.shards = [Pair(work, 's%d' % n, self.template, AHEAD * (n == 2))
                       for n in range(4)]
        self.far, self.far_string = None, None
        self.slots = []         # of the scopes

    def is_over(self):
        return time.monotonic() > self.until or bool(self.problems)

    def count(self, what, number=1):
        self.events[what] = self.events.get(what, 0) + number

    def string(self, shard):
        return 'host=%s port=5432 dbname=postgres %s' % (shard.socket, CAREFUL)

    def start(self):
        for server in self.routers + self.shards:
            server.start()
        for shard in self.shards:
            prepare(shard)
            shard.session().run('ALTER ROLE app SET synchronous_commit = on')
            shard.session().run('ALTER ROLE relay SET synchronous_commit = on')
        run(os.path.join(self.tools, 'install'), APPLICATION, self.routers[0].dsn(),
            *(self.string(shard) + ' user=postgres' for shard in self.shards))
        second = self.routers[1].dsn()
        run(program('psql'), '-X', '-q', '-d', second, '-v', 'application='
            + APPLICATION, '-v', 'servers=' + ', '.join(
                "p%d '%s'" % (n, self.string(shard))
                for n, shard in enumerate(self.shards)),
            '-f', os.path.join(self.tools, 'router.sql'))
        made = run(program('psql'), '-XAtq', '-d', self.shards[0].dsn(), '-f',
                   os.path.join(self.tools, 'functions.sql'))
        run(program('psql'), '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', second,
            input=made)
        for router in self.routers:
            session = router.session()
            session.run('CREATE ROLE web LOGIN IN ROLE idem_application')
            session.run('ALTER ROLE web SET search_path = idempotency')
            session.close()
        self.give_away()
        self.slots = [slot for slot, in self.shards[0].session().run(
            "SELECT idem_guard.slot('scope-' || n) FROM generate_series(0, %s) AS n",
            SCOPES - 1)]
        for shard in self.shards:
            shard.attach()
        self.start_far()

    def give_away(self):
        """Most of the first shard's slots, so that draining it takes no minutes."""
        slots = [slot for slot in range(0, 256, 4) if slot % 32]
        for shard, is_open in (0, False), (1, True):
            self.shards[shard].session().run(
                "SELECT idem_guard.force(slot, '', %s, 2) FROM unnest(%s) AS slot",
                is_open, slots)
        for router in self.routers:
            router.session().run('UPDATE idem_map.slots SET shard = 1, epoch = 2 '
                                 'WHERE slot = ANY (%s)', slots)

    def start_far(self):
        """The fifth shard, on a host of its own if the kernel allows networks."""
        self.far = Server(self.work, 's4', self.template)
        words = ()
        self.far_string = self.string(self.far)
        if self.cables:
            address = self.cables.address('clients', HOST)
            with open(os.path.join(self.far.data, 'postgresql.conf'), 'a') as file:
                # Otherwise sessions of lost clients occupy all connections.
                file.write("listen_addresses = '%s'\ntcp_keepalives_idle = 2\n"
                           'tcp_keepalives_interval = 1\n'
                           'tcp_keepalives_count = 3\n' % address)
            with open(os.path.join(self.far.data, 'pg_hba.conf'), 'a') as file:
                file.write('host all all samenet trust\n')
            words = self.cables.command(HOST)
            self.far_string = 'host=%s port=5432 dbname=postgres %s' % (
                address, CAREFUL)
        start(self.far.data, self.far.log, *words)
        prepare(self.far)
        self.far.session().run('ALTER ROLE app SET synchronous_commit = on')

    def stop(self):
        for server in self.routers + self.shards + [self.far]:
            if server:
                server.stop()

    def tool(self, name, *arguments, limit=None):
        """Its exit status and output; killed after a time."""
        process = subprocess.Popen(
            [os.path.join(self.tools, name), *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            self.count('moves killed')
        if 'Traceback' in output:
            self.problems.append(output)
        return process.returncode, output

    def all_shards(self):
        return self.shards + [self.far]


def any_scope(rng):
    """Some scopes are in use, and move, more often than others."""
    return int(SCOPES * rng.random() ** 2)


#
# Faults
#

def move(world, router, rng):
    """Moves by one router, which do not change the map of the other one."""
    dsn = world.routers[router].dsn()
    while not world.is_over():
        number = any_scope(rng)
        what = [dsn, 'scope-%d' % number]
        if rng.random() < 0.3:
            what = ['--slot', dsn, world.slots[number]]
        if rng.random() < 0.2:
            what.insert(0, '--copy')
        if rng.random() < 0.2:
            what.insert(0, '--back')
        else:
            what.append(rng.choice(world.targets))
        status, _ = world.tool('move', '--timeout', 10, *what,
                               limit=rng.uniform(0.2, 4)
                               if rng.random() < 0.3 else None)
        world.count('moves' if status == 0 else 'moves that failed')


def change_shards(world):
    """The first router adds the fifth shard, and removes the first one."""
    first, second = (router.dsn() for router in world.routers)

    def insist(*arguments):
        while not world.problems:
            status, output = world.tool('shards', '--also', second, *arguments)
            if status == 0:
                return
            world.count('commands that failed')
            check(time.monotonic() < world.until + 120, arguments, output)
            time.sleep(0.5)

    time.sleep(0.1 * (world.until - world.began))
    insist('--connection', world.far_string, 'add', first,
           world.far_string + ' user=postgres')
    world.targets = [0, 1, 2, 3, 4]
    world.count('shards added')
    time.sleep(0.2 * (world.until - world.began))
    world.targets = [1, 2, 3, 4]
    insist('--timeout', 10, '--copy', 'drain', first, 0)
    while not world.problems:
        insist('refresh', first)
        status, output = world.tool('shards', '--also', second, 'remove', first, 0)
        if status == 0:
            world.count('shards removed')
            return
        check(time.monotonic() < world.until + 120, output)
        insist('--timeout', 10, '--copy', 'drain', first, 0)


def trouble(world, rng):
    while not world.is_over():
        time.sleep(rng.uniform(0.5, 2))
        what = rng.random()
        if what < 0.3:
            rng.choice(world.shards[1:]).promote()
            world.count('standbys promoted')
        elif what < 0.7:
            rng.choice(world.shards[1:]).crash()
            world.count('crashes of shards')
        elif what < 0.8:
            router = rng.choice(world.routers)
            router.kill()
            router.start()
            world.count('crashes of routers')
        elif world.cables and 4 in world.targets:
            world.cables.cut(HOST, 'clients')
            time.sleep(rng.uniform(1, 6))
            world.cables.plug(HOST, 'clients')
            world.count('network cuts')


def relay(world, shard, rng, deliveries):
    """Takes leases, and loses some of them."""
    session = None
    while not world.is_over() or deliveries.is_draining:
        try:
            session = session or Session(shard.dsn(RELAY))
            rows = session.run("SELECT id, topic, message_key, payload FROM "
                               "idem_outbox_take(10, lease => '1 s')")
            if not rows:
                time.sleep(0.05)
                continue
            for _, topic, key, payload in rows:
                deliveries.add(topic, key, payload['n'])
            if rng.random() < 0.2 and not deliveries.is_draining:
                world.count('leases lost')
                time.sleep(rng.uniform(0, 1.5))
                continue
            session.run('SELECT idem_outbox_ack(%s::bigint[])',
                        [row[0] for row in rows])
        except psycopg2.Error as error:
            if error.pgcode not in UNKNOWN:
                raise
            session = None
            time.sleep(0.05)


class Deliveries:

    def __init__(self):
        self.lock, self.found, self.is_draining = threading.Lock(), {}, True

    def add(self, topic, key, number):
        with self.lock:
            seen = self.found.setdefault((topic, key), [])
            if number not in seen:
                check(not seen or number > seen[-1], 'message', topic, key, number,
                      'comes after', seen[-1:])
                seen.append(number)


def report(world, clients):
    while not world.is_over():
        time.sleep(10)
        print('# %.0f s: %d answers; %s' % (
            time.monotonic() - world.began,
            sum(client.answers for client in clients),
            ', '.join('%d %s' % (number, what)
                      for what, number in sorted(world.events.items()))), flush=True)


#
# Clients
#

class Client:

    def __init__(self, world, number):
        self.world, self.number = world, number
        self.rng = random.Random('%s client %d' % (world.rng.random(), number))
        self.sessions, self.made = {}, 0
        self.done = []          # scope, key, body
        self.used, self.sequences, self.actions, self.tokens = [], {}, {}, {}
        self.messages = {}
        self.refused = self.lost = self.answers = 0

    def router(self):
        number = self.rng.randrange(2)
        return self.session(self.world.routers[number].dsn('web'))

    def session(self, dsn):
        if dsn not in self.sessions:
            self.sessions[dsn] = Session(dsn)
            self.sessions[dsn].run("SET statement_timeout = '20s'")
        return self.sessions[dsn]

    def drop(self):
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()

    def insist(self, work, scope):
        """Until it is answered.  Returns the answer, and whether an earlier try of
        it may have been done."""
        patience, maybe = time.monotonic() + 120, False
        while True:
            try:
                answer = work()
                self.answers += 1
                return answer, maybe
            except psycopg2.Error as error:
                check(time.monotonic() < patience, 'no answer for', scope, error)
                if error.pgcode in REFUSED:
                    self.refused += 1
                    time.sleep(self.rng.uniform(0.005, 0.05))
                    if error.pgcode == '55000':
                        self.find(scope)
                elif error.pgcode in UNKNOWN:
                    self.lost += 1
                    maybe = True
                    time.sleep(self.rng.uniform(0.02, 0.2))
                else:
                    raise
                self.drop()

    def find(self, scope):
        try:
            self.router().run('SELECT idem_find_shard(%s)', scope)
        except psycopg2.Error as error:
            check(error.pgcode in REFUSED + UNKNOWN, error)

    def scope(self):
        return 'scope-%d' % any_scope(self.rng)

    def new(self, stem):
        self.made += 1
        return '%s-%d-%08d' % (stem, self.number, self.made)

    def run(self):
        works = (self.request, self.again, self.again, self.again, self.once,
                 self.append, self.act, self.job, self.routed)
        while not self.world.is_over():
            self.rng.choice(works)()

    def request(self):
        """One transaction on the shard."""
        scope, key = self.scope(), self.new('request-key')
        number = self.messages.setdefault(scope, [0])[-1] + 1

        def work():
            string = self.router().one('SELECT idem_shard(%s)', scope)
            shard = self.session(string + ' user=app')
            shard.run('BEGIN')
            shard.run('SELECT idem_pin_scope(%s)', scope)
            outcome = shard.one('SELECT outcome FROM idem_claim(%s, %s)', scope, key)
            if outcome == 'new':
                shard.run('INSERT INTO effects VALUES (%s, %s)', scope, key)
                shard.run('SELECT idem_publish(%s, jsonb_build_object(%s, %s), %s)',
                          scope, 'n', number, 'client-%d' % self.number)
                shard.run('SELECT idem_complete(%s, %s, 200, %s::text)', scope, key,
                          key)
            if self.rng.random() < 0.3:     # A move must wait for it.
                time.sleep(self.rng.choice((0.05, 0.1, 0.5)))
            shard.run('COMMIT')
            return outcome

        outcome, maybe = self.insist(work, scope)
        while outcome == 'in_progress':     # of a session that is cut off
            time.sleep(0.1)
            outcome, _ = self.insist(work, scope)
        check(outcome == 'new' or maybe and outcome == 'replay', key, outcome)
        self.messages[scope].append(number)
        self.done.append((scope, key, key))

    def again(self):
        """What is known is known everywhere, now."""
        if not self.done:
            return
        scope, key, body = self.rng.choice(self.done)
        (outcome, found), _ = self.insist(lambda: self.router().run(
            'SELECT outcome, response_body FROM idem_claim(%s, %s)', scope, key)[0],
            scope)
        equal((outcome, found), ('replay', body), scope, key)
        if self.used:
            scope, token = self.rng.choice(self.used)
            first, _ = self.insist(lambda: self.router().one(
                'SELECT idem_once(%s, %s)', scope, token), scope)
            equal(first, False, scope, token)

    def routed(self):
        scope, key = self.scope(), self.new('routed-key')
        (outcome, _), maybe = self.insist(lambda: self.router().run(
            "SELECT outcome, response_body FROM idem_run(%s, %s, 'work(jsonb)', "
            "jsonb_build_object('scope', %s, 'key', %s), wait => '5 s')",
            scope, key, scope, key)[0], scope)
        if outcome == 'in_progress':
            return
        check(outcome == 'new' or maybe and outcome == 'replay', key, outcome)
        (outcome, body), _ = self.insist(lambda: self.router().run(
            'SELECT outcome, response_body FROM idem_claim(%s, %s)', scope, key)[0],
            scope)
        equal(outcome, 'replay', key)
        self.done.append((scope, key, body))

    def once(self):
        scope, token = self.scope(), self.new('token')
        first, maybe = self.insist(lambda: self.router().one(
            'SELECT idem_once(%s, %s)', scope, token), scope)
        check(first or maybe, scope, token, 'was used before')
        self.used.append((scope, token))

    def append(self):
        scope = self.scope()
        last = self.sequences.get(scope, 0)
        (outcome, found), maybe = self.insist(lambda: self.router().run(
            'SELECT outcome, last_client_seq FROM idem_try_append(%s, %s, %s, '
            'allow_gaps => false)', scope, 'client-%d' % self.number, last + 1)[0],
            scope)
        if outcome == 'in_flight':
            return
        check(outcome == 'appended' or maybe and outcome == 'duplicate', scope, last,
              outcome, found)
        self.sequences[scope] = last + 1

    def act(self):
        scope, entity = self.scope(), 'of-%d' % self.number
        last = self.actions.get(scope, 0)
        done, maybe = self.insist(lambda: self.router().one(
            "SELECT should_process FROM idem_try_advance(%s, 'e', %s, %s)", scope,
            entity, last + 1), scope)
        check(done or maybe, scope, last + 1, 'is stale')
        self.actions[scope] = last + 1
        done, _ = self.insist(lambda: self.router().one(
            "SELECT should_process FROM idem_try_advance(%s, 'e', %s, %s)", scope,
            entity, last + 1), scope)
        equal(done, False, scope, 'not stale')

    def job(self):
        """A claim whose lease ends at once: tokens rise, wherever it goes."""
        scope = self.scope()
        key = 'job-key-of-client-%d' % self.number
        (outcome, token), _ = self.insist(lambda: self.router().run(
            "SELECT outcome, claim_token FROM idem_claim(%s, %s, lease => '1 ms')",
            scope, key)[0], scope)
        if outcome == 'new':
            last = self.tokens.get(scope, 0)
            check(token > last, scope, key, 'token', token, 'is not above', last)
            self.tokens[scope] = token


def finish(world, clients, deliveries):
    """At the end: moves have ended, verify finds nothing, each effect exists once."""
    deadline = time.monotonic() + 300
    first, second = (router.dsn() for router in world.routers)
    places, status, output = set(), True, None
    while status:
        check(time.monotonic() < deadline, output)
        if output:              # what is left of moves that are over
            places = {('', 'scope-%d' % n) for n in range(SCOPES)} | {
                ('--slot', slot) for slot in world.slots}
        for shard in world.all_shards():
            places |= {('', scope) if scope else ('--slot', slot) for slot, scope in
                       shard.session().run('SELECT slot, scope FROM idem_guard.moves')}
        # The map of one router can have a move that was undone by the other one.
        for option, what in places:
            world.tool('move', '--back', '--also', second, *option.split(), first, what)
        for dsn in first, second:
            world.tool('shards', 'refresh', dsn)
        status, output = world.tool('verify', first, second)
    found = {}
    for shard in world.all_shards():
        for row in shard.session().run(
                "SELECT 'effect', scope, key FROM effects UNION ALL "
                "SELECT 'key', scope, key FROM idem_keys WHERE state = 'completed' "
                "UNION ALL SELECT 'token', scope, token FROM idem_tokens"):
            found[row] = found.get(row, 0) + 1
    count = 0
    for client in clients:
        for row in [(what, scope, key) for scope, key, _ in client.done
                    for what in ('effect', 'key')] + [
                        ('token', *pair) for pair in client.used]:
            equal(found.get(row), 1, 'on all shards,', row)
            count += 1
        for _ in range(50):
            client.again()
    until = time.monotonic() + 60
    wanted = {(scope, 'client-%d' % client.number): numbers[1:]
              for client in clients for scope, numbers in client.messages.items()
              if numbers[1:]}
    while any(deliveries.found.get(lane) != numbers
              for lane, numbers in wanted.items()):
        check(time.monotonic() < until, 'messages are missing', [
            (lane, numbers, deliveries.found.get(lane))
            for lane, numbers in wanted.items()
            if deliveries.found.get(lane) != numbers][:2])
        time.sleep(0.2)
    deliveries.is_draining = False
    return count


def main():
    work, seconds, seed = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    cables = None
    if network.enter():
        cables = network.Network(True)
        cables.add(HOST)
    work = os.path.join(work, 'proof')
    os.mkdir(work)
    world = World(work, seconds, seed, cables, *sys.argv[4:] or [None])
    deliveries, threads = Deliveries(), []

    def guard(function, *arguments):
        def guarded():
            try:
                function(*arguments)
            except Exception as error:
                world.problems.append('%s: %s' % (type(error).__name__, error))
                deliveries.is_draining = False

        threads.append(threading.Thread(target=guarded))
        threads[-1].start()

    try:
        world.start()
        world.began = time.monotonic()
        world.until = world.began + seconds
        clients = [Client(world, number) for number in range(CLIENTS)]
        for client in clients:
            guard(client.run)
        for shard in world.all_shards():
            guard(relay, world, shard, random.Random(seed), deliveries)
        workers = len(threads)
        guard(report, world, clients)
        for number in range(2):
            guard(move, world, number, random.Random('%s mover %d' % (seed, number)))
        guard(trouble, world, random.Random(seed + ' trouble'))
        guard(change_shards, world)
        for thread in threads[:CLIENTS] + threads[workers:]:
            thread.join()
        if not world.problems:
            count = finish(world, clients, deliveries)
        deliveries.is_draining = False
        for thread in threads:
            thread.join()
        if world.problems:
            raise Broken('\n'.join(world.problems))
        print('# %s%d answers, %d refused, %d lost; %s' % (
            '' if cables else 'no namespaces: no network was cut; ',
            sum(client.answers for client in clients),
            sum(client.refused for client in clients),
            sum(client.lost for client in clients),
            ', '.join('%d %s' % (number, what)
                      for what, number in sorted(world.events.items()))))
        print(count + sum(client.answers for client in clients))
    finally:
        world.until = 0
        deliveries.is_draining = False
        for thread in threads:
            thread.join()
        world.stop()
        if not os.environ.get('KEEP'):
            shutil.rmtree(work, ignore_errors=True)


if __name__ == '__main__':
    main()
