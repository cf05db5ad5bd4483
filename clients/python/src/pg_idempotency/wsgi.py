"""The body of a WSGI request, hashed while the application reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .http import Exchange

PIECE = 1 << 16


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
