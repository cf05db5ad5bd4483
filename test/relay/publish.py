# Publishes the lines that it reads, each with a topic, a tab and a payload, and
# writes a line when the broker has confirmed a message.
#
#	publish.py URL

import sys

import pika

channel = pika.BlockingConnection(pika.URLParameters(sys.argv[1])).channel()
channel.confirm_delivery()
persistent = pika.BasicProperties(delivery_mode=2)
for line in sys.stdin:
    topic, payload = line.rstrip('\n').split('\t', 1)
    channel.basic_publish('', topic, payload, persistent, mandatory=True)
    print('confirmed', flush=True)
