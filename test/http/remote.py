"""A server in any language that is already running."""

import urllib.parse

import wire
import world
from process import NotStarted
from world import Broken, World


class Server:
    """Represents a shop that the suite neither starts nor ends."""

    def __init__(self, url):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ('http', 'https') or not parts.hostname or parts.path.strip('/') or parts.query:
            raise ValueError('not a URL like http://127.0.0.1:3000: %s' % url)
        tls = parts.scheme == 'https'
        self.port = wire.Address(parts.hostname, parts.port or (443 if tls else 80), tls)
        wire.HOST = parts.netloc.rpartition('@')[2]


class Remote(World):
    """A world of only requests and answers, without database, process and settings."""

    remote = memory = True

    def __init__(self, url, strict):
        self.server = Server(url)
        world.STRICT = strict
        self.left_out = {'database', 'process'} if strict else {'database', 'process', 'ours'}

    @property
    def shop(self):
        return self.server

    def lacks(self, needs):
        return needs in self.left_out

    def log_end(self):
        return ''

    def end(self):
        pass

    def start(self):
        try:
            self.effects()
        except (Broken, OSError, wire.HungUp) as error:
            raise NotStarted('the server must answer GET /effects with its counts: %s' % error)
