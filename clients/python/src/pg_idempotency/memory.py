"""
The double: the same interface in memory, for unit tests.

It performs the statements of functions.py as the server would, in transactions that commit or are undone.  What a
transaction has changed, others see when it has committed; who wants to change the same waits for it, in short naps.  There
is one lock around each statement, so threads may share it.  Nothing outlives the process.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from types import NoneType
from typing import Any, TypeVar

from psycopg import DataError

from . import client
from .adapter import AdapterSession
from .errors import (ActionIdAhead, ClaimLost, ClaimNotFound, IdempotencyError, KeyInvalid, RateLimited, TransactionEnded)
from .core import Response
from .functions import Interval, Statement, json_text
from .handlers import DEFAULT_TIMEOUT
from .intervals import seconds
from .keys import new_key, request_hash
from .memory_monitoring import Monitoring, abandoned
from .postgres import OpenedSession
from .runtimes import AsyncRuntime, Runtime, SyncRuntime
from .telemetry import Outcome, Tracing

T = TypeVar("T")
POLL_INTERVAL = 0.005
LOCK_TIMEOUT = 10.0
RUN_WAIT = "1 minute"


class DoubleError(IdempotencyError):
    """An error of the double, with the SQLSTATE that the server would give."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class _Locked(Exception):
    """Another transaction has changed it and has not ended."""


@dataclass
class Settings:
    """Those of the extension that the double knows; seconds and bytes."""

    default_ttl: float = 86400
    default_lease: float = 60
    token_ttl: float = 7 * 86400
    key_min_length: int = 16
    key_max_length: int = 128
    max_response_size: int = 1 << 20
    max_action_id_lead: float = 0
    max_new_keys_per_minute: int = 0
    expired_key_policy: str = "reuse"
    outbox_max_attempts: int = 10


@dataclass
class Record:
    """With the names of the server's columns, where a value is one."""

    request_hash: bytes | None
    token: int
    attempt: int
    expires: float
    lease: float
    state: str = "started"
    response_status: int | None = None
    response_headers_text: str | None = None
    response_body: str | None = None
    response_bytes: bytes | None = None
    recovery_point: str | None = None
    recovery_state_text: str | None = None
    error: str | None = None
    created: float = 0.0
    completed: float | None = None
    owner: Any = None
    """The transaction that claimed it."""


@dataclass
class OutboxMessage:
    id: int
    message_id: uuid.UUID
    topic: str
    message_key: str | None
    payload_text: str
    headers_text: str | None
    created: float
    due: float
    attempt: int = 0
    spared: int = 0
    """Attempts that were given back; their numbers are not used again."""
    state: str = "pending"
    lease: float | None = None
    error: str | None = None


class Transaction:
    """A transaction of the double, which is the argument of a handler.

    insert() and rows() keep the effects of the code under test, and undo them with the transaction."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store, self._runtime = store, runtime
        self.undo: list[Callable[[], None]] = []
        self._locks: set[Any] = set()
        self.state = "open"

    def insert(self, table: str, **row: Any) -> int:
        """Add a row; returns its number, from 1."""
        with self._store.lock:
            self._check()
            rows = self._store.rows.setdefault(table, [])
            number = self._store.numbers[table] = self._store.numbers.get(table, 0) + 1
            rows.append((self, row))
            self.undo.append(lambda: rows.__delitem__(next(n for n, r in enumerate(rows) if r[1] is row)))
            return number

    def rows(self, table: str) -> list[dict[str, Any]]:
        """The rows that have been committed, and this transaction's own."""
        with self._store.lock:
            return [row for owner, row in self._store.rows.get(table, []) if owner.state == "committed" or owner is self]

    def _check(self) -> None:
        if self.state != "open":
            raise TransactionEnded(f"the transaction is {self.state}")

    async def perform_statement(self, statement: Statement[T]) -> T:
        """A statement, which waits as the server would."""
        waits = {one.name: one.value for one in statement.arguments if one.name == "wait"}
        wait = seconds(waits.get("wait") or (RUN_WAIT if statement.function == "idem_run" else None))
        until = time.monotonic() + (LOCK_TIMEOUT if wait is None else wait)
        while True:
            try:
                return statement.read(self._store.call(self, statement))
            except _Locked:
                if time.monotonic() >= until:
                    break
            await self._runtime.sleep(POLL_INTERVAL)
        if wait is None:
            raise DoubleError("40P01", "waited too long for another transaction")
        at_once = [one._replace(value="0 s") if one.name == "wait" else one for one in statement.arguments]
        return statement.read(self._store.call(self, statement._replace(arguments=tuple(at_once))))

    def change(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Set it, or delete it with None, and remember what was there."""
        before = table.get(key)
        self.undo.append(functools.partial(_put, table, key, before))
        _put(table, key, value)

    def hold(self, *name: Any) -> None:
        """Until the end: others wait."""
        owner = self._store.locks.get(name)
        if owner is not None and owner is not self:
            raise _Locked()
        self._store.locks[name] = self
        self._locks.add(name)

    def undo_to(self, mark: int) -> None:
        while len(self.undo) > mark:
            self.undo.pop()()

    def end(self, committed: bool) -> None:
        with self._store.lock:
            if self.state not in ("open", "failed"):
                return
            committed = committed and self.state == "open"
            if not committed:
                self.undo_to(0)
            self.state = "committed" if committed else "rolled back"
            for name in self._locks:
                del self._store.locks[name]


def _seconds(interval: str | None, default: float) -> float:
    found = seconds(interval)
    return default if found is None else found


def _put(table: dict[Any, Any], key: Any, value: Any) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _when(moment: float | None) -> datetime | None:
    return None if moment is None else datetime.fromtimestamp(moment, timezone.utc)


EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
"""Not that of the application, which rounds."""


def _decimal(text: str) -> Decimal:
    """A number, if the server's numeric can hold it."""
    with suppress(ArithmeticError):
        number = EXACT.create_decimal(text)
        if (number.adjusted() < 131072 or not number) and int(number.as_tuple().exponent) >= -16383:
            return number
    raise DoubleError("22003", "value overflows numeric format")


def _jsonb_number(text: str) -> str:
    """A number as the server's numeric has it."""
    number = format(_decimal(text), "f")
    return number if number.strip("-0.") else number.lstrip("-")


def _canonical_number(text: str) -> str:
    """A number as ECMAScript lays it out; with all its digits where a double would lose some."""
    number = _decimal(text)
    digits = number.normalize(EXACT)
    if number == 0:
        return "0"
    significant = len(digits.as_tuple().digits)
    exact = significant > 17 or (number == number.to_integral_value() and abs(digits.adjusted()) < 400 and
                                 Decimal(float(number)) != number)
    if not exact:
        shortest = repr(float(number))
        if "inf" not in shortest and float(number) != 0:
            digits = Decimal(shortest).normalize(EXACT)
    sign, tuple_digits, exponent = digits.as_tuple()
    assert isinstance(exponent, int)
    figures = "".join(map(str, tuple_digits))
    point = len(figures) + exponent
    if 0 < point <= 21:
        body = figures.ljust(point, "0") if exponent >= 0 else f"{figures[:point]}.{figures[point:]}"
    elif -6 < point <= 0:
        body = "0." + "0" * -point + figures
    else:
        power = point - 1
        body = figures[0] + ("." + figures[1:] if len(figures) > 1 else "") + f"e{'+' if power > 0 else '-'}{abs(power)}"
    return ("-" if sign else "") + body


class _Number(str):
    """A number's own text."""


MAX_DEPTH = 6000
"""Of a document; the stack of the server has an end, too."""


def _parsed(text: str) -> Any:
    """A document of JSON, with the texts of its numbers."""
    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        return json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=refuse)
    except ValueError as error:
        raise DoubleError("22P02", f"invalid input syntax for type json: {error}") from None


@contextmanager
def _deep_enough(text: str) -> Iterator[None]:
    """The stack of calls is as deep as the document needs."""
    depth = deepest = 0
    for bracket in re.findall(r'"(?:[^"\\]|\\.)*"|([\[{]|[\]}])', text):
        depth += 1 if bracket in ("[", "{") else -1 if bracket else 0
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise DoubleError("54001", "stack depth limit exceeded")
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(limit + 3 * deepest)
        yield
    finally:
        sys.setrecursionlimit(limit)


def canonical_json(text: str) -> str:
    """RFC 8785, with the extension's one difference."""
    with _deep_enough(text):
        return _written(_parsed(text))


def _jsonb(text: str) -> str:
    """The text of a document that was stored as jsonb."""
    with _deep_enough(text):
        return _written(_parsed(text), " ", lambda name: (len(name.encode()), name.encode()), _jsonb_number)


def _utf_16(name: str) -> tuple[int, bytes]:
    return 0, name.encode("utf-16-be", "surrogatepass")


def _written(value: Any, space: str = "", order: Callable[[str], tuple[int, bytes]] = _utf_16,
             number: Callable[[str], str] = _canonical_number) -> str:
    def write(value: Any) -> str:
        if isinstance(value, _Number):
            return number(value)
        if isinstance(value, dict):
            texts = {write(name): name for name in value}        # or an error, before they are sorted
            members = sorted(texts.items(), key=lambda item: order(item[1]))
            return "{" + f",{space}".join([f"{text}:{space}{write(value[name])}" for text, name in members]) + "}"
        if isinstance(value, list):
            return "[" + f",{space}".join([write(one) for one in value]) + "]"
        return _storable(json.dumps(value, ensure_ascii=False))

    return write(value)


def _storable(text: str) -> str:
    """The text of a document, if jsonb can hold it."""
    if re.search(r"(?<!\\)(?:\\\\)*\\u0000", text):
        raise DoubleError("22P05", "unsupported Unicode escape sequence")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DoubleError("22P02", "a Unicode low surrogate must follow a high surrogate") from None
    return text


NAMES = {"scope", "user_id", "entity_type", "entity_id", "action_type", "aggregate", "client_id", "token", "topic",
         "message_key", "recovery_point", "exclude"}
KEEPS_KEY = {"idem_claim", "idem_claim_many", "idem_key_is_valid", "idem_release"}
"""They look at the key themselves, or at none."""
CAN_HAVE_NULLS = {"request_hashes", "response_bodies", "response_headers", "claim_tokens", "message_keys", "headers"}
LONGEST = {"lease": 43200.0, "wait": 600.0}
LAST_TIME = 200_000 * 366 * 86400.0
MAX_BIGINT = 2**63 - 1
INTEGERS = {"int": 2**31, "bigint": 2**63}
BINARY = (bytes, bytearray, memoryview)


def _cast(kind: str, value: Any) -> Any:
    """A value as the server gets it, or the error of the driver or of the cast."""
    if value is None or isinstance(value, Statement):
        return value
    if kind.endswith("[]"):
        if len({str if isinstance(one, str) else bytes if isinstance(one, BINARY) else type(one) for one in value} - {NoneType}) > 1:
            raise DataError("cannot dump lists of mixed types")
        return [_cast(kind[:-2], one) for one in value]
    if isinstance(value, bool) and kind == "bigint" or isinstance(value, int) and kind == "bytea" or \
            not isinstance(value, (bool, str)) and kind == "boolean":
        raise DoubleError("42846", f"cannot cast type {type(value).__name__} to {kind}")
    if kind in INTEGERS or kind == "boolean":
        try:
            number = int(value) if isinstance(value, str) and kind != "boolean" else round(value)
        except (TypeError, ValueError):
            raise DoubleError("22P02", f"invalid input syntax for type {kind}: {value!r}") from None
        if kind in INTEGERS and not -INTEGERS[kind] <= number < INTEGERS[kind]:
            raise DoubleError("22003", f"{number} is out of range for type {kind}")
        return value if kind == "boolean" else number
    if kind == "bytea":
        return value.encode() if isinstance(value, str) else bytes(value)
    text = "\\x" + value.hex() if isinstance(value, BINARY) else str(value).lower() if isinstance(value, bool) else str(value)
    if "\0" in text:
        raise DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    text.encode()                           # or an error
    if kind == "json":
        with _deep_enough(text):
            _parsed(text)
    elif kind == "jsonb":
        text = _jsonb(text)
    return text


def _check(name: str, kind: str, value: Any) -> None:
    """Refuse what a function refuses of an argument, whatever is stored."""
    if isinstance(value, list):
        for element in value:
            if element is not None:
                _check("request_hash" if name == "request_hashes" else name.removesuffix("s"), kind[:-2], element)
            elif name not in CAN_HAVE_NULLS:
                raise DoubleError("22004", f"an element of {name} is null")
    elif name in NAMES and not 1 <= len(value.encode()) <= 512:
        raise DoubleError("22023", f"{name} must have 1 to 512 bytes")
    elif name == "request_hash" and not 1 <= len(value) <= 64:
        raise DoubleError("22023", "a request hash must have 1 to 64 bytes")
    elif kind == "interval":
        given = seconds(value)
        if given is None and not value.startswith("-"):
            raise DoubleError("22007", f"the double does not know the interval {value!r}")
        if given is None or given > LONGEST.get(name, given):
            raise DoubleError("22023", f"{name} is negative or too long")
        if given > LAST_TIME and name in ("ttl", "deliver_after", "older_than"):
            raise DoubleError("22008", "timestamp out of range")
    elif name.startswith("response_status") and not 100 <= value <= 599:
        raise DoubleError("22023", "the status of a response must be 100 to 599")
    elif name in ("client_seq", "event_count", "max_messages", "batch_size") and value < 1:
        raise DoubleError("22023", f"{name} must be at least 1")


Handlers = Mapping[str, Callable[[Transaction, Any], Any]]
"""For run(): by the name that it is called with, handler(transaction, request) returns a document or a Response."""


class Store(Monitoring):
    """The data of a double."""

    def __init__(self, settings: Settings, handlers: Handlers | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.handlers = handlers or {}
        self.lock = threading.RLock()
        self.locks: dict[Any, Transaction] = {}
        self.rows: dict[str, list[tuple[Transaction, dict[str, Any]]]] = {}
        self.numbers: dict[str, int] = {}
        self.keys: dict[tuple[str, str], Record] = {}
        self.versions: dict[tuple[str, str, str], int] = {}
        self.actions: dict[tuple[str, str, str, str], bool] = {}
        self.sequences: dict[tuple[str, str], int] = {}
        self.aggregates: dict[str, int] = {}
        self.tokens: dict[tuple[str, str], float] = {}
        self.tokens_used: dict[tuple[str, str], float] = {}
        self.outbox: dict[int, OutboxMessage] = {}
        self.last_token = 0
        self.ids_drawn = itertools.count(1)
        self.new_keys: dict[str, list[float]] = {}

    def backend(self, schema: str, asynchronous: bool) -> MemoryBackend:
        return MemoryBackend(self, AsyncRuntime()) if asynchronous else MemoryBackend(self, SyncRuntime())

    def call(self, tx: Transaction, statement: Statement[Any]) -> list[tuple[Any, ...]]:
        """The rows of a statement.  Raises _Locked where the server would wait."""
        with self.lock:
            tx._check()
            function = statement.function.removeprefix("pg_catalog.")
            method = getattr(self, function, None)
            if method is None:
                raise NotImplementedError(f"the double does not have {function}: test it with a server")
            parameters = inspect.signature(method).parameters
            before = len(tx.undo)
            try:
                arguments = self._arguments(tx, statement)
                for name, kind, _ in statement.arguments:
                    if arguments[name] is not None:
                        _check(name, kind, arguments[name])
                    elif parameters[name].default is not inspect.Parameter.empty:
                        del arguments[name]
                    elif name not in ("key", "document"):
                        raise DoubleError("22004", f"{name} must not be null")
                if "scope" in arguments and statement.function not in KEEPS_KEY:
                    self._check_keys(tx, arguments)
                found = method(tx, **arguments)
            except _Locked:
                tx.undo_to(before)
                raise
            except Exception:
                tx.state = "failed"
                raise
            self.count(statement.function, found, arguments)
            if statement.columns == ("r",):
                return [(f,) for f in found] if isinstance(found, list) else [(found,)]
            rows = found if isinstance(found, list) else [found]
            return [tuple(row.get(column) for column in statement.columns) for row in rows]

    def _arguments(self, tx: Transaction, statement: Statement[Any]) -> dict[str, Any]:
        arguments = {name: _cast(kind, value) for name, kind, value in statement.arguments}
        for name, value in arguments.items():
            if isinstance(value, Statement):
                arguments[name] = self.call(tx, value)[0][0]
        handler = arguments.get("handler")
        if handler is not None and handler not in self.handlers:
            raise DoubleError("42883" if "(" in handler else "22P02", f'function "{handler}" does not exist')
        return arguments

    # Request identity

    def idem_request_hash(self, tx: Transaction, method: str, path: str, body: Any = None) -> bytes:
        if not re.fullmatch(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", method):
            raise DoubleError("22023", "invalid method")
        if isinstance(body, str):
            body = canonical_json(body).encode() if body else b""
        return request_hash(method, path, bytes(body or b""))

    def jsonb_delete_path(self, tx: Transaction, document: str, path: list[str]) -> str:
        """The document without this member."""
        with _deep_enough(document):
            found = whole = _parsed(document)
            *parents, last = path
            try:
                for name in parents:
                    found = found[int(name)] if isinstance(found, list) else found[name]
                del found[int(last) if isinstance(found, list) else last]
            except (LookupError, TypeError, ValueError):
                pass
            return _written(whole)

    def now(self, tx: Transaction) -> None:
        """The probe of a session."""

    def idem_canonical_json(self, tx: Transaction, document: str | None) -> str | None:
        return None if document is None else canonical_json(document)

    def idem_key_is_valid(self, tx: Transaction, key: str | None) -> bool:
        s = self.settings
        return bool(key is not None and s.key_min_length <= len(key) <= s.key_max_length and re.fullmatch(r"[A-Za-z0-9_\-:.]+", key))

    # Request keys

    def _key_invalid(self, key: str) -> KeyInvalid:
        s = self.settings
        error = KeyInvalid(f'invalid idempotency key "{key[:4]}..." ({len(key)} characters)')
        error.detail = "It contains a character that is not allowed." if re.search(r"[^A-Za-z0-9_\-:.]", key) else \
            "It is too short." if len(key) < s.key_min_length else "It is too long."
        error.hint = f"Let the client send a UUID, or any key of {s.key_min_length} to {s.key_max_length} characters " \
            "out of A-Z a-z 0-9 _ - : ."
        return error

    def _check_keys(self, tx: Transaction, arguments: Mapping[str, Any]) -> None:
        """Of calls for the record of a key: where there is none, the key has to be one."""
        keys = [arguments["key"]] if "key" in arguments else arguments.get("keys", [])
        for key in keys:
            if (arguments["scope"], key) not in self.keys and not self.idem_key_is_valid(tx, key):
                raise self._key_invalid(key or "")

    def _next_token(self) -> int:
        self.last_token += 1
        return self.last_token

    def _record(self, scope: str, key: str) -> Record | None:
        record = self.keys.get((scope, key))
        return record if record is not None and record.expires > time.time() else None

    def idem_claim(self, tx: Transaction, scope: str, key: str, request_hash: bytes | None = None, ttl: str | None = None,
                   lease: str | None = None, wait: str | None = None, request: str | None = None) -> dict[str, Any]:
        if request is not None:
            raise NotImplementedError("the double does not keep requests for resume(): test them with a server")
        if not self.idem_key_is_valid(tx, key):
            raise self._key_invalid(key or "")
        now, s = time.time(), self.settings
        found: dict[str, Any] = {"max_response_size": s.max_response_size}
        holder = self.locks.get(("key", scope, key))
        record = self._record(scope, key)
        if record is None and self.keys.get((scope, key)) is not None and s.expired_key_policy == "reject":
            return {**found, "outcome": "expired"}
        if record is not None:
            if None not in (record.request_hash, request_hash) and record.request_hash != request_hash:
                return {**found, "outcome": "hash_conflict"}
            if holder not in (None, tx):
                return self._in_progress(found, wait)
            if record.state in ("completed", "erased"):
                response = {name: value for name, value in vars(record).items() if name.startswith("response_")}
                return {**found, **response, "outcome": "replay" if record.state == "completed" else "erased",
                        "expires_at": _when(record.expires)}
            if record.state == "started" and holder is tx:
                return {**found, "outcome": "in_progress"}
            if record.state == "started" and record.lease > now:
                return self._in_progress({**found, "lease_expires_at": _when(record.lease), "lease_seconds": record.lease - now}, wait)
        elif holder not in (None, tx):
            return self._in_progress(found, wait)
        if record is None and s.max_new_keys_per_minute:
            recent = [t for t in self.new_keys.get(scope, []) if t > now - 60]
            if len(recent) >= s.max_new_keys_per_minute:
                self.counters["rate_limited"] += 1
                error = RateLimited("too many new idempotency keys")
                error.retry_after = max(1, int(recent[0] + 61 - now))
                raise error
            self.new_keys[scope] = [*recent, now]
        tx.hold("key", scope, key)
        expires = now + _seconds(ttl, s.default_ttl)
        made = Record(request_hash if record is None or request_hash is not None else record.request_hash,
                      self._next_token(), record.attempt + 1 if record else 1,
                      expires, min(expires, now + _seconds(lease, s.default_lease)), created=now, owner=tx,
                      recovery_point=record.recovery_point if record else None,
                      recovery_state_text=record.recovery_state_text if record else None)
        tx.change(self.keys, (scope, key), made)
        return {**found, **vars(made), "outcome": "new", "claim_token": made.token, "lease_seconds": made.lease - now,
                "lease_expires_at": _when(made.lease), "expires_at": _when(made.expires)}

    @staticmethod
    def _in_progress(found: dict[str, Any], wait: str | None) -> dict[str, Any]:
        if seconds(wait):
            raise _Locked()
        return {**found, "outcome": "in_progress"}

    def _held(self, tx: Transaction, scope: str, key: str, token: int | None, done: str) -> Record | None:
        """The claimant's record, to be changed; None where it is done already."""
        holder = self.locks.get(("key", scope, key))
        if holder is not None and holder is not tx:
            raise _Locked()
        record = self._record(scope, key)
        if record is None:
            raise ClaimNotFound("there is no live claim")
        if token is None and record.owner is not tx or token is not None and token != record.token:
            raise ClaimLost("the claim token is not the current one")
        if record.state == done or record.state == "erased" and done == "completed":
            return None
        if record.state != "started":
            raise ClaimNotFound("there is no live claim")
        tx.hold("key", scope, key)
        return record

    def _change(self, tx: Transaction, scope: str, key: str, record: Record, **values: Any) -> None:
        tx.change(self.keys, (scope, key), replace(record, **values))

    def _check_size(self, name: str, value: str | bytes | None) -> None:
        if len(value.encode() if isinstance(value, str) else value or b"") > self.settings.max_response_size:
            raise DoubleError("54000", f"{name} too large")

    def idem_complete(self, tx: Transaction, scope: str, key: str, response_status: int, response_body: Any = None,
                      response_headers: str | None = None, claim_token: int | None = None) -> bool:
        self._check_size("response body is", response_body)
        self._check_size("response headers are", response_headers)
        record = self._held(tx, scope, key, claim_token, "completed")
        if record is None:
            return False
        text = response_body if isinstance(response_body, str) else None
        data = None if response_body is None or text is not None else bytes(response_body)
        self._change(tx, scope, key, record, state="completed", response_status=response_status, completed=time.time(),
                     response_headers_text=response_headers, response_body=text, response_bytes=data)
        return True

    def idem_checkpoint(self, tx: Transaction, scope: str, key: str, recovery_point: str, recovery_state: str | None = None,
                        lease: str | None = None, claim_token: int | None = None) -> datetime | None:
        self._check_size("recovery state is", recovery_state)
        return self._renew(tx, scope, key, lease, claim_token, recovery_point=recovery_point, recovery_state_text=recovery_state)

    def idem_heartbeat(self, tx: Transaction, scope: str, key: str, lease: str | None = None,
                       claim_token: int | None = None) -> datetime | None:
        return self._renew(tx, scope, key, lease, claim_token)

    def _renew(self, tx: Transaction, scope: str, key: str, lease: str | None, token: int | None, **values: Any) -> datetime | None:
        record = self._held(tx, scope, key, token, "")
        assert record is not None
        until = min(record.expires, time.time() + _seconds(lease, self.settings.default_lease))
        self._change(tx, scope, key, record, lease=until, **values)
        return _when(until)

    def idem_fail(self, tx: Transaction, scope: str, key: str, error: str | None = None, claim_token: int | None = None) -> bool:
        record = self._held(tx, scope, key, claim_token, "failed")
        if record is not None:
            self._change(tx, scope, key, record, state="failed", error=error)
        return record is not None

    def idem_release(self, tx: Transaction, scope: str, key: str, claim_token: int | None = None) -> bool:
        if (scope, key) not in self.keys:
            if claim_token is not None and 0 < claim_token <= self.last_token:      # released before
                return False
            self._check_keys(tx, {"scope": scope, "key": key})
        if self._held(tx, scope, key, claim_token, "") is not None:
            tx.change(self.keys, (scope, key), None)
        return True

    def idem_lookup(self, tx: Transaction, scope: str, key: str) -> dict[str, Any]:
        record = self._record(scope, key)
        holder = self.locks.get(("key", scope, key))
        if record is None or holder is not None and holder is not tx and record.owner is holder:
            return {}
        return {**vars(record), "created_at": _when(record.created), "completed_at": _when(record.completed),
                "lease_expires_at": _when(record.lease) if record.state == "started" else None, "expires_at": _when(record.expires)}

    def idem_forget(self, tx: Transaction, scope: str, key: str) -> bool:
        tx.hold("key", scope, key)
        found = (scope, key) in self.keys
        tx.change(self.keys, (scope, key), None)
        return found

    def idem_erase(self, tx: Transaction, scope: str, key: str) -> bool:
        tx.hold("key", scope, key)
        record = self._record(scope, key)
        if record is None or record.state != "completed" and record.error is record.recovery_state_text is None:
            return False
        self._change(tx, scope, key, record, state="erased" if record.state == "completed" else record.state, error=None,
                     response_body=None, response_bytes=None, response_headers_text=None, recovery_state_text=None)
        return True

    def idem_claim_many(self, tx: Transaction, scope: str, keys: list[str], request_hashes: Any = None,
                        ttl: str | None = None, lease: str | None = None) -> list[dict[str, Any]]:
        return [{**self.idem_claim(tx, scope, key, hash, ttl, lease), "ordinal": n, "key": key}
                for n, (key, hash) in enumerate(_aligned(keys, request_hashes), 1)]

    def idem_complete_many(self, tx: Transaction, scope: str, keys: list[str], response_statuses: list[int], response_bodies: Any = None,
                           response_headers: Any = None, claim_tokens: Any = None) -> list[dict[str, Any]]:
        rows = _aligned(keys, response_statuses, response_bodies, response_headers, claim_tokens)
        return [{"ordinal": n, "key": row[0], "completed": self.idem_complete(tx, scope, *row)} for n, row in enumerate(rows, 1)]

    def idem_run(self, tx: Transaction, scope: str, key: str, handler: str, request: str, ttl: str | None = None,
                 wait: str = RUN_WAIT) -> dict[str, Any]:
        claim = self.idem_claim(tx, scope, key, self.idem_request_hash(tx, "RUN", handler, request), ttl, wait=wait)
        if claim["outcome"] != "new":
            return claim
        returned = self.handlers[handler](tx, json.loads(request))
        if returned is None:
            raise DoubleError("22004", "the handler returned null")
        if not isinstance(returned, Response):
            returned = Response(200, json.dumps(returned, ensure_ascii=False))
        headers = json_text(returned.headers or None, "headers")
        self.idem_complete(tx, scope, key, returned.status, returned.body, headers)
        return {**claim, "response_status": returned.status, "response_headers_text": headers, "response_body": returned.body}

    # User actions

    def idem_try_advance(self, tx: Transaction, user_id: str, entity_type: str, entity_id: str, action_id: int) -> dict[str, Any]:
        pair = (user_id, entity_type, entity_id)
        lead = self.settings.max_action_id_lead
        if lead and action_id > (time.time() + lead) * 1000:
            raise ActionIdAhead("the action id is too far in the future")
        tx.hold("pair", *pair)
        last = self.versions.get(pair)
        if last is not None and action_id <= last:
            return {"should_process": False, "last_action_id": last}
        tx.change(self.versions, pair, action_id)
        return {"should_process": True, "last_action_id": action_id}

    def idem_set(self, tx: Transaction, user_id: str, entity_type: str, entity_id: str, action_type: str,
                 active: bool | None, action_id: int, excludes: list[str] | None = None) -> dict[str, Any]:
        if action_type in (excludes or ()):
            raise DoubleError("22023", "an action type must not exclude itself")
        advance = self.idem_try_advance(tx, user_id, entity_type, entity_id, action_id)
        name = (user_id, entity_type, entity_id, action_type)
        if advance["should_process"]:
            wanted = not self.actions.get(name, False) if active is None else active
            for other in (excludes or []) if wanted else []:
                if (*name[:3], other) in self.actions:
                    tx.change(self.actions, (*name[:3], other), False)
            if wanted or name in self.actions:
                tx.change(self.actions, name, wanted)
        return {"is_active": self.actions.get(name, False), "last_action_id": advance["last_action_id"],
                "processed": advance["should_process"]}

    def idem_toggle(self, tx: Transaction, user_id: str, entity_type: str, entity_id: str, action_type: str,
                    action_id: int) -> dict[str, Any]:
        return self.idem_set(tx, user_id, entity_type, entity_id, action_type, None, action_id)

    def idem_is_active(self, tx: Transaction, user_id: str, entity_type: str, entity_id: str, action_type: str) -> bool:
        return self.actions.get((user_id, entity_type, entity_id, action_type), False)

    def idem_action_states(self, tx: Transaction, user_id: str, entity_type: str, entity_ids: list[str]) -> list[dict[str, Any]]:
        return [{"entity_id": name[2], "action_type": name[3], "is_active": active,
                 "last_action_id": self.versions[name[:3]]} for name, active in sorted(self.actions.items())
                if name[:2] == (user_id, entity_type) and name[2] in entity_ids]

    def idem_forget_user(self, tx: Transaction, user_id: str) -> int:
        pairs = [pair for pair in self.versions if pair[0] == user_id]
        for pair in pairs:
            tx.hold("pair", *pair)
            tx.change(self.versions, pair, None)
        names = [name for name in self.actions if name[0] == user_id]
        for name in names:
            tx.change(self.actions, name, None)
        return len(pairs) + len(names)

    def idem_try_advance_many(self, tx: Transaction, user_ids: list[str], entity_types: list[str],
                              entity_ids: list[str], action_ids: list[int]) -> list[dict[str, Any]]:
        rows = _aligned(user_ids, entity_types, entity_ids, action_ids)
        return [{**self.idem_try_advance(tx, *row), "ordinal": n} for n, row in enumerate(rows, 1)]

    def idem_set_many(self, tx: Transaction, user_ids: list[str], entity_types: list[str], entity_ids: list[str],
                      action_types: list[str], actives: list[bool], action_ids: list[int]) -> list[dict[str, Any]]:
        rows = _aligned(user_ids, entity_types, entity_ids, action_types, actives, action_ids)
        return [{**self.idem_set(tx, *row), "ordinal": n} for n, row in enumerate(rows, 1)]

    # Client sequences

    def idem_try_append(self, tx: Transaction, aggregate: str, client_id: str, client_seq: int, event_count: int = 1,
                        expected_version: int | None = None, allow_gaps: bool = True, wait: str | None = None) -> dict[str, Any]:
        last, version = self.sequences.get((aggregate, client_id), 0), self.aggregates.get(aggregate, 0)
        answer = {"last_client_seq": last, "version": version}
        holder = self.locks.get(("sequence", aggregate, client_id))
        if holder is not None and holder is not tx:
            if not seconds(wait):
                return {**answer, "outcome": "in_flight"}
            raise _Locked()
        until = client_seq + event_count - 1
        if until > MAX_BIGINT:
            raise DoubleError("22023", "the last client_seq is out of range")
        if until <= last:
            return {**answer, "outcome": "duplicate"}
        if client_seq <= last:
            return {**answer, "outcome": "overlap"}
        if not allow_gaps and client_seq != last + 1:
            return {**answer, "outcome": "gap"}
        tx.hold("aggregate", aggregate)
        if expected_version is not None and expected_version != version:
            return {**answer, "outcome": "version_conflict"}
        tx.hold("sequence", aggregate, client_id)
        tx.change(self.sequences, (aggregate, client_id), until)
        tx.change(self.aggregates, aggregate, version + event_count)
        return {"outcome": "appended", "last_client_seq": until, "version": version + event_count}

    def idem_last_client_seq(self, tx: Transaction, aggregate: str, client_id: str) -> int:
        return self.sequences.get((aggregate, client_id), 0)

    # Once

    def idem_once(self, tx: Transaction, scope: str, token: str, ttl: str | None = None) -> bool:
        tx.hold("token", scope, token)
        if self.tokens.get((scope, token), 0) > time.time():
            return False
        tx.change(self.tokens_used, (scope, token), time.time())
        tx.change(self.tokens, (scope, token), time.time() + _seconds(ttl, self.settings.token_ttl))
        return True

    def idem_once_at(self, tx: Transaction, scope: str, token: str) -> datetime | None:
        if self.tokens.get((scope, token), 0) <= time.time():
            return None
        return _when(self.tokens_used[scope, token])

    def idem_once_many(self, tx: Transaction, scope: str, tokens: list[str], ttl: str | None = None) -> list[str]:
        for token in tokens:
            tx.hold("token", scope, token)
        return [token for token in tokens if self.idem_once(tx, scope, token, ttl)]

    # Outbox

    def idem_publish(self, tx: Transaction, topic: str, payload: str, message_key: str | None = None,
                     headers: str | None = None, deliver_after: str | None = None) -> uuid.UUID:
        message = OutboxMessage(next(self.ids_drawn), uuid.UUID(new_key()), topic, message_key, payload, headers,
                                time.time(), time.time() + (seconds(deliver_after) or 0))
        tx.hold("message", message.id)
        tx.change(self.outbox, message.id, message)
        return message.message_id

    def idem_publish_many(self, tx: Transaction, topics: list[str], payloads: list[str], message_keys: Any = None,
                          headers: Any = None, deliver_after: str | None = None) -> list[dict[str, Any]]:
        rows = _aligned(topics, payloads, message_keys, headers, [deliver_after])
        return [{"ordinal": n, "message_id": self.idem_publish(tx, *row)} for n, row in enumerate(rows, 1)]

    def _free(self, tx: Transaction, id: int) -> bool:
        return self.locks.get(("message", id)) in (None, tx)

    def idem_outbox_take(self, tx: Transaction, max_messages: int | None = None, lease: str | None = None,
                         topics: list[str] | None = None, wait: str | None = None) -> list[dict[str, Any]]:
        now = time.time()
        taken: list[OutboxMessage] = []
        blocked: set[tuple[str, str]] = set()
        for message in sorted(self.outbox.values(), key=lambda m: m.id):
            lane = (message.topic, message.message_key or "")
            if not self._free(tx, message.id) or message.state != "pending":
                if message.state == "pending" and message.message_key is not None and message.attempt > 0:
                    blocked.add(lane)       # another transaction has taken it
                continue
            if topics is not None and message.topic not in topics:
                continue
            ready = message.due <= now and (message.lease is None or message.lease <= now)
            if not ready or len(taken) >= (100 if max_messages is None else max_messages) or \
                    message.message_key is not None and lane in blocked:
                blocked.add(lane)
                continue
            if message.attempt - message.spared >= self.settings.outbox_max_attempts:
                self._update_message(tx, message, state="dead", lease=None)
                self.counters["messages_dead"] += 1
                continue
            taken.append(self._update_message(tx, message, attempt=message.attempt + 1, lease=now + _seconds(lease, 30)))
        if not taken and seconds(wait):
            raise _Locked()
        return [{**vars(m), "created_at": _when(m.created)} for m in taken]

    def _update_message(self, tx: Transaction, message: OutboxMessage, **values: Any) -> OutboxMessage:
        tx.hold("message", message.id)
        made = replace(message, **values)
        tx.change(self.outbox, message.id, made)
        return made

    def _leased(self, tx: Transaction, ids: list[int], attempts: Any) -> Iterator[OutboxMessage]:
        for id, attempt in _aligned(ids, attempts):
            message = self.outbox.get(id)
            if message is not None and message.state == "pending" and message.lease is not None and attempt in (None, message.attempt):
                yield message

    def idem_outbox_ack(self, tx: Transaction, ids: list[int]) -> int:
        found = [self.outbox[id] for id in dict.fromkeys(ids) if id in self.outbox and
                 self.outbox[id].state != "acked" and self._free(tx, id)]
        for message in found:
            self._update_message(tx, message, state="acked", lease=None)
        return len(found)

    def idem_outbox_nack(self, tx: Transaction, id: int, error: str | None = None, retry_after: str | None = None,
                         attempt: int | None = None) -> str:
        message = self.outbox.get(id)
        if message is None or message.state not in ("pending", "dead") or attempt not in (None, message.attempt):
            return "lost"
        if message.lease is None:
            return message.state            # refused before
        dead = message.attempt - message.spared >= self.settings.outbox_max_attempts
        self._update_message(tx, message, state="dead" if dead else "pending", lease=None, error=error,
                             due=time.time() + _seconds(retry_after, 2.0 ** (message.attempt - 1)))
        return "dead" if dead else "pending"

    def idem_outbox_requeue(self, tx: Transaction, ids: list[int] | None = None) -> int:
        found = [m for m in self.outbox.values() if m.state == "dead" and (ids is None or m.id in ids)]
        for message in found:
            self._update_message(tx, message, state="pending", attempt=0, spared=0, due=time.time())
        return len(found)

    def idem_outbox_extend(self, tx: Transaction, ids: list[int], lease: str | None = None, attempts: Any = None) -> list[int]:
        return [self._update_message(tx, message, lease=time.time() + _seconds(lease, 30)).id
                for message in list(self._leased(tx, ids, attempts))]

    def idem_outbox_release(self, tx: Transaction, ids: list[int], attempts: Any = None) -> int:
        found = list(self._leased(tx, ids, attempts))
        for message in found:
            self._update_message(tx, message, spared=message.spared + 1, lease=None)
        return len(found)

    # Maintenance and monitoring

    def idem_grant(self, tx: Transaction, grantee: str) -> None:
        """There are no roles: everybody may everything."""

    idem_grant_relay = idem_grant_monitor = idem_revoke = idem_grant

    def idem_raise_claim_tokens(self, tx: Transaction, at_least: int) -> int:
        if at_least >= 2**62:
            raise DoubleError("22023", "at_least is out of range")
        self.last_token = max(self.last_token, at_least)
        return self.last_token

    def idem_repair_outbox(self, tx: Transaction) -> int:
        """Always empty: no user changes the messages of a double by hand."""
        return 0

    def idem_abandoned(self, tx: Transaction, older_than: str | None = None) -> list[dict[str, Any]]:
        now = time.time()
        until = now - _seconds(older_than, 300)
        found = [(name, record) for name, record in self.keys.items() if record.state == "started" and
                 record.lease <= until and record.expires > now and self.locks.get(("key", *name)) in (None, tx)]
        return [abandoned(*each, now) for each in sorted(found, key=lambda each: each[1].lease)]

    def idem_cleanup(self, tx: Transaction, batch_size: int | None = None) -> dict[str, Any]:
        now = time.time()
        keys = [k for k, r in self.keys.items() if r.expires <= now and ("key", *k) not in self.locks]
        tokens = [t for t, e in self.tokens.items() if e <= now and ("token", *t) not in self.locks]
        for name in keys:
            tx.change(self.keys, name, None)
        for name in tokens:
            tx.change(self.tokens, name, None)
        return {"keys_deleted": len(keys), "tokens_deleted": len(tokens), "messages_deleted": 0}


def _aligned(*lists: list[Any] | None) -> list[tuple[Any, ...]]:
    """Lists of one length; of one element for all; or none."""
    lengths = {len(one) for one in lists if one is not None} - {1}
    if len(lengths) > 1:
        raise DoubleError("22023", "arrays must have the same number of elements")
    length = lengths.pop() if lengths else 1
    return list(zip(*([None] * length if one is None else one * length if len(one) == 1 else one for one in lists)))


class MemorySession(AdapterSession):
    """A session over the double."""

    stores_utf8 = True

    def __init__(self, store: Store, runtime: Runtime) -> None:
        super().__init__("")
        self._make = functools.partial(Transaction, store, runtime)
        self._tx: Any = None

    @property
    def open(self) -> bool:                 # type: ignore[override]
        return self._tx is not None and self._tx.state == "open"

    @property
    def failed(self) -> bool:               # type: ignore[override]
        return self._tx is not None and self._tx.state == "failed"

    def _begin(self) -> Any:
        self._tx = self._make()
        return self._tx

    def _commit(self) -> None:
        self._tx.end(True)

    def _rollback(self) -> None:
        if self._tx is not None:
            self._tx.end(False)

    def _statements(self) -> Any:
        return self._tx

    def _is_gone(self, error: BaseException) -> bool:
        return False

    def _driver(self) -> Any:
        return None


class MemoryBackend:
    size = None
    is_pool = True

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self.source = store
        self._runtime = runtime

    def session(self) -> OpenedSession:
        return OpenedSession(nullcontext(), lambda nothing: MemorySession(self.source, self._runtime))


class _Double(client.Defaults):
    """The constructor of both clients."""

    def __init__(self, *, settings: Settings | None = None, handlers: Handlers | None = None, max_waiters: int | None = None,
                 wait: Interval = None, ttl: Interval = None, lease: Interval = None, timeout: Interval = DEFAULT_TIMEOUT,
                 timeout_ms: float | None = None, on_outcome: Callable[[Outcome], Any] | None = None,
                 tracing: Tracing | None = None) -> None:
        self.store = Store(settings or Settings(), handlers)
        super().__init__(self.store, max_waiters=max_waiters, wait=wait, ttl=ttl, lease=lease, timeout=timeout,
                         timeout_ms=timeout_ms, on_outcome=on_outcome, tracing=tracing)

    def active_actions(self) -> int:
        """How many user actions are active."""
        return sum(self.store.actions.values())


class MemoryIdempotency(_Double, client.Idempotency):
    """Idempotency in memory, with the same options."""


class AsyncMemoryIdempotency(_Double, client.AsyncIdempotency):
    """AsyncIdempotency in memory, with the same options."""
