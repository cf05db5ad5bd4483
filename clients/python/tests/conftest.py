"""A database of the tests' own, on the server that PGHOST and PGPORT name."""

import asyncio
import os
import time

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pg_idempotency import AsyncIdempotency, Idempotency

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


class _SlowCancel:
    """A driver's connection.  The handler's transaction is rolled back before cancel() returns."""

    def __init__(self, driver):
        self._driver, self.fileno = driver, driver.fileno

    @property
    def closed(self):
        return self._driver.closed

    def cancel(self):
        self._driver.cancel()
        time.sleep(0.5)


@pytest.fixture
def slow_cancel(monkeypatch):
    """Make abort() of a class of sessions close the link after the transaction has ended."""
    def slow(session_class):
        driver_of, slowed = session_class._driver, {}

        def driver(session):
            found = driver_of(session)
            return found and slowed.setdefault(id(found), _SlowCancel(found))
        monkeypatch.setattr(session_class, "_driver", driver)
    return slow
