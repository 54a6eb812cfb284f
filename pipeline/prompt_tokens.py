"""Rendered prompts become tokens that fit the context, or end their row.

Knows a tokenizer, the length of the context and what to do with a prompt beyond it; knows no templates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from batchgen.engine.request import Sampling

from .chat import Chat
from .config import PromptSettings
from .prompt_faults import RowSkippedError, fault
from .templates import explain
from .truncate import cut_chat, cut_tokens


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


class PromptTokens:
    """Tokenises prompts. `render` writes a chat that was cut; `truncated` counts prompts cut to the context."""

    def __init__(
        self, tokenizer: PromptTokenizer, policy: PromptSettings, context_length: int, render: Callable[[Chat], str]
    ) -> None:
        self._tokenizer = tokenizer
        self._on_too_long = policy.on_too_long
        self._context_length = context_length
        self._render = render
        self._special = _added_tokens(tokenizer)
        self.truncated = 0

    def possible(self, prompt: Prompt) -> Prompt:
        """The prompt, unless its characters alone put it beyond the context: gigabytes are not spent on its tokens."""
        if self._on_too_long in ("error", "skip"):
            fewest = self._tokenizer.fewest_tokens(prompt.text) - self._special[0]
            if fewest + prompt.sampling.max_tokens > self._context_length:
                self._refuse(self._too_long(f"at least {fewest}", prompt))
        return prompt

    def encode(self, prompts: list[Prompt]) -> list[list[int] | Exception]:
        """Tokens of each prompt, in order, or why it has none; texts get the tokenizer's special tokens."""
        found: dict[int, list[int] | Exception] = {}
        for special in (True, False):
            places = [place for place, prompt in enumerate(prompts) if (prompt.chat is None) is special]
            if places:
                found.update(zip(places, self._encode([prompts[at].text for at in places], special), strict=True))
        return [found[place] for place in range(len(prompts))]

    def fitting(self, prompt: Prompt, tokens: list[int] | Exception) -> list[int]:
        """What the engine is given for `tokens`, as `encode` returned them; raises what ends the row."""
        if isinstance(tokens, Exception):
            raise fault("template", f"the tokenizer refuses the prompt: {explain(tokens)}")
        if prompt.chat is None:
            tokens = self._without_double_start(tokens)
        if not tokens:
            raise fault("empty_prompt", "the prompt has no tokens")
        if len(tokens) + prompt.sampling.max_tokens > self._context_length:
            return self._shorten(prompt, tokens)
        return tokens

    def _encode(self, texts: list[str], special: bool) -> list[list[int] | Exception]:
        """Tokens of each text; where the whole batch fails, each text is tried alone."""
        try:
            return list(self._tokenizer.encode(texts, add_special_tokens=special))
        except Exception as error:
            if len(texts) == 1:
                return [error]
        return [self._encode([text], special)[0] for text in texts]

    def _without_double_start(self, tokens: list[int]) -> list[int]:
        """A text that spells out what the tokenizer adds in front does not get it twice."""
        front = self._special[0]
        return tokens[front:] if front and tokens[:front] == tokens[front : 2 * front] else tokens

    def _shorten(self, prompt: Prompt, tokens: list[int]) -> list[int]:
        limit = self._context_length - prompt.sampling.max_tokens
        message = self._too_long(str(len(tokens)), prompt)
        self._refuse(message)
        side = self._on_too_long
        assert side == "truncate_left" or side == "truncate_right"
        if prompt.chat is None:
            cut = cut_tokens(tokens, limit, side, self._special)
        else:
            cut = cut_chat(prompt.chat, limit, side, self._tokenizer, self._encode_chat)
        if cut is None:
            raise fault("context_length", f"{message}, and cutting cannot make it fit", "request")
        self.truncated += 1
        return cut

    def _too_long(self, num_tokens: str, prompt: Prompt) -> str:
        return (
            f"prompt of {num_tokens} tokens and max_tokens of {prompt.sampling.max_tokens} "
            f"exceed the context of {self._context_length}"
        )

    def _refuse(self, message: str) -> None:
        """Ends the way of a row that is too long, where the policy is not to cut it."""
        if self._on_too_long == "skip":
            raise RowSkippedError(message, "on_too_long")
        if self._on_too_long == "error":
            raise fault("context_length", message, "request")

    def _encode_chat(self, chat: Chat) -> list[int]:
        return self._tokenizer.encode([self._render(chat)], add_special_tokens=False)[0]


def _added_tokens(tokenizer: PromptTokenizer) -> tuple[int, int]:
    """How many special tokens the tokenizer adds before and after a text."""
    [plain] = tokenizer.encode(["a"], add_special_tokens=False)
    [full] = tokenizer.encode(["a"], add_special_tokens=True)
    for front in range(len(full) - len(plain) + 1):
        if full[front : front + len(plain)] == plain:
            return front, len(full) - len(plain) - front
    return 0, 0
