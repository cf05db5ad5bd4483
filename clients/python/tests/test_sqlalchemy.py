"""SQLAlchemy: the handler's Connection or Session is in the claim's transaction."""

import asyncio
import gc
import os
import signal
import threading
import time
from contextlib import nullcontext, suppress

import psycopg
import pytest
import sqlalchemy
from proxy import Proxy
from sqlalchemy import Column, Text, create_engine, event, text
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, declarative_base, scoped_session, sessionmaker

from pg_idempotency import AsyncIdempotency, Idempotency, Response, TimedOut, TransactionEnded, new_key
from pg_idempotency.http import Exchange, Guard, guarded
from pg_idempotency.postgres import scope_is_elsewhere
from pg_idempotency.runtimes import run
from pg_idempotency.sqlalchemy import SQLAlchemy

INSERT = text("INSERT INTO effects VALUES (:name)")
Base = declarative_base()


class Effect(Base):
    __tablename__ = "effects"
    name = Column(Text, primary_key=True)


@pytest.fixture(scope="module")
def engine(database):
    engine = create_engine("postgresql+psycopg2://", pool_size=3)
    yield engine
    engine.dispose()


@pytest.fixture
def core(engine):
    return Idempotency(SQLAlchemy(engine))


@pytest.fixture
def orm(engine):
    return Idempotency(SQLAlchemy(engine, sessionmaker()))


def test_a_connection_is_in_the_transaction_of_the_claim(core, effects):
    key = new_key()

    def place(tx):
        tx.execute(INSERT, {"name": key})
        assert core.on(tx).once("sqlalchemy", key)
        return Response.json({"key": key}, 201)

    first, again = (core.request("u", key, place) for _ in range(2))
    assert (first.status, again.status, again.body, again.replayed) == (201, 201, first.body, True)
    assert effects(key) == 1


def test_objects_of_a_session_are_written_with_the_response(orm, effects):
    key = new_key()

    def place(session):
        session.add(Effect(name=key))               # flushed when the handler returns
        return Response(201)

    assert orm.request("u", key, place).status == 201
    assert orm.request("u", key, place).replayed
    assert effects(key) == 1


@pytest.mark.parametrize("fails", ["in a statement", "at COMMIT", "lost"])
def test_an_object_of_an_earlier_try_is_written_again(database, effects, fails):
    """A session takes an object that it has flushed for a stored one, unless it hears of the rollback."""
    key, proxy, tries = new_key(), Proxy(), []
    with psycopg.connect("", autocommit=True) as connection:
        connection.execute("CREATE TABLE deferred (name text)")
        connection.execute("CREATE OR REPLACE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS "
                           "$$ BEGIN RAISE 'again' USING ERRCODE = '40001'; END $$")
        connection.execute("CREATE CONSTRAINT TRIGGER again AFTER INSERT ON deferred DEFERRABLE INITIALLY DEFERRED "
                           "FOR EACH ROW EXECUTE FUNCTION again()")
    engine = create_engine(f"postgresql+psycopg2://postgres@127.0.0.1:{proxy.port}/{database}")
    effect, loaded, old = Effect(name=key), [], new_key()
    with psycopg.connect("") as connection:
        connection.execute("INSERT INTO effects VALUES (%s)", (old,))

    def place(session):
        tries.append(1)
        loaded.append(session.get(Effect, old))
        session.add(effect)
        session.flush()
        if len(tries) == 1:
            if fails == "in a statement":
                session.execute(text("DO $$ BEGIN RAISE 'again' USING ERRCODE = '40001'; END $$"))
            elif fails == "at COMMIT":
                session.execute(text("INSERT INTO deferred VALUES ('a')"))
            else:
                proxy.cut = "before"
        return Response(201)

    assert Idempotency(SQLAlchemy(engine, sessionmaker())).request("u", key, place).stored
    assert (len(tries), effects(key), effect.name) == (2, 1, key)           # name: it can be read after COMMIT
    assert [one.name for one in loaded] == [old, old]                       # and what was loaded, after a rollback, too
    with psycopg.connect("", autocommit=True) as connection:
        connection.execute("DROP TABLE deferred")
    engine.dispose()
    proxy.close()


@pytest.mark.parametrize("commits", [True, False])
def test_an_error_rolls_back_what_a_session_has_committed(orm, effects, commits):
    """Its commit() only flushes: the transaction is the request's."""
    key = new_key()

    def place(session):
        session.add(Effect(name=key))
        if commits:
            session.commit()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        orm.request("u", key, place)
    assert effects(key) == 0
    assert orm.request("u", key, lambda session: Response()).stored


def test_a_nested_transaction_is_a_savepoint(orm, effects):
    kept, undone = new_key(), new_key()

    def place(session):
        session.add(Effect(name=kept))
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            session.add(Effect(name=undone))
            session.flush()
            1 / 0
        return Response()

    assert orm.request("u", new_key(), place).stored
    assert (effects(kept), effects(undone)) == (1, 0)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_transaction_that_is_ended_by_hand_is_no_success(core, end):
    def place(tx):
        getattr(tx.get_transaction(), end)()
        return Response()

    key = new_key()
    with pytest.raises(TransactionEnded):
        core.request("u", key, place)


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("make", [None, sessionmaker()])
def test_a_connection_that_commits_is_refused_before_that(engine, effects, make, swallowed):
    """Otherwise its later work would be rolled back, and a retry would get the response."""
    key, idem = new_key(), Idempotency(SQLAlchemy(engine, make))

    def place(tx):
        tx.execute(INSERT, {"name": key})
        with suppress(TransactionEnded if swallowed else ()):
            (tx.connection() if make else tx).get_transaction().commit()
        with suppress(PendingRollbackError):
            tx.execute(INSERT, {"name": key})
        return Response(201)

    for _ in range(2):
        with pytest.raises(TransactionEnded):
            idem.request("u", key, place)
        assert effects(key) == 0
    assert not idem.request("u", key, lambda tx: Response()).replayed


def test_an_asynchronous_connection_that_commits_is_refused_before_that(database, effects):
    async def main():
        engine = create_async_engine("postgresql+asyncpg://", pool_size=1, max_overflow=0)

        async def place(tx):
            await tx.execute(INSERT, {"name": key})
            await tx.run_sync(lambda connection: connection.get_transaction().commit())
            return Response(201)

        for _ in range(2):
            with pytest.raises(TransactionEnded):
                await AsyncIdempotency(SQLAlchemy(engine)).request("u", key, place)
            assert effects(key) == 0
        await engine.dispose()

    key = new_key()
    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_session_that_rolls_back_is_no_success(orm, effects):
    key = new_key()

    def place(session):
        session.add(Effect(name=key))
        session.flush()
        session.rollback()
        return Response()

    with pytest.raises(TransactionEnded):
        orm.request("u", key, place)
    assert effects(key) == 0


@pytest.mark.parametrize("status", [200, 503])
def test_an_error_that_is_swallowed_is_no_success(core, effects, status):
    key = new_key()

    def place(tx):
        tx.execute(INSERT, {"name": key})
        with pytest.raises(DBAPIError):
            tx.execute(text("SELECT 1 / 0"))
        return Response(status)

    if status == 200:
        with pytest.raises(TransactionEnded):
            core.request("u", key, place)
        with pytest.raises(TransactionEnded), core.transaction() as tx:
            place(tx)
    else:
        assert not core.request("u", key, place).stored
    assert effects(key) == 0


def test_a_serialization_failure_runs_again(core, effects):
    key, runs = new_key(), []

    def place(tx):
        runs.append(1)
        tx.execute(INSERT, {"name": key})
        if len(runs) < 3:
            tx.execute(text("DO $$ BEGIN RAISE serialization_failure; END $$"))
        return Response()

    assert core.request("u", key, place).stored
    assert (len(runs), effects(key)) == (3, 1)


def test_duplicates_run_once(core, effects):
    key = new_key()
    results = []

    def place(tx):
        tx.execute(INSERT, {"name": key})
        time.sleep(0.1)
        return Response(201)

    threads = [threading.Thread(target=lambda: results.append(core.request("u", key, place, wait="10s")))
               for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [result.status for result in results] == [201] * 20
    assert effects(key) == 1


def test_processes_share_no_connection_after_a_fork(database):
    """They would read each other's answers."""
    engine, of_asyncpg = create_engine("postgresql+psycopg2://", pool_size=1), create_async_engine("postgresql+asyncpg://")
    core, own, pool = Idempotency(SQLAlchemy(engine)), [], of_asyncpg.pool
    AsyncIdempotency(SQLAlchemy(of_asyncpg))

    def server():
        return core.request("u", new_key(), lambda tx: Response(200, str(tx.scalar(text("SELECT pg_backend_pid()"))))).body

    def nested(tx):
        return core.once("u", new_key())

    own.append(server())
    child = os.fork()
    if not child:
        signal.alarm(30)
        with suppress(BaseException):
            gc.collect()
            with pytest.raises(RuntimeError, match="second connection"):
                core.request("u", new_key(), nested)
            os._exit(int(server() in own or of_asyncpg.pool is pool))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert [server()] == own
    engine.dispose()


def test_a_dead_connection_of_the_pool_is_replaced(database):
    engine = create_engine("postgresql+psycopg2://", pool_size=1, max_overflow=0)
    core = Idempotency(SQLAlchemy(engine))
    with engine.connect() as connection:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar()
    with psycopg.connect("") as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    assert core.request("u", new_key(), lambda tx: Response()).stored
    engine.dispose()


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_lost_commit_takes_effect_once(database, effects, cut):
    proxy, key = Proxy(), new_key()
    engine = create_engine("postgresql+psycopg2://", connect_args={"host": "127.0.0.1", "port": proxy.port})

    def place(tx):
        tx.execute(INSERT, {"name": key})
        return Response(201)

    proxy.cut = cut
    assert Idempotency(SQLAlchemy(engine)).request("u", key, place).replayed == (cut == "after")
    assert proxy.cut is None and effects(key) == 1
    engine.dispose()
    proxy.close()


def test_a_handler_has_a_timeout(core, effects):
    key = new_key()

    def place(tx):
        tx.execute(INSERT, {"name": key})
        tx.execute(text("SELECT pg_sleep(30)"))
        return Response()

    began = time.monotonic()
    with pytest.raises(TimedOut):
        core.request("u", key, place, timeout_ms=300)
    assert time.monotonic() - began < 10
    assert effects(key) == 0
    assert core.request("u", key, lambda tx: Response()).stored


def test_a_handler_that_took_too_long_leaves_no_dead_connection_in_the_pool(database, slow_cancel):
    engine = create_engine("postgresql+psycopg2://", pool_size=1, max_overflow=0)
    with pytest.raises(TimedOut):
        Idempotency(SQLAlchemy(engine)).request("u", new_key(), lambda tx: tx.execute(text("SELECT pg_sleep(30)")), timeout_ms=300)
    time.sleep(1)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT 1")).scalar() == 1
    engine.dispose()


def test_a_silent_server_holds_no_request(database, silent_server, serves_beside_silence):
    """Nor does it stop the other threads."""
    engine = create_engine("postgresql+psycopg2://", connect_args={"host": "127.0.0.1", "port": silent_server[0].port}, pool_size=1,
                           max_overflow=0)
    serves_beside_silence(Idempotency(SQLAlchemy(engine)), lambda tx, key: tx.execute(INSERT, {"name": key}),
                          lambda tx: tx.execute(text("SELECT 77")))
    engine.dispose()


def test_a_silent_server_holds_no_asynchronous_request(database, effects, silent_server):
    (proxy, place, fall_silent), key = silent_server, new_key()

    async def test():
        engine = create_async_engine("postgresql+asyncpg://", connect_args={"host": "127.0.0.1", "port": proxy.port},
                                     pool_size=1, max_overflow=0)
        idem = AsyncIdempotency(SQLAlchemy(engine))

        async def handler(tx):
            await tx.execute(INSERT, {"name": key})
            fall_silent()
            if place == "statement":
                await tx.execute(text("SELECT 77"))
            return Response(503 if place == "rollback" else 201)

        async def again(tx):
            return Response()

        try:
            result = await asyncio.wait_for(idem.request("u", key, handler, timeout="20 s" if place == "commit" else "1 s"), 25)
            assert (result.status, result.stored) == ((503, False) if place == "rollback" else (201, True))
        except TimedOut:
            assert place == "statement"
        proxy.all_silent = False
        assert (await idem.request("u", key, again, wait="20 s")).replayed == (place == "commit")
        await engine.dispose()

    asyncio.run(asyncio.wait_for(test(), 60))
    assert effects(key) == (place == "commit")


def test_a_job_of_an_engine(core, effects):
    key = new_key()

    def pay(job):
        assert job.step("charge", lambda step: {"id": 7}) == {"id": 7}

        def finish(tx):
            tx.execute(INSERT, {"name": key})
            return Response(204)
        return job.finish(finish)

    assert core.job("u", key, pay, lease="1 minute").status == 204
    assert core.job("u", key, pay, lease="1 minute").replayed
    assert effects(key) == 1


def test_asynchronous_connections_and_sessions(database, effects):
    async def test():
        engine = create_async_engine("postgresql+asyncpg://")
        core = AsyncIdempotency(SQLAlchemy(engine))
        orm = AsyncIdempotency(SQLAlchemy(engine, sessionmaker(class_=AsyncSession)))
        one, two, three, four = (new_key() for _ in range(4))

        async def place(tx):
            await tx.execute(INSERT, {"name": one})
            await asyncio.sleep(0.1)
            return Response(201)

        async def add(session):
            session.add(Effect(name=two))
            assert await orm.on(session).once("sqlalchemy", two)
            return Response(201)

        async def fails(session):
            session.add(Effect(name=three))
            await session.commit()
            raise ZeroDivisionError

        async def sleeps(tx):
            await tx.execute(INSERT, {"name": four})
            await tx.execute(text("SELECT pg_sleep(30)"))

        results = await asyncio.gather(*(core.request("u", one, place, wait="10s") for _ in range(10)))
        assert [result.status for result in results] == [201] * 10
        assert [(await orm.request("u", two, add)).replayed for _ in range(2)] == [False, True]
        with pytest.raises(ZeroDivisionError):
            await orm.request("u", three, fails)
        with pytest.raises(TimedOut):
            await core.request("u", four, sleeps, timeout_ms=300)
        assert (await core.request("u", new_key(), place)).stored
        await engine.dispose()
        return [effects(key) for key in (one, two, three, four)]

    assert asyncio.run(asyncio.wait_for(test(), 60)) == [2, 1, 0, 0]


def test_an_engine_that_commits_each_statement_is_refused(database):
    def place(tx):
        raise AssertionError

    async def asynchronous():
        engine = create_async_engine("postgresql+asyncpg://", isolation_level="AUTOCOMMIT")
        with pytest.raises(TypeError, match="AUTOCOMMIT"):
            await AsyncIdempotency(SQLAlchemy(engine)).request("u", new_key(), place)
        await engine.dispose()

    engine = create_engine("postgresql+psycopg2://", pool_size=1, max_overflow=0)
    with pytest.raises(TypeError, match="AUTOCOMMIT"):
        Idempotency(SQLAlchemy(engine.execution_options(isolation_level="AUTOCOMMIT"))).request("u", new_key(), place)
    assert Idempotency(SQLAlchemy(engine)).request("u", new_key(), lambda tx: Response()).stored
    engine.dispose()
    asyncio.run(asyncio.wait_for(asynchronous(), 60))


def test_an_engine_of_the_other_kind_is_refused(engine):
    with pytest.raises(TypeError, match="AsyncEngine"):
        AsyncIdempotency(SQLAlchemy(engine))
    with pytest.raises(TypeError, match="sqlite"):
        Idempotency(SQLAlchemy(create_engine("sqlite://")))


@pytest.mark.parametrize("way", ["binds", "get_bind", "bind_arguments"])
def test_a_session_that_chooses_another_connection_is_refused(engine, effects, way):
    """Its work would be rolled back, or committed without the response."""
    key = new_key()

    class Routing(Session):
        def get_bind(self, *arguments, **named):
            return engine

    make = {"binds": sessionmaker(binds={Base: engine}), "get_bind": sessionmaker(class_=Routing),
            "bind_arguments": sessionmaker()}[way]

    def place(session):
        if way == "bind_arguments":
            session.execute(INSERT, {"name": key}, bind_arguments={"bind": engine})
        else:
            session.add(Effect(name=key))
            session.commit()
        return Response(201)

    orm = Idempotency(SQLAlchemy(engine, make))
    with pytest.raises(TypeError, match="another connection"):
        orm.request("u", key, place)
    assert effects(key) == 0 and orm.lookup("u", key).state is None


def test_an_asynchronous_session_that_chooses_another_connection_is_refused(database, effects):
    async def main():
        key, engine = new_key(), create_async_engine("postgresql+asyncpg://")

        async def place(session):
            session.add(Effect(name=key))
            return Response(201)

        try:
            orm = AsyncIdempotency(SQLAlchemy(engine, sessionmaker(class_=AsyncSession, binds={Base: engine})))
            with pytest.raises(TypeError, match="another connection"):
                await orm.request("u", key, place)
        finally:
            await engine.dispose()
        assert effects(key) == 0

    asyncio.run(main())


def test_a_session_of_a_thread_is_refused(engine):
    with pytest.raises(TypeError, match="session_factory"):
        Idempotency(SQLAlchemy(engine, scoped_session(sessionmaker())))


def test_a_session_that_has_begun_is_refused(engine, effects):
    """Its work would be in another transaction."""
    session, key = scoped_session(sessionmaker(bind=engine)), new_key()
    session.execute(text("SELECT 1"))
    with pytest.raises(TypeError, match="begun"):
        Idempotency(SQLAlchemy(engine, lambda bind: session())).request("u", key, lambda tx: tx.execute(INSERT, {"name": key}) and Response())
    session.remove()
    assert effects(key) == 0


def test_a_session_of_two_phases_is_refused(engine):
    with pytest.raises(TypeError, match="twophase"):
        Idempotency(SQLAlchemy(engine, sessionmaker(twophase=True))).request("u", new_key(), lambda tx: Response())


def test_a_session_whose_rollback_would_not_undo_the_response_is_refused(engine):
    with pytest.raises(TypeError, match="join_transaction_mode"):
        Idempotency(SQLAlchemy(engine, sessionmaker(join_transaction_mode="create_savepoint"))).request("u", new_key(), lambda tx: Response())


def test_a_connection_with_options_is_the_same_connection(orm, effects):
    key = new_key()

    def place(session):
        session.connection(execution_options={"stream_results": False}).execute(INSERT, {"name": key})
        return Response()

    assert orm.request("u", key, place).stored and effects(key) == 1


def test_a_commit_that_fails_before_it_is_sent_rolls_back(database, effects):
    """The pool gets no connection that is still in the transaction."""
    engine = create_engine("postgresql+psycopg2://", pool_size=1, max_overflow=0)
    failures, key = [ValueError()], new_key()

    @event.listens_for(engine, "commit")
    def audit(connection):
        if failures:
            raise failures.pop()

    idem = Idempotency(SQLAlchemy(engine))

    def place(tx):
        tx.execute(INSERT, {"name": key})
        return Response(201)

    with pytest.raises(ValueError):
        idem.request("u", key, place)
    assert idem.request("u", new_key(), lambda tx: Response()).stored and effects(key) == 0
    assert not idem.request("u", key, place).replayed and effects(key) == 1
    engine.dispose()


def test_an_asynchronous_commit_that_fails_before_it_is_sent_rolls_back(database, effects):
    async def test():
        engine = create_async_engine("postgresql+asyncpg://", pool_size=1, max_overflow=0)

        @event.listens_for(engine.sync_engine, "commit")
        def audit(connection):
            if failures:
                raise failures.pop()

        idem = AsyncIdempotency(SQLAlchemy(engine))

        async def place(tx):
            await tx.execute(INSERT, {"name": key})
            return Response(201)

        async def other(tx):
            return Response()

        with pytest.raises(ValueError):
            await idem.request("u", key, place)
        assert (await idem.request("u", new_key(), other)).stored and effects(key) == 0
        await engine.dispose()

    failures, key = [ValueError()], new_key()
    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_handle_without_a_transaction_is_refused(engine, core):
    """SQLAlchemy 1.4 commits no SELECT by itself, so the token would be lost."""
    key = new_key()
    with pytest.raises(TypeError, match="no connection and no session"):
        core.on(engine).once("s", key)
    if sqlalchemy.__version__ < "2":
        with engine.connect() as connection, pytest.raises(RuntimeError, match="in no transaction"):
            core.on(connection).once("s", key)
    assert core.once_at("s", key) is None
    with engine.begin() as connection:
        assert core.on(connection).once("s", key)
    assert core.once_at("s", key)


def test_a_step_keeps_its_value_when_its_connection_is_lost(database):
    runs, key = [], new_key()

    def pay(job):
        def charge(step):
            runs.append(1)
            with psycopg.connect("", autocommit=True) as connection:
                connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'lost_in_a_step'")
                while connection.execute("SELECT 1 FROM pg_stat_activity WHERE application_name = 'lost_in_a_step'").fetchone():
                    time.sleep(0.02)

        job.step("charge", charge)
        return Response(201)

    engine = create_engine("postgresql+psycopg2://?application_name=lost_in_a_step")
    assert Idempotency(SQLAlchemy(engine)).job("u", key, pay).status == 201 and runs == [1]
    engine.dispose()


def test_an_asynchronous_step_keeps_its_value_when_its_connection_is_lost(database):
    runs, key = [], new_key()

    async def pay(job):
        async def charge(step):
            runs.append(1)
            async with await psycopg.AsyncConnection.connect("", autocommit=True) as connection:
                await connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'lost'")
            await asyncio.sleep(0.2)

        await job.step("charge", charge)
        return Response(201)

    async def test():
        engine = create_async_engine("postgresql+asyncpg://", connect_args={"server_settings": {"application_name": "lost"}})
        result = await AsyncIdempotency(SQLAlchemy(engine)).job("u", key, pay)
        await engine.dispose()
        return result.status

    assert asyncio.run(test()) == 201 and runs == [1]


@pytest.mark.parametrize("kind", ["refused", "exhausted"])
def test_over_http_a_database_that_is_not_available_is_503(database, kind):
    engine = create_engine("postgresql+psycopg2://?host=/nowhere" if kind == "refused" else "postgresql+psycopg2://",
                           pool_size=1, max_overflow=0, pool_timeout=0.1)
    exchange = Exchange(Idempotency(SQLAlchemy(engine)), "POST", "/", [new_key()], None)
    exchange.whole = True
    with engine.connect() if kind == "exhausted" else nullcontext():
        answer = run(guarded(exchange, Guard(scope=lambda request: "u"), None, lambda: "u", lambda: None, lambda access, tries: None))
    assert (answer.status, dict(answer.headers)["Retry-After"]) == (503, "1")
    engine.dispose()


def test_another_client_of_the_engine_is_no_way_out(engine, core, orm):
    def refused(tx):
        with pytest.raises(RuntimeError, match="use on"):
            core.once("s", "token")
        return Response()

    assert orm.request("u", new_key(), refused).stored


def test_a_server_that_cannot_be_reached_is_tried_once(database):
    engine, tries = create_engine("postgresql+psycopg2://?host=/nowhere"), []
    event.listen(engine, "do_connect", lambda *arguments: tries.append(1))
    idem = Idempotency(SQLAlchemy(engine))
    for call in (lambda: idem.request("u", new_key(), lambda tx: Response()), lambda: idem.job("u", new_key(), lambda job: Response()),
                 lambda: idem.once("u", new_key()), lambda: idem.transaction().__enter__()):
        with pytest.raises(sqlalchemy.exc.OperationalError):
            call()
    assert len(tries) == 4


@pytest.mark.parametrize("listens", [True, False])
def test_a_connection_that_has_died_in_the_pool_is_replaced(database, listens):
    """Also where a listener notices it, before the pool lends the connection."""
    engine = create_engine("postgresql+psycopg2://", pool_size=1, max_overflow=0)
    if listens:
        event.listen(engine, "checkout", lambda connection, *more: connection.cursor().execute("SET application_name = 'listens'"))
    with engine.connect() as connection:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar()
    with psycopg.connect("", autocommit=True) as other:
        assert other.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,)).fetchone()[0]
    assert Idempotency(SQLAlchemy(engine)).request("u", new_key(), lambda tx: Response()).stored
    engine.dispose()


@pytest.mark.parametrize("error", [psycopg.OperationalError("refused"), ConnectionError("of a service that knows the users")])
def test_over_http_the_framework_answers_what_the_scope_raises(idem, error):
    def scope(request):
        raise error

    exchange = Exchange(idem, "POST", "/", [new_key()], None)
    with pytest.raises(type(error)):
        run(guarded(exchange, Guard(scope=scope), None, lambda: scope(None), lambda: None, lambda access, tries: None))


ELSEWHERE = "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'elsewhere', SCHEMA = 'idem_guard'; END $$"


def test_a_scope_that_has_moved_is_found_again(database, engine):
    async def of_asyncpg():
        engine = create_async_engine("postgresql+asyncpg://")
        async with engine.connect() as connection:
            with pytest.raises(DBAPIError) as raised:
                await connection.execute(text(ELSEWHERE))
        await engine.dispose()
        return raised.value

    with engine.connect() as connection, pytest.raises(DBAPIError) as raised:
        connection.execute(text(ELSEWHERE))
    assert scope_is_elsewhere(raised.value) and scope_is_elsewhere(asyncio.run(of_asyncpg()))
