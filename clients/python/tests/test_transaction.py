"""transaction(): a connection of the client's pool, for what has no key."""

import pytest

from pg_idempotency import Idempotency, Response, TransactionEnded, new_key
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
