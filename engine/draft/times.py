"""How long steps take, learned from the steps of a run: by sequences without drafts, and what drafted tokens add.

Knows numbers of sequences and tokens, and seconds, only.
"""

from bisect import bisect_left, bisect_right, insort

RIDGE = 12  # tokens up to which a step is taken to cost the same, where nothing was measured
HOPE = 0.5  # of proportional growth beyond it: low enough that larger steps are tried, and then measured
WEIGHT = 0.5  # of a new measurement: contexts grow, so that old ones are soon too low
OUTLIER = 1.5  # a measurement counts as at most this many times what is known
ALIKE = 1.5  # times as many sequences, or as few, tell what a step takes
DOUBTFUL = 0.25  # of a step's tokens: how many drafted ones an assumption counts as
MEMORY = 8  # times a step's tokens: drafted ones after which old measurements count half
NEARNESS = 3  # the power with which a measurement counts less for steps of other sizes


class StepTimes:
    """Seconds of steps that feed one token a sequence: running means of what was measured, straight lines between."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}  # by sequences
        self._sizes: list[int] = []

    def measure(self, num_sequences: int, seconds: float) -> None:
        """Other sizes move with what is measured, the nearer the more: the machine's speed and contexts are one."""
        known = self.seconds(num_sequences) or seconds
        if num_sequences not in self._means:
            insort(self._sizes, num_sequences)
            self._means[num_sequences] = known
        change = min(seconds / known, OUTLIER)
        for size, mean in self._means.items():
            near = (min(size, num_sequences) / max(size, num_sequences)) ** NEARNESS
            self._means[size] = mean * change ** (WEIGHT * near)

    def seconds(self, num_sequences: int) -> float:
        """An estimate; 0 while nothing is known. Outside of what was measured: flat up to RIDGE, then HOPE says."""
        sizes = self._sizes
        if not sizes:
            return 0.0
        place = bisect_left(sizes, num_sequences)
        if place in (0, len(sizes)):
            nearest = sizes[min(place, len(sizes) - 1)]
            growth = max(num_sequences, RIDGE) / max(nearest, RIDGE) - 1
            return self._means[nearest] * (1 + HOPE * growth)
        low, high = sizes[place - 1], sizes[place]
        share = (num_sequences - low) / (high - low)
        return self._means[low] + share * (self._means[high] - self._means[low])

    def per_sequence(self, num_sequences: int, assumed: float) -> float:
        """What each sequence adds to steps of so many and fewer; `assumed` where none of half as many was measured."""
        place = bisect_right(self._sizes, num_sequences // 2)
        if place == 0:
            return assumed
        few = self._sizes[place - 1]
        return max(0.0, (self.seconds(num_sequences) - self._means[few]) / (num_sequences - few))

    def knows(self, num_sequences: int) -> bool:
        """Steps of about that size were measured."""
        return any(max(size, num_sequences) <= ALIKE * min(size, num_sequences) for size in self._sizes)


class AddedSeconds:
    """What a drafted token adds to a step, by all tokens it feeds: sums of what was measured, near sizes together."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}  # by size: drafted tokens, the seconds they added

    def measure(self, num_tokens: int, drafted: int, seconds: float) -> None:
        size = rounded(num_tokens)
        tokens, total = self._sums.get(size, (0.0, 0.0))
        keep = 0.5 if tokens > MEMORY * size else 1.0
        self._sums[size] = keep * tokens + drafted, keep * total + seconds

    def per_token(self, num_tokens: int, assumed: float) -> float:
        """The mean of the drafted ones in a step of so many tokens; `assumed` stands in where little was measured."""
        tokens, seconds = self._near(num_tokens)
        doubt = DOUBTFUL * num_tokens
        return max(0.0, (seconds + doubt * assumed) / (tokens + doubt))

    def known(self, num_tokens: int) -> float:
        """How many drafted tokens were measured in steps of about that size."""
        return self._near(num_tokens)[0]

    def _near(self, num_tokens: int) -> tuple[float, float]:
        """Drafted tokens and the seconds they added, the nearer their step to that size the more they count."""
        count = total = 0.0
        for size, (tokens, seconds) in self._sums.items():
            near = (min(size, num_tokens) / max(size, num_tokens)) ** NEARNESS
            count += near * tokens
            total += near * seconds
        return count, total

    def fade(self) -> None:
        """What was measured counts half from now on."""
        self._sums = {size: (tokens / 2, seconds / 2) for size, (tokens, seconds) in self._sums.items()}


def assumed_per_token(num_sequences: int, num_tokens: int, plain: float) -> float:
    """What a drafted token adds as far as nothing else is known: nothing up to RIDGE, and behind it as HOPE says.

    `plain`: seconds of the step without them.
    """
    ridge = max(num_sequences, RIDGE)
    return HOPE * plain / ridge * max(0, num_tokens - ridge) / (num_tokens - num_sequences)


def rounded(num_tokens: int) -> int:
    """Sizes that are measured as one: exact up to 8, then in steps of a quarter to an eighth."""
    step = max(1, 1 << max(0, num_tokens.bit_length() - 3))
    return num_tokens // step * step
