"""Rows become requests: templates, chats, sampling of the row, tokens, the length of the context.

Knows the prompt section and a tokenizer; every fault of a row becomes that row's error. Knows no files, no engine.
"""

from collections.abc import Callable, Mapping
from typing import Any

from batchgen.engine.request import Request, RowError, Sampling

from .chat import BadMessagesError, Chat, ChatTemplate, is_blank, read_chat
from .config import REQUEST_COLUMNS, PromptSettings, RequestPrompts
from .parameters import Parameters
from .prompt_faults import RowFaultError, RowSkippedError, fault
from .prompt_tokens import Prompt, PromptTokenizer, PromptTokens
from .rows import RowBatch, RowTag, Skipped, bad_row
from .templates import (
    NullPrintedError,
    compile_template,
    explain,
    names_used,
    prompt_environment,
)
from .text import replace_surrogates
from .values import is_null, to_python


class PromptError(Exception):
    """The prompt section does not fit the model: one line with the cure (exit code 2)."""

    exit_code = 2


def template_columns(prompt: PromptSettings) -> frozenset[str]:
    """Columns that the prompt section uses. Raises TemplateError with the line for bad Jinja."""
    if isinstance(prompt, RequestPrompts):
        return frozenset(REQUEST_COLUMNS)
    if prompt.messages_column is not None:
        return frozenset({prompt.messages_column})
    environment = prompt_environment(prompt.on_null == "empty")
    return frozenset().union(*(names_used(environment, text, name) for name, text in _templates(prompt)))


class Renderer:
    """Renders and tokenises batches of rows.

    `chat_template` replaces the model's; `date` (ISO) is the day that templates are told. Raises TemplateError for
    bad Jinja, PromptError when the model cannot take the chosen kind of prompt, ValueError for an unknown per-row key.
    """

    def __init__(
        self,
        prompt: PromptSettings,
        base: Sampling,
        per_row: Mapping[str, str],
        tokenizer: PromptTokenizer,
        context_length: int,
        date: str,
        chat_template: str | None = None,
    ) -> None:
        self._settings = prompt
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._parameters = Parameters(base, per_row)
        self._used = template_columns(prompt)
        self.columns = self._used | frozenset(per_row.values())
        self.replaced_surrogates = 0
        environment = prompt_environment(prompt.on_null == "empty")
        self._templates = [(name, compile_template(environment, text, name)) for name, text in _templates(prompt)]
        self._chat = self._choose_chat(chat_template or tokenizer.chat_template, date)
        self._tokens = PromptTokens(tokenizer, prompt, context_length, self._render_chat)

    @property
    def truncated(self) -> int:
        """Prompts cut to the context so far."""
        return self._tokens.truncated

    def render(self, batch: RowBatch, done: Callable[[int], bool] = lambda position: False) -> list[Request | Skipped]:
        """One outcome per row that is not done yet, in order; a row that fails becomes a request born failed."""
        columns, errors = self._values(batch)
        outcomes: list[Request | Skipped | Prompt] = []
        for offset, position in enumerate(range(batch.start, batch.start + batch.num_rows)):
            if not done(position):
                row = {name: values[offset] for name, values in columns.items()}
                outcomes.append(self._guard(position, self._write, row, position, errors.get(offset)))
        return self._tokenise(outcomes)

    def _choose_chat(self, template: str | None, date: str) -> ChatTemplate | None:
        wanted = self._settings.chat if self._settings.text is not None else True
        if wanted is False or (wanted == "auto" and template is None):
            return None
        if template is None:
            key = "chat: true" if self._settings.text is not None else _kind(self._settings)
            cure = "set model.chat_template, or use prompt.text without chat"
            raise PromptError(f"prompt.{key}: the model has no chat template; {cure}")
        return ChatTemplate(template, self._tokenizer.special_tokens, date)

    def _values(self, batch: RowBatch) -> tuple[dict[str, list[Any]], dict[int, RowError]]:
        """Python values of the columns used; rows that have none are added to the batch's errors."""
        errors = dict(batch.errors)
        columns = {}
        for name in self.columns:
            columns[name], bad = to_python(batch.columns.column(name))
            errors.update({at: bad_row(f"column {name!r}: {text}") for at, text in bad.items() if at not in errors})
        return columns, errors

    def _guard(self, position: int, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `work`, or what becomes of a row that it ends."""
        try:
            return work(*arguments)
        except RowSkippedError as skip:
            return Skipped(position, str(skip), skip.policy)
        except RowFaultError as ended:
            return self._failed(position, ended.error)

    def _failed(self, position: int, error: RowError) -> Request:
        base = self._parameters.base
        return Request(position, (), base, RowTag(position, base), error)

    def _write(self, row: dict[str, Any], position: int, error: RowError | None) -> Prompt:
        if error is not None:
            raise RowFaultError(error)
        nulls = self._nulls(row)
        sampling = self._sampling(row)  # before nulls become text: a null leaves the job's value
        row = {**row, **dict.fromkeys(nulls, [] if self._settings.messages_column else "")}
        if self._settings.messages_column is not None:
            return self._from_chat(position, sampling, _chat_of(row[self._settings.messages_column]))
        texts = [self._fill(name, template, row) for name, template in self._templates]
        if self._settings.messages is not None:
            roles = [message.role for message in self._settings.messages]
            chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            return self._from_chat(position, sampling, chat)
        if self._chat is not None:
            return self._from_chat(position, sampling, [{"role": "user", "content": texts[0]}])
        return self._from_text(position, sampling, texts[0])

    def _nulls(self, row: Mapping[str, Any]) -> list[str]:
        """Columns to be filled; ends the row when a null in one that is used is not allowed."""
        nulls = sorted(name for name in self._used if is_null(row[name]))
        if nulls and self._settings.on_null == "error":
            raise fault("null_value", f"column {nulls[0]!r} is null")
        if nulls and self._settings.on_null == "skip":
            raise RowSkippedError(f"column {nulls[0]!r} is null")
        return nulls

    def _sampling(self, row: Mapping[str, Any]) -> Sampling:
        try:
            return self._parameters.of(row)
        except ValueError as error:
            raise fault("bad_params", str(error), "request") from error

    def _fill(self, name: str, template: Any, row: Mapping[str, Any]) -> str:
        try:
            text, count = replace_surrogates(template.render({key: row[key] for key in self._used}))
        except NullPrintedError as error:
            if self._settings.on_null == "skip":
                raise RowSkippedError(f"{name} writes a null") from error
            raise fault("null_value", f"{name} writes a null") from error
        except Exception as error:
            raise fault("template", f"{name}: {explain(error, self._used)}") from error
        self.replaced_surrogates += count
        return str(text)

    def _from_text(self, position: int, sampling: Sampling, text: str) -> Prompt:
        if not text:
            raise fault("empty_prompt", "the prompt is empty")
        return self._tokens.possible(Prompt(position, sampling, text))

    def _from_chat(self, position: int, sampling: Sampling, chat: Chat) -> Prompt:
        if is_blank(chat):
            raise fault("empty_prompt", "the chat has no text")
        return self._tokens.possible(Prompt(position, sampling, self._render_chat(chat), chat))

    def _render_chat(self, chat: Chat) -> str:
        if self._chat is None:
            raise fault("template", "the model has no chat template")
        try:
            return self._chat.render(chat)
        except Exception as error:
            raise fault("template", f"chat template: {explain(error)}") from error

    def _tokenise(self, outcomes: list[Request | Skipped | Prompt]) -> list[Request | Skipped]:
        prompts = [outcome for outcome in outcomes if isinstance(outcome, Prompt)]
        tokens = iter(self._tokens.encode(prompts))
        return [
            self._guard(outcome.position, self._request, outcome, next(tokens))
            if isinstance(outcome, Prompt)
            else outcome
            for outcome in outcomes
        ]

    def _request(self, prompt: Prompt, tokens: list[int] | Exception) -> Request:
        fitting = self._tokens.fitting(prompt, tokens)
        return Request(prompt.position, fitting, prompt.sampling, RowTag(prompt.position, prompt.sampling))


def _templates(prompt: PromptSettings) -> list[tuple[str, str]]:
    """The Jinja texts of the section, each with its name in messages."""
    if prompt.text is not None:
        return [("prompt.text", prompt.text)]
    return [(f"prompt.messages[{at}].content", message.content) for at, message in enumerate(prompt.messages or ())]


def _kind(prompt: PromptSettings) -> str:
    return "messages" if prompt.messages is not None else "messages_column"


def _chat_of(value: Any) -> Chat:
    try:
        return read_chat(value)
    except BadMessagesError as error:
        raise fault("bad_messages", str(error)) from error
