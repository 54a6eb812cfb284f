"""Says in one line what went wrong outside this package's own errors, and with which exit code to leave.

Knows the full disk, files that cannot be reached, and the errors of pipeline and engine by their form.
"""

import errno

_STAGES = ("batchgen.engine", "batchgen.pipeline", "batchgen.kernels", "batchgen.jobs")


def explain_failure(error: BaseException) -> tuple[str, int]:
    """Message and exit code. An error class of batchgen speaks for itself; any other is named by its type."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}the disk is full; finished rows are kept, free space and give the same command again", 1
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}", 1
    if type(error).__module__.startswith(_STAGES):
        return str(error), int(getattr(error, "exit_code", 1))
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({error}); lower engine.memory or engine.max_batch_tokens", 1
    return f"{type(error).__name__}: {error} (--debug shows where)", 1
