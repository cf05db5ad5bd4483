"""What Flask and Django share: the environment of a WSGI request, and its body, hashed while the application reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .client import Defaults
from .http import Exchange

PIECE = 1 << 16
RANGES = "HTTP_RANGE", "HTTP_IF_RANGE"
CONDITIONS = "HTTP_IF_NONE_MATCH", "HTTP_IF_MODIFIED_SINCE"


def exchange_of(client: Defaults, environ: dict[str, Any], path: str) -> Exchange:
    key, length = environ.get("HTTP_IDEMPOTENCY_KEY"), str(environ.get("CONTENT_LENGTH"))
    return Exchange(client, environ["REQUEST_METHOD"], path, [] if key is None else [key], int(length) if length.isdecimal() else None,
                    environ.get("CONTENT_TYPE") or "", environ.get("HTTP_CONTENT_ENCODING", "identity") != "identity")


def forget_range(environ: dict[str, Any]) -> None:
    """The whole response is stored, and not the range of the first request, nor that its client has a copy."""
    # Of other methods, If-None-Match is a condition that the handler checks.
    for name in (*RANGES, *CONDITIONS) if environ["REQUEST_METHOD"] in ("GET", "HEAD") else RANGES:
        environ.pop(name, None)


class Input:
    """wsgi.input; it has the methods of PEP 3333."""

    def __init__(self, source: Any, exchange: Exchange) -> None:
        self._source, self._exchange = source, exchange

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size >= 0:
            return self._exchange.read(self._source.read(size))
        # In pieces, for the limit.
        return b"".join(iter(lambda: self._exchange.read(self._source.read(PIECE)), b""))

    def readline(self, *size: int) -> bytes:
        return self._exchange.read(self._source.readline(*size))

    def readlines(self, hint: int = -1) -> list[bytes]:
        return list(self)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def close(self) -> None:
        """Django 4.2 closes its own stream."""
        getattr(self._source, "close", lambda: None)()
