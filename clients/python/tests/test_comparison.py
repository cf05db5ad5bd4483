"""Which requests count as the same, and where a guard finds its key."""

import asyncio
import json
import time
import tracemalloc

import pytest
from asgi import ask
from fastapi import FastAPI
from fastapi import Request as FastAPIRequest
from flask import Flask, g
from flask import request as flask_request
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from pg_idempotency import AsyncIdempotency, new_key
from pg_idempotency import fastapi as for_fastapi
from pg_idempotency import flask as for_flask
from pg_idempotency import starlette as for_starlette
from pg_idempotency.comparison import form_keys
from pg_idempotency.http import Exchange, Guard, stored_key
from pg_idempotency.memory import AsyncMemoryIdempotency, MemoryIdempotency

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


def starlette_shop(idem, **options):
    async def order(request):
        found = getattr(request.state, "idempotency", None)
        return Response(f"{found and found.key} {len(await request.body())}")

    app = Starlette(routes=[Route("/o", for_starlette.Guard(scope=lambda request: "u", **options)(order),
                                  methods=["GET", "POST"])])
    for_starlette.install(app, idem)
    return app


def fastapi_shop(idem, **options):
    app = FastAPI()

    @app.api_route("/o", methods=["GET", "POST"])
    @for_fastapi.Guard(scope=lambda request: "u", **options)
    async def order(request: FastAPIRequest):
        found = getattr(request.state, "idempotency", None)
        return Response(f"{found and found.key} {len(await request.body())}")

    for_fastapi.install(app, idem)
    return app


def flask_shop(idem, **options):
    app = Flask(__name__)

    @app.route("/o", methods=["GET", "POST"])
    @for_flask.Guard(scope=lambda request: "u", **options)
    def order():
        found = getattr(g, "idempotency", None)
        return f"{found and found.key} {len(flask_request.get_data())}"

    for_flask.install(app, idem)
    return app


def answered(app, body, content_type, key, method):
    if isinstance(app, Flask):
        headers = {"Idempotency-Key": key} if key else {}
        found = app.test_client().open("/o", method=method, data=body, headers=headers, content_type=content_type)
        return found.status_code, found.headers.get("Idempotent-Replayed") == "true", found.data
    answer = asyncio.run(ask(app, key, body=body, method=method, headers=[("content-type", content_type)]))
    return answer.status, answer.replayed, answer.body


@pytest.fixture(params=["starlette", "fastapi", "flask"])
def framework(request):
    return {"starlette": starlette_shop, "fastapi": fastapi_shop, "flask": flask_shop}[request.param]


@pytest.fixture(params=["server", "double"])
def asked(request, framework, idem, database):
    """A function that sends requests to a shop with these options, all with one key."""
    def shop(**options):
        key = options.pop("key", new_key())
        method = options.pop("method", "POST")
        double = {True: MemoryIdempotency, False: AsyncMemoryIdempotency}[framework is flask_shop]()

        def send(body, content_type=JSON, key=key, method=method):
            if request.param == "double":
                return answered(framework(double, **options), body, content_type, key, method)
            if framework is flask_shop:
                return answered(framework(idem, **options), body, content_type, key, method)

            from psycopg_pool import AsyncConnectionPool

            async def main():
                async with AsyncConnectionPool("", min_size=1, open=False) as pool:
                    headers = [("content-type", content_type)]
                    return await ask(framework(AsyncIdempotency(pool), **options), key, body=body, method=method, headers=headers)

            answer = asyncio.run(main())
            return answer.status, answer.replayed, answer.body
        return send
    return shop


def test_json_is_compared_in_canonical_form(asked):
    send = asked()
    assert send(b'{"a": 1, "b": [1.0, "\\u0061"]}')[:2] == (200, False)
    assert send(b'{"b":[1,"a"],  "a":1e0}')[:2] == (200, True)
    for parameters in "; charset=utf-8", ";odata.metadata=minimal", '; profile="x"; charset="UTF-8"':
        assert send(b'{"a": 1, "b": [1.0, "a"]}', f"application/json{parameters}")[:2] == (200, True)
    assert send(b'{"a": 1, "b": [1.0, "a"]}', "application/json; profile=x; charset=latin1")[0] == 422
    assert send(b'{"a": 2, "b": [1.0, "a"]}')[0] == 422


@pytest.mark.parametrize("one, other", [
    (b'{"n": 9007199254740993}', b'{"n": 9007199254740992}'), (b'{"a": "1"}', b'{"a": 1}'),
    (b'{"a": "\\u00001"}', b'{"a": 1}'), (b'{"a": "\\u00001"}', b'{"a": "\\u00002"}'), (b'{"a": null}', b"{}"),
    (b"[1]", b"[1, 1]"), (b"{", b"{ "), (b'{"a": "\\ud800"}', b'{"a": "\\ud801"}'), (b"\xff", b"\xfe"),
    (b'{"n": 1e200000}', b'{"n": 1e200001}')])
def test_other_documents_are_other_requests(asked, one, other):
    send = asked()
    assert send(one)[:2] == (200, False)
    assert send(one)[:2] == (200, True)
    assert send(other)[0] == 422


def test_other_types_are_compared_by_their_bytes(asked):
    send = asked()
    assert send(b'{"a":1}', "text/plain")[:2] == (200, False)
    assert send(b'{"a": 1}', "text/plain")[0] == 422


def test_multipart_forms_are_compared_without_their_boundary(asked):
    def body(boundary, text=b"x"):
        return (b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n%b\r\n--B--\r\n' % text).replace(b"B", boundary, 1).replace(
            b"--B--", b"--" + boundary + b"--")

    send = asked()
    assert send(body(b"one", b"x one"), "multipart/form-data; boundary=one")[:2] == (200, False)
    assert send(body(b"two", b"x one"), 'multipart/form-data; boundary="two"')[:2] == (200, True)
    for text in b"y", b"x ", b"x one\r\n--", b"x two", b"two x", b"x--two", b"":
        assert send(body(b"two", text), "multipart/form-data; boundary=two")[0] == 422


def test_members_can_be_left_out(asked):
    send = asked(fingerprint=["/meta/traceId", "/a~1b", "/list/0/t"])

    def body(trace, more=1):
        return json.dumps({"meta": {"traceId": trace, "x": more}, "a/b": trace, "list": [{"t": trace}]}).encode()

    assert send(body("one"))[:2] == (200, False)
    assert send(body("two"))[:2] == (200, True)
    assert send(body("two", 2))[0] == 422


@pytest.mark.parametrize("body", [b"5", b"null", b'"text"', b"[]"])
def test_a_document_without_members_is_compared_whole(asked, body):
    send = asked(fingerprint=["/meta"])
    assert [send(one)[:2] for one in (body, body)] == [(200, False), (200, True)] and send(b"7")[0] == 422


@pytest.mark.parametrize("options", [{"conflict_status": 200}, {"wait": "x"}, {"lease": "-1s"}, {"max_request_size": -1}, {"store": 5},
                                     {"form_field": 5}, {"ttl": "soon"}])
def test_an_option_that_fails_each_request_is_refused(options):
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(options))}|limit"):
        for_flask.Guard(scope=lambda request: "u", **options)


def test_a_function_can_say_what_is_compared(asked):
    send = asked(fingerprint=lambda request, body: body[:3])
    assert send(b"abc1", "text/plain")[:2] == (200, False)
    assert send(b"abc2", "text/plain")[:2] == (200, True)
    assert send(b"abd2", "text/plain")[0] == 422


@pytest.mark.parametrize("fingerprint", ["/a", ["a"], [1], 7])
def test_a_fingerprint_that_is_none_is_refused(fingerprint):
    with pytest.raises((ValueError, TypeError)):
        for_flask.Guard(scope=lambda request: "u", fingerprint=fingerprint)


def test_a_form_has_its_key_in_a_field(asked):
    send, key = asked(key=None), new_key()
    body = f"a=1&_idempotency_key={key}&b=2".encode()
    first = send(body, FORM)
    assert first[:2] == (200, False) and first[2].startswith(key.encode())
    assert send(body, FORM)[:2] == (200, True)
    assert send(body.replace(b"a=1", b"a=2"), FORM)[0] == 422
    assert send(b"a=1", FORM)[0] == 400
    multipart = (f'--B\r\nContent-Disposition: form-data; name="_idempotency_key"\r\n\r\n{new_key()}\r\n'
                 '--B\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\nx\r\n--B--\r\n').encode()
    assert [send(multipart, "multipart/form-data; boundary=B")[:2] for _ in range(2)] == [(200, False), (200, True)]


def test_a_large_multipart_form_is_compared_without_its_boundary(asked):
    send = asked(max_request_size=10 << 20)
    for boundary, replayed in (("one", False), ("two", True)):
        body = b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n%b\r\n--B--\r\n' % (b"x" * (3 << 20))
        body = body.replace(b"--B", b"--" + boundary.encode())
        assert send(body, f"multipart/form-data; boundary={boundary}")[:2] == (200, replayed)


MULTIPART = "multipart/form-data; boundary=B"


def test_a_large_form_is_in_memory_once():
    exchange = Exchange(MemoryIdempotency(), "POST", "/", [], None, MULTIPART)
    exchange.limit_body(50 << 20)
    file = b"x" * (10 << 20)
    exchange.read(b'--B\r\nContent-Disposition: form-data; name="_idempotency_key"\r\n\r\nkey\r\n'
                  b'--B\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n' + file + b"\r\n--B--\r\n")
    tracemalloc.start()
    assert exchange.form_key("_idempotency_key") == "key" and exchange.request_hash(Guard(scope=lambda request: "u"), None)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


def part(disposition, value, *headers):
    return "\r\n".join(["--B", *headers, "", value, ""]).replace("--B", f"--B\r\nContent-Disposition: form-data; {disposition}", 1)


@pytest.mark.parametrize("form", [
    part("name=_idempotency_key", "KEY"), part('name="_idempotency_key"', "KEY", "Content-Type: text/plain; charset=utf-8"),
    part('\tname="_idempotency_key"', "KEY"), part('name="a"', "x" * 3_000_000) + part('name="_idempotency_key"', "KEY"),
    part('name = "_idempotency_key"', "KEY"), part("name*=utf-8''_idempotency_key", "KEY"),
    part('\r\n name="_idempotency_key"', "KEY"), part('name="_idempotency_key"; filename=""', "KEY"),
    part('name="_idempotency_key"', "KEY").replace("n: form-data", "n : attachment"),
    "%5fidempotency_%6Bey=KEY", "a=1&_idempotency_key=KEY&a=2", "a=" + "x" * 3_000_000 + "&_idempotency_key=KEY"])
def test_a_guard_that_is_optional_runs_for_a_form_that_has_a_key(asked, form):
    send = asked(key=None, required=False, max_request_size=10 << 20)
    body = form.replace("KEY", new_key()).encode()
    if form.startswith("--B"):
        assert [send(sent + b"--B--\r\n", MULTIPART)[:2] for sent in (body, body)] == [(200, False), (200, True)]
        assert send((body + b"--B--\r\n").replace(b"--B", b"--CC"), "multipart/form-data; boundary=CC")[:2] == (200, True)
    else:
        assert [send(body, FORM)[:2] for _ in range(2)] == [(200, False), (200, True)]


@pytest.mark.parametrize("form", [
    "_idempotency_key=KEY&_idempotency_key=KEY", "_idempotency_key=KEY&a=1&_idempotency%5fkey=other", "_idempotency_key=",
    part("name=_idempotency_key", "KEY") * 2])
def test_a_form_with_two_keys_or_an_empty_one_is_refused(asked, form):
    body = form.replace("KEY", new_key()).encode()
    status, _, said = asked(key=None, required=False)(body, MULTIPART if form.startswith("--B") else FORM)
    assert status == 400 and b"key-invalid" in said


def test_the_text_of_a_file_is_no_key(asked):
    inside = f'\r\nContent-Disposition: form-data; name="_idempotency_key"\r\n\r\n{new_key()}\r\n'
    form = part('name="f"; filename="f"', inside) + part('name="_idempotency_key"; filename="f"', new_key()) + "--B--\r\n"
    assert asked(key=None)(form.encode(), MULTIPART)[0] == 400
    assert asked(key=None, required=False)(form.encode(), MULTIPART)[:2] == (200, False)


def test_a_form_of_many_fields_takes_no_longer_than_another():
    began = time.process_time()
    assert form_keys(FORM, b"a=1&" * 500_000 + b"_idempotency_key=k", "_idempotency_key") == ["k"]
    assert form_keys(MULTIPART, b"\r\n--B" * 300_000, "_idempotency_key") == []
    assert time.process_time() - began < 0.5


def test_a_form_field_can_have_another_name_or_none(asked):
    key = new_key()
    assert asked(key=None, form_field="once")(f"once={key}".encode(), FORM)[:2] == (200, False)
    assert asked(key=None, form_field=None)(f"_idempotency_key={key}".encode(), FORM)[0] == 400
    assert asked(key=None, required=False)(b"a=1", FORM)[0] == 200


def test_any_key_of_up_to_255_characters(asked):
    send = asked(any_key=True)
    own = new_key()
    for key in (f'"{own[-8:]}"', f'"{own:k<255}"', f'"a key, with blanks! {own}"'):
        assert send(b"1", key=key)[:2] == (200, False)
        found = send(b"1", key=key)
        assert found[:2] == (200, True) and found[2].startswith(key[1:-1].encode())
    assert send(b"1", key='"' + "k" * 256 + '"')[0] == 400
    assert send(b"1", key='""')[0] == 400
    assert asked()(b"1", key='"x"')[0] == 400
    # The same key in both languages, and in every format of keys.
    assert stored_key("abc", True) == "ba7816bf-8f01-8fea-8141-40de5dae2223"


def test_methods_that_are_not_guarded(asked):
    send = asked(methods={"POST"})
    assert [send(b"", method="GET", key=None) for _ in range(2)] == [(200, False, b"None 0")] * 2
    assert send(b"1", key=None)[0] == 400
    assert [send(b"1")[:2] for _ in range(2)] == [(200, False), (200, True)]
