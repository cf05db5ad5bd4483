"""The functions: all of them, with their parameters, on each kind of handle, and in the double."""

import asyncio
import inspect
import io
import json
import os
from datetime import timedelta

import psycopg
import pytest
from psycopg.rows import dict_row

from pg_idempotency import (ActionIdAhead, AsyncIdempotency, ClaimLost, ClaimNotFound, Idempotency, IdempotencyError,
                            JsonText, KeyInvalid, NotInstalled, Response, from_error, new_key, request_hash)
from pg_idempotency.functions import Functions, function
from pg_idempotency.memory import MemoryIdempotency, Store

# Of the extension, but not of its interface.
INTERNAL = {
    "idem_application_functions", "idem_application_types", "idem_blocked_seconds", "idem_check_grantee",
    "idem_check_interval", "idem_cleanup_idle", "idem_clock_evidence", "idem_execute_grant",
    "idem_grant_as_owner", "idem_grant_monitor_as_owner", "idem_grant_relay_as_owner",
    "idem_granted_functions", "idem_grantor", "idem_many_support", "idem_metric_families",
    "idem_monitor_functions", "idem_monitor_views", "idem_monitoring_data", "idem_redacted_key",
    "idem_relay_functions", "idem_revoke_as_owner", "idem_sample_data", "idem_sequences_behind",
    "idem_stats_data", "idem_table_faults", "idem_table_stats", "idem_unfinished_moves", "idem_unvacuumed_tables",
    "idem_vacuum_holder", "idem_warn_of_rest", "idem_worker_absence",
    # For idem-relay.
    "idem_outbox_dead", "idem_outbox_fail", "idem_outbox_last_error", "idem_outbox_topics",
    # Of the portable edition, as is all that begins with idem_p_.
    "idem_configure"}


def methods():
    return {name: found for name, found in vars(Functions).items() if isinstance(found, function)}


def test_a_key_that_is_missing_is_named(idem):
    """As by request.headers.get("Idempotency-Key")."""
    for call in idem.request, idem.job:
        with pytest.raises(TypeError, match="key must be a str, the Idempotency-Key of the request, not None"):
            call("u", None, lambda tx: Response(201))


def test_none_is_missing(database):
    with psycopg.connect("") as connection:
        rows = connection.execute(
            "SELECT proname, proargnames[:pronargs] FROM pg_proc JOIN pg_depend d ON d.objid = pg_proc.oid "
            "AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e' JOIN pg_extension e ON e.oid = d.refobjid "
            "WHERE extname = 'idempotency'").fetchall()
    theirs = {name: set(arguments or ()) for name, arguments in rows
              if name not in INTERNAL and not name.startswith("idem_p_")}
    assert {"idem_" + name for name in methods()} == set(theirs) | {"idem_stats"}
    for name, found in methods().items():
        ours = {p for p in inspect.signature(found.make).parameters if p != "self" and not p.endswith("_ms")}
        assert ours == theirs.get("idem_" + name, set()), name


async def asynchronous_handle(kind):
    """And what ends it."""
    if not kind.startswith("SQLAlchemy"):
        connection = await psycopg.AsyncConnection.connect("")
        return (connection.cursor() if kind == "AsyncCursor" else connection), connection.close
    pytest.importorskip("asyncpg")
    asyncio_of = pytest.importorskip("sqlalchemy.ext.asyncio")
    engine = asyncio_of.create_async_engine(
        f"postgresql+asyncpg:///?host={os.environ['PGHOST']}&port={os.environ['PGPORT']}")
    handle = asyncio_of.AsyncSession(engine) if kind.endswith("Session") else await engine.connect()

    async def close():
        await handle.close()
        await engine.dispose()

    return handle, close


@pytest.fixture(params=["pool", "connection", "cursor", "dict_row", "autocommit", "conninfo", "SQLAlchemy",
                        "SQLAlchemy Session", "double", "AsyncConnection", "AsyncCursor", "SQLAlchemy AsyncConnection",
                        "SQLAlchemy AsyncSession"])
def functions(request, database, pool):
    """Each way to the functions, one after another."""
    kind = request.param
    if kind == "pool":
        yield Idempotency(pool)
    elif kind == "conninfo":
        yield Idempotency(f"dbname={database}")
    elif kind == "double":
        yield MemoryIdempotency()
    elif "Async" in kind:
        loop = asyncio.new_event_loop()
        handle, close = loop.run_until_complete(asynchronous_handle(kind))
        idem = AsyncIdempotency("").on(handle)

        class Waiting:
            def __getattr__(self, name):
                return lambda *a, **k: loop.run_until_complete(getattr(idem, name)(*a, **k))

        yield Waiting()
        loop.run_until_complete(close())
        loop.close()
    elif kind.startswith("SQLAlchemy"):
        sqlalchemy = pytest.importorskip("sqlalchemy")
        from sqlalchemy.orm import Session
        engine = sqlalchemy.create_engine("postgresql+psycopg2://")
        with (engine.begin() if kind == "SQLAlchemy" else Session(engine)) as handle:
            yield Idempotency(pool).on(handle)
        engine.dispose()
    else:
        with psycopg.connect("", row_factory=dict_row if kind == "dict_row" else psycopg.rows.tuple_row,
                             autocommit=kind == "autocommit") as connection:
            yield Idempotency(pool).on(connection.cursor() if kind == "cursor" else connection)


def test_each_on_each_handle(functions):
    f, me, key = functions, new_key(), new_key()
    # Identity
    assert f.request_hash("post", "/a:b?c", b"\x00x") == request_hash("POST", "/a:b?c", b"\x00x")
    assert f.request_hash("POST", "/", '{"b": 1.0, "a": []}') == request_hash("POST", "/", b'{"a":[],"b":1}')
    assert f.canonical_json(JsonText('{"b":[1e2,12345678901234567890.5,"\\u00e9"],"a":null}')) == \
        '{"a":null,"b":[100,12345678901234567890.5,"é"]}'
    assert f.key_is_valid(key) and not f.key_is_valid("no")
    # Keys
    claim = f.claim(me, key, b"hash", ttl="1 hour", lease=timedelta(minutes=1), wait_ms=10)
    assert (claim.outcome, claim.attempt) == ("new", 1) and type(claim.claim_token) is int
    token = claim.claim_token
    assert f.claim(me, key, b"other").outcome == "hash_conflict"
    assert f.checkpoint(me, key, "half", {"n": 2**63, "f": 0.5}, lease="1 min", claim_token=token) > claim.expires_at - \
        timedelta(hours=1)
    assert f.heartbeat(me, key, lease_ms=60000, claim_token=token).tzinfo is not None
    assert f.fail(me, key, "later", token) is True and f.fail(me, key, "later", token) is False
    claim = f.claim(me, key, b"hash")
    assert (claim.attempt, claim.recovery_point, claim.recovery_state) == (2, "half", {"n": 2**63, "f": 0.5})
    assert claim.claim_token > token
    assert f.complete(me, key, 201, b"\x00\xff", {"Link": ["a", "b"]}, claim.claim_token) is True
    assert f.complete(me, key, 201, b"\x00\xff", {"Link": ["a", "b"]}, claim.claim_token) is False
    replay = f.claim(me, key, b"hash")
    assert (replay.outcome, replay.response_status, replay.response_bytes, replay.response_headers) == (
        "replay", 201, b"\x00\xff", {"Link": ["a", "b"]})
    found = f.lookup(me, key)
    assert (found.state, found.attempt, found.request_hash, found.response_body) == ("completed", 2, b"hash", None)
    assert f.erase(me, key) and f.claim(me, key).outcome == "erased" and f.forget(me, key)
    assert f.lookup(me, key).state is None
    claim = f.claim(me, key)
    assert f.release(me, key, claim.claim_token) and f.claim(me, key).attempt == 1
    keys = [new_key(), new_key(), key]
    many = f.claim_many(me, keys, [b"1", b"2", None])
    assert [(c.ordinal, c.key, c.outcome) for c in many] == [
        (1, keys[0], "new"), (2, keys[1], "new"), (3, key, "in_progress")]
    done = f.complete_many(me, keys[:2], [200], ["a", None], [{"X": "y"}, None],
                           [c.claim_token for c in many[:2]])
    assert [(d.ordinal, d.key, d.completed) for d in done] == [(1, keys[0], True), (2, keys[1], True)]
    assert f.claim(me, keys[0]).response_headers == {"X": "y"}
    # Actions
    assert f.try_advance(me, "p", "1", 2**53 + 1).last_action_id == 2**53 + 1
    assert not f.try_advance(me, "p", "1", 2**53).should_process
    assert f.set(me, "p", "2", "dislike", True, 5).is_active
    assert f.set(me, "p", "2", "like", True, 6, ["dislike"]).processed and not f.is_active(me, "p", "2", "dislike")
    assert not f.toggle(me, "p", "2", "like", 7).is_active and f.toggle(me, "p", "2", "like", 7).last_action_id == 7
    assert {(s.entity_id, s.action_type, s.is_active, s.last_action_id) for s in f.action_states(me, "p", ["2", "3"])} \
        == {("2", "dislike", False, 7), ("2", "like", False, 7)}
    assert [(a.ordinal, a.should_process) for a in f.try_advance_many([me], ["p"], ["3", "3"], [2, 1])] == [
        (1, True), (2, False)]
    assert [(a.ordinal, a.is_active, a.processed) for a in
            f.set_many([me], ["p"], ["4", "4"], ["like"], [True, False], [2, 1])] == [(1, True, True), (2, True, False)]
    assert f.forget_user(me) >= 4
    # Sequences
    assert f.try_append(me, "c", 1, 3).version == 3
    assert [f.try_append(me, "c", n, 2, allow_gaps=False).outcome for n in (1, 3, 9)] == [
        "duplicate", "overlap", "gap"]
    assert f.try_append(me, "d", 1, expected_version=2, wait="1s").outcome == "version_conflict"
    assert f.last_client_seq(me, "c") == 3
    # Once
    assert f.once(me, "{a,b}", ttl="1 day") and not f.once(me, "{a,b}")
    assert f.once_many(me, ["b", "a", "b", "{a,b}"]) == ["b", "a"] and f.once_many(me, []) == []
    # Outbox
    ids = [f.publish(me, {"n": 2**70, "exact": JsonText("1")}, "k", {"h": 1}),
           *[m.message_id for m in f.publish_many([me], [None, [1.5]], ["k"], deliver_after="0 s")]]
    taken = f.outbox_take(2, lease_ms=60000, topics=[me], wait_ms=1)
    assert [m.message_id for m in taken] == ids[:2]
    assert taken[0].payload == {"n": 2**70, "exact": "1"} and taken[0].headers == {"h": 1}
    assert taken[1].payload is None and taken[1].payload_text == "null" and taken[1].attempt == 1
    numbers = [m.id for m in taken]
    assert f.outbox_extend(numbers, lease="1 min", attempts=[1]) == numbers
    assert f.outbox_release(numbers[1:], [1]) == 1
    assert f.outbox_nack(numbers[0], "no", retry_after="0s", attempt=1) == "pending"
    assert f.outbox_nack(numbers[0], "no", retry_after_ms=0, attempt=1) == "pending"
    taken = f.outbox_take(topics=[me])
    assert f.outbox_nack(numbers[0], "late", attempt=1) == "lost"
    assert [m.message_id for m in taken] == ids and [m.attempt for m in taken] == [2, 2, 1]
    assert f.outbox_ack([m.id for m in taken]) == 3 and f.outbox_requeue([]) == 0
    if not isinstance(f, MemoryIdempotency):
        f.once_many(me, ["a", "c", "d"], ttl="0")
        assert f.take_expired("tokens", 1) and f.take_expired("keys") is not None
        assert ("d", me) in {(e.document["token"], e.document["scope"]) for e in f.take_expired("tokens", max_rows=2000)}
    assert f.cleanup().keys_deleted >= 0


def test_errors_on_each_handle(functions):
    f, me = functions, new_key()
    with pytest.raises(KeyInvalid) as raised:
        f.claim(me, "short")
    assert raised.value.sqlstate == "ID001" and from_error(raised.value) is raised.value


def test_other_errors(idem, pool):
    me, key = new_key(), new_key()
    with pytest.raises(ClaimNotFound):
        idem.complete(me, key, 200)
    idem.claim(me, key)
    with pytest.raises(ClaimLost):
        idem.complete(me, key, 200)
    with pool.connection() as connection:
        connection.execute("SET LOCAL idempotency.max_action_id_lead = '1s'")
        with pytest.raises(ActionIdAhead), connection.transaction():
            idem.on(connection).set(me, "p", "1", "like", True, 2**60)
    with pytest.raises(psycopg.DataError):
        idem.claim("a\0b", key)
    for wrong in (dict(ttl=30), dict(ttl="1s", ttl_ms=1)):
        with pytest.raises(TypeError):
            idem.claim(me, key, **wrong)
    with pytest.raises(TypeError):
        idem.once_many(me, "a string")
    with pytest.raises(TypeError):
        idem.on(object()).once(me, "token")

    async def mixed():
        async with await psycopg.AsyncConnection.connect("") as connection:
            with pytest.raises(TypeError, match="use AsyncIdempotency"):
                idem.on(connection).once(me, "token")
            await connection.execute("SELECT 1")

    asyncio.run(mixed())
    with pytest.raises(TypeError):
        Idempotency(object())


@pytest.mark.parametrize("double", [False, True])
def test_values_that_json_cannot_represent(idem, double):
    """An error that names the place; nothing is sent."""
    idem, topic = MemoryIdempotency() if double else idem, new_key()
    circle = {}
    circle["self"] = [circle]
    for value, place in (({"a": [1, {"b": float("nan")}]}, r"a\[1\].b is nan"), (float("inf"), "represent: inf"),
                         ({"when": {1}}, "when is a set"), ([object()], r"\[0\] is a object"),
                         (circle, r"self\[0\] is part of itself"), ({(1, 2): 1}, "a name that is a tuple")):
        with pytest.raises(TypeError, match=f"payload contains a value that JSON cannot represent: .*{place}|payload .*{place}"):
            idem.publish(topic, value)
        with pytest.raises(TypeError, match=rf"payloads\[1\] contains .*{place}"):
            idem.publish_many([topic, topic], [1, value])
        with pytest.raises(TypeError, match=f"headers contains .*{place}"):
            idem.publish(topic, 1, headers=value)
        with pytest.raises(TypeError, match=f"recovery_state contains .*{place}"):
            idem.checkpoint("u", new_key(), "p", value)
        with pytest.raises(TypeError, match=f"the document of the response contains .*{place}"):
            Response.json(value)
    assert idem.outbox_take(topics=[topic]) == []


@pytest.mark.parametrize("double", [False, True])
def test_wrong_types_raise_before_any_call(idem, double):
    idem = MemoryIdempotency() if double else idem
    never = (lambda tx: pytest.fail("it ran"))
    for body in (7, {}, {"a": 1}, io.BytesIO(b""), [], object()):
        with pytest.raises(TypeError, match="the body of a response must be a str or bytes, not a"):
            Response(200, body)
        with pytest.raises(TypeError, match="the body of the request must be the bytes"):
            idem.request("u", new_key(), never, method="POST", path="/", body=body)
    for status in (None, "200", 20, True, 200.0):
        with pytest.raises(TypeError, match="the status of a response"):
            Response(status)
    for headers in (None, [("a", "b")], "a: b"):
        with pytest.raises(TypeError, match="the headers of a response"):
            Response(200, "", headers)
    for scope in (None, "", 7):
        with pytest.raises(TypeError, match="scope must be a str, the user or tenant"):
            idem.request(scope, new_key(), never)
        with pytest.raises(TypeError, match="scope must be a str, the user or tenant"):
            idem.job(scope, new_key(), never)


def test_errors_are_found_inside_other_errors(pool):
    class Wrapped(Exception):
        pass

    with psycopg.connect("") as connection:
        try:
            connection.execute("SELECT idem_claim('s', 'short')")
        except psycopg.Error as error:
            found = error
    assert isinstance(from_error(found), KeyInvalid)
    for attribute in ("orig", "original", "__cause__"):
        outer = Wrapped()
        setattr(outer, attribute, found)
        inner = Wrapped()
        inner.__cause__ = outer
        assert isinstance(from_error(inner), KeyInvalid)
        assert "too short" in from_error(inner).detail and "16 to 128 characters" in from_error(inner).hint
    assert from_error(ValueError()) is None


def test_run(idem, pool):
    with pool.connection() as connection:
        connection.execute("CREATE FUNCTION twice(request jsonb) RETURNS jsonb LANGUAGE sql AS "
                           "$$SELECT jsonb_build_object('n', 2 * (request ->> 'n')::numeric)$$")
    key = new_key()
    for outcome in ("new", "replay"):
        ran = idem.run("u", key, "twice(jsonb)", {"n": 2**62}, wait="1s")
        assert (ran.outcome, ran.response_status, json.loads(ran.response_body)) == (outcome, 200, {"n": 2**63})


def test_roles_have_their_name_as_it_is(idem, pool):
    name = 'Python " Role'
    with pool.connection() as connection:
        connection.execute('CREATE ROLE "Python "" Role"')

    def may_claim():
        with pool.connection() as connection:
            return connection.execute("SELECT has_function_privilege(%s, oid, 'EXECUTE') FROM pg_proc "
                                      "WHERE proname = 'idem_claim'", (name,)).fetchone()[0]

    try:
        idem.grant(name)
        assert may_claim()
        idem.revoke(name)
        assert not may_claim()
        idem.grant_monitor(name)
    finally:
        with pool.connection() as connection:
            connection.execute('DROP OWNED BY "Python "" Role"')
            connection.execute('DROP ROLE "Python "" Role"')


@pytest.mark.parametrize("double", [False, True])
def test_operators(idem, double):
    idem = MemoryIdempotency() if double else idem
    key = new_key()
    idem.stats_reset()
    idem.grant("pg_monitor")
    idem.grant_monitor("pg_monitor")
    idem.revoke("pg_monitor")
    before = idem.stats()
    assert {name for name, value in before.items() if value == 0} >= {"claims_new", "messages_dead", "rate_limited"}
    # One of each
    idem.claim("u", key, lease_ms=0)
    idem.claim("u", key, lease_ms=0)
    token = idem.claim("u", key).claim_token
    idem.fail("u", key, "no", token)
    token = idem.claim("u", key).claim_token
    idem.complete("u", key, 200, claim_token=token)
    idem.claim("u", key)
    idem.once_many("u", [key, key, key + "2"])
    idem.set("u", "e", key, "like", True, 2)
    idem.toggle("u", "e", key, "like", 1)
    idem.try_append(key, "c", 1)
    idem.try_append(key, "c", 1)
    idem.publish_many([key, key], [1, 2])
    one, other = idem.outbox_take(topics=[key])
    idem.outbox_ack([one.id])
    idem.outbox_nack(other.id, retry_after="1 hour")
    idem.cleanup()
    counted = {name: value for name, value in idem.stats().items() if type(value) is int and value}
    counted.pop("datid", None)
    assert counted == {
        "claims_new": 4, "claims_replay": 1, "takeovers": 3, "failures": 1, "completions": 1, "once_first": 2,
        "once_seen": 1, "advances": 1, "advances_stale": 1, "appends_appended": 1, "appends_duplicate": 1,
        "messages_published": 2, "messages_taken": 2, "messages_acked": 1, "messages_nacked": 1, "cleanup_passes": 1}
    samples = {(s.name, *sorted(s.labels.items())): s for s in idem.metric_samples()}
    name = idem.stats()["datname"]
    new = samples["idempotency_claims_total", ("datname", name), ("outcome", "new")]
    assert (new.value, new.type) == (4.0, "counter") and new.help
    assert samples["idempotency_outbox_messages", ("datname", name), ("state", "waiting")].value >= 1
    text = idem.metrics()
    assert f'idempotency_claims_total{{datname="{name}",outcome="new"}} 4\n' in text and text.endswith("# EOF")
    assert all(check.status == "ok" for check in idem.health() if check.check_name in ("dead_letters", "stuck_leases"))
    # Abandoned
    idem.claim("u", key + "-b", lease_ms=0)
    found = [s for s in idem.abandoned(older_than_ms=0) if s.key == f'"{key[:4]}..." ({len(key) + 2} characters)']
    assert [(s.scope, s.attempt, s.recovery_point) for s in found[-1:]] == [("u", 1, None)]
    assert found[-1].age >= timedelta(0) and found[-1].lease_expires_at.tzinfo
    # After a restore
    above = idem.raise_claim_tokens(token + 1000)
    assert above >= token + 1000 and idem.raise_claim_tokens(0) >= above
    assert idem.claim("u", key + "-c").claim_token > above
    idem.stats_reset()
    assert idem.stats()["claims_new"] == 0


def test_the_double_has_all_functions_with_the_same_names(idem):
    double = MemoryIdempotency()
    # These need a server; the double says so.
    needs_server = {"resume": (), "outbox_blocked": (), "take_expired": ("keys",)}
    assert {name for name in methods() if not hasattr(Store, "idem_" + name)} == set(needs_server)
    for name, arguments in needs_server.items():
        with pytest.raises(NotImplementedError, match=f"does not have idem_{name}"):
            getattr(double, name)(*arguments)
    assert set(double.stats()) == set(idem.stats())
    theirs = {(s.name, s.type, *sorted(s.labels)) for s in idem.metric_samples()}
    assert {(s.name, s.type, *sorted(s.labels)) for s in double.metric_samples()} <= theirs
    theirs = {check.check_name: check.threshold for check in idem.health()}
    assert {check.check_name: check.threshold for check in double.health()}.items() <= theirs.items()


def test_run_in_the_double():
    def place(tx, request):
        tx.insert("orders", **request)
        return Response(201, "ordered", {"Location": "/1"}) if request["item"] == "tea" else {"n": [1, "é"]}

    double = MemoryIdempotency(handlers={"place(jsonb)": place})
    key, other = new_key(), new_key()
    ran = [double.run("u", key, "place(jsonb)", {"item": "tea"}) for _ in range(2)]
    assert [(r.outcome, r.response_status, r.response_headers, r.response_body) for r in ran] == [
        (outcome, 201, {"Location": "/1"}, "ordered") for outcome in ("new", "replay")]
    assert double.run("u", key, "place(jsonb)", {"item": "milk"}).outcome == "hash_conflict"
    assert double.run("u", other, "place(jsonb)", {"item": "milk"}).response_body == '{"n": [1, "é"]}'
    with double.transaction() as tx:
        assert tx.rows("orders") == [{"item": "tea"}, {"item": "milk"}]
    for handler, state in (("no(jsonb)", "42883"),):
        with pytest.raises(IdempotencyError) as raised:
            double.run("u", new_key(), handler, {})
        assert raised.value.sqlstate == state


def test_a_schema_without_the_functions_is_named(pool):
    """Instead of a function with its types that does not exist."""
    for schema in "pg_catalog", "nowhere":
        other = Idempotency(pool, schema=schema)
        with pool.connection() as connection, pytest.raises(NotInstalled, match=f"'{schema}' has no idem_once"):
            other.on(connection).once("u", "token")
        for call in (lambda: other.once("u", "token"), lambda: other.request("u", new_key(), lambda tx: None)):
            with pytest.raises(NotInstalled, match=f"'{schema}' has no idem_(once|claim)") as raised:
                call()
            assert raised.value.sqlstate in ("42883", "3F000")
    with pytest.raises(psycopg.errors.UndefinedFunction):
        Idempotency(pool).run("u", new_key(), "nowhere(jsonb)", {})


def test_schema(database):
    with psycopg.connect("", autocommit=True) as connection:
        connection.execute("CREATE DATABASE " + database + "_schema")
    url = f"dbname={database}_schema"
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute('CREATE SCHEMA "a %s:b"; CREATE EXTENSION idempotency SCHEMA "a %s:b"')
            idem = Idempotency(url, schema="a %s:b")
            assert idem.once("s", "token") and not idem.on(connection).once("s", "token")
    finally:
        with psycopg.connect("", autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {database}_schema WITH (FORCE)")


def test_new_keys_ascend(idem):
    keys = [new_key() for _ in range(2000)]
    assert keys == sorted(set(keys)) and all(key[14] == "7" and key[19] in "89ab" for key in keys)
    assert idem.key_is_valid(keys[0])
