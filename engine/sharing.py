"""What it costs to read keys once for several queries, and from where on that pays.

Plain numbers, measured in calibration.py or built in; knows no keys and no queries.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sharing:
    """Costs of keys that several queries read together, in those of one key that one query reads by itself and finds in
    the cache, as its neighbours read it too.
    """

    key: float  # of bringing a key to all queries
    read: float  # of a query's part in a key
    result: float  # of a query's partial result: written, read and merged

    def pays(self, num_queries: float, num_keys: float) -> bool:
        """Whether reading keys once for all queries costs less than every query reading them beside its own."""
        together = num_keys * (self.key + self.read * num_queries) + self.result * num_queries
        return together < num_keys * num_queries


def fitted(shares: Mapping[tuple[int, int], float]) -> Sharing:
    """The costs behind three measured ones, by (queries, keys): few of many keys, many of few keys, many of many keys.

    `shares`: of reading them together beside each by itself, key / queries + read + result / keys.
    """
    (few, keys), (many, least), _ = points = tuple(shares)
    if points[2] != (many, keys):
        raise ValueError(f"points {points} are no corner")
    whole = shares[many, keys]
    result = max(0.0, (shares[many, least] - whole) / (1 / least - 1 / keys))
    key = max(0.0, (shares[few, keys] - whole) / (1 / few - 1 / many))
    return Sharing(key, max(0.0, whole - key / many - result / keys), result)


# By kind of device. A CPU's are measured ones (Zen 5, bfloat16, 3 query heads to a key head). A card's are counted: a
# key comes from memory for all, which its second-level cache gives half as fast again to each; products of four heads
# fill a quarter of a tile of 16; a partial result of 32 heads is as many bytes as a dozen keys of 8 heads.
BUILT_IN = {"cpu": Sharing(0.7, 0.55, 40.0), "cuda": Sharing(1.5, 0.1, 12.0)}
