"""A step is launched without an answer from the device: nothing in it needs to know what a tensor holds."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from batchgen.engine import Engine, Grammar, Request, Sampling

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "_unique2"}


class NoWaits(TorchDispatchMode):
    """Refuses what would make the host of a GPU wait for a value: its use, or a shape that depends on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        masked = name in ("index", "index_put_") and any(
            part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1]
        )
        repeated = name == "repeat_interleave" and given.get("output_size") is None
        waits = name in WAITING or masked or repeated
        assert not waits, f"{func} waits for the device"
        return func(*args, **given)


@dataclass(frozen=True)
class Unwatched:
    """An op table, whose ops are the affair of each device."""

    table: Any

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            with _disable_current_modes():
                return getattr(self.table, name)(*arguments)

        return call


def watched(engine: Engine) -> Callable[..., Any]:
    """`Runner.start` under `NoWaits`, but for the ops of the engine's tables."""
    runner = engine._runner
    launch = type(runner).start

    def start(self: Any, feeds: Any) -> Any:
        with NoWaits():
            return launch(self, feeds)

    for owner, table in ((runner, runner.kernels), (runner.sampler, runner.sampler.kernels)):
        object.__setattr__(owner, "kernels", Unwatched(table))
    return start


CHOICES = Grammar.choices([" yes", " yes and no", " no", "never"])
SAMPLINGS = {
    "greedy": Sampling(max_tokens=6, temperature=0),
    "drawn": Sampling(max_tokens=6, temperature=0.8, top_p=0.9, top_k=30, min_p=0.01, logprobs=3, n=2),
    "penalties": Sampling(max_tokens=6, temperature=0, repetition_penalty=1.2, min_tokens=4),
    "grammar": Sampling(max_tokens=12, temperature=0, grammar=CHOICES),
    "choice_probs": Sampling(max_tokens=12, temperature=0, grammar=CHOICES, choice_probs=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.tiny_model("llama3", tmp_path_factory.mktemp("llama3"))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_nothing_waits_while_a_step_is_launched(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(str(folder), dtype="float32", memory="4MiB", speculation="off", weights="native")
    monkeypatch.setattr(type(engine._runner), "start", watched(engine))
    start = tiny.random_prompt(20, seed=3)
    done = list(engine.run([Request(key, [*start, 9 + key], SAMPLINGS[name]) for key in range(4)]))
    assert [one.error for one in done] == [None] * 4
