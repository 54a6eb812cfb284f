"""Rows become requests: templates, chats, sampling of the row, tokens, the length of the context.

Knows the prompt section and a tokenizer; every fault of a row becomes that row's error. Knows no files, no engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from batchgen.engine.request import Request, RowError, Sampling

from .chat import BadMessagesError, Chat, ChatTemplate, is_blank, read_chat
from .config import REQUEST_COLUMNS, PromptSettings, RequestPrompts
from .parameters import Parameters
from .rows import RowBatch, RowTag, Skipped, bad_row
from .templates import (
    NullPrintedError,
    TemplateError,
    compile_template,
    explain,
    names_used,
    prompt_environment,
)
from .text import replace_surrogates
from .truncate import cut_chat, cut_tokens
from .values import is_null, to_python

__all__ = [
    "Prompt",
    "PromptError",
    "PromptTokenizer",
    "Renderer",
    "RowFaultError",
    "Skipped",
    "TemplateError",
    "template_columns",
]


class PromptError(Exception):
    """The prompt section does not fit the model: one line with the cure (exit code 2)."""

    exit_code = 2


class PromptTokenizer(Protocol):
    """The part of a tokenizer that prompts need."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def special_tokens(self) -> Mapping[str, str]: ...
    def fewest_tokens(self, text: str) -> int: ...
    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]: ...
    def decode(self, tokens: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row on its way to the tokenizer: raw text, or a chat and the text it rendered to."""

    position: int
    sampling: Sampling
    text: str
    chat: Chat | None = None


class RowFaultError(Exception):
    """Ends the way of one row, with the error it gets."""

    def __init__(self, error: RowError) -> None:
        super().__init__(error.message)
        self.error = error


class _RowSkippedError(Exception):
    """Ends the way of one row by a policy of the prompt section."""

    def __init__(self, reason: str, policy: str = "on_null") -> None:
        super().__init__(reason)
        self.policy = policy


def _fault(code: str, message: str, stage: str = "prompt") -> RowFaultError:
    return RowFaultError(RowError(code, stage, message))


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
        self.truncated = 0  # prompts cut to the context
        environment = prompt_environment(prompt.on_null == "empty")
        self._templates = [(name, compile_template(environment, text, name)) for name, text in _templates(prompt)]
        self._chat = self._choose_chat(chat_template or tokenizer.chat_template, date)
        self._special = _added_tokens(tokenizer)

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
        except _RowSkippedError as skip:
            return Skipped(position, str(skip), skip.policy)
        except RowFaultError as fault:
            return self._failed(position, fault.error)

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
            raise _fault("null_value", f"column {nulls[0]!r} is null")
        if nulls and self._settings.on_null == "skip":
            raise _RowSkippedError(f"column {nulls[0]!r} is null")
        return nulls

    def _sampling(self, row: Mapping[str, Any]) -> Sampling:
        try:
            return self._parameters.of(row)
        except ValueError as error:
            raise _fault("bad_params", str(error), "request") from error

    def _fill(self, name: str, template: Any, row: Mapping[str, Any]) -> str:
        try:
            text, count = replace_surrogates(template.render({key: row[key] for key in self._used}))
        except NullPrintedError as error:
            if self._settings.on_null == "skip":
                raise _RowSkippedError(f"{name} writes a null") from error
            raise _fault("null_value", f"{name} writes a null") from error
        except Exception as error:
            raise _fault("template", f"{name}: {explain(error, self._used)}") from error
        self.replaced_surrogates += count
        return str(text)

    def _from_text(self, position: int, sampling: Sampling, text: str) -> Prompt:
        if not text:
            raise _fault("empty_prompt", "the prompt is empty")
        return self._possible(Prompt(position, sampling, text))

    def _from_chat(self, position: int, sampling: Sampling, chat: Chat) -> Prompt:
        if is_blank(chat):
            raise _fault("empty_prompt", "the chat has no text")
        return self._possible(Prompt(position, sampling, self._render_chat(chat), chat))

    def _possible(self, prompt: Prompt) -> Prompt:
        """The prompt, unless its characters alone put it beyond the context: gigabytes are not spent on its tokens."""
        if self._settings.on_too_long in ("error", "skip"):
            fewest = self._tokenizer.fewest_tokens(prompt.text) - self._special[0]
            if fewest + prompt.sampling.max_tokens > self._context_length:
                self._refuse(self._too_long(f"at least {fewest}", prompt))
        return prompt

    def _too_long(self, num_tokens: str, prompt: Prompt) -> str:
        return (
            f"prompt of {num_tokens} tokens and max_tokens of {prompt.sampling.max_tokens} "
            f"exceed the context of {self._context_length}"
        )

    def _refuse(self, message: str) -> None:
        """Ends the way of a row that is too long, where the policy is not to cut it."""
        if self._settings.on_too_long == "skip":
            raise _RowSkippedError(message, "on_too_long")
        if self._settings.on_too_long == "error":
            raise _fault("context_length", message, "request")

    def _render_chat(self, chat: Chat) -> str:
        if self._chat is None:
            raise _fault("template", "the model has no chat template")
        try:
            return self._chat.render(chat)
        except Exception as error:
            raise _fault("template", f"chat template: {explain(error)}") from error

    def _tokenise(self, outcomes: list[Request | Skipped | Prompt]) -> list[Request | Skipped]:
        prompts = [outcome for outcome in outcomes if isinstance(outcome, Prompt)]
        requests: dict[int, Request | Skipped] = {}
        for group in (
            [prompt for prompt in prompts if prompt.chat is None],
            [prompt for prompt in prompts if prompt.chat is not None],
        ):
            tokens = self._encode([prompt.text for prompt in group], group[0].chat is None) if group else []
            for prompt, ids in zip(group, tokens, strict=True):
                requests[prompt.position] = self._guard(prompt.position, self._request, prompt, ids)
        return [requests[outcome.position] if isinstance(outcome, Prompt) else outcome for outcome in outcomes]

    def _encode(self, texts: list[str], special: bool) -> list[list[int] | Exception]:
        """Tokens of each text; where the whole batch fails, each text is tried alone."""
        try:
            return list(self._tokenizer.encode(texts, add_special_tokens=special))
        except Exception as error:
            if len(texts) == 1:
                return [error]
        return [self._encode([text], special)[0] for text in texts]

    def _request(self, prompt: Prompt, tokens: list[int] | Exception) -> Request:
        if isinstance(tokens, Exception):
            raise _fault("template", f"the tokenizer refuses the prompt: {explain(tokens)}")
        if prompt.chat is None:
            tokens = self._without_double_start(tokens)
        if not tokens:
            raise _fault("empty_prompt", "the prompt has no tokens")
        if len(tokens) + prompt.sampling.max_tokens > self._context_length:
            tokens = self._shorten(prompt, tokens)
        return Request(prompt.position, tokens, prompt.sampling, RowTag(prompt.position, prompt.sampling))

    def _without_double_start(self, tokens: list[int]) -> list[int]:
        """A text that spells out what the tokenizer adds in front does not get it twice."""
        front = self._special[0]
        return tokens[front:] if front and tokens[:front] == tokens[front : 2 * front] else tokens

    def _shorten(self, prompt: Prompt, tokens: list[int]) -> list[int]:
        limit = self._context_length - prompt.sampling.max_tokens
        message = self._too_long(str(len(tokens)), prompt)
        self._refuse(message)
        side = self._settings.on_too_long
        assert side == "truncate_left" or side == "truncate_right"
        if prompt.chat is None:
            cut = cut_tokens(tokens, limit, side, self._special)
        else:
            cut = cut_chat(prompt.chat, limit, side, self._tokenizer, self._encode_chat)
        if cut is None:
            raise _fault("context_length", f"{message}, and cutting cannot make it fit", "request")
        self.truncated += 1
        return cut

    def _encode_chat(self, chat: Chat) -> list[int]:
        return self._tokenizer.encode([self._render_chat(chat)], add_special_tokens=False)[0]


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
        raise _fault("bad_messages", str(error)) from error


def _added_tokens(tokenizer: PromptTokenizer) -> tuple[int, int]:
    """How many special tokens the tokenizer adds before and after a text."""
    [plain] = tokenizer.encode(["a"], add_special_tokens=False)
    [full] = tokenizer.encode(["a"], add_special_tokens=True)
    for front in range(len(full) - len(plain) + 1):
        if full[front : front + len(plain)] == plain:
            return front, len(full) - len(plain) - front
    return 0, 0
