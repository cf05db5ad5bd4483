# Requests whose clients are gone are completed.

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time

import psycopg2

from databases import Other
from endpoint import Endpoint
from processes import server_socket, through
from proxies import Gate, SlowLink
from reporting import page
from world import PROGRAM, equal, expect, free_port, until

ROUNDS = int(os.environ.get('ROUNDS', '300')) * 2 // 3
SEED = int(os.environ.get('SEED', '1'))


def claim(world, number, request, lease='1 ms', scope='shop'):
    key = 'key-of-a-request-%d' % number
    token = world.query('SELECT claim_token FROM idem_claim(%s, %s, lease => %s, request => %s)', scope, key, lease,
                        json.dumps(request))[0][0]
    return key, token


def lookup(world, key, scope='shop'):
    return world.query('SELECT state, response_status, response_body, response_headers::text FROM idem_lookup(%s, %s)', scope, key)[0]


def stores_response(world):
    """The response is stored, with its type; a failure is tried again."""
    answers = {1: (503, {}, b''), 2: (500, {}, b'bug')}
    endpoint = Endpoint(lambda request, number: answers.get(number, (
        201, {'Content-Type': 'application/json'}, b'{"order": 7, "text": "k\xc3\xa4se"}')))
    world.query('TRUNCATE idem_keys')
    key, token = claim(world, 1, {'n': 1})
    other, _ = claim(world, 2, {'n': 2}, scope='other')
    relay = world.relay('--c.resume=shop', '--c.sink=webhook', '--c.url=' + endpoint.url).started()
    until('it is completed', lambda: lookup(world, key)[0] == 'completed')
    equal('its response', lookup(world, key)[1:], (201, '{"order": 7, "text": "käse"}', '{"content-type":"application/json"}'))
    request = endpoint.requests[-1]
    equal('the request', (request.body, request.headers['Idempotency-Key'], request.headers['Idempotency-Scope'],
                          request.headers['Idempotency-Attempt']), (b'{"n": 1}', '"%s"' % key, 'shop', '4'))
    expect('its token', int(request.headers['Idempotency-Claim-Token']) > token)
    equal('requests', len(endpoint.requests), 3)
    equal('another scope', lookup(world, other, 'other')[0], 'started')
    expect('the log shows no key', key not in relay.said())
    equal('the status', relay.stop(), 0)
    endpoint.close()


def by_command(world):
    world.query('TRUNCATE idem_keys')
    good, _ = claim(world, 1, {'n': 1})
    bad, _ = claim(world, 2, {'bad': 1})
    relay = world.relay('--c.resume=*', '--c.sink=command', '--c.command=read -r body; case $body in *bad*) exit 1;; esac; '
                        'echo "$IDEM_TOPIC $IDEM_MESSAGE_ID ${IDEM_CLAIM_TOKEN:+token} $body"').started()
    until('it is completed', lambda: lookup(world, good)[0] == 'completed')
    equal('its response', lookup(world, good)[1:3], (200, 'shop %s token {"n": 1}\n' % good))
    until('it is tried again', lambda: relay.said().count('failed at attempt') >= 2)
    equal('the other', lookup(world, bad)[0], 'started')
    equal('the status', relay.stop(), 0)


def extends_lease(world):
    """While the request runs, no other relay sends it again.  A relay does not
    complete a claim that it has lost."""
    endpoint = Endpoint(lambda request, number: time.sleep(3) or (200, {}, b'slow'))
    world.query('TRUNCATE idem_keys')
    key, _ = claim(world, 1, {'n': 1})
    options = ('--c.resume=shop', '--c.sink=webhook', '--c.url=' + endpoint.url, '--lease=1s', '--wait=300ms')
    relays = [world.relay(*options).started() for _ in range(2)]
    until('it is completed', lambda: lookup(world, key)[0] == 'completed')
    equal('requests', len(endpoint.requests), 1)
    key, _ = claim(world, 2, {'n': 2})
    until('it is sent', lambda: len(endpoint.requests) == 2)
    world.query("SELECT idem_forget('shop', %s)", key)
    _, token = claim(world, 2, {'n': 2}, lease='1 hour')
    until('it is lost', lambda: any('is lost' in relay.said() for relay in relays))
    time.sleep(3)
    equal('the new claim', lookup(world, key)[0], 'started')
    equal('is held', world.query("SELECT idem_complete('shop', %s, 200, 'mine', claim_token => %s)", key, token), [(True,)])
    for relay in relays:
        equal('the status', relay.stop(), 0)
    endpoint.close()


def sent_once(world):
    """If a kept connection ends without a response, the request is sent again only
    with another token.  No connection is kept without use."""
    endpoint = Endpoint(lambda request, number: None if number == 2 else (200, {}, b''))
    world.query('TRUNCATE idem_keys')
    relay = world.relay('--c.resume=shop', '--c.sink=webhook', '--c.url=' + endpoint.url).started()
    for n in range(2):
        key, _ = claim(world, n, {'n': n})
        until('it is completed', lambda k=key: lookup(world, k)[0] == 'completed')
    equal('requests and tokens', (len(endpoint.requests), len({
        request.headers['Idempotency-Claim-Token'] for request in endpoint.requests})), (3, 3))
    until('no connection is left', lambda: not endpoint.connections, 5)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def locked_claim(world):
    """An application that holds its claim in an open transaction delays no
    other claim of the section."""
    taken, done = threading.Event(), threading.Event()

    def hold(request, number):
        if b'hold' not in request.body or taken.is_set():
            time.sleep(0.2)
            return 200, {}, b'ok'
        with contextlib.closing(psycopg2.connect('')) as other:
            other.cursor().execute("SELECT idem_complete('shop', %s, 200, 'mine', claim_token => %s)", (
                request.headers['Idempotency-Key'].strip('"'), request.headers['Idempotency-Claim-Token']))
            taken.set()
            done.wait(20)
            other.commit()
        return 200, {}, b'late'

    endpoint = Endpoint(hold)
    world.query('TRUNCATE idem_keys')
    held, _ = claim(world, 0, {'hold': 1})
    relay = world.relay('--c.resume=shop', '--c.sink=webhook', '--c.url=' + endpoint.url, '--lease=2s', '--wait=600ms').started()
    until('it is held', taken.is_set)
    # From now on, its lease must be extended.
    time.sleep(1.2)
    for n in range(1, 5):
        key, _ = claim(world, n, {'n': n})
        until('another one is completed', lambda k=key: lookup(world, k)[0] == 'completed', 4)
    equal('requests', len(endpoint.requests), 5)
    done.set()
    until('it is completed', lambda: lookup(world, held)[:3] == ('completed', 200, 'mine'))
    equal('the status', relay.stop(), 0)
    endpoint.close()


def locked_after_answer(world):
    """Claims that are answered, but whose rows are locked, take no places."""
    held = []

    def hold(request, number):
        if b'hold' in request.body:
            held.append(psycopg2.connect(''))
            held[-1].cursor().execute("SELECT idem_checkpoint('shop', %s, 'x', '{}', claim_token => %s)", (
                request.headers['Idempotency-Key'].strip('"'), request.headers['Idempotency-Claim-Token']))
        return 200, {}, b'ok'

    endpoint = Endpoint(hold)
    world.query('TRUNCATE idem_keys')
    for n in range(2):
        claim(world, n, {'hold': 1})
    relay = world.relay('--c.resume=shop', '--c.sink=webhook', '--c.url=' + endpoint.url, '--c.in_flight=2').started()
    until('they are held', lambda: len(held) == 2)
    until('their answers wait', lambda: relay.said().count('locked its row') == 2 or world.query(
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%idem_complete%'"))
    key, _ = claim(world, 2, {'n': 2})
    until('another one is completed', lambda: lookup(world, key)[0] == 'completed', 8)
    for connection in held:
        connection.close()
    until('they are completed', lambda: world.query("SELECT count(*) FROM idem_keys WHERE state = 'completed'") == [(3,)])
    equal('the status', relay.stop(), 0)
    endpoint.close()


def outage(world):
    """An endpoint that cannot be reached costs no attempt."""
    port = free_port()
    world.query('TRUNCATE idem_keys')
    with world.setting('max_attempts', 3):
        for n in range(5):
            claim(world, n, {'n': n})
        relay = world.relay('--c.resume=shop', '--c.sink=webhook', '--c.url=http://127.0.0.1:%d/' % port, '--lease=1s',
                            '--wait=300ms').started()
        until('it is tried again', lambda: relay.said().count('next try in') >= 4)
        endpoint = Endpoint(lambda request, number: (200, {}, b'ok'), port=port)
        until('they are completed', lambda: world.query("SELECT count(*) FROM idem_keys WHERE state = 'completed'") == [(5,)], 60)
        equal('requests', len(endpoint.requests), 5)
        equal('the status', relay.stop(), 0)
        endpoint.close()


def refused_completion(world):
    """A completion that the server refuses delays no other answer."""
    endpoint = Endpoint(lambda request, number: (500 if b'fail' in request.body else 200, {}, b''))
    world.query('TRUNCATE idem_keys')
    world.query('DROP ROLE IF EXISTS few')
    world.query('CREATE ROLE few LOGIN')
    world.query('GRANT EXECUTE ON FUNCTION idem_resume, idem_heartbeat, idem_fail TO few')
    try:
        relay = world.relay('--database=user=few', '--c.resume=*', '--c.sink=webhook', '--c.url=' + endpoint.url,
                            '--c.in_flight=2').started()
        claim(world, 1, {'n': 1})
        until('it is refused', lambda: 'permission denied for function idem_complete' in relay.said())
        claim(world, 2, {'fail': 1})
        until('the other one is tried again', lambda: len(endpoint.requests) >= 3, 8)
        equal('the first one', sum(b'fail' not in request.body for request in endpoint.requests), 1)
        relay.kill()
    finally:
        world.query('DROP OWNED BY few')
        world.query('DROP ROLE few')
    endpoint.close()


def lacks_privilege(world):
    """A role that lacks EXECUTE is reported, and the relay is not healthy."""
    endpoint = Endpoint(lambda request, number: (200, {}, b'ok'))
    port = free_port()
    world.query('TRUNCATE idem_keys')
    world.query('DROP ROLE IF EXISTS few')
    world.query('CREATE ROLE few LOGIN')
    world.query("SELECT idem_grant_relay('few')")
    options = ['--database=user=few', '--c.resume=*', '--c.sink=webhook', '--c.url=' + endpoint.url]
    try:
        done = subprocess.run([PROGRAM, '--check', *options], capture_output=True, text=True, timeout=30)
        equal('the status', done.returncode, 69)
        reported = done.stderr.splitlines()[0].partition('; run GRANT ')
        expect(done.stderr, reported[0].endswith('privileges on idem_resume, idem_heartbeat, idem_fail, idem_complete'))
        relay = world.relay(*options, '--metrics=127.0.0.1:%d' % port).started()
        expect(relay.said(), 'lacks privileges' in relay.said())
        until('it is refused', lambda: 'permission denied for function idem_resume' in relay.said())
        equal('the health', page(port, '/healthz')[0], 503)
        metrics = page(port, '/metrics')[1]
        expect('the database is up', '\nidem_relay_database_up 0\n' in metrics)
        expect('no failure is counted', '\nidem_relay_database_failures_total 0\n' not in metrics)
        world.query('GRANT ' + reported[2].replace(' TO it', ' TO few'))
        until('it is healthy', lambda: page(port, '/healthz')[0] == 200)
        key, _ = claim(world, 1, {'n': 1})
        until('it is completed', lambda: lookup(world, key)[0] == 'completed')
        until('it is counted', lambda: 'idem_relay_claims_completed_total{sink="c",kind="webhook"} 1\n' in page(
            port, '/metrics')[1])
        equal('the status', relay.stop(), 0)
        done = subprocess.run([PROGRAM, '--check', *options], capture_output=True, text=True, timeout=30)
        equal('the status', (done.returncode, done.stderr), (0, ''))
    finally:
        world.query('DROP OWNED BY few')
        world.query('DROP ROLE few')
    endpoint.close()


def returns_at_stop(world):
    """A relay that stops releases its claims at once."""
    endpoint = Endpoint(lambda request, number: time.sleep(30))
    world.query('TRUNCATE idem_keys')
    key, _ = claim(world, 1, {'n': 1})
    relay = world.relay('--c.resume=shop', '--c.sink=webhook', '--c.url=' + endpoint.url, '--c.timeout=1min',
                        '--stop_timeout=500ms').started()
    until('it is sent', lambda: len(endpoint.requests) == 1)
    began = time.monotonic()
    equal('the status', relay.stop(), 0)
    expect('it ended late', time.monotonic() - began < 5)
    equal('the claim', lookup(world, key)[0], 'failed')
    endpoint.close()


def arrives_late(world):
    """Claims that arrive after their leases are sent at their first attempt."""
    with through(world, SlowLink, 40000) as database:
        endpoint = Endpoint(lambda request, number: (200, {}, b'ok'))
        world.query('TRUNCATE idem_keys')
        for n in range(5):
            claim(world, n, {'n': 'x' * 30000})
        relay = world.relay(database, '--c.resume=shop', '--c.sink=webhook', '--c.url=' + endpoint.url,
                            '--lease=1s', '--wait=300ms').started()
        until('they are completed', lambda: world.query("SELECT count(*) FROM idem_keys WHERE state = 'completed'") == [(5,)])
        equal('attempts', world.query('SELECT max(attempt) FROM idem_keys'), [(2,)])
        equal('requests', len(endpoint.requests), 5)
        equal('the status', relay.stop(), 0)
    endpoint.close()


def outage_of_database(world):
    """A request that runs while the database is away for longer than its lease is not
    sent again."""
    goes_on = threading.Event()
    endpoint = Endpoint(lambda request, number: goes_on.wait(60) and (200, {}, b'ok'))
    other = Other(world)
    try:
        for n in range(5):
            claim(other, n, {'n': n})
        relay = world.relay('--database=' + other.where, '--c.resume=shop', '--c.sink=webhook', '--c.url=' + endpoint.url,
                            '--lease=1s', '--wait=300ms', '--c.timeout=60s').started()
        until('they are sent', lambda: len(endpoint.requests) == 5)
        other.stop()
        time.sleep(1.5)
        other.start()
        until('it is connected again', lambda: other.query(
            "SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%idem_resume%' AND pid <> pg_backend_pid()"))
        goes_on.set()
        until('they are completed', lambda: other.query("SELECT count(*) FROM idem_keys WHERE state = 'completed'") == [(5,)])
        equal('requests', len(endpoint.requests), 5)
        equal('the status', relay.stop(), 0)
    finally:
        other.remove()
        endpoint.close()


@contextlib.contextmanager
def full_disk(world):
    """The server answers each call about claims with an error."""
    functions = world.query(
        "SELECT oid::regprocedure::text, proname, pg_get_function_arguments(oid), pg_get_function_result(oid) FROM pg_proc "
        "WHERE proname IN ('idem_resume', 'idem_heartbeat', 'idem_fail', 'idem_complete')")
    for signature, name, arguments, result in functions:
        world.query("ALTER FUNCTION %s RENAME TO real_%s; CREATE FUNCTION %s(%s) RETURNS %s LANGUAGE plpgsql AS $$ BEGIN "
                    "RAISE EXCEPTION 'the disk is full' USING ERRCODE = '53100'; END $$" % (signature, name, name, arguments, result))
    try:
        yield
    finally:
        for signature, name, _, _ in functions:
            world.query('DROP FUNCTION %s; ALTER FUNCTION real_%s RENAME TO %s' % (signature, signature, name))


def errors_of_database(world):
    """A claim whose request is answered, or waits, while the server answers with errors
    for longer than its lease, costs no attempt."""
    goes_on = threading.Event()
    endpoint = Endpoint(lambda request, number: goes_on.wait(60) and (200, {}, b'ok'))
    port = free_port()
    with world.database('other', 'UTF8') as other:
        for n in range(5):
            claim(other, n, {'n': n})
            claim(other, n, {'n': n}, scope='kept')
        relay = world.relay('--database=dbname=other', '--c.resume=shop', '--c.sink=webhook', '--c.url=' + endpoint.url, '--lease=3s',
                            '--wait=1s', '--k.resume=kept', '--k.sink=webhook', '--k.url=http://127.0.0.1:%d/' % port).started()
        until('they are sent', lambda: len(endpoint.requests) == 5)
        until('the others are kept', lambda: relay.said().count('is deferred') >= 5)
        with full_disk(other):
            goes_on.set()
            time.sleep(5)
        later = Endpoint(lambda request, number: (200, {}, b'ok'), port=port)
        until('they are completed', lambda: other.query("SELECT count(*) FROM idem_keys WHERE state = 'completed'") == [(10,)])
        equal('the highest attempt', other.query('SELECT max(attempt) FROM idem_keys'), [(2,)])
        equal('requests', (len(endpoint.requests), len(later.requests)), (5, 5))
        equal('the status', relay.stop(), 0)
        other.connection.close()
    endpoint.close()
    later.close()


def returns_kept(world):
    """A relay that stops, or whose sink is disabled, returns the claims that it has
    kept at once."""
    options = ('--c.resume=shop', '--c.sink=webhook', '--c.url=http://127.0.0.1:%d/' % free_port())
    world.query('TRUNCATE idem_keys')
    key, _ = claim(world, 1, {'n': 1})
    relay = world.relay(*options).started()
    until('it is kept', lambda: 'is deferred' in relay.said())
    equal('the status', relay.stop(), 0)
    equal('the claim', lookup(world, key)[0], 'failed')
    relay = world.relay(*options, '--c.disable_after=1s').started()
    until('the sink is disabled', lambda: 'is disabled' in relay.said())
    until('the claim is returned', lambda: lookup(world, key)[0] == 'failed')
    equal('the status', relay.stop(), 0)


def returned_late(world):
    """A claim whose return waits for a locked row is returned even if the relay continues
    with its old configuration."""
    secret = os.path.join(world.directory, 'secret')
    with open(secret, 'w') as file:
        file.write('whsec_' + 'QUFB' * 8)
    os.chmod(secret, 0o600)
    port = free_port()
    world.query('TRUNCATE idem_keys')
    key, _ = claim(world, 1, {'n': 1})
    relay = world.relay('--c.resume=shop', '--c.sink=webhook', '--c.url=http://127.0.0.1:%d/' % port, '--c.secret_file=' + secret,
                        '--stop_timeout=100ms').started()
    until('its pause is long', lambda: relay.said().count('is deferred') >= 3)
    with contextlib.closing(psycopg2.connect('')) as other:
        other.cursor().execute('SELECT FROM idem_keys FOR UPDATE')
        relay.signal(signal.SIGHUP)
        until('it reloads', lambda: 'reloading' in relay.said())
        os.unlink(secret)
        until('it goes on', lambda: 'keeps the old one' in relay.said())
    endpoint = Endpoint(lambda request, number: (200, {}, b'ok'), port=port)
    until('it is completed', lambda: lookup(world, key)[0] == 'completed')
    equal('the status', relay.stop(), 0)
    endpoint.close()


def kept_too_long(world):
    """A claim that is kept is not sent after its lease, because another relay can
    have it."""
    directory = tempfile.mkdtemp(dir=world.directory)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(directory, '.s.PGSQL.5432'))
    listener.listen()
    gate = Gate(listener, server_socket, from_client=True)
    port = free_port()
    world.query('TRUNCATE idem_keys')
    claim(world, 1, {'n': 1})
    relay = world.relay('--database=host=%s port=5432' % directory, '--c.resume=shop', '--c.sink=webhook',
                        '--c.url=http://127.0.0.1:%d/' % port, '--lease=1s', '--wait=300ms').started()
    until('it is kept', lambda: 'is deferred' in relay.said())
    gate.opened.clear()
    until('its lease is over', lambda: world.query("SELECT key FROM idem_resume(1, '1 hour')"))
    endpoint = Endpoint(lambda request, number: (200, {}, b'ok'), port=port)
    used = relay.cpu()
    time.sleep(3)
    equal('requests', len(endpoint.requests), 0)
    expect('it keeps a processor busy', relay.cpu() - used < 0.3)
    gate.opened.set()
    key, _ = claim(world, 2, {'n': 2})
    until('another one is completed', lambda: lookup(world, key)[0] == 'completed')
    equal('requests', len(endpoint.requests), 1)
    equal('the status', relay.stop(), 0)
    listener.close()
    endpoint.close()


def killed(world):
    """Application and relays are killed: every effect happens once, and none is
    left."""
    world.query('TRUNCATE idem_keys')
    world.query('DROP TABLE IF EXISTS effects')
    world.query('CREATE TABLE effects (key text, n int)')
    port = free_port()
    chance = random.Random(SEED)
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'application.py')

    def application():
        return subprocess.Popen(['/usr/bin/python3', program, str(port)], stderr=subprocess.DEVNULL)

    def relay():
        return world.relay('--c.resume=shop', '--c.sink=webhook', '--c.url=http://127.0.0.1:%d/' % port, '--lease=1s',
                           '--wait=300ms', '--c.timeout=2s')

    process, relays, keys = application(), [relay(), relay()], []
    try:
        with world.setting('max_attempts', 100000):
            for _ in range(ROUNDS):
                for _ in range(5):
                    keys.append(claim(world, len(keys), {'n': len(keys)})[0])
                time.sleep(chance.random() * 0.3)
                if chance.random() < 0.5:
                    process.kill()
                    process.wait()
                    process = application()
                else:
                    victim = chance.randrange(2)
                    relays[victim].kill()
                    relays[victim] = relay()
            until('none is left', lambda: world.query("SELECT count(*) FROM idem_keys WHERE state <> 'completed'") == [(0,)], 120)
            equal('effects', world.query('SELECT count(*), count(DISTINCT key), count(DISTINCT n) FROM effects'), [(len(keys),) * 3])
            for running in relays:
                equal('the status', running.started().stop(), 0)
    finally:
        process.kill()
        process.wait()
    print('# %d requests, %d kills: each once, none left' % (len(keys), ROUNDS), flush=True)


TESTS = [
    ('completer: the response is stored, and a failure is tried again', stores_response),
    ('completer: a command completes a request', by_command),
    ('completer: the lease is extended, and a lost claim is not answered', extends_lease),
    ('completer: a token is sent once, even if the connection ends', sent_once),
    ('completer: a claim that its application has locked delays no other', locked_claim),
    ('completer: claims that are answered and locked take no places', locked_after_answer),
    ('completer: an outage of the endpoint costs no attempt', outage),
    ('completer: a completion that the server refuses delays no other answer', refused_completion),
    ('completer: a role that lacks a privilege is reported', lacks_privilege),
    ('completer: a relay that stops gives its claims back', returns_at_stop),
    ('completer: claims that arrive after their leases are sent', arrives_late),
    ('completer: an outage of the database, longer than the lease, sends no request again', outage_of_database),
    ('completer: errors of the server, for longer than the lease, cost no attempt', errors_of_database),
    ('completer: a relay that stops, or disables its sink, returns what it has kept', returns_kept),
    ('completer: a claim that waits for its return is returned after a reload without effect', returned_late),
    ('completer: a claim that is kept is not sent after its lease', kept_too_long),
    ('completer: application and relays are killed; every effect once, none left', killed),
]
