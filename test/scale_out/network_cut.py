#!/usr/bin/python3
"""
A network that loses the packets between a move and a shard.

Adds a fifth shard, in a network of its own, to the router that PGHOST and PGPORT
point to, moves a scope there, cuts the network when the move back holds the
slot's lock, and removes the shard again.  Prints how much it has checked.

    network_cut.py WORK SHARD       a directory, and the first shard
"""

import os
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] + [os.path.join(HERE, *path) for path in (
    ('..', 'lib'), ('..', 'failover'), ('..', '..', 'scale-out'))]
sys.dont_write_bytecode = True

import network                                              # noqa: E402
from checks import Session, check, equal, until             # noqa: E402
from mover.servers import Server as Connection              # noqa: E402
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


def cut_off(cables, shard, router, home):
    moved('dbname=router', SCOPE, str(NUMBER))
    router.run('BEGIN')
    router.run('SELECT 1 FROM idem_map.scopes WHERE scope = %s FOR UPDATE',
               SCOPE)
    process = move('dbname=router', SCOPE, str(home))
    far = shard.session()
    slot = far.one('SELECT idem_guard.slot(%s)', SCOPE)
    until(lambda: far.run(
        "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND classid = "
        "1229211981 AND mode = 'ExclusiveLock' AND granted"), 'no lock')
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
    router.run('COMMIT')
    output, _ = process.communicate(timeout=90)
    check(process.returncode and 'pg_terminate_backend(' in output
          and 'Traceback' not in output, output)
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
        print(cut_off(cables, shard, router, home))
    finally:
        router.run('ROLLBACK')
        router.run('ALTER SERVER idempotency OPTIONS (DROP p%d)' % NUMBER)
        shard.stop()


main()
