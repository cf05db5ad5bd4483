"""A database of the tests' own, on the server that PGHOST and PGPORT name."""

import asyncio
import os
import time

import psycopg
import pytest
from proxy import Proxy
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pg_idempotency import AsyncIdempotency, Idempotency, Response, TimedOut, new_key, postgres

NAME = f"python_{os.getpid()}"


@pytest.fixture(scope="session")
def database():
    with psycopg.connect("", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {NAME}")
        before, os.environ["PGDATABASE"] = os.environ.get("PGDATABASE", ""), NAME
        with psycopg.connect("", autocommit=True) as inside:
            inside.execute("CREATE SCHEMA idem")
            inside.execute("CREATE EXTENSION idempotency SCHEMA idem")
            inside.execute(f"ALTER DATABASE {NAME} SET search_path = public, idem")
            inside.execute("CREATE TABLE effects (name text)")
            inside.execute("CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, sku text, charge text)")
        yield NAME
        os.environ["PGDATABASE"] = before
        connection.execute(f"DROP DATABASE {NAME} WITH (FORCE)")


@pytest.fixture(scope="session")
def pool(database):
    with ConnectionPool("", min_size=1, max_size=10) as pool:
        yield pool


@pytest.fixture
def idem(pool):
    return Idempotency(pool)


@pytest.fixture
def effects(database):
    """How often an effect is there."""
    def count(name):
        with psycopg.connect("") as connection:
            return connection.execute("SELECT count(*) FROM effects WHERE name = %s", (name,)).fetchone()[0]
    return count


@pytest.fixture
def asynchronously(database):
    """Run a coroutine function with an AsyncIdempotency and its pool."""
    def run(test, **options):
        async def main():
            async with AsyncConnectionPool("", min_size=1, max_size=10, open=False) as pool:
                return await test(AsyncIdempotency(pool, **options), pool)
        return asyncio.run(asyncio.wait_for(main(), 60))
    return run


SILENCES = {"statement": b"SELECT 77", "commit": b"idem_complete", "rollback": b"ROLLBACK"}
"""Where a server falls silent, and the text at which the proxy does."""


@pytest.fixture(params=SILENCES)
def silent_server(request, monkeypatch):
    """A proxy, and a place where the server will fall silent once fall_silent() is called; the limits are short."""
    monkeypatch.setattr("pg_idempotency.core.ANSWER_LIMIT", 2)
    monkeypatch.setattr("pg_idempotency.runtimes.ABORT_DELAY", 0.5)
    monkeypatch.setattr("pg_idempotency.postgres.CANCEL_LIMIT", 0.5)
    monkeypatch.setattr("pg_idempotency.postgres.ROLLBACK_LIMIT", 0.5)
    proxy, silences = Proxy(), [SILENCES[request.param]]

    def fall_silent():
        if silences:                            # a client whose COMMIT has no answer claims again, on a new connection
            proxy.silence, proxy.all_silent = silences.pop(), request.param != "commit"
    yield proxy, request.param, fall_silent
    proxy.close()


@pytest.fixture
def serves_beside_silence(effects, silent_server):
    """Check that a request ends although the server falls silent, and that the next one tells what became of it.

    work(tx, key) writes the effect, and continue_ is its second statement, which can be the one without an answer."""
    proxy, place, fall_silent = silent_server

    def check(idem, work, continue_):
        key = new_key()

        def handler(tx):
            work(tx, key)
            fall_silent()
            if place == "statement":
                continue_(tx)
            return Response(503 if place == "rollback" else 201)

        began = time.monotonic()
        try:
            result = idem.request("u", key, handler, timeout="20 s" if place == "commit" else "1 s")
            assert (result.status, result.stored) == ((503, False) if place == "rollback" else (201, True))
        except TimedOut:
            assert place == "statement"
        assert time.monotonic() - began < 20
        proxy.all_silent = False
        assert idem.request("u", key, lambda tx: Response(), wait="20 s").replayed == (place == "commit")
        assert effects(key) == (place == "commit")
    return check


@pytest.fixture
def slow_cancel(monkeypatch):
    """Make abort() close the link after the handler's transaction has ended."""
    cancel = postgres.cancel_statement

    async def slowly(connection):
        await cancel(connection)
        time.sleep(0.5)
    monkeypatch.setattr(postgres, "cancel_statement", slowly)
