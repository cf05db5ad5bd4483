"""What users write passes a strict type check."""

import inspect
import os
import pydoc
import subprocess
import sys
from pathlib import Path

import pg_idempotency
from pg_idempotency.functions import Functions, function
from pg_idempotency.memory import MemoryIdempotency

SAMPLE = """
from flask import Flask, Request, session
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse
from pg_idempotency import AsyncIdempotency, Idempotency, Response, starlette
from pg_idempotency.flask import Guard, install
from pg_idempotency.memory import AsyncMemoryIdempotency, MemoryIdempotency

def service(idem: Idempotency) -> str | bytes | None:
    return idem.request("a", "b", lambda tx: Response.json({"a": 1}, 201), wait="5s").body

def asynchronous(idem: AsyncIdempotency) -> None: ...

async def user(request: StarletteRequest) -> str:
    return str(request.user.display_name)

service(MemoryIdempotency(wait="5s"))
MemoryIdempotency(timout="5s")                      # type: ignore[call-arg]
Idempotency("", timout="5s")                        # type: ignore[call-arg]
service(Idempotency("", shards=lambda conninfo: conninfo))
asynchronous(AsyncMemoryIdempotency())

@Guard(scope=lambda request: session["user"], wait="5s")
def view(number: int) -> str:
    return str(number)

view(1).upper()
install(Flask(""), Idempotency(""))

@starlette.Guard(scope=user)
async def endpoint(request: StarletteRequest) -> PlainTextResponse:
    return PlainTextResponse(request.method)

starlette.install(Starlette(), AsyncIdempotency(""))
"""


def test_types(tmp_path):
    """Of the package, too."""
    (tmp_path / "sample.py").write_text(SAMPLE)
    package = Path(pg_idempotency.__file__).parent
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--cache-dir", os.devnull,
                           package, "sample.py"], cwd=tmp_path, env={**os.environ, "MYPYPATH": str(package.parent)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_shows_each_function():
    """Its arguments, what it returns, and a sentence."""
    for name, found in vars(Functions).items():
        if isinstance(found, function):
            method = getattr(MemoryIdempotency(), name)
            signature = inspect.signature(method)
            assert method.__doc__ and "self" not in signature.parameters, name
            assert "Statement" not in str(signature.return_annotation), name
    assert str(inspect.signature(MemoryIdempotency().once_at)).endswith(
        "(scope: str, token: str) -> datetime.datetime | None")
    text = pydoc.plain(pydoc.render_doc(MemoryIdempotency().set))
    assert "active: bool" in text and "the latest intent wins" in text
