"""What the server refuses, the double refuses with the same code: the table of test/http, which is Node's, too."""

import json
import time
from pathlib import Path

import psycopg
import pytest

from pg_idempotency import ClaimLost, ClaimNotFound, Idempotency, JsonText, Response, new_key
from pg_idempotency.memory import MemoryIdempotency

TABLE = json.loads(Path(__file__).parents[3].joinpath("test/http/arguments.json").read_text())


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
        assert "a duration is a number from 0 on" in str(error)
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


def swallow(client, tx):
    client.on(tx).once("swallowed", "token")
    try:
        client.on(tx).complete("scope", new_key(), 200)     # without a claim
    except Exception:
        pass
    return Response(200)


def use_transaction(client, key):
    with client.transaction() as tx:
        swallow(client, tx)


def late(seconds):
    def handler(_):
        time.sleep(seconds)
        return Response(200)
    return handler


FAULTS = {
    "an error that a request swallows": lambda client, key: client.request("scope", key, lambda tx: swallow(client, tx)),
    "an error that a transaction swallows": use_transaction,
    "an error that a last step swallows": lambda client, key: client.job(
        "scope", key, lambda job: job.finish(lambda tx: swallow(client, tx))),
    "a ttl that is over before the handler": lambda client, key: client.request("scope", key, late(0.3), ttl_ms=100),
    "a ttl that is over before the end of a job": lambda client, key: client.job(
        "scope", key, late(0.3), ttl_ms=100),
    "a status that no record has": lambda client, key: client.request("scope", key, lambda tx: Response(99 + 1)),
    "a scope that is too long": lambda client, key: client.request("x" * 513, key, late(0)),
    "a key that is too short": lambda client, key: client.request("scope", "short", late(0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(idem, pool, fault):
    """They end alike on the server and in the double."""
    ends = []
    for client in (Idempotency(pool), MemoryIdempotency()):
        key = new_key()
        try:
            end = FAULTS[fault](client, key).status
        except (ClaimLost, ClaimNotFound):
            end = "lost"                    # by the clock, or by a heartbeat
        except psycopg.Error as error:
            end = "DatabaseError", error.sqlstate
        except Exception as error:
            end = type(error).__name__.replace("DoubleError", "DatabaseError"), getattr(error, "sqlstate", None)
        ends.append((end, client.lookup("scope", key).state, client.once_at("swallowed", "token")))
    assert ends[0] == ends[1]
