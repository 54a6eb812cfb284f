"""The charts of a report as Plotly figures: data and layout without colours of a theme, which the page gives them.

Knows what is drawn and how it is labelled; where the figures come from is not known here.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from .findings import Findings, Moment

_BLUE, _ORANGE, _GREEN, _RED = "#4c86e8", "#e0822f", "#2fa36b", "#d9534f"  # readable on white and on near black
_REASON_COLOURS = {"stop": _GREEN, "length": _ORANGE, "error": _RED}
_BINS = 40


@dataclass(frozen=True)
class Chart:
    """`figure` is None when there is nothing to draw; the caption says why."""

    name: str
    title: str
    caption: str
    figure: dict[str, Any] | None


def charts_of(findings: Findings) -> list[Chart]:
    """The charts of a report, in their order."""
    usage, course = findings.usage, findings.course
    return [
        _speed(course),
        _memory(course),
        _lengths("prompt", "Prompt lengths", usage["prompt_tokens"], _BLUE),
        _lengths("output", "Answer lengths", usage["completion_tokens"], _ORANGE),
        _reasons(findings.finish_reasons),
        _reuse(usage),
        _groups(findings.manifest.prefix_groups),
    ]


def _speed(course: list[list[Moment]]) -> Chart:
    times, (prompt, output) = _joined(course, ("prompt", "output"))
    drawn = any(prompt) or any(output)
    figure = go.Figure()
    for name, values, colour in (("prompt", prompt, _BLUE), ("output", output, _ORANGE)):
        figure.add_scatter(
            x=times, y=values, name=name, mode=_mode(course), line={"color": colour, "width": 2, "shape": "vh"}
        )
    caption = f"Prompt tokens count reused ones too; {_runs_in_words(course)}" if drawn else "nothing was computed"
    return _chart("speed", "Tokens per second", caption, figure, "seconds of work", "tokens/s", drawn)


def _memory(course: list[list[Moment]]) -> Chart:
    times, (kv_use,) = _joined(course, ("kv_use",))
    figure = go.Figure()
    figure.add_scatter(x=times, y=kv_use, mode=_mode(course), fill="tozeroy", line={"color": _GREEN, "width": 2})
    figure.update_yaxes(tickformat=".3~%", rangemode="tozero")
    drawn = any(kv_use)
    caption = "Share of KV blocks in use, at the moments of the log" if drawn else "the log saw no block in use"
    return _chart("memory", "KV cache", caption, figure, "seconds of work", "", drawn)


def _mode(course: list[list[Moment]]) -> str:
    """A run that has one moment is a point, which a line alone does not show."""
    return "lines+markers" if any(len(run) == 1 for run in course) else "lines"


def _joined(course: list[list[Moment]], names: tuple[str, ...]) -> tuple[list[float | None], list[list[Any]]]:
    """All runs one after the other, a gap between them."""
    times: list[float | None] = []
    values: list[list[Any]] = [[] for _ in names]
    start = 0.0
    for run in course:
        for moment in run:
            times.append(round(start + moment.seconds, 3))
            for column, name in zip(values, names, strict=True):
                column.append(round(getattr(moment, name), 4))
        if run:
            start += run[-1].seconds
            times.append(None)
            for column in values:
                column.append(None)
    return times, values


def _runs_in_words(course: list[list[Moment]]) -> str:
    return "one run" if len(course) == 1 else f"{len(course)} runs, one after the other"


def _lengths(name: str, title: str, lengths: NDArray[np.int64], colour: str) -> Chart:
    present = lengths[lengths > 0]
    figure = go.Figure()
    caption = "no row has any"
    if present.size:
        width = -(-int(np.ptp(present) + 1) // _BINS)
        edges = np.arange(present.min(), present.max() + width + 1, width)
        counts, _ = np.histogram(present, edges)
        labels = [_range(low, high) for low, high in pairwise(edges)]
        middles = ((edges[:-1] + edges[1:] - 1) / 2).tolist()
        figure.add_bar(
            x=middles, y=counts.tolist(), width=width, marker_color=colour, customdata=labels,
            hovertemplate="%{customdata} tokens: %{y} rows<extra></extra>",
        )  # fmt: skip
        middle, high = np.percentile(present, [50, 95])
        caption = f"mean {present.mean():.0f}, median {middle:.0f}, 95 % up to {high:.0f}, longest {present.max()}"
    return _chart(name, title, caption, figure, "tokens", "rows", bool(present.size))


def _range(low: np.int64, high: np.int64) -> str:
    return f"{low}" if high - low == 1 else f"{low}-{high - 1}"


def _reasons(reasons: dict[str, int]) -> Chart:
    names = [name for name in _REASON_COLOURS if name in reasons]
    figure = go.Figure()
    figure.add_bar(
        x=[reasons[name] for name in names], y=names, orientation="h", text=[f"{reasons[name]:,}" for name in names],
        textposition="outside", cliponaxis=False, marker_color=[_REASON_COLOURS[name] for name in names],
    )  # fmt: skip
    caption = "stop: the model or a stop string ended the answer; length: max_tokens did" if names else "no row has any"
    return _chart("reasons", "Why answers ended", caption, figure, "answers", "", bool(names))


def _reuse(usage: dict[str, NDArray[np.int64]]) -> Chart:
    prompt, cached = usage["prompt_tokens"], usage["cached_tokens"]
    asked = prompt > 0
    figure = go.Figure()
    caption = "no row has a prompt"
    if asked.any():
        share = cached[asked] / prompt[asked]
        counts, edges = np.histogram(share, np.linspace(0, 1, 21))
        figure.add_bar(
            x=((edges[:-1] + edges[1:]) / 2).tolist(), y=counts.tolist(), width=0.05, marker_color=_GREEN,
            hovertemplate="about %{x:.0%}: %{y} rows<extra></extra>",
        )  # fmt: skip
        figure.update_xaxes(tickformat=".0%", range=[0, 1])
        total = cached.sum() / prompt.sum()
        caption = f"Share of each prompt that another row had computed; {total:.0%} of all prompt tokens"
    return _chart("reuse", "Prefix reuse by row", caption, figure, "", "rows", bool(asked.any()))


def _groups(groups: list[dict[str, Any]]) -> Chart:
    figure = go.Figure()
    names = [f"group {number}" for number in range(1, len(groups) + 1)]
    figure.add_bar(
        x=[group["saved_tokens"] for group in groups], y=names, orientation="h", marker_color=_GREEN,
        customdata=[[group["rows"], group["prefix_tokens"]] for group in groups],
        hovertemplate="%{customdata[0]:,} rows share %{customdata[1]:,} tokens: %{x:,} saved<extra></extra>",
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    caption = "no rows begin alike"
    if groups:
        caption = "Prompt tokens that need no computing because of a group's common prefix; the groups are listed below"
    return _chart("groups", "What prefix groups save", caption, figure, "tokens", "", bool(groups))


def _chart(name: str, title: str, caption: str, figure: go.Figure, x_title: str, y_title: str, drawn: bool) -> Chart:
    if not drawn:
        return Chart(name, title, f"Nothing to show: {caption}", None)
    figure.update_layout(
        height=260, margin={"l": 8, "r": 8, "t": 8, "b": 8}, paper_bgcolor="rgba(0,0,0,0)", bargap=0.06,
        plot_bgcolor="rgba(0,0,0,0)", template="none", legend={"orientation": "h", "y": 1.12},
    )  # fmt: skip
    figure.update_xaxes(title=x_title)
    figure.update_yaxes(title=y_title)
    return Chart(name, title, caption, json.loads(figure.to_json()))
