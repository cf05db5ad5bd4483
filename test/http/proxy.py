"""A proxy between a shop and its database that knows where PostgreSQL's
messages begin and end, and cuts or holds connections at chosen ones."""

import os
import socket
import struct
import threading

SSL_REQUEST, GSS_REQUEST = 80877103, 80877104


class Link:
    """A connection of the shop, and the proxy's own to the database."""

    def __init__(self, proxy, client):
        self.proxy = proxy
        self.client = client
        self.server = proxy.connect()
        self.query = ''                 # text of the statement that runs
        self.prepared = {}              # by name
        self.began = False              # a transaction of more than one statement
        self.wrote = False              # in it
        self.asking = False             # what came last came from the shop

    def close(self):
        for end in (self.client, self.server):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def run(self):
        try:
            if self.startup():
                backward = threading.Thread(target=self.pump, args=(self.server, self.client, self.from_server),
                                            daemon=True)
                backward.start()
                self.pump(self.client, self.server, self.from_client)
                backward.join()
        finally:
            self.close()
            self.client.close()
            self.server.close()

    def startup(self):
        while True:
            head = exactly(self.client, 8)
            if head is None:
                return False
            length, code = struct.unpack('!II', head)
            if code not in (SSL_REQUEST, GSS_REQUEST):
                break
            self.client.sendall(b'N')
        rest = exactly(self.client, length - 8)
        if rest is None:
            return False
        self.server.sendall(head + rest)
        return True

    def pump(self, source, target, watch):
        """Forward messages, and read each of them first."""
        received = b''
        try:
            while True:
                part = source.recv(1 << 16)
                if not part:
                    break
                if self.asking != (source is self.client):
                    self.asking = not self.asking
                    self.proxy.turns += self.asking
                received += part
                out = []
                at = 0
                while len(received) - at >= 5:
                    size = 1 + struct.unpack_from('!I', received, at + 1)[0]
                    if len(received) - at < size:
                        break
                    message = received[at:at + size]
                    at += size
                    if not watch(message[:1], message[5:]):
                        if out:
                            target.sendall(b''.join(out))
                        return
                    out.append(message)
                received = received[at:]
                if out:
                    target.sendall(b''.join(out))
        except OSError:
            pass
        finally:
            self.close()

    def from_client(self, kind, body):
        if kind == b'Q':
            self.query = body[:-1].decode('utf-8', 'replace')
        elif kind == b'P':
            name, query = body.split(b'\0')[:2]
            self.prepared[name] = query.decode('utf-8', 'replace')
            return True
        elif kind == b'B':
            self.query = self.prepared.get(body.split(b'\0')[1], '')
        else:
            return True
        return self.proxy.asked(self, self.query)

    def from_server(self, kind, body):
        if kind != b'C':
            return True
        tag = body[:-1].decode()
        passes = self.proxy.done(self, tag)
        if tag in ('COMMIT', 'ROLLBACK'):
            self.began = self.wrote = False
        elif tag == 'BEGIN':
            self.began = True
        elif tag.startswith('INSERT'):
            self.wrote = True
        return passes


def exactly(source, length):
    data = b''
    while len(data) < length:
        try:
            part = source.recv(length - len(data))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return data


class Proxy:
    """asked(link, query) and done(link, tag) return whether to forward the
    message.  If not, the connection ends."""

    def __init__(self, port=None):
        self.upstream = port
        self.turns = 0                  # round trips, of all connections
        self.listener = socket.create_server(('127.0.0.1', 0), backlog=100)
        self.port = self.listener.getsockname()[1]
        self.pass_all()
        threading.Thread(target=self.accept, daemon=True).start()

    def pass_all(self):
        self.asked = lambda link, query: True
        self.done = lambda link, tag: True

    def connect(self):
        if self.upstream is not None:
            return socket.create_connection(('127.0.0.1', self.upstream))
        server = socket.socket(socket.AF_UNIX)
        server.connect(os.path.join(os.environ['PGHOST'], '.s.PGSQL.' + os.environ['PGPORT']))
        return server

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link = Link(self, client)
            except OSError:
                client.close()
                continue
            threading.Thread(target=link.run, daemon=True).start()

    def end(self):
        self.listener.close()
