"""Workers as Ray actors: one per GPU, else one per machine, on a cluster that is there or on one of this machine's own.

Knows Ray, which is imported when a cluster is started and needed for nothing else.
"""

import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from batchgen.engine.request import Request

from ..errors import JobError, UsageError
from .engine import Facts, Progress, WorkerLostError

_CONNECT_SECONDS = 10.0


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray makes SIGTERM end the process at once; a run that is terminated ends cleanly instead."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


class RayCluster:
    """A connection to a Ray cluster, or a local one that ends with it.

    Raises UsageError without the package, JobError when the cluster cannot be reached.
    """

    def __init__(self, address: str | None) -> None:
        """`address`: None for a cluster of this machine alone, else what `ray.init` takes."""
        try:
            import ray
        except ImportError as error:
            raise UsageError("--on ray: Ray is not installed; pip install 'batchgen[ray]'") from error
        if address:
            _require_listener(address)
        self._ray: Any = ray
        place: dict[str, Any] = {"address": address} if address else {"include_dashboard": False}
        try:
            with _own_signals():
                self._ray.init(**place, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = address or "this machine"
            raise JobError(f"--on ray: no cluster at {where} ({error})") from error

    def close(self) -> None:
        """Ends the workers, and the cluster if it is our own."""
        self._ray.shutdown()

    def num_workers(self, device: str, wanted: int | None) -> int:
        """As many as asked for, else one per GPU, else one per machine. Raises UsageError beyond what there is."""
        resources = self._ray.cluster_resources()
        gpus = int(resources.get("GPU", 0)) if _may_use_gpu(device) else 0
        machines = sum(1 for node in self._ray.nodes() if node["Alive"])
        if device.startswith("cuda") and not gpus:
            raise UsageError(f"engine.device: {device}, but the Ray cluster has no GPU")
        most = gpus or int(resources.get("CPU", 1))
        if wanted is not None and wanted > most:
            raise UsageError(f"--workers: {wanted}, but the Ray cluster has {most} {'GPUs' if gpus else 'CPUs'}")
        return wanted or gpus or machines

    def hire(self, arguments: Mapping[str, Any], num_workers: int) -> "RayWorker":
        """Starts a worker that loads its engine with `arguments` of `Engine.load`."""
        ray, device = self._ray, str(arguments["device"])
        resources = ray.cluster_resources()
        if _may_use_gpu(device) and resources.get("GPU", 0):
            options = {"num_gpus": 1, "num_cpus": 1}
            arguments = {**arguments, "device": "cuda"}
            threads = None
        else:
            threads = max(1, int(resources.get("CPU", 1)) // num_workers)
            options = {"num_cpus": threads}
            arguments = {**arguments, "memory": _share(arguments["memory"], num_workers)}
        actor = ray.remote(_Actor).options(max_concurrency=4, scheduling_strategy="SPREAD", **options)
        return RayWorker(ray, actor.remote(dict(arguments), threads))


def _require_listener(address: str) -> None:
    """Raises JobError when nothing answers at HOST:PORT, for which Ray itself waits some minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # a name like auto
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise JobError(f"--on ray: no cluster at {address} ({error})") from error


def _may_use_gpu(device: str) -> bool:
    return device == "auto" or device.startswith("cuda")


def _share(memory: Any, num_workers: int) -> Any:
    """A share of a machine's memory is shared by its workers; a size is each worker's own."""
    return memory / num_workers if isinstance(memory, float) and memory <= 1 else memory


class _Actor:
    """Runs in the worker's process."""

    def __init__(self, arguments: dict[str, Any], threads: int | None) -> None:
        import torch

        from batchgen.engine import Engine

        from .session import WorkerSession

        engine = Engine.load(**arguments)
        if threads is not None:
            torch.set_num_threads(threads)
        self._session = WorkerSession(engine)

    def facts(self) -> Facts:
        return self._session.facts()

    def begin(self) -> None:
        self._session.begin()

    def advance(self, requests: Sequence[Request], low: int, last: bool) -> Progress:
        return self._session.advance(requests, low, last)

    def interrupt(self) -> None:
        self._session.interrupt()


class RayWorker:
    """The driver's end of an actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._facts = actor.facts.remote()
        self._interrupted = threading.Event()

    def facts(self, seconds: float) -> Facts | None:
        if self._interrupted.is_set():
            raise WorkerLostError("interrupted while it loaded")
        ready, _ = self._ray.wait([self._facts], timeout=seconds)
        return self._call(self._facts) if ready else None

    def begin(self) -> None:
        self._interrupted.clear()
        self._call(self._actor.begin.remote())

    def advance(self, requests: Sequence[Request], low: int, last: bool) -> Progress:
        progress: Progress = self._call(self._actor.advance.remote(requests, low, last))
        return progress

    def interrupt(self) -> None:
        self._interrupted.set()
        with suppress(Exception):  # a worker that is gone does not run
            self._actor.interrupt.remote()

    def _call(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.ActorDiedError as error:  # its constructor's error, too
            cause = getattr(error, "cause", None) or error
            raise WorkerLostError(_first_line(cause)) from error
        except (errors.RayActorError, errors.OwnerDiedError, errors.NodeDiedError) as error:
            raise WorkerLostError(_first_line(error)) from error
        except errors.RayTaskError as error:
            raise error.as_instanceof_cause() from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if "Traceback" in str(error) else lines[0]
