"""What has become of each row so far, one byte per row.

Knows positions and outcome codes; a row's later outcome replaces its earlier one.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

OUTCOMES = ("stop", "length", "error", "skipped")
STOP, LENGTH, ERROR, SKIPPED = range(4)
OPEN = -1

_RETRY = {"errors": ERROR, "length": LENGTH}


class Outcomes:
    """The outcome code of every position below `num_rows`; OPEN where there is none yet."""

    def __init__(self, num_rows: int) -> None:
        self.codes: NDArray[np.int8] = np.full(num_rows, OPEN, np.int8)

    def record(self, positions: NDArray[np.int64], codes: NDArray[np.int8]) -> None:
        """Positions beyond the rows of this run are passed over."""
        inside = positions < len(self.codes)
        self.codes[positions[inside]] = codes[inside]

    def open_mask(self, retry: Iterable[int] = ()) -> NDArray[np.bool_]:
        """True for rows to be generated: those without an outcome, and those whose outcome is asked again."""
        mask: NDArray[np.bool_] = self.codes == OPEN
        for code in retry:
            mask |= self.codes == code
        return mask

    def counts(self) -> dict[str, int]:
        """Rows in all, and rows per outcome; rows without one are in `rows` only."""
        per_code = np.bincount(self.codes + 1, minlength=len(OUTCOMES) + 1)
        return {"rows": len(self.codes), **{name: int(per_code[code + 1]) for code, name in enumerate(OUTCOMES)}}

    def positions(self, code: int) -> NDArray[np.int64]:
        return np.flatnonzero(self.codes == code)


def parse_retry(text: str | None) -> tuple[int, ...]:
    """`errors,length` as outcome codes. Raises ValueError naming an unknown word."""
    words = [word.strip() for word in text.split(",")] if text else []
    unknown = [word for word in words if word not in _RETRY]
    if unknown:
        raise ValueError(f"--retry: knows errors and length, got {unknown[0]!r}")
    return tuple(_RETRY[word] for word in words)


def codes_of(finish_reasons: pa.Array) -> NDArray[np.int8]:
    """Outcome codes of a `finish_reason` column; of several samples the worst one counts."""
    if pa.types.is_list(finish_reasons.type) or pa.types.is_large_list(finish_reasons.type):
        rows = finish_reasons.to_pylist()
        return np.array([max(OUTCOMES.index(reason) for reason in row) for row in rows], np.int8)
    index = pa.compute.index_in(finish_reasons, value_set=pa.array(OUTCOMES, finish_reasons.type))
    return np.asarray(index.to_numpy(zero_copy_only=False), np.int8)
