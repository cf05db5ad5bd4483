"""New keys, and keys and hashes that are made of others."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
import uuid

_lock = threading.Lock()
_last = 0


def new_key() -> str:
    """A new key: a UUID of version 7.

    Keys that were made together lie together in the index.  Those of one process ascend: the 12 bits after the milliseconds
    are a fraction of them, and a clock that stands still or goes back is counted on.
    """
    global _last
    with _lock:
        ms, ns = divmod(time.time_ns(), 1_000_000)
        _last = max(_last + 1, ms << 12 | ns * 4096 // 1_000_000)
        now = _last
    bits = (now >> 12) << 80 | 7 << 76 | (now & 0xFFF) << 64 | 2 << 62 | secrets.randbits(62)
    return str(uuid.UUID(int=bits))


def step_key(scope: str, key: str, step: str) -> str:
    """The key of a step of a job: the same in all attempts, and another one for each scope, key and step.  32 hexadecimal digits."""
    parts = "".join(f"{len(part.encode())}:{part}" for part in (scope, key, step))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def request_hash(method: str, path: str, body: bytes = b"") -> bytes:
    """What idem_request_hash(method, path, body::bytea) returns, without the way to the server."""
    hasher = request_hasher(method, path)
    hasher.update(body)
    return hasher.digest()


def request_hasher(method: str, path: str) -> hashlib._Hash:
    """For a body that comes in pieces: update() with each, and digest()."""
    return hashlib.sha256(f"{method.upper()}:{path.replace(':', '%3A')}:".encode())
