# All at once: relays are killed, the broker too, the database crashes; the
# consumer applies each message once, in the order of its key.

import contextlib
import os
import random
import threading
import time

import amqp
import pika
import psycopg2
from world import Broken, equal, expect, until

SIZE = int(os.environ.get('SIZE', '5000'))
KEYS = int(os.environ.get('KEYS', '100'))
KILLS = int(os.environ.get('KILLS', '20'))
STOPS = int(os.environ.get('STOPS', '2'))
CRASHES = int(os.environ.get('CRASHES', '2'))
SEED = int(os.environ.get('SEED', '1'))

SCHEMA = '''
CREATE TABLE applied (seq bigserial PRIMARY KEY, key text NOT NULL, n int NOT NULL);
CREATE TABLE published (key text NOT NULL, n int NOT NULL);
'''


class Background(threading.Thread):
    """Does a step over and over, over connections that may be lost."""

    def __init__(self):
        super().__init__(daemon=True)
        self.ending = threading.Event()
        self.failed = None
        self.start()

    def run(self):
        while not self.ending.is_set():
            try:
                self.work()
            except (psycopg2.Error, pika.exceptions.AMQPError, OSError):
                time.sleep(0.1)
            except Exception as error:          # told by check()
                self.failed = error
                return

    def check(self):
        if self.failed:
            raise self.failed

    def end(self):
        self.ending.set()
        self.join(30)
        self.check()


class Publisher(Background):
    """Messages numbered from 0 in each key, in transactions of several."""

    def __init__(self):
        self.done = 0
        self.random = random.Random(SEED)
        super().__init__()

    def work(self):
        connection = psycopg2.connect('')
        while self.done < SIZE and not self.ending.is_set():
            with connection, connection.cursor() as cursor:
                # What a commit that was cut off has done, it has done.
                cursor.execute('SELECT count(*) FROM published')
                self.done = cursor.fetchone()[0]
                key = 'k%d' % self.random.randrange(KEYS)
                many = min(self.random.randrange(1, 20), SIZE - self.done)
                if many <= 0:
                    break
                cursor.execute('SELECT count(*) FROM published WHERE key = %s', (key,))
                first = cursor.fetchone()[0]
                for n in range(first, first + many):
                    cursor.execute("SELECT idem_publish('faults', jsonb_build_object('n', %s), %s)", (n, key))
                    cursor.execute('INSERT INTO published VALUES (%s, %s)', (key, n))
            self.done += many
        connection.close()
        if self.done >= SIZE:
            self.ending.set()


class Consumer(Background):
    """Applies a message once, and confirms it after that."""

    def __init__(self):
        self.repeated = 0
        super().__init__()

    def work(self):
        # What an open connection has not confirmed, nobody else gets.
        with contextlib.closing(psycopg2.connect('')) as database:
            connection, channel = amqp.broker.channel()
            try:
                self.consume(database, channel)
            finally:
                if connection.is_open:
                    connection.close()

    def consume(self, database, channel):
        channel.queue_declare('faults', durable=True)
        channel.basic_qos(prefetch_count=50)
        for method, properties, body in channel.consume('faults', inactivity_timeout=0.2):
            if self.ending.is_set():
                break
            if method is None:
                continue
            with database, database.cursor() as cursor:
                cursor.execute("SELECT idem_once('faults', %s)", (properties.message_id,))
                if cursor.fetchone()[0]:
                    cursor.execute("INSERT INTO applied (key, n) VALUES (%s, (%s::jsonb ->> 'n')::int)",
                                   (properties.headers['message_key'], body.decode()))
                else:
                    self.repeated += 1
            channel.basic_ack(method.delivery_tag)


def everything_breaks(world):
    amqp.start(world)
    connection, channel = amqp.broker.channel()
    channel.queue_declare('faults', durable=True)
    connection.close()
    world.query('DROP TABLE IF EXISTS published')
    world.query(SCHEMA)
    chance = random.Random(SEED)
    faults = ['kill'] * KILLS + ['stop'] * STOPS + ['crash'] * CRASHES
    chance.shuffle(faults)

    def start():
        return amqp.relay(world, '--lease=3s', '--wait=1s', '--batch=50', '--r.timeout=5s')

    def progress():
        return world.query('SELECT count(*) FROM applied')[0][0]

    publisher, consumer = Publisher(), Consumer()
    relays = [start(), start()]
    began = time.monotonic()
    for number, fault in enumerate(faults):
        # Spread over the messages, as far as they have come.
        goal = SIZE * (number + 1) // (len(faults) + 2)
        patience = time.monotonic() + 3
        while progress() < goal and time.monotonic() < patience:
            time.sleep(0.05)
        publisher.check()
        consumer.check()
        if fault == 'kill':
            victim = chance.randrange(2)
            relays[victim].kill()
            # Whoever restarts it may have to wait for the broker.
            relays[victim] = start()
        elif fault == 'stop':
            amqp.broker.stop()
            time.sleep(chance.random() * 2)
            amqp.broker.start()
        else:
            world.crash_database()
        if (number + 1) % 25 == 0:
            print('# %d of %d faults, %d of %d messages applied, %.0f s' % (
                number + 1, len(faults), progress(), SIZE, time.monotonic() - began), flush=True)
    until('all are published', lambda: not publisher.is_alive(), 120)
    publisher.check()
    last, at = -1, time.monotonic()
    while True:
        count = progress()
        if count >= SIZE and world.states() == {'acked': SIZE}:
            break
        if count > last:
            last, at = count, time.monotonic()
        if time.monotonic() - at > 90:
            raise Broken('nothing more arrives: %d of %d applied, outbox %s, %s' % (
                count, SIZE, world.states(), world.query(
                    "SELECT last_error, count(*) FROM idem_outbox WHERE state <> 'acked' GROUP BY 1")))
        consumer.check()
        time.sleep(0.2)
    consumer.end()
    for relay in relays:
        equal('the status', relay.stop(), 0)
    equal('messages of each key out of order', world.query(
        'SELECT key, n, before FROM (SELECT key, n, lag(n, 1, -1) OVER (PARTITION BY key ORDER BY seq) AS before '
        'FROM applied) AS a WHERE n <> before + 1 LIMIT 10'), [])
    equal('applied', progress(), SIZE)
    equal('lost', world.query('SELECT * FROM published EXCEPT SELECT key, n FROM applied LIMIT 10'), [])
    expect('nothing was ever repeated, so nothing was tried', KILLS < 10 or consumer.repeated > 0)
    print('# %d messages of %d keys, %d kills, %d stops, %d crashes: each applied once, in order; %d came again; '
          '%.0f s' % (SIZE, KEYS, KILLS, STOPS, CRASHES, consumer.repeated, time.monotonic() - began), flush=True)


TESTS = [('relays are killed, the broker too, the database crashes', everything_breaks)]
