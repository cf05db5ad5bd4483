# An application that completes requests with their claim tokens: the effect and
# idem_complete() are one transaction.
#
#	application.py PORT

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg2


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        connection = psycopg2.connect('')
        try:
            with connection, connection.cursor() as cursor:
                key = self.headers['Idempotency-Key'].strip('"')
                cursor.execute('INSERT INTO effects (key, n) VALUES (%s, %s)', (key, request['n']))
                cursor.execute('SELECT pg_sleep(%s)', (request.get('sleep', 0.02),))
                cursor.execute('SELECT idem_complete(%s, %s, 201, %s, claim_token => %s)', (
                    self.headers['Idempotency-Scope'], key, 'done', self.headers['Idempotency-Claim-Token']))
                # A proxy might have sent the same request again.
                if not cursor.fetchone()[0]:
                    connection.rollback()
            status = 200
        except psycopg2.Error:
            status = 409
        finally:
            connection.close()
        self.send_response(status)
        self.send_header('Content-Length', '0')
        self.end_headers()

    def log_message(self, *arguments):
        pass


ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
