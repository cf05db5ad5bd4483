# The sink "command", and what all sinks have in common.

import os
import time

from world import equal, expect, until


def run_for_each(world):
    seen = os.path.join(world.directory, 'seen')
    message_id = world.publish('orders', '{"n": 1}', 'k 1', '{"a": 1}')
    relay = world.relay('--c.sink=command', '--c.topics=*', '--c.command='
                        '{ printf "%%s|" "$IDEM_MESSAGE_ID" "$IDEM_TOPIC" "$IDEM_MESSAGE_KEY" "$IDEM_HEADERS"; cat; } >%s'
                        % seen).started()
    world.all_acked(1)
    with open(seen) as file:
        equal('what it got', file.read(), message_id + '|orders|k 1|{"a": 1}|{"n": 1}')
    os.unlink(seen)
    equal('the status', relay.stop(), 0)


def dies_alone(world):
    """A bad payload is dead after its attempts; nothing else waits for it."""
    world.query('ALTER SYSTEM SET idempotency.outbox_max_attempts = 2')
    world.query('SELECT pg_reload_conf()')
    try:
        bad = world.publish('t', '"bad"', 'k1')
        world.publish('t', '"good"', 'k1')
        relay = world.relay('--c.sink=command', '--c.topics=*',
                            '--c.command=if grep -q bad; then echo one >&2; echo "not this one" >&2; exit 1; fi').started()
        for n in range(20):
            world.publish('t', '"good"', 'k%d' % (n + 2))
        until('the others are delivered', lambda: world.states() == {'acked': 20, 'pending': 2}, 10)
        until('it is dead', lambda: world.states() == {'acked': 21, 'dead': 1})
        equal('the message', world.outbox(bad),
              ('dead', 2, False, 'the command ended with status 1: not this one'))
        until('it is told', lambda: bad + ' of topic "t" is dead after attempt 2: the command' in relay.said())
        equal('the status', relay.stop(), 0)
    finally:
        world.query('ALTER SYSTEM RESET idempotency.outbox_max_attempts')
        world.query('SELECT pg_reload_conf()')


def put_off(world):
    """A sink that is down costs no attempts, and is asked less and less."""
    mark = os.path.join(world.directory, 'up')
    tries = os.path.join(world.directory, 'tries')
    for n in range(20):
        world.publish('t', str(n), 'k%d' % (n % 5))
    relay = world.relay('--c.sink=command', '--c.topics=*',
                        '--c.command=echo >>%s; [ -e %s ] || exit 75' % (tries, mark)).started()
    until('it is held up', lambda: 'sink "c" is held up: the command ended with status 75' in relay.said())
    time.sleep(3)
    with open(tries) as file:
        expect('tried too often', len(file.readlines()) < 12)
    open(mark, 'w').close()
    world.all_acked(20, 40)
    equal('attempts', world.query('SELECT max(attempt - attempts_before) FROM idem_outbox'), [(1,)])
    equal('the status', relay.stop(), 0)
    os.unlink(mark)
    os.unlink(tries)


def others_go_on(world):
    """While one sink is down, another's topics are delivered."""
    relay = world.relay('--a.sink=command', '--a.topics=a', '--a.command=exit 75', '--b.sink=command', '--b.topics=b',
                        '--b.command=true').started()
    for n in range(30):
        world.publish('a', str(n), 'k%d' % n)
        world.publish('b', str(n), 'k%d' % n)
    until('b is delivered', lambda: world.query(
        "SELECT count(*) FROM idem_outbox WHERE topic = 'b' AND state = 'acked'") == [(30,)], 10)
    equal('the status', relay.stop(), 0)
    equal('attempts of a', world.query(
        "SELECT max(attempt - attempts_before) FROM idem_outbox WHERE topic = 'a'"), [(0,)])


def late(world):
    message = world.publish('t')
    relay = world.relay('--c.sink=command', '--c.topics=*', '--c.command=sleep 30', '--c.timeout=300ms').started()
    until('it is refused', lambda: world.outbox(message)[3] == 'the command took longer than "timeout"')
    equal('the status', relay.stop(), 0)


def extended(world):
    """A delivery may take longer than the lease."""
    message = world.publish('t', '1', 'k')
    second = world.publish('t', '2', 'k')
    options = ('--c.sink=command', '--c.topics=*', '--c.command=sleep 2.5', '--lease=1s', '--wait=300ms')
    relays = [world.relay(*options).started(), world.relay(*options).started()]
    world.all_acked(2)
    equal('attempts', (world.outbox(message)[1], world.outbox(second)[1]), (1, 1))
    for relay in relays:
        equal('the status', relay.stop(), 0)


def large(world):
    message = world.publish('t', '"%s"' % ('x' * 3000))
    relay = world.relay('--c.sink=command', '--c.topics=*', '--c.command=true', '--c.max_size=2kB').started()
    until('it is refused', lambda: 'larger than "max_size"' in (world.outbox(message)[3] or ''))
    equal('the status', relay.stop(), 0)


TESTS = [
    ('a command gets the message', run_for_each),
    ('a bad payload ends as a dead letter, alone', dies_alone),
    ('a sink that is down costs no attempt', put_off),
    ('while a sink is down, others go on', others_go_on),
    ('a command that takes too long is killed', late),
    ('leases are extended while a delivery is slow', extended),
    ('a payload that is too large is refused', large),
]
