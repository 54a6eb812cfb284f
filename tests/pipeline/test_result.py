"""Result columns: one schema whatever happens, and text that ends where it should."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import EOS, ByteTokenizer

from batchgen.engine.request import Completion, RowError, Sample, Sampling, TokenLogprob, Usage
from batchgen.pipeline.result import ResultEncoder, answer_text, cut_at_stop, result_schema
from batchgen.pipeline.rows import RowTag

EOS_IDS = frozenset({EOS})
FAILED = RowError("engine", "generate", "too large", retryable=True)


class WordTokenizer(ByteTokenizer):
    """Tokens stand for pieces of text of any length."""

    def __init__(self, pieces: list[str]) -> None:
        super().__init__()
        self.pieces = pieces

    def decode(self, tokens: Any) -> str:
        return "".join(self.pieces[token] for token in tokens if token < len(self.pieces))


def encode(completions: list[Completion], **sampling: Any) -> list[dict[str, Any]]:
    encoder = ResultEncoder(ByteTokenizer(), Sampling(**sampling), EOS_IDS)
    batch = encoder.encode(completions)
    assert batch.schema.equals(encoder.schema)
    return batch.to_pylist()


def completion(key: int, *texts: str, **sampling: Any) -> Completion:
    samples = tuple(Sample([*text.encode(), EOS], "stop") for text in texts)
    return Completion(key, samples, Usage(9, 3, 5), tag=RowTag(key, Sampling(**sampling)))


def test_the_schema_is_that_of_the_contract() -> None:
    token = "token_id: int32, token: string, logprob: float"
    logprobs = f"list<item: struct<{token}, top: list<item: struct<{token}>>>>"
    usage = "struct<prompt_tokens: int32, cached_tokens: int32, completion_tokens: int32>"
    error = "struct<code: string, stage: string, message: string, retryable: bool>"
    types = {field.name: str(field.type) for field in result_schema(1, True)}
    assert types == {
        "completion": "string",
        "finish_reason": "string",
        "usage": usage,
        "error": error,
        "logprobs": logprobs,
    }
    many = result_schema(3, True, "m_")
    assert str(many.field("m_completion").type) == "list<item: string>"
    assert str(many.field("m_logprobs").type) == f"list<item: {logprobs}>"
    assert "logprobs" not in result_schema(1, False).names


def test_answers_and_failures_in_one_batch() -> None:
    rows = encode([completion(4, "yes"), Completion(2, (), error=FAILED)])
    usage = {"prompt_tokens": 9, "cached_tokens": 3, "completion_tokens": 5}
    assert rows[0] == {"position": 4, "completion": "yes", "finish_reason": "stop", "usage": usage, "error": None}
    assert rows[1]["completion"] is None
    assert rows[1]["finish_reason"] == "error"
    assert rows[1]["usage"] == dict.fromkeys(usage, 0)
    assert rows[1]["error"] == {"code": "engine", "stage": "generate", "message": "too large", "retryable": True}


def test_several_samples_are_lists() -> None:
    good, bad = encode([completion(0, "a", "b", n=2), Completion(1, (), error=FAILED)], n=2, logprobs=1)
    assert (good["completion"], good["finish_reason"]) == (["a", "b"], ["stop", "stop"])
    assert good["logprobs"] == [None, None]
    assert (bad["completion"], bad["finish_reason"], bad["logprobs"]) == (None, ["error"], None)


def test_nothing_at_all_has_the_full_schema() -> None:
    assert encode([], n=2, logprobs=0) == []


def test_an_empty_answer_is_an_answer() -> None:
    assert encode([completion(0, "")])[0]["completion"] == ""


def test_logprobs_carry_the_text_of_tokens() -> None:
    entries = [TokenLogprob(104, -0.5, ((104, -0.5), (EOS, -1.0))), TokenLogprob(EOS, -0.25)]
    sample = Sample([104, EOS], "stop", entries)
    [row] = encode([Completion(0, (sample,))], logprobs=2)
    assert row["logprobs"] == [
        {
            "token_id": 104,
            "token": "h",
            "logprob": -0.5,
            "top": [
                {"token_id": 104, "token": "h", "logprob": -0.5},
                {"token_id": EOS, "token": "</s>", "logprob": -1.0},
            ],
        },
        {"token_id": EOS, "token": "</s>", "logprob": -0.25, "top": []},
    ]


def text(tokens: list[int], reason: str = "stop", **sampling: Any) -> str:
    return answer_text(Sample(tokens, reason), Sampling(**sampling), EOS_IDS, ByteTokenizer())  # type: ignore[arg-type]


def test_the_token_that_ended_it_is_never_shown() -> None:
    assert text([*b"ab", EOS]) == "ab"
    assert text(list(b"ab\n"), stop_token_ids=(10,)) == "ab"
    assert text(list(b"a\nb\n"), reason="length", stop_token_ids=(10,), min_tokens=2) == "a\nb\n"
    assert text(list(b"ab\n"), stop=("b\n",)) == "a"


@pytest.mark.parametrize("include", [False, True])
@given(st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=8), st.integers(0, 20), st.integers(1, 6))
def test_text_ends_at_the_first_stop_string_however_tokens_cut_it(
    include: bool, pieces: list[str], start: int, length: int
) -> None:
    whole = "".join(pieces)
    stop = whole[start % len(whole) :][:length]
    sampling = Sampling(stop=(stop,), include_stop=include)
    found = answer_text(Sample(list(range(len(pieces))), "stop"), sampling, EOS_IDS, WordTokenizer(pieces))
    assert found == whole[: whole.find(stop) + (len(stop) if include else 0)]


def test_of_several_stop_strings_the_one_complete_first_counts() -> None:
    assert cut_at_stop("xabcdy", ["abcd", "bc"], include=False) == "xa"
    assert cut_at_stop("xabcdy", ["abcd", "bc"], include=True) == "xabc"
    assert cut_at_stop("xabc", ["bc", "abc"], include=False) == "x"
    assert cut_at_stop("none", ["q"], include=True) == "none"


def test_stop_strings_before_min_tokens_do_not_count() -> None:
    assert text(list(b"a.b.c"), stop=(".",), min_tokens=3) == "a.b"
    assert text(list(b"a.b.c"), stop=(".",), min_tokens=1) == "a"
    assert text(list(b"a.b.c"), stop=(".",), min_tokens=2) == "a.b"
    assert text(list(b"ab..c"), stop=("..",), min_tokens=3) == "ab"
    assert text(list(b"ab..c"), stop=("..",), min_tokens=4) == "ab..c"


def test_the_sampling_of_the_row_decides_its_cut() -> None:
    rows = encode([completion(0, "a.b", stop=(".",)), completion(1, "a.b")], stop=("b",))
    assert [row["completion"] for row in rows] == ["a", "a.b"]


def test_schema_does_not_follow_rows() -> None:
    encoder = ResultEncoder(ByteTokenizer(), Sampling(), EOS_IDS, "p_")
    good = encoder.encode([completion(0, "a")])
    bad = encoder.encode([Completion(1, (), error=FAILED)])
    assert good.schema.equals(bad.schema)
    assert good.schema.names == ["position", "p_completion", "p_finish_reason", "p_usage", "p_error"]
    assert pa.Table.from_batches([good, bad]).num_rows == 2
