"""What a line of an OpenAI batch file asks for: a chat or a text, and the sampling values that replace the job's.

Knows the body parameters of both endpoints, those of vLLM's servers included; what cannot be honoured is refused by
name. Tokens and chat templates are not known here.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .chat import Chat, read_chat
from .config import BODY, METHOD, URL
from .openai_grammar import GRAMMAR_PARAMETERS, one_grammar

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"


class RefusedError(Exception):
    """A request that is refused: status 400. The message names the parameter first."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as read: `chat` or `text`, and values of `Sampling` by name."""

    sampling: Mapping[str, Any]
    chat: Chat | None = None
    text: str | None = None


def read_request(row: Mapping[str, Any]) -> Asked:
    """The request in the columns of a line. Raises RefusedError, or BadMessagesError for a chat that is none."""
    if row[METHOD] != "POST":
        raise RefusedError(f"method: must be POST, got {row[METHOD]!r}")
    if row[URL] not in (CHAT_URL, TEXT_URL):
        raise RefusedError(f"url: must be {CHAT_URL} or {TEXT_URL}, got {row[URL]!r}")
    if row[BODY] is None:
        raise RefusedError("body: must be an object")
    given = {key: value for key, value in json.loads(row[BODY]).items() if value is not None}
    return _chat_request(given) if row[URL] == CHAT_URL else _text_request(given)


def _chat_request(given: dict[str, Any]) -> Asked:
    if "messages" not in given:
        raise RefusedError("messages: is missing")
    wanted, alternatives = given.pop("logprobs", False), given.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise RefusedError(f"logprobs: must be true or false, got {wanted!r}")
    if alternatives is not None and not wanted:
        raise RefusedError("top_logprobs: needs logprobs: true")
    messages = given.pop("messages")
    values = _values(given, _CHAT_ONLY)
    if wanted:
        values["logprobs"] = alternatives or 0
    return Asked(values, chat=[_with_known_role(message) for message in read_chat(messages)])


def _with_known_role(message: dict[str, Any]) -> dict[str, Any]:
    """Chat templates know the role `developer` by its older name."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _text_request(given: dict[str, Any]) -> Asked:
    prompt = given.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise RefusedError("prompt: must be a string or a list of one, write a line for each prompt")
    return Asked(_values(given, _TEXT_ONLY), text=prompt)


def _values(given: Mapping[str, Any], only: Mapping[str, str]) -> dict[str, Any]:
    """The sampling values in a body. `max_completion_tokens` goes before the older `max_tokens`."""
    names = {**_SAMPLING, **only}
    found: dict[str, Any] = {}
    for key, value in sorted(given.items()):
        if key in GRAMMAR_PARAMETERS:
            found["grammar"] = one_grammar(found, key, value)
        elif key in names:
            found.setdefault(names[key], _CONVERT.get(key, _as_given)(value))
        elif key not in _WITHOUT_EFFECT and not (key in _NEUTRAL and value in _NEUTRAL[key]):
            raise RefusedError(f"{key}: is not supported" + (f" as {_short(value)}" if key in _NEUTRAL else ""))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_given(value: Any) -> Any:
    """What is no plain value becomes text, which no parameter takes for its own."""
    return value if isinstance(value, (bool, int, float)) else json.dumps(value)


def _stops(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _top_k(value: Any) -> Any:
    """vLLM writes -1 for all tokens."""
    return 0 if value == -1 else value


_SAMPLING = {
    name: name
    for name in (
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "max_tokens",
        "stop_token_ids",
        "ignore_eos",
    )
} | {"include_stop_str_in_output": "include_stop"}
_CHAT_ONLY = {"max_completion_tokens": "max_tokens"}
_TEXT_ONLY = {"logprobs": "logprobs"}
_CONVERT: dict[str, Callable[[Any], Any]] = {"stop": _stops, "stop_token_ids": _stops, "top_k": _top_k}

# The model is the job's; the others only tell who asks.
_WITHOUT_EFFECT = frozenset({"model", "user", "metadata", "safety_identifier", "prompt_cache_key"})
# Parameters that may stand where they ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "store": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
}
