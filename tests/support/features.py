"""A data set with every kind of feature that rows can carry along, written without a codec for any of them."""

import datetime
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import (
    Array2D,
    Audio,
    ClassLabel,
    Dataset,
    Features,
    Image,
    LargeList,
    List,
    Translation,
    TranslationVariableLanguages,
    Value,
)

FEATURES = Features(
    {
        "word": Value("string"),
        "label": ClassLabel(names=["no", "yes"]),
        "tags": List(Value("string")),
        "pair": List(Value("int32"), length=2),
        "labels": List(ClassLabel(names=["a", "b", "c"])),
        "long": LargeList(Value("int8")),
        "turns": List({"role": Value("string"), "score": Value("float32")}),
        "nested": {"label": ClassLabel(names=["x"]), "deep": {"flag": Value("bool")}},
        "image": Image(),
        "images": List(Image(mode="RGB")),
        "sound": Audio(sampling_rate=16_000),
        "translation": Translation(languages=["de", "en"]),
        "translations": TranslationVariableLanguages(languages=["de", "en"]),
        "matrix": Array2D(shape=(2, 3), dtype="float32"),
        "half": Value("float16"),
        "small": Value("uint8"),
        "large": Value("large_string"),
        "bytes": Value("binary"),
        "day": Value("date32"),
        "moment": Value("timestamp[us, tz=UTC]"),
        "length": Value("duration[s]"),
        "price": Value("decimal128(9, 2)"),
    }
)


def row(number: int) -> dict[str, Any]:
    return {
        "word": f"word {number}",
        "label": number % 2,
        "tags": ["a"] * (number % 3),
        "pair": [number, -1],
        "labels": [2, 0],
        "long": [1, None],
        "turns": [{"role": "user", "score": 0.5}],
        "nested": {"label": 0, "deep": {"flag": True}},
        "image": {"bytes": b"\x89PNG that nobody decodes", "path": None},
        "images": [{"bytes": b"\x89PNG", "path": "a.png"}],
        "sound": {"bytes": b"RIFF", "path": "a.wav"},
        "translation": {"de": "Haus", "en": "house"},
        "translations": {"language": ["de", "en"], "translation": ["Haus", "house"]},
        "matrix": [[1, 2, 3], [4, 5, number]],
        "half": np.float16(0.5),
        "small": 255,
        "large": "x" * 50,
        "bytes": b"\x00\xff",
        "day": datetime.date(2026, 11, 29),
        "moment": datetime.datetime(2026, 11, 29, 18, 37, tzinfo=datetime.UTC),
        "length": datetime.timedelta(seconds=90),
        "price": Decimal("9.99"),
    }


TRANSLATIONS = {"word", "translation", "translations"}
OTHERS = FEATURES.keys() - TRANSLATIONS | {"word"}  # `datasets` cannot save images beside translations


def featured(num_rows: int = 5, names: Iterable[str] = FEATURES) -> Dataset:
    """The rows as they are stored: no feature encodes or decodes anything."""
    chosen = set(names)
    schema = Features({name: feature for name, feature in FEATURES.items() if name in chosen}).arrow_schema
    rows = [row(number) for number in range(num_rows)]
    columns = [_column([values[field.name] for values in rows], field.type) for field in schema]
    return Dataset(pa.Table.from_arrays(columns, schema=schema))


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))
    return pa.array(values, kind)


def stored(dataset: Dataset) -> pa.Table:
    """What stands in those columns of `FEATURES` that there are, undecoded."""
    names = [name for name in FEATURES if name in dataset.column_names]
    return dataset.with_format("arrow").select_columns(names)[:].combine_chunks()
