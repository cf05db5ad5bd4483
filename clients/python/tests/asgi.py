"""Requests to an application of ASGI, as a server hands them over."""

import asyncio
from dataclasses import dataclass, field


@dataclass
class Answer:
    status: int = 0
    headers: dict = field(default_factory=dict)
    body: bytes = b""
    escaped: Exception | None = None
    events: int = 0
    """How many have been sent."""

    @property
    def replayed(self):
        return self.headers.get("idempotent-replayed") == "true"


async def ask(app, key=None, *, path="/o", body=b"{}", method="POST", headers=(), root_path="", extensions=(),
              pieces=None, state=None):
    """The answer to a request; escaped is the error that came out of the application besides."""
    answer, parts = Answer(), [body] if pieces is None else pieces
    lines = [(b"idempotency-key", key.encode())] if key else []

    async def receive():
        if not parts:
            await asyncio.sleep(30)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(event):
        answer.events += 1
        if event["type"] == "http.response.start":
            answer.status = event["status"]
            answer.headers = {name.decode(): text.decode("latin-1") for name, text in event["headers"]}
        answer.body += event.get("body", b"")

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "root_path": root_path, "server": ("h", 80), "client": ("c", 1), "scheme": "http", "http_version": "1.1",
             "extensions": dict.fromkeys(extensions, {}),
             "headers": lines + [(name.encode(), text.encode()) for name, text in headers]}
    if state is not None:
        state.append(answer)
    try:
        await app(scope, receive, send)
    except Exception as error:
        answer.escaped = error
    return answer


class CopiesScope:
    """Middleware that changes the scope, which the specification of ASGI wants to be copied for that."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        await self.app({**scope, "tenant": 1}, receive, send)
