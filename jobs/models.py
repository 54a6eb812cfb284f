"""Where a job gets its model: identity and context length from the files, then tokenizer and engine.

Knows the calls into the engine package; imports torch only when the engine is to be loaded. Pass a subclass to `run` to
bring an engine of your own.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from batchgen.engine.checkpoint import Checkpoint, open_checkpoint
from batchgen.engine.config import ADOPTED, EngineSettings
from batchgen.engine.costs import Workload, affordable_seconds, micro_run_seconds
from batchgen.engine.models import architecture
from batchgen.engine.processor import Place, computed_dtype, likely_place
from batchgen.engine.rates import Rates, built_in
from batchgen.engine.rates_cache import cache_file, entry_name, keep_attempt, keep_rates, load_attempt, load_rates
from batchgen.engine.request import Completion, Request, Sampling
from batchgen.engine.spec import ModelSpec

from .estimate import machine_rate, rates_file
from .job import Job
from .surroundings import config_digest, tokenizer_digest

if TYPE_CHECKING:
    from batchgen.engine.gate import Choice

log = logging.getLogger(__name__)

_MORE = 2.0  # times the seconds that were too few before micro-runs are tried again


class LoadedModel(Protocol):
    """What a job needs of a loaded engine."""

    tokenizer: Any
    statistics: Any
    bounds: Any  # eos_ids: the end tokens of model and tokenizer

    @property
    def resolved(self) -> Mapping[str, Any]:
        """What `auto` came to: device, dtype, weights; `max_batch_tokens` and `max_sequences` as they are now."""
        ...

    def adopt(self, settings: EngineSettings) -> None:
        """Takes tokens a step and answers at once of `settings` as far as it can, see `resolved`, and, for the runs to
        come, speculation.
        """
        ...

    def prepare(self, num_tokens: float) -> object:
        """Begins to find memory for the keys and values of so many tokens, beside what goes on."""
        ...

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]: ...
    def interrupt(self) -> None:
        """Ends `run` soon; called from another thread, or from a signal handler."""
        ...


class LoadedOnce:
    """The engine of a job's steps: loaded when the first of them needs it, and anew only for other number formats.

    What `auto` chooses for each step anew is handed to the engine that is there.
    """

    def __init__(self, models: "Models") -> None:
        self._models = models
        self._wanted: tuple[Any, Any] | None = None
        self._engine: LoadedModel | None = None

    @property
    def is_loaded(self) -> bool:
        return self._engine is not None

    def engine(self, job: Job) -> LoadedModel:
        """Raises ModelError."""
        wanted = job.model, job.engine.model_copy(update=dict.fromkeys(ADOPTED, "auto"))
        if self._engine is None or wanted != self._wanted:
            self._engine = None  # two at once may not fit
            self._engine, self._wanted = self._models.engine(job), wanted
        else:
            self._engine.adopt(job.engine)
        return self._engine


class Models:
    """The models of this installation."""

    def digest(self, job: Job) -> str:
        """Identity of the weights. Raises ModelError."""
        return self._checkpoint(job).digest()

    def surroundings(self, job: Job) -> dict[str, Any]:
        """What else in the model's files decides the answers. Raises ModelError."""
        checkpoint = self._checkpoint(job)
        revision = None if job.model.tokenizer else job.model.revision
        return {
            "config": config_digest(checkpoint.config),
            "tokenizer": tokenizer_digest(job.tokenizer_path, revision),
            "eos_ids": sorted(checkpoint.eos_ids),
        }

    def context_length(self, job: Job) -> int:
        """Tokens that prompt and answer share. Raises ModelError for a model that cannot be run."""
        return self.spec(job).context_length

    def spec(self, job: Job) -> ModelSpec:
        """What the model computes, in numbers. Raises ModelError for a model that cannot be run."""
        config = self._checkpoint(job).config
        return architecture(config).spec(config)

    def generation_config(self, job: Job) -> Mapping[str, Any]:
        """The model's own sampling values."""
        return self._checkpoint(job).generation_config

    def tokenizer(self, job: Job) -> Any:
        from batchgen.engine.tokenizer import load_tokenizer

        return load_tokenizer(job.tokenizer_path, None if job.model.tokenizer else job.model.revision)

    def grammar_fault(self, job: Job, sampling: Sampling, tokenizer: Any) -> str | None:
        """A key of the generation section that asks for what no answer can be, and why. Raises ModelError."""
        from batchgen.engine.grammar import GrammarError
        from batchgen.engine.grammars import Grammars

        assert sampling.grammar is not None
        ends = self._checkpoint(job).eos_ids | tokenizer.eos_ids
        grammars = Grammars(tokenizer, frozenset(token for token in ends if token < tokenizer.size))
        try:
            grammars.start(sampling.grammar)
            trie = grammars.trie(sampling.grammar) if sampling.choice_probs else None
        except GrammarError as error:
            return f"{sampling.grammar.kind}: {error}"
        longest = 0 if trie is None else max(map(len, trie.options))
        if longest <= sampling.max_tokens or "max_tokens" in job.generation.per_row:
            return None
        return f"max_tokens: {sampling.max_tokens}, but a choice that is to be scored has {longest} tokens; raise it"

    def likely_place(self, job: Job) -> Place:
        """Where a run would compute, as far as it is known without loading torch."""
        return likely_place(job.engine.device)

    def place(self, job: Job) -> Place:
        """Where a run computes: what the engine will be loaded to. Raises ModelError."""
        from batchgen.engine.device import find_place

        return find_place(job.engine.device)

    def dtype(self, job: Job, place: Place) -> str:
        """The number format of computation."""
        return computed_dtype(job.model.dtype, self._checkpoint(job).dtype, place.kind)

    def rates(self, job: Job, place: Place, work: Workload | None = None) -> Rates:
        """What a place takes for steps of the model: measured earlier, or now if `work` is long enough for it.

        Else what is built in, in proportion to the speed of a float32 product.
        """
        spec, dtype = self.spec(job), self.dtype(job, place)
        name = entry_name(spec, dtype, place)
        found = load_rates(cache_file(), name)
        if found is not None:
            return found
        rough = built_in(spec, dtype, place.kind, machine_rate(rates_file()))
        needed = max(micro_run_seconds(rough), _MORE * load_attempt(cache_file(), name))
        if work is None or (seconds := affordable_seconds(work, rough)) < needed:
            return rough
        return self._measured(job, spec, dtype, name, seconds) or rough

    def _measured(self, job: Job, spec: ModelSpec, dtype: str, name: str, seconds: float) -> Rates | None:
        """Rates of micro-runs, kept for the next job; None when they say nothing.

        That the time was too short is kept as well, so that only a job that allows more of it tries again.
        """
        from batchgen.engine.calibration import DisturbedError, TooLongError, calibrate_device

        try:
            rates = calibrate_device(spec, dtype, job.engine.device, seconds)
        except DisturbedError as error:
            log.info("built-in rates: %s", error)
            if isinstance(error, TooLongError):
                keep_attempt(cache_file(), name, seconds)
            return None
        keep_rates(cache_file(), name, rates)
        return rates

    def formats(
        self, job: Job, prompts: Callable[[], Iterable[Sequence[int]]], shares: Mapping[str, Mapping[str, float]]
    ) -> "Choice":
        """The number formats for a job, measured on token ids of its first rows. Raises ModelError.

        `shares`: by kind and format, the job's predicted time beside that with native ones.
        """
        from batchgen.engine.choose import choose_formats

        return choose_formats(
            job.model_path,
            prompts,
            shares,
            revision=job.model.revision,
            tokenizer=job.tokenizer_path if job.model.tokenizer else None,
            dtype=job.model.dtype,
            weights=job.model.weights,
            kv_cache=job.engine.kv_cache,
            device=job.engine.device,
        )

    def engine(self, job: Job) -> LoadedModel:
        from batchgen.engine import Engine

        return Engine.load(**self.engine_arguments(job))

    def engine_arguments(self, job: Job) -> dict[str, Any]:
        """What `Engine.load` is given."""
        return {
            "path": job.model_path,
            "revision": job.model.revision,
            "tokenizer": job.tokenizer_path if job.model.tokenizer else None,
            "dtype": job.model.dtype,
            "weights": job.model.weights,
            **job.engine.model_dump(),
            "speculation": job.speculation,
        }

    def _checkpoint(self, job: Job) -> Checkpoint:
        return open_checkpoint(job.model_path, job.model.revision)
