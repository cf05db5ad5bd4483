"""The double does as the server does: the tables of test/http, arguments.json and contract.json, which Node's tests run, too."""

import json
import time
from datetime import timedelta
from decimal import localcontext
from pathlib import Path

import pytest

from pg_idempotency import Idempotency, JsonText, Response, core, new_key
from pg_idempotency.functions import Functions
from pg_idempotency.intervals import seconds
from pg_idempotency.memory import MemoryIdempotency

TABLES = Path(__file__).parents[3] / "test" / "http"
TABLE = json.loads((TABLES / "arguments.json").read_text())
CONTRACT = json.loads((TABLES / "contract.json").read_text())["cases"]


def value_of(given):
    """{"repeat": [text, times]}, {"nested": depth} of a text, {"bigint": digits}."""
    if isinstance(given, list):
        return [value_of(each) for each in given]
    match given:
        case {"repeat": [text, times]}:
            return text * times
        case {"nested": depth}:
            return "[" * depth + "]" * depth
        case {"bigint": digits}:
            return int(digits)
    return given


def end_of(idem, name, given):
    arguments = {name: value_of(value) for name, value in given.items()}
    if name == "canonical_json":
        arguments["document"] = JsonText(arguments["document"])
    try:
        getattr(idem, name)(**arguments)
    except ValueError as error:
        assert "must not be negative or infinite" in str(error)
        return "local"                      # it was not even sent
    except Exception as error:
        return getattr(error, "sqlstate", None) or repr(error)
    return "ok"


def test_bad_arguments(idem):
    assert len(TABLE) > 100
    wrong = []
    for name, given, state in TABLE:
        double = MemoryIdempotency()
        double.claim("other", new_key())        # as on the server, there is a token
        ends = [end_of(client, name, given) for client in (idem, double)]
        if ends != [state, state]:
            wrong.append((*ends, name, str(given)[:150], state))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("text", ["5s", "1.5 min", "2 hours 3 minutes", "01:30", "10:00:01.5", "1 mon", "1y",
                                  "PT1S", "PT0.25S", "P1D", "P1DT2H3M4S", "P1Y2M3W", "PT90M", "P1M"])
def test_an_interval_is_as_long_as_the_server_says(pool, text):
    with pool.connection() as connection:
        assert seconds(text) == connection.execute("SELECT extract(epoch FROM %s::interval)::float8", (text,)).fetchone()[0]


@pytest.mark.parametrize("text", ["", "soon", "P", "PT", "P1H", "1 fortnight", "-1s", "PT-1S", "P1DT", "1" * 60 + "!"])
def test_a_text_that_is_no_interval_for_the_client(text):
    assert seconds(text) is None


def test_the_claim_has_a_limit_beyond_its_wait(idem):
    for wait in ("PT2S", "2s", timedelta(seconds=2)):
        assert idem.call("u", new_key(), wait=wait).claim_limit == core.ANSWER_LIMIT + 2


@pytest.mark.parametrize("number", ["630065110902167270606355829193021300", "12345678901234567890123456789012345678901.5e-7", "1234567"])
def test_a_number_keeps_its_digits_in_any_decimal_context(idem, number):
    with localcontext() as context:
        context.prec = 6
        server, double = both(idem, lambda client: client.canonical_json(JsonText(number)))
        assert server == double


def both(idem, call):
    """The ends of a call on the server and on the double: its value, or the SQLSTATE or the class of its error."""
    return [ends_of(lambda: call(client)) for client in (idem, MemoryIdempotency())]


def ends_of(call):
    try:
        return call()
    except Exception as error:
        return getattr(error, "sqlstate", None) or type(error)


@pytest.mark.parametrize("end", ["fail", "complete", "claim"])
def test_the_double_erases_what_the_server_erases(idem, end):
    server, double = both(idem, lambda client: erased(client, end))
    assert server == double and server[0] is True


def test_the_double_releases_what_the_server_releases(idem):
    server, double = both(idem, released)
    assert server == double and server[0] is True
    assert both(idem, lambda client: client.complete("s", "short", 99)) == ["22023", "22023"]


@pytest.mark.parametrize("document", [
    '{"bb": 1.00, "a":1e2, "c":[ ], "a":2, "d":{}, "z":-0.0, "y":1E-5, "x":-0, "w":12345678901234567890.10}', "[1,2.5]", "null",
    '"\\u00e9\\/\\n\\u0001\\ud83d\\ude00"', '{"ž":1,"zz":2,"é":{"b":1,"a":2}}', "1e-16383", "1e-16384", "1e131072", "0e200000",
    "1e400000000000000000000"])
def test_the_double_has_the_server_s_text_of_a_message(idem, document):
    server, double = both(idem, lambda client: published(client, document))
    assert server == double


def nested(client):
    with client.transaction(), client.transaction():
        pass


def looked_up(client):
    key = new_key()
    client.request("s", key, lambda tx: Response(201))
    return client.lookup("s", key).lease_expires_at


def inactive(client):
    user = new_key()
    client.set(user, "post", "1", "like", False, 1)
    return client.action_states(user, "post", ["1"])


def erased(client, end):
    """What is left of a record with a checkpoint, and what the claimant hears."""
    key = new_key()
    token = client.claim("s", key).claim_token
    client.checkpoint("s", key, "charged", {"charge": 1}, claim_token=token)
    if end == "fail":
        client.fail("s", key, "declined", token)
    elif end == "complete":
        client.complete("s", key, 201, "b", {"A": "b"}, token)
    was_erased, found = client.erase("s", key), client.lookup("s", key)
    return (was_erased, found.state, found.error, found.recovery_point, found.recovery_state_text, found.response_status,
            found.response_headers, found.response_body, end == "complete" and client.complete("s", key, 201, "b", {}, token))


def released(client):
    """Of keys without a record: a token that was given out was released before."""
    ends, key = [], new_key()
    token = client.claim("s", key).claim_token
    for given in token, token, 2**40, 0:
        for name in key, "short":
            ends.append(ends_of(lambda: client.release("s", name, given)))
    return ends


def published(client, document):
    topic = new_key()
    client.publish(topic, JsonText(document), headers={"b": 1, "a": 2})
    return [(one.payload_text, one.headers_text) for one in client.outbox_take(topics=[topic])]


def claimed_twice(client):
    key = new_key()
    return [(one.outcome, one.lease_expires_at is None) for one in client.claim_many("s", [key, key])]


@pytest.mark.parametrize("call, end", [
    (lambda client: client.outbox_nack(10**12, "error"), "lost"),
    (lambda client: client.claim("s", new_key(), b""), "22023"),
    (lambda client: client.claim_many("s", [new_key()], [b"x" * 65]), "22023"),
    (lambda client: client.claim("s", new_key(), ttl="1 fortnight"), "22007"),
    (lambda client: client.once("s", new_key(), ttl="tomorrow"), "22007"),
    (lambda client: client.claim("s", new_key(), lease="1 year"), "22023"),
    (lambda client: client.set("u", "p", "1", "like", True, 1, ["like"]), "22023"),
    (lambda client: client.once_many("s", ["a", None]), "22004"),
    (lambda client: client.once("\ud800", "t"), UnicodeEncodeError),
    (lambda client: client.once("s", None), "22004"),
    (lambda client: client.publish(None, 1), "22004"),
    (lambda client: client.release("s", "short"), "ID001"),
    (lambda client: client.complete_many("s", [], []), []),
    (lambda client: client.canonical_json(None), None),
    (lambda client: client.job("s", new_key(), lambda job: job.step("large", lambda step: "x" * 1_100_000)), "54000"),
    (looked_up, None), (inactive, []), (claimed_twice, [("new", False), ("in_progress", True)]), (nested, RuntimeError)])
def test_the_double_ends_a_call_as_the_server_does(idem, call, end):
    assert both(idem, call) == [end, end]


KEY, OTHER = "key-000000000000001", "key-000000000000002"
# A call of each function that succeeds after a claim of KEY and a message in the outbox.
CALLS = {
    "request_hash": {"method": "POST", "path": "/", "body": "{}"},
    "canonical_json": {"document": {"a": 1}},
    "key_is_valid": {"key": KEY},
    "claim": {"scope": "s", "key": OTHER, "request_hash": b"h", "ttl": "1h", "lease": "1min", "wait": "0s"},
    "complete": {"scope": "s", "key": KEY, "response_status": 200, "response_body": "b", "response_headers": {"A": "b"}},
    "checkpoint": {"scope": "s", "key": KEY, "recovery_point": "p", "recovery_state": {"a": 1}, "lease": "1min"},
    "heartbeat": {"scope": "s", "key": KEY, "lease": "1min"},
    "fail": {"scope": "s", "key": KEY, "error": "e"},
    "release": {"scope": "s", "key": KEY},
    "lookup": {"scope": "s", "key": KEY},
    "forget": {"scope": "s", "key": KEY},
    "erase": {"scope": "s", "key": KEY},
    "claim_many": {"scope": "s", "keys": [OTHER, OTHER], "request_hashes": [b"h"], "ttl": "1h", "lease": "1min"},
    "complete_many": {"scope": "s", "keys": [KEY], "response_statuses": [200], "response_bodies": ["b"], "response_headers": [{"A": "b"}]},
    "try_advance": {"user_id": "u", "entity_type": "e", "entity_id": "1", "action_id": 1},
    "toggle": {"user_id": "u", "entity_type": "e", "entity_id": "1", "action_type": "a", "action_id": 1},
    "set": {"user_id": "u", "entity_type": "e", "entity_id": "1", "action_type": "a", "active": True, "action_id": 1, "excludes": ["b"]},
    "is_active": {"user_id": "u", "entity_type": "e", "entity_id": "1", "action_type": "a"},
    "action_states": {"user_id": "u", "entity_type": "e", "entity_ids": ["1", "2"]},
    "forget_user": {"user_id": "u"},
    "try_advance_many": {"user_ids": ["u"], "entity_types": ["e"], "entity_ids": ["1", "2"], "action_ids": [1, 2]},
    "set_many": {"user_ids": ["u"], "entity_types": ["e"], "entity_ids": ["1", "2"], "action_types": ["a"], "actives": [True],
                 "action_ids": [1, 2]},
    "try_append": {"aggregate": "a", "client_id": "c", "client_seq": 1, "event_count": 1, "expected_version": 0, "wait": "0s"},
    "last_client_seq": {"aggregate": "a", "client_id": "c"},
    "once": {"scope": "s", "token": "t", "ttl": "1h"},
    "once_many": {"scope": "s", "tokens": ["t", "v"], "ttl": "1h"},
    "once_at": {"scope": "s", "token": "t"},
    "publish": {"topic": "t", "payload": {"a": 1}, "message_key": "k", "headers": {"h": "x"}, "deliver_after": "0s"},
    "publish_many": {"topics": ["t"], "payloads": [1, 2], "message_keys": ["k", "l"], "headers": [{"h": 1}, None]},
    "outbox_take": {"max_messages": 1, "lease": "30s", "topics": ["t"], "wait": "0s"},
    "outbox_ack": {"ids": [1]},
    "outbox_nack": {"id": 10**9, "error": "e", "retry_after": "1s", "attempt": 1},
    "outbox_requeue": {"ids": [1]},
    "outbox_extend": {"ids": [1], "lease": "30s", "attempts": [1]},
    "outbox_release": {"ids": [1], "attempts": [1]},
    "cleanup": {"batch_size": 10},
    "raise_claim_tokens": {"at_least": 1},
    "abandoned": {"older_than": "5min"},
}
# Edge values, by the name or the type of an argument.
EDGES = {
    "key": [None, "", "x" * 15, "x" * 16, "x" * 128, "x" * 129, "é" * 20, "a\0" + KEY, "\ud800" + KEY],
    "method": [None, "", "post", "GE T", "P\0T"],
    "text": [None, "", "\0", "\ud800", "ž" * 256, "ž" * 257],
    "bytea": [None, b"", b"x" * 64, b"x" * 65],
    "boolean": [None, False],
    "int": [None, 0, -1, 99, 599, 600, 2**31 - 1, 2**31, -2**31, -2**31 - 1],
    "bigint": [None, 0, -1, 2**62, 2**63 - 1, 2**63, -2**63, -2**63 - 1],
    "interval": [None, "0s", "-1s", "", "soon", "1 fortnight", "10 minutes", "PT1S", "12 hours", "13 hours", "1 year", "400000000 days"],
    "wait": [None, "-1s", "11 minutes", "soon"],
    "json": [None, [], "s", {"A": ["b"]}, {"a": "\0"}, {"a": "\ud800"}, JsonText("{"), JsonText(""), JsonText("1e200000"), "x" * 1_100_000],
    "response_body": [None, "", "a\0", "\ud800", b"\0\xff", "x" * 2**20, "x" * (2**20 + 1), b"x" * 2**20, b"x" * (2**20 + 1)],
}


def edges(name, kind, given):
    """The values to try for an argument."""
    if kind.endswith("[]"):
        singular = {"request_hashes": "bytea", "response_bodies": "response_body", "keys": "key"}.get(name, kind[:-2])
        values = [one for one in edges(singular, kind[:-2], None) if name != "response_bodies" or not isinstance(one, bytes)]
        return [None, [], given * 3, *[[one] for one in values], *[[given[0], one] for one in values]]
    return EDGES.get(name) or EDGES[kind.replace("jsonb", "json")]


def end_in_transaction(client, name, given):
    """The end of a call in a transaction that has a claim and a message, and is rolled back."""
    class Undo(Exception):
        pass

    end = None
    try:
        with client.transaction() as tx:
            functions = client.on(tx)
            functions.claim("s", KEY)
            functions.publish("t", 1)
            try:
                getattr(functions, name)(**given)
                end = "ok"
            except Exception as error:
                end = getattr(error, "sqlstate", None) or type(error).__name__
            raise Undo
    except Undo:
        return end


@pytest.mark.parametrize("name", CALLS)
def test_edges_of_each_argument(idem, name):
    """The double ends each call as the server does: without an error, or with the same one."""
    double, given, wrong = MemoryIdempotency(), CALLS[name], []
    for argument, kind, _ in Functions.__dict__[name].make(None, **given).arguments:
        if argument in given:
            for value in edges(argument, kind, given[argument]):
                ends = [end_in_transaction(client, name, {**given, argument: value}) for client in (idem, double)]
                if ends[0] != ends[1]:
                    wrong.append((*ends, argument, str(value)[:80]))
    assert end_in_transaction(idem, name, given) == end_in_transaction(double, name, given) == "ok"
    assert not wrong, "\n".join(map(str, wrong))


def test_a_claim_does_not_wait_for_its_own_transaction(idem):
    for client in idem, MemoryIdempotency():
        key, before = new_key(), time.monotonic()
        with client.transaction() as tx:
            assert [client.on(tx).claim("s", key, wait="30s").outcome for _ in range(2)] == ["new", "in_progress"]
        assert time.monotonic() - before < 20


def test_the_double_says_what_it_lacks():
    with pytest.raises(NotImplementedError, match="test them with a server"):
        MemoryIdempotency().claim("s", new_key(), request={"a": 1})


class Error(Exception):
    """Of a handler."""


def raised(error, expected):
    """Whether it has one of these SQLSTATEs or classes; None is any."""
    known = {getattr(error, "sqlstate", None), type(error).__name__}
    return expected is None or bool(known & set([expected] if isinstance(expected, str) else expected))


def agrees(found, expected):
    """With the value, or with the members that are named."""
    if isinstance(expected, dict):
        return all(getattr(found, name) == value for name, value in expected.items())
    return expected is None or found == expected


def perform(client, run, scope, key):
    """What a run of the contract ends with: a result."""
    def filled(given):
        return {name: key if value == "$key" else value for name, value in given.items()}

    def handle(functions, job=None):
        for name, *rest in run["do"]:
            match name:
                case "never":
                    raise AssertionError("it ran")
                case "throw":
                    raise Error
                case "sleep":
                    time.sleep(*rest)
                case "step":
                    assert job.step(rest[0], lambda step: rest[1]) == rest[2]
                case _:
                    given, expected = rest
                    try:
                        found = getattr(functions, name)(**filled(given))
                    except Exception as error:
                        if not isinstance(expected, dict) or not raised(error, expected.get("raises", [])):
                            raise
                        continue
                    assert agrees(found, expected), (name, found)
        return Response(**run.get("answer", {}))

    options = {"method": "POST", "path": run.get("path", "/"), "ttl_ms": run.get("ttl_ms")}
    match run["in"]:
        case "request":
            return client.request(scope, key, lambda tx: handle(client.on(tx)), **options)
        case "transaction":
            with client.transaction() as tx:
                response = handle(client.on(tx))
            return response
        case "job":
            return client.job(scope, key, lambda job: handle(client, job), **options)
        case "last step":
            return client.job(scope, key, lambda job: job.finish(lambda tx: handle(client.on(tx))), **options)


@pytest.mark.parametrize("double", [False, True], ids=["server", "double"])
@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case["name"].replace(" ", "_"))
def test_contract(pool, case, double):
    client = MemoryIdempotency() if double else Idempotency(pool)
    key, scope = case.get("key") or new_key(), value_of(case.get("scope", "scope"))
    for run in case["runs"]:
        try:
            end = perform(client, run, scope, key)
        except AssertionError:
            raise
        except Exception as error:
            if "raises" not in run["ends"] or not raised(error, run["ends"]["raises"]):
                raise
        else:
            assert "raises" not in run["ends"] and agrees(end, run["ends"]), end
        # The client counts the time from before the claim, the server from the claim.
        time.sleep(run.get("ttl_ms", 0) / 1000)
    try:
        state = client.lookup(scope, key).state
    except Exception:
        state = None                        # of a key or a scope that cannot be
    assert (state, client.once_at(key, "effect") is not None) == (case["state"], case["kept"])
