#!/usr/bin/python3
"""The shop as it is written before something has gone wrong: it looks whether
there is an answer to the key, and keeps one afterwards, in its memory.  All is
well as long as nothing happens at the same time and nobody dies.  A control of
the suite; see test/http/control."""

import json
import time

from plain import KEPT_HEADERS, Plain, key_of, problem
from skeleton import Refused, Reply, json_reply, serve


class Naive(Plain):
    def __init__(self):
        super().__init__()
        self.answers = {}

    def once(self, request, key, handler):
        if key is not None and not 16 <= len(key) <= 128:
            raise Refused(problem('key-invalid'))
        name = request.user, key
        try:
            wanted = request.method, request.target, json.loads(request.body, parse_int=float)
        except ValueError:
            wanted = request.method, request.target, request.body
        if key is not None and name in self.answers:
            first, reply = self.answers[name]
            if first != wanted:
                raise Refused(problem('key-reused'))
            kept = [header for header in reply.headers if header[0].lower() in KEPT_HEADERS]
            return Reply(reply.status, reply.body, None, kept + [('Idempotent-Replayed', 'true')])
        # Makes sure that duplicates are concurrent here on any machine.
        if key is not None:
            time.sleep(0.1)
        with self.pool.connection() as connection:
            reply = handler(connection)
        self.answers[name] = wanted, reply
        return reply

    def jobs(self, request):
        key = key_of(request)
        ms, = request.json(ms=int)

        def handler(connection):
            self.bank(key, ms)
            return json_reply(200, {'id': key, 'attempt': 1})
        return self.once(request, key, handler)

    def like(self, request):
        active, action_id = request.json(active=bool, action_id=int)
        with self.pool.connection() as connection:
            connection.execute("""SELECT idem_set(%s::text, 'item', %s::text, 'like', %s::boolean,
                (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)""",
                               (request.user, request.path.split('/')[2], active))
        return json_reply(200, {'is_active': active, 'last_action_id': action_id, 'processed': True})


if __name__ == '__main__':
    serve(Naive())
