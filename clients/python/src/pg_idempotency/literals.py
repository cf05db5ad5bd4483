"""
Values as literals of SQL, and results as values, for the statements that go out together with BEGIN or COMMIT.

The types that the functions take and return are converted here, several times as fast as psycopg's cursors do it; psycopg converts
all others.  A value is read from a result when it is asked for, because each call into libpq lets another thread run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg import sql
from psycopg.adapt import Transformer
from psycopg.pq import Escaping, Format

from .functions import JsonText


def literals(values: Sequence[Any], connection: Any) -> list[str]:
    """Whatever standard_conforming_strings and client_encoding are: the server converts a query before it reads it."""
    return [write(value) if (write := _WRITTEN.get(type(value))) else sql.Literal(value).as_string(connection) for value in values]


def _text(value: str) -> str:
    if "\0" in value:
        raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    if "'" in value:
        value = str.replace(value, "'", "''")
    return f"'{value}'" if "\\" not in value else " E'" + value.replace("\\", "\\\\") + "'"


_WRITTEN: dict[type[Any], Callable[[Any], str]] = {
    str: _text,
    JsonText: _text,
    type(None): lambda value: "NULL",
    bool: lambda value: "true" if value else "false",
    int: str,
    bytes: lambda value: f" E'\\\\x{value.hex()}'",
}

# By the type's OID.
_READ: dict[int, Callable[[bytes, str], Any]] = {
    16: lambda text, encoding: text == b"t",
    17: lambda text, encoding: Escaping().unescape_bytea(text),
    20: lambda text, encoding: int(text),
    21: lambda text, encoding: int(text),
    23: lambda text, encoding: int(text),
    25: lambda text, encoding: text.decode(encoding),
    701: lambda text, encoding: float(text),
}


def rows_of(result: Any, encoding: str, connection: Any, types: dict[int, int]) -> list[Row]:
    """The rows of a result whose format is text.  types: the OIDs of its columns, as far as they are known."""
    others: dict[int, Callable[[bytes, str], Any]] = {}

    def read(column: int, found: bytes) -> Any:
        oid = types.get(column)
        if oid is None:
            oid = types[column] = result.ftype(column)
        reader = _READ.get(oid) or others.get(oid)
        if reader is None:
            load = Transformer(connection).get_loader(oid, Format.TEXT).load
            reader = others[oid] = lambda text, encoding: load(text)
        return reader(found, encoding)

    return [Row(result, number, read) for number in range(result.ntuples)]


class Row(Sequence[Any]):
    __slots__ = ("_result", "_number", "_read")

    def __init__(self, result: Any, number: int, read: Callable[[int, bytes], Any]) -> None:
        self._result, self._number, self._read = result, number, read

    def __len__(self) -> int:
        return int(self._result.nfields)

    def __getitem__(self, column: Any) -> Any:
        found = self._result.get_value(self._number, column)
        return None if found is None else self._read(column, found)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[column] for column in range(len(self))])
