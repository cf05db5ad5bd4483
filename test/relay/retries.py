# Retries by schedule, maximum ages, and disabled sinks, which do not affect others.

import json
import subprocess
import time
import urllib.request

from endpoint import Endpoint
from isolation import attempts
from world import PROGRAM, equal, expect, free_port, until

COUNTED = 'SELECT max(attempt - uncounted_attempts) FROM idem_outbox WHERE %s'


def webhook(world, endpoint, *more):
    return world.relay('--w.sink=webhook', '--w.topics=t', '--w.url=' + endpoint.url, *more).started()


def scheduled(world):
    """The pauses are those of the setting; one more failure is the last."""
    endpoint = Endpoint(lambda request, number: (400, {}, b'bad %d' % number) if b'bad' in request.body else (204, {}, b''))
    bad = world.publish('t', '"bad"', 'k')
    world.publish('t', '"behind"', 'k')
    relay = webhook(world, endpoint, '--w.retry=1s, 100ms, 2s')
    until('it is dead', lambda: world.states() == {'acked': 1, 'dead': 1}, 30)
    times = [request.at for request in endpoint.requests if b'bad' in request.body]
    pauses = [after - before for before, after in zip(times, times[1:])]
    equal('pauses', len(pauses), 3)
    for pause, low, high in zip(pauses, (1, 0.1, 2), (1.9, 0.9, 2.9)):
        expect('pauses: %s' % pauses, low <= pause <= high + 2)
    errors = world.query('SELECT last_error FROM idem_outbox WHERE message_id = %s', bad)[0][0].split('\n')
    equal('its errors', [error.split(' ', 1)[1] for error in errors], ['status 400: bad %d' % n for n in (5, 3, 2, 1)]
          if len(endpoint.requests) > 5 else ['status 400: bad %d' % n for n in (4, 3, 2, 1)])
    equal('the status', relay.stop(), 0)
    endpoint.close()


def requeued(world):
    """A dead message that is requeued begins anew: its first failure is free."""
    endpoint = Endpoint(lambda request, number: (500, {}, b'bug'))
    world.publish('t')
    relay = webhook(world, endpoint, '--w.retry=100ms')
    for deaths in 1, 2:
        until('it is dead', lambda: world.states() == {'dead': 1})
        # The log follows the commit.
        until('that is logged', lambda: relay.said().count(' is dead after attempt ') == deaths)
        equal('free failures', relay.said().count(' is deferred for '), deaths)
        world.query('SELECT idem_outbox_requeue(array_agg(id)) FROM idem_outbox')
    equal('the status', relay.stop(), 0)
    endpoint.close()


def too_long(world):
    """--check and the start warn if the server allows fewer attempts."""
    options = ['--out.sink=stdout', '--out.topics=*', '--out.retry=1s, 2s, 3s']
    for number, warns in [(3, True), (4, False)]:
        with attempts(world, number):
            done = subprocess.run([PROGRAM, '--check', *options], capture_output=True, text=True, timeout=30)
            equal('the status', done.returncode, 0)
            equal('warned', '--out.retry: "retry" has 3 pauses, but the server ends a message after 3 attempts; '
                  'set idempotency.outbox_max_attempts to at least 4' in done.stderr, warns)


def too_old(world):
    """A message that fails after its maximal age is dead, even if the whole
    sink fails; it keeps what was wrong."""
    endpoint = Endpoint(lambda request, number: (502, {}, b'no backend'))
    for n in range(5):
        world.publish('t', str(n))
    relay = webhook(world, endpoint, '--w.max_age=3s')
    until('all are dead', lambda: world.states() == {'dead': 5}, 60)
    ages = world.query("SELECT min(substr(last_error, 1, 20)::timestamptz - created_at) > interval '2 s' FROM idem_outbox")
    equal('they had their time', ages, [(True,)])
    equal('the status', relay.stop(), 0)
    endpoint.close()


def alone_in_sink(world):
    """If all messages of a sink are bad, they are dead after their attempts, once
    "grace" is over."""
    endpoint = Endpoint(lambda request, number: (500, {}, b'bug'))
    with attempts(world, 2):
        for n in range(3):
            world.publish('t', str(n))
        relay = webhook(world, endpoint)
        until('it is paused', lambda: 'is paused' in relay.said())
        time.sleep(2)
        equal('states', world.states(), {'pending': 3})
        equal('attempts that count', world.query(COUNTED % 'true')[0][0] <= 1, True)
        equal('the status', relay.stop(), 0)
        relay = webhook(world, endpoint, '--w.grace=1s')
        until('all are dead', lambda: world.states() == {'dead': 3}, 60)
        equal('the status', relay.stop(), 0)
    endpoint.close()


def page(port, path):
    try:
        with urllib.request.urlopen('http://127.0.0.1:%d%s' % (port, path)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def disabled(world):
    """An endpoint that only fails is disabled, and reported, until a restart."""
    endpoint = Endpoint(lambda request, number: (500, {}, b'bug'))
    port = free_port()
    for n in range(5):
        world.publish('t', str(n))
    relay = webhook(world, endpoint, '--w.disable_after=1s', '--metrics=127.0.0.1:%d' % port)
    until('it is disabled', lambda: 'sink "w" is disabled: status 500' in relay.said())
    until('nothing is in flight', lambda: 'idem_relay_sink_in_flight{sink="w",kind="webhook"} 0' in page(port, '/metrics')[1])
    requests = len(endpoint.requests)
    expect('the metric', 'idem_relay_sink_disabled{sink="w",kind="webhook"} 1' in page(port, '/metrics')[1])
    time.sleep(1.5)
    equal('requests after that', len(endpoint.requests), requests)
    equal('states', world.states(), {'pending': 5})
    equal('the status', relay.stop(), 0)
    endpoint.answer = lambda request, number: (204, {}, b'')
    relay = webhook(world, endpoint, '--w.disable_after=1s')
    world.all_acked(5)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def gone(world):
    """410 disables an endpoint at once, and costs no attempt."""
    endpoint = Endpoint(lambda request, number: (410, {}, b'moved'))
    message = world.publish('t')
    relay = webhook(world, endpoint)
    until('it is disabled', lambda: 'sink "w" is disabled: status 410' in relay.said())
    until('it is kept', lambda: world.outbox(message)[3] == 'status 410: moved')
    world.publish('t')
    time.sleep(1)
    equal('requests', len(endpoint.requests), 1)
    equal('attempts that count', world.query(COUNTED % 'true'), [(0,)])
    equal('the status', relay.stop(), 0)
    endpoint.close()


def paused_beside_all(world):
    """A paused or disabled sink stops no topic of a section with the topic *,
    not even a topic that is new."""
    broken = Endpoint(lambda request, number: (502, {}, b'no backend'))
    for n in range(300):
        world.publish('t', str(n))
    relay = webhook(world, broken, '--a.sink=amqp', '--a.topics=a', '--a.url=amqp://127.0.0.1:%d' % free_port(),
                    '--rest.sink=stdout', '--rest.topics=*', '--wait=10s')
    until('they are paused', lambda: all('sink "%s" is paused' % name in relay.said() for name in 'wa'))
    for n in range(20):
        world.publish('new%d' % n, json.dumps({'n': n}))
        time.sleep(0.05)
    until('they are delivered', lambda: world.query(
        "SELECT count(*) FROM idem_outbox WHERE topic LIKE 'new%%' AND state = 'acked'") == [(20,)], 5)
    equal('the others', world.query("SELECT DISTINCT state FROM idem_outbox WHERE topic = 't'"), [('pending',)])
    equal('the status', relay.stop(), 0)
    broken.close()


TESTS = [
    ('retries: the pauses are those of the schedule, and one more failure is the last', scheduled),
    ('retries: a list of pauses that is longer than the server allows is reported', too_long),
    ('retries: a message that fails after its maximal age is dead', too_old),
    ('retries: bad messages that are alone in a sink are dead at last', alone_in_sink),
    ('retries: an endpoint that only fails is disabled and reported', disabled),
    ('retries: 410 disables an endpoint at once', gone),
    ('isolation: a paused sink stops no other topic of a section for all topics', paused_beside_all),
    ('retries: a dead message that is requeued begins anew', requeued),
]
