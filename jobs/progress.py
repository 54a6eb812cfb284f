"""Shows how far a run is: a bar in tokens on a terminal, a line every half minute elsewhere.

Knows counts of this run only; reads the engine's statistics, writes to stderr.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TextIO

from tqdm import tqdm

from .steps import StepPlace

_BAR_SECONDS, _LINE_SECONDS = 0.5, 30.0
_COUNTERS = ("computed_prompt_tokens", "cached_prompt_tokens", "output_tokens", "host_wait_seconds")
_FED = "fed_tokens"
_SPECULATION = ("steps", "drafted_steps", "drafted_tokens", "accepted_tokens")


@dataclass(frozen=True)
class Snapshot:
    """How far the run is. Tokens are prompt tokens (computed and reused) and output tokens of this run.

    `host_wait` are the seconds in which the engine waited for rows to be read, rendered and planned.
    """

    rows_done: int
    rows_total: int
    seconds: float
    computed_tokens: int
    reused_tokens: int
    output_tokens: int
    tokens_total: int
    kv_use: float
    speculation: dict[str, int] = field(default_factory=dict)  # steps, those with drafts, drafted and accepted tokens
    host_wait: float = 0.0
    fed_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.computed_tokens + self.reused_tokens + self.output_tokens

    @property
    def rates(self) -> dict[str, float]:
        """Rows, prompt and output tokens per second; shares of prompt tokens reused, KV in use and time waited."""
        seconds = max(self.seconds, 1e-9)
        prompt = self.computed_tokens + self.reused_tokens
        return {
            "rows_per_second": self.rows_done / seconds,
            "prompt_tokens_per_second": prompt / seconds,
            "output_tokens_per_second": self.output_tokens / seconds,
            "reuse": self.reused_tokens / prompt if prompt else 0.0,
            "kv_use": self.kv_use,
            "host_wait": self.host_wait / seconds,
        }

    @property
    def seconds_left(self) -> float | None:
        """From the tokens left; None while no row has ended, as nothing is known about lengths then."""
        left = max(0, self.tokens_total - self.tokens)
        return left * self.seconds / self.tokens if self.tokens and self.rows_done else None


class Meter:
    """Counts what the engine has done so far over all its runs of this job."""

    def __init__(self, rows_total: int, statistics: Any = None) -> None:
        """`statistics` are the engine's so far: what it has done for others does not count."""
        self._rows_total = rows_total
        self._rows_done = 0
        self._prompt_done = 0
        self._output_done = 0
        self._began = time.monotonic()
        names = (*_COUNTERS, _FED, *_SPECULATION)
        self._earlier: dict[str, Any] = {name: -getattr(statistics, name, 0) for name in names}
        self._statistics: Any = statistics

    def finished(self, rows: int, prompt_tokens: int, output_tokens: int) -> None:
        """Rows of this run that have an outcome now, and the tokens in them."""
        self._rows_done += rows
        self._prompt_done += prompt_tokens
        self._output_done += output_tokens

    def snapshot(self, statistics: Any) -> Snapshot:
        if statistics is not self._statistics:
            self._add(self._statistics)
            self._statistics = statistics
        computed, reused, output, host_wait = (self._earlier[name] + getattr(statistics, name, 0) for name in _COUNTERS)
        tokens = computed + reused + output
        blocks = getattr(statistics, "kv_blocks_total", 0)
        return Snapshot(
            rows_done=self._rows_done,
            rows_total=self._rows_total,
            seconds=time.monotonic() - self._began,
            computed_tokens=computed,
            reused_tokens=reused,
            output_tokens=output,
            tokens_total=self._total(tokens),
            kv_use=getattr(statistics, "kv_blocks_used", 0) / blocks if blocks else 0.0,
            speculation={name: self._earlier[name] + getattr(statistics, name, 0) for name in _SPECULATION},
            host_wait=host_wait,
            fed_tokens=self._earlier[_FED] + getattr(statistics, _FED, 0),
        )

    def _total(self, tokens: int) -> int:
        """Tokens of the whole run: those seen, and for rows still open what finished rows lead to expect.

        Long rows end last, so an open row needs at least half of a mean answer beyond what it has.
        """
        left = self._rows_total - self._rows_done
        if left <= 0:
            return tokens
        done = self._prompt_done + self._output_done
        mean, mean_output = (count / max(1, self._rows_done) for count in (done, self._output_done))
        return max(tokens + 1, round(done + left * mean), round(tokens + left * mean_output / 2))

    def _add(self, statistics: Any) -> None:
        for name in self._earlier:
            self._earlier[name] += getattr(statistics, name, 0)


class Progress:
    """Calls a display at its own pace, from a thread, until the block ends; then once more."""

    def __init__(self, take: Callable[[], Snapshot], display: "Display") -> None:
        self._take = take
        self._display = display
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._display.show(self._take())
        self._display.close()

    def _run(self) -> None:
        while not self._ended.wait(self._display.seconds):
            self._display.show(self._take())


class Display(Protocol):
    """Somewhere to show snapshots, every `seconds`."""

    seconds: float

    def show(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


class Bar:
    """One tqdm bar in tokens."""

    seconds = _BAR_SECONDS

    def __init__(self, stream: TextIO, label: str | None = None) -> None:
        self._bar = tqdm(total=None, desc=label, unit="tok", unit_scale=True, file=stream, dynamic_ncols=True)

    def show(self, snapshot: Snapshot) -> None:
        self._bar.total = max(snapshot.tokens_total, 1)
        self._bar.n = snapshot.tokens if snapshot.tokens_total else 1  # rows without a token still end at 100 %
        self._bar.set_postfix_str(_figures(snapshot), refresh=True)

    def close(self) -> None:
        self._bar.close()


class Lines:
    """One line now and then, as text or as JSON."""

    seconds = _LINE_SECONDS

    def __init__(self, stream: TextIO, as_json: bool, label: str | None = None) -> None:
        self._label = label
        self._stream = stream
        self._as_json = as_json

    def show(self, snapshot: Snapshot) -> None:
        with suppress(OSError):  # a terminal that went away ends no run
            print(self._line(snapshot), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is held open."""

    def _line(self, snapshot: Snapshot) -> str:
        left = snapshot.seconds_left
        if self._as_json:
            rates = {name: round(value, 4) for name, value in snapshot.rates.items()}
            step = {} if self._label is None else {"step": self._label}
            values = {"event": "progress", **step, "rows": snapshot.rows_done, "rows_total": snapshot.rows_total}
            seconds_left = None if left is None else round(left)
            tokens = {"tokens": snapshot.tokens, "tokens_total": snapshot.tokens_total}
            return json.dumps({**values, **tokens, **rates, "seconds_left": seconds_left})
        label = "" if self._label is None else f"{self._label}: "
        return f"{label}{_figures(snapshot)}, {'just begun' if left is None else f'about {left:.0f} s left'}"


def _figures(snapshot: Snapshot) -> str:
    rates = snapshot.rates
    return (
        f"{snapshot.rows_done}/{snapshot.rows_total} rows, {rates['rows_per_second']:.1f} rows/s, "
        f"prompt {rates['prompt_tokens_per_second']:.0f} tok/s, "
        f"output {rates['output_tokens_per_second']:.0f} tok/s, reuse {rates['reuse']:.0%}, KV {rates['kv_use']:.0%}, "
        f"host wait {rates['host_wait']:.0%}"
    )


class Silence:
    """Shows nothing."""

    seconds = 3600.0

    def show(self, snapshot: Snapshot) -> None:
        """Not shown."""

    def close(self) -> None:
        """Nothing is held open."""


def choose_display(
    quiet: bool, log_format: str, stream: TextIO | None = None, step: StepPlace | None = None
) -> Display:
    """A bar on a terminal, lines elsewhere or when JSON is asked for, silence when quiet. Of a step it tells which."""
    label = None if step is None else str(step)
    stream = stream or sys.stderr
    if quiet:
        return Silence()
    return (
        Bar(stream, label) if stream.isatty() and log_format == "text" else Lines(stream, log_format == "json", label)
    )
