"""Cutting prompts that are too long, in tokens, from the left or from the right.

Knows token counts and, for chats, how to render and count again; only the last user message of a chat is cut.
"""

from collections.abc import Callable
from typing import Literal, Protocol

from .chat import Chat, last_user, with_content
from .text import REPLACEMENT

Side = Literal["truncate_left", "truncate_right"]


class Codec(Protocol):
    """The part of a tokenizer that cutting needs."""

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]: ...
    def decode(self, tokens: list[int]) -> str: ...


def cut_tokens(tokens: list[int], limit: int, side: Side, special: tuple[int, int]) -> list[int] | None:
    """At most `limit` tokens; the `special` ones that the tokenizer adds at both ends stay. None: no room is left."""
    front, back = special
    room = limit - front - back
    if room < 1:
        return None
    body = tokens[front : len(tokens) - back]
    kept = body[-room:] if side == "truncate_left" else body[:room]
    return [*tokens[:front], *kept, *tokens[len(tokens) - back :]]


def cut_chat(chat: Chat, limit: int, side: Side, codec: Codec, encode: Callable[[Chat], list[int]]) -> list[int] | None:
    """Tokens of the chat with its last user message cut until all fits; None when not one character of it can stay."""
    index = last_user(chat)
    if index is None:
        return None
    content = chat[index]["content"]
    [tokens] = codec.encode([content], add_special_tokens=False)
    guess = len(tokens) - (len(encode(chat)) - limit)
    guesses = [guess, guess + 1]  # right when rendering and tokenising leave the rest of the content as it is
    fits, too_long, best = 0, len(tokens), None
    while fits + 1 < too_long:
        keep = guesses.pop(0) if guesses else (fits + too_long) // 2
        if not fits < keep < too_long:
            continue
        text = _text_of(content, tokens, keep, side, codec)
        prompt = encode(with_content(chat, index, text))
        if len(prompt) <= limit:
            fits, best = keep, prompt if text else best
        else:
            too_long = keep
    return best


def _text_of(content: str, tokens: list[int], keep: int, side: Side, codec: Codec) -> str:
    """The end or start of the content that `keep` of its tokens stand for, cut between characters."""
    if side == "truncate_left":
        dropped = codec.decode(tokens[: len(tokens) - keep]).rstrip(REPLACEMENT)
        kept = codec.decode(tokens[-keep:]).lstrip(REPLACEMENT)
        return kept if content.endswith(kept) else content[len(dropped) :]
    kept = codec.decode(tokens[:keep]).rstrip(REPLACEMENT)
    return kept if content.startswith(kept) else content[: len(kept)]
