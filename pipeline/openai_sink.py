"""Output of a batch API's kind: answers in `output.jsonl`, failures in `errors.jsonl`, both in the order of the rows.

The result columns also go, as they are, into a sidecar from which a later run takes what stands already. Knows the
files; the form of a line is in openai_answer.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from .jsonout import encode_row
from .openai_answer import AnswerForm, answer_line, is_success
from .openai_request import CHAT_URL
from .place import AnyPath, create_file
from .result import RESULT_COLUMNS
from .storage import publish

ANSWERS, FAILURES, RESULTS = "output.jsonl", "errors.jsonl", "__batchgen__/results.arrow"
POSITION = "position"
_RESULT_NAMES = (*RESULT_COLUMNS, "logprobs")
_PORTION = 1024  # rows turned into Python values at once


class OpenaiSink:
    """`schema`: position, the column of ids and that of endpoints if there are any, then the result columns.

    `id_column` identifies rows (None: the position does); `url_column` tells chats from texts (None: the form does).
    """

    single_file = True
    beside: tuple[str, ...] = (FAILURES, RESULTS)

    def __init__(self, schema: pa.Schema, form: AnswerForm, id_column: str | None, url_column: str | None) -> None:
        self.schema = schema
        self._form = form
        self._id_column = id_column
        self._url_column = url_column
        self._results = pa.schema(list(schema)[-len(_RESULT_NAMES) :])

    def shard_name(self, index: int, total: int) -> str:
        return ANSWERS

    def write(self, path: AnyPath, batches: Iterable[pa.RecordBatch]) -> None:
        """Writes the answers to `path`, and beside it what `finish` moves."""
        with (
            path.open("wb") as answers,
            path.with_name(FAILURES).open("wb") as failures,
            create_file(path.with_name(PurePosixPath(RESULTS).name)) as file,
            pa.ipc.new_stream(file, self._results) as results,
        ):
            for batch in batches:
                results.write_batch(self._result_columns(batch))
                for line in self._lines(batch):
                    (answers if is_success(line) else failures).write(encode_row(line).encode("utf-8") + b"\n")

    def finish(self, directory: AnyPath, shards: Sequence[str], aside: AnyPath) -> None:
        for name in self.beside:
            publish(aside / PurePosixPath(name).name, directory / name)

    def _result_columns(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(batch.columns[-len(_RESULT_NAMES) :], schema=self._results)

    def _lines(self, batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
        for start in range(0, batch.num_rows, _PORTION):
            part = batch.slice(start, _PORTION)
            ids, urls = (self._column(part, name) for name in (self._id_column, self._url_column))
            rows = pa.RecordBatch.from_arrays(
                part.columns[-len(_RESULT_NAMES) :], names=list(_RESULT_NAMES)
            ).to_pylist()
            for offset, (position, row) in enumerate(zip(part.column(0).to_pylist(), rows, strict=True)):
                custom_id = _as_id(ids[offset]) if ids is not None else f"row-{position}"
                chat = urls[offset] == CHAT_URL if urls is not None else self._form.chat
                yield answer_line(self._form, position, custom_id, chat, row)

    def _column(self, batch: pa.RecordBatch, name: str | None) -> list[Any] | None:
        return None if name is None else batch.column(batch.schema.names.index(name, 1)).to_pylist()


def _as_id(value: Any) -> str | None:
    return None if value is None else str(value)
