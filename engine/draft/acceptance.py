"""How often drafted tokens turn out right, learned from those that were fed."""

from dataclasses import dataclass, field

from ..sequence import Sequence
from .speculation import Draft

PRIOR = 2.0  # observations that the drafter's own chance counts as
FORGET = 256  # observations of a bucket after which the old ones count half

Bucket = tuple[str, int, int, bool | None]


@dataclass(slots=True)
class Acceptance:
    """By source, length of match, the drafter's own chance, and whether the last drafted token before it was right."""

    _seen: dict[Bucket, list[float]] = field(default_factory=dict)  # tokens tried, right ones
    _latest: dict[Sequence, bool] = field(default_factory=dict)  # the first token of the last draft was right

    def observe(self, sequence: Sequence, draft: Draft, num_right: int) -> None:
        """What became of a draft that was fed: the first `num_right` tokens were right, no more."""
        for place in range(min(num_right + 1, len(draft.chances))):
            tried = self._seen.setdefault(self._bucket(sequence, draft, place), [0.0, 0.0])
            tried[0] += 1
            tried[1] += place < num_right
            if tried[0] > FORGET:
                tried[:] = [tried[0] / 2, tried[1] / 2]
        if draft.tokens:
            self._latest[sequence] = num_right > 0

    def paths(self, sequence: Sequence, draft: Draft) -> list[float]:
        """For each of its tokens the chance that it and all before it are right."""
        paths, path = [], 1.0
        for place, chance in enumerate(draft.chances):
            tried, right = self._seen.get(self._bucket(sequence, draft, place), (0.0, 0.0))
            path *= (right + PRIOR * chance) / (tried + PRIOR)
            paths.append(path)
        return paths

    def ended(self, sequence: Sequence) -> None:
        self._latest.pop(sequence, None)

    def _bucket(self, sequence: Sequence, draft: Draft, place: int) -> Bucket:
        before = True if place else self._latest.get(sequence)
        return draft.source, min(draft.match.bit_length(), 6), int(draft.chances[place] * 5), before
