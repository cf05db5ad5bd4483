# An endpoint of webhooks whose answers a test sets.

import base64
import contextlib
import hashlib
import hmac
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace


class Endpoint:
    """"answer" is called with each request and its number from 1.  It returns a
    status, headers, and a body or a generator of its parts; or None, which closes
    the connection without an answer.  Each of the "workers" serves a connection
    until that ends."""

    def __init__(self, answer=lambda request, number: (204, {}, b''), tls=None, port=0, workers=1000):
        self.answer = answer
        self.workers = threading.Semaphore(workers)
        self.connections = set()
        self.requests = []
        self.lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def do_POST(self):
                # A connection has one handler, and several requests.
                request = SimpleNamespace(headers=self.headers, at=time.monotonic(), body=self.rfile.read(
                    int(self.headers.get('Content-Length', 0))))
                with endpoint.lock:
                    endpoint.requests.append(request)
                    number = len(endpoint.requests)
                answer = endpoint.answer(request, number)
                if answer is None:
                    self.close_connection = True
                    return
                status, headers, body = answer
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if isinstance(body, bytes) and status != 204:
                    self.send_header('Content-Length', str(len(body)))
                self.end_headers()
                try:
                    # A body that does not end closes the connection.
                    for part in [body] if isinstance(body, bytes) else body:
                        self.wfile.write(part)
                except OSError:
                    self.close_connection = True

            def log_message(self, *arguments):
                pass

            def handle(self):
                endpoint.connections.add(self.connection)
                try:
                    with endpoint.workers:
                        super().handle()
                except OSError:
                    pass
                finally:
                    endpoint.connections.discard(self.connection)

        self.server = ThreadingHTTPServer(('127.0.0.1', port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = 'http://127.0.0.1:%d/hooks' % self.port
        if tls:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
            self.url = 'https://localhost:%d/hooks' % self.port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        """With the connections that there are."""
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def signature(secret, request):
    """The signature that the Standard Webhooks specification requires."""
    signed = b'.'.join([request.headers['webhook-id'].encode(), request.headers['webhook-timestamp'].encode(),
                        request.body])
    key = base64.b64decode(secret.removeprefix('whsec_'))
    return 'v1,' + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
