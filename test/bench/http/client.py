#!/usr/bin/python3
#
# test/bench/http/client.py ours|driver SECONDS
#
# Calls a second, one at a time, of idem.request() with an INSERT and a new key, or of
# BEGIN, INSERT and COMMIT of the driver alone.

import sys
import time

from psycopg_pool import ConnectionPool

from pg_idempotency import Idempotency, Response, new_key

WARM_UP = 2000
INSERT = "INSERT INTO client_orders (sku) VALUES ('teapot') RETURNING id"

side, seconds = sys.argv[1], float(sys.argv[2])
with ConnectionPool('', min_size=1, max_size=1) as pool:
    with pool.connection() as connection:
        connection.execute('CREATE TABLE IF NOT EXISTS client_orders (id bigint GENERATED ALWAYS AS IDENTITY, sku text)')
    idem = Idempotency(pool, schema='public')

    def place(tx):
        return Response.json({'order': tx.execute(INSERT).fetchone()[0]}, 201)

    def ours():
        idem.request('alice', new_key(), place, method='POST', path='/orders', body=b'{"sku": "teapot"}')

    def driver():
        with pool.connection() as connection:
            connection.execute(INSERT).fetchone()

    call = {'ours': ours, 'driver': driver}[side]
    for _ in range(WARM_UP):
        call()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        call()
        calls += 1
    print('%.0f' % (calls / (time.perf_counter() - began)))
