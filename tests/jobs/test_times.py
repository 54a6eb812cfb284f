"""Deadlines: the next occurrence of a time of day, or a duration."""

from datetime import datetime

import pytest

from batchgen.jobs.times import parse_deadline

NOW = datetime(2024, 2, 28, 22, 30, 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("06:00", datetime(2024, 2, 29, 6, 0)),
        ("6:00", datetime(2024, 2, 29, 6, 0)),
        ("23:59", datetime(2024, 2, 28, 23, 59)),
        ("22:30", datetime(2024, 2, 29, 22, 30)),
        ("90s", datetime(2024, 2, 28, 22, 31, 35)),
        ("30m", datetime(2024, 2, 28, 23, 0, 5)),
        ("1.5h", datetime(2024, 2, 29, 0, 0, 5)),
    ],
)
def test_legal(text: str, expected: datetime) -> None:
    assert parse_deadline(text, NOW) == expected


@pytest.mark.parametrize("text", ["", "6", "24:00", "12:60", "2d", "-1h", "2 h ago"])
def test_illegal(text: str) -> None:
    with pytest.raises(ValueError, match="must be a time"):
        parse_deadline(text, NOW)
