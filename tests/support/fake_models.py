"""A model without weights for job tests: bytes are tokens, answers follow from the prompt and the row's noise alone.

Knows the engine's interface; imports no torch. The answer to a row is the same in every run, order and batch.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from batchgen.engine.config import EngineSettings
from batchgen.engine.costs import Workload
from batchgen.engine.processor import Place
from batchgen.engine.rates import Rates, built_in
from batchgen.engine.request import Completion, Request, Sample, Sampling, TokenLogprob, Usage
from batchgen.engine.spec import ModelSpec, RopeSpec
from batchgen.jobs.job import Job
from batchgen.jobs.models import Models

END = 256
SPEC = ModelSpec("fake", 257, 512, 16, 32, 2, 2, 1, 8, 1e-5, RopeSpec("default", 1e4, 8, 512), (None, None))


class ByteTokenizer:
    """One token per UTF-8 byte, and an end token."""

    size = 257
    eos_ids = frozenset({END})
    special_tokens: Mapping[str, str] = {}
    chat_template: str | None = None

    def fewest_tokens(self, text: str) -> int:
        return len(text)

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token != END).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        return "" if token == END else chr(token)

    def digest(self) -> str:
        return "bytes"


def answer(request: Request, sample: int) -> Sample:
    """Letters drawn from prompt, seed, position and sample; half of the answers end by themselves."""
    sampling: Sampling = request.sampling
    key = f"{list(request.prompt)}|{sampling.seed}|{request.key}|{sample}|{sampling.temperature}"
    digest = hashlib.sha256(key.encode()).digest()
    wanted = 1 + digest[0] % 16
    letters = [97 + byte % 26 for byte in digest[1 : 1 + min(wanted, sampling.max_tokens)]]
    ended = wanted < sampling.max_tokens
    tokens = [*letters, END] if ended else letters
    logprobs = None
    if sampling.logprobs is not None:
        logprobs = [TokenLogprob(token, -0.5, ((token, -0.5),) * min(1, sampling.logprobs)) for token in tokens]
    return Sample(tokens, "stop" if ended else "length", logprobs)


@dataclass
class FakeEngine:
    """Answers in small batches; `before` is called with each request and may raise or wait."""

    before: Callable[[Request], None] = lambda request: None
    seconds: float = 0.0
    width: int = 4
    interrupted: bool = False
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    bounds: Any = field(default_factory=lambda: SimpleNamespace(eos_ids=frozenset({END})))
    resolved: dict[str, Any] = field(default_factory=lambda: {"device": "cpu", "dtype": "float32", "weights": "native"})
    asked: list[int] = field(default_factory=list)
    adopted: list[EngineSettings] = field(default_factory=list)
    prepared: list[float] = field(default_factory=list)  # tokens
    largest: dict[str, int] = field(default_factory=lambda: {"max_batch_tokens": 1 << 20, "max_sequences": 1 << 20})
    statistics: Any = field(
        default_factory=lambda: SimpleNamespace(
            computed_prompt_tokens=0, cached_prompt_tokens=0, output_tokens=0, kv_blocks_used=1, kv_blocks_total=4
        )
    )

    def interrupt(self) -> None:
        self.interrupted = True

    def prepare(self, num_tokens: float) -> None:
        self.prepared.append(num_tokens)

    def adopt(self, settings: EngineSettings) -> None:
        self.adopted.append(settings)
        self.take(settings)

    def take(self, settings: EngineSettings) -> None:
        """The limits of `settings`, as far as it can; `auto` is all."""
        for name, most in self.largest.items():
            asked = getattr(settings, name)
            self.resolved[name] = most if asked == "auto" else min(asked, most)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        self.interrupted = False
        return self._run(requests)

    def _run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        group: list[Request] = []
        for request in requests:
            if self.interrupted:
                return
            group.append(request)
            if len(group) == self.width:
                yield from self._answer(group)
                group = []
        if not self.interrupted:
            yield from self._answer(group)

    def _answer(self, group: list[Request]) -> Iterator[Completion]:
        if self.seconds and any(request.error is None for request in group):
            time.sleep(self.seconds)
        for request in reversed(group):
            yield self._complete(request)

    def _complete(self, request: Request) -> Completion:
        if request.error is not None:
            return Completion(request.key, (), error=request.error, tag=request.tag)
        self.before(request)
        self.asked.append(request.key)
        samples = tuple(answer(request, index) for index in range(request.sampling.n))
        output = sum(len(sample.tokens) for sample in samples)
        self.statistics.computed_prompt_tokens += len(request.prompt)
        self.statistics.output_tokens += output
        return Completion(request.key, samples, Usage(len(request.prompt), 0, output), tag=request.tag)


@dataclass
class FakeModels(Models):
    """Hands out one FakeEngine; `loads` counts how often a job asked for it."""

    fake: FakeEngine = field(default_factory=FakeEngine)
    weights: str = "fake"
    context: int = 512
    generation: Mapping[str, Any] = field(default_factory=dict)
    loads: int = 0

    def digest(self, job: Job) -> str:
        return self.weights

    def surroundings(self, job: Job) -> dict[str, Any]:
        return {"tokenizer": f"{self.fake.tokenizer.digest()} {self.fake.tokenizer.chat_template}"}

    def context_length(self, job: Job) -> int:
        return self.context

    def generation_config(self, job: Job) -> Mapping[str, Any]:
        return self.generation

    def tokenizer(self, job: Job) -> ByteTokenizer:
        return self.fake.tokenizer

    def grammar_fault(self, job: Job, sampling: Sampling, tokenizer: Any) -> str | None:
        return None

    def place(self, job: Job) -> Place:
        return self.likely_place(job)

    def dtype(self, job: Job, place: Place) -> str:
        return "float32"

    def rates(self, job: Job, place: Place, work: Workload | None = None) -> Rates:
        return built_in(SPEC, "float32")

    def formats(self, job: Job, prompts: Callable[[], Iterable[Sequence[int]]], shares: Any) -> Any:
        return SimpleNamespace(weights=job.model.weights, kv_cache=job.engine.kv_cache, trials=(), note=None)

    def engine(self, job: Job) -> Any:
        self.loads += 1
        self.fake.take(job.engine)
        return self.fake
