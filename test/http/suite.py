"""Which promises a shop keeps."""

import os
import sys
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

from process import NotStarted                              # noqa: E402
from world import PROMISES, Broken, World                   # noqa: E402

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
    """Say TAP from that number on; the promises that were kept, and broken."""
    number = first - 1
    kept, broken, left_out = [], [], []
    began = time.monotonic()
    say('# == %s, %s' % (shop, WAYS[via]))
    world = World(shop, via, **variables)
    try:
        chosen = [promise for promise in PROMISES if wanted(promise[0])]
        for name, needs, why, test in [('the shop starts', '', '', lambda world: world.shop.port)] + chosen:
            if broken == ['the shop starts']:
                break
            number += 1
            title = '%d - %s, %s: %s' % (number, shop, via, name)
            if needs and world.memory:
                left_out.append(name)
                say('ok %s # SKIP %s' % (title, why))
                continue
            start = time.monotonic()
            error = attempt(test, world)
            took = ' # %.1f s' % (time.monotonic() - start)
            if error is None:
                kept.append(name)
                say('ok ' + title + took)
            else:
                broken.append(name)
                say('not ok ' + title + took)
                say('\n'.join('# ' + line for line in (error + world.log_end()).split('\n')))
    finally:
        world.end()
    say('# %s, %s: %d kept, %d broken, %d left out, %.0f s' % (
        shop, via, len(kept), len(broken), len(left_out), time.monotonic() - began))
    return kept, broken, left_out


def attempt(test, world):
    """What was wrong, or None."""
    try:
        test(world)
        return None
    except (Broken, NotStarted) as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
