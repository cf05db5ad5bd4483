"""What users write passes a strict type check."""

import os
import subprocess
import sys
from pathlib import Path

import pg_idempotency

SAMPLE = """
from pg_idempotency import AsyncIdempotency, Idempotency, Response
from pg_idempotency.flask import Guard
from pg_idempotency.http import Request
from pg_idempotency.memory import AsyncMemoryIdempotency, MemoryIdempotency

def service(idem: Idempotency) -> str | bytes | None:
    return idem.request("a", "b", lambda tx: Response.json({"a": 1}, 201), wait="5s").body

def asynchronous(idem: AsyncIdempotency) -> None: ...

async def user(request: Request) -> str:
    return str(request.scope["user"])

service(MemoryIdempotency())
service(Idempotency("", shards=lambda conninfo: conninfo))
asynchronous(AsyncMemoryIdempotency())
Guard(scope=lambda request: request.header("X-User"))
Guard(scope=lambda request: "ann", wait="5s")
Guard(scope=user)
"""


def test_types(tmp_path):
    (tmp_path / "sample.py").write_text(SAMPLE)
    source = str(Path(pg_idempotency.__file__).parents[1])
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", "sample.py"],
                          cwd=tmp_path, env={**os.environ, "MYPYPATH": source}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
