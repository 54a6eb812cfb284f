"""Features that pass through unchanged: class labels, images, sounds, arrays and all the others, by every way."""

from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features
from fake_models import FakeModels
from features import FEATURES, OTHERS, TRANSLATIONS, featured, stored
from job_files import make_job
from stand_ins import EchoEngine

from batchgen.jobs import run
from batchgen.pipeline import annotate


def annotated(data: Any) -> Dataset:
    return annotate(data, model=EchoEngine(), prompt={"text": "{{ word }}"}, generation={"max_tokens": 5})


@pytest.mark.parametrize("streamed", [False, True])
def test_annotate_leaves_every_feature_and_value_alone(streamed: bool) -> None:
    data = featured()
    labelled = annotated(data.to_iterable_dataset() if streamed else data)
    for name, feature in FEATURES.items():
        assert labelled.features[name] == feature, name
        assert stored(labelled).column(name).equals(stored(data).column(name)), name
    assert labelled.select_columns(["completion"])["completion"][:] == [f"rd {at}" for at in range(5)]


def test_annotate_takes_a_stream_that_was_filtered(tmp_path: Path) -> None:
    data = featured(6)
    stream = data.to_iterable_dataset().filter(lambda word: word != "word 2", input_columns=["word"])
    with pytest.raises(ImportError, match="Pillow"):  # so nothing here decodes by chance
        next(iter(stream))
    labelled = annotated(data.to_iterable_dataset().decode(False).filter(lambda row: row["word"] != "word 2"))
    kept = data.select([0, 1, 3, 4, 5])
    for name in FEATURES:
        assert stored(labelled).column(name).equals(stored(kept).column(name)), name


@pytest.mark.parametrize("form", ["arrow", "parquet"])
@pytest.mark.parametrize("names", [OTHERS, TRANSLATIONS], ids=["others", "translations"])
def test_a_job_over_a_saved_data_set_carries_its_features(tmp_path: Path, form: str, names: set[str]) -> None:
    data = featured(20, names)
    data.save_to_disk(str(tmp_path / "in"))
    run(make_job(tmp_path, input__path="in", output__format=form), models=FakeModels())
    if form == "arrow":
        done = datasets.load_from_disk(str(tmp_path / "out"))
    else:
        files = sorted((tmp_path / "out" / "data").iterdir())
        assert Features.from_arrow_schema(pq.read_schema(files[0])).keys() == {*names, *RESULTS}
        done = Dataset.from_parquet([str(path) for path in files], cache_dir=str(tmp_path / "cache"))
    assert done.column_names == [*data.column_names, *RESULTS]
    for name, feature in data.features.items():
        assert done.features[name] == feature, name
        assert stored(done).column(name).equals(stored(data).column(name)), name


def test_a_split_of_a_saved_dictionary_of_data_sets(tmp_path: Path) -> None:
    DatasetDict({"train": featured(2, OTHERS), "dev": featured(3, OTHERS)}).save_to_disk(str(tmp_path / "in"))
    run(make_job(tmp_path, input__path="in", input__split="dev"), models=FakeModels())
    done = datasets.load_from_disk(str(tmp_path / "out"))
    assert done.num_rows == 3
    assert {name: done.features[name] for name in OTHERS} == {name: FEATURES[name] for name in OTHERS}


RESULTS = ["completion", "finish_reason", "usage", "error"]
