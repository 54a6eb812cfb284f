"""What grammars accept, what is refused and how it is said; states that follow tokens. No model is needed."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from batchgen.engine import Grammar, Sampling
from batchgen.engine.grammar import GrammarError, check_grammar, new_matcher, source_of
from batchgen.engine.grammar_schema import MAX_DEPTH
from batchgen.engine.grammar_state import MAX_KEPT, UNCONSTRAINED, Budget, MatcherState

BYTES = LLTokenizer("byte")


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the whole text is an answer, byte by byte."""
    matcher = new_matcher(BYTES, source_of(grammar))
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def schema(**keywords) -> Grammar:
    return Grammar.json_schema(keywords)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
ACCEPTED = [
    (Grammar.choices(["yes", "yes please", "no"]), ["yes", "yes please", "no"], ["", "ye", "yes ", "no please", "YES"]),
    (Grammar.choices(['a"b\\', "ü\n", "日本"]), ['a"b\\', "ü\n", "日本"], ["a", "日", "ü"]),
    (Grammar.choices(["a\x7fb", "\x1f\x80\ufeff", "🦊\u2028"]), ["a\x7fb", "\x1f\x80\ufeff", "🦊\u2028"], ["ab", "🦊"]),
    (Grammar.regex(r"[a-c]{2,3}"), ["ab", "abc"], ["a", "abcd", "xab"]),
    (Grammar.regex(r"\d{5}"), ["12345"], ["1234", "123456"]),
    (Grammar.regex("(([abc]*)*)*x"), ["x", "abcx"], ["abc"]),
    (Grammar.lark('start: "a" b+\nb: "x" | "y"'), ["ax", "axyy"], ["a", "ab", "x"]),
    (
        Grammar.json_schema(PERSON),
        ['{"name":"A","age":3}', '{"name":""}'],
        ['{"age":3}', '{"name": "A"}', '{"name":1}'],
    ),
    (Grammar.json_schema(PERSON), [], ['{"name":"A","x":1}', '{"name":"A","age":3.5}', '{"age":3,"name":"A"}', "{}"]),
    (schema(enum=["a", 1, None, {"b": [2]}]), ['"a"', "1", "null", '{"b":[2]}'], ["a", "2", '"1"', "true"]),
    (schema(const={"k": 1}), ['{"k":1}'], ['{"k":2}', "{}"]),
    (
        schema(type="array", items={"type": "boolean"}, minItems=1, maxItems=2),
        ["[true]", "[true,false]"],
        ["[]", "[1]"],
    ),
    (schema(type="array", maxItems=1, items={"type": "null"}), ["[]", "[null]"], ["[null,null]"]),
    (schema(type=["string", "null"]), ["null", '"x"'], ["1", "nul"]),
    (schema(type="object", additionalProperties={"type": "integer"}), ["{}", '{"a":1,"b":2}'], ['{"a":"x"}']),
    (schema(type="string", pattern=r"^\d{5}$"), ['"12345"'], ['"1234"', '"123456"', '"a12345"']),
    (schema(type="string", pattern="a^b"), [], ['"ab"', '"a^b"']),
    (schema(type="string", pattern="ab"), ['"ab"', '"xaby"'], ['"a"', '"ba"']),
    (schema(type="string", minLength=2, maxLength=3), ['"ab"', '"日本語"'], ['"a"', '"abcd"']),
    (schema(type="integer", minimum=3, exclusiveMaximum=12), ["3", "11"], ["2", "12", "3.5"]),
    (schema(type="integer", minimum=2**53, maximum=2**53), [str(2**53)], [str(2**53 - 1), str(2**53 + 1)]),
    (schema(enum=[2**53, -(2**53)]), [str(2**53), str(-(2**53))], [str(2**53 + 1)]),
    (schema(anyOf=[{"type": "integer"}, {"const": "x"}]), ["7", '"x"'], ['"y"']),
    (
        Grammar.json_schema({"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}),
        ["[]", "[[],[[]]]"],
        ["[1]", "[[]"],
    ),
    (Grammar.json_schema({"x-guidance": {"whitespace_flexible": True}, "type": "array"}), ["[ 1 ]"], ["[ 1 "]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), ACCEPTED, ids=lambda part: str(part)[:40])
def test_accepted_texts(grammar, good, bad):
    if not good and grammar == schema(type="string", pattern="a^b"):
        with pytest.raises(GrammarError):
            check_grammar(grammar)
        return
    check_grammar(grammar)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def nested(depth: int) -> dict:
    inner: dict = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "array", "items": inner}
    return inner


REFUSED = [
    (Grammar.regex("["), "unclosed character class"),
    (Grammar.regex("(a"), "unclosed group"),
    (Grammar.regex("a(?=b)"), "look-around"),
    (Grammar.regex("a\\"), "ends in a lone backslash"),
    (Grammar.regex(""), "matches only the empty text"),
    (Grammar.regex("(" * 10_000 + "a" + ")" * 10_000), "exceed"),
    (Grammar.regex("\ud800"), "lone surrogate"),
    (Grammar.lark("start: foo"), "foo"),
    (Grammar.lark("start: %%%"), "lexer error"),
    (Grammar.lark('start: a\na: a "x"'), "matches no text"),
    (Grammar.lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
    (Grammar.choices([]), "non-empty texts"),
    (Grammar.choices(["a", ""]), "non-empty texts"),
    (Grammar.choices(["a", "b", "a"]), "'a' is listed twice"),
    (Grammar.choices([f"c{i}" for i in range(10_001)]), "more than 10000"),
    (schema(type="objekt"), "objekt"),
    (schema(type="object", properties=[]), "properties: must be a mapping"),
    (schema(type="object", properties={"a": {"type": "string", "maxlength": 3}}), "properties.a.maxlength: keyword"),
    (schema(type="array", items={"anyOf": [{}, {"not": {}}]}), r"items.anyOf\[1\].not: keyword is not supported"),
    (schema(type="array", items=[{"type": "string"}]), "items: must be a schema"),
    (schema(type="array", uniqueItems=True), "uniqueItems: keyword is not supported"),
    ({"if": {}, "then": {}}, "if: keyword is not supported"),
    (schema(properties={"x": {"x-guidance": {}}}), "properties.x.x-guidance: keyword is not supported"),
    ({"$ref": "#/nope"}, "nope"),
    (schema(type="string", minLength=5, maxLength=2), "minLength"),
    (schema(type="integer", minimum=2**53 + 1), "minimum: 9007199254740993 is beyond 2"),
    (schema(properties={"a": {"exclusiveMaximum": -1e20}}), r"properties.a.exclusiveMaximum: -1e\+20 is beyond 2"),
    (schema(enum=[{"a": [-(2**63)]}]), "enum: -9223372036854775808 is beyond 2"),
    (schema(const=1e30), r"const: 1e\+30 is beyond 2"),
    (schema(type="object", required=["a"], additionalProperties=False), "unsatisfiable"),
    (schema(type="string", format="weird"), "weird"),
    (Grammar.json_schema(nested(MAX_DEPTH + 1)), "nested more than"),
    (Grammar("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000), "nested"),
    (Grammar.json_schema({"const": json.loads("[" * 200 + "]" * 200)}), "nested more than 127 deep"),
    (Grammar("json_schema", "[1]"), "must be a mapping"),
    (Grammar("json_schema", "{"), "is not JSON"),
]


@pytest.mark.parametrize(("grammar", "message"), REFUSED, ids=lambda part: str(part)[:40])
def test_refused_grammars(grammar, message):
    grammar = grammar if isinstance(grammar, Grammar) else Grammar.json_schema(grammar)
    with pytest.raises(GrammarError, match=message) as caught:
        check_grammar(grammar)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def exploding_schema(levels: int) -> dict:
    """Each level is the intersection of two alternatives of the level below."""
    definitions: dict = {"d0": {"type": "object", "properties": {"a": {"type": "string"}}}}
    for at in range(1, levels):
        below = {"$ref": f"#/$defs/d{at - 1}"}
        extra = {"type": "object", "properties": {f"x{at}": below}}
        definitions[f"d{at}"] = {"allOf": [{"anyOf": [below, extra]}, {"anyOf": [extra, below]}]}
    return {"$defs": definitions, "$ref": f"#/$defs/d{levels - 1}"}


def test_a_schema_that_explodes_is_refused_by_its_size():
    with pytest.raises(GrammarError, match="too large"):
        check_grammar(Grammar.json_schema(exploding_schema(9)))


def test_a_deep_schema_is_honoured():
    check_grammar(Grammar.json_schema(nested(MAX_DEPTH - 1)))


def test_large_but_honest_grammars_are_honoured():
    check_grammar(Grammar.choices([f"label {i}" for i in range(10_000)]))
    check_grammar(Grammar.json_schema({"enum": [f"value {i}" for i in range(5_000)]}))


def test_what_is_no_json_is_refused_when_it_is_written_down():
    with pytest.raises(GrammarError, match="is not JSON"):
        Grammar.json_schema({"const": {1, 2}})
    with pytest.raises(GrammarError, match="is not JSON"):
        Grammar.json_schema({"const": float("nan")})
    deep: dict = {}
    for _ in range(10_000):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="is not JSON"):
        Grammar.json_schema(deep)


def test_descriptions_compare_and_hash():
    assert Grammar.json_schema(PERSON) == Grammar.json_schema(json.loads(json.dumps(PERSON)))
    assert len({Grammar.regex("a"), Grammar.regex("a"), Grammar.lark("a")}) == 2
    turned = {**PERSON, "properties": dict(reversed(list(PERSON["properties"].items())))}
    assert Grammar.json_schema(PERSON) != Grammar.json_schema(turned)  # the order of properties is part of the answer
    assert Sampling(grammar=Grammar.regex("a")) == Sampling(grammar=Grammar.regex("a"))
    with pytest.raises(ValueError, match=r"^grammar: must be a Grammar, got 'a'"):
        Sampling(grammar="a")


def start(grammar: Grammar, kept: int = MAX_KEPT) -> MatcherState:
    return MatcherState(new_matcher(BYTES, source_of(grammar)), Budget(True, kept))


def follow(state: MatcherState, text: str) -> MatcherState:
    for token in text.encode():
        state = state.after(token)
    return state


def test_states_are_finished_where_nothing_can_follow():
    state = start(Grammar.choices(["yes", "yes please"]))
    assert (state.accepting, state.finished) == (False, False)
    assert (follow(state, "yes").accepting, follow(state, "yes").finished) == (True, False)
    assert follow(state, "yes please").finished
    wrong = follow(state, "no")
    assert wrong.error is not None
    assert not wrong.finished
    assert not UNCONSTRAINED.finished
    assert list(UNCONSTRAINED.forced()) == []


@given(st.lists(st.text("abx", min_size=1, max_size=6), min_size=1, max_size=30), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_states_do_not_depend_on_who_came_before(texts, kept):
    """Kept states, private ones and those of a fresh grammar are the same; nobody changes a state behind them."""
    grammar = Grammar.regex("[ab]{1,3}x?[ab]*")
    shared = start(grammar, kept)
    for text in texts:
        state, alone = follow(shared, text), follow(start(grammar, 0), text)
        assert (state.error is None) == (alone.error is None)
        assert (state.accepting, state.finished) == (alone.accepting, alone.finished)
        assert bytes(state.matcher.compute_bitmask()) == bytes(alone.matcher.compute_bitmask())
    assert shared.budget.left >= 0


def test_a_way_taken_twice_is_kept():
    first = start(Grammar.regex("[ab]*"))
    assert first.after(97) is not first.after(97)
    assert first.after(97) is first.after(97)
    full = start(Grammar.regex("[ab]*"), 0)
    full.after(97), full.after(97)
    assert full.after(97) is not full.after(97)


def test_llguidance_is_loaded_without_torch():
    code = "import sys, batchgen.engine.grammar; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/").stdout == "False\n"


def test_a_choice_of_any_character_is_accepted():
    codes = [*range(0x300), *range(0x2000, 0x2070), 0xD7FF, 0xE000, 0xFFFD, 0xFFFE, 0xFFFF, 0x10000, 0x10FFFF]
    texts = [f"a{chr(code)}b" for code in codes]
    grammar = Grammar.choices(texts)
    check_grammar(grammar)
    assert all(accepts(grammar, text) for text in texts[::7])
