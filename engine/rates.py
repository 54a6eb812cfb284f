"""What a machine takes for the parts of a step of one model: measured constants, or such as are built in.

Plain numbers that a file can hold; how they are measured is in calibration.py, what follows from them in costs.py.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .spec import ModelSpec

FORMATS = "native", "int8", "int4", "fp8"
REFERENCE = 150e9  # multiplications and additions a second of a float32 product on the machine of the built-in rates
SIZES = 1, 16, 64, 256, 512, 1024, 2048  # tokens of a step

# On REFERENCE: a second's operations in full steps, and bytes read; two cores with AVX-512 BF16 and VNNI.
_OPERATIONS = {"native": 640e9, "int8": 1000e9, "int4": 950e9, "fp8": 560e9}
_FLOAT32_OPERATIONS = 210e9
_BYTES = {"native": 2.0, "int8": 1.0, "int4": 0.6, "fp8": 1.0}  # of a weight
_BANDWIDTH = 45e9
_LAYER_SECONDS = 8e-5  # of a layer whatever it is fed
_PAIR_OPERATIONS = {"own": 150e9, "shared": 300e9}
_KV_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.06, "int8": 1.06, "int4": 0.62}  # of a number
_WIDENING = {"fp8": 1.15, "int8": 1.1, "int4": 1.3}  # of own keys, beside bfloat16, while they fit the cache
STEP_SECONDS, SEQUENCE_SECONDS = 5e-4, 1.5e-5  # of the host


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by a count, both rising; straight lines between the points, the last slope from zero beyond them."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

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

    basis: str  # "measured" or "built in"
    layers: Mapping[str, Curve]  # by weight format: everything but attention, by tokens fed
    head: Mapping[str, Curve]  # head and draw, by rows drawn
    own_pair: Mapping[str, float]  # by KV format: a query with a key that it alone reads
    shared_pair: Mapping[str, float]  # a query with a key that many read together
    kv_bytes: Mapping[str, int]  # of a token
    step: float = STEP_SECONDS
    sequence: float = SEQUENCE_SECONDS

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Rates":
        """What `to_record` made. Raises KeyError or TypeError for anything else."""
        curves = {
            part: {name: Curve(tuple(one["counts"]), tuple(one["seconds"])) for name, one in record[part].items()}
            for part in ("layers", "head")
        }
        return cls(**{**record, **curves})


def built_in(spec: ModelSpec, dtype: str, operations_per_second: float = REFERENCE) -> Rates:
    """Rates for a machine of which no more is known than the speed of a float32 product."""
    speed = operations_per_second / REFERENCE
    operations = _OPERATIONS | ({"native": _FLOAT32_OPERATIONS} if dtype == "float32" else {})
    size = _BYTES | ({"native": 4.0} if dtype == "float32" else {})
    layers, head = layer_weights(spec) * spec.num_layers, spec.vocab_size * spec.hidden_size
    fixed = spec.num_layers * _LAYER_SECONDS

    def curve(weights: int, name: str, more: float) -> Curve:
        read = weights * size[name] / _BANDWIDTH
        times = tuple(more + max(read, 2 * weights * count / (operations[name] * speed)) for count in SIZES)
        return Curve(SIZES, times)

    pair = 4 * spec.query_size * spec.num_layers / speed
    numbers = 2 * spec.num_layers * spec.key_size
    slower = 2.0 if dtype == "float32" else 1.0
    return Rates(
        basis="built in",
        layers={name: curve(layers, name, fixed) for name in FORMATS},
        head={name: curve(head, name, 0.0) for name in FORMATS},
        own_pair={
            name: max(slower * pair / _PAIR_OPERATIONS["own"] * _WIDENING.get(name, 1.0), numbers * width / _BANDWIDTH)
            for name, width in _KV_BYTES.items()
        },
        shared_pair=dict.fromkeys(_KV_BYTES, slower * pair / _PAIR_OPERATIONS["shared"]),
        kv_bytes={name: round(numbers * width) for name, width in _KV_BYTES.items()},
    )


def layer_weights(spec: ModelSpec) -> int:
    """Weights of the linears of one layer."""
    return spec.hidden_size * (2 * spec.query_size + 2 * spec.key_size + 3 * spec.intermediate_size)
