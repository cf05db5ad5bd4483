# A separate RabbitMQ on loopback, without systemd, with and without TLS.

import contextlib
import os
import socket
import ssl
import subprocess
import tempfile
import time

import pika

from proxies import Forwarder
from world import Broken, free_port, until

SERVER = '/usr/lib/rabbitmq/bin/rabbitmq-server'
CONTROL = '/usr/lib/rabbitmq/bin/rabbitmqctl'


def certificate(directory, name):
    """A self-signed certificate for "localhost": its file, and the file of its key."""
    path, key = (os.path.join(directory, name + end) for end in ('.crt', '.key'))
    subprocess.run(['openssl', 'req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes',
                    '-days', '2', '-subj', '/CN=localhost', '-addext', 'subjectAltName=DNS:localhost', '-keyout', key,
                    '-out', path], check=True, capture_output=True)
    return path, key


def tls_server(directory, name):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(directory, name))
    return context


class Rabbit:
    def __init__(self, directory):
        self.directory = tempfile.mkdtemp(prefix='rabbit.', dir=directory)
        self.port, self.tls_port, self.epmd_port, distribution = (free_port() for _ in range(4))
        self.url = 'amqp://guest:guest@127.0.0.1:%d/%%2f' % self.port
        self.tls_url = 'amqps://guest:guest@localhost:%d/%%2f' % self.tls_port
        self.certificate, key = certificate(self.directory, 'broker')
        self.log = open(os.path.join(self.directory, 'log'), 'wb')
        self.process = None
        configuration = os.path.join(self.directory, 'rabbitmq.conf')
        with open(configuration, 'w') as file:
            file.write('listeners.tcp.1 = 127.0.0.1:%d\nlisteners.ssl.1 = 127.0.0.1:%d\n'
                       'ssl_options.cacertfile = %s\nssl_options.certfile = %s\nssl_options.keyfile = %s\n'
                       'vm_memory_high_watermark.absolute = 1GB\ndisk_free_limit.absolute = 50MB\n' % (
                           self.port, self.tls_port, self.certificate, self.certificate, key))
        with open(os.path.join(self.directory, 'plugins'), 'w') as file:
            file.write('[].\n')
        self.environment = {
            **os.environ,
            'HOME': self.directory,
            'ERL_EPMD_PORT': str(self.epmd_port),
            'ERL_EPMD_ADDRESS': '127.0.0.1',
            'RABBITMQ_NODENAME': 'idem%d@localhost' % self.port,
            'RABBITMQ_DIST_PORT': str(distribution),
            'RABBITMQ_CONFIG_FILE': configuration,
            'RABBITMQ_ENABLED_PLUGINS_FILE': os.path.join(self.directory, 'plugins'),
            'RABBITMQ_MNESIA_BASE': os.path.join(self.directory, 'mnesia'),
            'RABBITMQ_LOG_BASE': os.path.join(self.directory, 'logs'),
            'RABBITMQ_LOGS': '-',
            'RABBITMQ_PID_FILE': os.path.join(self.directory, 'pid'),
            'RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS': '+S 1:1 +sbwt none',
        }
        self.epmd = subprocess.Popen(['epmd', '-port', str(self.epmd_port), '-address', '127.0.0.1'],
                                     stdout=self.log, stderr=self.log)
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self):
        self.process = subprocess.Popen([SERVER], env=self.environment, stdout=self.log, stderr=self.log,
                                        stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            until('RabbitMQ answers', self.answers, 180)
        except Broken:
            with open(os.path.join(self.directory, 'log'), errors='replace') as log:
                print('# ' + log.read()[-1000:].replace('\n', '\n# '))
            raise

    def answers(self):
        if self.process.poll() is not None:
            raise Broken('RabbitMQ has ended')
        try:
            pika.BlockingConnection(self.parameters()).close()
            return True
        except Exception:
            time.sleep(0.2)
            return False

    def parameters(self):
        return pika.URLParameters(self.url)

    def stop(self):
        """Ends it at once, like a crash."""
        if self.process is not None:
            # It can have ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()
            self.process = None

    def control(self, *command):
        subprocess.run([CONTROL, '-n', self.environment['RABBITMQ_NODENAME'], *command], env=self.environment,
                       stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, check=True)

    def close(self):
        self.stop()
        self.epmd.kill()
        self.epmd.wait()
        self.log.close()

    def channel(self):
        connection = pika.BlockingConnection(self.parameters())
        return connection, connection.channel()


class Proxy(Forwarder):
    """A proxy in front of a port. It closes a connection, without a reason, when
    a client sends the word "poison", after a delay."""

    def __init__(self, server_port, delay=0, port=0):
        self.sockets = set()
        self.delay = delay
        listener = socket.create_server(('127.0.0.1', port))
        self.port = listener.getsockname()[1]
        super().__init__(listener, lambda: socket.create_connection(('127.0.0.1', server_port)))

    def copy(self, source, target, from_client):
        self.sockets.update((source, target))
        with contextlib.suppress(OSError):
            while (data := source.recv(65536)) and b'poison' not in data:
                target.sendall(data)
            if data:
                time.sleep(self.delay)
        for end in (source, target):
            self.sockets.discard(end)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self):
        """Close all connections, and accept new ones."""
        for end in list(self.sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        # The thread in accept() would keep it open.
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
