"""Answers in the form of a hosted batch API: one object per row, with a chat completion or a text completion inside.

Knows the result columns of a row as Python values and the shapes of the API; which file a line goes to is the sink's
business. Published under platform.openai.com/docs/api-reference as the batch, chat and completions objects.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_REFUSED_STAGES = frozenset({"prompt", "request"})
_CODES = {"context_length": "context_length_exceeded"}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What all answers of a job say about it: the model's name, when the job began, what its ids begin with.

    `created` is in Unix seconds. `chat`: rows that do not name an endpoint are chats.
    """

    model: str
    created: int
    job: str
    chat: bool = True


def answer_line(
    form: AnswerForm, position: int, custom_id: str | None, chat: bool, row: Mapping[str, Any]
) -> dict[str, Any]:
    """The line of a row. `row` holds the result columns, lists throughout, without prefix."""
    name = f"{form.job}_{position:08d}"
    line = {"id": f"batch_req_{name}", "custom_id": custom_id}
    error = row["error"]
    if error is None:
        body = _chat_completion(form, name, row) if chat else _text_completion(form, name, row)
        return {**line, "response": _response(name, 200, body), "error": None}
    if error["stage"] in _REFUSED_STAGES:
        return {**line, "response": _response(name, 400, {"error": _refusal(error)}), "error": None}
    return {**line, "response": None, "error": {"code": error["code"], "message": error["message"]}}


def is_success(line: Mapping[str, Any]) -> bool:
    """Whether the line holds an answer."""
    return line["response"] is not None and line["response"]["status_code"] == 200


def _response(name: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{name}", "body": body}


def _refusal(error: Mapping[str, Any]) -> dict[str, Any]:
    parameter, colon, _ = error["message"].partition(":")
    known = error["code"] in ("bad_params", "bad_grammar") and colon and parameter.isidentifier()
    return {
        "message": error["message"],
        "type": "invalid_request_error",
        "param": parameter if known else None,
        "code": _CODES.get(error["code"], error["code"]),
    }


def _chat_completion(form: AnswerForm, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None
            if logprobs is None
            else {"content": [_chat_token(token) for token in logprobs], "refusal": None},
            "finish_reason": reason,
        }
        for index, text, reason, logprobs in _samples(row)
    ]
    return _completion(form, f"chatcmpl-{name}", "chat.completion", choices, row)


def _text_completion(form: AnswerForm, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else _text_tokens(logprobs),
            "finish_reason": reason,
        }
        for index, text, reason, logprobs in _samples(row)
    ]
    return _completion(form, f"cmpl-{name}", "text_completion", choices, row)


def _completion(
    form: AnswerForm, identifier: str, kind: str, choices: list[dict[str, Any]], row: Mapping[str, Any]
) -> dict[str, Any]:
    usage = row["usage"]
    return {
        "id": identifier,
        "object": kind,
        "created": form.created,
        "model": form.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]},
        },
        "system_fingerprint": None,
    }


def _samples(row: Mapping[str, Any]) -> list[tuple[int, str, str, list[dict[str, Any]] | None]]:
    texts, reasons = row["completion"], row["finish_reason"]
    logprobs = row["logprobs"] or [None] * len(texts)
    return list(zip(range(len(texts)), texts, reasons, logprobs, strict=True))


def _chat_token(token: Mapping[str, Any]) -> dict[str, Any]:
    return {**_token(token), "top_logprobs": [_token(other) for other in token["top"]]}


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    text = token["token"]
    whole = "\ufffd" not in text  # else it is part of a character, whose bytes the text does not tell
    return {"token": text, "logprob": token["logprob"], "bytes": list(text.encode()) if whole else None}


def _text_tokens(logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    offsets, length = [], 0
    for token in logprobs:
        offsets.append(length)
        length += len(token["token"])
    return {
        "tokens": [token["token"] for token in logprobs],
        "token_logprobs": [token["logprob"] for token in logprobs],
        "top_logprobs": [{other["token"]: other["logprob"] for other in token["top"]} for token in logprobs],
        "text_offset": offsets,
    }
