"""The op table of one device. `load(device)` returns it; an op's contract stands in its own folder.

Shape letters used in every contract: T fed tokens of a step, R rows that sample, H hidden width, Q query heads,
K key/value heads, D head width, F MLP width, V vocabulary (head rows), N KV blocks, B tokens per block,
I work items, O linear outputs.
"""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .attention import AttentionItems, Masking
    from .draw import DrawnLinear
    from .kv_format import LayerPages
    from .linear_fp8 import Fp8Weight
    from .linear_int4 import Int4Weight
    from .linear_int8 import Int8Weight
    from .rounding import Rounding
    from .sampling import Filters, Penalties


class Kernels(Protocol):
    """The ops the engine calls. All tensors live on the table's device; outputs are new unless said otherwise."""

    def rms_norm(self, x: "Tensor", weight: "Tensor", epsilon: float) -> "Tensor": ...

    def add_rms_norm(self, residual: "Tensor", x: "Tensor", weight: "Tensor", epsilon: float) -> "Tensor":
        """`residual` is written in place."""

    def rotate_write(
        self,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        cos: "Tensor",
        sin: "Tensor",
        slots: "Tensor",
        pages: "LayerPages",
    ) -> "Tensor":
        """`pages` are written in place."""

    def copy_blocks(self, stored: "Tensor", pairs: "Tensor") -> None:
        """`stored` is written in place."""

    def swiglu(self, gate_up: "Tensor") -> "Tensor": ...

    def pack_dense(self, weight: "Tensor", bias: "Tensor | None") -> Any:
        """The weight [O, H] and its bias as `linear` of this device reads them; made once at load.

        Its `values(rows)` gives rows of the weight back, [R, H].
        """

    def linear(self, x: "Tensor", weight: Any) -> "Tensor": ...

    def weight_rows(self, weight: Any, index: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Rows [T] of a weight that this table packed, [T, H] in `dtype`: a tied head as an embedding."""

    def take_rows(self, table: "Tensor", index: "Tensor") -> "Tensor": ...

    def rounding(self, weight: "Int8Weight | Int4Weight | Fp8Weight") -> "Rounding":
        """How this table rounds the activations that are multiplied with such a weight."""

    def turns(self, inputs: int) -> bool:
        """Whether 8-bit weights that are made at load should be turned, see kernels/panels."""

    def pack_int8(self, weight: "Int8Weight") -> Any:
        """The same for `linear_int8`; `weight` is not kept, rows are given back as float32."""

    def linear_int8(self, x: "Tensor", weight: Any, bias: "Tensor | None", dtype: "torch.dtype") -> "Tensor": ...

    def pack_int4(self, weight: "Int4Weight") -> Any:
        """The same for `linear_int4`."""

    def linear_int4(self, x: "Tensor", weight: Any, bias: "Tensor | None", dtype: "torch.dtype") -> "Tensor": ...

    def pack_fp8(self, weight: "Fp8Weight") -> Any:
        """The same for `linear_fp8`."""

    def linear_fp8(self, x: "Tensor", weight: Any, bias: "Tensor | None", dtype: "torch.dtype") -> "Tensor": ...

    def plan_attention(self, items: "AttentionItems", block_size: int) -> Any:
        """What `attention` needs to know about a step, laid out for this device; made once, used by every layer."""

    def attention(self, query: "Tensor", pages: "LayerPages", plan: Any, masking: "Masking") -> "Tensor": ...

    def draw(self, x: "Tensor", head: "DrawnLinear", filters: "Filters") -> "tuple[Tensor, Tensor]": ...

    def finite(self, logits: "Tensor") -> "Tensor": ...

    def penalise(self, logits: "Tensor", penalties: "Penalties") -> "Tensor": ...

    def sample(self, logits: "Tensor", filters: "Filters") -> "Tensor": ...

    def mask(self, logits: "Tensor", rows: "Tensor", bits: "Tensor") -> None: ...

    def logprobs(self, logits: "Tensor", tokens: "Tensor", top: int) -> "tuple[Tensor, Tensor, Tensor]": ...


def load(device: str) -> Kernels:
    """The table for a torch device string. Raises ValueError naming the device when it has none."""
    from .tables import TABLES

    kind, _, number = device.partition(":")
    if kind not in TABLES:
        raise ValueError(f"device {device!r}: no kernels for it (there are: {', '.join(TABLES)})")
    return TABLES[kind](int(number) if number else None)
