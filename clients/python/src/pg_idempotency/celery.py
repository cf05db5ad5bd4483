"""
Celery: a task as a job, under the id of the task as its key.

	@app.task(acks_late=True)
	@Job(idempotency, lease="2 minutes")
	def charge(job, invoice):
		paid = job.step("charge", lambda step: bank.charge(invoice, key=step.key))
		return job.finish(lambda tx: Response.json(paid))

A task that is delivered again, or retried, does not repeat the steps whose values are stored.  If it was finished, it returns
what was stored.  If another worker still runs it, it is retried when the lease may be over.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

from celery import current_task

from .client import Idempotency
from .core import Response, Result, stores
from .errors import ClaimLost, ClaimNotFound, InProgress
from .functions import Interval
from .handlers import leads_to

__all__ = ["Job"]

NOT_STORED = '"urn:pg-idempotency:response-not-stored"'


class Job:
    """The decorator of a function whose first argument is the job, or the second one after self; below app.task.

    scope is the task's name by default.  The other options are those of Idempotency.job().  A function that returns
    neither a Result nor a Response returns JSON.
    """

    def __init__(self, idempotency: Idempotency, scope: str | None = None, *, ttl: Interval = None, ttl_ms: float | None = None,
                 wait: Interval = None, wait_ms: float | None = None, lease: Interval = None, lease_ms: float | None = None,
                 timeout: Interval = None, timeout_ms: float | None = None, store: Callable[[int], bool] = stores) -> None:
        if idempotency.core.runtime.asynchronous:
            raise TypeError("tasks of Celery are synchronous: use Idempotency")
        self._scope = scope
        self._job = functools.partial(idempotency.job, ttl=ttl, ttl_ms=ttl_ms, wait=wait, wait_ms=wait_ms, lease=lease,
                                      lease_ms=lease_ms, timeout=timeout, timeout_ms=timeout_ms, store=store)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if hasattr(function, "apply_async"):
            raise TypeError("write the decorator below app.task")
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        at = 1 if parameters and parameters[0].name == "self" else 0       # as with bind=True

        @functools.wraps(function)
        def task(*arguments: Any, **named: Any) -> Any:
            if not current_task or current_task.request.id is None:
                raise RuntimeError("the task has no id, which is the key of the job: call the task with delay() or apply()")
            if not leads_to(current_task.run, task):
                raise RuntimeError(f"{function.__qualname__} would run under the id of the task {current_task.name}, which calls it: "
                                   "call it with delay() or apply()")

            def run(job: Any) -> Any:
                found = function(*arguments[:at], job, *arguments[at:], **named)
                return found if isinstance(found, (Result, Response)) else Response.json(found)

            try:
                result = self._job(self._scope or current_task.name, current_task.request.id, run)
            except (InProgress, ClaimLost, ClaimNotFound) as error:
                if isinstance(error, InProgress) and current_task.request.is_eager:
                    raise                           # Celery would retry at once, without end
                # The task's own max_retries is for its own errors.
                raise current_task.retry(exc=error, countdown=getattr(error, "retry_after", 1),
                                         max_retries=current_task.request.retries + 1)
            if not result.stored and not result.replayed and result.status >= 300:
                raise RuntimeError(f"the response of the task has the status {result.status}, and was not stored")
            return _value(result)

        # delay() checks its arguments with this signature.
        setattr(task, "__signature__", signature.replace(parameters=parameters[:at] + parameters[at + 1:]))
        return task


def _value(result: Result) -> Any:
    is_problem = result.headers.get("Content-Type") == "application/problem+json"
    if result.outcome == "erased" or result.replayed and is_problem and NOT_STORED in str(result.body):
        raise RuntimeError("the task has run, and its value was erased since, or was too large to be stored")
    if result.headers.get("Content-Type") == "application/json" and result.body is not None:
        return json.loads(result.body)
    return result.body
