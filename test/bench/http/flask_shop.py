"""POST /payments in Flask: ours, the handler alone, or with claim and completion written by hand."""

import json
import os

from flask import Flask, g, request
from psycopg_pool import ConnectionPool
from werkzeug.serving import WSGIRequestHandler, make_server

pool = ConnectionPool(os.environ['DATABASE_URL'], min_size=10, max_size=10, open=True)
app = Flask(__name__)
CLAIM = "SELECT outcome FROM idem_claim('alice', %s, idem_request_hash('POST', '/payments', %s))"
COMPLETE = "SELECT idem_complete('alice', %s, 201, %s::text, '{\"Content-Type\": \"application/json\"}')"


def pay(connection):
    payment = request.get_json()
    identifier, = connection.execute("INSERT INTO payments (owner, amount, currency) VALUES ('alice', %s, %s) "
                                     "RETURNING id", (payment['amount'], payment['currency'])).fetchone()
    return {'id': identifier, **payment}, 201, {'Location': '/payments/%d' % identifier}


if os.environ['SIDE'] == 'ours':
    from pg_idempotency import Idempotency
    from pg_idempotency.flask import Guard, install

    @app.post('/payments')
    @Guard(scope=lambda request: 'alice')
    def guarded():
        return pay(g.idempotency.tx)

    install(app, Idempotency(pool, schema='public'))
elif os.environ['SIDE'] == 'by_hand':
    @app.post('/payments')
    def by_hand():
        with pool.connection() as connection:
            key = json.loads(request.headers['Idempotency-Key'])
            outcome, = connection.execute(CLAIM, (key, request.get_data(as_text=True))).fetchone()
            assert outcome == 'new'
            response = pay(connection)
            connection.execute(COMPLETE, (key, json.dumps(response[0])))
        return response
else:
    @app.post('/payments')
    def alone():
        with pool.connection() as connection:
            return pay(connection)


class Handler(WSGIRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log(self, *_):
        pass


server = make_server('127.0.0.1', 0, app, threaded=True, request_handler=Handler)
print('listening on', server.server_port, flush=True)
server.serve_forever()
