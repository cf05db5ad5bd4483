# RabbitMQ.

import contextlib
import socket
import subprocess
import time

from proxies import Gate, SlowLink
from rabbit import Proxy, Rabbit, certificate
from world import PROGRAM, Broken, equal, expect, free_port, until

broker = None


def start(world):
    """One broker for all tests; it takes long to start."""
    global broker
    if broker is None:
        try:
            broker = Rabbit(world.directory)
        except Broken:
            # Another program has taken one of its ports.
            broker = Rabbit(world.directory)
    elif broker.process is None:
        broker.start()
    return broker


def close():
    if broker is not None:
        broker.close()


def relay(world, *more):
    return world.relay('--r.sink=amqp', '--r.topics=*', '--r.url=' + broker.url, *more).started()


def drain(channel, queue, count, seconds=20):
    """Up to this number of messages of a queue: properties and body.  Ends
    early after this time without a message."""
    found = []
    end = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < end:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method:
            found.append((properties, body))
            end = time.monotonic() + seconds
        else:
            time.sleep(0.02)
    return found


def drain_all(channel, queue):
    """All messages of a queue to which nothing is being published."""
    return drain(channel, queue, channel.queue_declare(queue, passive=True).method.message_count)


def delivers(world):
    start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    message_id = world.publish('orders', '{"n": 1}', 'käse', '{"trace": "abc", "n": 5}')
    running = relay(world)
    world.all_acked(1)
    (properties, body), = drain(channel, 'orders', 1)
    equal('its body', body, b'{"n": 1}')
    equal('its properties', (properties.message_id, properties.type, properties.content_type,
                             properties.delivery_mode), (message_id, 'orders', 'application/json', 2))
    equal('its headers', properties.headers, {'message_key': 'käse', 'trace': 'abc', 'n': '5'})
    equal('the status', running.stop(), 0)
    connection.close()


def through_exchange(world):
    start(world)
    connection, channel = broker.channel()
    done = subprocess.run([PROGRAM, '--r.sink=amqp', '--r.topics=*', '--r.url=' + broker.url, '--r.exchange=shop', '--check'],
                          capture_output=True, text=True, timeout=30)
    equal('the status without the exchange', done.returncode, 69)
    expect(done.stderr, "no exchange 'shop'" in done.stderr)
    channel.exchange_declare('shop', 'topic', durable=True)
    channel.queue_declare('all', durable=True)
    channel.queue_bind('all', 'shop', 'orders.*')
    world.publish('orders.eu', '1')
    running = relay(world, '--r.exchange=shop', '--r.format=cloudevents')
    world.all_acked(1)
    (properties, body), = drain(channel, 'all', 1)
    equal('its type', properties.content_type, 'application/cloudevents+json; charset=utf-8')
    # No queue is bound for this message.
    unwanted = world.publish('invoices', '1', 'k')
    until('it is refused', lambda: (world.outbox(unwanted)[3] or '').startswith('NO_ROUTE: no queue is bound'))
    world.publish('orders.us', '1', 'k')
    until('others go on', lambda: world.states().get('acked') == 2)
    # Without the exchange, the sink is down.
    channel.exchange_delete('shop')
    world.publish('orders.eu', '2')
    until('it is paused', lambda: "no exchange 'shop'" in running.said())
    channel.exchange_declare('shop', 'topic', durable=True)
    channel.queue_bind('all', 'shop', 'orders.*')
    until('it continues', lambda: world.states().get('acked') == 3, 40)
    equal('the status', running.stop(), 0)
    channel.exchange_delete('shop')
    connection.close()


def recovers(world):
    """While the broker is down, the relay tries it less and less often."""
    start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    port = free_port()
    with contextlib.closing(Proxy(broker.port, port=port)):
        running = world.relay('--r.sink=amqp', '--r.topics=*', '--r.url=amqp://127.0.0.1:%d' % port).started()
        world.publish('orders', '0', 'k')
        world.all_acked(1)
    for n in range(1, 10):
        world.publish('orders', str(n), 'k')
    until('it is paused', lambda: 'sink "r" is paused' in running.said())
    time.sleep(3)
    expect('tried too often', running.said().count('is paused') < 8)
    with contextlib.closing(Proxy(broker.port, port=port)):
        world.all_acked(10)
        equal('the status', running.stop(), 0)
    bodies = [int(body) for _, body in drain_all(channel, 'orders')]
    equal('messages', sorted(set(bodies)), list(range(10)))
    connection.close()


def too_large(world):
    """Only messages that AMQP cannot carry are refused."""
    start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    bad = [world.publish('orders', '1', None, '{"%s": 1}' % ('x' * 300)),
           world.publish('orders', '1', None, '{"x": "%s"}' % ('x' * 200000))]
    for n in range(5):
        world.publish('orders', str(n))
    running = relay(world)
    until('the others are delivered', lambda: world.states().get('acked') == 5)
    for message in bad:
        until('it is refused', lambda m=message: 'do not fit' in (world.outbox(m)[3] or ''))
    equal('the sink was never down', 'is paused' in running.said(), False)
    equal('the status', running.stop(), 0)
    drain(channel, 'orders', 5)
    # A header that is longer in UTF-8 than in the encoding of the database.
    with world.database('latin', 'LATIN1') as latin:
        long = latin.publish('ö' * 250)
        running = relay(world, '--database=dbname=latin')
        until('it is refused', lambda: 'topic is longer than 255 bytes' in (latin.outbox(long)[3] or ''))
        equal('the status', running.stop(), 0)
    connection.close()


def lost_without_disk(world):
    """The relay replaces a connection that ends during the broker's alarm."""
    start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    with contextlib.closing(Proxy(broker.port)) as proxy:
        running = world.relay('--r.sink=amqp', '--r.topics=orders',
                              '--r.url=amqp://127.0.0.1:%d' % proxy.port).started()
        world.publish('orders')
        world.all_acked(1)
        broker.control('set_disk_free_limit', '100000GB')
        try:
            # The broker announces the alarm when it gets a message.
            for n in range(3):
                world.publish('orders', str(n))
            until('the relay reports the alarm', lambda: 'is paused: the broker is short of memory or disk' in running.said())
            time.sleep(0.5)
            proxy.cut()
            time.sleep(0.5)
        finally:
            broker.control('set_disk_free_limit', '50MB')
        world.all_acked(4)
        equal('the status', running.stop(), 0)
    channel.queue_purge('orders')
    connection.close()


def without_disk(world):
    """During the broker's alarm, no attempt is counted, other sinks continue, and
    a relay ends when it gets SIGTERM."""
    start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    running = world.relay('--r.sink=amqp', '--r.topics=orders', '--r.url=' + broker.url, '--r.timeout=1s',
                          '--out.sink=stdout', '--out.topics=others', '--lease=3s', '--wait=1s').started()
    world.publish('orders', '"%s"' % ('x' * 1000000))
    world.all_acked(1)
    broker.control('set_disk_free_limit', '100000GB')
    try:
        for n in range(20):
            world.publish('orders', str(n), 'k%d' % (n % 5))
        until('the relay reports the alarm', lambda: 'is paused: the broker is short of memory or disk' in running.said())
        world.publish('others')
        until('others go on', lambda: world.states() == {'acked': 2, 'pending': 20})
        time.sleep(4)
        equal('failures', [line for line in running.said().splitlines() if 'attempt' in line or 'no confirm' in line], [])
        other = relay(world, '--stop_timeout=1s')
        time.sleep(1)
        equal('the status in the middle of it', other.stop(), 0)
    finally:
        broker.control('set_disk_free_limit', '50MB')
    world.all_acked(22, 60)
    equal('attempts', world.query('SELECT max(attempt - uncounted_attempts) FROM idem_outbox'), [(1,)])
    equal('the status', running.stop(), 0)
    channel.queue_purge('orders')
    connection.close()


def stuck(world):
    """If a message does not fit into the socket, librabbitmq waits at most "timeout"
    for the rest."""
    start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    listener = socket.create_server(('127.0.0.1', 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    gate = Gate(listener, lambda: socket.create_connection(('127.0.0.1', broker.port)), from_client=True)
    running = world.relay('--r.sink=amqp', '--r.topics=*', '--r.timeout=4s',
                          '--r.url=amqp://guest:guest@127.0.0.1:%d/%%2f' % listener.getsockname()[1]).started()
    world.publish('orders', '1')
    world.all_acked(1)
    gate.opened.clear()
    world.publish('orders', '"%s"' % ('x' * 8000000))
    until('it is given up', lambda: 'is deferred for' in running.said(), 25)
    gate.opened.set()
    world.all_acked(2, 60)
    equal('the status', running.stop(), 0)
    listener.close()
    channel.queue_purge('orders')
    connection.close()


def slow_link(world):
    """A message that a link accepts too slowly delays other sinks only up to "timeout"."""
    start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    with socket.create_server(('127.0.0.1', 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        SlowLink(listener, lambda: socket.create_connection(('127.0.0.1', broker.port)), 200000, from_client=True)
        running = world.relay('--r.sink=amqp', '--r.topics=orders', '--r.timeout=1s', '--out.sink=stdout', '--out.topics=out',
                              '--r.url=amqp://guest:guest@127.0.0.1:%d/%%2f' % listener.getsockname()[1]).started()
        world.publish('orders', '1')
        world.all_acked(1)
        world.publish('orders', '"%s"' % ('x' * 8000000))
        until('it is taken', lambda: world.leased() == 1)
        time.sleep(0.5)
        message = world.publish('out')
        until('another sink delivers', lambda: world.outbox(message)[0] == 'acked', 12)
        equal('the status', running.stop(), 0)
        listener.shutdown(socket.SHUT_RDWR)
    channel.queue_purge('orders')
    connection.close()


def over_tls(world):
    start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    stranger, _ = certificate(world.directory, 'stranger')
    arguments = ['--r.sink=amqp', '--r.topics=*', '--r.url=' + broker.tls_url]
    for more, status, message in [
            ([], 69, '--r.url: sink "r" cannot be reached'),
            (['--r.ca_file=/nonexistent'], 78, '--r.ca_file: "/nonexistent" could not be read: No such file'),
            (['--r.ca_file=/etc/passwd'], 78, '--r.ca_file: "/etc/passwd" has no certificates'),
            (['--r.ca_file=' + stranger], 69, 'SSL peer cert verification failed')]:
        done = subprocess.run([PROGRAM, *arguments, *more, '--check'], capture_output=True, text=True, timeout=30)
        equal('the status with %r' % more, done.returncode, status)
        expect('expected %r in:\n%s' % (message, done.stderr), message in done.stderr)
    running = world.relay(*arguments, '--r.ca_file=' + broker.certificate).started()
    for n in range(300):
        world.publish('orders', '{"n": %d, "text": "%s"}' % (n, 'x' * 1000), 'k%d' % (n % 20))
    world.publish('orders', '"%s"' % ('x' * 1000000))
    world.all_acked(301)
    equal('messages', len(drain(channel, 'orders', 301)), 301)
    equal('the status', running.stop(), 0)
    connection.close()


TESTS = [
    ('amqp: a message arrives with its properties', delivers),
    ('amqp: exchanges, and messages that nobody wants', through_exchange),
    ('amqp: the broker goes away and comes back', recovers),
    ('amqp: headers and topics that do not fit are refused', too_large),
    ('amqp: a broker without disk is waited for', without_disk),
    ('amqp: a connection that ends while a broker is without disk is made again', lost_without_disk),
    ('amqp: a broker that stops reading in mid-message is given up', stuck),
    ('amqp: a link that accepts a message slowly delays no other sink', slow_link),
    ('amqp: over TLS, with a certificate of one\'s own', over_tls),
]
