"""What the double counts, and what monitoring reads of it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

OUTCOMES = ("new", "replay", "erased", "in_progress", "hash_conflict", "expired")
APPENDS = ("appended", "duplicate", "overlap", "gap", "in_flight", "version_conflict")
# As the server names them: the metric, its labels, the counter, what it is.
METRICS: tuple[tuple[str, dict[str, str], str, str], ...] = (
    *(("claims", {"outcome": o}, f"claims_{o}", "Claims, by outcome.") for o in OUTCOMES),
    ("takeovers", {}, "takeovers", "Claims of failed or abandoned keys."),
    ("completions", {}, "completions", "Completed requests."),
    ("failures", {}, "failures", "Failed requests."),
    ("rate_limited", {}, "rate_limited", "Claims that were refused for their number."),
    ("advances", {"outcome": "advanced"}, "advances", "Calls for user actions, by outcome."),
    ("advances", {"outcome": "stale"}, "advances_stale", "Calls for user actions, by outcome."),
    *(("appends", {"outcome": o}, f"appends_{o}", "Appends, by outcome.") for o in APPENDS),
    ("once", {"outcome": "first"}, "once_first", "Once-only tokens, by outcome."),
    ("once", {"outcome": "seen"}, "once_seen", "Once-only tokens, by outcome."),
    ("messages_published", {}, "messages_published", "Published messages."),
    ("messages_taken", {}, "messages_taken", "Messages that relays have taken."),
    ("messages_acked", {}, "messages_acked", "Acknowledged messages."),
    ("messages_nacked", {}, "messages_nacked", "Refused messages."),
    ("messages_dead", {}, "messages_dead", "Messages that have used up their attempts."),
    *(("rows_deleted", {"table": f"idem_{t}"}, c, "Rows that the cleanup has deleted.")
      for t, c in (("keys", "keys_deleted"), ("tokens", "tokens_deleted"), ("outbox", "messages_deleted"))),
    ("cleanup_passes", {}, "cleanup_passes", "Cleanups."),
)
COUNTERS = [counter for _, _, counter, _ in METRICS]


class Monitoring:
    """The part of the double's Store that counts.  Counters are no part of a transaction."""

    keys: dict[Any, Any]
    tokens: dict[Any, float]
    outbox: dict[int, Any]

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.reset = time.time()
        self.last_cleanup: float | None = None

    def count(self, function: str, found: Any, arguments: Mapping[str, Any]) -> None:
        """A call that has returned that."""
        rows = found if isinstance(found, list) else [found]
        add = self.counters.update
        match function.removeprefix("idem_").removesuffix("_many"):
            case "claim" | "run":
                add(f"claims_{row['outcome']}" for row in rows)
                add("takeovers" for row in rows if row["outcome"] == "new" and row.get("attempt", 1) > 1)
                if function == "idem_run":
                    add("completions" for row in rows if row["outcome"] == "new")
            case "complete":
                add("completions" for row in rows if (row["completed"] if isinstance(row, dict) else row))
            case "fail":
                add({"failures": int(found)})
            case "try_advance" | "set" | "toggle":
                done = [row.get("processed", row.get("should_process")) for row in rows]
                add("advances" if advanced else "advances_stale" for advanced in done)
            case "try_append":
                add([f"appends_{found['outcome']}"])
            case "once":
                first = len(found) if isinstance(found, list) else int(found)
                add({"once_first": first, "once_seen": len(arguments.get("tokens", [None])) - first})
            case "publish":
                add({"messages_published": len(rows)})
            case "outbox_take":
                add({"messages_taken": len(rows)})
            case "outbox_ack":
                add({"messages_acked": found})
            case "outbox_nack" if found in ("pending", "dead"):
                add({"messages_nacked": 1, "messages_dead": int(found == "dead")})
            case "cleanup":
                add(dict(found, cleanup_passes=1))
                self.last_cleanup = time.time()

    def idem_stats(self, tx: Any) -> dict[str, Any]:
        def when(moment: float | None) -> str | None:
            return None if moment is None else datetime.fromtimestamp(moment, timezone.utc).isoformat()

        row = {"datname": "memory", "datid": 0, **{name: self.counters[name] for name in COUNTERS},
               "last_cleanup": when(self.last_cleanup), "stats_reset": when(self.reset)}
        return {"row_to_json(r)_text": json.dumps(row)}

    def idem_stats_reset(self, tx: Any) -> None:
        self.counters.clear()
        self.reset, self.last_cleanup = time.time(), None

    def idem_metric_samples(self, tx: Any) -> list[dict[str, Any]]:
        now, messages = time.time(), [m for m in self.outbox.values() if m.state != "acked"]
        due = [m for m in messages if m.state == "pending" and m.due <= now and (m.lease is None or m.lease <= now)]
        dead = sum(m.state == "dead" for m in messages)
        expired = (sum(r.expires <= now for r in self.keys.values()), sum(e <= now for e in self.tokens.values()))
        samples: list[tuple[str, dict[str, str], float, str, str]]
        samples = [(f"idempotency_{name}_total", labels, self.counters[counter], "counter", text)
                   for name, labels, counter, text in METRICS]
        for table, count, old in (("idem_keys", len(self.keys), expired[0]), ("idem_tokens", len(self.tokens), expired[1])):
            samples += [("idempotency_records", {"table": table, "state": state}, value, "gauge", "Records, by state.")
                        for state, value in (("live", count - old), ("expired", old))]
        samples += [("idempotency_outbox_messages", {"state": state}, value, "gauge", "Messages, by state.")
                    for state, value in (("due", len(due)), ("waiting", len(messages) - len(due) - dead),
                                         ("dead", dead))]
        samples.append(("idempotency_outbox_oldest_age_seconds", {}, max((now - m.due for m in due), default=0),
                        "gauge", "For how long the oldest undelivered message has been due."))
        return [{"name": name, "labels_text": json.dumps({"datname": "memory", **labels}), "value": float(value),
                 "type": kind, "help": text} for name, labels, value, kind, text in samples]

    def idem_metrics(self, tx: Any) -> str:
        lines: list[str] = []
        for sample in self.idem_metric_samples(tx):
            family = sample["name"].removesuffix("_total")
            if f"# TYPE {family} {sample['type']}" not in lines:
                lines.append(f"# TYPE {family} {sample['type']}")
                if family.endswith("_seconds"):
                    lines.append(f"# UNIT {family} seconds")
                lines.append(f"# HELP {family} {sample['help']}")
            labels = ",".join(f'{name}="{value}"' for name, value in json.loads(sample["labels_text"]).items())
            lines.append(f"{sample['name']}{{{labels}}} {sample['value']:.15g}")
        return "\n".join([*lines, "# EOF"])

    def idem_health(self, tx: Any) -> list[dict[str, Any]]:
        """The checks of the server that mean something here."""
        now = time.time()
        oldest = next(s["value"] for s in self.idem_metric_samples(tx) if s["name"].endswith("oldest_age_seconds"))
        dead = sum(m.state == "dead" for m in self.outbox.values())
        abandoned_claims = len(self.idem_abandoned(tx, "60 seconds"))
        lag = max((now - at for at in (*(r.expires for r in self.keys.values()), *self.tokens.values())), default=0.0)
        checks = (("cleanup_lag", max(0.0, lag), 600), ("outbox_oldest", oldest, 300), ("dead_letters", dead, 1),
                  ("stuck_leases", abandoned_claims, 10))
        return [{"check_name": name, "status": "critical" if value >= 5 * limit else "warning" if value >= limit
                 else "ok", "value": float(value), "threshold": float(limit), "detail": None}
                for name, value, limit in checks]

    def idem_abandoned(self, tx: Any, older_than: str | None = None) -> list[dict[str, Any]]:
        raise NotImplementedError


def abandoned(key: tuple[str, str], record: Any, now: float) -> dict[str, Any]:
    """A row of idem_abandoned(), with no more of the key than the server shows."""
    return {"scope": key[0], "key": f'"{key[1][:4]}..." ({len(key[1])} characters)',
            "age": timedelta(seconds=now - record.lease), "attempt": record.attempt, "recovery_point": record.recovery_point,
            "lease_expires_at": datetime.fromtimestamp(record.lease, timezone.utc)}
