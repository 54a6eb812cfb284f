"""The engine on a CUDA device that is not there: torch's fake tensors are said to be on it, and kernels do not run.

Run as a program, as interpreted.py is: a line of JSON for every model. Every op of torch and every launch is looked at
for tensors on another device; a step that asks for a value while it is launched, or takes or makes a tensor on the host
while it is captured, is an error of its rows. Answers mean nothing: whatever is fetched is ones.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

MODELS = (  # family, weights, KV cache
    ("llama3", "native", "bfloat16"),
    ("qwen2", "int4", "fp8"),
    ("qwen3", "fp8", "int8"),
    ("smollm2", "int8", "int4"),
)
FREE, WHOLE = 130 * 2**30, 139 * 2**30  # bytes of the device
MOST_DOWN = 65_535  # programs in the second and third direction of a grid
VALUES = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")
GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar made(c10::DeviceType::CUDA, &guard);
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`errors` of rows; how many recordings were made and replayed; which kernels ran; the vendor's products."""

    model: tuple[str, str, str]
    errors: list[str]
    recorded: int
    replayed: int
    kernels: list[str]
    products: list[str]


def outcomes() -> dict[tuple[str, str, str], Outcome]:
    """By model, in a process of their own, since torch.cuda is another there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AssertionError(f"the run failed:\n{done.stderr[-3000:]}")
    found = [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]
    return {tuple(one.model): one for one in found}  # type: ignore[misc]


def add_device_guard(compiler: str) -> None:
    """Torch without CUDA does not index tensors of such a device before somebody says how it is made current."""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD, encoding="ascii")
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
        subprocess.run([compiler, str(source), "-o", str(library), *options], check=True)
        ctypes.CDLL(str(library))


class Watch(TorchDispatchMode):
    """Refuses values while a step is launched, and the host's tensors while one is captured; counts what is done."""

    def __init__(self) -> None:
        super().__init__()
        self.launching = self.capturing = False
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = kwargs or {}, func._schema.name
        for one in tree_leaves((args, given)):
            if isinstance(one, torch.Tensor):
                one.constant = None  # type: ignore[attr-defined]  # what fakes know of small tensors is computed with
        if name in VALUES[:2] and not self.launching:  # while a model is loaded
            return True if name == VALUES[1] else 1
        masks = args[1] if name in ("aten::index", "aten::index_put_") else ()
        counted = any(part is not None and part.dtype == torch.bool for part in masks)
        if self.launching and (counted or name in VALUES):
            raise AssertionError(f"{func} asks for a value while a step is launched")
        out = func(*args, **given)
        self.done[name] += 1
        if self.capturing:
            self.refuse_host(name, (args, given, out))
        return out

    def refuse_host(self, name: str, values: Any) -> None:
        for one in tree_leaves(values):
            if isinstance(one, torch.Tensor) and one.device.type != "cuda":
                raise AssertionError(f"{name}: a tensor {tuple(one.shape)} on {one.device}")

    @contextmanager
    def capture(self, *arguments: Any, **options: Any) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def run(self, launch: Any) -> None:
        """In the place of `Launch.run`."""
        name, grid = launch.kernel.fn.__name__, launch.grid
        self.refuse_host(name, launch.arguments)
        if any(count > MOST_DOWN for count in grid[1:]) or grid[0] >= 2**31:
            raise AssertionError(f"{name}: no device takes a grid of {grid}")
        self.done[name] += 1


class Stream:
    def __init__(self, *arguments: Any) -> None:
        pass

    def wait_stream(self, other: "Stream") -> None:
        pass


class Event:
    def record(self, stream: Stream) -> None:
        pass


def replace_cuda(watch: Watch) -> None:
    """An H200, by what the engine asks of torch.cuda."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    replay = SimpleNamespace(replay=lambda: watch.done.update(["replay"]))
    nothing = dict.fromkeys(("init", "set_device", "empty_cache", "synchronize", "reset_peak_memory_stats"))
    numbers = {"device_count": 1, "current_device": 0, "graph_pool_handle": 0}
    memory = {"memory_allocated": 0, "max_memory_allocated": 2**30, "mem_get_info": (FREE, WHOLE)}
    chip = {"get_device_name": "NVIDIA H200", "get_device_capability": (9, 0), "get_device_properties": properties}
    work = {"current_stream": Stream(), "stream": nullcontext(), "CUDAGraph": replay}
    fakes: dict[str, Any] = {**nothing, **numbers, **memory, **chip, **work}
    for name, value in fakes.items():
        setattr(torch.cuda, name, lambda *arguments, value=value: value)
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.graph = Stream, Event, watch.capture  # type: ignore[misc, assignment]
    torch.version.cuda = "0"


def replace_link(watch: Watch) -> None:
    """Page-locked memory is any memory; ones come back from the device, in the form of what was sent."""
    from batchgen.engine.link import CudaLink

    def to_host(link: CudaLink, tensors: tuple[torch.Tensor, ...]) -> Any:
        watch.refuse_host("fetched", tensors)
        forms = [(tuple(one.shape), one.dtype) for one in tensors]

        def wait() -> tuple[torch.Tensor, ...]:
            with _disable_current_modes():
                return tuple(torch.ones(shape, dtype=dtype) for shape, dtype in forms)

        return wait

    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign, assignment]
    CudaLink.to_host = to_host  # type: ignore[method-assign]


def watch_launches(watch: Watch) -> None:
    from batchgen.engine.runner import Runner
    from batchgen.kernels.launch import Launch

    start = Runner.start

    def watched(runner: Runner, feeds: Any) -> Any:
        watch.launching = True
        try:
            return start(runner, feeds)
        finally:
            watch.launching = False

    Runner.start = watched  # type: ignore[method-assign]
    Launch.run = lambda launch: watch.run(launch)  # type: ignore[method-assign]


def run_model(path: Path, model: tuple[str, str, str], watch: Watch) -> Outcome:
    """Prompts that share a start, decoding at one size in every way to draw, one step ahead."""
    import tiny

    from batchgen.engine import Engine, Request, Sampling

    drawn = Sampling(max_tokens=9, temperature=0.8, top_p=0.9, top_k=9, min_p=0.01, logprobs=3, n=2, ignore_eos=True)
    penalised = Sampling(max_tokens=9, temperature=0, repetition_penalty=1.2, min_tokens=4, ignore_eos=True)
    samplings = (Sampling(max_tokens=12, temperature=0, ignore_eos=True), drawn, penalised)
    start, watch.done = tiny.random_prompt(70, seed=1), Counter()
    chosen = {"weights": model[1], "kv_cache": model[2], "speculation": "off"}
    engine = Engine.load(str(path), device="cuda", dtype="bfloat16", **chosen)
    requests = [Request(key, [*start, 9 + key], samplings[key // 4]) for key in range(12)]
    errors = [str(one.error) for some in (requests[:4], requests) for one in engine.run(some) if one.error]
    names = set(watch.done)
    kernels = sorted(name for name in names if "::" not in name and name != "replay")
    products = sorted({"aten::linear", "aten::_int_mm", "aten::_scaled_mm", "aten::mm"} & names)
    recordings = len(engine._runner.executor._recordings)  # type: ignore[attr-defined]
    return Outcome(model, errors, recordings, watch.done["replay"], kernels, products)


def main(compiler: str = "c++") -> None:
    import tiny
    from torch._subclasses.fake_tensor import FakeTensorMode

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        paths = [tiny.tiny_model(family, Path(folder, family)) for family, _, _ in MODELS]
        add_device_guard(compiler)
        replace_cuda(watch)
        replace_link(watch)
        watch_launches(watch)
        for path, model in zip(paths, MODELS, strict=True):
            with FakeTensorMode(allow_non_fake_inputs=True), watch:
                print(json.dumps(asdict(run_model(path, model, watch))))


if __name__ == "__main__":
    main()
