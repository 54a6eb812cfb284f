"""Tokens in, tokens out: the throughput engine.

`Engine` is imported on first use, because it loads torch and most commands do not need it.
"""

from typing import TYPE_CHECKING, Any

from .grammar import Grammar
from .request import Completion, Request, RowError, Sample, Sampling, TokenLogprob, Usage

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Completion", "Engine", "Grammar", "Request", "RowError", "Sample", "Sampling", "TokenLogprob", "Usage"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from .engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
