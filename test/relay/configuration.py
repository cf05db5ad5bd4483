# The relay refuses invalid settings at the start, with the line and a hint.

import os
import re
import subprocess

from world import PROGRAM, equal, expect


def refused(world):
    path = os.path.join(world.directory, 'relay.conf')
    out = '[out]\nsink = stdout\ntopics = *\n'
    good = 'lease = 30s\n' + out
    cases = [
        ('colour = red\n' + good, 78, 'relay.conf:1: there is no setting "colour" here; there are: database,'),
        ('lease = 30\n' + good[12:], 78, 'relay.conf:1: "lease" must be a time from 1 s to 86400 s, with its unit'),
        ('wait = 20s\n' + good, 78, 'relay.conf:1: "wait" is more than a third of "lease"'),
        ('lease = 30s\n' + good, 78, 'relay.conf:2: "lease" is set twice, first at'),
        ('lease\n' + good, 78, 'relay.conf:1: expected "name = value"'),
        ('max_memory = 64\n' + good, 78, 'relay.conf:1: "max_memory" must be a size of at least 65536'),
        ('verbose = maybe\n' + good, 78, 'relay.conf:1: "verbose" must be on or off'),
        ('batch = 0\n' + good, 78, 'relay.conf:1: "batch" must be a number from 1 to 10000'),
        ('', 78, 'there is no sink; add a section like [out]'),
        ('[out]\ntopics = *\n', 78, 'relay.conf:1: section [out] needs "sink = ..."'),
        ('[out]\nsink = pigeon\ntopics = *\n', 78, 'relay.conf:2: section [out] needs "sink = ..."'),
        ('[out]\nsink = stdout\n', 78, 'relay.conf:1: "topics" is missing'),
        ('[out\nsink = stdout\n', 78, 'relay.conf:1: expected the name of a section'),
        ('[out]\nsink = stdout\ntopics = a*\n', 78, 'relay.conf:3: a pattern leaves topics without a sink'),
        ('topics = a, b\n[out]\nsink = stdout\ntopics = a*\n', 78, 'relay.conf:1: topic "b" has no sink'),
        ('[out]\nsink = webhook\ntopics = *\nurl = ftp://example.com\n', 78, 'relay.conf:4: "url" is no URL of http'),
        ('[out]\nsink = webhook\ntopics = *\nurl = example.com\n', 78, 'relay.conf:4: "url" is no URL of http'),
        ('[out]\nsink = webhook\ntopics = *\n', 78, 'relay.conf:1: "url" is missing: of the endpoint'),
        ('[out]\nsink = webhook\ntopics = *\nurl = http://localhost\nsecret = abc\n', 78,
         'relay.conf:5: "secret" must be whsec_ and'),
        ('[out]\nsink = amqp\ntopics = *\nurl = http://localhost\n', 78, 'relay.conf:4: "url" is no URL of AMQP'),
        ('[out]\nsink = amqp\ntopics = *\nurl = amqp://127.0.0.1:1\n', 69, 'relay.conf:4: sink "out" cannot be reached'),
        ('[out]\nsink = kafka\ntopics = *\nbrokers = 127.0.0.1:1\ntimeout = 1s\n', 69, 'sink "out" cannot be reached'),
        ('[out]\nsink = kafka\ntopics = *\nbrokers = x\nlibrdkafka.colour = red\n', 78, 'relay.conf:5: No such'),
        ('[out]\nsink = stdout\ntopics =\n', 78, 'relay.conf:3: "topics" is empty'),
        (good + '[b]\nsink = stdout\ntopics = x\n', 78, 'relay.conf:7: topic "x" goes to section [out] already'),
        ('[out]\nsink = webhook\ntopics = *\nurl = https://localhost\nca_file = /etc/passwd\n', 78,
         'relay.conf:5: "/etc/passwd" has no certificates'),
        ('[out]\nsink = command\ntopics = *\ncommand =\n', 78, 'relay.conf:4: "command" is empty'),
        ('[out]\nsink = stdout\ntopics = *\nformat = xml\n', 78, 'relay.conf:4: "format" must be payload or'),
        ('[out]\nsink = amqp\ntopics = *\nurl = amqp://localhost\nrouting_key = %s\n' % ('k' * 256), 78,
         'relay.conf:5: "routing_key" is longer than 255'),
        ('[a]\nsink = stdout\ntopics = a\n[b]\nsink = stdout\ntopics = b\n', 78,
         'relay.conf:4: sections [a] and [b] both write to standard output'),
        ('[e]\nsink = outbox\ntopics = event*\ncopies = one, events2\n' + out, 78,
         'relay.conf:4: topic "events2" goes to section [e], which would copy it without end'),
        ('[a]\nsink = outbox\ntopics = x\ncopies = y, z\n[b]\nsink = outbox\ntopics = y\ncopies = z, x\n' + out, 78,
         'relay.conf:8: topic "x" goes to section [a], which would copy it without end'),
        ('database = host=/nonexistent\n[z]\nsink = stdout\ntopics = audit\n[b]\nsink = outbox\ntopics = y\ncopies = audit\n'
         '[a]\nsink = outbox\ntopics = *\ncopies = audit, y\n', 69, 'relay.conf:1: the database cannot be reached'),
        ('metrics = 127.0.0.1:notaport\n' + good, 78, 'relay.conf:1: cannot listen on "127.0.0.1:notaport"'),
        ('metrics = 127.0.0.1:99999\n' + good, 78, 'relay.conf:1: cannot listen on "127.0.0.1:99999"'),
        ('\ufefflease = 30\n' + good[12:], 78, 'relay.conf:1: "lease" must be a time'),
        ('[out]\nsink = kafka\ntopics = *\nbrokers = x\nlibrdkafka.acks = 1\n', 78, 'relay.conf:1: `acks` must be set to'),
        ('[out]\nsink = amqp\ntopics = *\nurl = amqp://a:b@localhost\n', 78, 'relay.conf: everybody can read the passwords'),
        ('database = dbname=x password=y\n' + good, 78, 'relay.conf: everybody can read the passwords'),
        ('metrics = nowhere\n' + good, 78, 'relay.conf:1: cannot listen on "nowhere"'),
        ('database = host=/nonexistent\n' + good, 69, 'relay.conf:1: the database cannot be reached'),
        ('database = hosts=x\n' + good, 78, 'relay.conf:1: invalid connection option'),
        ('database = dbname=template1\n' + good, 69, 'CREATE EXTENSION idempotency'),
    ]
    for text, status, message in cases:
        with open(path, 'w') as file:
            file.write(text)
        # Without --check, the relay starts, and pauses a sink that cannot be reached.
        for more in [['--check']] if 'sink "out" cannot' in message else [[], ['--check']]:
            done = subprocess.run([PROGRAM, '--config=' + path, *more], capture_output=True, text=True, timeout=30)
            equal('the status for %r' % text, done.returncode, status)
            expect('for %r, expected %r in:\n%s' % (text, message, done.stderr), message in done.stderr)


def options(world):
    for arguments, status, message in [
            (['--colour'], 64, '--colour: expected --name=value'),
            (['out'], 64, 'out: expected --name=value'),
            (['--colour=red', '--out.sink=stdout', '--out.topics=*'], 78, '--colour: there is no setting'),
            (['--config=/nonexistent'], 78, '/nonexistent: could not be read'),
            (['--config=/dev/null', '--config=/dev/null'], 78, '--config: there are two files'),
            (['--check', '--out.sink=stdout', '--out.topics=*'], 0, ''),
            (['--help'], 0, ''), (['--version'], 0, '')]:
        done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=30)
        equal('the status for %r' % arguments, done.returncode, status)
        expect('for %r, expected %r in:\n%s' % (arguments, message, done.stderr), message in done.stderr)


def secrets(world):
    done = subprocess.run([PROGRAM, '--out.url=amqp://user:tellnobody@127.0.0.1:1', '--out.sink=amqp', '--out.topics=*',
                           '--check'],
                          capture_output=True, text=True, timeout=30)
    equal('the status', done.returncode, 69)
    expect('a password is in the log: ' + done.stderr, 'tellnobody' not in done.stderr)
    for option in ['--database=postgresql://user:tell@nobody@127.0.0.1:1/x', '--database=postgresql://user:nobody/x@127.0.0.1/x',
                   '--database=postgresql://user:nobody%zz@127.0.0.1/x', '--database=password=tell nobody host=127.0.0.1',
                   '--database=password=tell nobody=1 host=127.0.0.1', '--out.url=amqp://user:tell@nobody@127.0.0.1:1']:
        done = subprocess.run([PROGRAM, '--out.sink=amqp', '--out.topics=*', '--out.url=amqp://localhost:1', '--check', option],
                              capture_output=True, text=True, timeout=30)
        equal('the status', done.returncode, 78)
        expect('a part of a password is in the log: ' + done.stderr, 'nobody' not in done.stderr)


def has_time(world):
    done = subprocess.run([PROGRAM, '--config=/nonexistent'], capture_output=True, text=True, timeout=30)
    expect(done.stderr, re.match(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z idem-relay: error: ', done.stderr))


def documented(world):
    """Page and sample have each setting with its default, and the sample is
    valid."""
    def text(name):
        with open(os.path.join('relay', name)) as file:
            return file.read()

    told = subprocess.run([PROGRAM, '--help'], capture_output=True, text=True, check=True).stdout
    section, settings = '', []
    for line in told.splitlines():
        if line.endswith(':') and not line.startswith(' '):
            section = line
        found = re.match(r'  ([a-z_.]+) .*?(?: \(([^()]*)\))?$', line)
        if found and 'ettings' in section or found and 'sink' in section:
            settings.append((found[1], found[2] or ''))
    expect('settings: %s' % settings, len(settings) > 25 and ('lease', '30s') in settings)
    page, sample = text('README.md'), text('idem-relay.conf')
    for name, default in settings:
        name = name.removesuffix('...')
        expect('%s is not in README.md' % name, '`%s' % name in page)
        expect('%s is not in idem-relay.conf' % name, re.search('^#?%s' % re.escape(name), sample, re.M))
        if default != 'required':
            expect('%s is not %s in README.md' % (name, default), default in page)
    for name in re.findall('"(idem_relay_[a-z_]+)"', text('metrics.c')):
        expect('%s is not in README.md' % name, '`%s`' % name in page)
    for status in re.findall(r'define RELAY_[A-Z]+\t+([0-9]+)', text('relay.h')):
        expect('status %s is not in README.md' % status, '| %s |' % status in page)
    path = os.path.join(world.directory, 'sample.conf')
    whole = re.sub(r'^#([\[a-z])', r'\1', sample, flags=re.M).replace('whsec_...', 'whsec_' + 'QUJD' * 8).replace(
        '[stream]', '[stream]\ntimeout = 1s')
    for lines in sample, whole:
        with open(path, 'w') as file:
            os.chmod(path, 0o600)
            file.write(re.sub('ca_file = .*', '', lines))
        done = subprocess.run([PROGRAM, '--config=' + path, '--check', '--database=host=/nonexistent'], capture_output=True,
                              text=True, timeout=60)
        expect(done.stderr, done.returncode == 69 and 'faults' not in done.stderr)


TESTS = [
    ('each setting, metric and status is documented', documented),
    ('faults of the configuration are told with their line', refused),
    ('options have the names of the settings', options),
    ('no password is told', secrets),
    ('lines of the log have the time', has_time),
]
