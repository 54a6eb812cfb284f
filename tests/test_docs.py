"""The documentation is true: its commands run, its job files are valid, its references are those of the program."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
from datasets import Dataset
from doc_blocks import (
    PAGES,
    ROOT,
    Block,
    Command,
    blocks_of,
    commands_of,
    is_whole_job,
    make_workspace,
    merged,
    substituted,
    write_job,
)

from batchgen.jobs import Job
from batchgen.jobs.cli import cli, invoke
from batchgen.jobs.errors import JobError, OutputBusyError, UsageError
from batchgen.jobs.stop import EXIT_CODES
from batchgen.pipeline.parsed import AnswerParser
from batchgen.pipeline.result import further_columns, result_schema

# Commands that are not run: the words they begin with, or what they hold.
FOREIGN = {"systemctl", "loginctl", "journalctl", ".venv/bin/pytest", "git"}
SMALL = {"cp", "cat"}
ELSEWHERE = {"python3 docs/make_reference.py"}  # another test here makes these pages
ONLY_PARSED = ("hf://", "batchgen push", "--on ray")
DOCS = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES if page.startswith("docs/"))
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    make_workspace(folder)
    return folder


@pytest.fixture
def workspace(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    subprocess.run(["cp", "-r", f"{template}/.", str(tmp_path)], check=True)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(commands_of, blocks_of(page)))])
def test_the_commands_of_a_page_run(page: str, workspace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for block in blocks_of(page):
        if block.language == "yaml" and is_whole_job(block.text):
            write_job(workspace, block.text)
        for command in commands_of(block):
            _run(command, capfd)


def _run(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    first = command.words[0]
    if first in FOREIGN or command.line in ELSEWHERE:
        return
    if first in _CHECKS:
        _CHECKS[first](command.words[1:])
    elif first in SMALL or command.needs_shell:
        _run_in_shell(command)
    elif first == "batchgen" and any(text in command.line for text in ONLY_PARSED):
        _parse(command.words[1:])
    else:
        assert first == "batchgen", f"{command.line}: is neither run nor in a table of what is not"
        exit_code = invoke(shlex.split(substituted(command.line))[1:])
        said = capfd.readouterr()
        assert exit_code == command.exit_code, f"{command.line}: {said.err}"
        _shows(command, said.out + said.err)


def _shows(command: Command, said: str) -> None:
    """The page's output has the words of the real one; numbers are the machine's and the model's."""
    said = " ".join(said.split())
    for words in re.findall(r"[A-Za-z_]+(?: [A-Za-z_]+)*", " \n ".join(command.output)):
        assert words in said, f"{command.line}: {words!r} is not in its output\n{said}"


def _run_in_shell(command: Command) -> None:
    done = subprocess.run(["bash", "-c", substituted(command.line)], capture_output=True, text=True)
    assert done.returncode == command.exit_code, f"{command.line}: {done.stderr}"
    _shows(command, done.stdout + done.stderr)


def _parse(words: list[str]) -> None:
    """Options and arguments are known to the command."""
    name, *rest = words
    cli.commands[name].make_context(name, rest)


def _is_make_target(words: list[str]) -> None:
    for target in words:
        subprocess.run(["make", "-C", str(ROOT), "--dry-run", target], check=True, capture_output=True)


def _is_installable(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {extra for word in words for found in re.findall(r"\[(.*)\]", word) for extra in found.split(",")}
    assert words[0] == "install"
    assert wanted <= extras.keys()
    assert all((ROOT / word).exists() for option, word in pairwise(words) if option == "-c")


_CHECKS = {"make": _is_make_target, "pip": _is_installable}


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda block: block.page)
def test_its_job_files_are_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"\$\{(\w+)\}", block.text):
        monkeypatch.setenv(name, "value")
    path = tmp_path / "job.yaml"
    path.write_text(block.text if is_whole_job(block.text) else merged(block.text), encoding="utf-8")
    Job.load(path)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]
)
def test_its_python_runs(page: str, workspace: Path) -> None:
    assert invoke(["run", "job.yaml", "--set", "generation.max_tokens=32", "--quiet"]) == 0
    assert invoke(["run", "examples/annotate-docs/job.yaml", "--limit", "2", "--quiet"]) == 0
    names: dict[str, Any] = {"ds": Dataset.from_list([{"doc": "Reads one line."}])}
    for block in blocks_of(page):
        if block.language == "python":
            exec(compile(substituted(block.text), page, "exec"), names)


def test_the_references_are_those_of_the_program() -> None:
    script = ROOT / "docs" / "make_reference.py"
    spec = importlib.util.spec_from_file_location("make_reference", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, content in module.pages().items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == content, "run docs/make_reference.py"


SPANS = sorted({span for page in PAGES for span in re.findall(r"`(batchgen [a-z][^`]*)`", (ROOT / page).read_text())})


@pytest.mark.parametrize("span", SPANS)
def test_commands_within_sentences_are_known(span: str) -> None:
    with suppress(click.MissingParameter):  # a sentence may leave out what it does not speak of
        _parse(shlex.split(span)[1:])


def _table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading, without backticks."""
    behind = (ROOT / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in behind.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def test_every_error_code_is_explained() -> None:
    sources = [
        path.read_text(encoding="utf-8") for folder in ("engine", "pipeline") for path in (ROOT / folder).rglob("*.py")
    ]
    known = {code for text in sources for code in re.findall(r'\b(?:RowError|_?fault|_refusal)\(\s*"(\w+)"', text)}
    staged = {pair for text in sources for pair in re.findall(r'\bRowError\(\s*"(\w+)",\s*"(\w+)"', text)}
    table = _table("docs/formats.md", "Errors of a row")
    assert {row[0] for row in table} == known
    assert staged <= {(row[0], row[1]) for row in table}


def test_every_exit_code_is_explained() -> None:
    errors = {JobError.exit_code, UsageError.exit_code, OutputBusyError.exit_code}
    stops = set(EXIT_CODES.values())
    shown = {int(code) for row in _table("docs/formats.md", "Exit codes") for code in row[0].split(",")}
    assert shown == errors | stops | {0, 3}


def test_every_result_column_is_explained() -> None:
    more = further_columns(1, AnswerParser({"type": "object", "properties": {}}), choice_probs=True, attempts=True)
    names = result_schema(1, True, more=more).names
    assert [row[0] for row in _table("docs/formats.md", "Result columns")] == names


def _options() -> Iterator[str]:
    for command in (cli, *cli.commands.values()):
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield max(parameter.opts, key=len)


@pytest.mark.parametrize("option", sorted(set(_options())))
def test_every_option_is_described(option: str) -> None:
    assert re.search(rf"`[^`]*{option}\b", DOCS)


def _keys(schema: dict[str, Any]) -> set[str]:
    return set(schema["properties"]).union(*(part["properties"] for part in schema["$defs"].values()))


@pytest.mark.parametrize("key", sorted(_keys(Job.model_json_schema())))
def test_every_key_is_described(key: str) -> None:
    assert re.search(rf"`{key}`|^## {key}$", DOCS, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8")):
        assert target.startswith("http") or ((ROOT / page).parent / target).exists(), target


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "docs" / "README.md").read_text(
        encoding="utf-8"
    )
    missing = [page for page in PAGES if page.startswith("docs/") and Path(page).name not in readme]
    assert missing == []
