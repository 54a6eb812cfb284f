"""Requests of OpenAI batch files become requests of the engine, body by body.

Knows how a body replaces the job's sampling; chats, tokens and lengths are the renderer's.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from batchgen.engine.request import RowError, Sampling

from .chat import BadMessagesError, ChatTemplate
from .openai_grammar import BadGrammarError
from .openai_request import Asked, RefusedError, read_request
from .prompt import Renderer
from .prompt_faults import RowFaultError
from .prompt_tokens import Prompt


class RequestRenderer(Renderer):
    """Renders and tokenises lines of a batch file. `lists`: answers may be several; `logprobs`: they may have some.

    A line that asks for what the columns of the output cannot hold is refused.
    """

    def __init__(self, *arguments: Any, lists: bool, logprobs: bool) -> None:
        super().__init__(*arguments)
        self._lists = lists
        self._logprobs = logprobs
        self._replace = lru_cache(maxsize=4096)(self._checked)  # equal bodies get one and the same record

    def _choose_chat(self, template: str | None, date: str) -> ChatTemplate | None:
        """Texts need no chat template; a chat fails alone where there is none."""
        return None if template is None else ChatTemplate(template, self._tokenizer.special_tokens, date)

    def _write(self, row: dict[str, Any], position: int, error: RowError | None) -> Prompt:
        if error is not None:
            raise RowFaultError(error)
        asked = _asked(row)
        sampling = self._replaced(asked.sampling)
        if asked.chat is not None:
            return self._from_chat(position, sampling, asked.chat)
        return self._from_text(position, sampling, asked.text or "")

    def _replaced(self, values: Mapping[str, Any]) -> Sampling:
        try:
            key = ((name, type(value), value) for name, value in sorted(values.items()))
            sampling = self._replace(tuple(key))
        except (ValueError, TypeError) as error:
            raise _refusal("bad_params", str(error)) from error
        if sampling.n > 1 and not self._lists:
            raise _refusal("bad_params", "n: needs output.format: openai, or generation.n above 1 in the job")
        if sampling.logprobs is not None and not self._logprobs:
            raise _refusal("bad_params", "logprobs: needs output.format: openai, or generation.logprobs in the job")
        if sampling.max_tokens >= self._context_length:
            length = f"max_tokens of {sampling.max_tokens} leaves no room for a prompt"
            raise _refusal("context_length", f"{length} in the context of {self._context_length}")
        return sampling

    def _checked(self, values: tuple[tuple[str, type, Any], ...]) -> Sampling:
        return replace(self._parameters.base, **{name: value for name, _, value in values})


def _asked(row: Mapping[str, Any]) -> Asked:
    try:
        return read_request(row)
    except RefusedError as error:
        raise _refusal("bad_params", str(error)) from error
    except BadGrammarError as error:
        raise _refusal("bad_grammar", str(error)) from error
    except BadMessagesError as error:
        raise RowFaultError(RowError("bad_messages", "prompt", f"messages: {error}")) from error


def _refusal(code: str, message: str) -> RowFaultError:
    return RowFaultError(RowError(code, "request", message))
