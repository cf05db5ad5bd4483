"""
Values as literals of SQL, and results as values, for the statements that go out together with BEGIN or COMMIT.

The types that the functions take and return are converted here, several times as fast as psycopg's cursors
do it; psycopg converts all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import sql
from psycopg.adapt import Transformer
from psycopg.pq import Format

from .functions import JsonText


def literal(value: Any, connection: Any) -> str:
    """Whatever standard_conforming_strings and client_encoding are: the server converts a query before it reads it."""
    kind: Any = type(value)
    if kind is str or kind is JsonText:
        if "\0" in value:
            raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
        quoted = str(value.replace("'", "''"))
        return f"'{quoted}'" if "\\" not in quoted else " E'" + quoted.replace("\\", "\\\\") + "'"
    if value is None:
        return "NULL"
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return str(value)
    if kind is bytes:
        return f" E'\\\\x{value.hex()}'"
    return sql.Literal(value).as_string(connection)


# By the type's OID.
_READ: dict[int, Callable[[bytes, str], Any]] = {
    16: lambda text, encoding: text == b"t",
    20: lambda text, encoding: int(text),
    21: lambda text, encoding: int(text),
    23: lambda text, encoding: int(text),
    25: lambda text, encoding: text.decode(encoding),
    701: lambda text, encoding: float(text),
}


def _loaded(load: Callable[[bytes], Any], text: bytes, encoding: str) -> Any:
    return load(text)


def rows_of(result: Any, connection: Any) -> list[Sequence[Any]]:
    """The rows of a result whose format is text."""
    encoding: str = connection.info.encoding
    columns = range(result.nfields)
    read = [_READ.get(result.ftype(column)) for column in columns]
    rows: list[Sequence[Any]] = []
    for row in range(result.ntuples):
        values: list[Any] = []
        for column in columns:
            text, one = result.get_value(row, column), read[column]
            if text is not None and one is None:
                load = Transformer(connection).get_loader(result.ftype(column), Format.TEXT).load
                one = read[column] = functools.partial(_loaded, load)
            values.append(None if text is None or one is None else one(text, encoding))
        rows.append(tuple(values))
    return rows
