"""
The functions of the SQL interface, once for both runtimes.

A method of Functions says what to send and how to read what comes back: a Statement, which is plain data.  Who has a
connection performs it: at once in a synchronous class, as a coroutine in an asynchronous one, and the in-memory double in a
dictionary.  This is the only file that knows the interface.

Every name is qualified with the extension's schema, every argument is named and cast.  Documents are sent and read as text,
so that no driver parses them in between.
"""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import date, datetime, time as clock_time, timedelta
from decimal import Decimal
from types import NoneType
from typing import Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, TypeVar, cast, get_args, get_origin, overload
from uuid import UUID

P = ParamSpec("P")
T = TypeVar("T")
Row = Sequence[Any]
Interval = str | timedelta | None
Headers = Mapping[str, str | Sequence[str]]
ClaimOutcome = Literal["new", "replay", "in_progress", "hash_conflict", "erased", "expired"]
AppendOutcome = Literal["appended", "duplicate", "overlap", "gap", "in_flight", "version_conflict"]


def _document(name: str) -> Any:
    """A property: the document whose text is in the attribute of this name."""
    def parsed(found: Any) -> Any:
        text = getattr(found, name)
        return None if text is None else json.loads(text)

    return property(parsed)


# The values of functions.  A document is kept as its text, whose numbers keep all their digits, and parsed when it is asked for.

@dataclass(frozen=True)
class Claim:
    outcome: ClaimOutcome
    claim_token: int | None
    attempt: int | None
    response_status: int | None
    response_headers_text: str | None
    response_body: str | None
    response_bytes: bytes | None
    recovery_point: str | None
    recovery_state_text: str | None
    lease_expires_at: datetime | None
    expires_at: datetime | None
    response_headers = _document("response_headers_text")
    recovery_state = _document("recovery_state_text")


class HeldClaim:
    """What request() and job() want to know of their claim.  It is read from the row when it is asked for."""

    outcome: ClaimOutcome
    claim_token: int | None
    attempt: int | None
    response_status: int | None
    response_headers_text: str | None
    response_body: str | None
    response_bytes: bytes | None
    recovery_state_text: str | None
    lease_seconds: float | None
    max_response_size: int

    def __init__(self, row: Row) -> None:
        self._row = row

    def __getattr__(self, name: str) -> Any:
        column = _HELD_COLUMNS.get(name)
        if column is None:
            raise AttributeError(name)
        self.__dict__[name] = found = _plain(self._row[column])
        return found
    response_headers = _document("response_headers_text")
    recovery_state = _document("recovery_state_text")


@dataclass(frozen=True)
class ClaimOfMany(Claim):
    ordinal: int
    key: str


@dataclass(frozen=True)
class CompletedOfMany:
    ordinal: int
    key: str
    completed: bool


@dataclass(frozen=True)
class Lookup:
    state: Literal["started", "completed", "failed", "erased"] | None
    attempt: int | None
    request_hash: bytes | None
    response_status: int | None
    response_headers_text: str | None
    response_body: str | None
    response_bytes: bytes | None
    error: str | None
    recovery_point: str | None
    recovery_state_text: str | None
    created_at: datetime | None
    completed_at: datetime | None
    lease_expires_at: datetime | None
    expires_at: datetime | None
    response_headers = _document("response_headers_text")
    recovery_state = _document("recovery_state_text")


@dataclass(frozen=True)
class Ran:
    outcome: ClaimOutcome
    response_status: int | None
    response_headers_text: str | None
    response_body: str | None
    response_headers = _document("response_headers_text")


@dataclass(frozen=True)
class Advance:
    should_process: bool
    last_action_id: int


@dataclass(frozen=True)
class AdvanceOfMany(Advance):
    ordinal: int


@dataclass(frozen=True)
class Action:
    is_active: bool
    last_action_id: int
    processed: bool


@dataclass(frozen=True)
class ActionOfMany(Action):
    ordinal: int


@dataclass(frozen=True)
class ActionState:
    entity_id: str
    action_type: str
    is_active: bool
    last_action_id: int


@dataclass(frozen=True)
class Append:
    outcome: AppendOutcome
    last_client_seq: int
    version: int


@dataclass(frozen=True)
class Message:
    id: int
    message_id: UUID
    topic: str
    message_key: str | None
    payload_text: str
    headers_text: str | None
    attempt: int
    created_at: datetime
    payload = _document("payload_text")
    headers = _document("headers_text")


@dataclass(frozen=True)
class Expired:
    """A row that take_expired deleted; its json columns are strings."""

    document_text: str
    document = _document("document_text")


@dataclass(frozen=True)
class PublishedOfMany:
    ordinal: int
    message_id: UUID


@dataclass(frozen=True)
class Cleanup:
    keys_deleted: int
    tokens_deleted: int
    messages_deleted: int


@dataclass(frozen=True)
class MetricSample:
    name: str
    labels_text: str
    value: float
    type: Literal["counter", "gauge", "info"]
    help: str
    labels = _document("labels_text")


@dataclass(frozen=True)
class Check:
    check_name: str
    status: Literal["ok", "warning", "critical"]
    value: float | None
    threshold: float | None
    detail: str | None


@dataclass(frozen=True)
class ResumedClaim:
    scope: str
    key: str
    claim_token: int
    attempt: int
    request_text: str
    recovery_point: str | None
    recovery_state_text: str | None
    created_at: datetime
    lease_expires_at: datetime
    request = _document("request_text")
    recovery_state = _document("recovery_state_text")


@dataclass(frozen=True)
class BlockedLane:
    topic: str
    first_id: int
    blocked_since: datetime
    waiting: int
    reason: Literal["leased", "paused", "held", "lost"]
    until: datetime | None
    pid: int | None


@dataclass(frozen=True)
class AbandonedClaim:
    scope: str
    key: str
    age: timedelta
    attempt: int
    recovery_point: str | None
    lease_expires_at: datetime | None


class Argument(NamedTuple):
    """type is that of the function's parameter."""

    name: str
    type: str
    value: Any


class Statement(NamedTuple, Generic[T]):
    """A call: SELECT columns FROM function(arguments)."""

    function: str
    arguments: tuple[Argument, ...]
    columns: tuple[str, ...]
    read: Callable[[Sequence[Row]], T]


# Types that every driver binds as they are; all others go as text.
_BOUND = {"text", "bytea", "int", "bigint", "boolean"}

_EXPRESSIONS = {
    "lease_seconds": "CAST(extract(epoch FROM lease_expires_at - clock_timestamp()) AS float8)",
    # The portable edition has no such setting.
    "max_response_size":
        "pg_size_bytes(coalesce(nullif(current_setting('idempotency.max_response_size', true), ''), '1MB'))",
}


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def sql_of(statement: Statement[Any], schema: str) -> tuple[str, list[Any]]:
    """The SQL of a statement, with %s for each of its values."""
    function, arguments, columns, _ = statement
    values = [value for _, _, value in arguments]
    shape: Any = (function, columns, *[argument[:2] for argument in arguments])
    if Statement in map(type, values):
        values = []
        shape = _nested_shape(statement, values)
    found = _texts_of_shapes.get((schema, shape))
    if found is None:
        found = render(statement, quoted(schema).replace("%", "%%"), lambda value: "%s")
        if len(_texts_of_shapes) < MAX_SHAPES:
            _texts_of_shapes[schema, shape] = found
    return found, values


MAX_SHAPES = 1000
_texts_of_shapes: dict[Any, str] = {}


def _nested_shape(statement: Statement[Any], values: list[Any]) -> Any:
    """The part of a statement that its SQL depends on.  Notes its values."""
    shape: list[Any] = [statement.function, statement.columns]
    for argument in statement.arguments:
        shape += (argument.name, argument.type)
        if isinstance(argument.value, Statement):
            shape.append(_nested_shape(argument.value, values))
        else:
            values.append(argument.value)
    return tuple(shape)


def render(statement: Statement[Any], schema: str, placeholder: Callable[[Any], str]) -> str:
    """The SQL of a statement.  placeholder notes a value and returns what stands for it; schema comes as it is to stand there."""
    return f"SELECT {', '.join(map(_column, statement.columns))} FROM {_sql(statement, schema, placeholder)} AS r"


def _column(name: str) -> str:
    if name.endswith("_text"):
        return f"CAST({name.removesuffix('_text')} AS text)"
    return _EXPRESSIONS.get(name, name)


def _sql(statement: Statement[Any], schema: str, placeholder: Callable[[Any], str]) -> str:
    if statement.function == "idem_stats":
        return f"(SELECT * FROM {schema}.idem_stats WHERE datname = current_database())"
    builtin = statement.function.startswith("pg_catalog.")
    arguments = []
    for argument in statement.arguments:
        if isinstance(argument.value, Statement):
            value = _sql(argument.value, schema, placeholder)
        else:
            bound = argument.type
            if bound.removesuffix("[]") not in _BOUND:
                bound = "text[]" if bound.endswith("[]") else "text"
            value = f"CAST({placeholder(argument.value)} AS {bound})"
            if argument.type == "regrole":          # a role's name is its name, with capitals as they are
                value = f"pg_catalog.quote_ident({value})"
            if bound != argument.type:
                value = f"CAST({value} AS {argument.type})"
        arguments.append(value if builtin else f"{argument.name} => {value}")
    return f"{statement.function if builtin else f'{schema}.{statement.function}'}({', '.join(arguments)})"


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value


def _made(cls: Callable[..., T], row: Row) -> T:
    return cls(*[_plain(value) for value in row])


# The SQL types of the arguments, by their names.
_TYPES = {name: kind for kind, names in {
    "text": "method path scope key error recovery_point user_id entity_type entity_id action_type aggregate client_id token "
            "topic message_key kind",
    "text[]": "keys scopes response_bodies user_ids entity_types entity_ids action_types excludes tokens topics message_keys",
    "bytea": "request_hash",
    "bytea[]": "request_hashes",
    "int": "response_status max_claims event_count max_messages attempt max_lanes batch_size max_rows",
    "int[]": "response_statuses attempts",
    "bigint": "claim_token action_id client_seq expected_version id at_least",
    "bigint[]": "claim_tokens action_ids ids",
    "boolean": "active allow_gaps",
    "boolean[]": "actives",
    "json": "recovery_state response_headers",
    "jsonb": "document request payload headers",
    "jsonb[]": "payloads",
    "interval": "ttl lease wait deliver_after retry_after older_than",
    "text or bytea": "body response_body",
    "regprocedure": "handler",
    "regrole": "grantee",
}.items() for name in names.split()}


def _kinds(function: str, names: Iterable[str]) -> list[tuple[str, str]]:
    """The arguments of a function, with their types."""
    found = [(name, _TYPES[name]) for name in names if name != "self" and not name.endswith("_ms")]
    return [(name, f"{kind}[]" if function.endswith("_many") and kind in ("json", "jsonb") else kind) for name, kind in found]


def _argument(name: str, kind: str, given: Mapping[str, Any]) -> Argument:
    """Of a value that is not sent as it is."""
    value = given[name]
    if kind == "interval":
        value = as_interval(name, value, given[f"{name}_ms"])
    elif kind == "text or bytea":
        kind = "bytea" if isinstance(value, (bytes, bytearray, memoryview)) else "text"
    elif kind.startswith("json"):
        value = _texts(value, name) if kind.endswith("[]") else _document_text(value, name)
    elif kind.endswith("[]"):
        value = _list(value)
    return Argument(name, kind, value)


_ARGUMENT = tuple.__new__
"""Makes an Argument in a third of the time."""


def _call(cls: type[Any] | None, function: str, read: Callable[[Sequence[Row]], T], kinds: Sequence[tuple[str, str]],
          given: Mapping[str, Any]) -> Statement[T]:
    """given: the arguments of a method, by their names, which are also those of its function."""
    return Statement(function, tuple([_ARGUMENT(Argument, (name, kind, given[name])) if kind in _BOUND else _argument(name, kind, given)
                                      for name, kind in kinds]), ("r",) if cls is None else tuple(cls.__dataclass_fields__), read)


def scalar(function: str, **given: Any) -> Statement[Any]:
    """The call of a function that is not in the interface, such as the router's, and that returns one value."""
    return _call(None, function, _first, _kinds(function, given), given)


def _first(rows: Sequence[Row]) -> Any:
    return _plain(rows[0][0])


def _reader(result: Any) -> tuple[type[Any] | None, Callable[[Sequence[Row]], Any]]:
    """The class of the rows of a function whose result is this, and how they are read."""
    one, = get_args(result) if get_origin(result) is list else (result,)
    cls = one if is_dataclass(one) else None
    if one is not result:
        return cls, lambda rows: [row[0] if cls is None else _made(cls, row) for row in rows]
    if result is NoneType:
        return None, lambda rows: None
    return cls, _first if cls is None else lambda rows: _made(one, rows[0])


def as_interval(name: str, value: Interval, ms: float | None) -> str | None:
    """One of a string ('30s'), a timedelta, a number of milliseconds, as it is sent."""
    if value is not None and ms is not None:
        raise TypeError(f"{name} and {name}_ms cannot both be set")
    if ms is not None:
        if isinstance(ms, bool) or not isinstance(ms, (int, float)):
            raise TypeError(f"{name}_ms must be a number of milliseconds")
        if not 0 <= ms < float("inf"):
            raise ValueError(f"{name}_ms must not be negative or infinite: {ms}")
        return f"{ms / 1000:.6f} seconds"
    if isinstance(value, timedelta):
        if value < timedelta(0):
            raise ValueError(f"{name} must not be negative")
        return f"{value.total_seconds():.6f} seconds"
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a string such as '30s' or a timedelta; for milliseconds, use {name}_ms")
    return value


class JsonText(str):
    """A document that has been serialized already."""


EXACT = (date, clock_time, Decimal, UUID)
"""Types that JSON has not, and that have one exact text."""


def as_json(value: Any) -> str:
    """That text."""
    if isinstance(value, EXACT):
        return value.isoformat() if isinstance(value, (date, clock_time)) else str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _encoder(default: Callable[[Any], Any] | None) -> json.JSONEncoder:
    return json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=default)


_ENCODERS: dict[Any, json.JSONEncoder] = {one: _encoder(one) for one in (None, as_json)}


def json_text(value: Any, name: str, default: Callable[[Any], Any] | None = None) -> str | None:
    """A document as text: a JsonText as it is, anything else serialized.  What JSON has not is an error that names the place."""
    if value is None or isinstance(value, JsonText):
        return value
    try:
        return (_ENCODERS.get(default) or _encoder(default)).encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        if default not in (None, as_json):
            raise
        place = _place(value, "", (), EXACT if default else ())
        raise TypeError(f"{name} contains a value that JSON cannot represent: {place or error}") from error


def _place(value: Any, path: str, around: tuple[int, ...], known: tuple[type, ...]) -> str | None:
    """Where in a document the first thing is that JSON has not, and what."""
    found: str | None = None
    if isinstance(value, (dict, list, tuple)) and (id(value) in around or len(around) > 500):
        found = "part of itself" if id(value) in around else "nested too deeply"
    elif isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, (str, int, float, bool)) and key is not None:
                return f"{path + ' has ' if path else ''}a name that is a {type(key).__name__}"
            if place := _place(part, f"{path}.{key}" if path else str(key), (*around, id(value)), known):
                return place
    elif isinstance(value, (list, tuple)):
        for at, part in enumerate(value):
            if place := _place(part, f"{path}[{at}]", (*around, id(value)), known):
                return place
    elif isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        found = str(value)
    elif value is not None and not isinstance(value, (str, int, float, *known)):
        found = f"a {type(value).__name__}"
    return found and f"{path} is {found}" if path else found


def _document_text(value: Any, name: str) -> str | None:
    """None is NULL, but null as a payload."""
    return JsonText("null") if value is None and name.startswith("payload") else json_text(value, name)


def _texts(values: Sequence[Any] | None, name: str) -> list[str | None] | None:
    return None if values is None else [_document_text(value, f"{name}[{at}]") for at, value in enumerate(values)]


def _list(values: Sequence[T] | None) -> list[T] | None:
    if isinstance(values, (str, bytes)):
        raise TypeError("a list is required, not a string")
    return None if values is None else list(values)


class function(Generic[P, T]):
    """A method that is written once: it returns a statement, and the class it is called on performs it.  One without a
    body calls the function of its name, with its arguments."""

    def __init__(self, body: Callable[Concatenate[Any, P], Statement[T]]) -> None:
        functools.update_wrapper(cast(Any, self), body)
        signature = inspect.signature(body, eval_str=True)
        result = get_args(signature.return_annotation)[0]
        # For help(): that of the method, and not of the function that makes its statement.
        self.__signature__ = signature.replace(return_annotation=result)
        cls, read = _reader(result)
        defaults = {name: one.default for name, one in signature.parameters.items()}
        name = f"idem_{body.__name__}"
        kinds = _kinds(name, defaults)

        @functools.wraps(body)
        def make(owner: Any, *args: P.args, **kwargs: P.kwargs) -> Statement[T]:
            statement: Statement[T] | None = body(owner, *args, **kwargs)
            if statement is None:
                statement = _call(cls, name, read, kinds, {**defaults, **dict(zip(defaults, (owner, *args))), **kwargs})
            return statement

        self.make = make

    @overload
    def __get__(self, instance: None, owner: Any) -> function[P, T]: ...
    @overload
    def __get__(self, instance: SyncFunctions, owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: AsyncFunctions, owner: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self

        @functools.wraps(self.make)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return instance._perform(self.make(instance, *args, **kwargs))

        signature = self.__signature__
        method.__dict__["__signature__"] = signature.replace(parameters=list(signature.parameters.values())[1:])
        return method


class Functions:
    """The interface.  See the reference of the extension for what each does.

    Durations are strings ('30s', '5 minutes') or timedeltas; a number of milliseconds goes into the parameter whose name ends with _ms.
    """

    # Request identity

    @function
    def request_hash(self, method: str, path: str, body: str | bytes | None = None) -> Statement[bytes]:
        """The hash of a request.  A str is JSON, and is put into canonical form; bytes are taken as they are."""

    @function
    def canonical_json(self, document: Any) -> Statement[str]:
        """The document in canonical form, RFC 8785, as text."""

    @function
    def key_is_valid(self, key: str) -> Statement[bool]:
        """Whether the server accepts this key for a new record."""

    # Request keys

    @function
    def claim(self, scope: str, key: str, request_hash: bytes | Statement[bytes] | None = None, *,
              ttl: Interval = None, ttl_ms: float | None = None, lease: Interval = None, lease_ms: float | None = None,
              wait: Interval = None, wait_ms: float | None = None, request: Any = None) -> Statement[Claim]:
        """Claim the right to run a request.  After in_progress, claim again: lookup() finds nothing while the holder's
        transaction is open, which does not mean that the request has not run.

        request: JSON that idem_resume returns if the claim fails or its lease ends; None stores nothing."""

    @function
    def resume(self, max_claims: int = 10, *, lease: Interval = None, lease_ms: float | None = None, scopes: Sequence[str] | None = None,
               wait: Interval = None, wait_ms: float | None = None) -> Statement[list[ResumedClaim]]:
        """Take over claims that stored a request and that failed or whose lease has ended."""

    @function
    def complete(self, scope: str, key: str, response_status: int, response_body: str | bytes | None = None,
                 response_headers: Headers | JsonText | None = None, claim_token: int | None = None) -> Statement[bool]:
        """Store the response of a claimed request; claim_token is needed unless this transaction claimed the key."""

    @function
    def checkpoint(self, scope: str, key: str, recovery_point: str, recovery_state: Any = None, *, lease: Interval = None,
                   lease_ms: float | None = None, claim_token: int | None = None) -> Statement[datetime]:
        """Record how far a claimed request has come, and renew its lease.  Returns when the lease ends."""

    @function
    def heartbeat(self, scope: str, key: str, *, lease: Interval = None, lease_ms: float | None = None,
                  claim_token: int | None = None) -> Statement[datetime]:
        """Renew the lease of a claim.  Returns when the lease ends."""

    @function
    def fail(self, scope: str, key: str, error: str | None = None, claim_token: int | None = None) -> Statement[bool]:
        """Give a claim up after a failure.  Its checkpoint stays, and the next claim is free to retry at once."""

    @function
    def release(self, scope: str, key: str, claim_token: int | None = None) -> Statement[bool]:
        """Give a claim up and delete its record, as if the key had never been claimed."""

    @function
    def lookup(self, scope: str, key: str) -> Statement[Lookup]:
        """The record of a key; all attributes are None if there is none, as for a claim that has not committed yet."""

    @function
    def forget(self, scope: str, key: str) -> Statement[bool]:
        """For administrators: delete the record of a key, so that the request can run again."""

    @function
    def erase(self, scope: str, key: str) -> Statement[bool]:
        """For administrators: delete the stored request and response, and keep the fact that the request ran."""

    @function
    def run(self, scope: str, key: str, handler: str, request: Any, *, ttl: Interval = None,
            ttl_ms: float | None = None, wait: Interval = None, wait_ms: float | None = None) -> Statement[Ran]:
        """Claim, call the handler in the database, and store its response, in one statement.

        handler is a function of the database: 'place_order(jsonb)'."""

    @function
    def claim_many(self, scope: str, keys: Sequence[str], request_hashes: Sequence[bytes | None] | None = None, *, ttl: Interval = None,
                   ttl_ms: float | None = None, lease: Interval = None, lease_ms: float | None = None) -> Statement[list[ClaimOfMany]]:
        """Claim many keys of a scope, as claim() does for one after another."""

    @function
    def complete_many(self, scope: str, keys: Sequence[str], response_statuses: Sequence[int],
                      response_bodies: Sequence[str | None] | None = None,
                      response_headers: Sequence[Headers | JsonText | None] | None = None,
                      claim_tokens: Sequence[int | None] | None = None) -> Statement[list[CompletedOfMany]]:
        """Store the responses of many claimed requests, as complete() does for one after another."""

    # User actions

    @function
    def try_advance(self, user_id: str, entity_type: str, entity_id: str, action_id: int) -> Statement[Advance]:
        """Advance the version counter of a user and an entity if action_id is greater.  A stale call writes nothing."""

    @function
    def toggle(self, user_id: str, entity_type: str, entity_id: str, action_type: str, action_id: int) -> Statement[Action]:
        """Flip an action of a user if action_id is greater than the counter.  Prefer set(): of its calls, the latest intent wins."""

    @function
    def set(self, user_id: str, entity_type: str, entity_id: str, action_type: str, active: bool, action_id: int,
            excludes: Sequence[str] | None = None) -> Statement[Action]:
        """Set an action of a user if action_id is greater than the counter, so that the latest intent wins."""

    @function
    def is_active(self, user_id: str, entity_type: str, entity_id: str, action_type: str) -> Statement[bool]:
        """Whether an action of a user on an entity is active."""

    @function
    def action_states(self, user_id: str, entity_type: str, entity_ids: Sequence[str]) -> Statement[list[ActionState]]:
        """The actions of a user on the entities of a page."""

    @function
    def forget_user(self, user_id: str) -> Statement[int]:
        """For administrators: delete the version counters and actions of a user.  Returns how many rows."""

    @function
    def try_advance_many(self, user_ids: Sequence[str], entity_types: Sequence[str], entity_ids: Sequence[str],
                         action_ids: Sequence[int]) -> Statement[list[AdvanceOfMany]]:
        """Advance many version counters, as try_advance() does for one after another."""

    @function
    def set_many(self, user_ids: Sequence[str], entity_types: Sequence[str], entity_ids: Sequence[str], action_types: Sequence[str],
                 actives: Sequence[bool], action_ids: Sequence[int]) -> Statement[list[ActionOfMany]]:
        """Set many actions, as set() without excludes does for one after another."""

    # Client sequences

    @function
    def try_append(self, aggregate: str, client_id: str, client_seq: int, event_count: int = 1, *, expected_version: int | None = None,
                   allow_gaps: bool = True, wait: Interval = None, wait_ms: float | None = None) -> Statement[Append]:
        """Append the events client_seq to client_seq + event_count - 1 of a client to an aggregate, once."""

    @function
    def last_client_seq(self, aggregate: str, client_id: str) -> Statement[int]:
        """The last event of a client on an aggregate; 0 if there is none."""

    # Once

    @function
    def once(self, scope: str, token: str, *, ttl: Interval = None, ttl_ms: float | None = None) -> Statement[bool]:
        """Whether this is the first use of a token, such as the id of a message in the consumer's transaction."""

    @function
    def once_many(self, scope: str, tokens: Sequence[str], *, ttl: Interval = None, ttl_ms: float | None = None) -> Statement[list[str]]:
        """The tokens that are used for the first time, in their order."""

    @function
    def once_at(self, scope: str, token: str) -> Statement[datetime | None]:
        """The time of the token's first use; None if it is unknown or has expired."""

    # Outbox

    @function
    def publish(self, topic: str, payload: Any, message_key: str | None = None, headers: Any = None, *,
                deliver_after: Interval = None, deliver_after_ms: float | None = None) -> Statement[UUID]:
        """Publish a message if and only if the transaction commits.  Returns its id."""

    @function
    def publish_many(self, topics: Sequence[str], payloads: Sequence[Any], message_keys: Sequence[str | None] | None = None,
                     headers: Sequence[Any] | None = None, *, deliver_after: Interval = None,
                     deliver_after_ms: float | None = None) -> Statement[list[PublishedOfMany]]:
        """Publish many messages, as publish() does for one after another."""

    @function
    def outbox_take(self, max_messages: int | None = None, *, lease: Interval = None, lease_ms: float | None = None,
                    topics: Sequence[str] | None = None, wait: Interval = None, wait_ms: float | None = None) -> Statement[list[Message]]:
        """Take messages to deliver: commit, deliver, then acknowledge or refuse them before the lease ends."""

    @function
    def outbox_ack(self, ids: Sequence[int]) -> Statement[int]:
        """Acknowledge delivered messages.  Returns how many had not been acknowledged before."""

    @function
    def outbox_nack(self, id: int, error: str | None = None, *, retry_after: Interval = None, retry_after_ms: float | None = None,
                    attempt: int | None = None) -> Statement[Literal["pending", "dead", "lost"]]:
        """Refuse a message that could not be delivered.  Returns its state."""

    @function
    def outbox_requeue(self, ids: Sequence[int] | None = None) -> Statement[int]:
        """Make dead messages pending again: these, or all of them.  Returns how many."""

    @function
    def outbox_extend(self, ids: Sequence[int], *, lease: Interval = None, lease_ms: float | None = None,
                      attempts: Sequence[int] | None = None) -> Statement[list[int]]:
        """Extend the leases of messages.  Returns the ids of the messages that are still held."""

    @function
    def outbox_release(self, ids: Sequence[int], attempts: Sequence[int] | None = None) -> Statement[int]:
        """Release messages without an attempt: they are available at once.  Returns how many."""

    @function
    def outbox_blocked(self, max_lanes: int = 100) -> Statement[list[BlockedLane]]:
        """The keys whose due messages wait behind another message, and why."""

    # Maintenance and monitoring

    @function
    def cleanup(self, batch_size: int | None = None) -> Statement[Cleanup]:
        """Delete one batch of expired keys, tokens and messages.  Returns how many."""

    @function
    def take_expired(self, kind: Literal["keys", "tokens", "messages"], max_rows: int | None = None) -> Statement[list[Expired]]:
        """Deletes expired rows and returns them, to be archived in the same transaction."""
        return Statement("idem_take_expired", (Argument("kind", "text", kind), Argument("max_rows", "int", max_rows)),
                         ("r_text",), lambda rows: [Expired(row[0]) for row in rows])

    @function
    def grant(self, grantee: str) -> Statement[None]:
        """Give a role the functions that an application calls."""

    @function
    def grant_relay(self, grantee: str) -> Statement[None]:
        """Give a role the functions that a relay calls."""

    @function
    def grant_monitor(self, grantee: str) -> Statement[None]:
        """Give a role the functions and views that monitoring reads."""

    @function
    def revoke(self, grantee: str) -> Statement[None]:
        """Take back what the grant functions gave to a role."""

    @function
    def raise_claim_tokens(self, at_least: int) -> Statement[int]:
        """For administrators, after a restore or a promotion: give only claim tokens above at_least from now on."""

    @function
    def repair_outbox(self) -> Statement[int]:
        """For administrators, after rows of the outbox were changed by hand: repair its order.  Returns how many."""

    @function
    def stats(self) -> Statement[dict[str, Any]]:
        """The counters of this database: the row of the view idem_stats."""
        def read(rows: Sequence[Row]) -> dict[str, Any]:
            return dict(json.loads(rows[0][0])) if rows else {}
        return Statement("idem_stats", (), ("row_to_json(r)_text",), read)

    @function
    def stats_reset(self) -> Statement[None]:
        """Set the counters of this database to zero."""

    @function
    def metrics(self) -> Statement[str]:
        """The metrics of this database, as OpenMetrics 1.0 text."""

    @function
    def metric_samples(self) -> Statement[list[MetricSample]]:
        """The metrics of this database, a sample each."""

    @function
    def health(self) -> Statement[list[Check]]:
        """The health of this database, a check each."""

    @function
    def abandoned(self, *, older_than: Interval = None, older_than_ms: float | None = None) -> Statement[list[AbandonedClaim]]:
        """Abandoned claims, the oldest first."""


class SyncFunctions(Functions):
    def _perform(self, statement: Statement[T]) -> T:
        raise NotImplementedError


class AsyncFunctions(Functions):
    async def _perform(self, statement: Statement[T]) -> T:
        raise NotImplementedError


_HELD = tuple(HeldClaim.__annotations__)
_HELD_COLUMNS = {name: column for column, name in enumerate(_HELD)}


def _read_held(rows: Sequence[Row]) -> HeldClaim:
    return HeldClaim(rows[0])


def held(statement: Statement[Claim]) -> Statement[HeldClaim]:
    """A claim that says, too, how long the lease is and how large a response may be."""
    return Statement(statement.function, _given(statement), _HELD, _read_held)


def without_defaults(statement: Statement[T]) -> Statement[T]:
    """A claim or a completion without the arguments that are NULL, which is the default of each of them."""
    return Statement(statement.function, _given(statement), statement.columns, statement.read)


def _given(statement: Statement[Any]) -> tuple[Argument, ...]:
    return tuple([one for one in statement.arguments if one[2] is not None])


# Which shard a call belongs to, its first argument says.
_SCOPES = {"scope", "user_id", "aggregate"}


def scope_of(statement: Statement[Any]) -> str | None:
    """The scope, user or aggregate that a call is about, if it is about one."""
    for first in statement.arguments[:1]:
        if first.name in _SCOPES:
            scope: str = first.value
            return scope
    return None


def with_pinned_scope(statement: Statement[T]) -> Statement[T]:
    """The call, which first pins its scope or its users to this shard, or fails if they live elsewhere."""
    for first in statement.arguments[:1]:
        if first.name in _SCOPES or first.name == "user_ids":
            name = "scopes" if first.type == "text[]" else "scope"
            pinned = first._replace(value=scalar("idem_pin_scope", **{name: first.value}))
            return statement._replace(arguments=(pinned, *statement.arguments[1:]))
    return statement


make = Functions.__dict__
"""The methods by name, for those who want the statement itself."""
