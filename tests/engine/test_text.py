"""Incremental text, stop strings and the end of answers, on decoders that split characters or drop a leading blank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.detokenize import IncrementalText
from batchgen.engine.request import Sampling
from batchgen.engine.stopping import NoStops, end_tokens, finish_reason, stop_search


def decode_bytes(tokens) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def decode_words(tokens) -> str:
    """Like SentencePiece: every token starts with a blank, which the first one of a text loses."""
    return "".join(f" w{token}" for token in tokens).removeprefix(" ")


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=60))
def test_pieces_join_to_the_whole_text_and_split_no_character(text):
    stream = IncrementalText(decode_bytes)
    pieces = [stream.push(token) for token in text.encode()]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + stream.flush() == text


@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_join_to_the_whole_decode(tokens):
    stream = IncrementalText(decode_bytes)
    assert "".join([*(stream.push(token) for token in tokens), stream.flush()]) == decode_bytes(tokens)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20))
def test_a_decoder_that_strips_the_first_blank_keeps_the_others(tokens):
    stream = IncrementalText(decode_words)
    assert "".join([*(stream.push(token) for token in tokens), stream.flush()]) == decode_words(tokens)


def test_an_emoji_of_several_tokens_appears_once_it_is_whole():
    stream = IncrementalText(decode_bytes)
    pieces = [stream.push(byte) for byte in "👩‍👩‍👧x".encode()]
    assert pieces[:3] == ["", "", ""]
    assert pieces[3] == "👩"
    assert "".join(pieces) == "👩‍👩‍👧x"


def stops_at(text: str, stops: tuple[str, ...]) -> int | None:
    """The byte after which the search reports a stop."""
    search = stop_search(Sampling(stop=stops), decode_bytes)
    return next((index + 1 for index, byte in enumerate(text.encode()) if search.push(byte)), None)


@settings(deadline=None)
@given(st.text(alphabet="ab·é\n", min_size=1, max_size=40), st.integers(0, 39), st.integers(1, 6))
def test_every_piece_of_a_text_is_found_where_it_first_ends(text, start, length):
    piece = text[start : start + length] or text[:1]
    first_end = len(text[: text.index(piece) + len(piece)].encode())
    assert stops_at(text, (piece,)) == first_end


def test_a_stop_string_that_did_not_count_is_not_found_again():
    search = stop_search(Sampling(stop=("ab", "xxxxxxxxxx")), decode_bytes)
    assert [search.push(byte) for byte in b"abcdab"] == [False, True, False, False, False, True]


def test_text_before_a_half_character_is_seen_at_once():
    stream = IncrementalText(decode_bytes)
    assert [stream.push(byte) for byte in b"a\xf0b\xf0\x9f"] == ["a", "", "\ufffdb", "", ""]
    assert stream.flush() == "\ufffd"


def test_endless_garbage_is_decoded_in_pieces_of_bounded_length():
    longest = 0

    def decode(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode_bytes(tokens)

    stream = IncrementalText(decode)
    pieces = [stream.push(0xFF) for _ in range(1000)]
    assert longest < 100
    assert len("".join(pieces) + stream.flush()) == 1000


def test_the_earliest_of_several_stops_ends_the_answer():
    assert stops_at("one two three", ("three", "tw")) == 6
    assert stops_at("one two three", ("four",)) is None


def test_without_stop_strings_nothing_is_decoded():
    def refuse(tokens):
        raise AssertionError("decoded")

    search = stop_search(Sampling(), refuse)
    assert isinstance(search, NoStops)
    assert not search.push(1)


@pytest.mark.parametrize(
    ("token", "length", "text", "reason"),
    [
        (5, 4, False, "stop"),
        (5, 3, False, None),  # an end token among the first min_tokens
        (6, 4, True, "stop"),
        (6, 4, False, None),
        (6, 10, False, "length"),
        (5, 10, False, "stop"),
        (6, 2, True, None),
    ],
)
def test_why_an_answer_ends(token, length, text, reason):
    sampling = Sampling(max_tokens=10, min_tokens=3)
    assert finish_reason(token, length, text, sampling, frozenset({5})) == reason


def test_end_tokens_join_the_model_s_and_the_row_s():
    assert end_tokens(Sampling(stop_token_ids=(9,)), frozenset({1, 2})) == {1, 2, 9}
    assert end_tokens(Sampling(stop_token_ids=(9,), ignore_eos=True), frozenset({1, 2})) == {9}
