"""Chats: what a list of messages may look like, and how a model's chat template turns one into text.

Knows Python values and Jinja; tokens are not known here.
"""

import json
from collections.abc import Mapping
from typing import Any

from .templates import chat_environment, compile_template
from .text import replace_surrogates

Chat = list[dict[str, Any]]


class BadMessagesError(Exception):
    """A value that is no chat; the message says what is wrong and in which message."""


class SystemDroppedError(Exception):
    """The chat template left the system message out."""


class ChatTemplate:
    """A model's chat template, ready to render; `special_tokens` are bos_token and the like."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], date: str, name: str = "chat template") -> None:
        self._template = compile_template(chat_environment(date), text, name)
        self._special_tokens = dict(special_tokens)

    def render(self, chat: Chat) -> str:
        """The prompt up to where the model answers. Raises whatever the template raises, or SystemDroppedError."""
        text = self._template.render(
            messages=chat, add_generation_prompt=True, tools=None, documents=None, **self._special_tokens
        )
        for message in chat:
            if message["role"] == "system" and (message["content"] or "").strip() not in text:
                raise SystemDroppedError("it leaves the system message out; move that text into the user message")
        return text


def read_chat(value: Any) -> Chat:
    """Messages of a `messages_column`: a list of structs, or JSON text of one. Raises BadMessagesError."""
    if isinstance(value, str):
        try:
            value = replace_surrogates(json.loads(value))[0]
        except (ValueError, RecursionError) as error:
            raise BadMessagesError(f"not JSON: {error}") from error
    if not isinstance(value, list):
        raise BadMessagesError(f"not a list of messages but {type(value).__name__}")
    if not value:
        raise BadMessagesError("a chat without messages")
    return [_message(message, number) for number, message in enumerate(value, 1)]


def is_blank(chat: Chat) -> bool:
    """Whether nobody says anything; instructions alone are no question when somebody else should speak."""
    others = [message for message in chat if message["role"] != "system"] or chat
    return not any(message["content"] or message.get("tool_calls") for message in others)


def last_user(chat: Chat) -> int | None:
    """Index of the last user message that has text."""
    found = [index for index, message in enumerate(chat) if message["role"] == "user" and message["content"]]
    return found[-1] if found else None


def with_content(chat: Chat, index: int, content: str) -> Chat:
    """The chat with other text in one message."""
    return [{**message, "content": content} if at == index else message for at, message in enumerate(chat)]


def _message(value: Any, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadMessagesError(f"message {number} is not an object with role and content but {type(value).__name__}")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadMessagesError(f"message {number} has no role")
    return {**message, "content": _content(message, number)}


def _content(message: dict[str, Any], number: int) -> str | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    if isinstance(content, list) and content and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    raise BadMessagesError(f"message {number} has content that is not text but {type(content).__name__}")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
