"""The job runner: a job file in, a finished data set and an exit code out."""

from typing import TYPE_CHECKING, Any

from .job import Job

if TYPE_CHECKING:
    from .report import Report
    from .run import run

__all__ = ["Job", "Report", "run"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from .run import run

        return run
    if name == "Report":
        from .report import Report

        return Report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
