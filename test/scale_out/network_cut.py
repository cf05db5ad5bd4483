#!/usr/bin/python3
"""
A network that loses the packets between a move and a shard.

Adds a fifth shard, in a network of its own, to the router that PGHOST and PGPORT
point to, moves a scope there, cuts the network when the move back holds the
slot's lock, and removes the shard again.  Prints how much it has checked.

    network_cut.py WORK SHARD       a directory, and the first shard
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] + [os.path.join(HERE, *path) for path in (
    ('..', 'lib'), ('..', 'failover'), ('..', '..', 'scale-out'))]
sys.dont_write_bytecode = True

import network                                              # noqa: E402
import psycopg2                                             # noqa: E402
from checks import Session, check, equal                    # noqa: E402
from mover.places import Place                              # noqa: E402
from mover.servers import Failure, Shards                   # noqa: E402
from mover.servers import Server as Connection              # noqa: E402
from mover.steps import Move                                # noqa: E402
from servers import APPLICATION, SCALE_OUT, Server, program, run  # noqa: E402

HOST, SCOPE, NUMBER = 10, 'beyond-the-cut', 4


def start(cables, work):
    """The shard, on a host of its own."""
    template = os.path.join(work, 'far.template')
    run(program('initdb'), '-D', template, '-U', 'postgres', '-A', 'trust',
        '--no-sync', '--locale=C.UTF-8')
    shard = Server(work, 'far', template)
    shutil.rmtree(template)
    address = cables.address('clients', HOST)
    with open(os.path.join(shard.data, 'postgresql.conf'), 'a') as file:
        file.write("listen_addresses = '%s'\n" % address)
    with open(os.path.join(shard.data, 'pg_hba.conf'), 'a') as file:
        file.write('host all all samenet trust\n')
    run(*cables.command(HOST, program('pg_ctl'), '-D', shard.data, '-l',
                        shard.log, '-w', 'start'))
    session = shard.session()
    session.run('CREATE ROLE app LOGIN')
    session.run('CREATE EXTENSION idempotency')
    run(program('psql'), '-X', '-q', '-d', shard.dsn(), '-v', 'slots={}', '-v',
        'application=' + APPLICATION, '-f', os.path.join(SCALE_OUT, 'shard.sql'))
    return shard, 'host=%s port=5432 dbname=postgres' % address


def move(*arguments):
    return subprocess.Popen(
        [os.path.join(SCALE_OUT, 'move'), '--timeout', '5', *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def moved(*arguments):
    process = move(*arguments)
    output, _ = process.communicate()
    equal(process.returncode, 0, output)


class Suspended:
    """A mover that has locked the slot, and continues when the network is cut"""

    def __init__(self):
        router = Connection('dbname=router', 'the router')
        self.locked, self.failure = threading.Event(), None
        self.move = Move(Place(router, SCOPE, False), [router],
                         Shards(router, 'user=postgres'), 5, False)
        self.real, self.move.place.step = self.move.place.step, self.step

    def step(self, shard, function, *args, **options):
        found = self.real(shard, function, *args, **options)
        if function == 'close':
            self.locked.set()
            self.cut.wait()
        return found

    def there(self, to, output):
        try:
            with contextlib.redirect_stdout(output):
                self.move.there(to)
        except (Failure, psycopg2.Error) as failure:
            self.failure = failure
        self.locked.set()
        self.move.routers[0].connection.close()


def cut_off(cables, shard, home):
    moved('dbname=router', SCOPE, str(NUMBER))
    far = shard.session()
    slot = far.one('SELECT idem_guard.slot(%s)', SCOPE)
    mover, cut, output = Suspended(), threading.Event(), io.StringIO()
    mover.cut = cut
    thread = threading.Thread(target=mover.there, args=(home, output))
    thread.start()
    check(mover.locked.wait(60), 'no lock', output.getvalue())
    cables.cut(HOST, 'clients')
    began = time.monotonic()
    # A bystander of the slot, on the shard itself
    bystander = shard.session(APPLICATION)
    bystander.run("SET lock_timeout = '60s'")
    bystander.run('BEGIN')
    bystander.run('SELECT pg_advisory_xact_lock_shared(1229211981, %s)', slot)
    waited = time.monotonic() - began
    check(waited < 20, 'a bystander waited', waited, 's')
    bystander.run('COMMIT')
    cut.set()
    thread.join(90)
    output = output.getvalue()
    check(mover.failure and 'pg_terminate_backend(' in output, mover.failure, output)
    cables.plug(HOST, 'clients')
    moved('--back', 'dbname=router', SCOPE)
    equal(far.run('SELECT state FROM idem_guard.gate(idem_guard.slot(%s), %s)',
                  SCOPE, SCOPE), [('open',)])
    moved('dbname=router', SCOPE, str(home))
    print('# a bystander waited for %.0f s, the move for %.0f s' % (
        waited, time.monotonic() - began))
    return 6


def main():
    work, first = sys.argv[1:]
    if not network.enter():
        # Check at least the settings that make the kernel end the session.
        connection = Connection(first, 'the shard')
        equal(connection.one("SELECT count(*) FROM pg_settings WHERE "
                             "name = 'client_connection_check_interval' "
                             "AND setting = '2000'"), 1)
        print('# no namespaces: no network was cut\n1')
        return
    cables = network.Network(True)
    cables.add(HOST)
    router = Session('dbname=router')
    home = router.one('SELECT idem_map.shard(%s)', SCOPE)
    shard, string = start(cables, work)
    router.run("ALTER SERVER idempotency OPTIONS (ADD p%d '%s')"
               % (NUMBER, string))
    try:
        print(cut_off(cables, shard, home))
    finally:
        router.run('ROLLBACK')
        router.run('ALTER SERVER idempotency OPTIONS (DROP p%d)' % NUMBER)
        shard.stop()


main()
