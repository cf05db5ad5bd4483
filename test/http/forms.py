"""The form with a token."""

import html
import re
import urllib.parse

import wire
from world import Broken, get, new_key, promise


def token_of(world, user='alice'):
    page = world.ask(get('/form', user)).is_(200)
    page.unless((page.answer.one('Content-Type') or '').startswith('text/html'), 'a page')
    found = re.search(r'<input type="hidden" name="token" value="([^"]+)">', page.answer.body.decode())
    page.unless(found, 'a hidden field token')
    return html.unescape(found[1])


def submit(token, user='alice'):
    body = urllib.parse.urlencode({'token': token} if token is not None else {'name': 'x'})
    return wire.Request('POST', '/form', [('X-User', user), ('Content-Type', 'application/x-www-form-urlencoded')],
                        body.encode())


@promise('a form has its effect once, and each time it is sent the same answer')
def form_once(world):
    tokens = [token_of(world) for _ in range(3)]
    if len(set(tokens)) != 3:
        raise Broken('expected a new token in each page')
    with world.adds(submissions=3):
        for token in tokens * 3:
            sent = world.ask(submit(token)).is_(303)
            sent.unless(sent.answer.one('Location') == '/thanks', 'Location: /thanks')


@promise('a form that is clicked forty times at once has its effect once')
def form_at_once(world):
    token = token_of(world)
    with world.adds(submissions=1):
        connections = []
        for _ in range(40):
            connection = wire.Connection(world.shop.port)
            connection.send(submit(token).bytes())
            connections.append(connection)
        for connection in connections:
            with connection:
                answer = connection.answer()
                if answer.status != 303:
                    raise Broken('expected 303\n%s' % answer)


@promise('a form without a token, or with one that was not handed out to this user: 400')
def form_unknown(world):
    token = token_of(world, 'bob')
    with world.adds():
        for request in (submit(None), submit(''), submit(new_key()), submit(token, 'alice')):
            world.ask(request).is_(400)
    with world.adds(submissions=1):
        world.ask(submit(token, 'bob')).is_(303)
