"""Named statements: where no pooler is in between, and only as long as the session has them."""

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pg_idempotency import AsyncIdempotency, Idempotency, Response, new_key


@pytest.fixture
def one(database):
    """A client with one connection, and that connection."""
    with ConnectionPool("", min_size=1, max_size=1) as pool:
        with pool.connection() as connection:
            pass
        yield Idempotency(pool), connection


def names(connection):
    connection.autocommit = True
    try:
        return {text.split("idem_")[2].split("(")[0] for text, in
                connection.execute("SELECT statement FROM pg_prepared_statements WHERE name LIKE 'idem%'")}
    finally:
        connection.autocommit = False


def order(name):
    def handler(tx):
        tx.execute("INSERT INTO effects VALUES (%s)", (name,))
        return Response(200, name)
    return handler


def test_the_second_use_prepares(one):
    idem, connection = one
    for expected in set(), {"claim", "complete"}:
        key = new_key()
        idem.request("u", key, order(key))
        assert names(connection) == expected
    for _ in range(8):                                      # with custom plans, and with a generic one
        key = new_key()
        assert [idem.request("u", key, order(key)).replayed for _ in range(2)] == [False, True]
        assert idem.once("prepared", key) and not idem.once("prepared", key)
        assert idem.once_many("prepared", ["a\\' %s", key]) in (["a\\' %s"], [])
        assert idem.stats()
    assert names(connection) == {"complete", "claim", "once", "once_many", "stats WHERE datname = current_database"}


def test_no_statement_keeps_the_text_of_a_request(one):
    idem, connection = one
    for _ in range(3):
        idem.request("u", "a-key-that-is-secret", lambda tx: Response(200, "secret"))
        idem.forget("u", "a-key-that-is-secret")
    connection.autocommit = True
    assert connection.execute("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%secret%'").fetchone() == (0,)


@pytest.mark.parametrize("lost", ["DISCARD ALL", "DEALLOCATE ALL"])
def test_a_session_that_has_lost_them(one, effects, lost):
    idem, connection = one
    for _ in range(3):
        idem.once("prepared", new_key())
        idem.request("u", new_key(), order("any"))
    connection.autocommit = True
    connection.execute(lost)
    connection.autocommit = False
    key = new_key()
    assert idem.once("prepared", key) and idem.request("u", key, order(key)).outcome == "new" and effects(key) == 1
    assert not names(connection)                            # this connection does without them


def test_a_handler_that_deallocates_runs_again(one, effects):
    idem, connection = one
    for _ in range(3):
        idem.request("u", new_key(), order("any"))
    key, runs = new_key(), []

    def handler(tx):
        runs.append(1)
        tx.execute("DEALLOCATE ALL")
        return order(key)(tx)

    assert idem.request("u", key, handler).outcome == "new" and len(runs) == 2 and effects(key) == 1


def test_an_error_of_the_handlers_own_statement_does_not_run_it_again(one):
    idem, _ = one
    runs = []

    def handler(tx):
        runs.append(1)
        tx.execute("EXECUTE nothing")

    for count in range(1, 4):
        with pytest.raises(psycopg.errors.InvalidSqlStatementName):
            idem.request("u", new_key(), handler)
        assert len(runs) == count


def test_psycopg_deallocates_all_after_a_rollback(one, effects):
    """Ours, too: neither a claim nor a handler runs into that."""
    idem, connection = one
    runs, seen = [], "SELECT %s::int"

    def handler(tx):
        runs.append(1)
        for number in range(8):                             # psycopg prepares it
            tx.execute(seen, (number,))
        with pytest.raises(ZeroDivisionError), tx.transaction():
            raise ZeroDivisionError
        return order(key)(tx)

    for count in range(1, 5):
        key = new_key()
        idem.request("u", key, handler)
        assert len(runs) == count and effects(key) == 1
        connection.execute(seen, (1,))
        connection.rollback()
    for _ in range(2):
        idem.request("u", new_key(), order("any"))
    assert names(connection) == {"claim", "complete"}       # again


def test_functions_that_have_changed(one, database):
    """As after ALTER EXTENSION ... UPDATE: the plan does not fit any more."""
    idem, connection = one
    for _ in range(3):
        idem.once("prepared", new_key())
    with psycopg.connect("", autocommit=True) as other:
        call = "CREATE {} FUNCTION changed.idem_once(scope text, token text, ttl interval) RETURNS {} LANGUAGE sql AS 'SELECT {}'"
        other.execute("CREATE SCHEMA changed")
        other.execute(call.format("", "boolean", "true"))
        changed = Idempotency(idem.core.servers.source, schema="changed")
        assert [changed.once("s", "t") for _ in range(3)] == [True] * 3
        other.execute("DROP FUNCTION changed.idem_once")
        other.execute(call.format("", "int", "7"))
    assert changed.once("s", "t") == 7 and not names(connection) - {"once"}


@pytest.mark.parametrize("way", ["another process", "no threshold"])
def test_no_names_behind_a_pooler(one, way, monkeypatch):
    idem, connection = one
    if way == "another process":
        from pg_idempotency import prepared

        monkeypatch.setattr(prepared, "ASK", "")
        monkeypatch.setattr("pg_idempotency.postgres.ASK", "SELECT 1")
    else:
        connection.prepare_threshold = None
    for _ in range(3):
        assert idem.once("prepared", new_key())
    assert not names(connection)


def test_asynchronously(database, effects):
    import asyncio

    async def run():
        async with AsyncConnectionPool("", min_size=1, max_size=1, open=False) as pool:
            idem = AsyncIdempotency(pool)

            async def handler(tx):
                await tx.execute("INSERT INTO effects VALUES (%s)", (key,))
                return Response(200)

            for _ in range(3):
                key = new_key()
                assert [(await idem.request("u", key, handler)).replayed for _ in range(2)] == [False, True]
            async with pool.connection() as connection:
                await connection.set_autocommit(True)
                await connection.execute("DISCARD ALL")
                await connection.set_autocommit(False)
            key = new_key()
            assert [(await idem.request("u", key, handler)).replayed for _ in range(2)] == [False, True] and effects(key) == 1

    asyncio.run(run())
