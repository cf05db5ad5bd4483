"""The double does as the server does: the tables of test/http, arguments.json and contract.json, which Node's tests run, too."""

import json
import time
from pathlib import Path

import pytest

from pg_idempotency import Idempotency, JsonText, Response, new_key
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
        ends = [end_of(client, name, given) for client in (idem, MemoryIdempotency())]
        if ends != [state, state]:
            wrong.append((*ends, name, str(given)[:150], state))
    assert not wrong, "\n".join(map(str, wrong))


def both(idem, call):
    """The ends of a call on the server and on the double: its value, or the SQLSTATE or the class of its error."""
    ends = []
    for client in (idem, MemoryIdempotency()):
        try:
            ends.append(call(client))
        except Exception as error:
            ends.append(getattr(error, "sqlstate", None) or type(error))
    return ends


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
    try:
        state = client.lookup(scope, key).state
    except Exception:
        state = None                        # of a key or a scope that cannot be
    assert (state, client.once_at(key, "effect") is not None) == (case["state"], case["kept"])
