"""The errors that end a command, each with its exit code.

Every message is one line that names the place and, where there is one, the cure.
"""


class JobError(Exception):
    """The job failed; what was finished is kept."""

    exit_code = 1


class UsageError(JobError):
    """A bad job file, bad usage, or an output that belongs to a different job."""

    exit_code = 2


class OutputBusyError(JobError):
    """Another live run holds the output."""

    exit_code = 75
