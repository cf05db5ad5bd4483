"""
Which requests are the same: how the body of a request is compared with that of the first request under its key.

A body of JSON is compared in canonical form (RFC 8785), which the server makes of it, a multipart form without its
boundary, and any other body by its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_plus

from .functions import Argument, Statement, make
from .keys import request_hash, request_hasher

MAX_COMPARED = 2 << 20
"""A larger body is compared by its bytes, because it is not kept."""
NO_JSON = {"22003", "22021", "22023", "22P02", "22P05", "54000", "54001"}
"""The server raises these for a body that is no JSON, that jsonb cannot hold, or that has no parts to leave out.
Such a body is compared by its bytes."""
Fingerprint = Callable[[Any, bytes], bytes | str] | Sequence[str]

_JSON = re.compile(r"application/([^;]*\+)?json\s*(;(?!\s*charset\s*=(?!\s*\"?utf-?8\"?\s*(;|$)))[^;]*)*", re.IGNORECASE)
_MULTIPART = re.compile(r"multipart/form-data\b.*;\s*boundary\s*=\s*(?:\"([^\"]+)\"|([^\s;]+))", re.IGNORECASE)
# As much as the frameworks' parsers take: any disposition, folded lines, name*=utf-8''field, an empty filename.
_DISPOSITION = re.compile(rb"^content-disposition[ \t]*:(?:[^;\r\n]|\r\n[ \t])*(;(?:[^\r\n]|\r\n[ \t])*)", re.IGNORECASE | re.MULTILINE)
_NAME = re.compile(rb";\s*name(?:[ \t]*=|\*=[\w-]*'[\w-]*')[ \t]*(?:\"([^\"]*)\"|([^\";\s]+))", re.IGNORECASE)
_FILE = re.compile(rb";\s*filename\*?[ \t]*=(?![ \t]*\"\")", re.IGNORECASE)
_FORM = re.compile(r"application/x-www-form-urlencoded\b", re.IGNORECASE)


def is_form(content_type: str) -> bool:
    return bool(_FORM.match(content_type) or _MULTIPART.match(content_type))


def form_keys(content_type: str, body: bytes | bytearray, field: str) -> list[str]:
    """The values of a field of a form.  A long body of many small fields takes no longer than another one."""
    name = field.encode()
    if _FORM.match(content_type):
        found = re.findall(rb"(?:^|&)" + _encoded(name) + rb"=([^&]*)", body)
        return [unquote_plus(one.decode("latin-1"), errors="replace") for one in found]
    values = []
    for begin, end in _parts(content_type, body):
        head = body.find(b"\r\n\r\n", begin, end)
        if head != -1 and body.find(name, begin, head) != -1:
            parameters = b"".join(_DISPOSITION.findall(body[begin:head]))
            if any((quoted or bare) == name for quoted, bare in _NAME.findall(parameters)) and not _FILE.search(parameters):
                values.append(body[head + 4:end].decode("utf-8", "replace"))
    return values


def _parts(content_type: str, body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Where the parts of a multipart form lie, which can be too large to be copied; any other body is one part."""
    multipart, begin = _MULTIPART.match(content_type), 0
    if multipart:
        delimiter = b"\r\n--" + (multipart[1] or multipart[2]).encode("latin-1")
        end = -2 if body.startswith(delimiter[2:]) else body.find(delimiter)
        while end != -1:
            yield begin, max(0, end)
            begin = end + len(delimiter)
            end = body.find(delimiter, begin)
    yield begin, len(body)


@lru_cache
def _encoded(name: bytes) -> bytes:
    """A pattern for a name, each of whose bytes can be percent-encoded."""
    return b"".join(b"(?:%s|%%(?i:%02x))" % (re.escape(name[at:at + 1]) if name[at] != 32 else rb"\+", name[at]) for at in range(len(name)))


def left_out(fingerprint: Fingerprint | None) -> list[list[str]]:
    """The paths of a list of JSON pointers (RFC 6901)."""
    if fingerprint is None or callable(fingerprint):
        return []
    if isinstance(fingerprint, str) or not all(isinstance(one, str) and one.startswith("/") for one in fingerprint):
        raise ValueError(f"fingerprint must be a function, or a list of JSON pointers such as '/meta/traceId', not {fingerprint!r}")
    return [[part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]] for pointer in fingerprint]


def hash_of_body(method: str, path: str, content_type: str, body: bytes | bytearray,
                 paths: Sequence[Sequence[str]] = ()) -> bytes | Statement[bytes]:
    """The hash of a request whose body was kept, without these members of a JSON document."""
    if _JSON.fullmatch(content_type) and body and b"\0" not in body:
        try:
            found: Statement[bytes] = make["request_hash"].make(None, method, path, body.decode())
        except UnicodeDecodeError:
            return request_hash(method, path, body)
        *first, document = found.arguments
        for one in paths:
            document = document._replace(type="jsonb", value=found._replace(
                function="pg_catalog.jsonb_delete_path",
                arguments=(Argument("document", "jsonb", document.value), Argument("path", "text[]", list(one)))))
        return found._replace(arguments=(*first, document))
    hasher = request_hasher(method, path)
    if body and _MULTIPART.match(content_type):
        # The lengths take the place of the delimiters, because a value can look like one.
        hasher.update(",".join(str(end - begin) for begin, end in _parts(content_type, body)).encode())
    for begin, end in _parts(content_type, body):
        hasher.update(memoryview(body)[begin:end])
    return hasher.digest()
