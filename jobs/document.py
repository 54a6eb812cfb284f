"""Reads a job file into plain values: YAML, dotted overrides, environment variables.

Knows the syntax only; which keys exist is the business of job.py.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import UsageError

_VARIABLE = re.compile(r"(\$?)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

# YAML 1.2 core schema: `off` and `no` are words, 1e-4 is a number, 06:00 is a time of day
_SCALARS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"a key must be text, got {key!r}", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        return int(text, 16 if text.startswith("0x") else 10)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        text = str(self.construct_scalar(node)).lower()
        return float(re.sub(r"\.(?=inf|nan)", "", text))


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, in the types of YAML 1.2. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        return _copy(loader.get_single_data())
    except RecursionError as error:
        raise yaml.MarkedYAMLError(problem="nested too deeply, or an anchor that holds itself") from error
    finally:
        loader.dispose()


def read_document(path: Path) -> dict[str, Any]:
    """The mapping in a job file. Raises UsageError naming file and line."""
    try:
        document = parse_yaml(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}{_place(error)}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path}: a job file is a mapping with the keys model, input, prompt and output")
    return document


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    return f"{where}: not valid YAML: {problem}"


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`["a.b=1"]` -> `{"a.b": 1}`: the dotted overrides of the command line. Raises UsageError."""
    return dict(_parse_assignment(text) for text in assignments)


def _parse_assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UsageError(f"--set {text}: must look like generation.max_tokens=32")
    try:
        return key, parse_yaml(value)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "cannot be read"
        raise UsageError(f"--set {key}: not a YAML value ({problem}), put quotes around a text") from error


def override(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the document with dotted keys replaced; list items are named by their number."""
    result: dict[str, Any] = _copy(document)
    for dotted, value in overrides.items():
        _assign(result, dotted.split("."), value, dotted)
    return result


def _assign(node: Any, keys: list[str], value: Any, dotted: str) -> None:
    for key in keys[:-1]:
        if isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[_slot(node, key, dotted)]
    node[_slot(node, keys[-1], dotted)] = value


def _slot(node: Any, key: str, dotted: str) -> Any:
    if isinstance(node, dict):
        return key
    if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
        return int(key)
    raise UsageError(f"--set {dotted}: there is no {key!r} to set")


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, (list, tuple)) else value


def variables_in(document: Any) -> set[str]:
    """Names of the environment variables that a document asks for."""
    if isinstance(document, dict):
        return set().union(*map(variables_in, document.values()))
    if isinstance(document, list):
        return set().union(*map(variables_in, document))
    if not isinstance(document, str):
        return set()
    return {match[2] for match in _VARIABLE.finditer(document) if not match[1]}


def expand_variables(document: Any, source: str, place: str = "") -> Any:
    """Replaces `${NAME}` in every string by the environment's value (`$${NAME}` stays as `${NAME}`).

    Raises UsageError naming the key and the missing variable.
    """
    if isinstance(document, dict):
        return {
            key: expand_variables(item, source, f"{place}.{key}" if place else key) for key, item in document.items()
        }
    if isinstance(document, list):
        return [expand_variables(item, source, f"{place}[{index}]") for index, item in enumerate(document)]
    if not isinstance(document, str):
        return document

    def replacement(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:]
        if match[2] not in os.environ:
            raise UsageError(f"{source}: {place}: environment variable {match[2]} is not set")
        return os.environ[match[2]]

    return _VARIABLE.sub(replacement, document)
