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
    return [_WRITTEN.get(type(value), lambda other: sql.Literal(other).as_string(connection))(value) for value in values]


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


class Rows(Sequence[Any]):
    """The rows of a result whose format is text.  types: the OIDs of its columns, as far as they are known."""

    def __init__(self, result: Any, encoding: str, connection: Any, types: dict[int, int]) -> None:
        self.result, self.encoding, self.types = result, encoding, types
        self._connection = connection
        self._readers: dict[int, Callable[[bytes, str], Any]] = {}

    def __len__(self) -> int:
        return int(self.result.ntuples)

    def __getitem__(self, number: Any) -> Row:
        return Row(self, number)

    def __iter__(self) -> Iterator[Row]:
        return iter([Row(self, number) for number in range(len(self))])

    def reader(self, column: int) -> Callable[[bytes, str], Any]:
        oid = self.types.get(column)
        if oid is None:
            oid = self.types[column] = self.result.ftype(column)
        found = _READ.get(oid) or self._readers.get(oid)
        if found is None:
            load = Transformer(self._connection).get_loader(oid, Format.TEXT).load
            found = self._readers[oid] = lambda text, encoding: load(text)
        return found


class Row(Sequence[Any]):
    __slots__ = ("_rows", "_number")

    def __init__(self, rows: Rows, number: int) -> None:
        self._rows, self._number = rows, number

    def __len__(self) -> int:
        return int(self._rows.result.nfields)

    def __getitem__(self, column: Any) -> Any:
        rows = self._rows
        found = rows.result.get_value(self._number, column)
        return None if found is None else rows.reader(column)(found, rows.encoding)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[column] for column in range(len(self))])
