"""
pg_idempotency: requests, jobs, clicks and messages that take effect once.

The client of the PostgreSQL extension "idempotency", for psycopg 3.  See README.md for a page of examples.
"""

from .client import AsyncIdempotency, AsyncJob, Idempotency, SyncJob
from .core import Response, Result, Step
from .errors import (ActionIdAhead, ClaimLost, ClaimNotFound, IdempotencyError, InProgress, KeyExpired, KeyInvalid,
                     KeyReused, NotFinished, NotInstalled, RateLimited, ScopeMoving, TimedOut, TransactionEnded, from_error)
from .functions import (Action, ActionState, Advance, Append, Claim, JsonText, Lookup, Message, MetricSample, Ran)
from .keys import new_key, request_hash
from .telemetry import Outcome

__version__ = "1.0.0"

__all__ = [
    "Action", "ActionIdAhead", "ActionState", "Advance", "Append", "AsyncIdempotency", "AsyncJob", "Claim",
    "ClaimLost", "ClaimNotFound", "Idempotency", "IdempotencyError", "InProgress", "JsonText", "KeyExpired",
    "KeyInvalid", "KeyReused", "Lookup", "Message", "MetricSample", "NotFinished", "NotInstalled", "Outcome", "Ran", "RateLimited", "Response",
    "Result", "ScopeMoving", "Step", "SyncJob", "TimedOut", "TransactionEnded", "from_error", "new_key", "request_hash",
]
