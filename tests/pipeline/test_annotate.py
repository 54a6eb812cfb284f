"""`annotate`: the data set that went in, in its order and with its features, and the answers beside it."""

import pickle
import re
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from stand_ins import CHAT_TEMPLATE, ByteTokenizer, EchoEngine

from batchgen.pipeline import annotate

FEATURES = Features({"doc": Value("string"), "label": ClassLabel(names=["no", "yes"]), "tags": List(Value("string"))})


def dataset(num_rows: int = 5) -> Dataset:
    rows = {
        "doc": [f"doc{number:03d}" for number in range(num_rows)],
        "label": [number % 2 for number in range(num_rows)],
        "tags": [["a"] * (number % 3) for number in range(num_rows)],
    }
    return Dataset.from_dict(rows, FEATURES)


def run(data: Any, engine: EchoEngine | None = None, **more: Any) -> Dataset:
    more.setdefault("prompt", {"text": "{{ doc }}"})
    more.setdefault("generation", {"max_tokens": 5})
    return annotate(data, model=engine or EchoEngine(), **more)


def test_rows_order_and_features_are_kept() -> None:
    data = dataset(2500)
    labelled = run(data)
    assert labelled.column_names == ["doc", "label", "tags", "completion", "finish_reason", "usage", "error"]
    assert {name: labelled.features[name] for name in FEATURES} == FEATURES
    assert labelled["doc"][:] == data["doc"][:]
    assert labelled["completion"][:] == [text[-4:] for text in data["doc"]]
    assert labelled[7]["usage"] == {"prompt_tokens": 7, "cached_tokens": 0, "completion_tokens": 5}


def test_a_selection_is_annotated_as_it_looks() -> None:
    data = dataset(100).shuffle(seed=1).select(range(10, 40))
    labelled = run(data)
    assert labelled["doc"][:] == data["doc"][:]
    assert labelled["completion"][:] == [text[-4:] for text in data["doc"]]


def test_a_stream_becomes_a_data_set() -> None:
    labelled = run(dataset(30).to_iterable_dataset())
    assert isinstance(labelled, Dataset)
    assert labelled.features["label"] == FEATURES["label"]
    assert labelled["completion"][:] == [f"c{number:03d}" for number in range(30)]


def test_failed_rows_stay_and_skipped_rows_go() -> None:
    data = Dataset.from_dict({"doc": ["aaaa", None, "cccc"]})
    failed = run(data)
    assert failed["completion"][:] == ["aaaa", None, "cccc"]
    assert failed[1]["error"]["code"] == "null_value"
    skipped = run(data, prompt={"text": "{{ doc }}", "on_null": "skip"})
    assert skipped["doc"][:] == skipped["completion"][:] == ["aaaa", "cccc"]
    nothing = run(data.select([1]), prompt={"text": "{{ doc }}", "on_null": "skip"})
    assert nothing.num_rows == 0
    assert nothing.column_names == ["doc", "completion", "finish_reason", "usage", "error"]


def test_an_empty_data_set_gains_the_columns() -> None:
    labelled = run(dataset(3).select([]))
    assert (labelled.num_rows, "completion" in labelled.column_names) == (0, True)


def test_settings_are_those_of_a_job() -> None:
    engine = EchoEngine(ByteTokenizer(CHAT_TEMPLATE))
    labelled = run(dataset(2), engine, prompt={"text": "{{ doc }}"}, generation={"n": 2}, prefix="m_")
    assert labelled[0]["m_completion"] == ["ant>", "ant>"]
    with pytest.raises(ValueError, match="block_size: goes with a model's path"):
        run(dataset(1), block_size=8)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"generation": {"temprature": 1}}, "generation.temprature: unknown key, did you mean temperature?"),
        ({"generation": {"regex": "(a|b"}}, "generation.regex: "),
        ({"generation": {"grammar": "start: nothing"}}, "generation.grammar: "),
        ({"generation": {"json_schema": {"type": "strange"}}}, "generation.json_schema: "),
        ({"generation": {"temperature": "hot"}}, "generation.temperature: must be a number"),
        ({"prompt": {}}, "prompt: exactly one of"),
    ],
    ids=str,
)
def test_a_bad_setting_is_one_line_with_its_place(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        run(dataset(1), **sections)
    assert "\n" not in str(caught.value)


def test_a_taken_column_name_is_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match="has a column 'error' already; set prefix"):
        run(dataset(1).add_column("error", ["x"]))


def test_a_formatted_data_set_is_read_all_the_same() -> None:
    labelled = run(dataset(3).with_format("numpy"))
    assert labelled["completion"][:] == ["c000", "c001", "c002"]


def test_the_result_of_a_stream_outlives_the_call() -> None:
    labelled = run(dataset(30).to_iterable_dataset())
    again = pickle.loads(pickle.dumps(labelled))
    assert again["doc"][:] == [f"doc{number:03d}" for number in range(30)]


def test_an_answer_as_long_as_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens: 100 leaves no room for a prompt in the context of 100"):
        run(dataset(1), EchoEngine(context_length=100), generation={"max_tokens": 100})
