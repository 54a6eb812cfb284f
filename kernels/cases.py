"""The literal table of all ops with their cases. Knows where they stand; tests and benchmarks start here."""

from .attention import cases as attention
from .attention import format_cases as attention_formats
from .attention import gpu_cases as attention_gpu
from .case import Op
from .copy_blocks import cases as copy_blocks
from .draw import cases as draw
from .linear import cases as linear
from .linear_fp8 import cases as linear_fp8
from .linear_int4 import cases as linear_int4
from .linear_int8 import cases as linear_int8
from .rms_norm import cases as rms_norm
from .rotate_write import cases as rotate_write
from .rotate_write import gpu_cases as rotate_write_gpu
from .sampling import cases as sampling
from .swiglu import cases as swiglu
from .take_rows import cases as take_rows
from .token_mask import cases as token_mask

OPS: tuple[Op, ...] = (
    rms_norm.OP,
    rms_norm.ADDED_OP,
    rotate_write.OP,
    rotate_write.FORMATS_OP,
    copy_blocks.OP,
    swiglu.OP,
    linear.OP,
    linear_int8.OP,
    linear_int4.OP,
    linear_fp8.OP,
    attention.OP,
    attention_formats.OP,
    attention_formats.INT8_OP,
    draw.OP,
    *sampling.OPS,
    token_mask.OP,
    take_rows.OP,
)
# Sizes of real steps, for the benchmark.
LARGE: tuple[Op, ...] = (
    attention.STEPS,
    attention_formats.STEPS,
    sampling.LARGE_SAMPLE,
    sampling.LARGE_PENALISE,
    sampling.LARGE_LOGPROBS,
    linear_int8.SPEED,
    linear_int4.SPEED,
    linear_fp8.SPEED,
)
# Small cases that walk the launch paths of GPU kernels, beside OPS.
GPU: tuple[Op, ...] = (attention_gpu.SMALL, rotate_write_gpu.SMALL, rotate_write_gpu.PADDED)
