"""Rows: sources, prompts, windows of requests, result columns, sinks, and the way between them.

`annotate` is imported on first use, because it loads datasets and torch and most commands need neither.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .annotation import annotate

__all__ = ["annotate"]


def __getattr__(name: str) -> Any:
    if name == "annotate":
        from .annotation import annotate

        return annotate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
