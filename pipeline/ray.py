"""Answers for `ray.data.Dataset.map_batches`: a callable class that keeps one loaded model per worker.

Knows batches as Arrow tables; needs no Ray itself, and the engine only when a worker makes it.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.engine.request import Completion, Request

from .annotation import LoadedEngine, annotate

_SKIPPING = ("on_null", "on_too_long")


class Annotate:
    """One row in, one row out, the result columns of a job beside the columns of the batch.

        ds.map_batches(
            Annotate, batch_format="pyarrow", batch_size=1024, concurrency=2,
            fn_constructor_kwargs={"model": "...", "prompt": {"text": "{{ doc }}"}},
        )

    The arguments are those of `annotate`. Large batches share more prefixes. A row's noise depends on the seed and on
    the row's own values, so the size and order of batches change nothing, and equal rows draw the same; name an
    integer column as `position` to tell them apart.
    """

    def __init__(
        self,
        model: str | LoadedEngine,
        prompt: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        prefix: str = "",
        position: str | None = None,
        **engine_options: Any,
    ) -> None:
        """Loads the model. Raises ValueError for a policy that skips rows: a batch must keep its length."""
        for name in _SKIPPING:
            if prompt.get(name) == "skip":
                raise ValueError(f"prompt.{name}: skip would drop rows of a batch; use error")
        self._engine = _load(model, engine_options)
        self._options: dict[str, Any] = {"prompt": dict(prompt), "generation": dict(generation or {}), "prefix": prefix}
        self._position = position

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The batch with its answers. Raises ValueError for a bad setting or a column that is taken."""
        from datasets import Dataset

        engine = _Keyed(self._engine, self._keys(batch))
        answered: pa.Table = annotate(Dataset(batch), model=engine, **self._options).with_format("arrow")[:]
        return answered.replace_schema_metadata(batch.schema.metadata)

    def _keys(self, batch: pa.Table) -> NDArray[np.int64]:
        """What stands for each row's position in its noise, 0 or more."""
        if self._position is not None:
            return np.asarray(batch.column(self._position).to_numpy(), np.int64)
        return np.fromiter((_digest(row) for row in batch.to_pylist()), np.int64, batch.num_rows)


def _digest(row: Mapping[str, Any]) -> int:
    text = repr(sorted(row.items())).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def _load(model: str | LoadedEngine, options: Mapping[str, Any]) -> LoadedEngine:
    if not isinstance(model, str):
        return model
    from batchgen.engine import Engine

    engine: LoadedEngine = Engine.load(model, **options)
    return engine


@dataclass(frozen=True)
class _Keyed:
    """The engine, with `keys[i]` in place of position i wherever noise is drawn."""

    engine: LoadedEngine
    keys: NDArray[np.int64]

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.engine.eos_ids

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self.engine.generation_config

    def interrupt(self) -> None:
        self.engine.interrupt()

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        keyed = (replace(request, key=int(self.keys[request.key])) for request in requests)
        for completion in self.engine.run(keyed):
            yield replace(completion, key=completion.tag.position)
