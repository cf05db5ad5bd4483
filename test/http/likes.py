"""PUT /likes/:item: intents in any order."""

import itertools
import json

import wire
from world import Exchange, new_key, promise


def like(item, active, action_id, user='alice'):
    return wire.Request('PUT', '/likes/' + item, [('X-User', user), ('Content-Type', 'application/json')],
                        json.dumps({'active': active, 'action_id': action_id}).encode())


def answers(exchange, active, last, processed):
    exchange.is_(200)
    return exchange.unless(exchange.answer.json() == {'is_active': active, 'last_action_id': last,
                                                      'processed': processed},
                           'is_active %s, last_action_id %d, processed %s' % (active, last, processed))


@promise('a like is set, taken back, and repeated without harm')
def sequence(world):
    item = new_key()
    with world.adds(likes=1):
        answers(world.ask(like(item, True, 10)), True, 10, True)
        answers(world.ask(like(item, True, 10)), True, 10, False)
        answers(world.ask(like(item, False, 20)), False, 20, True)
        answers(world.ask(like(item, True, 15)), False, 20, False)
        answers(world.ask(like(item, True, 30)), True, 30, True)
        answers(world.ask(like(item, False, 5)), True, 30, False)


@promise('likes end as the last intent wanted, in whatever order they arrive')
def any_order(world):
    for last in (True, False):
        orders = list(itertools.permutations(range(1, 5)))
        with world.adds(likes=len(orders) if last else 0):
            for order in orders:
                item = new_key()
                seen = 0
                for tap in order:
                    # Four taps that alternate; the last one is what the user wants.
                    active = last if tap % 2 == 0 else not last
                    shown = active if tap > seen else last if seen % 2 == 0 else not last
                    answers(world.ask(like(item, active, tap)), shown, max(seen, tap), tap > seen)
                    seen = max(seen, tap)


@promise('likes at once, each sent twice: one state, that of the highest id')
def at_once(world):
    item = new_key()
    with world.adds(likes=1):
        connections = []
        for tap in list(range(1, 42)) * 2:
            connection = wire.Connection(world.shop.port)
            request = like(item, tap % 2 == 1, tap)
            connection.send(request.bytes())
            connections.append((request, connection))
        for request, connection in connections:
            with connection:
                Exchange(request, connection.answer()).is_(200)
        answers(world.ask(like(item, False, 1)), True, 41, False)


@promise('users do not share likes')
def users(world):
    item = new_key()
    with world.adds(likes=1):
        answers(world.ask(like(item, True, 10, 'alice')), True, 10, True)
        answers(world.ask(like(item, False, 5, 'bob')), False, 5, True)


@promise('an action id too far ahead: 400, and no effect', needs='database', why='the lead is a setting of the server')
def ahead(world):
    with world.settings(max_action_id_lead='1min'), world.open() as shop:
        with world.adds(shop):
            world.ask(like(new_key(), True, 99999999999999), shop).is_(400)
