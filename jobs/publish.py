"""Turns a job's finished rows into its final files: written in a staging directory, then moved in one commit.

Knows the order of these steps; each can be killed, and the next run does it again.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain

import pyarrow as pa

from batchgen.pipeline.growth import holds_rows
from batchgen.pipeline.place import AnyPath, below, place
from batchgen.pipeline.rows import FileIdentity, Source
from batchgen.pipeline.sink import Sink, make_sink, num_shards, write_shard
from batchgen.pipeline.storage import remove_tree

from .check import carried_columns
from .columns import openai_sink, result_columns
from .commit import STAGING, begin_commit, finish_commit
from .errors import JobError
from .finals import RowReader, read_results, visible_files
from .finish import ShardMaker
from .job import Job
from .manifest import Manifest
from .outcomes import SKIPPED
from .output import Output
from .stop import Stop


def output_sink(job: Job, source: Source, manifest: Manifest) -> Sink:
    """The sink of a job's output."""
    if job.output.format == "openai":
        return openai_sink(job, [source.schema.field(name) for name in carried_columns(job, source.schema)], manifest)
    return make_sink(job.output.format, _schema(job, source))


def publish(job: Job, output: Output, source: Source, stop: Stop) -> None:
    """Makes the final files hold every row.

    Until the commit begins, earlier final files stay as they are and `stop` is heeded; from then on nothing ends it
    but a kill or a broken file system, after which the next run carries the commit out.
    """
    require_unchanged_input(job, output.manifest.files)
    staging = _empty_directory(output.sidecar / STAGING)
    maker = _shard_maker(job, output, source)
    sink = output_sink(job, source, output.manifest)
    shards = _write_shards(sink, maker, staging, stop)
    manifest = _finished_manifest(job, output, maker)
    metadata = [name for name in sink.beside if (staging / name).exists()]
    obsolete = [str(below(path, output.path)) for path in visible_files(output.path)]
    require_unchanged_input(job, output.manifest.files)
    stop.check()
    output.require_lock()
    begin_commit(output.sidecar, shards, metadata, obsolete, asdict(manifest))
    output.manifest = manifest
    finish_commit(output.path, output.sidecar)
    output.log.write("finished", counts=manifest.counts)


def _write_shards(sink: Sink, maker: ShardMaker, staging: AnyPath, stop: Stop) -> list[str]:
    aside = _empty_directory(staging / "aside")
    total = num_shards(sink, len(maker.outcomes.codes), maker.journal.shard_rows)
    contents = iter([chain.from_iterable(maker.shards())]) if sink.single_file else maker.shards()
    names = [write_shard(sink, _until(stop, rows), staging, at, total, aside) for at, rows in enumerate(contents)]
    sink.finish(staging, names, aside)
    return names


def _until(stop: Stop, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        stop.check()
        yield batch


def _shard_maker(job: Job, output: Output, source: Source) -> ShardMaker:
    results = result_columns(job)
    return ShardMaker(
        source=source,
        columns=carried_columns(job, source.schema),
        outcomes=output.outcomes,
        journal=output.journal,
        earlier=RowReader(read_results(output.path, job.output, results), results),
        standing=output.standing,
        result_schema=results,
        usage_name=f"{job.output.prefix}usage",
        with_position=job.output.format == "openai",
    )


def _finished_manifest(job: Job, output: Output, maker: ShardMaker) -> Manifest:
    """What the manifest says once the commit is done; until then the earlier one is in force."""
    manifest, tokens, price = output.concluded("finished"), maker.tokens, job.run.price_per_hour
    every = [tokens, *(step["tokens"] for step in manifest.steps)]
    return replace(
        manifest,
        published=True,
        publications=manifest.publications + 1,
        beside=output.beside,
        final_rows=len(output.outcomes.codes),
        published_segment=output.journal.last_segment,
        skipped=output.outcomes.positions(SKIPPED).tolist(),
        tokens=dict(tokens),
        reuse=share_reused(tokens),
        cost=None if price is None else cost(price, manifest.times["seconds"], total(every)),
    )


def share_reused(tokens: Mapping[str, int]) -> float:
    """Which share of prompt tokens was not computed."""
    return round(tokens.get("cached_tokens", 0) / max(1, tokens.get("prompt_tokens", 0)), 6)


def total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of each kind of token."""
    found: dict[str, int] = {}
    for kinds in counts:
        for name, count in kinds.items():
            found[name] = found.get(name, 0) + count
    return found


def cost(price_per_hour: float, seconds: float, tokens: dict[str, int]) -> dict[str, float]:
    """What the device time came to, in all and per million tokens of prompts and answers."""
    total = price_per_hour * seconds / 3600
    million = (tokens["prompt_tokens"] + tokens["completion_tokens"]) / 1e6
    per_million = round(total / million, 6) if million else 0.0
    return {"price_per_hour": price_per_hour, "total": round(total, 6), "per_million_tokens": per_million}


def _schema(job: Job, source: Source) -> pa.Schema:
    carried = [source.schema.field(name) for name in carried_columns(job, source.schema)]
    return pa.schema([*carried, *result_columns(job)], source.schema.metadata)


def require_unchanged_input(job: Job, files: list[FileIdentity]) -> None:
    """Raises JobError for an input file that no longer holds the rows that were answered."""
    for identity in files:
        path = place(identity.path, job.base)
        if not (path.exists() and holds_rows(path, identity)):
            raise JobError(
                f"{identity.path}: changed or gone since this run began; restore it and give the same command again, "
                "or start over with --fresh"
            )


def _empty_directory(path: AnyPath) -> AnyPath:
    remove_tree(path)
    path.mkdir(parents=True)
    return path
