"""Whether an output belongs to a job: what differs, in words, over all steps of it.

Knows identities, layouts and the one value that may change (`max_tokens`); opens nothing.
"""

from collections.abc import Sequence
from typing import Any

from .errors import UsageError
from .fingerprint import Identity, differences, layout_of
from .job import Job
from .manifest import Manifest
from .outcomes import LENGTH

Claim = tuple[Job, Identity, Manifest | None]


def require_same_job(claims: Sequence[Claim], retry: tuple[int, ...] = ()) -> None:
    """Raises UsageError listing what differs between jobs and those that own their outputs, the last one's by name."""
    found: dict[str, list[str]] = {}
    for job, identity, stored in claims:
        for phrase in _differences(job, identity, stored, retry) if stored is not None else ():
            found.setdefault(phrase, []).append("" if job.step is None else job.step.name)
    if found:
        phrases = [_placed(phrase, names, len(claims)) for phrase, names in found.items()]
        raise UsageError(
            f"{claims[-1][0].output_path}: belongs to a different job ({'; '.join(phrases)}); "
            "use another output.path, or --fresh to throw it away"
        )


def _placed(phrase: str, names: list[str], total: int) -> str:
    """What differs in all steps alike is the job's matter."""
    return phrase if len(names) == total else f"step {', '.join(names)}: {phrase}"


def _differences(job: Job, identity: Identity, stored: Manifest, retry: tuple[int, ...]) -> list[str]:
    found = differences(stored.identity, identity)
    found += differences(_binding_layout(stored.layout, stored), _binding_layout(layout_of(job), stored))
    return found + _max_tokens_difference(job, stored, retry)


def _binding_layout(layout: dict[str, Any], stored: Manifest) -> dict[str, Any]:
    """The part of a layout that must stay: all once final files exist, before that what the journal depends on."""
    if stored.published:
        return layout
    return {
        **layout,
        "output": {key: value for key, value in layout["output"].items() if key not in ("format", "columns")},
    }


def _max_tokens_difference(job: Job, stored: Manifest, retry: tuple[int, ...]) -> list[str]:
    wanted = job.generation.max_tokens
    raised = LENGTH in retry and wanted > max(stored.max_tokens)
    if wanted in stored.max_tokens or raised:
        return []
    return [f"generation.max_tokens: was {stored.max_tokens[-1]}, is {wanted} (--retry length may raise it)"]
