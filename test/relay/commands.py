# The sink "command", and the common behaviour of all sinks.

import os
import signal
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


def without_password(world):
    """Commands do not get the password of the database."""
    seen = os.path.join(world.directory, 'seen')
    world.publish('t')
    relay = world.relay('--c.sink=command', '--c.topics=*', '--c.command=env >%s' % seen,
                        environment={'PGPASSWORD': 'tellnobody', 'COLOUR': 'red'}).started()
    world.all_acked(1)
    with open(seen) as file:
        text = file.read()
    expect(text, 'COLOUR=red' in text and 'tellnobody' not in text)
    os.unlink(seen)
    equal('the status', relay.stop(), 0)


def inherits_nothing(world):
    """A descriptor that is open in the relay is not open in a command."""
    world.publish('t')
    with open(os.devnull) as other:
        relay = world.relay('--c.sink=command', '--c.topics=*', '--c.command=[ ! -e /proc/$$/fd/%d ]' % other.fileno(),
                            descriptors=[other.fileno()]).started()
    world.all_acked(1)
    equal('attempts', world.query('SELECT attempt FROM idem_outbox'), [(1,)])
    equal('the status', relay.stop(), 0)


def inherits_ignored_signal(world):
    """A parent can ignore SIGCHLD, and its children inherit that."""
    message, failed = world.publish('t'), world.publish('t', '"bad"')
    relay = world.relay('--c.sink=command', '--c.topics=*', '--c.command=if grep -q bad; then exit 3; fi',
                        before=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)).started()
    until('it is delivered', lambda: world.outbox(message)[0] == 'acked', 10)
    until('it is refused', lambda: world.outbox(failed)[3] == 'the command ended with status 3: ', 10)
    equal('the status', relay.stop(), 0)


def dies_alone(world):
    """A bad payload is dead after its attempts; nothing else waits for it."""
    with world.setting('outbox_max_attempts', 4):
        bad = world.publish('t', '"bad"', 'k1')
        world.publish('t', '"good"', 'k1')
        for n in range(20):
            world.publish('t', '"good"', 'k%d' % (n + 2))
        relay = world.relay('--c.sink=command', '--c.topics=*',
                            '--c.command=if grep -q bad; then echo one >&2; echo "not this one" >&2; exit 1; fi').started()
        until('the others are delivered', lambda: world.states() == {'acked': 20, 'pending': 2}, 10)
        until('it is dead', lambda: world.states() == {'acked': 21, 'dead': 1})
        equal('the message', world.outbox(bad),
              ('dead', 4, False, 'the command ended with status 1: not this one'))
        until('the relay reports it', lambda: bad + ' of topic "t" is dead after attempt 4: the command' in relay.said())
        equal('the status', relay.stop(), 0)


def deferred(world):
    """A sink that is down costs no attempts, and is tried less and less often."""
    mark = os.path.join(world.directory, 'up')
    tries = os.path.join(world.directory, 'tries')
    for n in range(20):
        world.publish('t', str(n), 'k%d' % (n % 5))
    relay = world.relay('--c.sink=command', '--c.topics=*',
                        '--c.command=echo >>%s; [ -e %s ] || exit 75' % (tries, mark)).started()
    until('it is paused', lambda: 'sink "c" is paused: the command ended with status 75' in relay.said())
    time.sleep(3)
    with open(tries) as file:
        # Four at first, two after the first pause, and then four at a time
        expect('tried too often', len(file.readlines()) < 20)
    open(mark, 'w').close()
    world.all_acked(20, 40)
    equal('attempts', world.query('SELECT max(attempt - uncounted_attempts) FROM idem_outbox'), [(1,)])
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
        "SELECT max(attempt - uncounted_attempts) FROM idem_outbox WHERE topic = 'a'"), [(0,)])


def late(world):
    message = world.publish('t')
    relay = world.relay('--c.sink=command', '--c.topics=*', '--c.command=sleep 30', '--c.timeout=300ms').started()
    until('it is refused', lambda: world.outbox(message)[3] == 'the command took longer than "timeout"')
    equal('the status', relay.stop(), 0)


def extended(world):
    """A delivery can take longer than the lease."""
    message = world.publish('t', '1', 'k')
    second = world.publish('t', '2', 'k')
    options = ('--c.sink=command', '--c.topics=*', '--c.command=sleep 4', '--lease=3s', '--wait=1s')
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


def environment_full(world):
    """Only headers that are too large for the environment are refused."""
    bad = world.publish('t', '1', None, '{"x": "%s"}' % ('x' * 200000))
    for n in range(5):
        world.publish('t', str(n), 'k')
    relay = world.relay('--c.sink=command', '--c.topics=*', '--c.command=true').started()
    until('it is refused', lambda: 'too long for the environment' in (world.outbox(bad)[3] or ''))
    until('the others are delivered', lambda: world.states().get('acked') == 5)
    equal('the sink was never down', 'is paused' in relay.said(), False)
    equal('the status', relay.stop(), 0)


def obstinate(world):
    """Commands that do not read, do not end, and write more than they should."""
    world.publish('t', '"%s"' % ('x' * 1000000), 'unread')
    world.publish('t', '"late"', 'late')
    world.publish('t', '"loud"', 'loud')
    relay = world.relay('--c.sink=command', '--c.topics=*', '--c.timeout=1s', '--c.command=case $IDEM_MESSAGE_KEY in '
                        'late) trap "" TERM HUP INT; while :; do sleep 1; done;; '
                        'loud) head -c 60000 /dev/zero | tr "\\0" "x" >&2; printf "\\nlast \\377 words\\n" >&2; exit 3;; '
                        'esac').started()
    until('all are answered', lambda: world.query(
        "SELECT message_key, state, substr(split_part(last_error, chr(10), 1), 22) FROM idem_outbox ORDER BY id") == [
            ('unread', 'acked', None), ('late', 'pending', 'the command took longer than "timeout"'),
            ('loud', 'pending', 'the command ended with status 3: last ? words')])
    equal('the status', relay.stop(), 0)


def lease_lost(world):
    """If another relay takes a message that is in flight, and one that waits behind
    it, both relays deliver the first, and only the other one the second."""
    seen = os.path.join(world.directory, 'seen')
    for n in range(2):
        world.publish('t', str(n), 'k')
    relay = world.relay('--c.sink=command', '--c.topics=*', '--lease=3s', '--wait=1s',
                        '--c.command=cat >>%s; echo >>%s; sleep 4' % (seen, seen)).started()
    until('it flies', lambda: os.path.exists(seen))
    # The same effect as a jump of the server's clock.  In one transaction, because the relay might take them itself.
    taken = world.query("UPDATE idem_outbox SET available_at = now() - interval '1 second'; "
                        "SELECT * FROM idem_outbox_take(10, '1 minute')")
    equal('taken by another', len(taken), 2)
    until('the relay reports it', lambda: relay.said().count('is lost: another relay has it') == 2)
    until('what was delivered is acknowledged', lambda: world.states() == {'acked': 1, 'pending': 1})
    time.sleep(1)
    with open(seen) as file:
        equal('deliveries', file.read().split(), ['0'])
    equal('the other one', world.query("SELECT attempt, awaiting_ack FROM idem_outbox WHERE state = 'pending'"), [(2, True)])
    equal('the status', relay.stop(), 0)
    os.unlink(seen)


TESTS = [
    ('headers that do not fit into an environment are refused', environment_full),
    ('commands that do not read, do not end, write too much', obstinate),
    ('a lease is lost while a delivery is on its way', lease_lost),
    ('a command gets the message', run_for_each),
    ('a command does not get the password of the database', without_password),
    ('a command inherits no descriptor of the relay', inherits_nothing),
    ('a command ends even if the relay inherits that SIGCHLD is ignored', inherits_ignored_signal),
    ('a bad payload ends as a dead letter, alone', dies_alone),
    ('a sink that is down costs no attempt', deferred),
    ('while a sink is down, others go on', others_go_on),
    ('a command that takes too long is killed', late),
    ('leases are extended while a delivery is slow', extended),
    ('a payload that is too large is refused', large),
]
