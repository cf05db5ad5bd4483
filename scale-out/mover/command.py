"""What the commands move and shards have in common"""

import argparse
import signal
import sys

import psycopg2

from .places import LOCK
from .servers import Failure, Server, Shards, say


def parser_of(text):
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('--also', action='append', default=[])
    parser.add_argument('--timeout', type=float, default=60)
    parser.add_argument('--shard-options', default='user=postgres')
    parser.add_argument('--shards')
    parser.add_argument('--copy', action='store_true')
    return parser


def connect(args, is_mover=True):
    """Returns the routers and the shards.  Of each router, there is one mover."""
    routers = [Server(args.router, 'the router')] + [
        Server(dsn, 'router "%s"' % dsn) for dsn in args.also]
    shards = Shards(routers[0], args.shard_options, args.shards)
    if is_mover and not routers[0].one('SELECT pg_try_advisory_lock(%s, 0)', LOCK):
        raise Failure('another move is under way on this router')
    routers[0].commit()
    return routers, shards


def interrupt(*_):
    raise Failure('interrupted')


def run(perform, args, advice):
    """Exits with the advice after an error or a signal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        perform(args)
    except (Failure, psycopg2.Error, OSError) as failure:
        say(str(failure).strip() or 'interrupted')
        sys.exit(advice)
