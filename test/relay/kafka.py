# Kafka: librdkafka's own mock cluster, in a process of its own.

import contextlib
import os
import socket
import struct
import subprocess
import threading

from world import equal, expect, until

INVALID_RECORD, MESSAGE_TOO_LARGE = 87, 10

cluster = None


class Cluster:
    def __init__(self, directory):
        program = os.path.join(directory, 'kafka_mock')
        source = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'kafka_mock.c')
        subprocess.run(['cc', '-O1', '-Wall', '-o', program, source, '-lrdkafka'], check=True)
        self.process = subprocess.Popen([program, 'orders', 'shop', 'faults'], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True)
        self.brokers = self.process.stdout.readline().strip()
        self.messages = []
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.messages.append(line.rstrip('\n').split('\t'))

    def tell(self, command):
        self.process.stdin.write(command + '\n')
        self.process.stdin.flush()


class Proxy:
    """A proxy before the brokers.  "refuse" is called with the topic and the records of
    each batch, and returns an error, or 0."""

    def __init__(self, brokers, refuse):
        self.refuse = refuse
        self.sockets = []
        self.ports = {}
        for broker in brokers.split(','):
            listener = socket.create_server(('127.0.0.1', 0))
            self.sockets.append(listener)
            port = int(broker.rsplit(':', 1)[1])
            self.ports[port] = listener.getsockname()[1]
            threading.Thread(target=self.listen, args=(listener, port), daemon=True).start()
        self.brokers = ','.join('127.0.0.1:%d' % port for port in self.ports.values())

    def listen(self, listener, port):
        with contextlib.suppress(OSError):
            while True:
                client = listener.accept()[0]
                server = socket.create_connection(('127.0.0.1', port))
                self.sockets += client, server
                lock = threading.Lock()
                threading.Thread(target=self.forward, args=(client, server, client, lock), daemon=True).start()
                threading.Thread(target=self.answer, args=(server, client, lock), daemon=True).start()

    def forward(self, client, server, answers, lock):
        with contextlib.suppress(OSError), client.makefile('rb') as stream:
            for frame in self.frames(stream):
                answer = self.refusal(frame)
                if answer:
                    with lock:
                        answers.sendall(struct.pack('>i', len(answer)) + answer)
                else:
                    server.sendall(struct.pack('>i', len(frame)) + frame)

    def answer(self, server, client, lock):
        with contextlib.suppress(OSError), server.makefile('rb') as stream:
            for frame in self.frames(stream):
                # The brokers name their ports.
                for old, new in self.ports.items():
                    frame = frame.replace(b'127.0.0.1' + struct.pack('>i', old), b'127.0.0.1' + struct.pack('>i', new))
                with lock:
                    client.sendall(struct.pack('>i', len(frame)) + frame)

    @staticmethod
    def frames(stream):
        while size := stream.read(4):
            yield stream.read(struct.unpack('>i', size)[0])

    def refusal(self, frame):
        """The answer to a request that writes and is refused, or None."""
        at = 0

        def read(kind):
            nonlocal at
            at += struct.calcsize('>' + kind)
            return struct.unpack_from('>' + kind, frame, at - struct.calcsize('>' + kind))[0]

        def string(kind):
            nonlocal at
            size = max(read(kind), 0)
            at += size
            return frame[at - size:at]

        key, version, number = read('h'), read('h'), read('i')
        if key != 0:
            return None
        expect('the version %d of the request' % version, version == 7)
        for kind in 'h', 'h':
            string(kind)
        at += 6
        # librdkafka writes to one partition with each request.
        expect('one topic', read('i') == 1)
        topic = string('h')
        expect('one partition', read('i') == 1)
        partition = read('i')
        error = self.refuse(topic.decode(), string('i'))
        return error and struct.pack('>iih%dsiihqqqi' % len(topic), number, 1, len(topic), topic, 1, partition, error,
                                     -1, -1, -1, 0)

    def close(self):
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def start(world):
    global cluster
    if cluster is None:
        cluster = Cluster(world.directory)
    cluster.messages.clear()
    return cluster


def close():
    if cluster is not None:
        cluster.process.stdin.close()
        cluster.process.wait(10)


def relay(world, *more, brokers=None):
    return world.relay('--k.sink=kafka', '--k.topics=*', '--k.brokers=' + (brokers or cluster.brokers), *more).started()


def delivers(world):
    start(world)
    ids = [world.publish('orders', str(n), 'k%d' % (n % 7)) for n in range(100)]
    running = relay(world)
    world.all_acked(100)
    until('all arrive', lambda: {message[3] for message in cluster.messages} >= set(ids))
    found = [message for message in cluster.messages if message[3] in ids]
    equal('ids', sorted(message[3] for message in found), sorted(ids))
    partitions, last = {}, {}
    for _, partition, key, _, body in found:
        equal('the partition of ' + key, partitions.setdefault(key, partition), partition)
        expect('order of ' + key, last.get(key, -1) < int(body))
        last[key] = int(body)
    equal('the status', running.stop(), 0)


def one_topic(world):
    start(world)
    world.publish('anything', '1', None, '{"a": "b"}')
    running = relay(world, '--k.kafka_topic=shop', '--k.format=cloudevents', '--k.librdkafka.compression.codec=gzip')
    world.all_acked(1)
    until('it arrives', lambda: cluster.messages)
    equal('its topic', cluster.messages[0][0], 'shop')
    expect('its body', '"type":"anything"' in cluster.messages[0][4])
    equal('the status', running.stop(), 0)


def too_large(world):
    """Only messages that brokers never accept are refused."""
    start(world)
    refused = world.publish('orders', '"%s"' % ('x' * 1500000))
    for n in range(5):
        world.publish('orders', str(n))
    running = relay(world, '--k.max_size=16MB')
    until('it is refused', lambda: 'size' in (world.outbox(refused)[3] or '').lower())
    until('the others are delivered', lambda: world.states().get('acked') == 5)
    equal('the status', running.stop(), 0)


def batch_refused(world):
    """A broker refuses whole batches: because of one record, or because they are too
    large.  Only an attempt at a message that is alone in its batch counts."""
    refused = {'orders': 0, 'shop': 0}

    def refuse(topic, records):
        count, = struct.unpack_from('>i', records, 57)
        error = INVALID_RECORD if topic == 'orders' and b'"bad"' in records else \
            MESSAGE_TOO_LARGE if topic == 'shop' and count > 1 else 0
        if error and count > 1:
            refused[topic] += count
        return error

    start(world)
    with contextlib.closing(Proxy(cluster.brokers, refuse)) as proxy:
        for n in range(100):
            world.publish('orders', '"good"', 'k%d' % n)
            world.publish('shop', '"good"', 'k%d' % n)
            if n % 10 == 0:
                world.publish('orders', '"bad"', 'b%d' % n)
        running = relay(world, brokers=proxy.brokers)
        until('the good ones are delivered', lambda: world.states().get('acked') == 200)
        until('the bad ones are refused', lambda: world.query(
            "SELECT count(*) FROM idem_outbox WHERE payload::text = '\"bad\"' AND last_error LIKE '%Broker failed to validate record%'"
            ) == [(10,)])
        equal('good ones with an error', world.query(
            "SELECT count(*) FROM idem_outbox WHERE payload::text = '\"good\"' AND last_error IS NOT NULL"), [(0,)])
        expect('batches were refused: %r' % refused, all(refused.values()))
        equal('pauses', 'is paused' in running.said(), False)
        equal('the status', running.stop(), 0)


def recovers(world):
    start(world)
    running = relay(world, '--k.timeout=2s')
    ids = [world.publish('orders', '0', 'k')]
    world.all_acked(1)
    cluster.tell('down')
    # The mock obeys when it comes to it.
    until('the brokers are down', lambda: 'brokers are down' in running.said())
    try:
        ids += [world.publish('orders', str(n), 'k') for n in range(1, 6)]
        until('they fail', lambda: 'is deferred for' in running.said() or 'failed at attempt' in running.said())
    finally:
        cluster.tell('up')
    world.all_acked(6, 60)
    # The mock reads them with a client of its own, which also has to find the brokers again.
    until('all arrive', lambda: {message[3] for message in cluster.messages} >= set(ids), 60)
    first = []
    for message in cluster.messages:
        if message[3] in ids and message[4] not in first:
            first.append(message[4])
    equal('order', first, [str(n) for n in range(6)])
    equal('the status', running.stop(), 0)


def leaders_move(world):
    """
    Writes are refused, as by a broker that leads no more, and made again.  One
    at a time: the mock does not look at sequence numbers, so it stores what
    follows a refused write, which a broker refuses, too; and librdkafka takes
    that for a sign that the refused one was stored.
    """
    start(world)
    ids = [world.publish('orders', str(n), 'k%d' % (n % 7)) for n in range(50)]
    for n in range(5):
        cluster.tell('moved')
    running = relay(world, '--k.librdkafka.max.in.flight.requests.per.connection=1')
    world.all_acked(50, 60)
    until('all arrive', lambda: {message[3] for message in cluster.messages} >= set(ids))
    equal('the status', running.stop(), 0)


def ends_in_flight(world):
    """If the relay ends while the brokers are down, no report arrives later for
    released messages."""
    start(world)
    running = relay(world, '--stop_timeout=500ms')
    world.publish('orders', '0')
    world.all_acked(1)
    cluster.tell('down')
    # The mock obeys when it comes to it.
    until('the brokers are down', lambda: 'brokers are down' in running.said())
    try:
        for n in range(200):
            world.publish('orders', str(n), 'k%d' % n)
        until('they fly', lambda: world.leased() == 200)
        equal('the status', running.stop(), 0)
        equal('leased', world.leased(), 0)
    finally:
        cluster.tell('up')
    running = relay(world)
    world.all_acked(201, 60)
    equal('the status', running.stop(), 0)


def topic_hangs(world):
    """A topic without a leader does not delay others, however many there are."""
    start(world)
    cluster.tell('noleader')
    running = relay(world, '--k.timeout=1min', '--stop_timeout=100ms')
    world.publish('leaderless')
    until('it is in flight', lambda: world.leased() == 1)
    for _ in range(2):
        world.query("SELECT idem_publish('topic' || n, '{}', 'k') FROM generate_series(1, 450) AS n")
    until('the others are delivered', lambda: world.states().get('acked') == 900, 40)
    equal('pauses', 'is paused' in running.said(), False)
    equal('the status', running.stop(), 0)


def many_topics(world):
    """Memory is bounded for any number of topics."""
    def threads():
        return set(os.listdir('/proc/%d/task' % running.process.pid))

    start(world)
    running = relay(world)
    world.query("SELECT idem_publish('topic' || n, '{}', 'k') FROM generate_series(1, 1000) AS n")
    until('the producer is there', lambda: len(threads()) > 1)
    first = threads()
    world.all_acked(1000, 60)
    # librdkafka frees topics only with the producer, so the relay replaces the producer.
    expect('it is the same producer', len(threads() & first) == 1)
    equal('pauses', 'is paused' in running.said(), False)
    equal('the status', running.stop(), 0)


TESTS = [
    ('kafka: a topic without a leader delays no other topic', topic_hangs),
    ('kafka: a refused batch costs its good messages no attempt', batch_refused),
    ('kafka: a producer ends after many topics', many_topics),
    ('kafka: brokers are away, and a relay ends', ends_in_flight),
    ('kafka: messages arrive, a key in a partition, in order', delivers),
    ('kafka: all topics into one', one_topic),
    ('kafka: a message that is too large is refused', too_large),
    ('kafka: the brokers go away and come back', recovers),
    ('kafka: writes to a broker that leads no more are made again', leaders_move),
]
