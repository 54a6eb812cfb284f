"""Finds what is wrong with a job before a model is loaded: files, columns, templates, lengths, the output.

Knows what each section needs from the others; loads no torch and reads no more than file footers and first lines.
"""

import glob
from collections.abc import Callable, Iterable
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from batchgen.engine.config import HEADS_FILES, SELF, DraftSpeculation, PredictionSpeculation
from batchgen.pipeline.chat import ChatTemplate
from batchgen.pipeline.files import find_files
from batchgen.pipeline.place import is_url, names_of, place
from batchgen.pipeline.prompt import template_columns
from batchgen.pipeline.reorder import require_movable
from batchgen.pipeline.sink import OutputError
from batchgen.pipeline.source import sample_schema, why_no_columns
from batchgen.pipeline.templates import TemplateError
from batchgen.pipeline.trial import is_plain, require_writable

from .columns import identifying_columns, result_columns
from .errors import UsageError
from .finals import first_file
from .fingerprint import identity_of, identity_without_model
from .job import Job, is_local, local_or_hub
from .manifest import Manifest
from .models import Models
from .names import SIDECAR
from .output import require_output_directory
from .resolved import chat_template, resolve_sampling
from .same_job import require_same_job

T = TypeVar("T")


def check_job(job: Job, models: Models | None = None) -> list[str]:
    """Lines that sum the job up, when all is well. Raises JobError or InputError for the first thing that is not."""
    models = models or Models()
    check_files(job)
    chain = job.chain
    stored = Manifest.load(chain[0].output_path / SIDECAR / "manifest.json")
    schema = sample_schema(job.input, job.base, stored and stored.schema)
    seen = check_chain(job, schema)
    if not all(is_plain(seen.field(name).type) for name in carried_columns(chain[-1], seen)):
        require_writable_columns(chain[-1], seen)
    local = is_local(job.model.path, job.base)
    context = min(check_model(step, models) for step in chain) if local else None
    check_output(job, models)
    length = f"context {context} tokens" if context else "not looked at: it comes from the Hub"
    return [
        f"{job.source}: ok",
        f"model: {job.model.path} ({length})",
        f"columns: {', '.join(schema.names)}",
        *(f"{_prompt_of(step)} uses: {_columns_of(step)}" for step in chain),
        f"output: {job.output_path} ({job.output.format})",
    ]


def _prompt_of(job: Job) -> str:
    return "prompt" if job.step is None else str(job.step)


def _columns_of(job: Job) -> str:
    used = ", ".join(sorted(template_columns(job.prompt))) or "no column"
    return used if job.step is None else f"{used}; adds {', '.join(result_columns(job).names)}"


def check_files(job: Job) -> None:
    """Local files that the job names must be there and legal, and the output must not become input of the next run."""
    require_output_directory(job.output_path)
    _require_apart(job)
    for key in ("path", "tokenizer", "chat_template"):
        value = getattr(job.model, key)
        if value is None or not (key == "chat_template" or is_local(value, job.base)):
            continue
        if not Path(local_or_hub(value, job.base) if key != "chat_template" else job.base / value).exists():
            raise UsageError(f"{job.source}: model.{key}: {value} does not exist")
    _require_drafter(job)
    if (template := chat_template(job)) is not None:
        _named(job, lambda: ChatTemplate(template, {}, date.today().isoformat(), "model.chat_template"))


def _require_drafter(job: Job) -> None:
    """What `engine.speculation` names must be there, and be a model or heads as it says."""
    chosen = job.engine.speculation
    if isinstance(chosen, str | PredictionSpeculation):  # the last is a part of the model
        return
    key, value = ("model", chosen.model) if isinstance(chosen, DraftSpeculation) else ("path", chosen.path)
    if value == SELF or ("/" in value and not is_local(value, job.base)):
        return  # a Hub id
    found, place = job.base / Path(value).expanduser(), f"{job.source}: engine.speculation.{key}: {value}"
    if not found.exists():
        raise UsageError(f"{place} does not exist")
    has_heads = any((found / name).is_file() for name in HEADS_FILES)
    if key == "model" and has_heads:
        raise UsageError(f"{place} holds Medusa heads and no model; write {{kind: medusa, path: {value}}}")
    if key == "path" and not has_heads:
        raise UsageError(f"{place} has none of {', '.join(HEADS_FILES)}; name what `batchgen heads` wrote")


def _require_apart(job: Job) -> None:
    output, name = names_of(job.output_path), first_file(job.output.format)
    for path in job.input.paths:
        entry = place(path, job.base)
        if names_of(entry) == output[: len(names_of(entry))] and entry.is_dir():
            raise UsageError(f"{job.source}: output.path: lies inside the input directory {path}; choose another place")
        if _matches((*output, *name.split("/")), _pattern(path, job.base)):
            raise UsageError(f"{job.source}: output.path: its {name} would be input by {path}; choose another place")
    for file in find_files(job.input, job.base):
        if names_of(file.path)[: len(output)] == output:
            raise UsageError(f"{job.source}: input.path: {file.name} lies inside output.path; choose another place")


def _pattern(path: str, base: Path) -> tuple[str, ...]:
    if is_url(path):
        return names_of(place(path, base))
    return (Path(glob.escape(str(base.resolve()))) / Path(path).expanduser()).parts


def _matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether a glob finds a path, both cut at their slashes."""
    if not pattern or not parts:
        return not pattern and not parts
    if pattern[0] == "**":
        return len(pattern) == 1 or _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def check_chain(job: Job, schema: pa.Schema) -> pa.Schema:
    """Checks the columns of each step, given the input's and those of the steps before; what the last one sees."""
    chain = job.chain
    for number, step in enumerate(chain, 1):
        check_columns(step, schema)
        if number < len(chain):
            schema = pa.schema([*schema, *result_columns(step)], schema.metadata)
    return schema


def check_columns(job: Job, schema: pa.Schema) -> None:
    """Columns that templates, per_row and output name must be there, and results need names of their own."""
    used = _named(job, lambda: template_columns(job.prompt))
    _named(job, lambda: require_movable(job.prompt))
    place = "prompt.messages_column" if job.prompt.messages_column else "prompt"
    _require_columns(job, place, used, schema)
    for key, column in job.generation.per_row.items():
        _require_columns(job, f"generation.per_row.{key}", [column], schema)
    carried = carried_columns(job, schema)
    _require_columns(job, "output.columns", carried, schema)
    if job.output.format == "openai":  # its lines have no columns
        return
    results = result_columns(job)
    for name in carried if job.step is None else schema.names:
        if name in results.names:
            cure = "set output.prefix" if job.step is None else "give the step another prefix"
            raise UsageError(f"{job.source}: output: the input has a column {name!r} and so has the result; {cure}")


def check_model(job: Job, models: Models) -> int:
    """The model's context length. Raises UsageError when max_tokens leaves no room for a prompt."""
    context = models.context_length(job)
    resolve_sampling(job, models)
    if job.generation.max_tokens >= context:
        raise UsageError(
            f"{job.source}: generation.max_tokens: {job.generation.max_tokens} leaves no room for a prompt "
            f"in the model's context of {context} tokens"
        )
    return context


def check_output(job: Job, models: Models) -> None:
    """The job that an output belongs to, if it belongs to one, must be this one."""
    local, claims = is_local(job.model.path, job.base), []
    for step in job.chain:
        stored = Manifest.load(step.output_path / SIDECAR / "manifest.json")
        if stored is not None:
            identity = identity_of(step, models) if local else identity_without_model(step, stored.identity)
            claims.append((step, identity, stored))
    if claims:
        require_same_job(claims)


def carried_columns(job: Job, schema: pa.Schema) -> list[str]:
    """Names of the input columns that the output carries along, in its order."""
    if job.output.format == "openai":
        return identifying_columns(job)
    if job.output.columns == "all":
        return list(schema.names)
    earlier = job.earlier if job.step is not None and job.step.is_last else ()  # the other steps keep answers alone
    return [*job.output.columns, *(name for step in earlier for name in result_columns(step).names)]


def require_writable_columns(job: Job, schema: pa.Schema) -> None:
    """Raises UsageError naming the column that the output's format cannot hold."""
    if job.output.format == "openai":  # lines hold ids as text, whatever their type
        return
    carried = [schema.field(name) for name in carried_columns(job, schema)]
    try:
        require_writable(job.output.format, pa.schema([*carried, *result_columns(job)], schema.metadata))
    except OutputError as error:
        raise UsageError(f"{job.source}: {error}") from error


def relevant_columns(job: Job) -> frozenset[str] | None:
    """The columns whose values the job needs in any of its steps; None when it carries all of them along."""
    needed = [_relevant(step) for step in job.chain]
    return None if None in needed else frozenset().union(*filter(None, needed))


def _relevant(job: Job) -> frozenset[str] | None:
    carried = identifying_columns(job) if job.output.format == "openai" else job.output.columns
    if carried == "all":
        return None
    used = _named(job, lambda: template_columns(job.prompt))
    return used | frozenset(job.generation.per_row.values()) | frozenset(carried)


def _require_columns(job: Job, place: str, wanted: Iterable[str], schema: pa.Schema) -> None:
    missing = sorted(set(wanted) - set(schema.names))
    if missing and not schema.names:
        raise UsageError(why_no_columns(job.input, job.base))
    if missing:
        raise UsageError(
            f"{job.source}: {place}: the input has no column {missing[0]!r}, only {', '.join(schema.names)}"
        )


def _named(job: Job, work: Callable[[], T]) -> T:
    """Adds the job file's name to an error in a template."""
    try:
        return work()
    except TemplateError as error:
        raise UsageError(f"{job.source}: {error}") from error
