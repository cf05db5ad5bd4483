"""
Named statements: the server parses and plans each text once for a connection.

A text gets its name at the second use on a connection.  In the first exchange, the server is asked
for its process id: if it is not the connection's own, a pooler is in between, which might
send the next transaction to another session.  A session that has lost them (DISCARD ALL,
DEALLOCATE ALL) or whose functions have changed answers STALE; that connection does without
them from then on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

STALE = {"26000", "0A000", "42P05"}
"""There is no such statement; its plan does not fit any more; another session's is there."""
MAX_PREPARED = 100
"""Texts of one connection."""
ASK = "SELECT pg_catalog.pg_backend_pid()"


@lru_cache(maxsize=1000)
def _named(text: str, count: int) -> tuple[str, str]:
    """The name for a text, and what prepares it.  A name stands for one text in all programs."""
    name = "idem_" + hashlib.sha256(text.encode()).hexdigest()[:20]
    return name, f"PREPARE {name} AS {text % tuple(f'${number}' for number in range(1, count + 1))}"


class Prepared:
    """The named statements of one connection."""

    def __init__(self, allowed: bool) -> None:
        self.is_allowed = None if allowed else False
        """None: the server was not asked yet."""
        self._texts: dict[str, bool] = {}
        """Those that were used, and whether they have been prepared."""

    def to_prepare(self, text: str, count: int) -> str | None:
        """What prepares a text with that number of %s, if that is to be done now.  It is sent alone: the server keeps the
        whole query that it came in."""
        if len(self._texts) < MAX_PREPARED and text not in self._texts:
            self._texts[text] = False
            return None
        return _named(text, count)[1] if self.is_allowed and self._texts.get(text) is False else None

    def made(self, text: str) -> None:
        self._texts[text] = True

    def call(self, text: str, literals: Sequence[str]) -> str:
        """What performs the text."""
        if not self.is_allowed or not self._texts.get(text):
            return text % tuple(literals)
        name = _named(text, len(literals))[0]
        return f"EXECUTE {name}({', '.join(literals)})" if literals else f"EXECUTE {name}"

    def answered(self, server: int, own: int) -> None:
        """The process ids that the server and the connection have named."""
        self.is_allowed = server == own

    def forget(self, state: str | None) -> bool:
        """After an error: whether it came of a named statement.  There will be none again."""
        if not self.is_allowed or state not in STALE:
            return False
        self.is_allowed = False
        return True


_of_connections: WeakKeyDictionary[Any, Prepared] = WeakKeyDictionary()


def prepared_of(connection: Any) -> Prepared:
    found = _of_connections.get(connection)
    if found is None:
        # Without a threshold, the user's pooler knows none.
        found = _of_connections[connection] = Prepared(connection.prepare_threshold is not None)
    return found
