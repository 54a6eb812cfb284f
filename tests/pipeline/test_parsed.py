"""The Arrow type of a schema, and answers as its values."""

import json

import pyarrow as pa
import pytest
from stand_ins import EOS, ByteTokenizer

from batchgen.engine.request import Completion, Sample, Sampling
from batchgen.pipeline.parsed import AnswerParser, ParseError
from batchgen.pipeline.result import ResultEncoder, further_columns, result_schema

ITEM = {"type": "object", "properties": {"k": {"type": "number"}}}
TYPES = [
    ({"type": "string"}, pa.string()),
    ({"type": ["integer", "null"]}, pa.int64()),
    ({"type": ["integer", "number"]}, pa.float64()),
    ({"type": ["integer", "string"]}, pa.string()),
    ({"enum": ["a", None]}, pa.string()),
    ({"enum": [1, 2.5]}, pa.float64()),
    ({"enum": [True, 1]}, pa.string()),
    ({"const": False}, pa.bool_()),
    ({"const": None}, pa.string()),
    ({"enum": [{"a": 1}]}, pa.string()),
    ({"type": "array", "items": {"type": "integer"}}, pa.list_(pa.int64())),
    ({"type": "array"}, pa.list_(pa.string())),
    ({"type": "array", "prefixItems": [{"type": "string"}] * 2, "items": False}, pa.list_(pa.string())),
    ({"type": "array", "prefixItems": [{"type": "string"}]}, pa.list_(pa.string())),
    (ITEM, pa.struct([("k", pa.float64())])),
    ({"type": "object"}, pa.string()),
    ({}, pa.string()),
    ({"anyOf": [{"type": "null"}, ITEM]}, pa.struct([("k", pa.float64())])),
    ({"anyOf": [{"type": "string"}, ITEM]}, pa.string()),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": ITEM}}, pa.struct([("k", pa.float64())])),
    ({"$ref": "#/$defs/a%20b", "$defs": {"a b": ITEM}}, pa.struct([("k", pa.float64())])),
    ({"$id": "http://x/y", "$ref": "http://x/y#/$defs/a", "$defs": {"a": ITEM}}, pa.string()),
    ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", **ITEM}}}, pa.string()),
    ({"const": 10**30}, pa.string()),
    ({"enum": [1, 2**63]}, pa.string()),
    ({"allOf": [ITEM]}, pa.struct([("k", pa.float64())])),
    ({"allOf": [ITEM, ITEM]}, pa.string()),
    ({"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}, pa.list_(pa.string())),
]


@pytest.mark.parametrize(("schema", "kind"), TYPES, ids=lambda part: str(part)[:50])
def test_types(schema, kind):
    assert AnswerParser(schema).type == kind


def test_a_type_without_end_is_refused():
    definitions: dict = {"d0": {"type": "string"}}
    for at in range(1, 30):
        below = {"$ref": f"#/$defs/d{at - 1}"}
        definitions[f"d{at}"] = {"type": "object", "properties": {"a": below, "b": below}}
    with pytest.raises(ValueError, match="more than 10000 parts"):
        AnswerParser({"$ref": "#/$defs/d29", "$defs": definitions})


PERSON = AnswerParser(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "size": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "any": {},
        },
    }
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"name":"A","age":3,"size":1,"tags":["x"],"any":[1,null]}', ["A", 3, 1.0, ["x"], "[1, null]"]),
        ('{"name":null,"more":1}', [None, None, None, None, "null"]),
        (
            '{"name":"a\\udc00","any":{"\\ud800":"\\ud83d\\ude00"}}',
            ["a\ufffd", None, None, None, '{"\ufffd": "\U0001f600"}'],
        ),
    ],
)
def test_values_go_into_arrow(text, value):
    parsed = PERSON.parse(text)
    assert list(parsed.values()) == [*value[:4], value[4]]
    assert pa.array([parsed], PERSON.type).to_pylist() == [parsed]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name":', "it is no JSON: Expecting value at character 8"),
        ("", "no JSON"),
        ('{"age":"3"}', "age is '3', which is no int64"),
        ('{"age":true}', "age is True, which is no int64"),
        ('{"age":99999999999999999999}', "which is no int64"),
        ('{"tags":["a",1]}', r"tags\[1\] is 1, which is no string"),
        ('{"size":NaN}', "NaN is no JSON"),
        ('{"name":"x', "it is no JSON: Unterminated string starting at character 8"),
        ('{"size":1e999}', "1e999 is beyond the range of a double"),
        ('{"any":[-1e999]}', "-1e999 is beyond the range of a double"),
        (f'{{"size":1{"0" * 400}}}', r"10000000000000000000\.\.\. is beyond the range of a double"),
        (f'{{"age":1{"0" * 5000}}}', r"10000000000000000000\.\.\. has 5001 digits"),
        ("[1]", r"it is \[1\], which is no object"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_cannot_be_parsed_says_where(text, message):
    with pytest.raises(ParseError, match=message):
        PERSON.parse(text)


def encode(completions: list[Completion], n: int = 1) -> list[dict]:
    results = result_schema(n, False, "x_", further_columns(n, PERSON, False, True))
    encoder = ResultEncoder(ByteTokenizer(), Sampling(n=n), frozenset({EOS}), results=results, parser=PERSON)
    batch = encoder.encode(completions)
    assert batch.schema == encoder.schema
    for completion, reason in zip(completions, batch.column("x_finish_reason").to_pylist(), strict=True):
        assert encoder.is_whole(completion) == (reason in ("stop", ["stop"] * n))
    return [
        {key[2:] if key.startswith("x_") else key: value for key, value in row.items()} for row in batch.to_pylist()
    ]


def sample(text: str, reason: str = "stop") -> Sample:
    return Sample([*text.encode(), EOS] if reason == "stop" else list(text.encode()), reason)


def test_rows_keep_their_text_whatever_becomes_of_it():
    whole, cut, wrong = encode(
        [
            Completion(0, (sample('{"name":"A"}'),)),
            Completion(1, (sample('{"name":"A', "length"),), attempts=3),
            Completion(2, (sample('{"name":1}'),)),
        ]
    )
    assert (whole["parsed"]["name"], whole["error"], whole["attempts"]) == ("A", None, 1)
    assert (cut["completion"], cut["finish_reason"], cut["parsed"], cut["attempts"]) == (
        '{"name":"A',
        "length",
        None,
        3,
    )
    assert (cut["error"]["code"], cut["error"]["stage"]) == ("parse", "output")
    assert (wrong["completion"], wrong["finish_reason"]) == ('{"name":1}', "error")
    assert wrong["error"]["message"] == "the answer cannot be parsed: name is 1, which is no string"


def test_several_answers_of_a_row():
    (row,) = encode([Completion(0, (sample('{"age":1}'), sample("{"), sample("{", "length")))], n=3)
    assert [value and value["age"] for value in row["parsed"]] == [1, None, None]
    assert row["finish_reason"] == ["stop", "error", "length"]
    assert row["completion"] == [json.dumps({"age": 1}, separators=(",", ":")), "{", "{"]
    assert row["error"]["code"] == "parse"
