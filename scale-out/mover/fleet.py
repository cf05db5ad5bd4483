"""
Many moves, one after another.

They keep no state of their own.  Each run begins with the gates, so the same
command continues where an earlier one has ended.
"""

import time

import psycopg2

from .places import Place
from .servers import Failure, say
from .steps import Move


class Fleet:

    def __init__(self, routers, shards, timeout, must_copy):
        self.routers, self.shards = routers, shards
        self.timeout, self.must_copy = timeout, must_copy

    def move(self, place):
        slot, scope = place
        return Move(Place(self.routers[0], scope or str(slot), not scope),
                    self.routers, self.shards, self.timeout, self.must_copy)

    def end_unfinished(self, places):
        """Give up moves that were interrupted, unless they have arrived."""
        for place in places:
            self.move(place).back(False)

    def carry_out(self, moves):
        """Continues after a move that fails, and raises Failure at the end."""
        began, failed = time.monotonic(), []
        for count, (place, to) in enumerate(moves):
            try:
                self.move(place).there(to)
            except (Failure, psycopg2.Error) as error:
                if 'interrupted' in str(error):
                    raise
                failed.append('%s: %s' % (name_of(place), str(error).strip()))
                say(failed[-1])
            spent = time.monotonic() - began
            say('%d of %d moves, %d s to go' % (
                count + 1, len(moves),
                spent / (count + 1) * (len(moves) - count - 1)))
        if failed:
            raise Failure('%d of %d moves failed' % (len(failed), len(moves)))


def name_of(place):
    slot, scope = place
    return 'scope "%s"' % scope if scope else 'slot %d' % slot
