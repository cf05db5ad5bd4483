# Proxies between a relay and what it connects to.

import contextlib
import select
import socket
import struct
import threading
import time


class Forwarder:
    """Forwards the connections of a listener to what connect() reaches."""

    def __init__(self, listener, connect):
        self.listener, self.connect = listener, connect
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = self.connect()
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self.copy, args=(source, target, source is client), daemon=True).start()

    def copy(self, source, target, from_client):
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(65536):
                target.sendall(data)


class SlowLink(Forwarder):
    """Forwards at most "rate" bytes per second of each connection in one direction."""

    def __init__(self, listener, connect, rate, from_client=False):
        self.rate, self.from_client = rate, from_client
        super().__init__(listener, connect)

    def copy(self, source, target, from_client):
        with contextlib.suppress(OSError), source, target:
            source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            while data := source.recv(8192):
                time.sleep(len(data) / self.rate if from_client == self.from_client else 0)
                target.sendall(data)


class Gate(Forwarder):
    """While it is not "opened", nothing passes in one direction."""

    def __init__(self, listener, connect, from_client):
        self.opened = threading.Event()
        self.opened.set()
        self.from_client = from_client
        super().__init__(listener, connect)

    def copy(self, source, target, from_client):
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(65536):
                if from_client == self.from_client:
                    self.opened.wait()
                target.sendall(data)


class Slow(Forwarder):
    """Delays everything for "delay" seconds."""

    def __init__(self, listener, connect, delay=0.03):
        self.delay = delay
        super().__init__(listener, connect)

    def copy(self, source, target, from_client):
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(65536):
                time.sleep(self.delay)
                target.sendall(data)


def accept_login(connection):
    """Answer the login of a client of PostgreSQL.  Returns whether there was one."""
    # The relay drops a connection that it has only begun.
    if not connection.recv(65536):
        return False
    for kind, body in ((b'R', bytes(4)), (b'S', b'server_version\x0015.0\0'), (b'S', b'in_hot_standby\0off\0'),
                       (b'S', b'default_transaction_read_only\0off\0'), (b'Z', b'I')):
        connection.sendall(kind + struct.pack('!i', len(body) + 4) + body)
    return True


class Pooler(Forwarder):
    """While it cannot connect to its server, it accepts logins, and ends each connection
    that sends a query."""

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        try:
            server = self.connect()
        except OSError:
            with contextlib.suppress(OSError), client:
                accept_login(client)
                client.recv(65536)
            return
        threading.Thread(target=self.copy, args=(client, server, True), daemon=True).start()
        self.copy(server, client, False)

    def copy(self, source, target, from_client):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        # Another thread can read from it, so it would stay open.
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


class Cutter(Forwarder):
    """Ends each connection on which an answer is longer than "limit" bytes."""

    def __init__(self, listener, connect, limit):
        self.limit = limit
        super().__init__(listener, connect)

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self.forward, args=(client, self.connect()), daemon=True).start()

    def forward(self, client, server):
        length = 0
        with contextlib.suppress(OSError), client, server:
            while length <= self.limit:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(65536)
                    length = 0 if source is client else length + len(data)
                    (server if source is client else client).sendall(data)
                    if not data:
                        return
