# NATS JetStream: a server in a process of its own, and a small client.

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time

from rabbit import certificate
from world import PROGRAM, equal, expect, free_port, until


# All started servers, so that a failed test leaves none.
servers = []


def close():
    for server in servers:
        server.stop()


class Server:
    def __init__(self, directory, *options):
        self.directory = tempfile.mkdtemp(dir=directory)
        self.port, self.options = free_port(), options
        self.url = 'nats://127.0.0.1:%d' % self.port
        self.process = None
        servers.append(self)
        self.start()

    def start(self):
        self.process = subprocess.Popen(['nats-server', '-a', '127.0.0.1', '-p', str(self.port), '-js', '-sd', self.directory,
                                         *self.options], stdout=subprocess.DEVNULL,
                                        stderr=open(os.path.join(self.directory, 'log'), 'ab'))
        until('NATS answers', self.answers)

    def answers(self):
        try:
            socket.create_connection(('127.0.0.1', self.port), 1).close()
            return True
        except OSError:
            return False

    def stop(self):
        self.process.kill()
        self.process.wait()

    def request(self, subject, body=b''):
        """The answer to a request, as JSON."""
        with socket.create_connection(('127.0.0.1', self.port), 10) as connection:
            stream = connection.makefile('rb')
            stream.readline()
            connection.sendall(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB answers 1\r\n'
                               b'PUB %s answers %d\r\n%s\r\n' % (subject.encode(), len(body), body))
            while True:
                line = stream.readline()
                if line.startswith(b'MSG'):
                    return json.loads(stream.read(int(line.split()[-1])))
                if line.startswith(b'PING'):
                    connection.sendall(b'PONG\r\n')
                if line.startswith(b'HMSG') or not line:
                    raise OSError('JetStream does not answer')

    def stream(self, name, *subjects, **more):
        made = until('the stream is made', lambda: self.tried('$JS.API.STREAM.CREATE.' + name, json.dumps(
            {'name': name, 'subjects': subjects, 'storage': 'file', 'retention': 'limits', **more}).encode()))
        expect(made, 'error' not in made)

    def tried(self, *request):
        try:
            return self.request(*request)
        except OSError:
            return None

    def messages(self, name):
        """All messages of a stream: subject, headers and body."""
        state = until('the stream answers', lambda: self.tried('$JS.API.STREAM.INFO.' + name))['state']
        found = []
        for number in range(state['first_seq'], state['last_seq'] + 1):
            message = self.request('$JS.API.STREAM.MSG.GET.' + name, b'{"seq":%d}' % number).get('message')
            if message:
                lines = base64.b64decode(message.get('hdrs', '')).decode().split('\r\n')[1:]
                found.append((message['subject'], dict(line.split(': ', 1) for line in lines if ': ' in line),
                              base64.b64decode(message.get('data', ''))))
        return found


def relay(world, server, *more):
    return world.relay('--n.sink=nats', '--n.topics=*', '--n.url=' + server.url, *more)


def delivers(world):
    server = Server(world.directory)
    server.stream('ORDERS', 'orders.>')
    message = world.publish('orders.eu', '{"n": 1}', 'käse', '{"trace": "a b"}')
    bad = [world.publish('orders.eu', '1', 'k%d' % n, headers) for n, headers in enumerate(
        ['{"Nats-Msg-Id": "x"}', '{"a b": "c"}', '{"a": "b\\r\\nc: d"}', '{"topic": "x"}'])]
    wild, unbound = world.publish('orders.*'), world.publish('nowhere')
    commands = [world.publish(topic) for topic in ('$JS.API.STREAM.PURGE.ORDERS', '_INBOX.x')]
    running = relay(world, server).started()
    until('it is delivered', lambda: world.outbox(message)[0] == 'acked')
    for each in bad:
        until('it is refused', lambda m=each: 'headers cannot be sent' in (world.outbox(m)[3] or ''))
    until('reasons', lambda: world.outbox(wild)[3] == 'its topic is no subject of NATS' and
          'no stream has this subject' in (world.outbox(unbound)[3] or ''))
    for each in commands:
        until('it is refused', lambda m=each: world.outbox(m)[3] == 'its topic is no subject of NATS')
    (subject, headers, body), = server.messages('ORDERS')
    equal('the message', (subject, body), ('orders.eu', b'{"n": 1}'))
    equal('its headers', headers, {'Nats-Msg-Id': message, 'content-type': 'application/json', 'topic': 'orders.eu',
                                   'message_key': 'käse', 'trace': 'a b'})
    # The message is in the duplicate window.
    world.query("UPDATE idem_outbox SET state = 'pending', in_due_index = true, available_at = now() WHERE message_id = %s",
                message)
    until('it is delivered again', lambda: world.outbox(message)[0] == 'acked')
    equal('messages', len(server.messages('ORDERS')), 1)
    equal('the status', running.stop(), 0)
    server.stop()


def killed(world):
    """Relays and server are killed: each message is stored, in order."""
    server = Server(world.directory)
    server.stream('T', 't')
    running = relay(world, server, '--lease=2s', '--wait=600ms')
    for number in range(8):
        for n in range(100):
            world.publish('t', str(number * 100 + n), 'k%d' % (n % 10))
        time.sleep(0.3)
        if number % 2:
            server.stop()
            server.start()
        else:
            running.kill()
            running = relay(world, server, '--lease=2s', '--wait=600ms')
    world.all_acked(800, 90)
    last = {}
    found = server.messages('T')
    equal('messages', {int(body) for _, _, body in found}, set(range(800)))
    for _, headers, body in found:
        key = headers['message_key']
        expect('order of ' + key, last.get(key, -1) < int(body))
        last[key] = int(body)
    equal('the status', running.started().stop(), 0)
    server.stop()


def silent(world):
    """A server that does not respond pauses only its sink.  A full stream refuses
    messages."""
    server = Server(world.directory)
    server.stream('T', 't', max_msgs=1, discard='new')
    world.publish('t', '1')
    running = relay(world, server, '--n.timeout=1s', '--n.topics=t', '--out.sink=stdout', '--out.topics=out').started()
    world.all_acked(1)
    full = world.publish('t', '2')
    until('it is full', lambda: 'maximum messages exceeded' in (world.outbox(full)[3] or ''))
    server.process.send_signal(signal.SIGSTOP)
    world.query('UPDATE idem_outbox SET available_at = now()')
    until('it is paused', lambda: 'no confirm within 1 s' in running.said())
    began = time.monotonic()
    world.publish('out')
    until('another sink delivers', lambda: world.states() == {'acked': 2, 'pending': 1})
    expect('it took %.1f s' % (time.monotonic() - began), time.monotonic() - began < 3)
    server.process.send_signal(signal.SIGCONT)
    equal('the status', running.stop(), 0)
    server.stop()


def does_not_read(world):
    """A server that does not read delays other sinks only up to "timeout"."""
    server = Server(world.directory)
    server.stream('T', 't')
    running = relay(world, server, '--n.timeout=1s', '--n.topics=t', '--out.sink=stdout', '--out.topics=out').started()
    world.publish('t')
    world.all_acked(1)
    server.process.send_signal(signal.SIGSTOP)
    world.query("SELECT count(idem_publish('t', to_jsonb(repeat(md5(n::text), 20000)), 'k' || n)) FROM generate_series(1, 30) n")
    time.sleep(1)
    message = world.publish('out')
    until('another sink delivers', lambda: world.outbox(message)[0] == 'acked', 8)
    server.process.send_signal(signal.SIGCONT)
    world.all_acked(32)
    equal('the status', running.stop(), 0)
    server.stop()


def answers_itself(world):
    """An answer of a program that is no stream is no confirm."""
    server = Server(world.directory)
    message = world.publish('t')
    with socket.create_connection(('127.0.0.1', server.port), 10) as connection:
        stream = connection.makefile('rb')
        connection.sendall(b'CONNECT {"verbose":false,"headers":true}\r\nSUB t 1\r\n')
        running = relay(world, server)
        line = stream.readline()
        while not line.startswith(b'HMSG'):
            line = stream.readline()
        answer = b'{"success":true}'
        connection.sendall(b'PUB %s %d\r\n%s\r\n' % (line.split()[3], len(answer), answer))
        until('it is no confirm', lambda: world.outbox(message)[3] == 'the answer is not that of a stream')
    equal('the status', running.stop(), 0)
    server.stop()


def no_confirms(world):
    """A subject that no stream has, but that a program reads, gets no answer, and
    delays no other one."""
    server = Server(world.directory)
    server.stream('ORDERS', 'orders')
    with socket.create_connection(('127.0.0.1', server.port), 10) as connection:
        connection.sendall(b'CONNECT {"verbose":false,"headers":true}\r\nSUB read 1\r\n')
        running = relay(world, server, '--n.timeout=1s').started()
        for n in range(30):
            if n % 10 == 0:
                world.publish('read', '"silent"')
            world.publish('orders', str(n))
            time.sleep(0.1)
        until('the others are delivered', lambda: world.states().get('acked') == 30)
        took = world.query("SELECT extract(epoch FROM max(acked_at - created_at))::float FROM idem_outbox WHERE state = 'acked'")
        expect('one waited for %.1f s' % took[0][0], took[0][0] < 1)
        until('the silent ones fail', lambda: world.query(
            "SELECT bool_and(last_error LIKE '%no confirm within 1 s') FROM idem_outbox WHERE state <> 'acked'") == [(True,)])
        equal('the status', running.stop(), 0)
        expect(running.said(), 'has lost its connection' not in running.said())
    server.stop()


def over_tls(world):
    path, key = certificate(world.directory, 'nats')
    password = os.path.join(world.directory, 'nats.password')
    with open(password, 'w') as file:
        file.write('tellnobody\n')
    server = Server(world.directory, '--tls', '--tlscert', path, '--tlskey', key, '--user', 'relay', '--pass', 'tellnobody')
    options = ['--n.sink=nats', '--n.topics=*', '--n.url=tls://localhost:%d' % server.port, '--n.user=relay']
    with_ca = [*options, '--n.ca_file=' + path, '--check']
    os.chmod(password, 0o644)
    for more, status, said in [(options + ['--check'], 69, ''), (with_ca, 69, ''),
                               ([*with_ca, '--n.password_file=' + password], 78, 'chmod o-rwx'),
                               ([*with_ca, '--n.password_file=/none'], 78, 'could not be read')]:
        done = subprocess.run([PROGRAM, *more], capture_output=True, text=True, timeout=60)
        equal('the status of %s' % more, (done.returncode, said in done.stderr), (status, True))
    os.chmod(password, 0o600)
    done = subprocess.run([PROGRAM, *with_ca, '--n.password_file=nats.password'], capture_output=True, text=True, timeout=60,
                          env={**os.environ, 'CREDENTIALS_DIRECTORY': world.directory})
    equal('the status with a credential', (done.returncode, done.stderr), (0, ''))
    server.stop()


def stalled_handshake(world):
    """A server that does not answer the TLS handshake is given up."""
    asked = []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                asked.append(listener.accept()[0])
                asked[-1].sendall(b'INFO {"server_id":"x","proto":1,"headers":true,"max_payload":1000000,"tls_required":true}\r\n')

    with socket.create_server(('127.0.0.1', 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        options = ['--n.sink=nats', '--n.topics=*', '--n.url=tls://localhost:%d' % listener.getsockname()[1]]
        running = world.relay(*options, '--n.timeout=500ms').started()
        until('it is tried again', lambda: len(asked) > 1)
        expect(running.said(), 'sink "n" is paused: Timeout' in running.said())
        equal('the status', running.stop(), 0)
        done = subprocess.run([PROGRAM, *options, '--n.timeout=500ms', '--check'], capture_output=True, text=True, timeout=30)
        equal('the status of --check', (done.returncode, 'cannot be reached: Timeout' in done.stderr), (69, True))
        asked.clear()
        check = world.relay(*options, '--n.timeout=1h', '--check')
        until('it is asked', lambda: asked)
        equal('the status after a signal', check.stop(), -signal.SIGTERM)
        listener.shutdown(socket.SHUT_RDWR)


TESTS = [
    ('nats: a message with its headers is stored once', delivers),
    ('nats: relays and server are killed; each message is stored, in order', killed),
    ('nats: a server that does not respond delays no other sink', silent),
    ('nats: a server that does not read delays no other sink', does_not_read),
    ('nats: an answer that is not that of a stream is no confirm', answers_itself),
    ('nats: a subject that gets no confirm delays no other one', no_confirms),
    ('nats: a server that does not answer the TLS handshake is given up', stalled_handshake),
    ('nats: over TLS, with a password in a file', over_tls),
]
