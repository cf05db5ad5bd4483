"""
Which requests are the same: how the body of a request is compared with that of the first
request under its key.

A body of JSON is compared in canonical form (RFC 8785), which the server makes of it, a
multipart form without its boundary, and any other body by its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qs

from .functions import Argument, Statement, make
from .keys import request_hash

MAX_COMPARED = 2 << 20
"""A larger body is compared by its bytes, because it is not kept."""
NO_JSON = {"22003", "22021", "22P02", "22P05", "54000", "54001"}
"""The server raises these for a body that is no JSON, or that jsonb cannot hold.  Such a body is compared by its bytes."""
Fingerprint = Callable[[Any, bytes], bytes | str] | Sequence[str]

_JSON = re.compile(r"application/([^;]*\+)?json\s*(;\s*charset\s*=\s*\"?utf-?8\"?\s*)?", re.IGNORECASE)
_MULTIPART = re.compile(r"multipart/form-data\b.*;\s*boundary=(?:\"([^\"]+)\"|([^\s;]+))", re.IGNORECASE)
_FORM = re.compile(r"application/x-www-form-urlencoded\b", re.IGNORECASE)


def is_form(content_type: str) -> bool:
    return bool(_FORM.match(content_type) or _MULTIPART.match(content_type))


def form_key(content_type: str, body: bytes, field: str) -> str | None:
    """The key in a field of a form."""
    if _FORM.match(content_type):
        found = parse_qs(body.decode("latin-1"), encoding="utf-8", errors="replace").get(field, [])
    else:
        name = re.escape(field.encode())
        found = [one.decode("utf-8", "replace") for one in re.findall(
            rb'\r\ncontent-disposition: *form-data; *name="' + name + rb'" *\r\n\r\n([^\r\n]*)\r\n', body, re.IGNORECASE)]
    return found[0] if len(found) == 1 else None


def left_out(fingerprint: Fingerprint | None) -> list[list[str]]:
    """The paths of a list of JSON pointers (RFC 6901)."""
    if fingerprint is None or callable(fingerprint):
        return []
    if isinstance(fingerprint, str) or not all(isinstance(one, str) and one.startswith("/") for one in fingerprint):
        raise ValueError(f"fingerprint must be a function, or a list of JSON pointers such as '/meta/traceId', not {fingerprint!r}")
    return [[part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]] for pointer in fingerprint]


def hash_of_body(method: str, path: str, content_type: str, body: bytes,
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
    if multipart := _MULTIPART.match(content_type):
        body = body.replace((multipart[1] or multipart[2]).encode("latin-1"), b"")
    return request_hash(method, path, body)
