"""How long a step takes by the number of tokens it feeds, learned from the steps of a run.

Knows numbers of tokens and seconds only.
"""

from bisect import bisect_left, insort

RIDGE = 12  # tokens up to which a step is taken to cost the same, where nothing larger was measured
HOPE = 0.5  # of proportional growth beyond it: low enough that larger steps are tried, and then measured
WEIGHT = 0.2  # of a new measurement
OUTLIER = 3.0  # a measurement counts as at most this many times what is known


class StepTimes:
    """Seconds by tokens: running means of what was measured, straight lines between them."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._sizes: list[int] = []

    def measure(self, num_tokens: int, seconds: float) -> None:
        size = rounded(num_tokens)
        known = self._means.get(size)
        if known is None:
            insort(self._sizes, size)
            self._means[size] = seconds
        else:
            self._means[size] = known + WEIGHT * (min(seconds, OUTLIER * known) - known)

    def seconds(self, num_tokens: int) -> float:
        """An estimate; 0 while nothing is known. Outside of what was measured: flat up to RIDGE, then HOPE says."""
        sizes = self._sizes
        if not sizes:
            return 0.0
        place = bisect_left(sizes, num_tokens)
        if place in (0, len(sizes)):
            nearest = sizes[min(place, len(sizes) - 1)]
            growth = max(num_tokens, RIDGE) / max(nearest, RIDGE) - 1
            return self._means[nearest] * (1 + HOPE * growth)
        low, high = sizes[place - 1], sizes[place]
        share = (num_tokens - low) / (high - low)
        return self._means[low] + share * (self._means[high] - self._means[low])


def rounded(num_tokens: int) -> int:
    """Sizes that are measured as one: exact up to 16, then in steps of an eighth."""
    step = max(1, 1 << max(0, num_tokens.bit_length() - 4))
    return num_tokens // step * step
