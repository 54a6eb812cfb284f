"""The steps of a job file: a prompt and its generation, each asked over the same rows one after another.

Knows one entry of the list and what entries have against each other; what becomes of them is in job.py and chain.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator

from batchgen.engine.config import GenerationSettings, Section
from batchgen.pipeline.config import PromptSettings

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


class StepSettings(Section):
    """One step: what is asked of every row, and what its result columns are called."""

    name: str | None = Field(None, description="letters, digits and underscores; default: step1, step2, ...")
    prompt: PromptSettings = Field(description="its templates see the input's columns and those of earlier steps")
    generation: GenerationSettings = Field(
        GenerationSettings(), description="replaces keys of the job's generation section for this step"
    )
    prefix: str | None = Field(
        None, description='put before the names of its result columns; default: the name and "_", as in NAME_completion'
    )
    parse: bool = Field(False, description="output.parse of this step: a column PREFIXparsed, for later steps too")
    choice_probs: bool = Field(False, description="output.choice_probs of this step")

    @field_validator("name")
    @classmethod
    def _name_is_a_word(cls, value: str | None) -> str | None:
        if value is not None and not _NAME.fullmatch(value):
            raise ValueError(f"must be a letter and then letters, digits and underscores, at most 64, got {value!r}")
        return value

    def merged(self, defaults: GenerationSettings) -> dict[str, Any]:
        """Keys of the step's generation, and of the job's where the step has none."""
        sections = (defaults, self.generation)
        return {key: getattr(section, key) for section in sections for key in section.model_fields_set}


class StepPrompts(PromptSettings):
    """What a job with steps has for a prompt section: its prompts stand in the steps."""

    def require_prompt(self) -> None:
        """Nothing can be missing here."""


@dataclass(frozen=True)
class StepPlace:
    """Which step of how many; `number` counts from 1, `earlier` are the names of the steps before."""

    name: str
    number: int
    total: int
    earlier: tuple[str, ...] = ()

    @property
    def is_last(self) -> bool:
        return self.number == self.total

    @property
    def directory(self) -> str:
        """As `directory_of`."""
        return directory_of(self.number, self.name)

    def __str__(self) -> str:
        return f"step {self.number}/{self.total} {self.name}"


STEPS = "steps"


def directory_of(number: int, name: str) -> str:
    """Where step `number` of a job keeps its rows unless it is the last, below the sidecar directory of the output."""
    return f"{STEPS}/{number:02d}-{name}"


def named(steps: Sequence[StepSettings]) -> tuple[StepSettings, ...]:
    """The steps with their names and prefixes filled in. Raises ValueError when two have the same."""
    found: list[StepSettings] = []
    for number, step in enumerate(steps, 1):
        name = step.name or f"step{number}"
        prefix = f"{name}_" if step.prefix is None else step.prefix
        for key, value in (("name", name), ("prefix", prefix)):
            if value in [getattr(other, key) for other in found]:
                raise ValueError(f"two steps have the {key} {value!r}, choose another for one of them")
        found.append(step.model_copy(update={"name": name, "prefix": prefix}))
    return tuple(found)


def take_prompts_from_steps(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a job with steps, with its prompt section. Raises ValueError for what cannot stand beside them.

    The message starts with the key it is about.
    """
    sections = {key: value for key, value in document.items() if isinstance(value, Mapping)}
    if "prompt" in document:
        raise ValueError("prompt: cannot stand beside steps; each step has its own prompt")
    if sections.get("input", {}).get("format") == "openai":
        raise ValueError("steps: the lines of an OpenAI batch file bring their own prompts, remove the key")
    output = sections.get("output", {})
    if output.get("format") == "openai":
        raise ValueError("output.format: openai holds one answer per row; with steps use arrow, parquet or jsonl")
    for key in ("prefix", "parse", "choice_probs"):
        if output.get(key):
            raise ValueError(f"output.{key}: with steps each one says this for its own columns: steps[0].{key}")
    return {**document, "prompt": StepPrompts()}
