"""`batchgen report`: one self-contained HTML page about an output. Needs no network, neither now nor when it is read.

Knows what stands on the page and in which words; the figures come from findings.py, the charts from charts.py.
"""

import html
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from batchgen.pipeline.place import AnyPath

from .charts import Chart, charts_of
from .errors import JobError
from .files import write_aside
from .findings import Findings, read_findings
from .manifest import Manifest
from .output import SIDECAR

FILE = "report.html"
_STATES = {
    "finished": "finished",
    "running": "running",
    "publishing": "putting its files in place",
    "stopped": "stopped; the same command continues",
    "failed": "failed; the same command continues",
    "killed": "was killed; the same command continues",
}


def report_output(output: AnyPath, target: AnyPath | None = None) -> AnyPath:
    """Writes the page and returns its path; by default a file in the sidecar directory, where no loader looks.

    Raises UsageError when `output` is no output of batchgen, JobError when the page cannot be written.
    """
    page = render(read_findings(output))
    path = target or output / SIDECAR / FILE
    try:
        with write_aside(path) as file:
            file.write(page.encode())
    except OSError as error:
        raise JobError(f"{path}: {error.strerror or error}; name another place with --to") from error
    return path


def render(findings: Findings) -> str:
    """The page as one HTML text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(files("batchgen.jobs").joinpath("report_page.html").read_text("utf-8"))
    charts = charts_of(findings)
    return template.render(
        title=f"batchgen: {findings.manifest.job}",
        subtitle=_subtitle(findings),
        tiles=list(_tiles(findings)),
        charts=[_shown(chart) for chart in charts],
        sections=[
            *_steps(findings),
            _failures(findings),
            _groups(findings.manifest),
            _expensive(findings),
            *_speculation(findings.manifest),
        ],
        settings=list(_settings(findings.manifest)),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")),
        figures=_script_json({chart.name: chart.figure for chart in charts if chart.figure}),
    )


def _script_json(value: Any) -> Markup:
    """JSON that can stand inside a script element."""
    return Markup(json.dumps(value).replace("<", "\\u003c"))


def _shown(chart: Chart) -> dict[str, Any]:
    place = Markup(f'<div id="{html.escape(chart.name)}"></div>') if chart.figure else None
    return {"title": chart.title, "caption": chart.caption, "html": place}


def _subtitle(findings: Findings) -> str:
    manifest, status = findings.manifest, findings.status
    model = manifest.model.get("path", "no model loaded yet")
    parts = [status.output, f"{_STATES[status.state]}", str(model), f"begun {manifest.created}"]
    if "ended" in manifest.times:
        parts.append(f"last run ended {manifest.times['ended']}")
    return " · ".join(parts)


def _tiles(findings: Findings) -> Iterator[dict[str, Any]]:
    counts, usage, seconds = findings.status.counts, findings.usage, findings.manifest.times.get("seconds", 0.0)
    prompt, cached, output = (
        int(usage[name].sum()) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    yield _tile("rows", f"{counts['rows']:,}")
    yield _tile("with an answer", f"{counts['stop'] + counts['length']:,}")
    yield _tile("failed", f"{counts['error']:,}", bad=counts["error"] > 0)
    if counts["skipped"]:
        yield _tile("skipped by policy", f"{counts['skipped']:,}")
    if findings.status.left:
        yield _tile("still to do", f"{findings.status.left:,}", bad=findings.status.state in ("failed", "killed"))
    yield _tile("prompt tokens", _count(prompt))
    yield _tile("answer tokens", _count(output))
    yield _tile("of prompt tokens reused", f"{cached / prompt:.0%}" if prompt else "-")
    if seconds:
        yield _tile(f"of work in {_plural(findings.manifest.times['runs'], 'run')}", _duration(seconds))
        yield _tile("rows per second", f"{findings.status.done / seconds:.2f}")
        yield _tile("spent waiting for rows", f"{findings.manifest.times.get('host_wait_seconds', 0.0) / seconds:.0%}")
    yield from _cost_tiles(findings.manifest.cost)


def _cost_tiles(cost: dict[str, float] | None) -> Iterator[dict[str, Any]]:
    if cost is not None:
        yield _tile(f"cost at {cost['price_per_hour']:g} an hour", f"{cost['total']:.2f}")
        yield _tile("per million tokens", f"{cost['per_million_tokens']:.3f}")


def _tile(name: str, value: str, bad: bool = False) -> dict[str, Any]:
    return {"name": name, "value": value, "bad": bad}


def _steps(findings: Findings) -> Iterator[dict[str, Any]]:
    """What became of the rows in each step; everything else on the page is about the last one."""
    if findings.status.steps:
        shown = ("stop", "length", "error", "skipped")
        yield {
            "title": "Steps (everything else here is about the last one)",
            "names": ["step", "rows done", *shown, "prompt tokens", "answer tokens"],
            "numbers": list(range(1, 8)),
            "rows": [
                [step.name, f"{step.done:,}", *(f"{step.counts[name]:,}" for name in shown),
                 f"{step.tokens['prompt_tokens']:,}", f"{step.tokens['completion_tokens']:,}"]
                for step in findings.status.steps
            ],
            "nothing": "",
        }  # fmt: skip


def _failures(findings: Findings) -> dict[str, Any]:
    shown = []
    for failure in findings.failures:
        for at, (position, message) in enumerate(failure.examples):
            kind = ["", "", ""] if at else [failure.code, failure.stage, f"{failure.rows:,}"]
            shown.append([*kind, f"row {position}: {message}"])
    return {
        "title": "Failures", "names": ["code", "stage", "rows", "examples"], "numbers": [2], "rows": shown,
        "nothing": "No row failed.",
    }  # fmt: skip


def _expensive(findings: Findings) -> dict[str, Any]:
    return {
        "title": "Rows that took most",
        "names": ["row", "prompt tokens", "of them computed", "answer tokens"],
        "numbers": [0, 1, 2, 3],
        "rows": [
            [f"{row.position}", f"{row.prompt:,}", f"{row.computed:,}", f"{row.output:,}"] for row in findings.expensive
        ],
        "nothing": "No row was computed.",
    }


def _groups(manifest: Manifest) -> dict[str, Any]:
    rows = [
        [
            f"{number}",
            f"{group['rows']:,}",
            f"{group['prefix_tokens']:,}",
            f"{group['saved_tokens']:,}",
            group["excerpt"],
        ]
        for number, group in enumerate(manifest.prefix_groups, 1)
    ]
    return {
        "title": "Largest prefix groups", "names": ["group", "rows", "tokens shared", "tokens saved", "text"],
        "numbers": [0, 1, 2, 3], "rows": rows, "nothing": "No rows begin alike.",
    }  # fmt: skip


def _speculation(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """What the controller, or a drafter that was named, did in the last run that generated."""
    found = manifest.speculation
    if found.get("steps"):
        drafted = found["drafted_tokens"]
        rows = [
            ["engine.speculation", str(manifest.settings.get("resolved_engine", {}).get("speculation", ""))],
            ["steps", f"{found['steps']:,}"],
            ["of them with drafts", f"{found['drafted_steps']:,}"],
            ["drafted tokens", f"{drafted:,}"],
            ["of them accepted", f"{found['accepted_tokens'] / drafted:.0%}" if drafted else "none"],
        ]
        yield {"title": "Speculation", "names": ["", ""], "numbers": [1], "rows": rows, "nothing": ""}


def _settings(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for name, value in manifest.settings.items():
        yield name.replace("_", " "), yaml.safe_dump(value, sort_keys=False, allow_unicode=True).strip()
    yield "versions", yaml.safe_dump(manifest.versions, sort_keys=False).strip()
    inputs = [f"{item['path']}: {item['rows']:,} rows, {item['size']:,} bytes" for item in manifest.input]
    yield "input files", "\n".join(inputs)


def _count(value: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if value >= size:
            return f"{value / (1000 if unit == 'k' else size):.1f} {unit}"
    return f"{value:,}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
