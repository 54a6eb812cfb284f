"""The input, prompt and output sections of a job file, checked value by value.

Knows which values are legal and which are not there yet; opens no file and loads no model.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from batchgen.engine.config import Section

from .hub import SCHEME, HubPath, parse_hub_path

NonEmpty = Annotated[str, Field(min_length=1)]

CUSTOM_ID, METHOD, URL, BODY = REQUEST_COLUMNS = ("custom_id", "method", "url", "body")  # of OpenAI batch files


class InputSettings(Section):
    """Which rows to read."""

    path: NonEmpty | Annotated[tuple[NonEmpty, ...], Field(strict=False, min_length=1)] = Field(
        description="path, glob or directory, or a list of them; also s3:// and others that fsspec knows, and "
        "hf://datasets/ORG/NAME[@REVISION]: a data set on the Hub, read at the commit it has when the job begins"
    )
    format: Literal["auto", "parquet", "jsonl", "arrow", "csv", "openai"] = Field(
        "auto",
        description="auto goes by the file name; csv: also tab-separated; openai: a batch file, each line a request "
        "with its own prompt and parameters (no prompt section then)",
    )
    config: str | None = Field(None, description="configuration of a Hub data set (hf://); null: its default one")
    split: NonEmpty = Field("train", description="split of a Hub data set or of a saved DatasetDict")
    id: NonEmpty | None = Field(
        None,
        description="column whose values identify rows and must differ; rows of later files that repeat one of an "
        "earlier run are passed over; null: the position",
    )
    limit: Annotated[int, Field(ge=1)] | None = Field(None, description="read only this many rows")

    @field_validator("path")
    @classmethod
    def _paths_can_be_read(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for path in (value,) if isinstance(value, str) else value:
            _refuse_chained(path)
            if path.startswith(SCHEME):
                parse_hub_path(path)
        return value

    @model_validator(mode="after")
    def _config_has_a_hub(self) -> Self:
        if self.config is not None and not self.hub_paths:
            raise ValueError("config: only data sets on the Hub have a config (input.path: hf://...), remove the key")
        return self

    @model_validator(mode="after")
    def _requests_have_an_id(self) -> Self:
        if self.format == "openai" and self.id not in (None, CUSTOM_ID):
            raise ValueError("id: an OpenAI batch file identifies its lines by custom_id, remove the key")
        return self

    @property
    def id_column(self) -> str | None:
        """The column whose values identify rows and must differ."""
        return CUSTOM_ID if self.format == "openai" else self.id

    @property
    def hub_paths(self) -> list[HubPath]:
        """Those of the paths that are data sets on the Hub."""
        return [parse_hub_path(path) for path in self.paths if path.startswith(SCHEME)]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths as written, always as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path


class Message(Section):
    """One turn of a chat; `content` is a Jinja template."""

    role: NonEmpty = Field(description="system, user, assistant or what the chat template knows")
    content: str = Field(description="Jinja template over the row's columns")


class PromptSettings(Section):
    """How a row becomes a prompt: exactly one of text, messages and messages_column."""

    text: NonEmpty | None = Field(
        None, description="Jinja template over the row's columns; an undefined name is an error"
    )
    messages: Annotated[tuple[Message, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="chat whose contents are Jinja templates"
    )
    messages_column: NonEmpty | None = Field(None, description="column that holds chats: list<struct> or JSON text")
    chat: Literal["auto"] | bool = Field(
        "auto", description="with text: true sends it as one user message; auto: true if the model has a chat template"
    )
    on_null: Literal["error", "skip", "empty"] = Field(
        "error", description="a null in a column the prompt uses: the row fails, is left out, or sees an empty text"
    )
    on_too_long: Literal["error", "truncate_left", "truncate_right", "skip"] = Field(
        "error",
        description="prompt + max_tokens beyond the context: the row fails, is cut at its start or end, or is left out",
    )
    reorder: bool = Field(
        False,
        description="blocks of a template (between blank lines) that hold fields and are neighbours take the order in "
        "which the first rows share most; that changes answers",
    )

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        self.require_prompt()
        return self

    def require_prompt(self) -> None:
        """Raises ValueError unless there is exactly one prompt."""
        given = [name for name in ("text", "messages", "messages_column") if getattr(self, name) is not None]
        if not given:
            raise ValueError("exactly one of text, messages and messages_column is needed, none is given")
        if len(given) > 1:
            raise ValueError(f"{given[1]}: cannot stand beside {given[0]}, keep one of them")
        if self.chat != "auto" and self.text is None:
            raise ValueError(f"chat: goes only with text, not with {given[0]}; remove the key")
        if self.reorder and self.messages_column is not None:
            raise ValueError("reorder: goes only with text or messages, not with messages_column; remove the key")


class RequestPrompts(PromptSettings):
    """The prompts of an OpenAI batch file stand in its lines; only their length is the job's business."""

    def require_prompt(self) -> None:
        """Raises ValueError for a key that says what a prompt is."""
        given = self.model_fields_set - {"on_too_long"}
        if given:
            raise ValueError(f"{min(given)}: the lines of an OpenAI batch file bring their prompts, remove the key")


class OutputSettings(Section):
    """Where answers go and in which form."""

    path: NonEmpty = Field(description="output directory, on this machine or in a store like s3://")
    format: Literal["arrow", "parquet", "jsonl", "openai"] = Field(
        "arrow",
        description="arrow: the save_to_disk layout of Hugging Face; openai: output.jsonl and errors.jsonl",
    )
    columns: Literal["all"] | Annotated[tuple[NonEmpty, ...], Field(strict=False)] = Field(
        "all", description="input columns to carry along, unchanged"
    )
    prefix: str = Field("", description="put before the names of the result columns, for inputs with such columns")
    order: Literal["input", "completion"] = Field(
        "input", description="order of the rows; completion is not available yet"
    )
    shard_rows: int = Field(100_000, ge=1, description="rows per file (arrow and parquet)")
    parse: bool = Field(False, description="with json_schema: a typed column `parsed` of the answer's values")
    choice_probs: bool = Field(
        False,
        description="with choices, at temperature 0: the answer is the most probable choice, and a column "
        "`choice_probs` holds the probability of each; no token is generated",
    )

    @field_validator("path")
    @classmethod
    def _path_can_be_written(cls, value: str) -> str:
        _refuse_chained(value)
        if value.startswith("hf://"):
            raise ValueError("hf:// cannot be written to row by row, use a local directory or a store like s3://")
        return value

    @field_validator("columns")
    @classmethod
    def _columns_differ(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for index, name in enumerate(value if isinstance(value, tuple) else ()):
            if name in value[:index]:
                raise ValueError(f"{name!r} is listed twice")
        return value

    @model_validator(mode="after")
    def _openai_has_no_columns(self) -> Self:
        for key in ("columns", "prefix") if self.format == "openai" else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: openai output has no columns, only ids and answers; remove the key")
        return self


def _refuse_chained(path: str) -> None:
    if "::" in path and "://" in path:
        raise ValueError(f"{path}: chained paths are not understood, give the one that the files lie at")
