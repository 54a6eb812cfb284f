"""Deadlines: a time of day or a duration, as the command line and the job file write them.

Knows no clocks but the one it is given.
"""

import re
from datetime import datetime, timedelta

_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def parse_clock(text: str) -> tuple[int, int]:
    """Hour and minute of `06:00`. Raises ValueError."""
    match = _CLOCK.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be a time of day like 02:00, got {text!r}")
    return int(match[1]), int(match[2])


def parse_deadline(text: str, now: datetime | None = None) -> datetime:
    """`06:00`: its next occurrence in local time; `90s`, `30m`, `2h`: that much after `now`. Raises ValueError."""
    now = now or datetime.now()
    if _CLOCK.fullmatch(text.strip()):
        hour, minute = parse_clock(text)
        today = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
        return today if today > now else today + timedelta(days=1)
    if match := _DURATION.fullmatch(text.strip()):
        return now + timedelta(seconds=float(match[1]) * _SECONDS[match[2]])
    raise ValueError(f"must be a time like 06:00 or a duration like 90s, 30m or 2h, got {text!r}")
