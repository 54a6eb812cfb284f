import pytest
from pydantic import ValidationError

from batchgen.pipeline.config import InputSettings, OutputSettings, PromptSettings


def message(section: type, **values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        section.model_validate(values)
    return "; ".join(error["msg"] for error in caught.value.errors())


def test_defaults_are_those_of_the_contract() -> None:
    read = InputSettings(path="a.parquet")
    assert (read.format, read.config, read.split, read.id, read.limit) == ("auto", None, "train", None, None)
    prompt = PromptSettings(text="x")
    assert (prompt.chat, prompt.on_null, prompt.on_too_long) == ("auto", "error", "error")
    output = OutputSettings(path="out")
    assert (output.format, output.columns, output.prefix, output.order) == ("arrow", "all", "", "input")
    assert (output.shard_rows, output.parse) == (100_000, False)


def test_lists_come_as_yaml_gives_them() -> None:
    assert InputSettings.model_validate({"path": ["a", "b"]}).paths == ("a", "b")
    assert OutputSettings.model_validate({"path": "o", "columns": ["a"]}).columns == ("a",)
    chat = PromptSettings.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    assert chat.messages is not None
    assert chat.messages[0].role == "user"


@pytest.mark.parametrize(
    ("section", "values", "expected"),
    [
        (PromptSettings, {}, "exactly one of text, messages and messages_column is needed, none is given"),
        (PromptSettings, {"text": "a", "messages_column": "b"}, "messages_column: cannot stand beside text"),
        (PromptSettings, {"messages_column": "b", "chat": True}, "chat: goes only with text"),
        (PromptSettings, {"text": "a", "tone": 1}, "Extra inputs are not permitted"),
        (PromptSettings, {"text": ""}, "at least 1 character"),
        (PromptSettings, {"messages": []}, "at least 1 item"),
        (PromptSettings, {"text": "a", "on_null": "drop"}, "'error', 'skip' or 'empty'"),
        (InputSettings, {"path": ["a", "simplecache::s3://b/c"]}, "chained paths are not understood"),
        (InputSettings, {"path": "a", "config": "en"}, "only data sets on the Hub have a config"),
        (InputSettings, {"path": "a", "limit": 0}, "greater than or equal to 1"),
        (InputSettings, {"path": "a", "limit": "5"}, "valid integer"),
        (InputSettings, {"path": []}, "at least 1"),
        (OutputSettings, {"path": "hf://datasets/o/n"}, "hf:// cannot be written to row by row"),
        (OutputSettings, {"path": "o", "columns": ["a", "a"]}, "'a' is listed twice"),
        (OutputSettings, {"path": "o", "shard_rows": 0}, "greater than or equal to 1"),
    ],
)
def test_refusals_say_why(section: type, values: dict[str, object], expected: str) -> None:
    assert expected in message(section, **values)
