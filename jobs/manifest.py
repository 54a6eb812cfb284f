"""The record an output keeps of its job: identity, settings, counts, tokens, times.

Knows how it is stored, whole or not at all; what the numbers mean is said where they are counted.
"""

import base64
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import pyarrow as pa

from batchgen.pipeline.config import OutputSettings
from batchgen.pipeline.place import AnyPath
from batchgen.pipeline.rows import FileIdentity

from .errors import JobError
from .files import read_json, write_json

SCHEMA_VERSION = 1


@dataclass
class Manifest:
    """Everything but the rows.

    `published`: there are final files, and positions below `final_rows` are in them or skipped. Journal segments up
    to number `published_segment` say nothing about those positions any more. `input_schema`: the types of the input's
    columns as settled, an Arrow schema in base64. `prompt_order`: what `prompt.reorder` chose, for all runs of the job.
    Of a job with steps this is the last one; `steps` has counts and tokens of those before it, and `beside` says which
    publications of theirs stand beside its rows in the final files. `publications` counts its own.
    """

    job: str
    fingerprint: str
    identity: dict[str, Any]
    layout: dict[str, Any]
    template_date: str
    created: str
    max_tokens: list[int]
    schema_version: int = SCHEMA_VERSION
    state: str = "running"
    settings: dict[str, Any] = field(default_factory=dict)
    formats: dict[str, Any] = field(default_factory=dict)  # of numbers, settled once for all runs
    choices: dict[str, Any] = field(default_factory=dict)  # what auto came to, predicted and measured; of the last run
    model: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    input: list[dict[str, Any]] = field(default_factory=list)
    num_rows: int = 0
    input_schema: str | None = None
    prompt_order: dict[str, Any] | None = None
    replaced_surrogates: int = 0
    published: bool = False
    publications: int = 0
    beside: list[str] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    final_rows: int = 0
    published_segment: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    reuse: float = 0.0
    speculation: dict[str, int] = field(default_factory=dict)  # of the last run that generated
    prefix_groups: list[dict[str, Any]] = field(default_factory=list)
    times: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, float] | None = None

    @classmethod
    def load(cls, path: AnyPath) -> Self | None:
        """The stored manifest; None when there is none. Raises JobError for one that this version cannot read."""
        try:
            stored = read_json(path)
        except ValueError as error:
            raise JobError(f"{error}; --fresh starts over") from error
        if stored is not None and (not isinstance(stored, dict) or stored.get("schema_version") != SCHEMA_VERSION):
            raise JobError(f"{path}: written by another version of batchgen; use that version, or --fresh")
        return None if stored is None else cls.from_record(stored)

    @classmethod
    def from_record(cls, stored: dict[str, Any]) -> Self:
        """The manifest that `asdict` made a record of."""
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in stored.items() if key in known})

    def save(self, path: AnyPath) -> None:
        write_json(path, asdict(self))

    @property
    def output_settings(self) -> OutputSettings:
        """The layout of the output."""
        return OutputSettings(path=".", **self.layout["output"])

    @property
    def num_samples(self) -> int:
        return int(self.identity["generation"]["n"])

    @property
    def files(self) -> list[FileIdentity]:
        """The input files as they were when their rows were numbered."""
        return [FileIdentity(**item) for item in self.input]

    @property
    def schema(self) -> pa.Schema | None:
        """The settled schema of the input, once there is one."""
        return (
            None if self.input_schema is None else pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.input_schema)))
        )

    @property
    def publication(self) -> str:
        """What tells these final files from earlier and later ones."""
        return f"{self.created} {self.publications}"

    @property
    def step_name(self) -> str | None:
        """Of a job with steps: which one this is."""
        step = self.identity.get("step")
        return None if step is None else str(step["name"])

    def remember_files(self, identities: list[FileIdentity]) -> None:
        self.input = [asdict(item) for item in identities]

    def remember_schema(self, schema: pa.Schema) -> None:
        self.input_schema = base64.b64encode(schema.serialize()).decode()
