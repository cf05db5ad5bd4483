"""
Named statements: the server parses and plans each text once for a connection.

A text gets its name at the second use on a connection.  In the first exchange, the server is asked for its process id: if
it is not the connection's own, a pooler is in between, which might send the next transaction to another session.  A session
that has lost them (DISCARD ALL, DEALLOCATE ALL) or whose functions have changed answers STALE; that connection does without
them from then on.  psycopg deallocates all statements after a rollback or a DROP, if it has prepared some of its own: then
the session is asked for those that it still has.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

STALE = {"26000", "0A000", "42P05"}
"""There is no such statement; its plan does not fit any more; another session's is there."""
MAX_PREPARED = 100
"""Texts of one connection."""
ASK = "SELECT pg_catalog.pg_backend_pid()"
LIST = "SELECT name FROM pg_catalog.pg_prepared_statements"


@lru_cache(maxsize=1000)
def _named(text: str, count: int) -> tuple[str, str]:
    """The name for a text, and the command that prepares it.  A name stands for one text in all programs."""
    name = "idem_" + hashlib.sha256(text.encode()).hexdigest()[:20]
    return name, f"PREPARE {name} AS {text % tuple(f'${number}' for number in range(1, count + 1))}"


class Prepared:
    """The named statements of one connection."""

    def __init__(self, allowed: bool) -> None:
        self.is_allowed = None if allowed else False
        """None: the server was not asked yet.  True: the process id that it has named is the connection's own."""
        self.is_in_doubt = False
        """psycopg may have deallocated them."""
        self._names: dict[str, str | None] = {}
        """Those of the texts that were used; None if it was not prepared."""
        self.types: defaultdict[str, dict[int, int]] = defaultdict(dict)
        """Of the columns of each text."""
        self._gone = 0
        """Names that psycopg has made for its own statements, and does not use any more."""

    def follow(self, connection: Any) -> None:
        """Before each statement."""
        manager = getattr(connection, "_prepared", None)
        gone = getattr(manager, "_prepared_idx", 0) - len(getattr(manager, "_names", ()))
        if gone > self._gone and self._names:
            self.is_in_doubt = True
        self._gone = gone

    def found(self, names: Collection[str]) -> None:
        """The session has these."""
        self._names = {text: name if name in names else None for text, name in self._names.items()}
        self.is_in_doubt = False

    def to_prepare(self, text: str, count: int) -> str | None:
        """The command that prepares a text with that number of %s, if now is the time.  Send it alone, because the server keeps
        the whole query that it is part of."""
        if text not in self._names:
            if len(self._names) < MAX_PREPARED:
                self._names[text] = None
            return None
        return _named(text, count)[1] if self.is_allowed and not self.is_in_doubt and self._names[text] is None else None

    def made(self, text: str, count: int) -> None:
        self._names[text] = _named(text, count)[0]

    def call(self, text: str, literals: Sequence[str]) -> str:
        """The command that performs the text."""
        name = self._names.get(text)
        if not self.is_allowed or self.is_in_doubt or name is None:
            return text % tuple(literals)
        return f"EXECUTE {name}({', '.join(literals)})" if literals else f"EXECUTE {name}"

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
