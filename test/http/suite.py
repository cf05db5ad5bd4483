"""Which promises a shop keeps."""

import collections
import os
import sys
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

from process import NotStarted                              # noqa: E402
from world import PROMISES, Broken, NotOffered, World                   # noqa: E402

# In the order in which they run.
import answers, keys, bodies, duplicates, likes, forms, jobs, faults    # noqa: E402,E401,F401

WAYS = {'direct': 'straight to the server', 'pgbouncer': 'through PgBouncer', 'memory': 'over the memory double'}


def named(name):
    """Asked for by TESTS and EXCEPT."""
    some, none = os.environ.get('TESTS', '').split(), os.environ.get('EXCEPT', '').split()
    return (not some or any(word in name for word in some)) and not any(word in name for word in none)


def say(line):
    print(line, flush=True)


def conform(shop, via='direct', wanted=named, first=1, say=say, **variables):
    """Say TAP from that number on; the names of the promises that were kept,
    broken and left out."""
    began = time.monotonic()
    say('# == %s, %s' % (shop, WAYS[via]))
    results = check(World(shop, via, **variables), '%s, %s: ' % (shop, via), wanted, first, say)
    kept, broken, left_out = ([result.name for result in results if result.verdict == verdict]
                              for verdict in ('kept', 'broken', 'left out'))
    say('# %s, %s: %d kept, %d broken, %d left out, %.0f s' % (
        shop, via, len(kept), len(broken), len(left_out), time.monotonic() - began))
    return kept, broken, left_out


STARTS = 'the shop starts'
# A verdict is "kept", "broken" or "left out", and why in two of these cases.
Result = collections.namedtuple('Result', 'name verdict why')


def check(world, title='', wanted=named, first=1, say=say):
    """Say TAP of each promise in that world, and end it: the results."""
    results = []
    try:
        chosen = [promise for promise in PROMISES if wanted(promise[0])]
        for name, needs, why, test in [(STARTS, '', '', type(world).start)] + chosen:
            start = time.monotonic()
            verdict, why = ('left out', why) if world.lacks(needs) else attempt(test, world)
            results.append(Result(name, verdict, why))
            line = '%d - %s%s' % (first + len(results) - 1, title, name)
            took = ' # %.1f s' % (time.monotonic() - start)
            if verdict == 'left out':
                say('ok %s # SKIP %s' % (line, why))
            elif verdict == 'kept':
                say('ok ' + line + took)
            else:
                say('not ok ' + line + took)
                say('\n'.join('# ' + part for part in (why + world.log_end()).split('\n')))
                if name == STARTS:
                    break
    finally:
        world.end()
    return results


def attempt(test, world):
    """The verdict, and what was wrong."""
    try:
        test(world)
        return 'kept', ''
    except NotOffered as error:
        if not world.remote:
            return 'broken', str(error)
        return 'left out', 'the server has no ' + str(error).split(':')[0]
    except (Broken, NotStarted) as error:
        return 'broken', str(error)
    except Exception:
        return 'broken', traceback.format_exc()
