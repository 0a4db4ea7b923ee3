"""Our codec against Google's, on a message that has every kind of field that we use; and damaged bytes."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from runner.core.errors import DataError
from runner.tinker.protobuf import Map, Message, decode, encode

INNER: Message = {1: ("text", "text"), 2: ("number", "int")}
OURS: Message = {
    1: ("text", "text"),
    2: ("content", "bytes"),
    3: ("number", "int"),
    4: ("flag", "bool"),
    5: ("real", "double"),
    6: ("numbers", "ints"),
    7: ("inner", INNER),
    8: ("several", [INNER]),
    9: ("table", Map(INNER)),
    10: ("reals", Map("double")),
}
INT64 = st.integers(-(2**63), 2**63 - 1)
INNERS = st.fixed_dictionaries({"text": st.text(), "number": INT64})
VALUES = st.fixed_dictionaries(
    {
        "text": st.text(),
        "content": st.binary(),
        "number": INT64,
        "flag": st.booleans(),
        "real": st.floats(allow_nan=False),
        "numbers": st.lists(INT64, min_size=1),
        "inner": INNERS,
        "several": st.lists(INNERS),
        "table": st.dictionaries(st.text(), INNERS),
        "reals": st.dictionaries(st.text(), st.floats(allow_nan=False)),
    }
)


def google_class() -> Any:
    """The same message, described to Google's library."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="ours.proto", package="ours", syntax="proto2")
    inner = file.message_type.add(name="Inner")
    inner.field.add(name="text", number=1, type=field.TYPE_STRING, label=1)
    inner.field.add(name="number", number=2, type=field.TYPE_INT64, label=1)
    outer = file.message_type.add(name="Ours")
    plain = (("text", 9), ("content", 12), ("number", 3), ("flag", 8), ("real", 1), ("numbers", 3))
    for number, (name, kind) in enumerate(plain, 1):
        outer.field.add(name=name, number=number, type=kind, label=3 if name == "numbers" else 1)
    outer.field[5].options.packed = True
    for number, name, label in ((7, "inner", 1), (8, "several", 3)):
        outer.field.add(name=name, number=number, type=11, type_name=".ours.Inner", label=label)
    for number, name, kind, type_name in ((9, "table", 11, ".ours.Inner"), (10, "reals", 1, None)):
        entry = outer.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=9, label=1)
        entry.field.add(name="value", number=2, type=kind, type_name=type_name, label=1)
        outer.field.add(name=name, number=number, type=11, type_name=f".ours.Ours.{entry.name}", label=3)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ours.Ours"))


GOOGLE = google_class()


def as_google(values: dict[str, Any]) -> Any:
    made = GOOGLE(**{n: v for n, v in values.items() if n not in ("table", "inner", "several")})
    made.inner.MergeFrom(type(made.inner)(**values["inner"]))
    for one in values["several"]:
        made.several.add(**one)
    for key, one in values["table"].items():
        made.table[key].MergeFrom(type(made.inner)(**one))
    return made


@given(VALUES)
def test_it_writes_and_reads_what_googles_library_does(values: dict[str, Any]) -> None:
    assert decode(OURS, as_google(values).SerializeToString()) == values
    assert GOOGLE.FromString(encode(OURS, values)) == as_google(values)


def test_unknown_fields_are_skipped_and_absent_ones_absent() -> None:
    content = encode({**OURS, 20: ("new", "text"), 21: ("newer", "double")}, {"new": "x", "newer": 1.5, "number": 3})
    assert decode(OURS, content) == {"number": 3, "several": [], "table": {}, "reals": {}}


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_data_error(content: bytes) -> None:
    try:
        decode(OURS, content)
    except DataError as error:
        assert "no valid protobuf message" in str(error)


def test_a_message_that_is_cut_off_is_refused() -> None:
    with pytest.raises(DataError, match="field 2 ends after the message"):
        decode(OURS, encode(OURS, {"content": b"12345"})[:-1])
