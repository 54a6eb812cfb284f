"""OpenAI batch files for tests, and the lines that came out of a job over one."""

import json
from pathlib import Path
from typing import Any


def chat_line(custom_id: str, content: Any = "Say hi", **body: Any) -> dict[str, Any]:
    body = {"model": "gpt", "messages": [{"role": "user", "content": content}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def text_line(custom_id: str, prompt: Any = "Once upon", **body: Any) -> dict[str, Any]:
    body = {"model": "gpt", "prompt": prompt, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write_lines(folder: Path, lines: list[Any], name: str = "batch.jsonl", mode: str = "w") -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    with (folder / name).open(mode, encoding="utf-8") as file:
        file.writelines(text + "\n" for text in texts)


def read_lines(output: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of output.jsonl and of errors.jsonl."""
    answers, failures = (
        [json.loads(line) for line in (output / name).read_text(encoding="utf-8").splitlines()]
        for name in ("output.jsonl", "errors.jsonl")
    )
    return answers, failures
