"""The job file as one frozen record; each section is defined by the part of the program that uses it.

Knows how a file becomes a `Job`; does not open inputs, models or outputs.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, field_validator, model_validator

from batchgen.engine.config import SELF, EngineSettings, GenerationSettings, ModelSettings, Section
from batchgen.engine.explain import explain
from batchgen.pipeline.config import InputSettings, OutputSettings, PromptSettings, RequestPrompts
from batchgen.pipeline.parsed import AnswerParser
from batchgen.pipeline.place import AnyPath, place

from .document import expand_variables, override, read_document
from .errors import UsageError
from .hook import require_hook
from .names import SIDECAR
from .steps import StepPlace, StepSettings, named, take_prompts_from_steps
from .times import parse_deadline

_PERCENT = re.compile(r"\d+(\.\d+)?%")


class RunSettings(Section):
    """When a run stops and what it tells about itself."""

    max_failures: int | str | None = Field(
        None, description='more failed rows than this (10 or "1%") end in exit code 3, after the whole job; null: any'
    )
    deadline: str | None = Field(
        None, description="stop cleanly, exit code 4: HH:MM local time, or a duration like 90s, 30m, 2h"
    )
    checkpoint_seconds: float = Field(
        30, gt=0, le=86400, description="seconds after which a finished row outlives a kill"
    )
    retries: int = Field(
        0, ge=0, description="times a row that was cut by max_tokens or cannot be parsed is asked again, with new noise"
    )
    metrics_file: str | None = Field(
        None, min_length=1, description="Prometheus text file, rewritten every ten seconds"
    )
    on_finish: str | None = Field(
        None,
        description="told when a run ends: a command, or a webhook URL, that is given the manifest as JSON",
    )
    price_per_hour: float | None = Field(
        None, ge=0, description="of the machine: turns the run's time into a cost in manifest and report"
    )

    @field_validator("max_failures")
    @classmethod
    def _failures_are_a_count(cls, value: int | str | None) -> int | str | None:
        text = isinstance(value, str)
        if (text and not _PERCENT.fullmatch(str(value))) or (not text and value is not None and int(value) < 0):
            raise ValueError(f'must be a count like 10 or a share like "1%", got {value!r}')
        return value

    @field_validator("deadline")
    @classmethod
    def _deadline_is_a_time(cls, value: str | None) -> str | None:
        if value is not None:
            parse_deadline(value)
        return value

    @field_validator("on_finish")
    @classmethod
    def _hook_is_a_command_or_url(cls, value: str | None) -> str | None:
        if value is not None:
            require_hook(value)
        return value

    def allowed_failures(self, num_rows: int) -> int | None:
        """How many of `num_rows` rows may fail; None: all of them."""
        if isinstance(self.max_failures, str):
            return int(float(self.max_failures[:-1]) * num_rows / 100)
        return self.max_failures


def _prompt_is_optional(schema: dict[str, Any]) -> None:
    """For editors: steps have their own, and so have the lines of an OpenAI batch file."""
    schema["required"].remove("prompt")


class Job(Section):
    """Everything a run needs to know. Relative paths in it are relative to `base`."""

    model_config = ConfigDict(json_schema_extra=_prompt_is_optional)

    name: str = Field(
        "job",
        min_length=1,
        description="name of the job in reports, units and metrics; default: the stem of the file's name",
    )
    model: ModelSettings
    input: InputSettings
    prompt: PromptSettings
    generation: GenerationSettings = GenerationSettings()
    steps: Annotated[tuple[StepSettings, ...], Field(strict=False)] = Field(
        (),
        description="instead of prompt: prompts asked one after another over the same rows; each step has its own "
        "result columns, which later templates see; generation is the default of every step",
    )
    output: OutputSettings
    engine: EngineSettings = EngineSettings()
    run: RunSettings = RunSettings()

    @model_validator(mode="before")
    @classmethod
    def _some_need_no_prompt(cls, document: Any) -> Any:
        if isinstance(document, Mapping) and document.get("steps"):
            return take_prompts_from_steps(document)
        if not isinstance(document, Mapping) or "prompt" in document:
            return document
        section = document.get("input")
        if not isinstance(section, Mapping) or section.get("format") != "openai":
            raise ValueError("prompt: is missing; only an OpenAI batch file (input.format: openai) brings its own")
        return {**document, "prompt": {}}

    @field_validator("prompt", mode="before")
    @classmethod
    def _requests_bring_their_prompts(cls, value: Any, info: ValidationInfo) -> Any:
        section = info.data.get("input")
        if section is None or section.format != "openai" or not isinstance(value, Mapping):
            return value
        try:
            return RequestPrompts.model_validate(dict(value))
        except ValidationError as error:
            raise ValueError(in_one_line(error)) from error

    @field_validator("steps")
    @classmethod
    def _steps_have_names(cls, value: tuple[StepSettings, ...]) -> tuple[StepSettings, ...]:
        return named(value)

    @model_validator(mode="after")
    def _steps_are_jobs(self) -> Self:
        for step in range(len(self.steps)):
            self._job_of(step)
        return self

    @model_validator(mode="after")
    def _requests_bring_their_parameters(self) -> Self:
        if self.input.format == "openai" and self.generation.per_row:
            raise ValueError("generation.per_row: the lines of an OpenAI batch file bring their parameters, remove it")
        return self

    @model_validator(mode="after")
    def _columns_have_their_grammar(self) -> Self:
        for key, needed in (("parse", "json_schema"), ("choice_probs", "choices")):
            if getattr(self.output, key) and getattr(self.generation, needed) is None:
                raise ValueError(f"output.{key}: needs generation.{needed}")
            if getattr(self.output, key) and self.output.format == "openai":
                raise ValueError(f"output.{key}: output.format: openai has no such column, remove it")
        try:
            self.parser()
        except ValueError as error:
            raise ValueError(f"output.parse: {error}") from error
        return self

    def parser(self) -> AnswerParser | None:
        """What reads the answers of a `parsed` column."""
        schema = self.generation.json_schema
        return AnswerParser(schema) if self.output.parse and isinstance(schema, dict) else None

    @field_validator("output")
    @classmethod
    def _input_order_only(cls, value: OutputSettings) -> OutputSettings:
        if value.order == "completion":
            raise ValueError("order: completion order is not available yet, use input")
        return value

    _base: Path = PrivateAttr(default_factory=Path.cwd)
    _source: str = PrivateAttr(default="job")
    _document: dict[str, Any] = PrivateAttr(default_factory=dict)
    _step: StepPlace | None = PrivateAttr(default=None)
    _earlier: "tuple[Job, ...]" = PrivateAttr(default=())

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Self:
        """Reads and validates a job file; `overrides` are dotted keys. Raises UsageError, one line with the place."""
        path = Path(path)
        written = override(read_document(path), overrides or {})
        document = expand_variables(written, str(path))
        try:
            job = cls.model_validate({"name": path.stem, **document}, context={"base": path.resolve().parent})
        except ValidationError as error:
            raise UsageError(f"{path}: {explain(error, document, cls)}") from error
        job._base, job._source, job._document = path.resolve().parent, str(path), written
        return job

    def with_limit(self, limit: int) -> Self:
        """The same job over the first `limit` rows of its input."""
        return self.model_copy(update={"input": self.input.model_copy(update={"limit": limit})})

    @property
    def chain(self) -> "tuple[Job, ...]":
        """The jobs of the steps in their order; the last one writes the output. A job without steps is its only one."""
        if not self.steps or self._step is not None:
            return (self,)
        jobs: list[Job] = []
        for step in range(len(self.steps)):
            job = self._job_of(step)
            job._earlier = tuple(jobs)
            jobs.append(job)
        return tuple(jobs)

    @property
    def earlier(self) -> "tuple[Job, ...]":
        """The jobs of the steps before this one."""
        return self._earlier

    @property
    def step(self) -> StepPlace | None:
        """Which step of a job this one is; None for a job of its own."""
        return self._step

    def _job_of(self, index: int) -> "Job":
        """A step as a job of its own. Raises ValueError starting with the step's place."""
        step, names = self.steps[index], tuple(str(step.name) for step in self.steps)
        where = StepPlace(names[index], index + 1, len(names), names[:index])
        try:
            generation = GenerationSettings.model_validate(step.merged(self.generation))
            sections = {"prompt": step.prompt, "generation": generation, "output": self._output_of(step, where)}
            own = {key: getattr(self, key) for key in ("name", "model", "input", "engine", "run")}
            job = type(self).model_validate({**own, **sections}).model_copy(update={"steps": self.steps})
        except ValidationError as error:
            raise ValueError(f"steps[{index}]: {in_one_line(error)}") from error
        job._base, job._document, job._step = self._base, self._document, where
        job._source = f"{self._source}: {where}"
        return job

    def _output_of(self, step: StepSettings, where: StepPlace) -> OutputSettings:
        columns = {key: getattr(step, key) for key in ("prefix", "parse", "choice_probs")}
        if where.is_last:
            return self.output.model_copy(update=columns)
        path = f"{self.output.path.rstrip('/')}/{SIDECAR}/{where.directory}"
        return OutputSettings(path=path, columns=(), shard_rows=self.output.shard_rows, **columns)

    @property
    def base(self) -> Path:
        """Directory that relative paths refer to."""
        return self._base

    @property
    def source(self) -> str:
        """The job file as the user named it, for messages."""
        return self._source

    @property
    def document(self) -> dict[str, Any]:
        """The job as written, overrides included, environment variables not yet replaced."""
        return self._document or self.model_dump(mode="json")

    @property
    def output_path(self) -> AnyPath:
        """The output directory, absolute."""
        return place(self.output.path, self._base)

    @property
    def model_path(self) -> str:
        """The model's absolute local path, or its Hub id unchanged."""
        return local_or_hub(self.model.path, self._base)

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer comes from: the model unless the job names another."""
        return local_or_hub(self.model.tokenizer, self._base) if self.model.tokenizer else self.model_path

    @property
    def speculation(self) -> str | dict[str, Any]:
        """`engine.speculation` with the path in it, if there is one, as `model_path` is."""
        chosen = self.engine.speculation
        if isinstance(chosen, str):
            return chosen
        values = chosen.model_dump()
        named = {key: values[key] for key in ("model", "path") if values.get(key, SELF) != SELF}
        return values | {key: local_or_hub(path, self._base) for key, path in named.items()}


def in_one_line(error: ValidationError) -> str:
    """The first thing that is wrong, and its place."""
    first = error.errors()[0]
    return ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])


def local_or_hub(path: str, base: Path) -> str:
    """A path that exists or looks like one becomes absolute; anything else is a Hub id and stays."""
    return str(base / Path(path).expanduser()) if is_local(path, base) else path


def is_local(path: str, base: Path) -> bool:
    """Whether a model path names a place on this machine: by its form, or because something is there."""
    return path.startswith((".", "/", "~")) or path.endswith(".gguf") or path.count("/") > 1 or (base / path).exists()
