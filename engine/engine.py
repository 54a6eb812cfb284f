"""The engine as its users see it: load a model, run requests, get completions in the order they end.

Composes planning, scheduling and execution; each of them is decided elsewhere.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

from ..kernels import Kernels
from .backlog import UNKNOWN_BACKLOG, Announced, AnnouncedBacklog, Backlog
from .blocks import BlockPool, BlockTree, UnsharedBlocks
from .checkpoint import Checkpoint, ModelError, open_checkpoint
from .choices import ChoiceTrie
from .config import ADOPTED, EngineSettings
from .decoder import Decoder, load_decoder
from .device import load_kernels, place_of, resolve_device
from .draft.load import NO_WEIGHTS, DraftWeights, draft_models, load_draft_weights, require_exits
from .draft.speculation import Speculation
from .draft.table import new_speculation
from .explain import validated
from .grammar import Grammar
from .grammar_state import GrammarState
from .grammars import Grammars
from .graphs import EAGER, EXECUTORS, Executor
from .intake import Intake, carried_error, refusal
from .kv import KVPages
from .link import link_to
from .loop import StepLoop
from .machine import compute_dtype, use_granted_cores
from .rates_cache import known_sharing
from .request import Completion, Request
from .runner import Runner
from .sampling import Sampler
from .scheduler import Scheduler
from .sizing import WORKING_BYTES, kv_cache_bytes
from .statistics import Statistics
from .tokenizer import Tokenizer, load_tokenizer
from .workload import arrange

MAX_SEQUENCES = {"cpu": 256, "cuda": 1024}
MAX_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
LOOK_AHEAD = {"cpu": 0, "cuda": 1}  # steps planned and launched while one is under way


@dataclass(frozen=True, slots=True)
class RowBounds:
    """What one row may ask of the model and of the KV memory."""

    model: Decoder
    vocabulary: int
    kv_tokens: int
    block_size: int
    eos_ids: frozenset[int]
    grammars: Grammars

    @property
    def context_length(self) -> int:
        return self.model.spec.context_length

    def rope_choice(self, length: int) -> int:
        return self.model.rope_choice(length)

    def grammar_start(self, grammar: Grammar) -> GrammarState:
        return self.grammars.start(grammar)

    def choice_trie(self, grammar: Grammar) -> ChoiceTrie:
        return self.grammars.trie(grammar)


class Engine:
    """A loaded model with its KV memory. One `run` at a time; runs share nothing but the weights."""

    def __init__(
        self,
        model: Decoder,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        ops: Kernels,
        settings: EngineSettings,
        drafting: DraftWeights = NO_WEIGHTS,
    ) -> None:
        device = model.device
        self.model = model
        self.tokenizer = tokenizer
        self.generation_config = checkpoint.generation_config
        self.settings = settings
        self.device = device
        self.statistics = Statistics()
        block_size = settings.tokens_per_block
        shape = model.kv_shape(settings.kv_cache)
        self.resolved: dict[str, Any] = {
            "device": str(device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache": shape.format.name,
            "block_size": block_size,
        }
        self._measured_for: tuple[float, float] = (math.inf, math.inf)
        self._running = False
        self._scheduler: Scheduler | None = None  # of the run that goes on
        self.adopt(settings)
        vocabulary = min(tokenizer.size, model.spec.vocab_size)
        ends = frozenset(token for token in checkpoint.eos_ids | tokenizer.eos_ids if token < vocabulary)
        self.grammars = Grammars(tokenizer, ends)
        sampler = Sampler(ops, vocabulary, self.grammars, link_to(device))
        sharing = known_sharing(model.spec, self.resolved["dtype"], place_of(device), shape.format.name)

        def runner(num_blocks: int, executor: Executor = EAGER) -> Runner:
            pages = KVPages(shape, num_blocks + executor.scrap_blocks, block_size, device)
            return Runner(model, ops, pages, sampler, sharing, executor)

        block_bytes = (shape.bytes_per_token + drafting.bytes_per_token) * block_size
        self._num_blocks = self._kv_blocks(runner, block_bytes)
        self.bounds = RowBounds(model, vocabulary, self._num_blocks * block_size, block_size, ends, self.grammars)
        self._runner = runner(self._num_blocks, EXECUTORS[device.type]())
        self._draft_models = draft_models(model, self._runner, drafting, settings)
        self._look_ahead = LOOK_AHEAD[device.type]
        self._interrupted = threading.Event()

    def _kv_blocks(self, runner: Callable[[int], Runner], block_bytes: int) -> int:
        """As many as memory holds beside the largest step, which is run to see. Raises ModelError for none."""
        limits, size = (self._max_batch_tokens, self._max_sequences), self.settings.tokens_per_block
        working = WORKING_BYTES[self.device.type](runner, *limits, size)
        if working:
            self._measured_for = limits
        memory = self.settings.memory
        self.resolved["kv_blocks"] = number = kv_cache_bytes(memory, self.device, working) // block_bytes
        if number < 1:
            raise ModelError(f"engine.memory: {memory} holds no KV block of {block_bytes} bytes; raise it")
        return number

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end tokens of model and tokenizer."""
        return self.bounds.eos_ids

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its answer share."""
        return self.bounds.context_length

    @classmethod
    def load(
        cls,
        path: str,
        *,
        revision: str | None = None,
        tokenizer: str | None = None,
        dtype: str = "auto",
        weights: str = "auto",
        **settings: Any,
    ) -> "Engine":
        """Loads the model at `path`: a Hub id, a local directory or a local .gguf file.

        `settings` are the keys of the job file's `engine` section: device, memory, kv_cache, block_size,
        max_batch_tokens, max_sequences, prefix_sharing, speculation. With no rows to measure on, `auto` means native
        weights and a KV cache in the dtype of computation. Raises ModelError, in one line, when the model
        or the device cannot be used, ValueError for settings that are not legal.
        """
        chosen = validated(EngineSettings, settings)
        use_granted_cores()
        device = resolve_device(chosen.device)
        ops = load_kernels(device)
        checkpoint = open_checkpoint(path, revision)
        number_format = compute_dtype(dtype, checkpoint.dtype, device)
        model = load_decoder(checkpoint, number_format, device, ops, weights)
        text = load_tokenizer(tokenizer or path, None if tokenizer else revision)
        drafting = load_draft_weights(chosen, model, checkpoint, text, ops)
        engine = cls(model, checkpoint, text, ops, chosen, drafting)
        engine.resolved["weights"] = "native" if weights == "auto" else weights
        engine.resolved["rounding"] = {kind: round(error, 6) for kind, error in model.rounding.items()}
        return engine

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Generates every request and yields each completion when it ends.

        A sized collection is planned first: its requests run in the order that shares most, of those that share alike
        the longer answers first. Any other iterable is taken in its own order, and only as fast as there is room, so it
        may be endless; one with a method `rest` (see `backlog.Announced`) tells how it ends. Raises RuntimeError when
        another run of this engine is still going on.
        """
        if not self._running:
            self._interrupted.clear()
        return self._generate(requests)

    def adopt(self, settings: EngineSettings) -> None:
        """Takes tokens a step and answers at once of `settings` from now on, speculation for the runs to come.

        A drafter that was not loaded with the engine cannot be taken; nor are steps of a graphics card larger than
        those whose memory was measured at first. Raises ModelError for a drafter that the model cannot be.
        """
        require_exits(settings, self.model.spec.num_layers)
        tokens, sequences = settings.max_batch_tokens, settings.max_sequences
        self.settings = self.settings.model_copy(update={name: getattr(settings, name) for name in ADOPTED})
        tokens = MAX_BATCH_TOKENS[self.device.type] if tokens == "auto" else tokens
        sequences = MAX_SEQUENCES[self.device.type] if sequences == "auto" else sequences
        most_tokens, most_sequences = self._measured_for
        self._max_batch_tokens, self._max_sequences = int(min(tokens, most_tokens)), int(min(sequences, most_sequences))
        if self._scheduler is not None:
            self._scheduler.adopt(self._max_batch_tokens, self._max_sequences)
        self.resolved |= {
            "max_batch_tokens": self._max_batch_tokens,
            "max_sequences": self._max_sequences,
        }
        if not self._running:
            self.resolved["speculation"] = settings.speculation_kind

    def prepare(self, num_tokens: float) -> threading.Thread:
        """Has memory found for the keys and values of so many tokens, in the thread returned, before steps wait for it.

        What is prepared counts as used, so no more should be asked for than the rows to come hold at once.
        """
        blocks = min(self._num_blocks, math.ceil(num_tokens / self.settings.tokens_per_block))
        thread = threading.Thread(target=self._runner.pages.populate, args=(blocks,), name="prepare", daemon=True)
        thread.start()
        return thread

    def interrupt(self) -> None:
        """Ends the run that goes on after its present step, one that was called for and has not begun before its first.

        Rows without an outcome get none. Runs that are called for later are whole.
        May be called from another thread or a signal handler.
        """
        self._interrupted.set()

    def _generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        if self._running:
            raise RuntimeError("this engine is in the middle of another run; finish or close that one first")
        self._running = True
        self._reset()
        try:
            self.statistics = Statistics(kv_blocks_total=self._num_blocks)
            yield from self._steps(self._intake(requests))
        finally:
            self._reset()
            self._running, self._scheduler = False, None

    def _reset(self) -> None:
        self._runner.reset()
        self._draft_models.reset()

    def _intake(self, requests: Iterable[Request]) -> Intake:
        backlog: Backlog = UNKNOWN_BACKLOG
        judge = refusal
        if isinstance(requests, Sized):
            requests, backlog = arrange(requests, self.bounds, self._max_sequences)
            judge = carried_error
        elif isinstance(requests, Announced):
            backlog = AnnouncedBacklog(requests)
        return Intake(iter(requests), self.bounds, self.tokenizer.decode, deque(), self.statistics, backlog, judge)

    def _steps(self, intake: Intake) -> Iterator[Completion]:
        kind = self.resolved["speculation"] = self.settings.speculation_kind
        policy = self.settings.speculation_policy
        speculation = new_speculation(kind, policy, self._draft_models, self.bounds.vocabulary, self.statistics)
        scheduler = self._scheduler = self._new_scheduler(intake, speculation)
        loop = StepLoop(scheduler, self._runner.launch, speculation, self._look_ahead)
        return loop.run(lambda: self._interrupted.is_set(), lambda: intake.exhausted)

    def _new_scheduler(self, intake: Intake, speculation: Speculation) -> Scheduler:
        settings = self.settings
        tree_kind = BlockTree if settings.prefix_sharing else UnsharedBlocks
        tree = tree_kind(BlockPool(self._num_blocks), settings.tokens_per_block)
        return Scheduler(intake, tree, self._max_batch_tokens, self._max_sequences, self.statistics, speculation)
