"""Writes docs/job-file.md and docs/commands.md from the program's own schema and options.

Knows how a schema and a command become tables; every word about a key or an option stands where it is defined.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from batchgen.jobs.cli import cli
from batchgen.jobs.job import Job

FOLDER = Path(__file__).resolve().parent
_LARGE = 2**31 - 2  # a bound that only says which numbers fit
NOTE = "<!-- made by docs/make_reference.py; change the descriptions in the program, then run it -->"

JOB_FILE_INTRO = """# Job file

A job is one YAML file. This page lists every key with its values, its default and its meaning; it is made from the
schema that `batchgen schema` prints, which editors can use for completion:

```sh
batchgen schema > job.schema.json
```

* The file is strict. An unknown key, a wrong type, a value out of range or two exclusive keys end the command with exit
  code 2 before a model loads, and the message names the key:
  `job.yaml: generation.temprature: unknown key, did you mean temperature?`
* `${NAME}` in a string is replaced by the environment variable; a missing one is an error. `$${NAME}` stays as
  `${NAME}`.
* Relative paths are relative to the job file.
* `--set generation.max_tokens=32` replaces any key from the command line, with a YAML value, and may be repeated.
* `null` for a sampling key means: the model's `generation_config.json` decides, and where that is silent the neutral
  value. A column named in `generation.per_row` comes before both, unless it is null in a row.
* An output belongs to one input, prompt, generation section and model. A job that differs there is refused in the same
  output. The `engine` and `run` sections may change from one run to the next.
"""

COMMANDS_INTRO = """# Commands

Every command with its options; this page is made from the program, and `batchgen COMMAND --help` says the same. An
error is one line on stderr that names the place and the cure; `--debug`, before or after the command, shows the
traceback. Exit codes are described in [formats and outcomes](formats.md#exit-codes). `batchgen --version` and
`batchgen --help` (`-h`) do what they say.
"""


def pages() -> dict[str, str]:
    """File name -> content of the generated pages."""
    return {"job-file.md": _page(job_file()), "commands.md": _page(commands())}


def _page(parts: Iterator[str]) -> str:
    return "\n".join([NOTE, "", *parts]).rstrip() + "\n"


def job_file() -> Iterator[str]:
    """The sections of the job file, each a table of its keys."""
    yield JOB_FILE_INTRO
    yield from JobFile(Job.model_json_schema()).sections()


class JobFile:
    """The keys of a schema as tables. What a key may hold is told in place, but for what has a section of its own."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._sections = {
            value["$ref"]: name for name, value in schema["properties"].items() if "$ref" in value
        }  # of the definitions

    def sections(self) -> Iterator[str]:
        for name, value in self._schema["properties"].items():
            yield f"## {name}\n"
            if "$ref" not in value:
                yield from self._keys(name, {"properties": {name: value}})
                continue
            section = self._resolved(value)
            yield f"{section['description']}{self._note(name)}\n"
            yield from self._keys(name, section)

    def _note(self, name: str) -> str:
        if name == "prompt":
            return " Required, unless something else brings the prompts, as the lines of an OpenAI batch file do."
        return " Required." if name in self._schema["required"] else ""

    def _keys(self, name: str, section: dict[str, Any]) -> Iterator[str]:
        """The table of a section, then those of the mappings that its keys may hold."""
        yield "| key | values | default | meaning |\n|---|---|---|---|"
        for key, value in section["properties"].items():
            default = "required" if key in section.get("required", ()) else _default_of(value)
            yield f"| `{key}` | {self._kind(value)} | {default} | {_cell(value.get('description', ''))} |"
        yield ""
        for key, value in section["properties"].items():
            place = key if name == key else f"{name}.{key}"
            for inner in self._mappings(value):
                yield f"`{place}` may hold a mapping with these keys. {inner['description']}\n"
                yield from self._keys(place, inner)

    def _mappings(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """The mappings of fixed keys that a value may be or hold, and that are told nowhere else."""
        inner = [*value.get("anyOf", ()), *([value["items"]] if isinstance(value.get("items"), dict) else [])]
        own = [self._resolved(value)] if "$ref" in value and value["$ref"] not in self._sections else []
        return own + [found for part in inner for found in self._mappings(part)]

    def _resolved(self, value: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self._schema["$defs"][value["$ref"].rpartition("/")[2]]
        return found

    def _kind(self, value: dict[str, Any]) -> str:
        """The legal values in words."""
        if "anyOf" in value:
            kinds = [self._kind(part) for part in value["anyOf"]]
            return " or ".join(dict.fromkeys([kinds[0] + _range(value), *kinds[1:]]))
        if "$ref" in value:
            section = self._sections.get(value["$ref"])
            return f"mapping like [`{section}`](#{section})" if section else "mapping (below)"
        if "enum" in value:
            return " ".join(f"`{_written(item)}`" for item in value["enum"])
        if "const" in value:
            return f"`{value['const']}`"
        if value["type"] == "array":
            return f"list of {_plural(self._kind(value['items']))}"
        if value["type"] == "object" and "propertyNames" in value:
            keys, values = self._kind(value["propertyNames"]), self._kind(value["additionalProperties"])
            return f"mapping of {keys} to {values}"
        return _WORDS[value["type"]] + _range(value)


def _default_of(value: dict[str, Any]) -> str:
    """Nothing for a whole section: each of its keys has one."""
    return "" if "$ref" in value else f"`{_written(value.get('default'))}`"


def _plural(kind: str) -> str:
    return kind.replace("mapping", "mappings") if "mapping" in kind else f"{kind}s"


_WORDS = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "`true` `false`",
    "null": "`null`",
    "object": "mapping",
}


def _range(value: dict[str, Any]) -> str:
    low, high = value.get("minimum"), value.get("maximum")
    if "exclusiveMinimum" in value:
        return f" above {value['exclusiveMinimum']:g}" + ("" if high is None else f" up to {high:g}")
    if low is None:
        return ""
    return f" from {low:g}" if high is None or high > _LARGE else f" {low:g} to {high:g}"


def _written(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def commands() -> Iterator[str]:
    """Every command with its help text and its options."""
    yield COMMANDS_INTRO
    for name, command in cli.commands.items():
        arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
        yield f"## batchgen {' '.join([name, *(argument.make_metavar(_context(command)) for argument in arguments)])}\n"
        yield f"{_help(command.help or '')}\n"
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        yield from _options(options, _context(command)) if options else ()


def _context(command: click.Command) -> click.Context:
    return click.Context(command)


def _help(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", text.replace("\b", "").strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _options(options: list[click.Option], context: click.Context) -> Iterator[str]:
    yield "| option | default | meaning |\n|---|---|---|"
    for option in options:
        names = ", ".join(option.opts)
        meaning = _cell(_NOTED.sub("", option.help or ""))
        yield f"| `{names}{_value(option, context)}` | {_default(option)} | {meaning} |"
    yield ""


_NOTED = re.compile(r"\s*\[default: (.*?)\]")


def _value(option: click.Option, context: click.Context) -> str:
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return f" {'/'.join(option.type.choices)}"
    return f" {option.make_metavar(context).replace('INTEGER RANGE', 'N')}"


def _default(option: click.Option) -> str:
    """As the program has it, or as its help text tells it where it depends on other things."""
    if option.required:
        return "required"
    if isinstance(option.default, (str, int)) and not option.is_flag:
        return f"`{option.default}`"
    noted = _NOTED.search(option.help or "")
    return noted[1] if noted else ""


if __name__ == "__main__":
    for file_name, content in pages().items():
        (FOLDER / file_name).write_text(content, encoding="utf-8")
