"""An engine over random weights in the shape of a model, made on its device: no file, no tokenizer, token ids only.

Knows which numbers a format holds; the decoder is built by the loader of real checkpoints.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from batchgen import kernels as op_tables
from batchgen.engine import Engine
from batchgen.engine.checkpoint import Checkpoint
from batchgen.engine.config import EngineSettings
from batchgen.engine.decoder import load_decoder
from batchgen.engine.models import architecture
from batchgen.engine.weights.repack import QuantisedWeight, Stored
from batchgen.kernels.linear_fp8 import Fp8Weight
from batchgen.kernels.linear_int4 import Int4Weight
from batchgen.kernels.linear_int8 import Int8Weight

GROUP = 128  # of 4-bit weights

LLAMA_8B: dict[str, Any] = {  # Llama-3.1-8B, without the RoPE factors that only long contexts see
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
SMALL: dict[str, Any] = {
    **LLAMA_8B,
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """Values of unit variance over the inputs, drawn when asked for; codes at once where a format wants codes."""

    shape: tuple[int, ...]
    form: str
    device: torch.device
    stored_bits: float = 4.0  # so that a format takes codes as they are

    def copy_to(self, out: Tensor) -> None:
        if len(self.shape) == 1:
            out.fill_(1.0)
        else:
            out.normal_(0, self.shape[-1] ** -0.5)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        self.copy_to(out)
        return out

    def float_rows(self) -> Iterator[Tensor]:
        yield self.dequantise(torch.float32)

    def quantised(self, *kinds: type[QuantisedWeight]) -> Stored | None:
        made = _CODES[self.form](self.shape, self.device) if self.form in _CODES else None
        return None if made is None or (kinds and not isinstance(made, kinds)) else Stored(made)


def _int4(shape: tuple[int, ...], device: torch.device) -> Int4Weight:
    outputs, inputs = shape
    group = min(GROUP, inputs)
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    scale = torch.full((outputs, -(-inputs // group)), 0.22 * inputs**-0.5, dtype=torch.float16, device=device)
    return Int4Weight(codes, scale, -7.5 * scale, group)


def _int8(shape: tuple[int, ...], device: torch.device) -> Int8Weight:
    outputs, inputs = shape
    codes = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    return Int8Weight(codes, torch.full((outputs, 1), inputs**-0.5 / 73, device=device), None, inputs)


def _fp8(shape: tuple[int, ...], device: torch.device) -> Fp8Weight:
    outputs, inputs = shape
    codes = torch.randn(shape, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.full((outputs, 1), inputs**-0.5, device=device), inputs)


_CODES = {"int4": _int4, "int8": _int8, "fp8": _fp8}


@dataclass(frozen=True, slots=True)
class RandomReader:
    """A checkpoint that holds what its model needs, and no number before it is asked for."""

    names: Mapping[str, tuple[int, ...]]
    form: str
    device: torch.device

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.names)

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, RandomTensor]]:
        for name, shape in self.names.items():
            if name in wanted:
                form = "int8" if name == "lm_head.weight" and self.form in ("int4", "fp8") else self.form
                yield name, RandomTensor(shape, form, self.device)

    def digest(self) -> str:
        return "random"


@dataclass(frozen=True, slots=True)
class IdsOnly:
    """Stands where a tokenizer would."""

    size: int
    eos_ids: frozenset[int] = frozenset()

    def decode(self, tokens: list[int]) -> str:
        return ""


def random_engine(
    config: Mapping[str, Any], weights: str, device: torch.device, dtype: torch.dtype, **settings: Any
) -> Engine:
    """`settings` are those of `engine` in a job file."""
    ops = op_tables.load(str(device))
    family = architecture(dict(config))
    names = {name: place.shape for name, place in family.weights(family.spec(dict(config))).places.items()}
    checkpoint = Checkpoint("random", dict(config), {}, lambda: RandomReader(names, weights, device))
    with torch.inference_mode():
        model = load_decoder(checkpoint, dtype, device, ops, weights)
    chosen = EngineSettings(**{"device": str(device), "speculation": "off", **settings})
    return Engine(model, checkpoint, IdsOnly(config["vocab_size"]), ops, chosen)  # type: ignore[arg-type]


@cache
def random_ids(count: int, seed: int, vocabulary: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocabulary, (count,), generator=generator).tolist())
