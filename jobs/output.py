"""One job's output directory: who holds it, which job it belongs to, which rows are done.

Knows where its files lie and when they are in force; how final files are made is in finish.py.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from numpy.typing import NDArray

from batchgen.pipeline.place import AnyPath
from batchgen.pipeline.rows import Source
from batchgen.pipeline.storage import remove_tree, storage_of

from .columns import result_columns
from .commit import STAGING, finish_commit, is_committing
from .errors import JobError, UsageError
from .failure import explain_failure
from .files import remove_asides, write_aside
from .finals import read_final_outcomes, visible_files
from .fingerprint import Identity, fingerprint, layout_of
from .finish import journal_schema
from .job import Job
from .journal import Journal
from .lock import Lock
from .log import open_log
from .manifest import Manifest
from .names import READ, SIDECAR
from .outcomes import OPEN, SKIPPED, Outcomes
from .same_job import require_same_job
from .steps import STEPS

__all__ = ["SIDECAR", "Output", "open_outputs", "recover_outcomes", "require_output_directory"]


class Output:
    """An output directory whose lock this process holds."""

    def __init__(self, job: Job, lock: Lock) -> None:
        self.path = job.output_path
        self.sidecar = self.path / SIDECAR
        self.job = job
        self.scratch = storage_of(self.path).scratch(self.sidecar)
        self.log = open_log(self.sidecar / "log.jsonl")
        self.journal = Journal(self.sidecar / "journal", job.output.shard_rows, permit=lock.check)
        self.outcomes = Outcomes(0)
        self.standing = self.outcomes.codes  # outcomes of the rows in the final files, OPEN elsewhere
        self.manifest = _new_manifest(job, {})
        self.beside: list[str] = []  # publications of earlier steps whose answers stand beside this one's
        self.host_wait_seconds = 0.0  # of this run: the engine waited for rows
        self._attached = False
        self._unpublished = False
        self._began = time.monotonic()
        self._lock = lock

    def claim(self, identity: Identity, retry: tuple[int, ...] = ()) -> None:
        """Makes the output this job's, or finds that it is. Raises UsageError listing what differs otherwise."""
        self.sidecar.mkdir(parents=True, exist_ok=True)
        stored = Manifest.load(self.sidecar / "manifest.json")
        if stored is None:
            self._clear()
            self.manifest = _new_manifest(self.job, identity)
        else:
            require_same_job([(self.job, identity, stored)], retry)
            self.manifest = replace(stored, layout=layout_of(self.job))
            self.beside = stored.beside
            _accept_max_tokens(self.job, self.manifest)
        with write_aside(self.sidecar / "job.yaml") as file:
            file.write(yaml.safe_dump(self.job.document, sort_keys=False, allow_unicode=True).encode())

    def row_limit(self, limit: int | None) -> int | None:
        """How many rows the source must know: rows already in final files stay, whatever the limit is now."""
        return None if limit is None else max(limit, self.manifest.final_rows)

    def attach(self, source: Source) -> None:
        """Learns the outcome of every row so far, and stores the input's identity before anything is journaled."""
        if len(source.files) >= len(self.manifest.input):
            self.manifest.remember_files(list(source.files))
        if self.job.input.limit is None:  # the first rows alone do not settle the types of all
            self.manifest.remember_schema(source.schema)
        self.manifest.num_rows = source.num_rows
        self.save()
        remove_asides(self.journal.directory)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        self.standing, self.outcomes, self._unpublished = recover_outcomes(self.path, self.manifest, self.journal)
        self._attached = True
        for path in self.journal.broken:
            self.log.write("broken_segment", path=path.name)

    def pass_over(self, positions: Sequence[int]) -> None:
        """Rows that are not asked and do not come into the output, unless they have an outcome already."""
        unknown = np.array(positions, np.int64)
        unknown = unknown[unknown < len(self.outcomes.codes)]
        unknown = unknown[self.outcomes.codes[unknown] == OPEN]
        self.outcomes.record(unknown, np.full(len(unknown), SKIPPED, np.int8))

    def begin(self) -> None:
        """Counts the time from here, for a step whose turn has come; the output itself counts the whole run."""
        if self.job.step is not None and not self.job.step.is_last:
            self._began = time.monotonic()

    def save(self) -> None:
        """Stores the manifest, if the lock is still ours."""
        self.require_lock()
        self.manifest.save(self.sidecar / "manifest.json")

    def require_lock(self) -> None:
        """Raises JobError when another run has taken the output over."""
        self._lock.check()

    def describe(self, **sections: dict[str, Any]) -> None:
        """A run begins to generate: stores sections of the manifest (settings, model, tokenizer, versions)."""
        self.manifest.state = "running"
        for name, value in sections.items():
            setattr(self.manifest, name, value)
        self.save()

    def note(self, positions: NDArray[np.int64], codes: NDArray[np.int8]) -> None:
        """Journals outcomes that have no answer: OPEN for rows to be asked again, SKIPPED. On disk on return."""
        if positions.size:
            results = result_columns(self.job)
            nothing = [pa.nulls(len(positions), item.type) for item in results]
            columns = [pa.array(positions), pa.array(codes), *nothing]
            self.journal.append(pa.Table.from_arrays(columns, schema=journal_schema(results)))
            self.outcomes.record(positions, codes)

    def settle(self, state: str, **values: Any) -> None:
        """Notes how the run ended, in the log, and in the manifest unless it tells the truth without that.

        A run that never learned its rows has nothing to tell, final files that hold every row stay finished, and once
        a commit has begun the manifest is the commit's.
        """
        if self._attached and not is_committing(self.sidecar):
            if self.is_settled:
                self.rest()
            else:
                self.manifest = self.concluded(state)
                self.save()
        self.log.write(state, **values)

    def rest(self) -> None:
        """The final files hold every row, whatever became of a run that was to ask some again."""
        if self.manifest.state != "finished":
            self.manifest.state = "finished"
            self.save()

    def concluded(self, state: str) -> Manifest:
        """The manifest as it is when the run ends now; not yet in force."""
        earlier = self.manifest.times
        times = {
            "seconds": round(earlier.get("seconds", 0.0) + time.monotonic() - self._began, 3),
            "host_wait_seconds": round(earlier.get("host_wait_seconds", 0.0) + self.host_wait_seconds, 3),
            "runs": earlier.get("runs", 0) + 1,
            "ended": _now(),
        }
        return replace(self.manifest, state=state, times=times, counts=self.outcomes.counts())

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Notes an error that ends the run, before it goes on its way."""
        try:
            yield
        except Exception as error:
            with suppress(OSError, JobError):  # a full disk, say, must not hide the error itself
                self.settle("failed", error=explain_failure(error)[0])
            raise

    @property
    def is_settled(self) -> bool:
        """Everything known stands in the final files."""
        known = self._unpublished or self.journal.has_grown or self.manifest.beside != self.beside
        return self.manifest.published and self.manifest.final_rows >= len(self.outcomes.codes) and not known

    @property
    def counts(self) -> dict[str, int]:
        """Rows by outcome: as found, or as the manifest has them while nothing was looked at."""
        return self.outcomes.counts() if self._attached or not self.manifest.counts else self.manifest.counts

    def tidy(self) -> None:
        """Removes what is of no use once every row stands in the final files."""
        self.require_lock()
        self.journal.forget_rows_below(len(self.outcomes.codes))

    def _clear(self) -> None:
        """Removes what an earlier job left: the manifest first, so that a kill in between leaves no half truth."""
        (self.sidecar / "manifest.json").unlink(missing_ok=True)
        self.journal.clear()
        remove_tree(self.sidecar / STEPS)
        remove_tree(self.sidecar / STAGING)
        (self.sidecar / READ).unlink(missing_ok=True)
        (self.sidecar / "commit.json").unlink(missing_ok=True)
        for path in reversed(visible_files(self.path)):  # what makes an Arrow output a data set goes first
            path.unlink()


@contextmanager
def open_outputs(job: Job, fresh: bool = False) -> Iterator[list[Output]]:
    """Creates or opens the output and holds its lock; of a job with steps those of every step, the output itself last.

    `fresh` throws away what an earlier run left there.
    Raises OutputBusyError when another live run holds it, UsageError when the directory is not an output.
    """
    path = job.output_path
    require_output_directory(path)
    (path / SIDECAR).mkdir(parents=True, exist_ok=True)
    with Lock(path / SIDECAR / "lock.json") as lock:
        outputs = [Output(step, lock) for step in job.chain]
        if fresh:
            outputs[-1]._clear()
        for output in outputs:
            finish_commit(output.path, output.sidecar)
        try:
            yield outputs
        finally:
            for output in outputs:
                shutil.rmtree(output.scratch, ignore_errors=True)


def recover_outcomes(
    path: AnyPath, manifest: Manifest, journal: Journal, verify: bool = True
) -> tuple[NDArray[np.int8], Outcomes, bool]:
    """Outcomes of the rows in final files, those of every row, and whether the journal has any that count."""
    outcomes = Outcomes(manifest.num_rows)
    journal.published_segment, journal.published_rows = manifest.published_segment, manifest.final_rows
    journaled = list(journal.recover(verify))
    unpublished = any(bool((positions < manifest.num_rows).any()) for positions, _ in journaled)
    if manifest.final_rows:
        _record_final_rows(path, manifest, outcomes)
    standing = outcomes.codes.copy()
    for positions, codes in journaled:
        outcomes.record(positions, codes)
    return standing, outcomes, unpublished


def _record_final_rows(path: AnyPath, manifest: Manifest, outcomes: Outcomes) -> None:
    skipped = np.array(manifest.skipped, np.int64)
    kept = np.setdiff1d(np.arange(manifest.final_rows), skipped, assume_unique=True)
    codes = read_final_outcomes(path, manifest.output_settings, manifest.num_samples)
    if len(kept) != len(codes):
        raise JobError(
            f"{path}: its files hold {len(codes)} rows, its manifest {len(kept)}; restore them, or use --fresh"
        )
    outcomes.record(kept, codes)
    outcomes.record(skipped, np.full(len(skipped), SKIPPED, np.int8))


def require_output_directory(path: AnyPath) -> None:
    """Raises UsageError when something else than an output of batchgen is there."""
    if path.is_dir() and any(path.iterdir()) and not (path / SIDECAR).is_dir():
        raise UsageError(f"{path}: holds files that batchgen did not write; choose another output.path")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: is a file; output.path must be a directory")


def _accept_max_tokens(job: Job, manifest: Manifest) -> None:
    if job.generation.max_tokens not in manifest.max_tokens:
        manifest.max_tokens.append(job.generation.max_tokens)


def _new_manifest(job: Job, identity: Identity) -> Manifest:
    return Manifest(
        job=job.name,
        fingerprint=fingerprint(identity),
        identity=identity,
        layout=layout_of(job),
        template_date=datetime.now().date().isoformat(),
        created=_now(),
        max_tokens=[job.generation.max_tokens],
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
