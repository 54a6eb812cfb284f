"""Reads and tokenises a job's whole input and counts what a run would meet. Loads no weights.

Knows how to read, render and plan; how the figures are told is in command_plan.py.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from batchgen.engine.request import Request
from batchgen.pipeline.config import PromptSettings
from batchgen.pipeline.prompt import Renderer
from batchgen.pipeline.rows import Skipped
from batchgen.pipeline.runs import RunSizes
from batchgen.pipeline.source import open_source
from batchgen.pipeline.store import WindowWriter
from batchgen.pipeline.windows import planners

from .analysis import PromptStatistics
from .check import check_chain, check_files, check_model
from .formats import FIRST_ROWS
from .generate import make_renderer
from .job import Job
from .models import Models
from .ordering import arranged, stored_order
from .resolved import resolve_sampling

_SAMPLE_ROWS, _SAMPLE_TOKENS = 4_000, 1_000_000


class Planner:
    """Reads a job's input once and keeps only counts; of a job with steps, those of the first.

    `later` are the jobs of the other steps, whose prompts depend on answers.
    """

    def __init__(self, job: Job, models: Models) -> None:
        check_files(job)
        self.later = job.chain[1:]
        self.context = min(check_model(step, models) for step in job.chain)
        self.source = open_source(job.input, job.base)
        check_chain(job, self.source.schema)
        self.job = job = job.chain[0]
        self.sampling, self.origins = resolve_sampling(job, models)
        self.tokenizer = models.tokenizer(job)
        self._models = models
        self.written, self.arrangement = arranged(job, self.source, stored_order(job))
        self.renderer = self._renderer(self.written.prompt)
        self.statistics = PromptStatistics(self.context - self.sampling.max_tokens - self.context // 10)
        self.errors: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.answer_tokens = 0
        self.first: list[Request] = []

    def read(self, sizes: RunSizes = RunSizes()) -> None:  # noqa: B008 frozen
        """Renders and plans everything. Raises StoreError when the tokens do not fit on the disk."""
        with tempfile.TemporaryDirectory(prefix="batchgen-plan-") as directory, planners() as pool:
            writer = WindowWriter(Path(directory), "0", pool, sizes)
            for request in self._requests():
                writer.add(request)
            for part in writer.finish().parts():
                self.statistics.add(part)
        self.statistics.close()

    @property
    def num_asked(self) -> int:
        """Rows that will be asked."""
        return self.source.num_rows - self.errors.total() - self.skipped.total()

    def sample(self, prompt: PromptSettings) -> dict[int, list[int]]:
        """The prompts of the first rows as another prompt section writes them, by position."""
        renderer, prompts, tokens = self._renderer(prompt), {}, 0
        for batch in self.source.batches(columns=sorted(renderer.columns)):
            for outcome in renderer.render(batch.slice(0, _SAMPLE_ROWS)):
                if isinstance(outcome, Request) and outcome.error is None:
                    prompts[outcome.key] = list(outcome.prompt)
                    tokens += len(outcome.prompt)
            if len(prompts) >= _SAMPLE_ROWS or tokens >= _SAMPLE_TOKENS:
                break
        return prompts

    def _renderer(self, prompt: PromptSettings) -> Renderer:
        job = self.job.model_copy(update={"prompt": prompt})
        return make_renderer(job, self._models, self.sampling, self.tokenizer, date.today().isoformat())

    @property
    def too_long(self) -> int:
        """Prompts beyond the context, whatever prompt.on_too_long made of them."""
        return self.errors["context_length"] + self.skipped["on_too_long"] + self.renderer.truncated

    def _requests(self) -> Iterator[Request]:
        """The rows that will be asked; the others are counted."""
        for batch in self.source.batches(columns=sorted(self.renderer.columns)):
            for outcome in self.renderer.render(batch):
                if isinstance(outcome, Skipped):
                    self.skipped[outcome.policy] += 1
                elif outcome.error is not None:
                    self.errors[outcome.error.code] += 1
                else:
                    if len(self.first) < FIRST_ROWS:
                        self.first.append(outcome)
                    self.answer_tokens += outcome.sampling.max_tokens * outcome.sampling.n
                    yield outcome
