"""Requests and responses, byte for byte."""

import os
import time

import wire
from world import Exchange, blob, new_key, payment, post, promise


def round_trip(world, data):
    key = new_key()
    with world.adds(blobs=1):
        first = world.ask(blob(key, data)).is_first(200)
        first.unless(first.answer.body == data[::-1], 'the bytes, reversed')
        world.ask(blob(key, data)).replays(first)


@promise('any bytes are replayed as they were')
def any_bytes(world):
    for data in (bytes(range(256)), b'\0', b'\xff\xfe\0\r\n\r\n', 'žlutý kůň'.encode(), os.urandom(10000)):
        round_trip(world, data)


@promise('an empty body is one, too')
def empty(world):
    round_trip(world, b'')


@promise('a body of 1 MB is replayed byte for byte')
def megabyte(world):
    round_trip(world, os.urandom(1 << 20))


@promise('numbers beyond 2^53 are compared by their digits: two requests under one key')
def large_numbers(world):
    for one, other in (('9007199254740993', '9007199254740992'),
                       ('9223372036854775807', '9223372036854775806'),
                       ('0.1000000000000000055', '0.1')):
        key = new_key()
        body = '{"amount": 7, "currency": "EUR", "note": %s}'
        with world.adds(payments=1):
            first = world.ask(post('/payments', body % one, key)).is_first(201)
            world.ask(post('/payments', body % other, key)).is_problem(422, 'key-reused')
            world.ask(post('/payments', body % one, key)).replays(first)


@promise('JSON with other spaces, another order of members or another form of a number is the same request', needs='ours')
def canonical_form(world):
    key = new_key()
    with world.adds(payments=1):
        first = world.ask(post('/payments', '{"amount": 7, "currency": "EUR", "note": [1.0, "a"]}', key)).is_first(201)
        for body in ('{"currency":"EUR","amount":7,"note":[1,"a"]}', ' {"note": [1e0, "\\u0061"], "amount": 7,\n"currency": "EUR"}'):
            world.ask(post('/payments', body, key)).replays(first)
        world.ask(post('/payments', '{"amount": 7, "currency": "EUR", "note": [1.5, "a"]}', key)).is_problem(422, 'key-reused')


@promise('binary bodies that differ in one bit are two requests')
def one_bit(world):
    key = new_key()
    data = os.urandom(1000)
    with world.adds(blobs=1):
        first = world.ask(blob(key, data)).is_first(200)
        world.ask(blob(key, data[:-1] + bytes([data[-1] ^ 1]))).is_problem(422, 'key-reused')
        world.ask(blob(key, data)).replays(first)


@promise('a body is the same whether it comes whole or in small pieces')
def in_pieces(world):
    key = new_key()
    request = payment(key)
    first = world.ask(request).is_first(201)
    with world.adds(), wire.Connection(world.shop.port) as connection:
        data = request.bytes()
        for at in range(0, len(data), 7):
            connection.send(data[at:at + 7])
            time.sleep(0.001)
        Exchange(request, connection.answer()).replays(first)
