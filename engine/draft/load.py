"""Models that draft: exits of the target, a smaller checkpoint, or the target's own INT4 copy, ready to run.

Knows how they are loaded and what they must have in common with the target; how they draft is not known here.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...kernels import Kernels
from ..checkpoint import Checkpoint, ModelError, open_checkpoint
from ..config import DraftSpeculation, EngineSettings
from ..decoder import Decoder, EarlyExit, load_decoder
from ..kv import KVPages
from ..runner import Runner
from ..tokenizer import Tokenizer, load_tokenizer
from .layer_skip import exits_of
from .table import DraftModels

SELF = "self"  # as the path of a draft model: the target, its weights in INT4


def load_draft_decoders(
    settings: EngineSettings, target: Decoder, checkpoint: Checkpoint, tokenizer: Tokenizer, ops: Kernels
) -> list[Decoder]:
    """The decoder that `engine.speculation` names, if it names one. Raises ModelError when it does not fit."""
    chosen = settings.speculation
    if not isinstance(chosen, DraftSpeculation):
        return []
    if chosen.model == SELF:
        return [load_decoder(checkpoint, target.dtype, target.device, ops, "int4")]
    other = load_tokenizer(chosen.model)
    require_same_tokens(tokenizer, other, chosen.model)
    decoder = load_decoder(open_checkpoint(chosen.model), target.dtype, target.device, ops)
    if decoder.spec.vocab_size < tokenizer.size:
        raise ModelError(
            f"engine.speculation: {chosen.model} has a head of {decoder.spec.vocab_size} tokens, "
            f"the tokenizer {tokenizer.size}; use a model that knows them all"
        )
    return [decoder]


def require_same_tokens(target: Tokenizer, draft: Tokenizer, path: str) -> None:
    """Raises ModelError unless every id means the same token to both, and the same ids end an answer."""
    mine, others = (one.backend.get_vocab(with_added_tokens=True) for one in (target, draft))
    if mine != others:
        different = min(text for text in mine.keys() | others.keys() if mine.get(text) != others.get(text))
        raise ModelError(
            f"engine.speculation: {path} has another vocabulary (token {different!r} is {mine.get(different)} "
            f"in the model and {others.get(different)} in the draft model); use a draft model of the same family"
        )
    if target.eos_ids != draft.eos_ids:
        raise ModelError(
            f"engine.speculation: {path} has other end tokens ({sorted(draft.eos_ids)} instead of "
            f"{sorted(target.eos_ids)}); use a draft model of the same family"
        )


def draft_models(target: Decoder, runner: Runner, decoders: Sequence[Decoder], settings: EngineSettings) -> DraftModels:
    """What drafters may run, over the target's pages, or over own ones behind the same block ids."""
    layers = target.spec.num_layers
    exits = {exit_: replace(runner, model=EarlyExit(target, exit_)) for exit_ in exits_of(layers)}
    pages = runner.pages
    for decoder in decoders:
        assert isinstance(settings.speculation, DraftSpeculation)
        own = KVPages(decoder.kv_shape(), pages.num_blocks, pages.block_size, target.device)
        model = replace(runner, model=decoder, pages=own)
        return DraftModels(layers, exits, model, settings.speculation.tokens, decoder.spec.context_length)
    return DraftModels(layers, exits)
