# Secrets in files, certificates, and the output for an operator's tools.

import base64
import json
import os
import ssl
import urllib.error
import urllib.request

import amqp
from endpoint import Endpoint, signature
from rabbit import certificate, tls_server
from world import equal, expect, free_port, until


def page(port, path):
    try:
        with urllib.request.urlopen('http://127.0.0.1:%d%s' % (port, path)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def secret(world, name, text):
    path = os.path.join(world.directory, name)
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), 'w') as file:
        file.write(text + '\n')
    return path


def webhook_files(world):
    """The secret is in a file, and the endpoint wants a certificate."""
    ours, key = certificate(world.directory, 'client')
    text = 'whsec_' + base64.b64encode(bytes(range(32))).decode()
    path = secret(world, 'signing', text)
    context = tls_server(world.directory, 'endpoint')
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(ours)
    endpoint = Endpoint(tls=context)
    options = ['--w.sink=webhook', '--w.topics=t', '--w.url=' + endpoint.url, '--w.ca_file=%s/endpoint.crt' % world.directory,
               '--w.secret_file=' + path]
    world.publish('t')
    relay = world.relay(*options).started()
    until('it is paused', lambda: 'is paused' in relay.said() or 'is deferred' in relay.said())
    equal('the status', relay.stop(), 0)
    relay = world.relay(*options, '--w.cert_file=' + ours, '--w.key_file=' + key).started()
    world.all_acked(1)
    request = endpoint.requests[-1]
    equal('its signature', request.headers['webhook-signature'], signature(text, request))
    equal('the status', relay.stop(), 0)
    endpoint.close()


def broker_files(world):
    """The password is in a file, and the broker's certificate is among the
    system's."""
    broker = amqp.start(world)
    connection, channel = broker.channel()
    channel.queue_declare('orders', durable=True)
    world.publish('orders')
    options = ['--r.sink=amqp', '--r.topics=orders', '--r.url=' + broker.tls_url.replace('guest:guest', 'guest:wrong')]
    bad = world.relay(*options, environment={'SSL_CERT_FILE': broker.certificate}).started()
    until('the password is wrong', lambda: 'sink "r" is paused' in bad.said())
    expect(bad.said(), 'ACCESS_REFUSED' in bad.said())
    equal('the status', bad.stop(), 0)
    untrusted = world.relay(*options).started()
    until('it is not trusted', lambda: 'sink "r" is paused' in untrusted.said())
    expect(untrusted.said(), 'ACCESS_REFUSED' not in untrusted.said())
    equal('the status', untrusted.stop(), 0)
    ours, key = certificate(world.directory, 'client')
    good = world.relay(*options, '--r.password_file=' + secret(world, 'password', 'guest'), '--r.cert_file=' + ours,
                       '--r.key_file=' + key, environment={'SSL_CERT_FILE': broker.certificate}).started()
    world.all_acked(1)
    equal('the status', good.stop(), 0)
    amqp.drain(channel, 'orders', 1)
    connection.close()


def database_file(world):
    """The password of the database can be a credential."""
    world.query("CREATE ROLE with_password LOGIN SUPERUSER PASSWORD 'tellnobody'")
    try:
        secret(world, 'database', 'tellnobody')
        world.publish('t')
        relay = world.relay('--database=user=with_password', '--password_file=database', '--out.sink=stdout', '--out.topics=t',
                            environment={'CREDENTIALS_DIRECTORY': world.directory}).started()
        world.all_acked(1)
        equal('the status', relay.stop(), 0)
    finally:
        world.query('DROP ROLE with_password')


def reports(world):
    """Health, latency and a log in JSON."""
    port = free_port()
    endpoint = Endpoint(lambda request, number: (204, {}, b'') if number < 3 else (410, {}, b''))
    relay = world.relay('--w.sink=webhook', '--w.topics=t', '--w.url=' + endpoint.url, '--log_format=json',
                        '--metrics=127.0.0.1:%d' % port).started()
    until('it is healthy', lambda: page(port, '/healthz') == (200, 'ok\n'))
    for n in range(2):
        world.publish('t', str(n))
    world.all_acked(2)
    metrics = page(port, '/metrics')[1]
    labels = '{sink="w",kind="webhook"'
    expect('the count', 'idem_relay_sink_latency_seconds_count%s} 2\n' % labels in metrics)
    expect('the last bucket', 'idem_relay_sink_latency_seconds_bucket%s,le="+Inf"} 2\n' % labels in metrics)
    total = float(metrics.split('latency_seconds_sum%s} ' % labels)[1].split('\n')[0])
    expect('the sum is %g s' % total, 0 <= total < 10)
    world.publish('t')
    until('it is not healthy', lambda: page(port, '/healthz') == (503, 'sink "w" is disabled\nfailing\n'))
    equal('an unknown page', page(port, '/healthzz')[0], 404)
    equal('the status', relay.stop(), 0)
    lines = [json.loads(line) for line in relay.said().splitlines()]
    expect(str(lines), [line['message'] for line in lines if line['level'] == 'info'] == ['started', 'stopping', 'stopped'])
    expect(str(lines), any('sink "w" is disabled' in line['message'] and line['level'] == 'error' and
                           line['time'].endswith('Z') for line in lines))
    endpoint.close()


TESTS = [
    ('secrets: a webhook with its secret in a file and a certificate', webhook_files),
    ('secrets: a broker with the password in a file and the certificates of the system', broker_files),
    ('secrets: the password of the database is a credential', database_file),
    ('reports: health, latency, and a log in JSON', reports),
]
