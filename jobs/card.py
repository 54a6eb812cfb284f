"""The data set card of an output: what was asked of which model, what came of it, and a few rows.

Knows the manifest and the job as it was written. Values of environment variables do not stand in a card: the job is
shown with their names, and so are answers that repeat one.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from .hub_files import HubLayout
from .manifest import Manifest

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_MARK = "<!-- batchgen {part} {config}/{split} -->"
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
          (10**8, "10M<n<100M"), (10**9, "100M<n<1B"))  # fmt: skip
_LONGEST_TEXT = 400  # characters of a value in an example row
_SHORTEST_SECRET = 4  # characters
_ANY_VALUE = r"(?s:.+?)"


def write_card(
    earlier: str,
    layout: HubLayout,
    manifest: Manifest,
    document: Mapping[str, Any],
    schema: pa.Schema | None,
    examples: Iterable[Mapping[str, Any]],
) -> str:
    """The card of a repository: `earlier` with this configuration and split put in, or put in anew.

    `document` is the job as written, `schema` the columns where the files have one. What others wrote stays.
    """
    metadata, body = _parts(earlier)
    values = _values(document, manifest.settings)
    shown = [_shortened(_hidden(row, values)) for row in examples]
    text = _placed(body, layout, "\n".join(_section(layout, manifest, document, shown)))
    front = yaml.safe_dump(_metadata(metadata, layout, manifest, schema), sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n{text}"


def _parts(card: str) -> tuple[dict[str, Any], str]:
    match = re.match(r"\s*---\r?\n(.*?)\r?\n---\r?\n?", card, re.DOTALL)
    if match is None:
        return {}, card
    found = yaml.safe_load(match[1])
    return (found if isinstance(found, dict) else {}), card[match.end() :]


def _metadata(
    earlier: dict[str, Any], layout: HubLayout, manifest: Manifest, schema: pa.Schema | None
) -> dict[str, Any]:
    configs = [dict(entry) for entry in earlier.get("configs") or []]
    mine = next((entry for entry in configs if entry.get("config_name") == layout.config), None)
    if mine is None:
        mine = {"config_name": layout.config, "data_files": []}
        configs.append(mine)
    others = mine.get("data_files") if isinstance(mine.get("data_files"), list) else []
    kept = [entry for entry in others or [] if not (isinstance(entry, dict) and entry.get("split") == layout.split)]
    mine["data_files"] = [*kept, {"split": layout.split, "path": layout.pattern}]
    metadata = {**earlier, "configs": configs}
    metadata.setdefault("tags", ["synthetic", "batchgen"])
    metadata.setdefault("size_categories", [_size(manifest.counts["rows"])])
    infos = _with_features(earlier.get("dataset_info"), layout, schema)
    return {**metadata, "dataset_info": infos} if infos else metadata


def _with_features(earlier: Any, layout: HubLayout, schema: pa.Schema | None) -> list[dict[str, Any]]:
    infos = [earlier] if isinstance(earlier, dict) else list(earlier or [])
    kept = [info for info in infos if info.get("config_name", "default") != layout.config]
    if schema is None:
        return kept
    from datasets import DatasetInfo, Features

    info = DatasetInfo(features=Features.from_arrow_schema(schema))._to_yaml_dict()
    return [*kept, {"config_name": layout.config, **info}]


def _size(rows: int) -> str:
    return next((name for limit, name in _SIZES if rows < limit), "n>1B")


def _placed(body: str, layout: HubLayout, section: str) -> str:
    start, stop = (_MARK.format(part=part, config=layout.config, split=layout.split) for part in ("begin", "end"))
    block = f"{start}\n{section}\n{stop}"
    before, found, rest = body.partition(start)
    if found and stop in rest:
        return before + block + rest.partition(stop)[2]
    return f"{body.rstrip()}\n\n{block}\n".lstrip("\n")


def _section(layout: HubLayout, manifest: Manifest, document: Mapping[str, Any], examples: list[Any]) -> Iterator[str]:
    counts, tokens = manifest.counts, manifest.tokens
    yield f"# {document.get('name') or manifest.job}\n"
    yield f"Answers of a language model, generated offline with batchgen: `{layout.config}`, split `{layout.split}`.\n"
    yield "| | |\n|---|---|"
    yield from (f"| {name} | {value} |" for name, value in _facts(manifest, document))
    outcomes = ", ".join(f"{counts[name]:,} {name}" for name in ("stop", "length", "error", "skipped"))
    yield f"| rows | {counts['rows']:,} ({outcomes}) |"
    yield f"| prompt tokens | {tokens.get('prompt_tokens', 0):,} ({manifest.reuse:.0%} reused) |"
    yield f"| output tokens | {tokens.get('completion_tokens', 0):,} |\n"
    yield f"## {'Steps' if document.get('steps') else 'Prompt'}\n\n{_fenced(_prompt(document), 'yaml')}\n"
    yield f"## Sampling\n\n{_fenced(_yaml(_sampling(manifest, document)), 'yaml')}\n"
    if examples:
        lines = json.dumps(examples, indent=2, ensure_ascii=False, default=str)
        yield f"## Example rows\n\n{_fenced(lines, 'json')}"


def _facts(manifest: Manifest, document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model = document.get("model") or {}
    path = str(model.get("path"))
    is_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith(".gguf")
    yield "model", f"`{path if is_hub_id else Path(path).name}`"
    if model.get("revision"):
        yield "revision", f"`{model['revision']}`"
    if manifest.model.get("digest"):
        yield "digest of the weights", f"`{manifest.model['digest']}`"
    engine = manifest.settings.get("resolved_engine") or {}
    formats = ", ".join(f"{name} {engine[name]}" for name in ("dtype", "weights", "kv_cache") if name in engine)
    if formats:
        yield "number formats", formats
    yield "batchgen", str(manifest.versions.get("batchgen", ""))


def _prompt(document: Mapping[str, Any]) -> str:
    return _yaml(document.get("prompt") or document.get("steps") or {"prompt": "in the lines of an OpenAI batch file"})


def _sampling(manifest: Manifest, document: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as they were in force; texts and lists as they were written."""
    resolved = manifest.settings.get("generation") or {}
    numbers = {name: value for name, value in resolved.items() if isinstance(value, (bool, int, float))}
    return {**numbers, **(document.get("generation") or {})}


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000).rstrip()


def _fenced(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]}... ({len(value):,} characters)"
    if isinstance(value, bytes):
        return f"({len(value):,} bytes)"
    if isinstance(value, Mapping):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value[:8]] + ([f"... ({len(value):,} in all)"] if len(value) > 8 else [])
    return value


def _values(written: Any, resolved: Any) -> dict[str, str]:
    """The values that environment variables had in the run, by name, read off the settings they ended up in."""
    if isinstance(written, Mapping) and isinstance(resolved, Mapping):
        pairs = [(item, resolved.get(key)) for key, item in written.items()]
    elif isinstance(written, list) and isinstance(resolved, (list, tuple)) and len(written) == len(resolved):
        pairs = list(zip(written, resolved, strict=True))
    else:
        pairs = []
    found = {name: value for item, other in pairs for name, value in _values(item, other).items()}
    if isinstance(written, str) and isinstance(resolved, str) and _VARIABLE.search(written):
        found.update(_matched(written, resolved))
    return found


def _matched(written: str, resolved: str) -> dict[str, str]:
    parts = _VARIABLE.split(written)
    names = parts[1::2]
    pattern = "".join(f"({_ANY_VALUE})" if at % 2 else re.escape(part) for at, part in enumerate(parts))
    match = re.fullmatch(pattern, resolved)
    return dict(zip(names, match.groups(), strict=True)) if match else {}


def _hidden(value: Any, values: Mapping[str, str]) -> Any:
    """An example with names for values; those too short to be a secret are looked for in vain and left alone."""
    if isinstance(value, Mapping):
        return {key: _hidden(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [_hidden(item, values) for item in value]
    for name, secret in sorted(values.items(), key=lambda pair: -len(pair[1])) if isinstance(value, str) else ():
        if len(secret.strip()) >= _SHORTEST_SECRET:
            value = value.replace(secret, f"${{{name}}}")
    return value
