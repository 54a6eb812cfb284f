"""The literal table of all ops with their cases. Knows where they stand; tests and benchmarks start here."""

from .attention import cases as attention
from .case import Op
from .linear import cases as linear
from .rms_norm import cases as rms_norm
from .rotary import cases as rotary
from .sampling import cases as sampling
from .swiglu import cases as swiglu
from .write_kv import cases as write_kv

OPS: tuple[Op, ...] = (
    rms_norm.OP,
    rotary.OP,
    swiglu.OP,
    linear.OP,
    write_kv.OP,
    attention.OP,
    *sampling.OPS,
)
LARGE: tuple[Op, ...] = (attention.STEPS, sampling.LARGE_SAMPLE)  # sizes of real steps, for the benchmark
