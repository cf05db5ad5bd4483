# The world of monitoring's tests: a database with a role that may watch, the
# programs that Debian has, each on a port and in a directory of its own.

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

import psycopg2

import configuration
from checks import Broken, Session, free_port, until

SCHEMA = 'idem'
DATABASE = 'shop'


def fetch(url):
    """The body; None while nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return None


class World:
    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix='idem-monitoring.')
        self.processes = {}
        self.ports = {}
        self.admin = None

    # The database

    def create(self):
        session = Session()
        session.run('CREATE ROLE prometheus LOGIN')
        session.run('CREATE DATABASE ' + DATABASE)
        session.close()
        self.admin = Session('dbname=' + DATABASE)
        self.query('CREATE SCHEMA %s' % SCHEMA)
        self.query('CREATE EXTENSION idempotency SCHEMA %s' % SCHEMA)
        self.query('SET search_path = %s' % SCHEMA)
        self.query("SELECT idem_grant_monitor('prometheus')")

    def query(self, text, *values):
        return self.admin.run(text, *values)

    def address(self):
        return 'postgres://prometheus@/%s?host=%s&port=%s&sslmode=disable&search_path=%s' % (
            DATABASE, urllib.parse.quote(os.environ['PGHOST'], safe=''), os.environ['PGPORT'], SCHEMA)

    # Programs

    def file(self, name, text):
        path = os.path.join(self.directory, name)
        with open(path, 'w', encoding='utf-8') as file:
            file.write(text)
        return path

    def start(self, name, command, environment=None):
        with open(os.path.join(self.directory, name + '.log'), 'wb') as log:
            self.processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory, start_new_session=True,
                env={**os.environ, 'GOMAXPROCS': '2', **(environment or {})})

    def answers(self, name, path='/metrics', word=''):
        """Wait until it serves that; returns the text."""
        def look():
            if self.processes[name].poll() is not None:
                raise Broken('%s has ended:\n%s' % (name, self.said(name)))
            text = fetch('http://127.0.0.1:%d%s' % (self.ports[name], path))
            return text if text is not None and word in text else None
        try:
            return until(look, '%s answers with %r' % (name, word))
        except Broken as broken:
            raise Broken('%s\n%s' % (broken, self.said(name))) from None

    def said(self, name):
        with open(os.path.join(self.directory, name + '.log'), errors='replace') as log:
            return log.read()[-3000:]

    def sql_exporter(self):
        port = self.ports['sql_exporter'] = free_port()
        ours = configuration.replace(configuration.read('sql_exporter.yml'), {
            'postgres://prometheus@/shop?host=/run/postgresql&sslmode=disable&search_path=public,idem': self.address(),
            'interval: 15s': 'interval: 1s'})
        self.start('sql_exporter', ['prometheus-sql-exporter', '-config.file', self.file('sql_exporter.yml', ours),
                                    '-web.listen-address', '127.0.0.1:%d' % port], {'LOGLEVEL': 'warn'})

    def postgres_exporter(self):
        port = self.ports['postgres_exporter'] = free_port()
        self.start('postgres_exporter',
                   ['prometheus-postgres-exporter', '--disable-default-metrics', '--disable-settings-metrics',
                    '--no-collector.database', '--no-collector.bgwriter',
                    '--extend.query-path=' + self.file('postgres_exporter.yml', configuration.read('postgres_exporter.yml')),
                    '--web.listen-address=127.0.0.1:%d' % port], {'DATA_SOURCE_NAME': self.address()})

    def relay(self):
        port = self.ports['relay'] = free_port()
        self.start('relay', [os.path.join(os.getcwd(), 'relay', 'idem-relay'),
                             '--database=dbname=%s options=-csearch_path=%s' % (DATABASE, SCHEMA),
                             '--metrics=127.0.0.1:%d' % port, '--out.sink=stdout', '--out.topics=*'])

    def prometheus(self):
        """Scrapes one exporter as "idempotency", the other as "other"."""
        port = self.ports['prometheus'] = free_port()
        ours = configuration.replace(configuration.read('prometheus.yml'), {
            '127.0.0.1:9237': '127.0.0.1:%d' % self.ports['sql_exporter'],
            '127.0.0.1:9464': '127.0.0.1:%d' % self.ports['relay'],
            'scrape_interval: 15s': 'scrape_interval: 1s'})
        ours += """  - job_name: other
    scrape_interval: 1s
    static_configs:
      - targets: ['127.0.0.1:%d']
    metric_relabel_configs: *names
""" % self.ports['postgres_exporter']
        self.file('alerts.yml', configuration.read('alerts.yml'))
        self.start('prometheus', ['prometheus', '--config.file=' + self.file('prometheus.yml', ours),
                                  '--storage.tsdb.path=' + os.path.join(self.directory, 'data'),
                                  '--web.listen-address=127.0.0.1:%d' % port, '--log.level=warn'])

    def ask(self, path, **parameters):
        """What Prometheus answers."""
        text = fetch('http://127.0.0.1:%d/api/v1/%s?%s' % (self.ports['prometheus'], path, urllib.parse.urlencode(parameters)))
        answer = json.loads(text or '{"status": "no answer"}')
        if answer['status'] != 'success':
            raise Broken('Prometheus refuses %s: %s' % (parameters, answer))
        return answer['data']

    # Something to look at

    def stop(self, name):
        """End a program, as an operator would."""
        os.killpg(self.processes[name].pid, signal.SIGTERM)
        self.processes[name].wait(10)

    def work(self, seconds, dying=False):
        """Calls of all kinds, a few dozen per second, for that time; workers complete their claims, or die with one of ten."""
        end = time.monotonic() + seconds
        step = first = 100000 if dying else 0
        while step == first or time.monotonic() < end:
            step += 1
            with contextlib.closing(psycopg2.connect(dbname=DATABASE, options='-csearch_path=' + SCHEMA)) as connection:
                connection.autocommit = True
                cursor = connection.cursor()
                for i in range(20):
                    key = 'key-of-monitoring-%d-%d-%d' % (dying, step, i)
                    cursor.execute("SELECT idem_claim('shop', %s, lease => '1 s')", (key,))
                    if i % 10 or not dying:
                        cursor.execute("SELECT idem_complete('shop', %s, 200, claim_token => claim_token) FROM idem_keys WHERE key = %s",
                                       (key, key))
                    cursor.execute("SELECT idem_claim('shop', %s) FROM generate_series(1, %s)", (key, random.randrange(3)))
                    cursor.execute("SELECT idem_publish('orders', '{}', %s)", (str(i),))
                    cursor.execute("SELECT idem_try_advance('u', 'post', %s, %s), idem_try_advance('u', 'post', %s, 1)", (str(i), step, str(i)))
                    cursor.execute("SELECT idem_try_append('cart', 'c', %s), idem_once('form', %s, ttl => '2 s')", (step, key))
                if step % 10 == 0:
                    cursor.execute('SELECT idem_cleanup()')
                    # As autovacuum would, if it came more often.
                    for table in ('action_versions', 'client_sequences', 'aggregates', 'tokens', 'outbox', 'keys'):
                        cursor.execute('VACUUM idem_' + table)
            time.sleep(random.uniform(0.1, 0.6))

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self.admin is not None:
            self.admin.close()
        shutil.rmtree(self.directory, ignore_errors=True)
