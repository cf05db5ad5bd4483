"""Intervals, as far as this process itself has to know how long they are."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import lru_cache

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "mon": 2592000.0, "y": 31557600.0}
"""Of a month and a year as extract(epoch) has them."""
NAMES = {"us": "us", "usec": "us", "microsecond": "us", "ms": "ms", "msec": "ms", "millisecond": "ms", "s": "s",
         "sec": "s", "second": "s", "m": "min", "min": "min", "minute": "min", "h": "h", "hr": "h", "hour": "h",
         "d": "d", "day": "d", "w": "w", "week": "w", "mon": "mon", "month": "mon", "y": "y", "yr": "y", "year": "y"}
ISO_8601 = re.compile(r"P((?:\d+(?:\.\d+)?[YMWD])*)(?:T((?:\d+(?:\.\d+)?[HMS])+))?")


def seconds(interval: str | timedelta | None, ms: float | None = None) -> float | None:
    """How many seconds, or None where only the server could tell."""
    if ms is not None:
        return ms / 1000
    if isinstance(interval, timedelta):
        return interval.total_seconds()
    return None if interval is None else _seconds(interval.strip())


@lru_cache
def _seconds(text: str) -> float | None:
    clock = re.fullmatch(r"(\d+):(\d\d)(?::(\d\d(?:\.\d+)?))?", text)
    if clock:
        return int(clock[1]) * 3600 + int(clock[2]) * 60 + float(clock[3] or 0)
    if iso := ISO_8601.fullmatch(text):
        text = iso[1].replace("M", "mon") + (iso[2] or "")
    parts = re.findall(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text)
    if not parts or not re.fullmatch(r"(\s*\d+(\.\d+)?\s*[a-zA-Z]+)*(\s*\d+(\.\d+)?)?\s*", text):
        return None
    total = 0.0
    for number, unit in parts:
        known = NAMES.get(unit.lower()) or NAMES.get(unit.lower().removesuffix("s")) or ("s" if not unit else None)
        if known is None:
            return None
        total += float(number) * UNITS[known]
    return total
