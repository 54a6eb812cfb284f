"""What makes two runs the same job: model, prompt and generation as plain values, and how two of them differ.

Knows nothing of the input's files, which their own identities guard, nor of engine settings, which change no answer.
"""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from .job import Job
from .models import Models
from .resolved import chat_template, resolve_sampling

_LAYOUT = ("format", "columns", "prefix", "order", "shard_rows", "parse")
_ABSENT = object()

Identity = dict[str, Any]


def identity_of(job: Job, models: Models) -> Identity:
    """Everything that decides the answers, JSON values only. `max_tokens` is apart: a retry may raise it."""
    sampling, _ = resolve_sampling(job, models)
    return _identity(job, {"digest": models.digest(job), **models.surroundings(job)}, asdict(sampling))


def identity_without_model(job: Job, stored: Identity) -> Identity:
    """The same as far as the job file alone tells it; whatever the model decides is as it was stored."""
    unset = {name for name, value in job.generation if value is None}
    sampling = {name: value for name, value in stored["generation"].items() if name in unset}
    return _identity(job, stored["model"], sampling)


def _identity(job: Job, model: dict[str, Any], sampling: dict[str, Any]) -> Identity:
    template = chat_template(job)
    chosen = {
        "chat_template": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        "dtype": job.model.dtype,
        "weights": job.model.weights,
    }
    generation = {**job.generation.model_dump(mode="json"), **sampling}
    del generation["max_tokens"]
    structure = job.generation.structure
    generation.pop("choice_probs", None)
    if job.output.choice_probs:  # it decides answers, wherever it is written
        generation["choice_probs"] = True
    generation["grammar"] = None if structure is None else asdict(structure)
    identity = {
        "model": {**model, **chosen},
        "input": _input_identity(job),
        "prompt": job.prompt.model_dump(mode="json"),
        "generation": generation,
    }
    if job.step is not None:
        identity["step"] = {"name": job.step.name, "after": job.step.earlier}
    plain: Identity = json.loads(json.dumps(identity))
    return plain


def _input_identity(job: Job) -> dict[str, Any]:
    """What of the input decides the answers beside its files: for the Hub also the revision that was asked for."""
    revisions = {path.repo: path.revision for path in job.input.hub_paths}
    chosen = job.input.model_dump(mode="json", include={"config", "split", "id"})
    return {**chosen, "revision": revisions} if revisions else chosen


def layout_of(job: Job) -> dict[str, Any]:
    """How the output is laid out; a started output keeps its layout."""
    attempts = {"run.retries": "above 0, with a column attempts"} if job.run.retries else {}
    return {"output": job.output.model_dump(mode="json", include=set(_LAYOUT)), **attempts}


def fingerprint(identity: Identity) -> str:
    """Hex digest of an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def differences(old: Any, new: Any, place: str = "") -> list[str]:
    """One phrase per differing value: `prompt.text: was 'a', is 'b'`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        pairs = [(f"{place}.{key}".lstrip("."), old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in keys]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{place}[{index}]", *values) for index, values in enumerate(zip(old, new, strict=True))]
    else:
        return [] if old == new else [f"{place}: was {_short(old)}, is {_short(new)}"]
    return [phrase for where, before, after in pairs for phrase in differences(before, after, where)]


def _short(value: Any) -> str:
    text = "absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 48 else f"{text[:22]}...{text[-22:]}"
