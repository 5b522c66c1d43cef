"""Canonical JSON: one byte string per value, and a parser that refuses whatever is not one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.artifacts.canonical import (
    MAX_JSON_BYTES,
    MAX_NESTING,
    artifact_id_of,
    canonical_bytes,
    decode_struct,
    parse_json,
)
from deepinfer.artifacts.schema import Limits
from deepinfer.errors import ArtifactCorruptError, ArtifactFormatError, DeepInferError

INTEGERS = st.integers(-(2**63), 2**63 - 1)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_every_value_reads_back_and_writes_the_same_bytes(value: object) -> None:
    data = canonical_bytes(value)
    again = parse_json(data, where="x")
    assert again == value
    assert canonical_bytes(again) == data


@given(st.dictionaries(st.text(max_size=3), SCALARS, min_size=2, max_size=6), st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_order_of_keys_does_not_matter(value: dict, random: object) -> None:
    keys = list(value)
    random.shuffle(keys)
    assert canonical_bytes({key: value[key] for key in keys}) == canonical_bytes(value)


def test_the_form_is_fixed() -> None:
    value = {"b": [1, 2.0, 1e-05, True, None], "a": "é\n", "A": {}}
    assert canonical_bytes(value) == '{"A":{},"a":"é\\n","b":[1,2.0,1e-05,true,null]}'.encode()
    assert artifact_id_of(b"{}") == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), {1: 2}, 2**63, -(2**63) - 1, {"x": print}, "\ud800", {"\udfff": 1}],
    ids=repr,
)
def test_what_json_cannot_hold_exactly_is_refused(value: object) -> None:
    with pytest.raises(ArtifactFormatError):
        canonical_bytes(value)


def test_nesting_is_limited_alike_in_writing_and_reading() -> None:
    value: object = 0
    for _ in range(MAX_NESTING):
        value = [value]
    assert parse_json(canonical_bytes(value), where="x") == value
    with pytest.raises(ArtifactFormatError):
        canonical_bytes([value])
    with pytest.raises(ArtifactCorruptError, match="nest deeper"):
        parse_json(b"[" * 65 + b"]" * 65, where="x")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{", "brackets"),
        (b"{}}", "brackets"),
        (b"{} {}", "not valid JSON"),
        (b'{"a":1,"a":2}', "'a' occurs twice"),
        (b'{"x":{"a":1,"b":2,"a":1}}', "'a' occurs twice"),
        (b"NaN", "NaN is not allowed"),
        (b"[Infinity]", "Infinity is not allowed"),
        (b"-Infinity", "-Infinity is not allowed"),
        (b"1e400", "overflows"),
        (b"9223372036854775808", "64 bits"),
        (b"1" * 100_000, "64 bits"),
        (b'"\xff"', "not UTF-8 at byte 1"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b'"\\ud800"', "surrogates"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"\xff\xfe{\0}\0", "not UTF-8"),
        (b"[" * 1_000_000, "brackets"),
        (b'{"a":' * 100_000, "brackets"),
        (b'["' + b"\\" * 1001 + b'"]', "not valid JSON"),
        (b"'a'", "not valid JSON"),
        (b"[1,]", "not valid JSON"),
        (b"01", "not valid JSON"),
        (b'"\n"', "not valid JSON"),
        (b" " * (MAX_JSON_BYTES + 1), "more than the limit"),
    ],
    ids=lambda value: ascii(value)[:24],
)
def test_bytes_that_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ArtifactCorruptError, match=reason) as caught:
        parse_json(data, where="some.json")
    assert caught.value.where == "some.json"


def test_brackets_and_quotes_inside_texts_do_not_count_as_nesting() -> None:
    value = {"text": '[[[{{{"\\"' * 100, "\\": "]"}
    assert parse_json(json.dumps(value).encode(), where="x") == value


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    try:
        parse_json(data, where="x")
    except DeepInferError:
        return
    json.loads(data)


@pytest.mark.parametrize(
    "data",
    [b'{"max_model_len":1}', b'{"max_model_len":1,"max_num_seqs":1,"x":1}', b"[]", b"null",
     b'{"max_model_len":true,"max_num_seqs":1}', b'{"max_model_len":"1","max_num_seqs":1}',
     b'{"max_model_len":1.0,"max_num_seqs":1.5}', b'{"max_model_len":-1,"max_num_seqs":1}'],
)  # fmt: skip
def test_structs_are_closed_and_typed(data: bytes) -> None:
    with pytest.raises(ArtifactFormatError):
        decode_struct(data, Limits, where="x")
