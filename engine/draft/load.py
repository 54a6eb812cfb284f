"""What drafts beside the target: its exits, Medusa heads, a smaller checkpoint, or its own INT4 copy, ready to run.

Knows how they are loaded and what they must have in common with the target; how they draft is not known here.
"""

from dataclasses import dataclass, replace

from ...kernels import Kernels
from ..checkpoint import Checkpoint, ModelError, open_checkpoint
from ..config import SELF, DraftSpeculation, EngineSettings, MedusaSpeculation, PredictionSpeculation
from ..decoder import Decoder, EarlyExit, load_decoder
from ..kv import KVPages
from ..runner import Runner
from ..tokenizer import Tokenizer, load_tokenizer
from .heads import MedusaHead, RunningHeads, load_heads
from .layer_skip import exits_of
from .prediction import Prediction, PredictionLayer, PredictionRunner, TokenStates, load_prediction_layer
from .table import DraftModels


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """What was loaded to draft with, beside the target."""

    decoders: tuple[Decoder, ...] = ()
    heads: tuple[MedusaHead, ...] = ()
    prediction: PredictionLayer | None = None

    @property
    def bytes_per_token(self) -> int:
        """What is kept for a token beside the target's keys and values."""
        kept = sum(decoder.kv_shape().bytes_per_token for decoder in self.decoders)
        layer = self.prediction
        return kept if layer is None else kept + layer.shape.bytes_per_token + layer.state_bytes


NO_WEIGHTS = DraftWeights()


def load_draft_weights(
    settings: EngineSettings, target: Decoder, checkpoint: Checkpoint, tokenizer: Tokenizer, ops: Kernels
) -> DraftWeights:
    """What `engine.speculation` names to be read, if anything. Raises ModelError when it does not fit."""
    chosen = settings.speculation
    try:
        if isinstance(chosen, MedusaSpeculation):
            return DraftWeights(heads=load_heads(chosen.path, target, ops))
        if isinstance(chosen, DraftSpeculation):
            return DraftWeights((_load_decoder(chosen.model, target, checkpoint, tokenizer, ops),))
        if isinstance(chosen, PredictionSpeculation):
            return DraftWeights(prediction=load_prediction_layer(checkpoint, target, ops))
    except ModelError as error:
        raise ModelError(f"engine.speculation: {str(error).removeprefix('model.path: ')}") from None
    return NO_WEIGHTS


def _load_decoder(path: str, target: Decoder, checkpoint: Checkpoint, tokenizer: Tokenizer, ops: Kernels) -> Decoder:
    if path == SELF:
        return load_decoder(checkpoint, target.dtype, target.device, ops, "int4")
    require_same_tokens(tokenizer, load_tokenizer(path), path)
    decoder = load_decoder(open_checkpoint(path), target.dtype, target.device, ops)
    if decoder.spec.vocab_size < tokenizer.size:
        raise ModelError(
            f"{path} has a head of {decoder.spec.vocab_size} tokens, the tokenizer {tokenizer.size}; "
            "use a model that knows them all"
        )
    return decoder


def require_same_tokens(target: Tokenizer, draft: Tokenizer, path: str) -> None:
    """Raises ModelError unless every id means the same token to both, and the same ids end an answer."""
    mine, others = (one.backend.get_vocab(with_added_tokens=True) for one in (target, draft))
    if mine != others:
        different = min(text for text in mine.keys() | others.keys() if mine.get(text) != others.get(text))
        raise ModelError(
            f"{path} has another vocabulary (token {different!r} is {mine.get(different)} "
            f"in the model and {others.get(different)} in the draft model); use a draft model of the same family"
        )
    if target.eos_ids != draft.eos_ids:
        raise ModelError(
            f"{path} has other end tokens ({sorted(draft.eos_ids)} instead of "
            f"{sorted(target.eos_ids)}); use a draft model of the same family"
        )


def require_exits(settings: EngineSettings, num_layers: int) -> None:
    """Raises ModelError when the target is to draft with its first layers and has none to leave behind."""
    if settings.speculation_kind == "layer_skip" and not exits_of(num_layers):
        raise ModelError("engine.speculation: layer_skip needs a model of two layers or more; use auto")


def draft_models(target: Decoder, runner: Runner, weights: DraftWeights, settings: EngineSettings) -> DraftModels:
    """What drafters may run, over the target's pages, or over own ones behind the same block ids.

    Heads and layers that predict make the runner show its hidden states.
    """
    layers = target.spec.num_layers
    exits = {exit_: replace(runner, model=EarlyExit(target, exit_)) for exit_ in exits_of(layers)}
    pages = runner.pages
    for decoder in weights.decoders:
        assert isinstance(settings.speculation, DraftSpeculation)
        own = KVPages(decoder.kv_shape(), pages.num_blocks, pages.block_size, target.device)
        model = replace(runner, model=decoder, pages=own)
        return DraftModels(layers, exits, model, settings.speculation.tokens, decoder.spec.context_length)
    if weights.prediction is not None:
        assert isinstance(settings.speculation, PredictionSpeculation)
        model = _prediction_runner(weights.prediction, target, runner)
        return DraftModels(layers, exits, model, settings.speculation.tokens, target.spec.context_length)
    if not weights.heads:
        return DraftModels(layers, exits)
    heads = RunningHeads(weights.heads, runner.sampler)
    runner.observer = heads.states
    return DraftModels(layers, exits, heads=heads)


def _prediction_runner(layer: PredictionLayer, target: Decoder, runner: Runner) -> Runner:
    """Runs the layer over keys of its own, and the states that the target's runner shows from now on."""
    pages = runner.pages
    own = KVPages(layer.shape, pages.num_blocks, pages.block_size, target.device)
    states = runner.observer = TokenStates(target, pages.num_blocks, pages.block_size)
    return PredictionRunner(Prediction(layer, states), runner.kernels, own, runner.sampler, runner.sharing)
