"""A way to the server that counts round trips, and cuts connections at COMMIT, or falls silent."""

import os
import select
import socket
import threading
import time


class Proxy:
    def __init__(self, server=None):
        self.server = server or f"{os.environ['PGHOST']}/.s.PGSQL.{os.environ['PGPORT']}"
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.trips = 0
        self.links = []
        self.closed = False
        self.silence = None
        """Bytes: the next connection that sends them gets no answer to that or to anything behind it."""
        self.all_silent = False
        """Nor does any new connection."""
        self.cut = None
        """"before" or "after": cut the next connection that commits, before
        the server has heard of it or once it has answered."""
        self.silence_after_cut = None
        """What silence is from the next cut on."""
        self.linger = 0.0
        """Seconds until the server hears of a cut."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def conninfo(self):
        return f"host=127.0.0.1 port={self.port}"

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.links.append(client)
            if self.closed:
                client.close()
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        server = socket.socket(socket.AF_UNIX)
        server.connect(self.server)
        answered, cutting, silent = True, None, self.all_silent
        with client, server:
            while True:
                for source in select.select([client, server], [], [])[0]:
                    try:
                        data = source.recv(65536)
                    except OSError:
                        return
                    if not data:
                        return
                    if source is client and self.silence and self.silence in data:
                        silent, self.silence = True, None
                    if silent:
                        continue
                    if source is client:
                        self.trips += answered
                        answered = False
                        if self.cut and b"COMMIT" in data:
                            cutting, self.cut = self.cut, None
                            if cutting == "before":
                                client.shutdown(socket.SHUT_RDWR)
                                time.sleep(self.linger)
                                return
                        server.sendall(data)
                    else:
                        answered = True
                        if cutting:
                            self.silence, self.silence_after_cut = self.silence_after_cut or self.silence, None
                            return
                        client.sendall(data)

    def close(self):
        """And cut all connections, also one that was accepted just now."""
        self.closed = True
        for link in [self.listener, *self.links]:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.listener.close()
