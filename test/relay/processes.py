# The process: signals, systemd, the metrics page, the database.

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

import amqp
from endpoint import Endpoint
from proxies import Cutter, Forwarder, Gate, SlowLink
from world import PROGRAM, Broken, World, deaf_port, equal, expect, free_port, until

OUT = ('--out.sink=stdout', '--out.topics=*')


def prints(world):
    relay = world.relay(*OUT, '--batch=7').started()
    for n in range(300):
        world.publish('t%d' % (n % 2), json.dumps({'n': n}), 'k%d' % (n % 10), '{"a": "b\\"c"}')
    world.all_acked(300)
    equal('the status', relay.stop(), 0)
    last = {}
    messages = [json.loads(line) for line in relay.lines()]
    equal('lines', len(messages), 300)
    for message in messages:
        key = message['topic'], message['message_key']
        expect('order of %s' % (key,), last.get(key, -1) < message['payload']['n'])
        last[key] = message['payload']['n']
    equal('headers', messages[0]['headers'], {'a': 'b"c'})


def to_pipe(world):
    """A slow reader of a pipe that accepts lines only in pieces."""
    ids = [world.publish('t', '"%s"' % ('x' * 300000), 'k%d' % (n % 3)) for n in range(12)]
    world.publish('t', '"%s"' % ('x' * 1000000))
    process = subprocess.Popen([PROGRAM, *OUT, '--lease=3s', '--wait=1s'], stdout=subprocess.PIPE)
    until('the pipe is full', lambda: world.leased() == 13)
    time.sleep(4)
    lines = [json.loads(process.stdout.readline()) for _ in range(13)]
    world.all_acked(13)
    expect('ids', {line['message_id'] for line in lines} > set(ids))
    equal('attempts', {line['attempt'] for line in lines}, {1})
    process.send_signal(signal.SIGTERM)
    equal('the status', process.wait(20), 0)
    process.stdout.close()


def cut_line(world):
    """A line that is written only in part when the relay starts again."""
    for n in range(3):
        world.publish('t', json.dumps(str(n) + 'x' * 300000))
    read, write = os.pipe()
    relay = world.relay(*OUT, '--stop_timeout=200ms', output=write)
    os.close(write)
    until('the pipe is full', lambda: world.leased() == 3)
    time.sleep(0.5)
    relay.signal(signal.SIGHUP)
    until('it has started again', lambda: relay.said().count('started') == 2)
    with os.fdopen(read) as lines:
        expect('a part', not lines.readline().endswith('}\n'))
        equal('whole lines', {json.loads(lines.readline())['payload'][0] for n in range(3)}, {'0', '1', '2'})
        world.all_acked(3)
        equal('the status', relay.stop(), 0)


def cloudevents(world):
    message_id = world.publish('orders', '{"n": 1}', 'k"1')
    relay = world.relay(*OUT, '--out.format=cloudevents', '--out.source=/shop').started()
    world.all_acked(1)
    relay.stop()
    event = json.loads(relay.lines()[0])
    expect('its time', event.pop('time').endswith('Z'))
    equal('the event', event, {
        'specversion': '1.0', 'id': message_id, 'source': '/shop', 'type': 'orders', 'subject': 'k"1',
        'partitionkey': 'k"1', 'datacontenttype': 'application/json', 'data': {'n': 1}})


def closed_output(world):
    world.publish('orders')
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen([PROGRAM, *OUT], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    _, said = process.communicate(timeout=30)
    equal('the status', process.returncode, 74)
    expect(said, 'could not write to standard output' in said)


def topics(world):
    world.publish('mine')
    world.publish('others')
    relay = world.relay('--out.sink=stdout', '--out.topics=mine').started()
    until('mine is taken', lambda: world.states().get('acked') == 1)
    relay.stop()
    equal('others', world.query("SELECT state, attempt FROM idem_outbox WHERE topic = 'others'"), [('pending', 0)])


def side_by_side(world):
    relays = [world.relay(*OUT, '--batch=20').started() for _ in range(3)]
    for n in range(500):
        world.publish('t', str(n), 'k%d' % (n % 50))
    world.all_acked(500)
    for relay in relays:
        equal('the status', relay.stop(), 0)
    ids = [json.loads(line)['message_id'] for relay in relays for line in relay.lines()]
    equal('lines', (len(ids), len(set(ids))), (500, 500))


def stops(world):
    """A relay that stops ends its deliveries and releases the other messages."""
    for n in range(20):
        world.publish('t', str(n), 'k%d' % (n % 4))
    relay = world.relay('--slow.sink=command', '--slow.topics=*', '--slow.command=sleep 0.5').started()
    until('some fly', lambda: world.leased() == 20)
    time.sleep(0.2)
    equal('the status', relay.stop(), 0)
    states = world.states()
    expect('some, not all, are delivered: %s' % states, 0 < states['acked'] < 20)
    equal('attempts of the others', world.query(
        "SELECT DISTINCT attempt - uncounted_attempts, awaiting_ack IS TRUE FROM idem_outbox WHERE state = 'pending'"),
        [(0, False)])


def stops_in_time(world):
    """A delivery that takes longer than stop_timeout is released, too."""
    world.publish('t')
    relay = world.relay('--slow.sink=command', '--slow.topics=*', '--slow.command=sleep 30', '--slow.timeout=60s',
                        '--stop_timeout=500ms').started()
    until('it flies', lambda: world.leased() == 1)
    began = time.monotonic()
    equal('the status', relay.stop(), 0)
    expect('it took %.1f s' % (time.monotonic() - began), time.monotonic() - began < 5)
    equal('leased', world.leased(), 0)


def stops_twice(world):
    """A second signal ends the relay at once, and after SIGHUP, SIGTERM ends it."""
    world.publish('t')
    mark = os.path.join(world.directory, 'flies')
    options = ('--slow.sink=command', '--slow.topics=*', '--slow.timeout=60s', '--slow.command=echo >> %s; sleep 30' % mark)
    relay = world.relay(*options, '--stop_timeout=60s').started()
    until('it flies', lambda: os.path.exists(mark))
    relay.signal(signal.SIGTERM)
    until('it stops', lambda: 'stopping' in relay.said())
    equal('the status', relay.stop(), 75)
    equal('leased', world.leased(), 1)
    world.query('SELECT idem_outbox_release(array_agg(id)) FROM idem_outbox')
    os.unlink(mark)
    relay = world.relay(*options, '--stop_timeout=2s').started()
    until('it flies', lambda: os.path.exists(mark))
    relay.signal(signal.SIGHUP)
    until('it reloads', lambda: 'reloading' in relay.said())
    equal('the status', relay.stop(), 0)
    equal('starts', relay.said().count('started'), 1)
    equal('leased', world.leased(), 0)


def stops_while_taking(world):
    """A relay that stops waits for a result that is arriving.  If that takes too long, the
    status says that messages stay leased."""
    for size, status, leased in (30000, 0, 0), (190000, 75, 1):
        with through(world, SlowLink, 15000) as database:
            world.begin()
            world.publish('t', '"%s"' % ('x' * size))
            relay = world.relay('--out.sink=stdout', '--out.topics=t', '--stop_timeout=%s' % ('0s' if leased else '10s'), database)
            until('it is taken', lambda: world.leased() == 1)
            equal('the status', relay.stop(), status)
            equal('leased', world.leased(), leased)
            equal('reported', relay.said().count('1 message(s) stay leased'), leased)
            equal('lines', relay.lines(), [])


def stops_asleep(world):
    """A relay stops at once, even if it has just begun to sleep."""
    for pause in 0.3, 0, 0, 0, 0.001, 0.002, 0.005, 0.01:
        relay = world.relay(*OUT).started()
        time.sleep(pause)
        began = time.monotonic()
        equal('the status', relay.stop(), 0)
        expect('it took %.1f s' % (time.monotonic() - began), time.monotonic() - began < 5)


def reloads(world):
    path = os.path.join(world.directory, 'reload.conf')
    port = free_port()

    def write(text):
        with open(path, 'w') as file:
            file.write(text)

    write('[out]\nsink = stdout\ntopics = *\n')
    relay = world.relay('--config=' + path).started()
    write('[out]\nsink = stdout\ntopics = *\ncolour = red\n')
    relay.signal(signal.SIGHUP)
    until('the relay reports the fault', lambda: 'reload.conf:4: there is no setting "colour"' in relay.said())
    world.publish('t', '1')
    world.all_acked(1)
    with socket.create_server(('127.0.0.1', 0)) as taken:
        write('metrics = 127.0.0.1:%d\n[out]\nsink = stdout\ntopics = *\n' % taken.getsockname()[1])
        relay.signal(signal.SIGHUP)
        until('the relay reports the fault', lambda: 'cannot listen on' in relay.said())
    for count, address in (2, '127.0.0.1'), (3, '127.0.0.1'), (4, '0.0.0.0'):
        write('metrics = %s:%d\n[out]\nsink = stdout\ntopics = *\nformat = cloudevents\n' % (address, port))
        relay.signal(signal.SIGHUP)
        until('it has started again', lambda n=count: relay.said().count('started') == n)
    world.publish('t', '2')
    world.all_acked(2)
    equal('the status', relay.stop(), 0)
    equal('data', json.loads(relay.lines()[1])['data'], 2)


def reloads_what_was_checked(world):
    """The file changes while the relay stops."""
    path = os.path.join(world.directory, 'checked.conf')
    goes_on = threading.Event()
    endpoint = Endpoint(lambda request, number: goes_on.wait(60) and (204, {}, b''))

    def write(more):
        with open(path, 'w') as file:
            file.write('stop_timeout = 1min\n[w]\nsink = webhook\ntimeout = 1min\nurl = %s\n%s\n' % (endpoint.url, more))

    write('topics = t')
    relay = world.relay('--config=' + path).started()
    world.publish('t')
    until('it is in flight', lambda: endpoint.requests)
    write('topics = u')
    relay.signal(signal.SIGHUP)
    until('it reloads', lambda: 'reloading' in relay.said())
    write('colour = red')
    relay.signal(signal.SIGHUP)
    until('it reports the fault', lambda: 'the configuration has errors' in relay.said())
    goes_on.set()
    world.publish('u')
    world.all_acked(2)
    relay.signal(signal.SIGHUP)
    until('it reports the fault again', lambda: relay.said().count('the configuration has errors') == 2)
    equal('the status', relay.stop(), 0)


def reloads_twice(world):
    """A second SIGHUP can arrive at any time."""
    relay = world.relay(*OUT).started()
    for gap in 0.01, 0.02, 0.03, 0.04, 0.06, 0.08:
        relay.signal(signal.SIGHUP)
        time.sleep(gap)
        relay.signal(signal.SIGHUP)
        time.sleep(0.2)
        equal('it has ended', relay.process.poll(), None)
    world.publish('t')
    world.all_acked(1)
    until('it runs', lambda: relay.said().endswith('started\n'))
    equal('the status', relay.stop(), 0)


def reloads_without_database(world):
    """SIGHUP while the database is away: the relay waits for it, as without
    SIGHUP."""
    directory = tempfile.mkdtemp(dir=world.directory)
    path = os.path.join(directory, '.s.PGSQL.5432')
    real = os.path.join(os.environ['PGHOST'], '.s.PGSQL.' + os.environ['PGPORT'])
    os.symlink(real, path)
    relay = world.relay('--database=host=%s port=5432' % directory, *OUT).started()
    os.unlink(path)
    relay.signal(signal.SIGHUP)
    until('it has started again', lambda: relay.said().count('started') == 2 or relay.process.poll() is not None)
    expect(relay.said(), 'the database cannot be reached' in relay.said())
    os.symlink(real, path)
    world.publish('t')
    world.all_acked(1)
    equal('the status', relay.stop(), 0)
    shutil.rmtree(directory)


def tells_systemd(world):
    path = os.path.join(world.directory, 'notify')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        listener.settimeout(10)
        relay = world.relay(*OUT, environment={'NOTIFY_SOCKET': path, 'WATCHDOG_USEC': '400000'})
        told = [listener.recv(100) for _ in range(4)]
        equal('told', told, [b'READY=1', b'WATCHDOG=1', b'WATCHDOG=1', b'WATCHDOG=1'])
        equal('the status', relay.stop(), 0)
        last = b''
        while last != b'STOPPING=1':
            last = listener.recv(100)
        # The watchdog sees that it is busy with a reload, and ready again.
        relay = world.relay(*OUT, environment={'NOTIFY_SOCKET': path}).started()
        relay.signal(signal.SIGHUP)
        until('it has started again', lambda: relay.said().count('started') == 2)
        equal('told', [listener.recv(100) for _ in range(3)], [b'READY=1', b'RELOADING=1', b'READY=1'])
        equal('the status', relay.stop(), 0)
    os.unlink(path)


# Stand-ins for the commands that the steps of README.md run as root.  The stand-in of
# the service manager gives the file to the relay as the unit says.
ROOT = r"""
useradd() { echo "$@" | grep -q ' idem-relay$'; }
install() { command install -m "$2" "$5" "$6"; }
runuser() { [ "$1 $2 $3" = "-u idem-relay --" ] && shift 3 && "$@"; }
systemctl() {
	sed -n 's/^LoadCredential=\(.*\):\(.*\)/\1 \2/p' relay/idem-relay.service | while read -r name from; do
		mkdir "$DIR/credentials"
		command install -m 400 "$DIR$from" "$DIR/credentials/$name"
		chmod 000 "$DIR$from"
	done
	command=$(sed -n 's/^ExecStart=//p' relay/idem-relay.service | sed "s|%d|$DIR/credentials|; s|^/usr/bin/idem-relay|$PROGRAM|")
	$command & echo $! >"$DIR/pid"
}
idem-relay() { "$PROGRAM" "$@"; }
"""


def step_by_step(world):
    """The steps of README.md, with the sample and the unit."""
    amqp.start(world)
    directory = tempfile.mkdtemp(dir=world.directory)
    with open('relay/README.md') as file:
        page = file.read()
    page = page[page.index('## Setting it up'):page.index('## Configuration')]
    steps = re.findall(r'```(sh|sql)\n(.*?)```', page, re.S)
    equal('steps', [kind for kind, _ in steps], ['sh', 'sql', 'sh', 'sh', 'sh'])
    os.mkdir(directory + '/etc')
    pid = None
    try:
        for kind, step in steps:
            if kind == 'sql':
                world.query(step)
                continue
            step = step.replace('/usr/local/share/doc/idem-relay', 'relay').replace('/etc/', directory + '/etc/')
            with open(directory + '/log', 'ab') as log:
                subprocess.run(['bash', '-ec', ROOT + step], check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                               env={**os.environ, 'DIR': directory, 'PROGRAM': PROGRAM})
            if 'install' in step:
                path = directory + '/etc/idem-relay.conf'
                with open(path) as file:
                    text = file.read()
                expect(text, 'database = dbname=shop user=idem-relay\n' in text)
                with open(path, 'w') as file:
                    file.write(text.replace('dbname=shop', 'dbname=postgres').replace(
                        'amqp://guest:guest@localhost:5672/%2f', amqp.broker.url))
        with open(directory + '/pid') as file:
            pid = int(file.read())
        until('it has the role', lambda: world.query(
            "SELECT 1 FROM pg_stat_activity WHERE usename = 'idem-relay' AND query LIKE '%%idem_outbox_take%%'"))
        connection, channel = amqp.broker.channel()
        channel.queue_declare('orders', durable=True)
        world.publish('orders')
        world.all_acked(1)
        amqp.drain(channel, 'orders', 1)
        connection.close()
    except (subprocess.CalledProcessError, Broken) as error:
        with open(directory + '/log') as log:
            raise Broken('%s\n%s' % (error, log.read())) from None
    finally:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            until('it has ended', lambda: not os.path.exists('/proc/%d/exe' % pid))
        world.query("SELECT idem_revoke('\"idem-relay\"')")
        world.query('DROP ROLE IF EXISTS "idem-relay"')
    shutil.rmtree(directory)


def shows_metrics(world):
    port = free_port()
    relay = world.relay(*OUT, '--metrics=127.0.0.1:%d' % port).started()
    for n in range(10):
        world.publish('t', str(n))
    world.all_acked(10)

    def figures():
        with urllib.request.urlopen('http://127.0.0.1:%d/metrics' % port, timeout=5) as answer:
            return {sample.name: sample.value for family in text_string_to_metric_families(answer.read().decode())
                    for sample in family.samples}

    until('it has counted', lambda: figures()['idem_relay_acked_total'] == 10)
    found = figures()
    equal('taken, delivered', (found['idem_relay_taken_total'], found['idem_relay_sink_delivered_total']), (10, 10))
    equal('up', (found['idem_relay_sink_up'], found['idem_relay_database_up']), (1, 1))
    try:
        urllib.request.urlopen('http://127.0.0.1:%d/other' % port, timeout=5)
        status = 200
    except urllib.error.HTTPError as error:
        status = error.code
    equal('another page', status, 404)
    silent = [socket.create_connection(('127.0.0.1', port)) for _ in range(20)]
    equal('figures in spite of connections that ask nothing', figures()['idem_relay_taken_total'], 10)
    for one in silent:
        one.close()
    equal('the status', relay.stop(), 0)


def without_execute(world):
    """database_up is 0 if the database refuses the relay's calls."""
    port = free_port()
    world.query('DROP ROLE IF EXISTS few')
    world.query('CREATE ROLE few LOGIN')
    world.query("SELECT idem_grant_relay('few')")
    relay = world.relay(*OUT, '--database=user=few', '--wait=1s', '--metrics=127.0.0.1:%d' % port).started()

    def up():
        with urllib.request.urlopen('http://127.0.0.1:%d/metrics' % port, timeout=5) as answer:
            return '\nidem_relay_database_up 1\n' in answer.read().decode()

    try:
        until('it is up', up)
        world.query("SELECT idem_revoke('few')")
        until('it is down', lambda: not up())
        time.sleep(2)
        equal('up', up(), False)
        world.query("SELECT idem_grant_relay('few')")
        until('it is up again', up)
        equal('the status', relay.stop(), 0)
    finally:
        world.query("SELECT idem_revoke('few')")
        world.query('DROP ROLE few')


def upgraded(world):
    """SIGHUP starts the program that has replaced the running one."""
    directory = tempfile.mkdtemp(dir=world.directory)
    program, mark = os.path.join(directory, 'idem-relay'), os.path.join(directory, 'mark')
    shutil.copy(PROGRAM, program)
    with open(os.path.join(directory, 'log'), 'wb') as log:
        process = subprocess.Popen([program, *OUT], stdout=log, stderr=log)
    try:
        world.publish('t')
        world.all_acked(1)
        with open(program + '.new', 'w') as file:
            file.write('#!/bin/sh\necho "$@" >%s.new && mv %s.new %s\n' % (mark, mark, mark))
        os.chmod(program + '.new', 0o755)
        os.rename(program + '.new', program)
        process.send_signal(signal.SIGHUP)
        equal('the status', process.wait(20), 0)
    finally:
        process.kill()
        process.wait()
    with open(mark) as file:
        equal('its options', file.read().split(), list(OUT))
    shutil.rmtree(directory)


def survives_database(world):
    """Messages that were delivered during an outage of the database are acknowledged later."""
    first = world.publish('t', '1')
    relay = world.relay('--slow.sink=command', '--slow.topics=*',
                        '--slow.command=echo "$IDEM_MESSAGE_ID" >>%s/seen; sleep 1' % world.directory).started()
    seen = os.path.join(world.directory, 'seen')
    until('it flies', lambda: os.path.exists(seen))
    world.crash_database()
    world.all_acked(1)
    second = world.publish('t', '2')
    world.all_acked(2)
    with open(seen) as file:
        equal('deliveries', file.read().split(), [first, second])
    os.unlink(seen)
    equal('the status', relay.stop(), 0)


def bounded(world):
    """The relay holds no more than its limits, for any number of messages."""
    for n in range(400):
        world.publish('t', str(n))
    world.relay('--slow.sink=command', '--slow.topics=*', '--slow.command=sleep 5', '--max_messages=50',
                '--batch=20').started()
    time.sleep(1.5)
    expect('%d are leased' % world.leased(), 0 < world.leased() <= 50)


def disk_full(world):
    """With a file on a full disk, no message is lost, no attempt counts, and no
    line is cut off."""
    for n in range(100):
        world.publish('t', '"%s"' % ('x' * 2000), 'k%d' % (n % 10))
    # A small file system that does not need root.
    directory = tempfile.mkdtemp(dir=world.directory)
    script = ('mount -t tmpfs -o size=64k none "$0" && head -c 30000 /dev/zero >"$0/ballast" && '
              '{ "$@" 2>"$0.log"; status=$?; echo the end; } >"$0/out"; cp "$0/out" "$0.out"; exit $status')
    process = subprocess.Popen(['unshare', '--user', '--map-root-user', '--mount', 'sh', '-c', script, directory, PROGRAM,
                                *OUT, '--stop_timeout=300ms', '--lease=3s', '--wait=1s'], start_new_session=True)

    def said():
        try:
            with open(directory + '.log') as log:
                return log.read()
        except FileNotFoundError:
            return ''

    try:
        until('it waits', lambda: 'sink "out" is paused: No space left on device' in said())
        until('what did not fit is given back', lambda: 0 < world.leased() < 40)
        time.sleep(2)
        relay = int(subprocess.check_output(['pgrep', '-g', str(process.pid), '-x', 'idem-relay'], text=True))
        os.unlink('/proc/%d/root%s/ballast' % (relay, directory))
        until('it continues', lambda: 'sink "out" continues' in said())
        until('it waits again', lambda: said().count('No space left on device') == 2)
        os.kill(relay, signal.SIGTERM)
        equal('the status', process.wait(20), 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with open(directory + '.out') as out:
        lines = out.read().splitlines()
    equal('what is written next', lines.pop(), 'the end')
    equal('lines', len({json.loads(line)['message_id'] for line in lines}), world.states()['acked'])
    equal('lines twice', len(lines), world.states()['acked'])
    equal('attempts', world.query('SELECT DISTINCT attempt - uncounted_attempts FROM idem_outbox ORDER BY 1'), [(0,), (1,)])
    equal('leased', world.leased(), 0)


def fails_over(world):
    """After a crash of the primary and a promotion of the standby, the relay finds
    the host of the connection string that accepts writes."""
    standby = os.path.join(world.directory, 'standby')
    bindir = subprocess.check_output([os.environ['PG_CONFIG'], '--bindir'], text=True).strip()
    control = [os.path.join(bindir, 'pg_ctl'), '-D', standby]
    subprocess.run([os.path.join(bindir, 'pg_basebackup'), '-D', standby, '-R', '-c', 'fast', '-X', 'stream'], check=True)
    subprocess.run([*control, '-o', '-p 5433', '-l', standby + '.log', '-w', 'start'], check=True, stdout=subprocess.DEVNULL)
    try:
        both = 'host=%s,%s port=5433,5432' % (os.environ['PGHOST'], os.environ['PGHOST'])
        relay = world.relay(*OUT, '--database=' + both).started()
        world.publish('t', '1', 'k')
        world.all_acked(1)
        until('the standby has all', lambda: world.query('SELECT replay_lsn >= pg_current_wal_lsn() FROM pg_stat_replication')
              == [(True,)])
        world.stop_database()
        subprocess.run([*control, '-w', 'promote'], check=True, stdout=subprocess.DEVNULL)
        promoted = World(world.directory, 'port=5433')
        for n in range(2, 12):
            promoted.publish('t', str(n), 'k')
        promoted.all_acked(11, 40)
        equal('the status', relay.stop(), 0)
        payloads = [json.loads(line)['payload'] for line in relay.lines()]
        equal('messages', sorted(set(payloads)), list(range(1, 12)))
    finally:
        subprocess.run([*control, '-m', 'immediate', 'stop'], stdout=subprocess.DEVNULL)
        shutil.rmtree(standby)
        world.start_database()


def server_socket():
    """A connection to the test's server."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.path.join(os.environ['PGHOST'], '.s.PGSQL.' + os.environ['PGPORT']))
    return server


@contextlib.contextmanager
def through(world, link, limit):
    """The relay's option for the test's server behind a link of proxies.py."""
    with tempfile.TemporaryDirectory(dir=world.directory) as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(directory, '.s.PGSQL.5432'))
        listener.listen()
        link(listener, server_socket, limit)
        yield '--database=host=%s port=5432' % directory


def large_take(world):
    """If a connection is lost during a take, the next one asks for fewer messages,
    because the result might have been too large for the connection."""
    with through(world, Cutter, 1000000) as database:
        world.query("SELECT count(idem_publish('t', to_jsonb(repeat('x', 50000)))) FROM generate_series(1, 60)")
        relay = world.relay('--out.sink=stdout', '--out.topics=t', '--lease=3s', '--wait=1s', database).started()
        world.all_acked(60, 30)
        expect('the connection was not lost', relay.said().count('database (take)') >= 1)
        equal('the status', relay.stop(), 0)


def slow_take(world):
    """A message that takes longer than the relay waits for answers to arrive, and
    longer than its lease, is delivered at its first attempt, as are the others."""
    with through(world, SlowLink, 40000) as database:
        for size in 5, 160000, 5:
            world.publish('t', '"%s"' % ('x' * size))
        relay = world.relay('--out.sink=stdout', '--out.topics=t', '--lease=3s', '--wait=1s', database,
                            environment=world.preload('clock_mock')).started()
        world.all_acked(3)
        equal('attempts', world.query('SELECT max(attempt) FROM idem_outbox'), [(1,)])
        expect('the connection was lost', 'database (take)' not in relay.said())
        world.publish('t')
        world.all_acked(4)
        # Otherwise another relay would take the next large one before it has arrived.
        expect('the next lease is short', world.query(
            "SELECT 1 FROM idem_outbox WHERE available_at > acked_at + '30 seconds'"))
        equal('the status', relay.stop(), 0)


def slow_batch(world):
    """If a result arrives slowly, the next take asks for fewer messages."""
    with through(world, SlowLink, 400000) as database:
        world.query("SELECT count(idem_publish('t', to_jsonb(repeat('x', 50000)))) FROM generate_series(1, 60)")
        relay = world.relay('--out.sink=stdout', '--out.topics=t', '--batch=20', '--lease=3s', '--wait=1s', database)
        until('the first ones are acknowledged', lambda: world.states().get('acked', 0) >= 20)
        until('there is another take', lambda: 0 < world.leased() < 20, 1)
        world.all_acked(60)
        equal('the status', relay.stop(), 0)


def short_max_lease(world):
    """If a lease that is longer because of a slow arrival is not allowed, the next take
    asks for the usual one."""
    with through(world, SlowLink, 100000) as database:
        with world.setting('max_lease', "'5s'"):
            relay = world.relay('--out.sink=stdout', '--out.topics=t', '--lease=3s', '--wait=1s', database)
            world.publish('t', '"%s"' % ('x' * 200000))
            world.all_acked(1)
            world.publish('t')
            world.all_acked(2)
            expect('the lease was allowed', 'must not be longer than "idempotency.max_lease"' in relay.said())
            equal('the status', relay.stop(), 0)


def late_take(world):
    """A lease begins before the request.  When its answer comes late, another
    relay can have the message, so it is not delivered before it is extended."""
    seen = os.path.join(world.directory, 'seen')
    directory = tempfile.mkdtemp(dir=world.directory)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(directory, '.s.PGSQL.5432'))
    listener.listen()
    gate = Gate(listener, server_socket, from_client=False)
    relay = world.relay('--c.sink=command', '--c.topics=t', '--c.command=echo >>%s' % seen, '--lease=3s', '--wait=1s',
                        '--database=host=%s port=5432' % directory).started()
    until('it sleeps in a take', lambda: world.query(
        "SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%%idem_outbox_take%%' AND pid <> pg_backend_pid()"))
    gate.opened.clear()
    world.publish('t')
    until('it is taken', lambda: world.leased() == 1)
    until('its lease is over', lambda: world.query("SELECT * FROM idem_outbox_take(1, '1 minute')"))
    gate.opened.set()
    until('the relay reports it', lambda: 'is lost: another relay has it' in relay.said())
    expect('it was delivered', not os.path.exists(seen))
    equal('the status', relay.stop(), 0)
    listener.close()
    shutil.rmtree(directory)


def sleeps_longer_than_leases(world):
    """After a pause of the relay that is longer than its leases, it does not take the
    messages again that it holds."""
    gate = threading.Event()
    endpoint = Endpoint(lambda request, number: gate.wait(60) and (204, {}, b''))
    world.query("SELECT count(idem_publish('t', '1')) FROM generate_series(1, 3000)")
    relay = world.relay('--w.sink=webhook', '--w.topics=t', '--w.url=' + endpoint.url, '--w.timeout=60s', '--batch=1000',
                        '--max_messages=5000', '--lease=6s', '--wait=300ms').started()
    until('all are held', lambda: world.leased() == 3000)
    relay.signal(signal.SIGSTOP)
    time.sleep(7)
    relay.signal(signal.SIGCONT)
    until('the leases are extended', lambda: world.query(
        "SELECT count(*) FROM idem_outbox WHERE available_at > now() + '1 second'") == [(3000,)])
    equal('attempts', world.query('SELECT max(attempt) FROM idem_outbox'), [(1,)])
    gate.set()
    equal('the status', relay.stop(), 0)
    endpoint.close()


def deaf_host(world):
    """If a host is switched off, the connection is not refused, and the relay skips it."""
    with deaf_port() as port:
        world.publish('t')
        relay = world.relay(*OUT, '--database=host=127.0.0.1,%s port=%d,%s' % (
            os.environ['PGHOST'], port, os.environ['PGPORT']), environment=world.preload('clock_mock')).started()
        world.all_acked(1)
        world.crash_database()
        world.publish('t')
        world.all_acked(2)
        equal('the status', relay.stop(), 0)


def deaf_address(world):
    """If an address of a host does not answer, the relay skips it."""
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = listener.getsockname()[1]
        Forwarder(listener, server_socket)
        # It accepts connections, and no program reads from them.
        with socket.create_server(('127.0.0.2', port)):
            world.publish('t')
            relay = world.relay(*OUT, '--database=host=two.test port=%d' % port,
                                environment=world.preload('clock_mock', 'resolver_mock')).started()
            world.all_acked(1)
            world.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'idem-relay'")
            world.publish('t')
            world.all_acked(2)
            equal('the status', relay.stop(), 0)
        listener.shutdown(socket.SHUT_RDWR)


def log_is_not_read(world):
    """If nothing reads the log, the relay drops lines of it, and continues."""
    reader, writer = os.pipe()
    relay = world.relay(*OUT, '--verbose=on', before=lambda: os.dup2(writer, 2))
    os.close(writer)
    with open(reader, 'rb') as log:
        os.set_blocking(reader, False)
        world.query("SELECT count(idem_publish('t', '1')) FROM generate_series(1, 1500)")
        world.all_acked(1500, 30)
        said = log.read()
        equal('the status', relay.stop(), 0)
        said += log.read()
    expect(said[-2000:], b' line(s) of the log are missing' in said and said.endswith(b': stopped\n'))


TESTS = [
    ('a take whose result is too large for the connection is repeated with fewer messages', large_take),
    ('a message that arrives slowly is delivered, and delays the others only once', slow_take),
    ('after a result that arrives slowly, a take asks for fewer messages', slow_batch),
    ('a lease that is longer than the server allows ends no take', short_max_lease),
    ('the lease of a take whose answer is late counts from the request', late_take),
    ('standard output on a full disk is waited for', disk_full),
    ('of several hosts, the primary is found after a failover', fails_over),
    ('after a pause longer than the leases, no message that is held is taken again', sleeps_longer_than_leases),
    ('of several hosts, one that is switched off is passed', deaf_host),
    ('of several addresses of a host, one that does not answer is passed', deaf_address),
    ('standard output gets a line for each message, in order per key', prints),
    ('standard output may be a pipe that is read slowly', to_pipe),
    ('SIGHUP: a line of which a pipe has only a part spoils no other', cut_line),
    ('CloudEvents have what the specification wants', cloudevents),
    ('without its standard output the relay ends', closed_output),
    ('only topics that have a sink are taken', topics),
    ('relays side by side deliver each message once', side_by_side),
    ('SIGTERM: deliveries end, the rest is given back without an attempt', stops),
    ('SIGTERM: what does not end in time is given back', stops_in_time),
    ('SIGTERM: a second signal ends the relay at once', stops_twice),
    ('SIGTERM: a result that is arriving is waited for, or reported', stops_while_taking),
    ('SIGTERM: a relay that sleeps ends at once', stops_asleep),
    ('SIGHUP: a new configuration, unless it has a fault', reloads),
    ('SIGHUP: the configuration that was checked is used, even if the file changes', reloads_what_was_checked),
    ('SIGHUP: a second one can follow at any time', reloads_twice),
    ('SIGHUP while the database is away: the relay waits for it', reloads_without_database),
    ('systemd is told', tells_systemd),
    ('a log that is not read does not stop the relay', log_is_not_read),
    ('metrics are served', shows_metrics),
    ('the steps of README.md work, with the sample and the unit', step_by_step),
    ('metrics: a database that refuses calls is not up', without_execute),
    ('SIGHUP runs the new program after an upgrade', upgraded),
    ('the database crashes: what was delivered meanwhile is acknowledged', survives_database),
    ('what is held is bounded', bounded),
]
