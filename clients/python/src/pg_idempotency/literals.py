"""
Values as literals of SQL, and results as values, for the statements that go out together with BEGIN or COMMIT.

The types that the functions take and return are converted here, several times as fast as psycopg's cursors
do it; psycopg converts all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import sql
from psycopg.adapt import Transformer
from psycopg.pq import Format

from .functions import JsonText


def literal(value: Any, connection: Any) -> str:
    """Whatever standard_conforming_strings and client_encoding are: the server converts a query before it reads it."""
    write = _WRITTEN.get(type(value))
    return sql.Literal(value).as_string(connection) if write is None else write(value)


def _text(value: str) -> str:
    if "\0" in value:
        raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    quoted = str.replace(value, "'", "''")
    return f"'{quoted}'" if "\\" not in quoted else " E'" + quoted.replace("\\", "\\\\") + "'"


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
    20: lambda text, encoding: int(text),
    21: lambda text, encoding: int(text),
    23: lambda text, encoding: int(text),
    25: lambda text, encoding: text.decode(encoding),
    701: lambda text, encoding: float(text),
}


def _loader(oid: int, connection: Any) -> Callable[[bytes, str], Any]:
    """psycopg's."""
    load = Transformer(connection).get_loader(oid, Format.TEXT).load
    return lambda text, encoding: load(text)


def rows_of(result: Any, connection: Any) -> list[Sequence[Any]]:
    """The rows of a result whose format is text."""
    encoding: str = connection.info.encoding
    columns, value_of = range(result.nfields), result.get_value
    readers: list[Any] = [None] * len(columns)
    rows: list[Sequence[Any]] = []
    for row in range(result.ntuples):
        values: list[Any] = []
        for column in columns:
            found = value_of(row, column)
            if found is not None:
                reader = readers[column]
                if reader is None:
                    oid = result.ftype(column)
                    reader = readers[column] = _READ.get(oid) or _loader(oid, connection)
                found = reader(found, encoding)
            values.append(found)
        rows.append(tuple(values))
    return rows
