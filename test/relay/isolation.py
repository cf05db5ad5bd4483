# No message, key, endpoint, sink or topic delays or kills anything that does
# not depend on it.

import contextlib
import os
import signal
import socket
import subprocess
import time

import amqp
import kafka
from endpoint import Endpoint
from world import PROGRAM, equal, expect, free_port, until

COUNTED = 'SELECT max(attempt - uncounted_attempts) FROM idem_outbox WHERE %s'


@contextlib.contextmanager
def attempts(world, number):
    """The server allows this number of attempts."""
    world.query('ALTER SYSTEM SET idempotency.outbox_max_attempts = %d' % number)
    world.query('SELECT pg_reload_conf()')
    try:
        yield
    finally:
        world.query('ALTER SYSTEM RESET idempotency.outbox_max_attempts')
        world.query('SELECT pg_reload_conf()')


@contextlib.contextmanager
def silent_port():
    """A port that accepts connections and never answers."""
    with contextlib.closing(socket.create_server(('127.0.0.1', 0), backlog=100)) as listener:
        yield listener.getsockname()[1]


def webhook(world, endpoint, *more):
    return world.relay('--w.sink=webhook', '--w.topics=t', '--w.url=' + endpoint.url, *more).started()


def broker_closes(world):
    """Messages that make the broker close the channel fail alone."""
    broker = amqp.start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    broker.control('eval', 'application:set_env(rabbit, max_message_size, 100000).')
    try:
        with attempts(world, 3):
            for n in range(300):
                world.publish('orders', '"%s"' % ('x' * 200000) if n % 100 == 50 else str(n), 'k%d' % n)
            running = amqp.relay(world)
            until('the others are delivered', lambda: world.states().get('acked') == 297, 40)
            until('the bad ones are dead', lambda: world.states() == {'acked': 297, 'dead': 3}, 60)
            equal('counted attempts of the others', world.query(COUNTED % "state = 'acked'"), [(1,)])
            equal('counted attempts of the bad ones', world.query(COUNTED % "state = 'dead'"), [(3,)])
            equal('reasons', world.query("SELECT count(*) FROM idem_outbox WHERE state = 'dead' "
                                         "AND last_error LIKE '%%larger than%%'"), [(3,)])
            equal('messages', {int(body) for _, body in amqp.drain(channel, 'orders', 10000, 3)},
                  {n for n in range(300) if n % 100 != 50})
            equal('the status', running.stop(), 0)
    finally:
        broker.control('eval', 'application:set_env(rabbit, max_message_size, 134217728).')
        channel.queue_purge('orders')
        connection.close()


def deferred_alone(world):
    """An endpoint that always wants to get one message later."""
    endpoint = Endpoint(lambda request, number: (503, {}, b'later') if b'bad' in request.body else (204, {}, b''))
    with attempts(world, 1):
        bad = world.publish('t', '"bad"', 'bad')
        world.publish('t', '1', 'bad')
        for n in range(120):
            world.publish('t', str(n), 'k%d' % n)
        relay = webhook(world, endpoint)
        until('the others are delivered', lambda: world.states().get('acked') == 120, 5)
        expect('its reason', world.outbox(bad)[3] == 'status 503: later')
        equal('its attempts', world.query(COUNTED % "payload = '\"bad\"'"), [(0,)])
        until('it is dead at last', lambda: world.states() == {'acked': 121, 'dead': 1}, 60)
        equal('the status', relay.stop(), 0)
    endpoint.close()


def later_alone(world):
    """Retry-After of one message is its own pause."""
    endpoint = Endpoint(lambda request, number: (503, {'Retry-After': '3600'}, b'') if b'bad' in request.body else
                        (429, {'Retry-After': '1'}, b'') if number % 10 == 0 else (204, {}, b''))
    bad = world.publish('t', '"bad"', 'bad')
    relay = webhook(world, endpoint)
    for n in range(50):
        world.publish('t', str(n), 'k%d' % n)
    until('the others are delivered', lambda: world.states() == {'acked': 50, 'pending': 1}, 10)
    pause = world.query('SELECT available_at > now() + interval \'50 minutes\' FROM idem_outbox WHERE message_id = %s', bad)
    equal('its pause', pause, [(True,)])
    equal('429 costs no attempt', world.query(COUNTED % "state = 'acked'"), [(1,)])
    equal('the status', relay.stop(), 0)
    endpoint.close()


def command_defers(world):
    bad = world.publish('t', '"bad"', 'bad')
    for n in range(40):
        world.publish('t', str(n), 'k%d' % n)
    relay = world.relay('--c.sink=command', '--c.topics=t',
                        '--c.command=if grep -q bad; then echo busy >&2; exit 75; fi').started()
    until('the others are delivered', lambda: world.states().get('acked') == 40, 8)
    until('its reason', lambda: world.outbox(bad)[3] == 'the command ended with status 75: busy')
    equal('the status', relay.stop(), 0)


def probed_with_another(world):
    """Three bad messages pause the sink; a good one gets it going."""
    endpoint = Endpoint(lambda request, number: (500, {}, b'') if b'bad' in request.body else (204, {}, b''))
    for n in range(3):
        world.publish('t', '"bad"', 'bad%d' % n)
    relay = webhook(world, endpoint, '--w.in_flight=1')
    until('it is paused', lambda: 'sink "w" is paused' in relay.said())
    for n in range(20):
        world.publish('t', str(n), 'k%d' % n)
    until('the others are delivered', lambda: world.states().get('acked') == 20, 10)
    # The bad ones are known by now, and pause nothing.
    pauses = relay.said().count('is paused')
    requests = len(endpoint.requests)
    until('the bad ones are tried again', lambda: len(endpoint.requests) >= requests + 6)
    expect(relay.said(), relay.said().count('is paused') <= pauses + 1)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def proxy_fails(world):
    """A proxy that fails for all costs no attempt and keeps the order."""
    end = time.monotonic() + 8
    endpoint = Endpoint(lambda request, number: (502, {}, b'no backend') if time.monotonic() < end else (204, {}, b''))
    with attempts(world, 2):
        for n in range(60):
            world.publish('t', str(n), 'k%d' % (n % 6), '{"key": "k%d"}' % (n % 6))
        relay = webhook(world, endpoint)
        until('it is paused', lambda: 'sink "w" is paused: status 502: no backend' in relay.said())
        world.all_acked(60, 60)
        equal('counted attempts', world.query(COUNTED % 'true'), [(1,)])
        last = {}
        for request in endpoint.requests:
            key = request.headers['key']
            expect('order of ' + key, last.get(key, -1) <= int(request.body))
            last[key] = int(request.body)
        expect('tried too often', len(endpoint.requests) < 60 + 40)
        equal('the status', relay.stop(), 0)
    endpoint.close()


def relays_own_headers(world):
    """A publisher cannot replace what consumers rely on."""
    amqp.start(world)
    connection, channel = amqp.broker.channel()
    channel.queue_declare('orders', durable=True)
    kafka.start(world)
    for running, names in [
            (lambda: amqp.relay(world), ['message_id', 'message_key', 'Message_Key', 'CC', 'BCC']),
            (lambda: kafka.relay(world), ['message_id', 'message_key', 'Message_Id', 'topic', 'content-type'])]:
        world.begin()
        bad = [world.publish('orders', '1', 'k%s' % name, '{"%s": "forged"}' % name) for name in names]
        world.publish('orders', '2', 'good', '{"trace": "x"}')
        relay = running()
        until('the good one is delivered', lambda: world.states().get('acked') == 1)
        for message, name in zip(bad, names):
            until(name + ' is refused', lambda m=message: (world.outbox(m)[3] or '').endswith("is the relay's own"))
        equal('the status', relay.stop(), 0)
    equal('in the queue', len(amqp.drain(channel, 'orders', 5, 1)), 1)
    connection.close()


def starts_without(world):
    """An unreachable broker at the start, or after SIGHUP, pauses its sink."""
    path = os.path.join(world.directory, 'start.conf')
    port = free_port()

    def write(more):
        with open(path, 'w') as file:
            file.write('[out]\nsink = stdout\ntopics = t\n' + more)

    broker = '[%s]\nsink = amqp\ntopics = %s\nurl = amqp://127.0.0.1:%d\n'
    write(broker % ('a', 'a', port) + '[k]\nsink = kafka\ntopics = k\nbrokers = 127.0.0.1:%d\ntimeout = 1s\n' % port)
    world.publish('t')
    relay = world.relay('--config=' + path).started(5)
    world.all_acked(1, 5)
    until('they are paused', lambda: all('sink "%s" is paused' % name in relay.said() for name in 'ak'))
    write(broker % ('b', 'b', port))
    relay.signal(signal.SIGHUP)
    until('it is paused', lambda: 'sink "b" is paused' in relay.said())
    world.publish('t')
    world.all_acked(2, 5)
    equal('the status', relay.stop(), 0)
    done = subprocess.run([PROGRAM, '--config=' + path, '--check'], capture_output=True, text=True, timeout=30)
    equal('the status of --check', done.returncode, 69)


def p99(world, count=200):
    """Publish messages one by one; the 99th percentile of the time until they
    are acknowledged."""
    times = []
    for n in range(count):
        message = world.publish('t', str(n))
        began = time.monotonic()
        while world.outbox(message)[0] != 'acked':
            expect('a message waits', time.monotonic() - began < 10)
            time.sleep(0.001)
        times.append(time.monotonic() - began)
    return sorted(times)[count * 99 // 100 - 1]


def silent_broker(world):
    """While a broker does not answer, connecting to it delays no other sink."""
    endpoint = Endpoint()
    relay = webhook(world, endpoint)
    alone = p99(world)
    equal('the status', relay.stop(), 0)
    with silent_port() as port:
        relay = webhook(world, endpoint, '--a.sink=amqp', '--a.topics=a', '--a.url=amqp://127.0.0.1:%d' % port,
                        '--a.timeout=2s', '--k.sink=kafka', '--k.topics=k', '--k.brokers=127.0.0.1:%d' % port,
                        '--k.timeout=2s')
        world.publish('a')
        world.publish('k')
        beside = p99(world)
        until('it is paused', lambda: 'sink "a" is paused' in relay.said() and 'sink "k" is paused' in relay.said())
        began = time.monotonic()
        equal('the status', relay.stop(), 0)
        expect('it ended late', time.monotonic() - began < 2)
    endpoint.close()
    # On a machine that others use, single values are worth little.
    expect('p99 is %.1f ms, and %.1f ms alone' % (beside * 1000, alone * 1000), beside <= max(2 * alone, 0.1))


def one_queue_stuck(world):
    """A queue that refuses by basic.nack costs its own messages attempts."""
    amqp.start(world)
    connection, channel = amqp.broker.channel()
    channel.queue_declare('orders', durable=True)
    channel.queue_declare('full', arguments={'x-max-length': 1, 'x-overflow': 'reject-publish'})
    channel.basic_publish('', 'full', b'first')
    bad = world.publish('full', '1')
    for n in range(20):
        world.publish('orders', str(n))
    relay = amqp.relay(world)
    until('the others are delivered', lambda: world.states().get('acked') == 20)
    until('it is refused', lambda: world.outbox(bad)[3] == 'the broker has refused it')
    equal('its attempts', world.query(COUNTED % "topic = 'full'"), [(1,)])
    channel.queue_delete('full')
    channel.queue_declare('full', durable=True)
    world.all_acked(21)
    equal('the status', relay.stop(), 0)
    equal('it arrives', len(amqp.drain(channel, 'full', 1)), 1)
    channel.queue_delete('full')
    amqp.drain(channel, 'orders', 20)
    connection.close()


TESTS = [
    ('isolation: messages for which the broker closes the channel fail alone', broker_closes),
    ('isolation: a message that always gets 503 waits alone', deferred_alone),
    ('isolation: Retry-After is the pause of one message', later_alone),
    ('isolation: a message for which a command ends with 75 waits alone', command_defers),
    ('isolation: a paused sink is tried with another message', probed_with_another),
    ('isolation: a proxy that fails costs no attempt and keeps the order', proxy_fails),
    ('isolation: headers of the relay are its own', relays_own_headers),
    ('isolation: an unreachable broker keeps no other sink from starting', starts_without),
    ('isolation: a broker that does not answer delays no other sink', silent_broker),
    ('isolation: a full queue refuses its own messages only', one_queue_stuck),
]
