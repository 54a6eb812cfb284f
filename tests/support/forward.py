"""A decoder run by hand: whole prompts in one step, one attention item per sequence, pages in shuffled order."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from batchgen import kernels
from batchgen.engine.batch import Batch
from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.decoder import Decoder, load_decoder
from batchgen.engine.kv import KVPages
from batchgen.kernels.attention import AttentionItems

CPU = torch.device("cpu")


def load(path: Path | str, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(open_checkpoint(str(path)), dtype, CPU, kernels.load("cpu"))


def prompt_logits(decoder: Decoder, prompts: Sequence[Sequence[int]], block_size: int = 8) -> list[torch.Tensor]:
    """Per prompt [length, V] float32: the logits after each of its tokens."""
    tables = _block_tables([len(prompt) for prompt in prompts], block_size)
    pages = KVPages(decoder.kv_shape(), sum(map(len, tables)), block_size, CPU)
    with torch.inference_mode():
        hidden = decoder.forward(_batch(decoder, prompts, tables, block_size), pages)
        return list(decoder.logits(hidden).split([len(prompt) for prompt in prompts]))


def _block_tables(lengths: list[int], block_size: int) -> list[np.ndarray]:
    counts = [-(-length // block_size) for length in lengths]
    shuffled = np.random.default_rng(7).permutation(sum(counts))
    return np.split(shuffled, np.cumsum(counts)[:-1])


def _batch(decoder: Decoder, prompts: Sequence[Sequence[int]], tables: list[np.ndarray], block_size: int) -> Batch:
    lengths = np.array([len(prompt) for prompt in prompts])
    positions = np.concatenate([np.arange(length) for length in lengths])
    slots = [
        table[np.arange(n) // block_size] * block_size + np.arange(n) % block_size
        for table, n in zip(tables, lengths, strict=True)
    ]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = AttentionItems(
        start=np.zeros(len(prompts), dtype=np.int64),
        length=lengths,
        block_offset=np.concatenate([[0], np.cumsum([len(table) for table in tables])]),
        blocks=np.concatenate(tables),
        query_offset=offsets,
        queries=np.arange(len(positions)),
        positions=positions,
    )
    choices = [decoder.rope_choice(len(prompt)) for prompt in prompts]
    return Batch(
        tokens=torch.tensor([token for prompt in prompts for token in prompt]),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(np.concatenate(slots)),
        rope_choice=torch.from_numpy(np.repeat(choices, lengths)),
        attention=kernels.load("cpu").plan_attention(items, block_size),
        sampled=torch.arange(len(positions)),
    )
