"""
What the Python programs below test/ share.  A program puts this directory into
sys.path:

    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                    '..', 'lib'))
"""

import os
import random
import socket
import sys
import time

import psycopg2


class Broken(AssertionError):
    """A promise was not kept; the text says which."""


def check(condition, *what):
    if not condition:
        raise Broken(' '.join(str(part) for part in what))


def equal(found, expected, *what):
    """Returns 1, for callers that count their comparisons."""
    check(found == expected, *what, 'found', repr(found), 'in place of',
          repr(expected))
    return 1


def until(condition, what, seconds=60):
    """Wait until the condition is true; returns its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        check(time.monotonic() < deadline, 'not within', seconds, 's:', what)
        time.sleep(0.02)
    return value


def option(name, default=None, kind=int):
    """NAME=value of the command line, or else of the environment."""
    for argument in sys.argv[1:]:
        if argument.startswith(name + '='):
            return kind(argument.split('=', 1)[1])
    return kind(os.environ[name]) if os.environ.get(name) else default


def free_port():
    """A port outside the range that the system gives to connections.  Otherwise
    a client of a server that is gone could connect to itself."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(('127.0.0.1', random.randrange(20000, 32000)))
                return probe.getsockname()[1]
            except OSError:
                pass


class Session:
    """A connection in autocommit mode."""

    def __init__(self, dsn='', search_path=None):
        self.connection = psycopg2.connect(dsn)
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()
        if search_path:
            self.run('SET search_path = ' + search_path)

    def run(self, text, *args):
        self.cursor.execute(text, args or None)
        return self.cursor.fetchall() if self.cursor.description else []

    def one(self, text, *args):
        return self.run(text, *args)[0][0]

    def error(self, text, *args):
        """The SQLSTATE and the message, or None and the rows."""
        try:
            return None, self.run(text, *args)
        except psycopg2.Error as error:
            return error.pgcode, str(error)

    def close(self):
        self.connection.close()
