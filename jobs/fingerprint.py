"""What makes two runs the same job: model, prompt and generation as plain values, and how two of them differ.

Knows nothing of the input's files, which their own identities guard, nor of engine settings, which change no answer.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from .errors import UsageError
from .job import Job, local_or_hub

_LAYOUT = ("format", "columns", "prefix", "order", "shard_rows", "parse")
_ABSENT = object()


def identity_of(job: Job, model_digest: str) -> dict[str, Any]:
    """Everything that decides the answers, JSON values only. `max_tokens` is apart: a retry may raise it."""
    generation = job.generation.model_dump(mode="json", exclude={"max_tokens"})
    return {
        "model": {
            "digest": model_digest,
            "tokenizer": job.model.tokenizer,
            "chat_template": _template_digest(job),
            "dtype": job.model.dtype,
            "weights": job.model.weights,
        },
        "input": job.input.model_dump(mode="json", include={"config", "split", "id"}),
        "prompt": job.prompt.model_dump(mode="json"),
        "generation": generation,
    }


def layout_of(job: Job) -> dict[str, Any]:
    """How the output is laid out; a started output keeps its layout."""
    return {"output": job.output.model_dump(mode="json", include=set(_LAYOUT))}


def fingerprint(identity: dict[str, Any]) -> str:
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


def _template_digest(job: Job) -> str | None:
    if job.model.chat_template is None:
        return None
    path = Path(local_or_hub(job.model.chat_template, job.base))
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{job.source}: model.chat_template: {path}: {error.strerror}") from error


def _short(value: Any) -> str:
    text = "absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 48 else f"{text[:22]}...{text[-22:]}"
