# No message, key, endpoint, sink or topic delays or kills anything that does
# not depend on it.

import contextlib
import os
import random
import re
import resource
import signal
import socket
import subprocess
import threading
import time
import urllib.request

import psycopg2

import amqp
import kafka
from endpoint import Endpoint
from processes import server_socket
from proxies import Slow
from rabbit import Proxy
from world import PROGRAM, Broken, equal, expect, free_port, until

# How long the mixed test publishes, and what is its bound for good messages.
MIXED = float(os.environ.get('MIXED', '600'))
# Seconds in which a good message arrives; see relay/README.md.
BOUND = 60
# How many messages the test of slow endpoints publishes for each.
P99 = int(os.environ.get('P99', '500'))
SEED = int(os.environ.get('SEED', '1'))

COUNTED = 'SELECT max(attempt - uncounted_attempts) FROM idem_outbox WHERE %s'


def attempts(world, number):
    """The server allows this number of attempts."""
    return world.setting('outbox_max_attempts', number)


@contextlib.contextmanager
def silent_port():
    """A port that accepts connections and never answers."""
    with contextlib.closing(socket.create_server(('127.0.0.1', 0), backlog=100)) as listener:
        yield listener.getsockname()[1]


def webhook(world, endpoint, *more):
    return world.relay('--w.sink=webhook', '--w.topics=t', '--w.url=' + endpoint.url, *more).started()


def broker_closes(world):
    """Messages that make the broker close the channel fail alone."""
    broker = amqp.start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    channel.queue_purge('orders')
    broker.control('eval', 'application:set_env(rabbit, max_message_size, 100000).')
    try:
        with attempts(world, 3):
            for n in range(300):
                world.publish('orders', '"%s"' % ('x' * 200000) if n % 100 == 50 else str(n), 'k%d' % n)
            running = amqp.relay(world)
            until('the others are delivered', lambda: world.states().get('acked') == 297, 40)
            until('the bad ones are dead', lambda: world.states() == {'acked': 297, 'dead': 3}, 60)
            equal('counted attempts of the others', world.query(COUNTED % "state = 'acked'"), [(1,)])
            equal('counted attempts of the bad ones', world.query(COUNTED % "state = 'dead'"), [(3,)])
            equal('reasons', world.query("SELECT count(*) FROM idem_outbox WHERE state = 'dead' "
                                         "AND last_error LIKE '%%larger than%%'"), [(3,)])
            equal('messages', {int(body) for _, body in amqp.drain_all(channel, 'orders')},
                  {n for n in range(300) if n % 100 != 50})
            equal('the status', running.stop(), 0)
    finally:
        broker.control('eval', 'application:set_env(rabbit, max_message_size, 134217728).')
        channel.queue_purge('orders')
        connection.close()


def closers_delay_nothing(world):
    """Messages that make the broker close the channel, old ones that are tried
    again and new ones all the time, delay no good message."""
    broker = amqp.start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    channel.queue_purge('orders')
    broker.control('eval', 'application:set_env(rabbit, max_message_size, 100000).')
    bad, good = 0, set()

    def publish_bad(count):
        for n in range(count):
            world.publish('orders', '"%s"' % ('x' * 200000), 'bad%d' % (bad + n))
        return bad + count

    try:
        # Nothing good beside them, so the sink looks broken.
        relay = amqp.relay(world)
        bad = publish_bad(8)
        time.sleep(4)
        for n in range(45):
            if n % 3 == 0:
                bad = publish_bad(1)
            good.add(world.publish('orders', str(n), 'k%d' % n))
            time.sleep(0.1)
        until('the good ones are delivered', lambda: world.states().get('acked') == len(good), 5)
        took = world.query("SELECT max(acked_at - created_at) FROM idem_outbox WHERE state = 'acked'")[0][0]
        expect('a good one waited for %s' % took, took.total_seconds() < 2)
        equal('counted attempts of the good ones', world.query(COUNTED % "state = 'acked'"), [(1,)])
        tried = world.query("SELECT min(attempt - uncounted_attempts) FROM idem_outbox WHERE state <> 'acked'")[0][0]
        expect('the bad ones are not tried', tried >= 1)
        equal('pauses', relay.said().count('sink "r" is paused'), 0)
        equal('messages', {properties.message_id for properties, _ in amqp.drain_all(channel, 'orders')}, good)
        equal('the status', relay.stop(), 0)
    finally:
        broker.control('eval', 'application:set_env(rabbit, max_message_size, 134217728).')
        channel.queue_purge('orders')
        connection.close()
    print('# %d good messages beside %d bad ones; one waited %.2f s' % (len(good), bad, took.total_seconds()), flush=True)


@contextlib.contextmanager
def stuck_queue(world):
    """Beside the queue "orders", the queue "stuck" confirms nothing.  The broker closes
    the channel for a message of more than 100,000 bytes."""
    broker = amqp.start(world)
    connection, channel = broker.channel()
    for name in 'orders', 'stuck':
        channel.queue_declare(name, durable=True)
        channel.queue_purge(name)
    size = 'application:set_env(rabbit, max_message_size, %d), '
    process = '{ok, Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"stuck">>)), sys:%s(amqqueue:get_pid(Q)).'
    broker.control('eval', (size + process) % (100000, 'suspend'))
    try:
        yield
    finally:
        broker.control('eval', (size + process) % (134217728, 'resume'))
        channel.queue_delete('stuck')
        channel.queue_purge('orders')
        connection.close()


def stuck_beside_closers(world):
    """A queue that confirms nothing, beside messages for which the broker closes
    the channel, delays no other queue."""
    with stuck_queue(world):
        relay = amqp.relay(world, '--stop_timeout=0s', '--r.timeout=60s')
        for n in range(20):
            if n % 10 == 0:
                world.publish('stuck', '"stuck"', 'stuck%d' % n)
                world.publish('orders', '"%s"' % ('x' * 200000), 'bad%d' % n)
            world.publish('orders', str(n), 'k%d' % n)
            time.sleep(0.1)
        until('the others are delivered', lambda: world.states().get('acked') == 20, 40)
        took = world.query("SELECT max(acked_at - created_at) FROM idem_outbox WHERE state = 'acked'")[0][0]
        print('# the longest wait: %.2f s' % took.total_seconds(), flush=True)
        until('the bad ones are tried', lambda: world.query("SELECT min(attempt - uncounted_attempts) FROM idem_outbox "
                                                            "WHERE topic = 'orders' AND state <> 'acked'")[0][0] >= 1, 60)
        equal('the status', relay.stop(), 0)


def overdue(world):
    """A message that a queue does not confirm, while later ones are confirmed, is no
    suspect when the broker closes the channel for another message."""
    with stuck_queue(world):
        relay = amqp.relay(world, '--stop_timeout=0s', '--r.timeout=60s')
        world.publish('stuck')
        until('it is taken', lambda: world.leased() == 1)
        began = time.monotonic()
        # It is late after 0.2 s and ten times the mean.
        late = count = 0
        while count < 20 or time.monotonic() - began < late:
            world.publish('orders', str(count))
            count += 1
            time.sleep(0.1)
            late = world.query("SELECT coalesce(1 + 10 * extract(epoch FROM avg(acked_at - created_at)), 0)::float FROM idem_outbox "
                               "WHERE state = 'acked'")[0][0]
        until('the others are delivered', lambda: world.states().get('acked') == count)
        bad = world.publish('orders', '"%s"' % ('x' * 200000))
        until('the cause has failed', lambda: world.query(
            'SELECT attempt - uncounted_attempts FROM idem_outbox WHERE message_id = %s AND last_error IS NOT NULL', bad))
        expect('the cause is searched', 'has lost its connection' not in relay.said())
        equal('the status', relay.stop(), 0)


def poison(world):
    """The same if the connection just ends, so that it can be the broker."""
    broker = amqp.start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    channel.queue_purge('orders')
    with contextlib.closing(Proxy(broker.port)) as proxy:
        relay = world.relay('--r.sink=amqp', '--r.topics=*', '--r.url=amqp://127.0.0.1:%d' % proxy.port).started()
        for n in range(5):
            world.publish('orders', '"poison"', 'bad%d' % n)
        time.sleep(4)
        for n in range(40):
            if n % 10 == 0:
                world.publish('orders', '"poison"', 'new%d' % n)
            world.publish('orders', str(n), 'k%d' % n)
            time.sleep(0.1)
        until('the good ones are delivered', lambda: world.states().get('acked') == 40, 5)
        took = world.query("SELECT max(acked_at - created_at) FROM idem_outbox WHERE state = 'acked'")[0][0]
        expect('a good one waited for %s' % took, took.total_seconds() < 3)
        pauses = [float(pause) for pause in re.findall(r'next try in ([0-9.]+) s', relay.said())]
        expect('pauses: %s' % pauses, max(pauses, default=0) <= 1)
        equal('counted attempts of the good ones', world.query(COUNTED % "state = 'acked'"), [(1,)])
        equal('the status', relay.stop(), 0)
    channel.queue_purge('orders')
    connection.close()


def slow_poison(world):
    """The same if the connection ends only after a while."""
    broker = amqp.start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    channel.queue_purge('orders')
    with contextlib.closing(Proxy(broker.port, 0.5)) as proxy:
        relay = world.relay('--r.sink=amqp', '--r.topics=*', '--r.url=amqp://127.0.0.1:%d' % proxy.port).started()
        world.publish('orders', '"poison"')
        for n in range(40):
            world.publish('orders', str(n))
            time.sleep(0.1)
        until('the good ones are delivered', lambda: world.states().get('acked') == 40, 40)
        equal('counted attempts of the good ones', world.query(COUNTED % "state = 'acked'"), [(1,)])
        equal('the status', relay.stop(), 0)
    channel.queue_purge('orders')
    connection.close()


def deferred_alone(world):
    """An endpoint that always wants to get one message later."""
    endpoint = Endpoint(lambda request, number: (503, {}, b'later') if b'bad' in request.body else (204, {}, b''))
    with attempts(world, 1):
        bad = world.publish('t', '"bad"', 'bad')
        world.publish('t', '1', 'bad')
        for n in range(120):
            world.publish('t', str(n), 'k%d' % n)
        relay = webhook(world, endpoint)
        until('the others are delivered', lambda: world.states().get('acked') == 120, 5)
        until('its reason', lambda: world.outbox(bad)[3] == 'status 503: later')
        expect('the sink is paused', 'is paused' not in relay.said())
        equal('its attempts', world.query(COUNTED % "payload = '\"bad\"'"), [(0,)])
        until('it is dead at last', lambda: world.states() == {'acked': 121, 'dead': 1}, 60)
        equal('the status', relay.stop(), 0)
    endpoint.close()


def later_alone(world):
    """Retry-After of one message is its own pause."""
    endpoint = Endpoint(lambda request, number: (503, {'Retry-After': '3600'}, b'') if b'bad' in request.body else
                        (429, {'Retry-After': '1'}, b'') if number % 10 == 0 else (204, {}, b''))
    bad = world.publish('t', '"bad"', 'bad')
    relay = webhook(world, endpoint)
    for n in range(50):
        world.publish('t', str(n), 'k%d' % n)
    until('the others are delivered', lambda: world.states() == {'acked': 50, 'pending': 1}, 10)
    pause = world.query('SELECT available_at > now() + interval \'50 minutes\' FROM idem_outbox WHERE message_id = %s', bad)
    equal('its pause', pause, [(True,)])
    equal('429 costs no attempt', world.query(COUNTED % "state = 'acked'"), [(1,)])
    equal('the status', relay.stop(), 0)
    endpoint.close()


def command_defers(world):
    bad = world.publish('t', '"bad"', 'bad')
    for n in range(40):
        world.publish('t', str(n), 'k%d' % n)
    relay = world.relay('--c.sink=command', '--c.topics=t',
                        '--c.command=if grep -q bad; then echo busy >&2; exit 75; fi').started()
    until('the others are delivered', lambda: world.states().get('acked') == 40, 8)
    until('its reason', lambda: world.outbox(bad)[3] == 'the command ended with status 75: busy')
    equal('the status', relay.stop(), 0)


def late_commands(world):
    """Commands that run into their timeout, at each attempt, leave half of the
    places to the others."""
    for n in range(8):
        world.publish('t', '"late"', 'late%d' % n)
    relay = world.relay('--c.sink=command', '--c.topics=t', '--c.command=if grep -q late; then sleep 20; fi',
                        '--c.timeout=2s', '--c.retry=' + ', '.join(['100ms'] * 9)).started()
    until('each has failed', lambda: world.query('SELECT bool_and(last_error IS NOT NULL) FROM idem_outbox')[0][0])
    for n in range(40):
        world.publish('t', str(n), 'k%d' % n)
        time.sleep(0.1)
    until('the others are delivered', lambda: world.states().get('acked') == 40, 10)
    took = world.query('SELECT extract(epoch FROM percentile_disc(0.8) WITHIN GROUP (ORDER BY acked_at - created_at))::float '
                       "FROM idem_outbox WHERE state = 'acked'")[0][0]
    print('# 8 of 10 waited for at most %.2f s' % took, flush=True)
    expect('they waited for %.2f s' % took, took < 2)
    until('the late ones are tried again', lambda: world.query("SELECT min(attempt) FROM idem_outbox WHERE state <> 'acked'")[0][0] >= 2)
    equal('the status', relay.stop(), 0)


def behind_retries(world):
    """The messages behind retries that run into their timeout do not fill the relay."""
    for n in range(120):
        world.publish('t', '"late"', 'late%d' % (n % 2))
    relay = commands(world, '--max_messages=40')
    until('each key has failed', lambda: world.query('SELECT count(*) FROM idem_outbox WHERE last_error IS NOT NULL')[0][0] >= 2)
    for n in range(40):
        world.publish('t', str(n), 'k%d' % n)
        time.sleep(0.1)
    until('the others are delivered', lambda: world.states().get('acked') == 40, 10)
    took = world.query('SELECT extract(epoch FROM percentile_disc(0.8) WITHIN GROUP (ORDER BY acked_at - created_at))::float '
                       "FROM idem_outbox WHERE state = 'acked'")[0][0]
    print('# 8 of 10 waited for at most %.2f s' % took, flush=True)
    expect('they waited for %.2f s' % took, took < 2)
    equal('the status', relay.stop(), 0)


def released_behind(world):
    """Takes are not full of messages behind retries, which the relay gives back."""
    endpoint = Endpoint(lambda request, number: (400, {}, b'no'))
    with attempts(world, 100):
        for n in range(5):
            world.publish('t', '"bad"', 'k%d' % n)
        relay = webhook(world, endpoint, '--w.retry=' + ', '.join(['100ms'] * 98))
        until('each has failed', lambda: world.query('SELECT bool_and(last_error IS NOT NULL) FROM idem_outbox')[0][0])
        world.query("SELECT count(idem_publish('t', '\"behind\"', 'k' || n % 5)) FROM generate_series(1, 1000) AS n")
        until('they are tried again', lambda: world.query("SELECT min(attempt) FROM idem_outbox WHERE payload = '\"bad\"'")[0][0] >= 20)
        equal('the status', relay.stop(), 0)
    counts = world.query('SELECT sum(uncounted_attempts), sum(attempt - uncounted_attempts) FROM idem_outbox')[0]
    print('# %d messages were given back at %d attempts' % counts, flush=True)
    expect('too many', counts[0] < 20 * counts[1])
    endpoint.close()


def behind_lost(world):
    """A message is not taken and given back all the time while the relay, which has
    lost its lease, still tries it."""
    goes_on = threading.Event()
    endpoint = Endpoint(lambda request, number: (500, {}, b'bug') if number == 1 else goes_on.wait(60) and (204, {}, b''))
    message = world.publish('t', '1', 'k')
    relay = webhook(world, endpoint, '--w.timeout=60s', '--lease=2s', '--wait=600ms')
    until('it is tried again', lambda: len(endpoint.requests) == 2)
    relay.signal(signal.SIGSTOP)
    until('another relay takes it', lambda: world.query("SELECT id FROM idem_outbox_take(10, '1 minute')"))
    relay.signal(signal.SIGCONT)
    until('it is lost', lambda: 'is lost: another relay has it' in relay.said())
    taken = world.outbox(message)[1]
    world.query('SELECT idem_outbox_release(array_agg(id)) FROM idem_outbox')
    time.sleep(2)
    expect('it is taken again and again', world.outbox(message)[1] <= taken + 1)
    goes_on.set()
    world.all_acked(1)
    equal('the status', relay.stop(), 0)
    # The message that waited behind its own lost copy is not sent, too.
    equal('requests', len(endpoint.requests), 2)
    endpoint.close()


def refused_beside_steady(world):
    """A sink whose messages are acknowledged all the time does not delay the answers
    about messages that another one refuses."""
    directory = os.path.join(world.directory, 'far')
    os.mkdir(directory)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(directory, '.s.PGSQL.5432'))
        listener.listen()
        Slow(listener, server_socket, 0.2)
        good = Endpoint(lambda request, number: time.sleep(0.1) or (204, {}, b''))
        bad = Endpoint(lambda request, number: (404, {}, b'no'))
        world.query("SELECT count(idem_publish('t', to_jsonb(n))) FROM generate_series(1, 5000) AS n")
        relay = webhook(world, good, '--w.in_flight=20', '--b.sink=webhook', '--b.topics=b', '--b.url=' + bad.url,
                        '--database=host=%s port=5432' % directory, '--stop_timeout=1s')
        until('some are acknowledged', lambda: world.states().get('acked', 0) > 100)
        message = world.publish('b')
        until('another one is refused', lambda: world.outbox(message)[3] == 'status 404: no', 8)
        expect('all are acknowledged', world.states()['acked'] < 5000)
        relay.kill()
    good.close()
    bad.close()


def refused_answer(world):
    """An answer that the server refuses, for longer than the lease of its message, does
    not stop the takes of other topics."""
    endpoint = Endpoint(lambda request, number: (400, {}, b'no'))
    with world.database('other', 'UTF8') as other:
        other.query('ALTER FUNCTION idem_outbox_fail(bigint, int, text, interval, boolean, interval[], interval) RENAME TO nothing')
        bad = other.publish('t')
        relay = webhook(world, endpoint, '--database=dbname=other', '--out.sink=stdout', '--out.topics=f', '--lease=1s', '--wait=300ms')
        until('the answer is refused', lambda: 'idem_outbox_fail' in relay.said())
        until('the lease is over', lambda: other.query('SELECT 1 FROM idem_outbox WHERE available_at < now()'))
        for n in range(3):
            good = other.publish('f')
            until('another one is delivered', lambda m=good: other.outbox(m)[0] == 'acked', 40)
        equal('the bad one', other.outbox(bad)[0], 'pending')
        relay.kill()
        other.connection.close()
    endpoint.close()


def commands(world, *more):
    """A relay with four places for commands, which run late for one body."""
    return world.relay('--c.sink=command', '--c.topics=t', '--c.command=if grep -q late; then sleep 20; fi',
                       '--c.timeout=2s', '--c.retry=' + ', '.join(['100ms'] * 9), '--stop_timeout=0s', *more).started()


def take(world):
    """Another relay takes all messages.  A text fails, with itself as the error;
    the relay releases all others."""
    world.query("SELECT CASE WHEN jsonb_typeof(payload) = 'string' THEN idem_outbox_fail(id, attempt, payload #>> '{}', '0s') "
                'ELSE idem_outbox_release(ARRAY[id])::text END FROM idem_outbox_take(1000)')


def failed_elsewhere(world):
    """A relay knows at once which messages have failed at another one, and which
    were only released."""
    for n in range(12):
        world.publish('t', '"late"', 'late%d' % n)
    for n in range(40):
        world.publish('t', str(n), 'k%d' % n)
    take(world)
    relay = commands(world)
    until('the others are delivered', lambda: world.states().get('acked') == 40, 5)
    equal('the status', relay.stop(), 0)


def any_encoding(world):
    """An error text that cannot be converted to UTF-8 stops nothing."""
    with world.database('latin', 'WIN1252') as latin:
        latin.publish('t', '1')
        latin.query("SELECT idem_outbox_nack(id, convert_from('\\x81', 'WIN1252'), '0s') FROM idem_outbox_take(1)")
        latin.publish('t', '2')
        relay = world.relay('--database=dbname=latin', '--out.sink=stdout', '--out.topics=*').started()
        latin.all_acked(2)
        equal('the status', relay.stop(), 0)


def many_retries(world):
    """Retries that need more than their places do not fill the sink.  One with
    fewer failures, and one that has waited for longer, get their turns, and the
    others another pause, which costs no attempt and adds no error."""
    world.query("SELECT count(idem_publish('t', to_jsonb('late'::text), 'late' || n)) FROM generate_series(1, 60) AS n")
    take(world)
    once = world.publish('t', '"once"', 'once')
    waited = world.publish('t', '"waited"', 'waited')
    take(world)
    world.query("UPDATE idem_outbox SET last_error = repeat(to_char(now() AT TIME ZONE 'UTC' - interval '1 hour', "
                "'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"') || E' failed\n', 5) WHERE message_id = %s", waited)
    relay = commands(world, '--c.max_age=100ms', '--out.sink=stdout', '--out.topics=f', '--max_messages=40', '--verbose=on')
    for n in range(30):
        world.publish('t', str(n), 'k%d' % n)
        time.sleep(0.1)
    for message in once, waited:
        until('it is delivered', lambda m=message: world.outbox(m)[0] == 'acked', 2)
    until('the others are delivered', lambda: world.states().get('acked') == 32, 5)
    took = world.query("SELECT extract(epoch FROM max(acked_at - created_at))::float FROM idem_outbox WHERE jsonb_typeof(payload) = 'number'")
    print('# the longest wait: %.1f s' % took[0][0], flush=True)
    expect('one waited for %.1f s' % took[0][0], took[0][0] < 4)
    equal('the status', relay.stop(), 0)
    expect('none is postponed', ' is postponed for ' in relay.said())
    # Messages that were tried are too old.
    equal('other errors', world.query("SELECT state, count(*) FROM idem_outbox WHERE (state = 'dead') <> (last_error ~ 'took longer') "
                                      "AND payload = '\"late\"' GROUP BY 1"), [])
    equal('errors and counted attempts of the others', world.query(
        "SELECT DISTINCT regexp_replace(last_error, '[0-9TZ:-]{20}', '', 'g'), attempt - uncounted_attempts FROM idem_outbox "
        "WHERE state = 'pending'"), [(' late\n late', 2)])
    expect('postponed too often', world.query("SELECT max(attempt) FROM idem_outbox WHERE state = 'pending'")[0][0] <= 7)


def large_retries(world):
    """Large retries do not fill the memory of the sink either."""
    world.query("SELECT count(idem_publish('t', to_jsonb('late' || repeat('x', 1000000)), 'late' || n)) FROM generate_series(1, 20) AS n")
    # A take returns only some megabytes.
    while world.query('SELECT count(*) FROM idem_outbox WHERE last_error IS NULL') != [(0,)]:
        take(world)
    relay = commands(world, '--out.sink=stdout', '--out.topics=f', '--max_memory=8MB')
    for n in range(30):
        world.publish('t', str(n), 'k%d' % n)
        time.sleep(0.1)
    until('the others are delivered', lambda: world.states().get('acked') == 30, 5)
    took = world.query("SELECT extract(epoch FROM max(acked_at - created_at))::float FROM idem_outbox WHERE jsonb_typeof(payload) = 'number'")
    print('# the longest wait: %.1f s' % took[0][0], flush=True)
    expect('one waited for %.1f s' % took[0][0], took[0][0] < 4)
    until('the large ones are tried, too', lambda: world.query(
        "SELECT 1 FROM idem_outbox WHERE state = 'pending' AND last_error ~ 'took longer'"))
    equal('the status', relay.stop(), 0)


def retry_beside_new(world):
    """While new bad messages arrive all the time, and nothing else is delivered,
    a good one that has failed gets its turn."""
    endpoint = Endpoint(lambda request, number: (204, {}, b'') if number > 4 and b'good' in request.body else (500, {}, b''))
    for body in 'good', 'bad', 'bad', 'bad':
        world.publish('t', '"%s"' % body)
    relay = webhook(world, endpoint)
    until('it is paused', lambda: 'is paused' in relay.said())
    for n in range(100):
        world.query("SELECT idem_publish('t', '\"bad\"') FROM generate_series(1, 10)")
        time.sleep(0.1)
        if world.states().get('acked'):
            break
    expect('it is not delivered', world.states().get('acked') == 1)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def left_often(world):
    """Relays that are killed again and again cost only the message that a relay
    holds an attempt."""
    for n in range(12):
        world.publish('t', '"late"', 'k%d' % n)
    for _ in range(3):
        until('all are taken', lambda: world.query("SELECT count(*) FROM idem_outbox_take(1000, '1 ms')") == [(12,)])
        time.sleep(0.01)
    relay = commands(world, '--c.timeout=30s', '--lease=6s', '--wait=1s')
    until('it gives the others back', lambda: world.query(
        'SELECT count(*) FILTER (WHERE uncounted_attempts > 0), count(*) FILTER (WHERE awaiting_ack) FROM idem_outbox') == [(11, 1)])
    relay.kill()
    world.query('SELECT idem_outbox_release(array_agg(id)) FROM idem_outbox WHERE awaiting_ack')
    relay = commands(world, '--c.command=true')
    world.all_acked(12, 40)
    equal('the status', relay.stop(), 0)


def left_in_order(world):
    """A message that goes back because relays have left it precedes those of its
    key that were published later."""
    world.publish('t', '"late"', 'a')
    first = world.publish('t', '1', 'b')
    for _ in range(3):
        until('they are taken', lambda: world.query("SELECT count(*) FROM idem_outbox_take(10, '1 ms')") == [(2,)])
        time.sleep(0.01)
    second = world.publish('t', '2', 'b')
    relay = commands(world, '--lease=2s', '--wait=600ms')
    until('they are delivered', lambda: world.states().get('acked') == 2)
    equal('the order', world.query('SELECT message_id::text FROM idem_outbox WHERE acked_at IS NOT NULL ORDER BY acked_at'),
          [(first,), (second,)])
    equal('the status', relay.stop(), 0)


def probed_with_another(world):
    """Three bad messages pause the sink; a good one gets it going."""
    endpoint = Endpoint(lambda request, number: (500, {}, b'') if b'bad' in request.body else (204, {}, b''))
    for n in range(3):
        world.publish('t', '"bad"', 'bad%d' % n)
    relay = webhook(world, endpoint, '--w.in_flight=1')
    until('it is paused', lambda: 'sink "w" is paused' in relay.said())
    for n in range(20):
        world.publish('t', str(n), 'k%d' % n)
    until('the others are delivered', lambda: world.states().get('acked') == 20, 10)
    # The bad ones are known by now, and pause nothing.
    pauses = relay.said().count('is paused')
    requests = len(endpoint.requests)
    until('the bad ones are tried again', lambda: len(endpoint.requests) >= requests + 6)
    expect(relay.said(), relay.said().count('is paused') <= pauses + 1)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def probed_beside_slow(world):
    """Requests that are still waiting for their answers delay no probe of a
    paused sink."""
    def answer(request, number):
        if b'slow' in request.body:
            time.sleep(30)
        return (500, {}, b'') if b'bad' in request.body else (204, {}, b'')

    endpoint = Endpoint(answer)
    for n in range(4):
        world.publish('t', '"slow"', 'slow%d' % n)
    relay = webhook(world, endpoint, '--w.timeout=25s', '--stop_timeout=0s')
    until('they are in flight', lambda: len(endpoint.requests) == 4)
    for n in range(3):
        world.publish('t', '"bad"', 'bad%d' % n)
    until('it is paused', lambda: 'sink "w" is paused' in relay.said())
    for n in range(20):
        world.publish('t', str(n), 'k%d' % n)
    until('the others are delivered', lambda: world.states().get('acked') == 20, 10)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def mostly_bad(world):
    """Good messages pass among more bad ones, which are no outage.  A real one
    after that costs the good ones no attempt, and delays them little longer."""
    end = 0
    endpoint = Endpoint(lambda request, number: (500, {}, b'') if b'bad' in request.body or time.monotonic() < end else
                        (204, {}, b''))
    chance = random.Random(SEED)
    for n in range(500):
        world.publish('t', '"bad"' if chance.random() < 0.6 else '1', 'k%d' % n)
    good = world.query("SELECT count(*) FROM idem_outbox WHERE payload = '1'")[0][0]
    began = time.monotonic()
    relay = webhook(world, endpoint)
    until('the good ones are delivered', lambda: world.states().get('acked') == good, 60)
    took = time.monotonic() - began
    pauses = relay.said().count('is paused')
    print('# %d of 500 are good; %d pauses, %.1f s' % (good, pauses, took), flush=True)
    expect('%d pauses' % pauses, pauses <= 20)
    end = time.monotonic() + 3
    for n in range(60):
        world.publish('t', '1', 'good%d' % n)
    until('it is paused', lambda: relay.said().count('is paused') > pauses)
    until('they are delivered, too', lambda: world.states().get('acked') == good + 60, 60)
    print('# the next good ones waited for %.1f s after an outage' % (time.monotonic() - end), flush=True)
    equal('counted attempts', world.query(COUNTED % "state = 'acked'"), [(1,)])
    equal('the status', relay.stop(), 0)
    endpoint.close()


def known_to_be_bad(world):
    """After an outage, messages that are known to be bad do not pause the sink
    again, even if no others are ready."""
    def answer(request, number):
        if b'later' in request.body:
            return 503, {'Retry-After': '3600'}, b''
        return (500, {}, b'') if b'bad' in request.body else (204, {}, b'')

    endpoint = Endpoint(answer)
    for n in range(3):
        world.publish('t', '"bad"', 'bad%d' % n)
    with attempts(world, 101):
        relay = webhook(world, endpoint, '--w.retry=' + ', '.join(['100ms'] * 100))
        good = 0
        while good < 20 or world.query("SELECT min(attempt) FROM idem_outbox WHERE state <> 'acked'")[0][0] < 4:
            world.publish('t')
            good += 1
            time.sleep(0.05)
        until('the good ones are delivered', lambda: world.states().get('acked') == good)
        pauses = relay.said().count('is paused')
        for n in range(3):
            world.publish('t', '"later"')
        until('it is paused', lambda: relay.said().count('is paused') > pauses)
        requests = len(endpoint.requests)
        until('the bad ones are tried again', lambda: len(endpoint.requests) >= requests + 6)
        equal('pauses', relay.said().count('is paused'), pauses + 1)
        equal('the status', relay.stop(), 0)
    endpoint.close()


def same_remainder(world):
    """Bad messages with similar ids: each is known to be bad, and its failures
    after the first one count."""
    endpoint = Endpoint(lambda request, number: (500, {}, b'') if b'bad' in request.body else (204, {}, b''))
    for n in range(4):
        world.query("SELECT setval('idem_outbox_ids', nextval('idem_outbox_ids') / 1024 * 1024 + 1024)")
        world.publish('t', '"bad"', 'bad%d' % n)
    relay = webhook(world, endpoint)
    for n in range(60):
        world.publish('t', str(n))
        time.sleep(0.05)
    until('they are tried again', lambda: world.query("SELECT min(attempt) FROM idem_outbox WHERE state <> 'acked'")[0][0] >= 4)
    equal('the status', relay.stop(), 0)
    # A pause of the sink can add some.
    equal('failures that did not count', world.query(
        "SELECT id % 1024, count(*), max(uncounted_attempts) <= 3 FROM idem_outbox WHERE state <> 'acked' GROUP BY 1"), [(1, 4, True)])
    endpoint.close()


def proxy_fails(world):
    """A proxy that fails for all costs no attempt and keeps the order."""
    end = time.monotonic() + 8
    endpoint = Endpoint(lambda request, number: (502, {}, b'no backend') if time.monotonic() < end else (204, {}, b''))
    with attempts(world, 2):
        for n in range(60):
            world.publish('t', str(n), 'k%d' % (n % 6), '{"key": "k%d"}' % (n % 6))
        relay = webhook(world, endpoint)
        until('it is paused', lambda: 'sink "w" is paused: status 502: no backend' in relay.said())
        world.all_acked(60, 60)
        equal('counted attempts', world.query(COUNTED % 'true'), [(1,)])
        last = {}
        for request in endpoint.requests:
            key = request.headers['key']
            expect('order of ' + key, last.get(key, -1) <= int(request.body))
            last[key] = int(request.body)
        expect('tried too often', len(endpoint.requests) < 60 + 40)
        equal('the status', relay.stop(), 0)
    endpoint.close()


def relays_own_headers(world):
    """A publisher cannot replace what consumers rely on."""
    amqp.start(world)
    connection, channel = amqp.broker.channel()
    channel.queue_declare('orders', durable=True)
    kafka.start(world)
    for running, names in [
            (lambda: amqp.relay(world), ['message_id', 'message_key', 'Message_Key', 'CC', 'BCC']),
            (lambda: kafka.relay(world), ['message_id', 'message_key', 'Message_Id', 'topic', 'content-type'])]:
        world.begin()
        bad = [world.publish('orders', '1', 'k%s' % name, '{"%s": "forged"}' % name) for name in names]
        world.publish('orders', '2', 'good', '{"trace": "x"}')
        relay = running()
        until('the good one is delivered', lambda: world.states().get('acked') == 1)
        for message, name in zip(bad, names):
            until(name + ' is refused', lambda m=message: (world.outbox(m)[3] or '').endswith("is the relay's own"))
        equal('the status', relay.stop(), 0)
    equal('in the queue', len(amqp.drain(channel, 'orders', 5, 1)), 1)
    connection.close()


def starts_without(world):
    """An unreachable broker at the start, or after SIGHUP, pauses its sink."""
    path = os.path.join(world.directory, 'start.conf')
    port = free_port()

    def write(more):
        with open(path, 'w') as file:
            file.write('[out]\nsink = stdout\ntopics = t\n' + more)

    broker = '[%s]\nsink = amqp\ntopics = %s\nurl = amqp://127.0.0.1:%d\n'
    write(broker % ('a', 'a', port) + '[k]\nsink = kafka\ntopics = k\nbrokers = 127.0.0.1:%d\ntimeout = 1s\n' % port)
    world.publish('t')
    relay = world.relay('--config=' + path).started(5)
    world.all_acked(1, 5)
    until('they are paused', lambda: all('sink "%s" is paused' % name in relay.said() for name in 'ak'))
    write(broker % ('b', 'b', port))
    relay.signal(signal.SIGHUP)
    until('it is paused', lambda: 'sink "b" is paused' in relay.said())
    world.publish('t')
    world.all_acked(2, 5)
    equal('the status', relay.stop(), 0)
    done = subprocess.run([PROGRAM, '--config=' + path, '--check'], capture_output=True, text=True, timeout=30)
    equal('the status of --check', done.returncode, 69)


def no_descriptor_left(world):
    """A relay that can open nothing more pauses the sinks that need it, delivers to
    the others, and serves its metrics."""
    port = free_port()
    relay = world.relay('--out.sink=stdout', '--out.topics=t', '--metrics=127.0.0.1:%d' % port,
                        '--a.sink=amqp', '--a.topics=a', '--a.url=amqp://127.0.0.1:%d' % free_port()).started()
    pid = relay.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    equal('the soft limit', soft, min(hard, 65536))
    world.publish('t')
    world.all_acked(1)

    def limit():
        used = {int(name) for name in os.listdir('/proc/%d/fd' % pid)}
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), hard))

    # Again, because the sink can have been connecting.
    until('it opens nothing', lambda: 'could not start a thread to connect: Too many open files' in relay.said() or limit())
    for _ in range(3):
        with urllib.request.urlopen('http://127.0.0.1:%d/metrics' % port, timeout=20) as answer:
            expect('the metrics', b'idem_relay_database_up' in answer.read())
    world.publish('t')
    world.all_acked(2)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    equal('the status', relay.stop(), 0)


def reload_while_connecting(world):
    """After SIGHUP while a sink connects, no socket of the old program is left."""
    endpoint = Endpoint()
    with silent_port() as port:
        relay = webhook(world, endpoint, '--a.sink=amqp', '--a.topics=a', '--a.url=amqp://127.0.0.1:%d' % port)
        for count in 1, 2, 3:
            world.publish('t')
            world.all_acked(count)
            until('the old connections end', lambda: len(endpoint.connections) == 1, 10)
            relay.signal(signal.SIGHUP)
            until('it has started again', lambda n=count: relay.said().count('started') == n + 1)
        equal('the status', relay.stop(), 0)


def p99s(world, topics, count):
    """Publish messages one by one, to each topic in turn; the 99th percentile of the time
    until they are acknowledged, for each topic."""
    times = {topic: [] for topic in topics}
    for n in range(count):
        for topic in topics:
            message = world.publish(topic, str(n))
            began = time.monotonic()
            while world.outbox(message)[0] != 'acked':
                expect('a message waits', time.monotonic() - began < 10)
                time.sleep(0.001)
            times[topic].append(time.monotonic() - began)
    return [sorted(times[topic])[count * 99 // 100 - 1] for topic in topics]


def as_fast_as_alone(world, endpoint, what, count, options, publish):
    """While a relay with these options has what publish() publishes, the messages of the
    endpoint are as fast as with another relay, which has nothing else.  Both get messages
    in turn, so that other programs of the machine delay both.  A p99 that is too long is
    measured again, because single values are worth little."""
    other = world.relay('--w.sink=webhook', '--w.topics=alone', '--w.url=' + endpoint.url).started()
    for left in 2, 1, 0:
        # A new one, because the pauses of its bad sink grow.
        relay = webhook(world, endpoint, *options)
        publish()
        beside, alone = p99s(world, ['t', 'alone'], count)
        print('# p99 beside %s: %.1f ms; alone %.1f ms' % (what, beside * 1000, alone * 1000), flush=True)
        if beside <= max(2 * alone, 0.1):
            break
        expect('messages beside %s are slower than alone' % what, left)
        equal('the status', relay.stop(), 0)
    equal('the status', other.stop(), 0)
    return relay


def silent_broker(world):
    """While a broker does not answer, connecting to it delays no other sink."""
    endpoint = Endpoint()
    with silent_port() as port:
        options = ('--a.sink=amqp', '--a.topics=a', '--a.url=amqp://127.0.0.1:%d' % port, '--a.timeout=2s', '--k.sink=kafka',
                   '--k.topics=k', '--k.brokers=127.0.0.1:%d' % port, '--k.timeout=2s')
        relay = as_fast_as_alone(world, endpoint, 'brokers that do not answer', 200, options,
                                 lambda: (world.publish('a'), world.publish('k')))
        until('it is paused', lambda: 'sink "a" is paused' in relay.said() and 'sink "k" is paused' in relay.said())
        began = time.monotonic()
        equal('the status', relay.stop(), 0)
        expect('it ended late', time.monotonic() - began < 2)
    endpoint.close()


def bad_endpoints(world):
    """While an endpoint is silent, slow, closing, failing or not there, the
    messages of another one are as fast as alone."""
    def slow(request, number):
        time.sleep(1)
        return 204, {}, b''

    good = Endpoint()
    answers = [('slow', slow), ('closing', lambda request, number: None),
               ('refusing', lambda request, number: (400, {}, b'no')), ('failing', lambda request, number: (502, {}, b'no'))]
    with contextlib.ExitStack() as stack:
        urls = {'silent': 'http://127.0.0.1:%d/' % stack.enter_context(silent_port()),
                'not there': 'http://127.0.0.1:%d/' % free_port()}
        for name, answer in answers:
            endpoint = stack.enter_context(contextlib.closing(Endpoint(answer)))
            urls[name] = endpoint.url
        for name, url in urls.items():
            options = ('--b.sink=webhook', '--b.topics=b', '--b.url=' + url, '--b.timeout=2s')
            relay = as_fast_as_alone(world, good, 'an endpoint that is ' + name, P99, options,
                                     lambda: [world.publish('b', str(n), 'k%d' % n) for n in range(P99)])
            equal('the status', relay.stop(), 0)
            world.query("DELETE FROM idem_outbox WHERE topic = 'b'")
    good.close()


def slow_success(world):
    """Endpoints that are slow and always succeed hold a share of the messages,
    so that a fast sink takes its own at once; also if it has the topic *."""
    endpoint = Endpoint(lambda request, number: time.sleep(3) or (204, {}, b''))
    world.query("SELECT count(idem_publish(t, to_jsonb(n), 'k' || n)) FROM unnest('{one,two}'::text[]) t, "
                'generate_series(1, 300) n')
    for topics, limit, busy in [('fast', '--max_messages=60', 20), ('*', '--max_messages=60', 20), ('fast', '--max_memory=64kB', 2)]:
        if busy == 2:
            # A single message is larger than the limit.
            world.query("UPDATE idem_outbox SET payload = to_jsonb(repeat('x', 100000)) WHERE topic <> 'fast'")
        relay = world.relay('--one.sink=webhook', '--one.topics=one', '--one.url=' + endpoint.url, '--two.sink=webhook',
                            '--two.topics=two', '--two.url=' + endpoint.url, '--out.sink=stdout', '--out.topics=' + topics,
                            limit, '--stop_timeout=0s').started()
        until('both are busy', lambda: len(endpoint.requests) >= busy)
        times = []
        for n in range(5):
            began = time.monotonic()
            message = world.publish('fast', str(n))
            until('with %s, %s, it is delivered' % (topics, limit), lambda m=message: world.outbox(m)[0] == 'acked', 2)
            times.append(time.monotonic() - began)
        expect('they took %s s' % times, sorted(times)[2] < 1)
        expect('both sinks hold some', world.leased() >= busy)
        equal('the status', relay.stop(), 0)
        endpoint.requests.clear()
    endpoint.close()


def locked_row(world):
    """A transaction that holds the rows of two messages delays only the answers
    about these two; the leases of others are extended."""
    def answer(request, number):
        time.sleep(3 if b'slow' in request.body else 1)
        return (400, {}, b'no') if b'refused' in request.body else (204, {}, b'')

    endpoint = Endpoint(answer)
    for body in 'held', 'refused', 'slow', 'slow', 'slow':
        world.publish('t', '"%s"' % body)
    relay = webhook(world, endpoint, '--out.sink=stdout', '--out.topics=f', '--lease=2s', '--wait=600ms')
    until('they are in flight', lambda: len(endpoint.requests) == 5)
    with contextlib.closing(psycopg2.connect('')) as other:
        other.cursor().execute("SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE payload <> '\"slow\"'")
        for n in range(20):
            message = world.publish('f', str(n))
            until('another one is acknowledged', lambda m=message: world.outbox(m)[0] == 'acked', 2)
            time.sleep(0.1)
        until('the slow ones are acknowledged', lambda: world.states() == {'acked': 23, 'pending': 2}, 5)
        expect('the log', relay.said().count('another transaction has locked its row') == 2)
    until('it is acknowledged', lambda: world.states() == {'acked': 24, 'pending': 1})
    until('it is refused', lambda: relay.said().count('status 400') >= 1 and world.query(
        "SELECT 1 FROM idem_outbox WHERE payload = '\"refused\"' AND last_error LIKE '%%status 400%%'"))
    equal('requests for the slow ones', sum(b'slow' in request.body for request in endpoint.requests), 3)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def locked_beside_many(world):
    """A locked row among many answers, on a slow connection, does not delay those to
    other messages until each of the many has been answered alone."""
    directory = os.path.join(world.directory, 'slow')
    os.mkdir(directory)

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(directory, '.s.PGSQL.' + os.environ['PGPORT']))
    listener.listen()
    with listener:
        Slow(listener, server_socket)
        takes = ("SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND pid <> pg_backend_pid() "
                 "AND query LIKE '%idem_outbox_take%'")
        until('the relay of an earlier test has ended', lambda: not world.query(takes))
        relay = world.relay('--database=host=' + directory, '--out.sink=stdout', '--out.topics=t').started()
        until('it takes', lambda: world.query(takes))
        relay.signal(signal.SIGSTOP)
        world.query("SELECT count(idem_publish('t', to_jsonb(n))) FROM generate_series(1, 200) AS n")
        until('they are taken', lambda: world.leased() == 200)
        with contextlib.closing(psycopg2.connect('')) as other:
            other.cursor().execute("SELECT FROM idem_outbox WHERE payload = '100' FOR UPDATE")
            relay.signal(signal.SIGCONT)
            until('some are acknowledged', lambda: world.states().get('acked', 0) > 5)
            began = time.monotonic()
            message = world.publish('t', '0')
            until('another one is acknowledged', lambda: world.outbox(message)[0] == 'acked')
            took = time.monotonic() - began
            print('# it took %.1f s; %d others are not acknowledged' % (took, 201 - world.states()['acked']), flush=True)
            expect('it took %.1f s' % took, took < 5)
        equal('the status', relay.stop(), 0)


def locked_and_waiting(world):
    """A message that waits for its sink, whose row is locked until its lease is over,
    does not delay those behind it."""
    def answer(request, number):
        time.sleep(3 if b'first' in request.body else 0)
        return (204, {}, b'')

    endpoint = Endpoint(answer)
    for body in 'first', 'held', 'other', 'other':
        world.publish('t', '"%s"' % body)
    relay = webhook(world, endpoint, '--w.in_flight=1', '--lease=2s', '--wait=600ms')
    until('the first one is in flight', lambda: len(endpoint.requests) == 1)
    with contextlib.closing(psycopg2.connect('')) as other:
        other.cursor().execute("SELECT FROM idem_outbox WHERE payload = '\"held\"' FOR UPDATE")
        until('the others are acknowledged', lambda: world.states() == {'acked': 3, 'pending': 1}, 10)
    world.all_acked(4)
    equal('requests', len(endpoint.requests), 4)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def one_queue_stuck(world):
    """A queue that refuses by basic.nack costs its own messages attempts."""
    amqp.start(world)
    connection, channel = amqp.broker.channel()
    channel.queue_declare('orders', durable=True)
    channel.queue_declare('full', arguments={'x-max-length': 1, 'x-overflow': 'reject-publish'})
    channel.basic_publish('', 'full', b'first')
    bad = world.publish('full', '1')
    for n in range(20):
        world.publish('orders', str(n))
    relay = amqp.relay(world)
    until('the others are delivered', lambda: world.states().get('acked') == 20)
    until('it is refused', lambda: world.outbox(bad)[3] == 'the broker has refused it')
    equal('its attempts', world.query(COUNTED % "topic = 'full'"), [(1,)])
    channel.queue_delete('full')
    channel.queue_declare('full', durable=True)
    world.all_acked(21)
    equal('the status', relay.stop(), 0)
    equal('it arrives', len(amqp.drain(channel, 'full', 1)), 1)
    channel.queue_delete('full')
    amqp.drain(channel, 'orders', 20)
    connection.close()


class Mixture:
    """Good messages beside bad ones, in three sinks, over three topics."""

    BAD = {
        'orders': [('{}', '{"CC": "x"}'), ('{}', '{"message_id": "x"}'), ('"%s"' % ('x' * 200000), None),
                   ('{}', '{"x": "%s"}' % ('y' * 100000))],
        'unbound': [('{}', None)],
        't': [('"%d"' % status, None) for status in (400, 429, 500, 502, 503)] + [('"late"', None), ('"closed"', None),
                                                                                  ('{}', '{"host": "x"}')],
        'c': [('"%d"' % status, None) for status in (1, 75, 126)] + [('"late"', None)],
    }

    def __init__(self, world):
        self.world = world
        self.random = random.Random(SEED)
        self.outage = None
        self.arrived = {}
        self.endpoint = Endpoint(self.answer)
        self.seen = os.path.join(world.directory, 'mixed')
        self.good = {}
        self.bad = set()

    def answer(self, request, number):
        if self.outage:
            return self.outage, {}, b'no backend'
        body = request.body.strip(b'"')
        if body.isdigit() and len(body) == 3:
            return int(body), {'Retry-After': '30'} if body == b'429' else {}, b'bad'
        if body == b'late':
            time.sleep(5)
        if body in (b'late', b'closed'):
            return None
        return 204, {}, b''

    def relay(self):
        return self.world.relay(
            '--r.sink=amqp', '--r.topics=orders, unbound', '--r.url=' + amqp.broker.url, '--w.sink=webhook', '--w.topics=t',
            '--w.url=' + self.endpoint.url, '--w.timeout=3s', '--c.sink=command', '--c.topics=c', '--c.timeout=3s',
            '--c.command=read -r body; case $body in *late*) sleep 20;; *[0-9]\\"*) body=${body#*\\"}; exit ${body%\\"*};; esac',
            '--lease=3s', '--wait=1s').started()

    def publish(self):
        for _ in range(5):
            topic = self.random.choice(['orders', 't', 'c'])
            key = 'k%d' % self.random.randrange(50)
            self.good[self.world.publish(topic, '{"n": %d}' % len(self.good), key)] = time.monotonic()
        if self.random.random() < 0.3:
            topic = self.random.choice(list(self.BAD))
            payload, headers = self.random.choice(self.BAD[topic])
            self.bad.add(self.world.publish(topic, payload, 'bad%d' % len(self.bad), headers))

    def waiting(self):
        return [row[0] for row in self.world.query(
            "SELECT message_id::text FROM idem_outbox WHERE state <> 'acked' AND payload ? 'n'")]


def mixed(world):
    """Good messages beside any bad ones, while relays are killed and an
    endpoint fails: none is dead, none is lost, and all arrive in time."""
    broker = amqp.start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    # It would send no heartbeats for ten minutes.
    connection.close()
    broker.control('eval', 'application:set_env(rabbit, max_message_size, 100000).')
    mixture = Mixture(world)
    chance = mixture.random
    relays = [mixture.relay(), mixture.relay()]
    end = time.monotonic() + MIXED
    kill_at = change_at = 0
    kills, outages, longest = [], [], 0
    try:
        while time.monotonic() < end:
            mixture.publish()
            time.sleep(0.05)
            now = time.monotonic()
            if now > change_at:
                mixture.outage = None if mixture.outage else chance.choice([502, 503, 429])
                change_at = now + chance.random() * (5 if mixture.outage else 20)
                if mixture.outage:
                    outages.append((time.time(), time.time() + change_at - now))
            if now > kill_at:
                kill_at = now + chance.random() * 20
                victim = chance.randrange(2)
                relays[victim].kill()
                relays[victim] = mixture.relay()
                kills.append(time.time())
            if chance.random() < 0.05:
                ages = [now - mixture.good[message] for message in mixture.waiting()]
                longest = max([longest, *ages])
                if longest >= BOUND:
                    raise Broken('a good message waits for %.0f s; topics and numbers: %s' % (longest, world.query(
                        "SELECT topic, count(*), count(*) FILTER (WHERE awaiting_ack), min(created_at)::text, max(attempt), "
                        "max(last_error) FROM idem_outbox WHERE state <> 'acked' AND payload ? 'n' GROUP BY 1")))
        mixture.outage = None
        until('the good messages are delivered', lambda: not mixture.waiting(), BOUND)
        longest = 0
        for topic, begin, end, taken, failed in world.query(
                'SELECT DISTINCT ON (topic) topic, extract(epoch FROM created_at)::float, extract(epoch FROM acked_at)::float, attempt, '
                "coalesce(cardinality(string_to_array(last_error, E'\\n')), 0) FROM idem_outbox WHERE payload ? 'n' "
                'ORDER BY topic, acked_at - created_at DESC'):
            longest = max(longest, end - begin)
            print('# the longest wait in %s: %.1f s, of which %.1f s of outages; %d kills, taken %d times, failed %d times' % (
                topic, end - begin, sum(max(0, min(end, there) - max(begin, here)) for here, there in outages),
                sum(begin < kill < end for kill in kills), taken, failed), flush=True)
        expect('a good message waited for too long', longest <= BOUND)
        equal('counted attempts of dead good messages', world.query(
            "SELECT count(*) FROM idem_outbox WHERE state = 'dead' AND payload ? 'n'"), [(0,)])
        connection, channel = broker.channel()
        arrived = {properties.message_id for properties, _ in amqp.drain_all(channel, 'orders')}
        arrived.update(request.headers['webhook-id'] for request in mixture.endpoint.requests)
        equal('lost', world.query("SELECT message_id::text FROM idem_outbox WHERE topic <> 'c' AND payload ? 'n' "
                                  "AND NOT message_id = ANY (%s::uuid[])", sorted(arrived)), [])
        connection.close()
        for relay in relays:
            equal('the status', relay.stop(), 0)
    finally:
        broker.control('eval', 'application:set_env(rabbit, max_message_size, 134217728).')
        mixture.endpoint.close()
    print('# %d good messages beside %d bad ones, %d kills, %d outages: none is dead or lost' % (
        len(mixture.good), len(mixture.bad), len(kills), len(outages)), flush=True)


TESTS = [
    ('isolation: good messages beside bad ones at random, under kill -9', mixed),
    ('isolation: messages for which the broker closes the channel fail alone', broker_closes),
    ('isolation: messages for which the broker closes the channel delay no other', closers_delay_nothing),
    ('isolation: a queue that hangs, beside such messages, delays no other', stuck_beside_closers),
    ('isolation: a message that is overdue is no suspect', overdue),
    ('isolation: messages for which a connection just ends delay no other', poison),
    ('isolation: a message for which a connection ends after a while delays no other for long', slow_poison),
    ('isolation: a message that always gets 503 waits alone', deferred_alone),
    ('isolation: Retry-After is the pause of one message', later_alone),
    ('isolation: a message for which a command ends with 75 waits alone', command_defers),
    ('isolation: commands that run into their timeout delay no other', late_commands),
    ('isolation: the messages behind retries do not fill the relay', behind_retries),
    ('isolation: a message whose lease is lost is not taken again and again', behind_lost),
    ('isolation: a steady sink does not delay the refusals of another one', refused_beside_steady),
    ('isolation: an answer that the server refuses stops no take', refused_answer),
    ('isolation: takes are not full of messages behind retries', released_behind),
    ('isolation: a relay knows the messages that failed at another one', failed_elsewhere),
    ('isolation: an error text in any encoding stops no relay', any_encoding),
    ('isolation: retries that need more than their places do not fill the sink', many_retries),
    ('isolation: large retries do not fill the memory of a sink', large_retries),
    ('isolation: a retry gets its turn beside new bad messages', retry_beside_new),
    ('isolation: relays that are killed cost few messages an attempt', left_often),
    ('isolation: messages that killed relays have left keep their order', left_in_order),
    ('isolation: a paused sink is tried with another message', probed_with_another),
    ('isolation: slow requests delay no probe of a paused sink', probed_beside_slow),
    ('isolation: more bad messages than good ones are no outage', mostly_bad),
    ('isolation: messages that are known to be bad pause no sink', known_to_be_bad),
    ('isolation: bad messages whose ids have the same remainder are all remembered', same_remainder),
    ('isolation: a proxy that fails costs no attempt and keeps the order', proxy_fails),
    ('isolation: headers of the relay are its own', relays_own_headers),
    ('isolation: an unreachable broker keeps no other sink from starting', starts_without),
    ('isolation: a relay that can open no descriptor delivers to the other sinks', no_descriptor_left),
    ('SIGHUP while a sink connects leaves no socket open', reload_while_connecting),
    ('isolation: a broker that does not answer delays no other sink', silent_broker),
    ('isolation: a bad endpoint delays no message of another one', bad_endpoints),
    ('isolation: slow endpoints that succeed delay no other sink', slow_success),
    ('isolation: a locked row delays its own answer only', locked_row),
    ('isolation: a locked row among many answers delays no other for long', locked_beside_many),
    ('isolation: a locked row of a waiting message delays none behind it', locked_and_waiting),
    ('isolation: a full queue refuses its own messages only', one_queue_stuck),
]
