"""The templates of a job in the order that `prompt.reorder` chose: by the first rows, once, then as stored.

Knows the job and the manifest's record; how an order is found is in pipeline/reorder.py.
"""

from collections.abc import Mapping
from typing import Any

from batchgen.pipeline.reorder import Arrangement, arrange
from batchgen.pipeline.rows import Source
from batchgen.pipeline.templates import TemplateError

from .errors import UsageError
from .job import Job
from .manifest import Manifest
from .output import SIDECAR


def arranged(job: Job, source: Source, stored: Mapping[str, Any] | None = None) -> tuple[Job, Arrangement]:
    """The job with its templates in their order, and that order; without `prompt.reorder` the job as it is.

    `stored` is the record of an earlier run, which stands whatever rows were added since. Raises UsageError.
    """
    if not job.prompt.reorder:
        return job, Arrangement()
    try:
        found = Arrangement(**stored) if stored else arrange(job.prompt, source)
        return job.model_copy(update={"prompt": found.applied(job.prompt)}), found
    except TemplateError as error:
        raise UsageError(f"{job.source}: {error}") from error


def stored_order(job: Job) -> dict[str, Any] | None:
    """The order that an earlier run of this output chose, if there was one."""
    stored = Manifest.load(job.output_path / SIDECAR / "manifest.json")
    same = stored is not None and stored.identity["prompt"] == job.prompt.model_dump(mode="json")
    return stored.prompt_order if stored is not None and same else None
