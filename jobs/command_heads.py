"""`batchgen heads`: small heads that guess a model's next tokens, trained on answers it has given.

Knows where answers and heads lie and what is told; how heads are trained is decided in the engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .answers import read_answers
from .directory import new_directory
from .errors import UsageError


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """How many heads, how long they are trained, on how many answers at most."""

    heads: int
    epochs: int
    seed: int
    limit: int
    device: str


def train_heads(model: str, data: Path, out: Path, options: HeadsOptions, told: Callable[[str], None]) -> str:
    """Writes the heads and returns the line that says how good they are. Raises ModelError, UsageError.

    `told` is given lines about how far the training is.
    """
    from batchgen import kernels
    from batchgen.engine.checkpoint import open_checkpoint
    from batchgen.engine.decoder import load_decoder
    from batchgen.engine.device import resolve_device
    from batchgen.engine.draft.training import Plan, Text, examples, split, train, write_heads
    from batchgen.engine.machine import compute_dtype, use_granted_cores
    from batchgen.engine.tokenizer import load_tokenizer

    with new_directory(out) as aside:
        use_granted_cores()
        texts = [Text(*answer) for answer in read_answers(data, model, load_tokenizer(model), options.limit)]
        plan = Plan(options.heads, options.epochs, options.seed)
        checkpoint, device = open_checkpoint(model), resolve_device(options.device)
        ops = kernels.load(str(device))
        decoder = load_decoder(checkpoint, compute_dtype("auto", checkpoint.dtype, device), device, ops)
        short = [text for text in texts if len(text.prompt) + len(text.answer) <= decoder.spec.context_length]
        if len(short) < len(texts):
            told(f"{len(texts) - len(short)} of {len(texts)} answers are beyond the context and left out")
        texts = short
        try:
            learn, measure = (examples(decoder, ops, part, plan.heads) for part in split(texts, plan))
            told(f"{len(texts)} answers: {len(learn)} tokens to learn from, {len(measure)} held out")
            trained = train(decoder, learn, measure, plan, told)
        except ValueError as error:
            raise UsageError(f"{data}: {error}") from error
        write_heads(aside, trained, model)
    share = ", ".join(f"{value:.1%}" for value in trained.accuracy)
    return f"{out}: {plan.heads} heads, right on answers held out, by distance: {share}"
