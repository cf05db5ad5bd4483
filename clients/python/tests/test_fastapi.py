"""Guards in FastAPI, where test/http does not look.  Annotations are texts here, as in many applications."""

from __future__ import annotations

import asyncio
import functools
import json
from decimal import Decimal

import pytest
from asgi import CopiesScope, ask
from fastapi import APIRouter, BackgroundTasks, Body, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from pg_idempotency import new_key
from pg_idempotency.fastapi import Guard, install
from pg_idempotency.starlette import Guard as StarletteGuard


class Order(BaseModel):
    sku: str
    count: int = 1


class Placed(BaseModel):
    id: int
    price: Decimal = Decimal("1.50")


TOKENS = {}


def user(authorization: str = Header("")):
    if authorization not in TOKENS:
        raise HTTPException(401, "who are you?")
    return TOKENS[authorization]


async def insert(request, name):
    await request.state.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (name,))


def order_of(sku, count=1):
    return json.dumps({"sku": sku, "count": count}).encode()


JSON = ("content-type", "application/json")
AGAIN = "DO $$BEGIN RAISE 'again' USING ERRCODE = '40001'; END$$"


def test_a_replay_is_for_those_who_have_logged_in(asynchronously):
    """Dependencies refuse it as they refuse the request itself."""
    async def test(idem, pool):
        app, key = FastAPI(), new_key()

        @app.post("/o")
        @Guard(scope=lambda request, owner: owner)
        async def place(request: Request, order: Order, owner: str = Depends(user)):
            await insert(request, key)
            return {"sku": order.sku, "owner": owner}

        install(app, idem)

        async def found(token):
            answer = await ask(app, key, body=order_of("pot"), headers=[JSON, ("authorization", token)])
            return answer.status, json.loads(answer.body).get("owner"), answer.replayed

        TOKENS["secret"] = "ann"
        assert await found("") == (401, None, False)
        assert [await found("secret") for _ in range(2)] == [(200, "ann", False), (200, "ann", True)]
        assert await found("") == (401, None, False)
        TOKENS.clear()
        assert await found("secret") == (401, None, False)

    asynchronously(test)


def test_what_the_endpoint_returns_is_made_a_response_as_ever(asynchronously, effects):
    """response_model, status_code, what it sets on the response, its background tasks: in the stored one, too."""
    async def test(idem, pool):
        app, router, behind = FastAPI(), APIRouter(prefix="/v1"), []

        def sets(response: Response, tasks: BackgroundTasks):
            response.headers["Link"] = "</of/dependency>"
            response.set_cookie("seen", "1")
            tasks.add_task(behind.append, "dependency")

        @router.post("/o", response_model=Placed, status_code=201, dependencies=[Depends(sets)])
        @Guard(scope=lambda request: "u")
        async def place(order: Order, request: Request, response: Response, tasks: BackgroundTasks):
            await insert(request, request.state.idempotency.key)
            response.headers["Location"] = f"/o/{order.sku}"
            response.status_code = 202 if order.count == 2 else None
            tasks.add_task(behind.append, "endpoint")
            return {"id": 7, "secret": "x"}

        @router.post("/plain")
        @Guard(scope=lambda request: "u", required=False)
        async def plain(order: Order) -> Placed:
            return Placed(id=8)

        app.include_router(router)
        install(app, idem)
        key = new_key()
        for number in range(2):
            behind.clear()
            answer = await ask(app, key, path="/v1/o", body=order_of("pot", 2), headers=[JSON])
            found = json.loads(answer.body)
            assert (answer.status, found["id"], float(found["price"])) == (202, 7, 1.5) and len(found) == 2
            assert (answer.headers["location"], answer.headers["link"]) == ("/o/pot", "</of/dependency>")
            assert answer.replayed == bool(number) and ("set-cookie" in answer.headers) == (not number)
            assert behind == (["dependency"] if number else ["dependency", "endpoint"])
        assert effects(key) == 1
        assert (await ask(app, new_key(), path="/v1/o", body=order_of("pot"), headers=[JSON])).status == 201
        answer = await ask(app, new_key(), path="/v1/plain", body=order_of("pot"), headers=[JSON])
        assert (answer.status, json.loads(answer.body)["id"]) == (200, 8)
        names = app.openapi()["paths"]["/v1/o"]["post"]
        assert "pg_idempotency" not in json.dumps(names) and "Placed" in json.dumps(names)

    asynchronously(test)


def test_a_response_that_does_not_fit_its_model_is_rolled_back(asynchronously, effects):
    async def test(idem, pool):
        app, key = FastAPI(), new_key()

        @app.post("/o", response_model=Placed)
        @Guard(scope=lambda request: "u")
        async def place(request: Request):
            await insert(request, key)
            return {"id": "none"}

        install(app, idem)
        assert (await ask(app, key)).status == 500 and effects(key) == 0
        assert (await idem.lookup("u", key)).state is None

    asynchronously(test)


def test_another_try_gets_what_the_first_one_got(asynchronously, effects):
    async def test(idem, pool):
        app, key, tries, behind = FastAPI(), new_key(), [], []

        def owner():
            tries.append("dependency")
            return "ann"

        @app.post("/o")
        @Guard(scope=lambda request: "u")
        async def place(request: Request, order: Order, tasks: BackgroundTasks, response: Response,
                        owner: str = Depends(owner)):
            order.count += 1
            tries.append((order.count, owner))
            tasks.add_task(behind.append, order.count)
            response.headers.append("Link", "</one>")
            await insert(request, key)
            if len(tries) < 4:
                await request.state.idempotency.tx.execute(AGAIN)
            return order

        install(app, idem)
        answer = await ask(app, key, body=order_of("pot"), headers=[JSON])
        assert (answer.status, json.loads(answer.body), answer.headers["link"]) == (200, {"sku": "pot", "count": 2}, "</one>")
        assert tries == ["dependency"] + [(2, "ann")] * 3 and behind == [2] and effects(key) == 1

    asynchronously(test)


def test_a_function_that_is_not_asynchronous_runs_in_a_thread(asynchronously):
    async def test(idem, pool):
        app, key = FastAPI(), new_key()

        @app.post("/o", status_code=201)
        @Guard(scope=lambda request, sku: sku)
        def place(sku: str = "u"):
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            return {"sku": sku}

        install(app, idem)
        assert [((answer := await ask(app, key)).status, answer.body, answer.replayed) for _ in range(2)] == [
            (201, b'{"sku":"u"}', False), (201, b'{"sku":"u"}', True)]

    asynchronously(test)


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_statement_that_was_never_awaited_is_no_success(asynchronously):
    """A function that is not asynchronous cannot await it."""
    async def test(idem, pool):
        app, key = FastAPI(), new_key()

        @app.post("/o")
        @Guard(scope=lambda request: "u")
        def place(request: Request):
            request.state.idempotency.tx.execute("INSERT INTO effects VALUES ('never')")

        install(app, idem)
        answer = await ask(app, key)
        assert answer.status == 500 and "tx.execute() was not awaited" in str(answer.escaped)
        assert (await idem.lookup("u", key)).state is None

    asynchronously(test)


def test_a_scope_of_other_arguments_is_an_error():
    async def place(owner: str, store: str = "main"):
        pass

    with pytest.raises(TypeError, match="'buyer'"):
        Guard(scope=lambda request, owner, buyer: buyer)(place)
    Guard(scope=lambda request, owner, *more, store, buyer="", **named: owner)(place)


def test_a_guard_that_cannot_run_is_an_error(asynchronously):
    async def test(idem, pool):
        app = FastAPI()

        @Guard(scope=lambda request: "u")
        @app.post("/above")
        async def above():
            raise AssertionError

        with pytest.raises(RuntimeError, match="bypasses the guard"):
            install(app, idem)
        app = FastAPI()

        @app.post("/wrapped")
        async def wrapped():
            raise AssertionError

        with pytest.warns(UserWarning):
            Guard(scope=lambda request: "u")(functools.wraps(wrapped)(lambda: wrapped()))
        with pytest.raises(RuntimeError, match="wrapped has a guard, but its route bypasses the guard"):
            install(app, idem)

        app, router, outer = FastAPI(), APIRouter(), APIRouter()

        @Guard(scope=lambda request: "u")
        @router.post("/above")
        async def above_in_router():
            raise AssertionError

        outer.include_router(router)
        app.include_router(outer)
        with pytest.raises(RuntimeError, match="bypasses the guard"):
            install(app, idem)

        app = FastAPI()

        @Guard(scope=lambda request: "u")
        async def dependency(request: Request):
            raise AssertionError

        @app.post("/o")
        async def place(found: str = Depends(dependency)):
            raise AssertionError

        @app.post("/starlette")
        @StarletteGuard(scope=lambda request: "u")
        async def other():
            raise AssertionError

        install(app, idem)
        assert "is not the endpoint of its route" in str((await ask(app, new_key())).escaped)
        assert "no install" in str((await ask(app, new_key(), path="/starlette")).escaped)

    asynchronously(test)


@pytest.mark.parametrize("of", ["router", "application"])
def test_options_of_routers_hold_for_a_guarded_endpoint(asynchronously, of):
    async def test(idem, pool):
        app, router, runs = FastAPI(**({"default_response_class": PlainTextResponse} if of == "application" else {})), APIRouter(), []

        @router.post("/o")
        @Guard(scope=lambda request: "u")
        async def place(request: Request, sku: str = Body(embed=True), count: int = Body(embed=True)):
            runs.append(1)
            await request.state.idempotency.tx.execute(AGAIN if len(runs) == 1 else "SELECT 1")
            return f"{count} {sku}"

        app.include_router(router, prefix="/p", **({"default_response_class": PlainTextResponse} if of == "router" else {}))
        install(app, idem)
        answer = await ask(app, new_key(), path="/p/o", body=order_of("pot", 2), headers=[JSON])
        assert (answer.status, answer.body, len(runs)) == (200, b"2 pot", 2)
        assert answer.headers["content-type"].startswith("text/plain")

    asynchronously(test)


@pytest.mark.parametrize("root_path", ["", "/api"])
def test_an_application_that_is_mounted(asynchronously, effects, root_path):
    async def test(idem, pool):
        outer, inner, key = FastAPI(root_path=root_path), FastAPI(), new_key()

        @inner.post("/o")
        @Guard(scope=lambda request: "u")
        async def place(request: Request):
            await insert(request, key)
            return "ok"

        outer.mount("/sub", inner)
        install(outer, idem)
        # In Starlette of today, paths have the root path in them.
        for path in {"/sub/o", f"{root_path}/sub/o"}:
            found = [await ask(outer, new_key(), path=path) for _ in range(2)]
            found += [await ask(outer, key, path=path) for _ in range(2)]
            if found[0].status != 404:
                break
        assert [(answer.status, answer.replayed) for answer in found] == [(200, False)] * 3 + [(200, True)]
        assert effects(key) == 3

    asynchronously(test)


@pytest.mark.parametrize("copies", [False, True])
def test_a_body_is_read_up_to_a_limit_before_the_login(asynchronously, copies):
    """FastAPI reads the body of a model before it asks its dependencies, also behind middleware that copies the scope."""
    async def test(idem, pool):
        app = FastAPI()
        if copies:
            app.add_middleware(CopiesScope)

        def login():
            raise HTTPException(401)

        @app.post("/o")
        @Guard(scope=lambda request, user: user, max_request_size=1000)
        async def order(items: list[str], user: str = Depends(login)):
            raise AssertionError

        install(app, idem)
        for key in new_key(), None:
            found = []
            for length, pieces in (2000, [b"x"] * 2000), (None, [b"x" * 600] * 4), (None, [b'["', b"x" * 600, b'"]']):
                headers = [("content-type", "application/json")] + ([("content-length", str(length))] if length else [])
                found.append(((await ask(app, key, pieces=pieces, headers=headers)).status, len(pieces)))
            assert found == [(413, 2000), (413, 2), (401, 0)]

    asynchronously(test)


def test_a_generator_is_refused():
    """FastAPI would take the guard for a generator, and answer 200 before anything ran."""
    async def pieces(request: Request):
        yield 1

    with pytest.raises(TypeError, match="in pieces"):
        Guard(scope=lambda request: "u")(pieces)
