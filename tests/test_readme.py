"""What the README claims exists: its job file is valid, its commands and options are there, its paths too."""

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from batchgen.jobs.cli import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_its_job_file_is_valid(tmp_path: Path) -> None:
    from batchgen.jobs import Job

    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "job.yaml"
    path.write_text(block, encoding="utf-8")
    job = Job.load(path)
    assert job.name == yaml.safe_load(block)["name"]


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`batchgen ([a-z]+)", README + DOCS))))
def test_its_commands_exist(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0, result.output


def test_every_command_is_in_it() -> None:
    assert {f"`batchgen {name}" in README for name in cli.commands} == {True}


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`(?:batchgen [^`\n]*)?(--[a-z-]+)", README + DOCS))))
def test_its_options_exist(option: str) -> None:
    known = {
        name for command in (cli, *cli.commands.values()) for parameter in command.params for name in parameter.opts
    }
    assert option in known | {"--help"}


@pytest.mark.parametrize(
    "path",
    sorted(
        set(
            re.findall(
                r"`?((?:examples|tests|engine|kernels|jobs|pipeline)/[\w./-]+\w)",
                README + DOCS + CONTRIBUTING.replace("tests/__init__.py", ""),
            )
        )
    ),
)
def test_its_paths_exist(path: str) -> None:
    assert (ROOT / path.replace("NAME", "llama").replace("OP", "swiglu")).exists()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_its_snippets_import_what_exists(block: str) -> None:
    lines = [line.split("#")[0].strip() for line in block.splitlines() if line.startswith("from batchgen")]
    exec("\n".join(lines), {})
