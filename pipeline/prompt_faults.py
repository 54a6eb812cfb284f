"""How the way of one row ends before the engine: with an error that is its own, or skipped by a policy.

Knows no templates and no tokens.
"""

from batchgen.engine.request import RowError


class RowFaultError(Exception):
    """Ends the way of one row, with the error it gets."""

    def __init__(self, error: RowError) -> None:
        super().__init__(error.message)
        self.error = error


class RowSkippedError(Exception):
    """Ends the way of one row by a policy of the prompt section."""

    def __init__(self, reason: str, policy: str = "on_null") -> None:
        super().__init__(reason)
        self.policy = policy


def fault(code: str, message: str, stage: str = "prompt") -> RowFaultError:
    """To be raised: the row gets an error of this code."""
    return RowFaultError(RowError(code, stage, message))
