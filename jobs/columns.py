"""Which result columns a job's output has, and how a batch API's output sees them.

Knows the job's settings; rows and files are not known here.
"""

from datetime import datetime
from pathlib import Path

import pyarrow as pa

from batchgen.pipeline.config import CUSTOM_ID, URL
from batchgen.pipeline.openai_answer import AnswerForm
from batchgen.pipeline.openai_sink import POSITION, OpenaiSink
from batchgen.pipeline.result import further_columns, result_schema

from .job import Job, is_local
from .manifest import Manifest


def result_columns(job: Job) -> pa.Schema:
    """The result columns. Lines of OpenAI output differ in `n` and `logprobs`, so theirs hold lists of both."""
    if job.output.format == "openai":
        return result_schema(2, True)
    n, logprobs = job.generation.n, job.generation.logprobs is not None
    more = further_columns(n, job.parser(), job.output.choice_probs, job.run.retries > 0)
    return result_schema(n, logprobs, job.output.prefix, more)


def identifying_columns(job: Job) -> list[str]:
    """The input columns that OpenAI output needs: what identifies a row, and the endpoint a request names."""
    if job.input.format == "openai":
        return [CUSTOM_ID, URL]
    return [] if job.input.id is None else [job.input.id]


def openai_sink(job: Job, carried: list[pa.Field], manifest: Manifest) -> OpenaiSink:
    """The sink of a job with OpenAI output."""
    schema = pa.schema([(POSITION, pa.int64()), *carried, *result_columns(job)])
    created = int(datetime.fromisoformat(manifest.created).timestamp())
    chat = job.prompt.text is None or job.prompt.chat is not False
    model = Path(job.model.path).name if is_local(job.model.path, job.base) else job.model.path
    form = AnswerForm(model, created, manifest.fingerprint[:12], chat)
    return OpenaiSink(schema, form, job.input.id_column, URL if job.input.format == "openai" else None)
