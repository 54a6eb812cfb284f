"""What a job's settings come to with its model: sampling with origins, chat template, and how they are told.

Knows the order of precedence by name only; loads no model.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from batchgen.engine.generation import resolve_generation
from batchgen.engine.request import Sampling

from .errors import JobError, UsageError
from .job import Job
from .models import Models

_PACKAGES = ("batchgen", "torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")


def resolve_sampling(job: Job, models: Models) -> tuple[Sampling, dict[str, Any]]:
    """The sampling of a row without values of its own. Raises JobError for an illegal value in the model's file.

    Raises UsageError where it does not go with the output or the retries that the job asks for.
    """
    try:
        sampling, origins = resolve_generation(job.generation, models.generation_config(job))
    except ValueError as error:
        raise JobError(f"{job.model.path}: generation_config.json: {error}; set it in the job") from error
    try:
        sampling = replace(sampling, choice_probs=job.output.choice_probs)
    except ValueError as error:
        raise UsageError(f"{job.source}: output.{error}; change generation, or leave choice_probs out") from error
    if job.run.retries and sampling.greedy:
        raise UsageError(
            f"{job.source}: run.retries: at temperature 0 every attempt gives the same answer; "
            "set generation.temperature, or retries: 0"
        )
    return sampling, dict(origins)


def require_known_tokens(job: Job, sampling: Sampling, vocabulary: int) -> None:
    """Raises UsageError for a stop id that no token of the tokenizer has."""
    unknown = [token for token in sampling.stop_token_ids if token >= vocabulary]
    if unknown:
        raise UsageError(
            f"{job.source}: generation.stop_token_ids: the tokenizer has {vocabulary} tokens, none with id {unknown[0]}"
        )


def require_grammar(job: Job, sampling: Sampling, models: Models, tokenizer: Any) -> None:
    """Raises UsageError for a grammar that no answer can satisfy, and for choices that cannot be scored."""
    fault = None if sampling.grammar is None else models.grammar_fault(job, sampling, tokenizer)
    if fault is not None:
        raise UsageError(f"{job.source}: generation.{fault}")


def chat_template(job: Job) -> str | None:
    """The text of the file that replaces the model's chat template. Raises UsageError."""
    if job.model.chat_template is None:
        return None
    try:
        return (job.base / job.model.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{job.source}: model.chat_template: {error}") from error


def resolved_settings(job: Job, sampling: Sampling, origins: dict[str, Any]) -> dict[str, Any]:
    """All sections as they are in force, and where each sampling value comes from."""
    sections = job.model_dump(mode="json", exclude={"generation", "name"})
    generation = {**job.generation.model_dump(mode="json"), **asdict(sampling)}
    return {**sections, "generation": generation, "generation_origins": origins}


def describe_engine(resolved: Mapping[str, Any]) -> str:
    """One line with the numbers that the model is computed in."""
    shown = [f"{name} {resolved[name]}" for name in ("device", "dtype", "weights", "kv_cache") if name in resolved]
    return f"engine: {', '.join(shown)}"


def describe_sampling(sampling: Sampling, origins: dict[str, Any]) -> str:
    """One line with every value that is not plainly the default, and where it comes from."""
    shown = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n", "seed")
    parts = [f"{name} {getattr(sampling, name)} ({origins[name]})" for name in shown]
    more = [f"{name} {getattr(sampling, name)} ({origins[name]})" for name in origins if _is_set(name, shown, origins)]
    return f"sampling: {', '.join([*parts, *more])}"


def _is_set(name: str, shown: tuple[str, ...], origins: dict[str, Any]) -> bool:
    return name not in shown and origins[name] != "default"


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide answers and files."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
