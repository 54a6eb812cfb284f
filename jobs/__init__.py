"""The job runner: a job file in, a finished data set and an exit code out."""

from .job import Job
from .report import Report
from .run import run  # takes the name of its module, which must therefore be loaded here

__all__ = ["Job", "Report", "run"]
