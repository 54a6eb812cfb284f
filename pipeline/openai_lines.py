"""OpenAI batch files as rows: one request per line, its body kept as JSON text.

Knows the form of a line; what a request asks for is read in openai_request.py.
"""

import json
from typing import Any

import pyarrow as pa

from .config import BODY, CUSTOM_ID, METHOD, REQUEST_COLUMNS, URL
from .jsonl import JsonlReader, Parsed, Refused, open_jsonl, parse
from .lines import Line
from .rows import InputFile

REQUEST_SCHEMA = pa.schema([(name, pa.string()) for name in REQUEST_COLUMNS])


def open_requests(file: InputFile, num_rows: int | None = None) -> JsonlReader:
    """Scans the file, or its first `num_rows` requests; the columns are always those of REQUEST_SCHEMA.

    Raises InputError when it cannot be read at all.
    """
    reader = open_jsonl(file, num_rows, settled=REQUEST_SCHEMA, parse_line=parse_request)
    reader.schema = REQUEST_SCHEMA
    return reader


def parse_request(line: Line) -> Parsed:
    """The columns of a line, or why it is no request: what has no `custom_id` cannot be answered by it.

    A method, url or body of another type than it must have is null, which the request's own error names.
    """
    found = parse(line)
    if isinstance(found, str):
        return found
    if not isinstance(found.get(CUSTOM_ID), str):
        return "custom_id is missing or no string"
    unknown = [key for key, value in found.items() if key not in REQUEST_SCHEMA.names and value is not None]
    if unknown:
        return Refused(_columns(found), f"unknown key {unknown[0]!r}, a request has custom_id, method, url and body")
    return _columns(found)


def _columns(found: dict[str, Any]) -> dict[str, Any]:
    body = found.get(BODY)
    texts = {name: found.get(name) if isinstance(found.get(name), str) else None for name in (CUSTOM_ID, METHOD, URL)}
    return {**texts, BODY: json.dumps(body, ensure_ascii=False) if isinstance(body, dict) else None}
