"""The protobuf wire format (protobuf.dev/programming-guides/encoding), as far as it is used.

A message is a mapping of field numbers to (name, type). Types: "text", "bytes", "int" (any varint), "bool", "double",
"ints" (packed), another message, [type] (repeated), Map(type) (with text keys). Decoded messages are dictionaries;
absent fields are absent, repeated fields and maps are always there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runner.core.errors import DataError

Kind = Any  # see the module: it is recursive, which mypy's types are not
Message = Mapping[int, tuple[str, Kind]]
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
DOUBLE = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Map:
    """The type of a map from text to `value`."""

    value: Kind

    @property
    def entry(self) -> Message:
        """The message that holds one key and its value."""
        return {1: ("key", "text"), 2: ("value", self.value)}


def decode(message: Message, data: bytes | memoryview) -> dict[str, Any]:
    """The fields of an encoded message; unknown ones are skipped. Raises DataError for damaged bytes."""
    found: dict[str, Any] = {}
    for name, kind in message.values():
        if isinstance(kind, list):
            found[name] = []
        elif isinstance(kind, Map):
            found[name] = {}
    try:
        for number, value in _fields(memoryview(data)):
            if number not in message:
                continue
            name, kind = message[number]
            if isinstance(kind, list):
                found[name].append(_value(kind[0], value))
            elif isinstance(kind, Map):
                entry = decode(kind.entry, _as_bytes(value))
                empty = decode(kind.value, b"") if isinstance(kind.value, Mapping) else 0.0
                found[name][entry.get("key", "")] = entry.get("value", empty)
            else:
                found[name] = _value(kind, value)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"the body is no valid protobuf message: {error}") from error
    return found


def encode(message: Message, values: Mapping[str, Any]) -> bytes:
    """The bytes of a message; fields without a value, or with None, are left out."""
    made = bytearray()
    for number, (name, kind) in message.items():
        if (value := values.get(name)) is None:
            continue
        if isinstance(kind, list):
            for one in value:
                made += _field(number, kind[0], one)
        elif isinstance(kind, Map):
            for key, one in value.items():
                made += _field(number, kind.entry, {"key": key, "value": one})
        else:
            made += _field(number, kind, value)
    return bytes(made)


def _fields(data: memoryview) -> Iterator[tuple[int, int | float | memoryview]]:
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, at = _read_varint(data, at)
            yield number, value
        elif wire == FIXED64:
            yield number, DOUBLE.unpack_from(data, at)[0]
            at += 8
        elif wire == BYTES:
            size, at = _read_varint(data, at)
            if at + size > len(data):
                raise IndexError(f"field {number} ends after the message")
            yield number, data[at : at + size]
            at += size
        elif wire == FIXED32:
            at += 4
        else:
            raise IndexError(f"field {number} has the unknown wire type {wire}")


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("a number has more than 10 bytes")


def _as_bytes(value: int | float | memoryview) -> memoryview:
    if not isinstance(value, memoryview):
        raise IndexError("a number stands where bytes are expected")
    return value


def _value(kind: Kind, value: int | float | memoryview) -> Any:
    if isinstance(kind, Mapping):
        return decode(kind, _as_bytes(value))
    if kind == "text":
        return str(_as_bytes(value), "utf-8")
    if kind == "bytes":
        return bytes(_as_bytes(value))
    if kind == "ints":
        return _read_ints(value)
    if isinstance(value, memoryview):
        raise IndexError("bytes stand where a number is expected")
    if kind == "int":
        return int(value) - (1 << 64) if value >= 1 << 63 else int(value)
    return bool(value) if kind == "bool" else float(value)


def _read_ints(value: int | float | memoryview) -> list[int]:
    if not isinstance(value, memoryview):
        return [int(value)]
    found, at = [], 0
    while at < len(value):
        one, at = _read_varint(value, at)
        found.append(one - (1 << 64) if one >= 1 << 63 else one)
    return found


def _field(number: int, kind: Kind, value: Any) -> bytes:
    if kind == "double":
        return _varint(number << 3 | FIXED64) + DOUBLE.pack(value)
    if kind in ("int", "bool"):
        return _varint(number << 3 | VARINT) + _varint(int(value))
    if isinstance(kind, Mapping):
        content = encode(kind, value)
    elif kind == "ints":
        content = b"".join(map(_varint, value))
    else:
        content = value.encode() if kind == "text" else bytes(value)
    return _varint(number << 3 | BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
