"""What a machine takes for the parts of a step of one model: measured constants, or such as are built in.

Plain numbers that a file can hold; how they are measured is in calibration.py, what follows from them in costs.py.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from .sharing import BUILT_IN, Sharing
from .spec import ModelSpec

BASES = "measured", "built in"
FORMATS = "native", "int8", "int4", "fp8"
REFERENCE = 500e9  # multiplications and additions a second of a float32 product on the processor of the built-in rates
SIZES = 1, 16, 64, 256, 512, 1024, 2048, 4096  # tokens of a step
SEQUENCE_SECONDS = 1.5e-5  # of the host, for each sequence of a step

_KV_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.06, "int8": 1.06, "int4": 0.62}  # of a number


@dataclass(frozen=True, slots=True)
class Device:
    """What is known of a kind of device before anything is measured. Operations and bytes are those of a second.

    `widening`: what reading narrow keys takes beside those of 16 bits, `shared_widening` keys that many read together.
    """

    operations: Mapping[str, float]  # by weight format, in full steps
    weight_bytes: Mapping[str, float]
    bandwidth: float
    layer_seconds: float  # of a layer whatever it is fed
    step_seconds: float  # of a step outside the layers, whatever it is fed
    own_pairs: float  # operations of queries with keys of their own
    shared_pairs: float
    widening: Mapping[str, float]
    shared_widening: Mapping[str, float]


CPU = Device(  # two cores with AVX-512 BF16 and VNNI
    operations={"float32": 210e9, "native": 780e9, "int8": 1270e9, "int4": 1140e9, "fp8": 710e9},
    weight_bytes={"float32": 4.0, "native": 2.0, "int8": 1.0, "int4": 0.6, "fp8": 1.0},
    bandwidth=45e9,
    layer_seconds=7e-5,
    step_seconds=2.5e-3,
    own_pairs=120e9,
    shared_pairs=650e9,
    widening={"fp8": 1.1, "int8": 0.6, "int4": 1.1},
    shared_widening={"int8": 0.82},
)
CUDA = Device(  # one H200
    operations={"float32": 50e12, "native": 600e12, "int8": 500e12, "int4": 500e12, "fp8": 900e12},
    weight_bytes={"float32": 4.0, "native": 2.0, "int8": 1.0, "int4": 0.6, "fp8": 1.0},
    bandwidth=3.8e12,
    layer_seconds=8e-5,
    step_seconds=5e-4,
    own_pairs=200e12,
    shared_pairs=400e12,
    widening={},
    shared_widening={},
)
DEVICES = {"cpu": CPU, "cuda": CUDA}


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by a count, both rising; straight lines between the points, the last slope from zero beyond them."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def require_sense(self) -> None:
        """Raises ValueError unless both rise from above zero to finite numbers."""
        if len(self.counts) != len(self.seconds) or not self.counts:
            raise ValueError("a curve has not one time for each count")
        for numbers, may_stay in ((self.counts, False), (self.seconds, True)):
            steps = pairwise(numbers)
            if not (0 < numbers[0] <= numbers[-1] < math.inf and all(a < b or (may_stay and a == b) for a, b in steps)):
                raise ValueError("a curve does not rise between positive, finite numbers")

    def at(self, count: float) -> float:
        place = bisect_left(self.counts, count)
        if place == len(self.counts):
            return self.seconds[-1] * count / self.counts[-1]
        if place == 0:
            return self.seconds[0]
        low, high = self.counts[place - 1], self.counts[place]
        share = (count - low) / (high - low)
        return self.seconds[place - 1] + share * (self.seconds[place] - self.seconds[place - 1])


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of a model's parts on a device. Formats are keys; all layers of the model are in the numbers."""

    basis: str  # one of BASES
    layers: Mapping[str, Curve]  # by weight format: everything but attention, by tokens fed
    head: Mapping[str, Curve]  # head and draw, by rows drawn
    own_pair: Mapping[str, float]  # by KV format: a query with a key that it alone reads
    shared_pair: Mapping[str, float]  # a query with a key that many read together
    kv_bytes: Mapping[str, int]  # of a token
    sharing: Mapping[str, Sharing]  # by KV format
    step: float = 0.0
    sequence: float = SEQUENCE_SECONDS

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Rates":
        """What `to_record` made. Raises KeyError, TypeError, AttributeError or ValueError for anything else."""
        curves = {
            part: {name: Curve(tuple(one["counts"]), tuple(one["seconds"])) for name, one in record[part].items()}
            for part in ("layers", "head")
        }
        sharing = {name: Sharing(**one) for name, one in record["sharing"].items()}
        made = cls(**{**record, **curves, "sharing": sharing})
        made.require_sense()
        return made

    def require_sense(self) -> None:
        """Raises ValueError for numbers that no measurement gives, KeyError for a format that has none."""
        if self.basis not in BASES:
            raise ValueError("what the rates rest on is not known")
        for curves in (self.layers, self.head):
            for curve in _of_all(curves, FORMATS):
                curve.require_sense()
        for numbers in (self.own_pair, self.shared_pair, self.kv_bytes):
            if not all(0 < number < math.inf for number in _of_all(numbers, _KV_BYTES)):
                raise ValueError("a rate of keys is not positive and finite")
        costs = [cost for one in _of_all(self.sharing, _KV_BYTES) for cost in (one.key, one.read, one.result)]
        if not all(0 <= number < math.inf for number in (self.step, self.sequence, *costs)):
            raise ValueError("a cost is negative or not finite")


def built_in(spec: ModelSpec, dtype: str, device: str = "cpu", operations_per_second: float = REFERENCE) -> Rates:
    """Rates of a kind of device; those of a processor all in proportion to the speed of its float32 product."""
    known = DEVICES[device]
    speed = operations_per_second / REFERENCE if device == "cpu" else 1.0
    bandwidth = known.bandwidth * speed
    layers, head = layer_weights(spec) * spec.num_layers, spec.vocab_size * spec.hidden_size
    fixed = spec.num_layers * known.layer_seconds / speed

    def curve(weights: int, name: str, more: float) -> Curve:
        kept = dtype if dtype == "float32" and name == "native" else name
        read, operations = weights * known.weight_bytes[kept] / bandwidth, known.operations[kept] * speed
        return Curve(SIZES, tuple(more + max(read, 2 * weights * count / operations) for count in SIZES))

    pair = (2.0 if dtype == "float32" else 1.0) * 4 * spec.query_size * spec.num_layers / speed
    numbers = 2 * spec.num_layers * spec.key_size
    return Rates(
        basis="built in",
        layers={name: curve(layers, name, fixed) for name in FORMATS},
        head={name: curve(head, name, 0.0) for name in FORMATS},
        own_pair={
            name: max(pair / known.own_pairs * known.widening.get(name, 1.0), numbers * width / bandwidth)
            for name, width in _KV_BYTES.items()
        },
        shared_pair={name: pair / known.shared_pairs * known.shared_widening.get(name, 1.0) for name in _KV_BYTES},
        kv_bytes={name: round(numbers * width) for name, width in _KV_BYTES.items()},
        sharing=dict.fromkeys(_KV_BYTES, BUILT_IN[device]),
        step=known.step_seconds / speed,
        sequence=SEQUENCE_SECONDS / speed,
    )


def _of_all(found: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    """What is found for the names, in their order. Raises KeyError for one that is not there."""
    return [found[name] for name in names]


def layer_weights(spec: ModelSpec) -> int:
    """Weights of the linears of one layer."""
    return spec.hidden_size * (2 * spec.query_size + 2 * spec.key_size + 3 * spec.intermediate_size)
