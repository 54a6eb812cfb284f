"""Where a job's engine runs when it is not this process: `--on ray` and what may follow it.

Knows the names of the clusters; each is a module of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from batchgen.engine.processor import Place

from ..errors import UsageError
from ..job import Job
from ..models import LoadedModel, Models
from .engine import ClusterEngine, Worker
from .ray_cluster import RayCluster


class Cluster(Protocol):
    """Somewhere to start workers."""

    def num_workers(self, device: str, wanted: int | None) -> int: ...
    def hire(self, arguments: dict[str, Any], num_workers: int) -> Worker: ...
    def close(self) -> None: ...


CLUSTERS: dict[str, Callable[[str | None], Cluster]] = {"ray": RayCluster}


class ClusterModels(Models):
    """The models of this installation, run by the workers of a cluster."""

    def __init__(self, kind: str, address: str | None, workers: int | None) -> None:
        self._open = CLUSTERS[kind]
        self._address = address
        self._wanted = workers
        self._cluster: Cluster | None = None

    def place(self, job: Job) -> Place:
        """The workers', which are not started yet: only a guess, and no demand on the device of this process."""
        return self.likely_place(job)

    def engine(self, job: Job) -> LoadedModel:
        """Starts the cluster and its workers, when a job comes to need them. Raises JobError."""
        cluster = self._cluster = self._open(self._address)
        arguments = self.engine_arguments(job)
        num_workers = cluster.num_workers(job.engine.device, self._wanted)
        return ClusterEngine(self.tokenizer(job), lambda number: cluster.hire(arguments, num_workers), num_workers)

    def close(self) -> None:
        """Ends what was started."""
        if self._cluster is not None:
            self._cluster.close()


@contextmanager
def models_on(on: str | None, workers: int | None) -> Iterator[Models]:
    """The models for `--on` and `--workers`. Raises UsageError."""
    if on is None:
        if workers is not None:
            raise UsageError("--workers: goes with --on ray")
        yield Models()
        return
    kind, _, address = on.partition(":")
    if kind not in CLUSTERS:
        raise UsageError(f"--on {on}: knows {', '.join(CLUSTERS)}, alone or with an address like ray:10.0.0.1:6379")
    models = ClusterModels(kind, address or None, workers)
    try:
        yield models
    finally:
        models.close()
