"""transaction(): a connection of the client's pool, for what has no key."""

import contextvars

import pytest
from psycopg_pool import ConnectionPool

from pg_idempotency import Idempotency, Response, TransactionEnded, handlers, new_key
from pg_idempotency.memory import MemoryIdempotency


def write(tx, key):
    return tx.execute("INSERT INTO effects VALUES (%s)", (key,))


def test_it_commits_or_rolls_back(idem, effects):
    done, undone = new_key(), new_key()
    with idem.transaction() as tx:
        assert idem.on(tx).once("transactions", done)
        write(tx, done)
    with pytest.raises(ZeroDivisionError), idem.transaction("any-scope") as tx:
        assert idem.on(tx).once("transactions", undone)
        write(tx, undone)
        1 / 0
    assert (effects(done), effects(undone)) == (1, 0)
    assert not idem.once("transactions", done) and idem.once("transactions", undone)


def test_it_commits_or_rolls_back_asynchronously(asynchronously, effects):
    done, undone = new_key(), new_key()

    async def test(idem, pool):
        async with idem.transaction() as tx:
            await write(tx, done)
        with pytest.raises(ZeroDivisionError):
            async with idem.transaction() as tx:
                await write(tx, undone)
                1 / 0

    asynchronously(test)
    assert (effects(done), effects(undone)) == (1, 0)


def test_it_may_end_in_another_context(idem, effects):
    """Generators of frameworks and fixtures are run so."""
    def generator():
        with idem.transaction() as tx:
            yield tx

    key, held, found = new_key(), generator(), []
    contextvars.copy_context().run(lambda: found.append(next(held)))
    write(found[0], key)
    contextvars.copy_context().run(lambda: next(held, None))
    assert effects(key) == 1
    assert idem.once("transactions", new_key())


def test_what_is_over_is_not_kept(idem):
    ones = [idem.transaction() for _ in range(2)]

    def interleaved():
        for _ in range(50):
            for one, end in ((0, False), (1, False), (0, True), (1, True)):
                if end:
                    ones[one].__exit__(None, None, None)
                    ones[one] = others[one].transaction()
                else:
                    ones[one].__enter__()
        depth, inner = 0, handlers._current_handler.get()
        while inner is not None:
            depth, inner = depth + 1, inner.outer
        return depth

    with ConnectionPool("", min_size=1) as pool:
        others = idem, Idempotency(pool)
        ones[1] = others[1].transaction()
        assert contextvars.copy_context().run(interleaved) <= 2


def test_no_second_connection_within(pool, effects):
    """Of a pool of one that would wait for itself for ever."""
    idem = Idempotency(pool)
    with idem.transaction():
        for call in (lambda: idem.once("a", "b"), lambda: idem.request("u", new_key(), lambda tx: Response()),
                     lambda: idem.transaction().__enter__()):
            with pytest.raises(RuntimeError, match="second connection"):
                call()
    assert idem.once("transactions", new_key())

    def nested(tx):
        with idem.transaction():
            return Response()

    with pytest.raises(RuntimeError, match="second connection"):
        idem.request("u", new_key(), nested)


@pytest.mark.parametrize("ends", [lambda tx: tx.execute("ROLLBACK"), lambda tx: tx.execute("COMMIT")])
def test_ended_by_hand(idem, ends):
    with pytest.raises(TransactionEnded), idem.transaction() as tx:
        ends(tx)


def test_an_error_that_is_swallowed_is_no_success(idem, effects):
    key = new_key()
    with pytest.raises(TransactionEnded), idem.transaction() as tx:
        write(tx, key)
        try:
            tx.execute("SELECT 1 / 0")
        except Exception:
            pass
    assert effects(key) == 0


def test_the_handle_is_over_with_it(idem):
    with idem.transaction() as tx:
        pass
    with pytest.raises(TransactionEnded):
        tx.execute("SELECT 1")


def test_the_double_takes_a_scope_too():
    double = MemoryIdempotency()
    with double.transaction("customer-7") as tx:
        assert double.on(tx).once("a", "b")
    assert not double.once("a", "b")
