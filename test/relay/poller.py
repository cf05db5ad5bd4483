# A typical poller of an outbox: one process that polls with FOR UPDATE SKIP LOCKED,
# publishes with confirms, and deletes.
#
#	poller.py URL SECONDS

import sys
import time

import pika
import psycopg2

url, pause = sys.argv[1], float(sys.argv[2])
channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
channel.confirm_delivery()
database = psycopg2.connect('')
persistent = pika.BasicProperties(delivery_mode=2)
while True:
    with database, database.cursor() as cursor:
        cursor.execute('SELECT id, topic, payload::text FROM poller_outbox ORDER BY id LIMIT 100 '
                       'FOR UPDATE SKIP LOCKED')
        rows = cursor.fetchall()
        for _, topic, payload in rows:
            channel.basic_publish('', topic, payload, persistent, mandatory=True)
        if rows:
            cursor.execute('DELETE FROM poller_outbox WHERE id = ANY (%s)', ([row[0] for row in rows],))
    if not rows:
        time.sleep(pause)
