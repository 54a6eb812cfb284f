"""Fenced blocks of the documentation, and a folder in which their commands find the files they speak of.

Knows Markdown fences, shell words and the small model's stand-in; what must hold of a page is said in the tests.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from gguf import GGMLQuantizationType as Kind
from tiny import tiny_model
from tiny_gguf import write_gguf

ROOT = Path(__file__).resolve().parents[2]
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "examples/*/README.md")
    for path in ROOT.glob(pattern)
)
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_EXPECTED = re.compile(r"\s+# exit code (\d+)$")
_TEXTS = ("Reads one line.", "Reads all lines.", "Closes the file.", "Opens a file.", "Counts words.", "Sorts a list.")

# What stands in a page -> what is run instead, where the real thing needs a network or a long time.
SUBSTITUTES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": MODEL,
    "--tokens 4096": "--tokens 64",
    "s3://bucket": "memory://bucket",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text, without the indentation of the fence."""

    page: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command of a shell block, the exit code that the page promises, and the output that it shows."""

    line: str
    exit_code: int = 0
    output: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)

    @property
    def needs_shell(self) -> bool:
        return any(word in self.line for word in ("|", ">", "&&", ";", "$("))


def blocks_of(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for indent, language, text in _FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        yield Block(page, language, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE))


def commands_of(block: Block) -> list[Command]:
    """The commands of a `sh` block, or those behind `$ ` of a `console` block."""
    if block.language not in ("sh", "console"):
        return []
    found: list[Command] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "sh" or line.startswith("$ "):
            written = line.removeprefix("$ ") if block.language == "console" else line
            expected = _EXPECTED.search(written)
            bare = re.sub(r"(^|\s+)#.*$", "", written).strip()
            found += [Command(bare, int(expected[1]) if expected else 0)] if bare else []
        elif found:
            found[-1] = Command(found[-1].line, found[-1].exit_code, (*found[-1].output, line))
    return found


def substituted(text: str) -> str:
    for written, run in SUBSTITUTES.items():
        text = text.replace(written, run)
    return text


def make_workspace(folder: Path) -> None:
    """The repository's examples, a tiny model under the small one's name, and rows in every input format."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("out"))
    (folder / "models").mkdir()
    write_gguf(
        tiny_model("smollm2", folder / "tiny", max_position_embeddings=8192), folder / MODEL, lambda name: Kind.F32
    )
    rows = [{"name": f"name{at}", "doc": text} for at, text in enumerate(_TEXTS)]
    (folder / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "data" / "docs.parquet")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "rows.csv").write_text("name,doc\n" + "".join(f"{row['name']},{row['doc']}\n" for row in rows))
    shutil.copy(ROOT / "examples" / "openai-batch" / "input.jsonl", folder / "requests.jsonl")
    write_job(folder, README_JOB)


def write_job(folder: Path, text: str) -> None:
    (folder / "job.yaml").write_text(substituted(text), encoding="utf-8")


(README_JOB,) = (block.text for block in blocks_of("README.md") if block.language == "yaml")


def is_whole_job(text: str) -> bool:
    """Whether a YAML block is a job and not a part of one."""
    document = yaml.safe_load(text)
    return isinstance(document, dict) and {"model", "input", "output"} <= document.keys()


def merged(text: str) -> str:
    """A part of a job file over the README's job; a section that says what the prompt is replaces the whole section."""
    document, part = yaml.safe_load(README_JOB), yaml.safe_load(text)
    for name, section in part.items():
        whole = name == "prompt" and any("text" in key or "messages" in key for key in section)
        document[name] = section if whole or not isinstance(section, dict) else {**document.get(name, {}), **section}
    if document["input"].get("format") == "openai":
        del document["prompt"]
    return yaml.safe_dump(document, sort_keys=False)
