"""HTTP over a socket of our own: what is sent is what was given, and what
came back is kept as it came."""

import collections
import json
import socket
import ssl

# Seconds that an answer may take.
PATIENCE = 60
HOST = '127.0.0.1'
# Headers that a server makes anew for each answer.
MADE_ANEW = {'date', 'connection', 'keep-alive', 'transfer-encoding', 'content-length', 'server'}


# Where a server listens.
Address = collections.namedtuple('Address', 'host port tls', defaults=(False,))


def address_of(place):
    """An Address, or the port of a server on this machine."""
    return place if isinstance(place, Address) else Address('127.0.0.1', place)


class HungUp(Exception):
    """The other side closed before its answer was whole."""


class Answer:
    def __init__(self, status, headers, body):
        self.status = status
        self.headers = headers          # (name, value), in the order they came
        self.body = body

    def all(self, name):
        return [value for found, value in self.headers if found.lower() == name.lower()]

    def one(self, name):
        values = self.all(name)
        return values[0] if len(values) == 1 else None

    def json(self):
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def kept(self, *but):
        """The headers that a replay is to repeat, in an order of their own."""
        return sorted((name.lower(), value) for name, value in self.headers
                      if name.lower() not in MADE_ANEW and name.lower() not in but)

    def __str__(self):
        lines = ['HTTP %d' % self.status] + ['%s: %s' % header for header in self.headers]
        return '\n'.join(lines) + '\n\n' + shown(self.body)


def shown(body, most=600):
    text = repr(body[:most])[2:-1]
    return text + (' ... (%d bytes)' % len(body) if len(body) > most else '')


class Request:
    def __init__(self, method, path, headers=(), body=None):
        self.method = method
        self.path = path
        self.headers = list(headers)
        self.body = body

    def bytes(self):
        lines = ['%s %s HTTP/1.1' % (self.method, self.path), 'Host: ' + HOST]
        lines += ['%s: %s' % header for header in self.headers]
        if self.body is not None:
            lines.append('Content-Length: %d' % len(self.body))
        return ('\r\n'.join(lines) + '\r\n\r\n').encode('latin-1') + (self.body or b'')

    def __str__(self):
        lines = ['%s %s' % (self.method, self.path)] + ['%s: %s' % header for header in self.headers]
        return '\n'.join(lines) + ('\n\n' + shown(self.body) if self.body else '')


class Connection:
    def __init__(self, place, timeout=None):
        host, port, tls = address_of(place)
        self.socket = socket.create_connection((host, port), timeout or PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            self.socket = ssl.create_default_context().wrap_socket(self.socket, server_hostname=host)
        self.received = b''

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def send(self, data):
        self.socket.sendall(data)

    def close(self):
        self.socket.close()

    def finish(self):
        """Send nothing more, and take what comes until the server closes."""
        self.socket.shutdown(socket.SHUT_WR)
        try:
            while True:
                self.more()
        except (HungUp, TimeoutError):
            pass

    def reset(self):
        """Close with a reset, as a client that was killed does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\1\0\0\0\0\0\0\0')
        self.socket.close()

    def more(self):
        try:
            part = self.socket.recv(1 << 18)
        except ConnectionError as error:
            raise HungUp(str(error))
        if not part:
            raise HungUp('closed after %r' % self.received[:200])
        self.received += part

    def until(self, mark):
        while mark not in self.received:
            self.more()
        before, _, self.received = self.received.partition(mark)
        return before

    def exactly(self, length):
        while len(self.received) < length:
            self.more()
        taken, self.received = self.received[:length], self.received[length:]
        return taken

    def answer(self):
        """The next final answer on this connection."""
        while True:
            first, *lines = self.until(b'\r\n\r\n').decode('latin-1').split('\r\n')
            status = int(first.split(' ')[1])
            if status >= 200:
                break
        headers = [(name, value.strip()) for name, _, value in (line.partition(':') for line in lines)]
        answer = Answer(status, headers, b'')
        if status in (204, 304):
            return answer
        if 'chunked' in [value.lower() for value in answer.all('Transfer-Encoding')]:
            while True:
                length = int(self.until(b'\r\n').split(b';')[0], 16)
                answer.body += self.exactly(length)
                self.until(b'\r\n')
                if length == 0:
                    return answer
        if answer.all('Content-Length'):
            answer.body = self.exactly(int(answer.one('Content-Length')))
            return answer
        try:
            while True:
                self.more()
        except HungUp:
            answer.body, self.received = self.received, b''
        return answer


def send(place, request, timeout=None):
    """One request on a connection of its own, and its answer."""
    with Connection(place, timeout) as connection:
        connection.send(request.bytes())
        return connection.answer()
