# Webhooks according to the Standard Webhooks specification.

import base64
import itertools
import os
import re
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from endpoint import Endpoint, signature
from rabbit import tls_server
from world import deaf_port, equal, expect, until

SECRETS = ('whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw', 'whsec_' + 'QUJD' * 30,
           'whsec_' + base64.b64encode(bytes(range(64))).decode())


def webhook(world, url, *more):
    return world.relay('--w.sink=webhook', '--w.topics=*', '--w.url=' + url, *more).started()


def signed(world):
    endpoint = Endpoint()
    relay = webhook(world, endpoint.url, '--w.secret=' + ','.join(SECRETS))
    message_id = world.publish('orders', '{"text": "käse"}', 'k', '{"x-trace": "a b"}')
    world.all_acked(1)
    request = endpoint.requests[0]
    equal('its body', request.body, '{"text": "käse"}'.encode())
    equal('its id', request.headers['webhook-id'], message_id)
    equal('its key', request.headers['Idempotency-Key'], '"%s"' % message_id)
    expect('its time', abs(int(request.headers['webhook-timestamp']) - time.time()) < 10)
    equal('its signatures', request.headers['webhook-signature'],
          ' '.join(signature(secret, request) for secret in SECRETS))
    equal('a header', request.headers['x-trace'], 'a b')
    equal('its type', request.headers['Content-Type'], 'application/json')
    equal('the status', relay.stop(), 0)
    endpoint.close()


def tried_again(world):
    """Lost answers, errors, and a pause that the endpoint asks for."""
    answers = [None, (500, {}, b'broken'), (400, {'Retry-After': '1'}, b''), (302, {'Location': '/'}, b'')]
    endpoint = Endpoint(lambda request, number: answers[number - 1] if number <= len(answers) else (200, {}, b'ok'))
    relay = webhook(world, endpoint.url)
    message_id = world.publish('t')
    until('an error is kept', lambda: 'status 500: broken' in (world.outbox(message_id)[3] or ''))
    world.query('UPDATE idem_outbox SET available_at = now()')
    world.all_acked(1, 60)
    equal('requests', len(endpoint.requests), 5)
    pause = endpoint.requests[3].at - endpoint.requests[2].at
    expect('the pause was %.1f s' % pause, 1 <= pause < 3)
    equal('its id is the same', {request.headers['webhook-id'] for request in endpoint.requests}, {message_id})
    equal('the status', relay.stop(), 0)
    endpoint.close()


def repeated_once(world):
    """A message that has failed is not sent twice at an attempt, even if it ends the
    kept connection."""
    answers = iter([(500, {}, b'broken'), None])
    endpoint = Endpoint(lambda request, number: next(answers, None) if request.body == b'"bad"' else (204, {}, b''))
    relay = webhook(world, endpoint.url)
    message_id = world.publish('t', '"bad"')
    until('the second attempt has failed', lambda: 'returned nothing' in (world.outbox(message_id)[3] or ''))
    equal('requests', len(endpoint.requests), world.outbox(message_id)[1])
    equal('the status', relay.stop(), 0)
    endpoint.close()


def overloaded(world):
    """503 with Retry-After pauses a key, and costs nothing."""
    endpoint = Endpoint(lambda request, number: (503, {'Retry-After': '2'}, b'') if number == 1 else (204, {}, b''))
    for n in range(10):
        world.publish('t', str(n), 'k')
    relay = webhook(world, endpoint.url)
    world.all_acked(10)
    pause = endpoint.requests[1].at - endpoint.requests[0].at
    expect('the pause was %.1f s' % pause, 2 <= pause < 5)
    equal('order', [int(request.body) for request in endpoint.requests], [0, *range(10)])
    equal('attempts', world.query('SELECT max(attempt - uncounted_attempts) FROM idem_outbox'), [(1,)])
    equal('the status', relay.stop(), 0)
    endpoint.close()


def not_there(world):
    """An endpoint without a server costs no attempts."""
    endpoint = Endpoint()
    endpoint.close()
    message_id = world.publish('t')
    relay = webhook(world, endpoint.url)
    until('it is paused', lambda: 'sink "w" is paused' in relay.said())
    equal('the status', relay.stop(), 0)
    equal('the message', world.query(
        'SELECT state, attempt - uncounted_attempts FROM idem_outbox WHERE message_id = %s', message_id), [('pending', 0)])


def silent(world):
    endpoint = Endpoint(lambda request, number: time.sleep(1.5) or (204, {}, b''))
    message_id = world.publish('t')
    relay = webhook(world, endpoint.url, '--w.timeout=300ms')
    until('it is refused', lambda: 'imeout' in (world.outbox(message_id)[3] or ''))
    equal('the status', relay.stop(), 0)
    endpoint.close()


def proxy_refuses(world):
    """If the proxy does not connect to the endpoint, no attempt counts, also after grace."""
    class Proxy(BaseHTTPRequestHandler):
        def do_CONNECT(self):
            self.send_error(503)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(('127.0.0.1', 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        world.publish('t')
        relay = world.relay('--w.sink=webhook', '--w.topics=t', '--w.url=https://endpoint.test/', '--w.grace=0s',
                            environment={'https_proxy': 'http://127.0.0.1:%d' % server.server_address[1]})
        until('it was tried three times', lambda: relay.said().count('the proxy answered with status 503; next try') >= 3)
        equal('the status', relay.stop(), 0)
        equal('counted attempts', world.query('SELECT attempt - uncounted_attempts FROM idem_outbox'), [(0,)])
        server.shutdown()


def one_connection_each(world):
    """An endpoint that offers HTTP/2 gets HTTP/1.1: requests share no connection."""
    context = tls_server(world.directory, 'endpoint')
    context.set_alpn_protocols(['h2', 'http/1.1'])
    endpoint = Endpoint(lambda request, number: time.sleep(0.3) or (204, {}, b''), tls=context)
    for n in range(3):
        world.publish('t', str(n))
    relay = webhook(world, endpoint.url, '--w.ca_file=%s/endpoint.crt' % world.directory)
    until('it has three connections', lambda: len(endpoint.connections) == 3)
    world.all_acked(3)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def bad_headers(world):
    """Headers that HTTP does not allow, or that a publisher is not allowed to set."""
    endpoint = Endpoint()
    bad = [world.publish('t', '1', None, headers) for headers in
           ('{"a b": "c"}', '{"a": "b\\r\\nwebhook-id: x"}', '{"Webhook-Id": "x"}', '{"content-length": "3"}', '{"": "x"}')]
    bad += [world.publish('t', '1', None, '{"a": "%s"}' % ('x' * size)) for size in (65536, 1200000)]
    good = world.publish('t', '2', None, '{"n": 1, "o": {"p": "}"}, "empty": ""}')
    relay = webhook(world, endpoint.url)
    until('all are answered', lambda: world.outbox(good)[0] == 'acked' and
          all('headers cannot be sent' in (world.outbox(message)[3] or '') for message in bad))
    equal('requests', len(endpoint.requests), 1)
    equal('pauses', relay.said().count('is paused'), 0)
    headers = endpoint.requests[0].headers
    equal('headers', (headers['n'], headers['o'], headers['empty']), ('1', '{"p": "}"}', ''))
    equal('the status', relay.stop(), 0)
    endpoint.close()


def silent_resolver(world):
    """A name server that does not answer delays the messages of no other sink."""
    relay = world.relay('--w.sink=webhook', '--w.topics=t', '--w.url=http://silent.test/', '--w.timeout=300ms', '--out.sink=stdout',
                        '--out.topics=out', environment=world.preload('resolver_mock')).started()
    world.publish('t')
    for n in range(10):
        time.sleep(0.1)
        world.publish('out')
    until('the other sink delivers', lambda: world.states() == {'acked': 10, 'pending': 1}, 4)
    expect(relay.said(), 'sink "w" is paused' in relay.said())
    equal('the status', relay.stop(), 0)


def in_parallel(world):
    """Different keys are delivered at once and the messages of a key one by one,
    even if answers are lost and repeated."""
    flying, most = {}, [0]

    def answer(request, number):
        key = request.headers['key']
        flying[key] = flying.get(key, 0) + 1
        most[0] = max(most[0], sum(flying.values()))
        alone = flying[key] == 1
        time.sleep(0.02)
        flying[key] -= 1
        expect('two of one key at once', alone)
        return None if number % 17 == 0 else (200, {}, b'x' * 5000)

    endpoint = Endpoint(answer)
    for n in range(200):
        world.publish('t', str(n), 'k%d' % (n % 20), '{"key": "k%d"}' % (n % 20))
    relay = webhook(world, endpoint.url)
    until('all is delivered', lambda: world.states() == {'acked': 200}, 60)
    expect('%d at most at once' % most[0], 5 <= most[0] <= 10)
    last = {}
    for request in endpoint.requests:
        key = request.headers['key']
        expect('order of ' + key, last.get(key, -1) <= int(request.body))
        last[key] = int(request.body)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def endless(world):
    """The status is the answer, with any body."""
    def drip():
        while True:
            time.sleep(0.1)
            yield b'x'

    bodies = [drip(), itertools.repeat(b'x' * 65536)]
    endpoint = Endpoint(lambda request, number: (200, {}, bodies[number - 1]) if number <= 2 else
                        (500, {}, itertools.repeat(b'broken ')) if number == 3 else (200, {}, b''))
    relay = webhook(world, endpoint.url, '--w.timeout=1s', '--w.in_flight=1')
    for n in range(3):
        world.publish('t', str(n))
    until('the refusal is kept', lambda: world.query(
        "SELECT count(*) FROM idem_outbox WHERE last_error LIKE '%%Z status 500: broken %%'") == [(1,)])
    world.all_acked(3)
    equal('attempts', world.query('SELECT attempt FROM idem_outbox ORDER BY id'), [(1,), (1,), (2,)])
    equal('the status', relay.stop(), 0)
    endpoint.close()


def any_bytes(world):
    """An error of a server can contain text that a database does not accept."""
    endpoint = Endpoint(lambda request, number: (500, {}, ('€' * 100).encode() if b'cut' in request.body else
                                                 b'a\xff\xc3(\xed\xa0\x80 \xe2\x82\xac'))
    cut, bad = world.publish('t', '"cut"'), world.publish('t')
    relay = webhook(world, endpoint.url)
    until('both are refused', lambda: world.outbox(cut)[3] and world.outbox(bad)[3])
    expect(world.outbox(cut)[3], world.outbox(cut)[3].startswith('status 500: €€€'))
    equal('the reason', world.outbox(bad)[3], 'status 500: a??(??? €')
    equal('the status', relay.stop(), 0)
    with world.database('latin', 'LATIN1') as latin:
        message = latin.publish('t')
        relay = webhook(world, endpoint.url, '--database=dbname=latin')
        until('it is refused', lambda: latin.outbox(message)[3])
        equal('the reason in Latin', latin.outbox(message)[3], 'status 500: a??(??? ???')
        equal('the status', relay.stop(), 0)
    endpoint.close()


def unreachable(world):
    """Nothing was sent, so there was no attempt."""
    with deaf_port() as port:
        message = world.publish('t')
        relay = webhook(world, 'http://127.0.0.1:%d' % port, '--w.timeout=500ms')
        until('it is paused', lambda: 'sink "w" is paused' in relay.said())
        equal('the status', relay.stop(), 0)
        equal('the message', world.query(
            'SELECT state, attempt - uncounted_attempts FROM idem_outbox WHERE message_id = %s', message), [('pending', 0)])


def over_tls(world):
    endpoint = Endpoint(tls=tls_server(world.directory, 'endpoint'))
    tls_server(world.directory, 'other')
    message = world.publish('t')
    relay = webhook(world, endpoint.url, '--w.ca_file=%s/other.crt' % world.directory)
    until('it is paused', lambda: 'sink "w" is paused' in relay.said())
    expect(relay.said(), 'ertificate' in relay.said())
    equal('the status', relay.stop(), 0)
    relay = webhook(world, endpoint.url, '--w.ca_file=%s/endpoint.crt' % world.directory)
    world.all_acked(1)
    equal('attempts', world.outbox(message)[1] - world.query('SELECT uncounted_attempts FROM idem_outbox')[0][0], 1)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def host_verified(world):
    """A certificate for localhost is refused if the URL has an address."""
    endpoint = Endpoint(tls=tls_server(world.directory, 'endpoint'))
    world.publish('t')
    relay = webhook(world, endpoint.url.replace('localhost', '127.0.0.1'), '--w.ca_file=%s/endpoint.crt' % world.directory)
    until('it is paused', lambda: 'sink "w" is paused' in relay.said())
    expect(relay.said(), 'certificate' in relay.said())
    time.sleep(1)
    equal('requests', len(endpoint.requests), 0)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def short_pause_again(world):
    """Pauses grow, and begin again at half a second after a success."""
    def pauses():
        return [float(seconds) for seconds in re.findall(r'is paused: .*; next try in ([0-9.]+) s', relay.said())]

    endpoint = Endpoint()
    endpoint.close()
    world.publish('t', '1', 'a')
    relay = webhook(world, endpoint.url)
    until('pauses grow', lambda: len(pauses()) >= 3 and pauses()[-1] > 0.8)
    endpoint = Endpoint(port=endpoint.port)
    world.all_acked(1)
    endpoint.close()
    count = len(pauses())
    world.publish('t', '2', 'b')
    until('it is paused again', lambda: len(pauses()) > count)
    expect('pauses: %s' % pauses(), pauses()[count] <= 0.5)
    equal('the status', relay.stop(), 0)


def faulty_reload(world):
    """A new configuration with errors does not replace the current one."""
    path = os.path.join(world.directory, 'reload.conf')
    endpoint = Endpoint()

    def write(text):
        with open(path, 'w') as file:
            file.write('[w]\nsink = webhook\ntopics = *\nurl = %s\n%s' % (endpoint.url, text))

    write('')
    relay = world.relay('--config=' + path).started()
    world.publish('t')
    world.all_acked(1)
    write('in_flight = none\n[x]\nsink = webhook\ntopics = x\nurl = %s\ntimeout = 1\n' % endpoint.url)
    relay.signal(signal.SIGHUP)
    until('the relay reports the fault', lambda: 'the relay keeps the old one' in relay.said())
    expect(relay.said(), all(part in relay.said() for part in ('reload.conf:5: "in_flight"', 'reload.conf:10: "timeout"')))
    world.publish('t')
    world.all_acked(2)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def lost_secret(world):
    """If a file that the configuration names is gone when the relay would start
    again, it continues with the old configuration."""
    endpoint = Endpoint(lambda request, number: (time.sleep(3) if number == 1 else None) or (204, {}, b''))
    secret, path = (os.path.join(world.directory, name) for name in ('secret', 'secret.conf'))
    for name, text in ((secret, SECRETS[0]), (path, 'stop_timeout = 1s\n[w]\nsink = webhook\ntopics = *\nurl = %s\nsecret_file = %s\n' % (
            endpoint.url, secret))):
        with open(name, 'w') as file:
            file.write(text)
        os.chmod(name, 0o600)
    relay = world.relay('--config=' + path).started()
    world.publish('t')
    until('it is sent', lambda: endpoint.requests)
    relay.signal(signal.SIGHUP)
    until('it reloads', lambda: 'reloading' in relay.said())
    os.rename(secret, secret + '.old')
    until('the relay continues', lambda: 'keeps the old one' in relay.said())
    world.publish('t')
    world.all_acked(2)
    os.rename(secret + '.old', secret)
    relay.signal(signal.SIGHUP)
    until('it starts again', lambda: relay.said().count('info: started') == 2)
    world.publish('t')
    world.all_acked(3)
    equal('the status', relay.stop(), 0)
    endpoint.close()


def all_workers_are_kept(world):
    """Each of the endpoint's workers has a kept connection when a message that has
    failed needs a new one."""
    gate = threading.Barrier(4)

    def answer(request, number):
        if number <= 4:
            gate.wait(20)
        return 500 if number == 5 else 204, {}, b''

    endpoint = Endpoint(answer, workers=4)
    relay = world.relay('--w.sink=webhook', '--w.topics=t', '--w.url=' + endpoint.url, '--w.in_flight=10').started()
    for n in range(4):
        world.publish('t')
    world.all_acked(4)
    world.publish('t')
    world.all_acked(5)
    equal('requests', len(endpoint.requests), 6)
    equal('the status', relay.stop(), 0)
    endpoint.close()


TESTS = [
    ('the host name in the certificate of a webhook is verified', host_verified),
    ('after a success, the pause begins at half a second', short_pause_again),
    ('a webhook with a new configuration that has faults continues', faulty_reload),
    ('a webhook whose secret is gone at a reload continues', lost_secret),
    ('a message that has failed gets a connection from an endpoint that serves no more at once', all_workers_are_kept),
    ('a webhook that answers 200 without end has answered', endless),
    ('a webhook may answer with any bytes', any_bytes),
    ('an endpoint that takes no connection costs no attempt', unreachable),
    ('webhooks over TLS, with certificates of one\'s own', over_tls),
    ('a webhook is signed as the specification has it', signed),
    ('a webhook is tried again, after Retry-After', tried_again),
    ('a webhook that has failed is sent once at each attempt', repeated_once),
    ('503 pauses a webhook without an attempt', overloaded),
    ('an endpoint that is not there costs no attempt', not_there),
    ('an endpoint that does not answer costs one', silent),
    ('headers that cannot be sent are refused', bad_headers),
    ('a webhook whose name server does not answer delays no other sink', silent_resolver),
    ('a proxy that does not connect to the endpoint costs no attempt', proxy_refuses),
    ('webhooks use HTTP/1.1, so that no two requests share a connection', one_connection_each),
    ('webhooks fly in parallel, one of a key at a time', in_parallel),
]
