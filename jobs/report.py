"""What a run came to, for the caller and for the last line on the terminal.

Knows numbers only; they are counted elsewhere.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from batchgen.pipeline.place import AnyPath


@dataclass(frozen=True)
class Report:
    """The end of a run. `stopped`: why it ended early (deadline, interrupted, terminated), or None."""

    output: AnyPath
    counts: dict[str, int]
    steps: dict[str, dict[str, int]] = field(default_factory=dict)  # counts of each step, by name
    tokens: dict[str, int] = field(default_factory=dict)
    reuse: float = 0.0
    seconds: float = 0.0
    asked: int = 0  # rows this run set out to generate
    stopped: str | None = None
    step: str | None = None  # in which step it was stopped
    too_many_failures: bool = False
    exit_code: int = 0
    first_error: str | None = None  # of the rows this run asked, by position
    hook_error: str | None = None  # why run.on_finish was not told

    @property
    def warnings(self) -> list[str]:
        """A line each: no row succeeded and some failed, and a hook that did not hear of it."""
        found = [self._nothing_succeeded(), self.hook_error and f"warning: {self.output}: {self.hook_error}"]
        return [line for line in found if line]

    def _nothing_succeeded(self) -> str | None:
        failed = self.counts.get("error", 0)
        if not failed or self.counts.get("stop") or self.counts.get("length"):
            return None
        first = f", the first with {self.first_error}" if self.first_error else ""
        return f"warning: {self.output}: all {failed} rows failed{first}"

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**asdict(self), "output": str(self.output)}

    def summary(self) -> str:
        """One line for people."""
        counts = self.counts
        parts = [f"{counts[name]} {word}" for name, word in _WORDS.items() if counts.get(name)]
        done = sum(counts.get(name, 0) for name in _WORDS)
        head = f"{self.output}: {done} of {counts['rows']} rows ({', '.join(parts) or 'none'})"
        if failed := [f"{count['error']} in {name}" for name, count in self.steps.items() if count["error"]]:
            head += f"; failed: {', '.join(failed)}"
        if self.stopped:
            where = f" in {self.step}" if self.step else ""
            return f"{head}; stopped{where} ({self.stopped}), the same command continues"
        if self.too_many_failures:
            return f"{head}; more rows failed than run.max_failures allows"
        if not self.asked:
            return f"{head}; nothing was left to do"
        return f"{head}; {self.seconds:.0f} s, {self.reuse:.0%} of prompt tokens reused"


_WORDS = {"stop": "complete", "length": "cut by max_tokens", "error": "failed", "skipped": "skipped"}
