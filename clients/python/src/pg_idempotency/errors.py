"""
Errors: a class for each case that callers handle.

Errors of the extension carry its SQLSTATE, and the driver's error as their cause.  The others are this client's own.  All
other errors are raised as the driver raised them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar


class IdempotencyError(Exception):
    """The base of all errors of this package."""

    sqlstate: str | None = None
    detail: str | None = None
    """The server's detail."""
    hint: str | None = None
    """The server's hint."""


class KeyInvalid(IdempotencyError):
    """The key breaks the key rules."""

    sqlstate = "ID001"


class RateLimited(IdempotencyError):
    """Too many new keys in this scope; retry_after is in seconds."""

    sqlstate = "ID002"
    retry_after: int = 1


class ClaimLost(IdempotencyError):
    """Another claimant has taken over."""

    sqlstate = "ID003"


class ClaimNotFound(IdempotencyError):
    """There is no live claim: never claimed, expired or released."""

    sqlstate = "ID004"


class ActionIdAhead(IdempotencyError):
    """The action id lies too far in the future."""

    sqlstate = "ID005"


class InProgress(IdempotencyError):
    """Another one is running this request; retry_after is in seconds."""

    retry_after: int = 1


class KeyReused(IdempotencyError):
    """The key was used for another request."""


class KeyExpired(IdempotencyError):
    """The key has expired, and the server rejects such keys."""


class TimedOut(IdempotencyError):
    """The handler took longer than its timeout, and was rolled back."""


class TransactionEnded(IdempotencyError):
    """A handler ended its transaction, or continued after an error in it."""


class NotFinished(IdempotencyError):
    """A job's function returned without a response."""


class ScopeMoving(IdempotencyError):
    """The scope is being moved to another server; retry_after is in seconds."""

    sqlstate = "55P03"
    retry_after: int = 1


class NotInstalled(IdempotencyError):
    """The schema has no such function of the extension."""


E = TypeVar("E", bound=IdempotencyError)
CLASSES: dict[str | None, type[IdempotencyError]] = {c.sqlstate: c for c in (KeyInvalid, RateLimited, ClaimLost, ClaimNotFound, ActionIdAhead)}


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it wraps, also as a group, the outermost first."""
    seen: list[BaseException] = []
    queue: list[object] = [error]
    while queue:
        found = queue.pop(0)
        if not isinstance(found, BaseException) or any(found is s for s in seen):
            continue
        seen.append(found)
        yield found
        queue += [getattr(found, "orig", None), getattr(found, "original", None), found.__cause__, *getattr(found, "exceptions", ())]


def sqlstate(error: BaseException | None) -> str | None:
    """The SQLSTATE of an error of the database, also of one that was wrapped."""
    for found in chain(error):
        for name in ("sqlstate", "pgcode"):
            state = getattr(found, name, None)
            if isinstance(state, str):
                return state
    return None


def field(error: BaseException, name: str) -> str | None:
    """A field of an error of the database, such as the schema_name, also of one that was wrapped."""
    for found in chain(error):
        text = getattr(getattr(found, "diag", None), name, None) or getattr(found, name.removeprefix("message_"), None)
        if isinstance(text, str):
            return text
    return None


def restated(kind: type[E], error: BaseException) -> E:
    """An error of the database as an error of this package."""
    made = kind(str(error).partition("\n")[0])
    made.__cause__ = error
    made.detail, made.hint = field(error, "message_detail"), field(error, "message_hint")
    return made


def from_call(error: BaseException, function: str, schema: str) -> IdempotencyError | None:
    """As from_error(), for an error of a call of one of the extension's functions."""
    state = sqlstate(error)
    if state in ("42883", "3F000") and (state == "3F000" or f"{function}(" in str(error)):
        missing = restated(NotInstalled, error)
        missing.args = (f"the schema {schema!r} has no {function}() that takes these arguments: pass the schema of the extension, as in "
                        "Idempotency(pool, schema='public'), and arguments of the right types",)
        missing.sqlstate = state
        return missing
    return from_error(error)


def from_error(error: BaseException) -> IdempotencyError | None:
    """The error of this package that an error stands for, or None.

    It is found in what SQLAlchemy and others have wrapped around the driver's error, too.
    """
    for found in chain(error):
        if isinstance(found, IdempotencyError):
            return found
    kind = CLASSES.get(sqlstate(error))
    if kind is None:
        return None
    made = restated(kind, error)
    if isinstance(made, RateLimited):
        seconds = re.search(r"\d+", made.hint or "")
        made.retry_after = max(1, int(seconds[0])) if seconds else 1
    return made
