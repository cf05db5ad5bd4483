#!/usr/bin/python3
"""The shop as it is written before something has gone wrong: it looks whether
the key is there, and writes afterwards.  The control of the suite: promises
that this one keeps are no test of idempotency."""

from skeleton import Bad, Reply, Shop, json_reply, serve


class Naive(Shop):
    def __init__(self):
        super().__init__()
        self.answers = {}

    def once(self, request, handler, required=True):
        key = (request.headers.get('Idempotency-Key') or '').strip('"')
        if not key and required:
            raise Bad('Idempotency-Key is missing')
        if key and key in self.answers:
            return self.answers[key]
        with self.pool.connection() as connection:
            reply = handler(connection, key)
        if key:
            self.answers[key] = reply
        return reply

    def payments(self, request):
        return self.once(request, lambda connection, key: self.pay(request, key, connection))

    def blobs(self, request):
        return self.once(request, lambda connection, key: self.reverse(request, connection), False)

    def streams(self, request):
        return self.once(request, lambda connection, key: self.reverse(request, connection))

    def jobs(self, request):
        ms, = request.json(ms=int)

        def handler(connection, key):
            self.bank(key, ms)
            return json_reply(200, {'id': key, 'attempt': 1})
        return self.once(request, handler)

    def like(self, request):
        active, action_id = request.json(active=bool, action_id=int)
        return json_reply(200, {'is_active': active, 'last_action_id': action_id, 'processed': True})

    def submit(self, request):
        with self.pool.connection() as connection:
            token = self.token(request, connection)
            if not connection.execute('SELECT 1 FROM submissions WHERE token = %s', (token,)).fetchone():
                connection.execute('INSERT INTO submissions VALUES (%s, %s)', (token, request.user))
        return Reply(303, headers=[('Location', '/thanks')])


if __name__ == '__main__':
    serve(Naive())
