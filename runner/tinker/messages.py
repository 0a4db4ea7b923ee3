"""The protobuf messages of the protocol, and what they hold as numpy arrays. Arrays are little-endian.

    PassRequest, or the JSON of SDK 0.24 and earlier ──▶ PassRequest with data of numpy
    PassResult, SampleResult ──▶ PassResponse, SampleResponse, or JSON

Field numbers are those of the package tinker_public that SDK 0.25 and later send; names are ours, which protobuf does
not send. A map is the repeated message of its keys and values, as which it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from runner.core.errors import DataError
from runner.inference.engine import TokenEvent

PROTO = """
message Text { bytes tokens = 1; }
message Media { }
message Chunk { Text text = 1; Media image = 2; Media dmel = 3; }
message Sparse { bytes values = 1; bytes crow = 2; bytes col = 3; }
message Tensor { bytes dense = 1; Sparse sparse = 2; int32 dtype = 3; repeated int64 shape = 4; }
message Input { string key = 1; Tensor value = 2; }
message Datum { repeated Chunk chunks = 1; repeated Input inputs = 2; }
message Number { string key = 1; double value = 2; }
message OptionValue { double number = 1; string text = 2; }
message Option { string key = 1; OptionValue value = 2; }
message PassRequest {
  string model_id = 1; int32 seq_id = 2; repeated Datum data = 3; string loss_fn = 4; repeated Number numbers = 5;
  bool forward_only = 6; repeated Option options = 7;
}
message Batched { bytes data = 1; bytes offsets = 2; int32 dtype = 3; repeated int64 trailing_shape = 4; }
message Field { string key = 1; Batched value = 2; }
message Record { string type_tag = 1; repeated Field fields = 2; int64 num_datums = 3; }
message PassResponse { string loss_fn_output_type = 1; repeated Record records = 2; repeated Number metrics = 3; }
message Top { bytes token_ids = 1; bytes logprobs = 2; int32 k = 3; int32 length = 4; }
message Sequence { int32 stop_reason = 1; bytes tokens = 2; bytes logprobs = 3; Top top = 4; }
message SampleResponse { repeated Sequence sequences = 1; bytes prompt_logprobs = 2; Top prompt_top = 3; }
"""
DTYPES: Mapping[int, str] = {1: "<f4", 2: "<i8", 3: "<i4"}  # 4, bfloat16, is sent by no SDK
FLOAT32 = 1
STOP_REASONS = ("stop", "length")
NO_LOGPROB = -99999.0  # of an empty cell of the top-k tokens
MAX_SPARSE_CELLS = 1 << 26
TopTokens = Sequence[Sequence[tuple[int, float]]]  # of each position the top-k (id, log-probability)


def _message_classes() -> dict[str, Any]:
    """A class for each message of PROTO, by its name."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="run_tinker.proto", package="run_tinker", syntax="proto3")
    for name, body in re.findall(r"message (\w+) {(.*?)}", PROTO, re.DOTALL):
        message = file.message_type.add(name=name)
        for label, kind, field, number in re.findall(r"(repeated )?(\w+) (\w+) = (\d+);", body):
            scalar = kinds.Type.Value(f"TYPE_{kind.upper()}") if kind.islower() else kinds.TYPE_MESSAGE
            entry = message.field.add(name=field, number=int(number), type=scalar)
            entry.label = kinds.LABEL_REPEATED if label else kinds.LABEL_OPTIONAL
            if not kind.islower():
                entry.type_name = f".{file.package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(one) for name, one in found.items()}


MESSAGES = _message_classes()


@dataclass(frozen=True, slots=True)
class Datum:
    """A row to train on: ids int64 [N]; inputs: arrays of the loss, by name, [N] or [N, K]."""

    ids: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class PassRequest:
    """forward_backward, or forward where `forward_only`.

    read_data: raises DataError, KeyError, TypeError and the like where data are wrong
    """

    model_id: str
    seq_id: int | None
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool
    read_data: Callable[[], list[Datum]]


@dataclass(frozen=True, slots=True)
class PassResult:
    """logprobs: float32 of each datum, shaped as its targets; metrics: by `name:reduction`."""

    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """As SDK 0.24 and earlier may read it."""
        arrays = ({"data": x.ravel().tolist(), "dtype": "float32", "shape": list(x.shape)} for x in self.logprobs)
        outputs = [{"logprobs": array} for array in arrays]
        return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": dict(self.metrics)}

    def to_protobuf(self) -> bytes:
        """A record for each run of datums whose shapes agree after the first dimension."""
        response = MESSAGES["PassResponse"](loss_fn_output_type="ArrayRecord")
        for shape, arrays in groupby(self.logprobs, lambda values: values.shape[1:]):
            content = [values.astype("<f4").tobytes() for values in arrays]
            offsets = np.cumsum([0, *map(len, content)]).astype("<i8").tobytes()
            record = response.records.add(type_tag="ArrayRecord", num_datums=len(content))
            batched = {"data": b"".join(content), "offsets": offsets, "dtype": FLOAT32, "trailing_shape": shape}
            record.fields.add(key="logprobs", value=batched)
        for name, value in self.metrics.items():
            response.metrics.add(key=name, value=value)
        return bytes(response.SerializeToString())


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Sampled answers, and log-probabilities of the prompt, None at its first token.

    has_top: whether the top-k tokens of samples were requested
    """

    sequences: Sequence[Sequence[TokenEvent]]
    has_top: bool = False
    prompt_logprobs: Sequence[float | None] | None = None
    prompt_top: TopTokens | None = None

    def to_json(self) -> dict[str, Any]:
        """As SDK 0.24 and earlier may read it."""
        sequences = [
            {
                "stop_reason": events[-1].finish_reason,
                "tokens": [event.token_id for event in events],
                "logprobs": [event.logprob for event in events],
            }
            for events in self.sequences
        ]
        top = None if self.prompt_top is None else [list(map(list, cell)) or None for cell in self.prompt_top]
        found = {"prompt_logprobs": self.prompt_logprobs, "topk_prompt_logprobs": top}
        return {"type": "sample", "sequences": sequences, **found}

    def to_protobuf(self) -> bytes:
        """A SampleResponse."""
        prompt = np.asarray([np.nan if value is None else value for value in self.prompt_logprobs or ()], "<f4")
        top = None if self.prompt_top is None else _top(self.prompt_top)
        response = MESSAGES["SampleResponse"](prompt_logprobs=prompt.tobytes(), prompt_top=top)
        for events in self.sequences:
            response.sequences.add(
                stop_reason=STOP_REASONS.index(str(events[-1].finish_reason)),
                tokens=np.asarray([event.token_id for event in events], "<i4").tobytes(),
                logprobs=np.asarray([event.logprob for event in events], "<f4").tobytes(),
                top=_top([event.top_logprobs for event in events]) if self.has_top else None,
            )
        return bytes(response.SerializeToString())


def decode_pass_request(body: bytes) -> PassRequest:
    """The request in a protobuf body. Raises DataError where it is no such message."""
    try:
        given = MESSAGES["PassRequest"].FromString(body)
    except DecodeError as error:
        raise DataError(f"the body is not a valid protobuf message: {error}") from error

    def read_data() -> list[Datum]:
        return [Datum(_ids(one.chunks), {i.key: _array(i.value) for i in one.inputs}) for one in given.data]

    options = {one.key: one.value.text or one.value.number for one in given.options}
    config = options or {one.key: one.value for one in given.numbers}
    return PassRequest(given.model_id, given.seq_id or None, given.loss_fn, config, given.forward_only, read_data)


def read_pass_request(body: Mapping[str, Any], *, forward_only: bool) -> PassRequest:
    """The request in the JSON body of SDK 0.24 and earlier. Raises KeyError and the like for another body."""
    given = body["forward_input" if forward_only else "forward_backward_input"]

    def read_data() -> list[Datum]:
        rows = ((one["model_input"], one["loss_fn_inputs"]) for one in given["data"])
        return [Datum(read_model_input(row), {n: _json_array(t) for n, t in tensors.items()}) for row, tensors in rows]

    config = given.get("loss_fn_config") or {}
    return PassRequest(body["model_id"], body.get("seq_id"), given["loss_fn"], config, forward_only, read_data)


def read_model_input(given: Mapping[str, Any]) -> np.ndarray:
    """The ids of a ModelInput in JSON, int64 [N]. Raises DataError for images and audio."""
    chunks = given["chunks"]
    _refuse_media([str(chunk.get("type", "encoded_text")) for chunk in chunks if "tokens" not in chunk])
    return np.asarray([i for chunk in chunks for i in chunk["tokens"]], np.int64)


def _ids(chunks: Sequence[Any]) -> np.ndarray:
    _refuse_media([name for chunk in chunks for name in ("image", "dmel") if chunk.HasField(name)])
    return _numbers(b"".join(chunk.text.tokens for chunk in chunks), "<i4").astype(np.int64)


def _refuse_media(kinds: Sequence[str]) -> None:
    if kinds:
        raise DataError(f"the model input has a chunk of {kinds[0]}; this server accepts text tokens only")


def _numbers(content: bytes, dtype: str) -> np.ndarray:
    if len(content) % np.dtype(dtype).itemsize:
        raise DataError(f"{len(content)} bytes are not an array of {np.dtype(dtype).name}")
    return np.frombuffer(content, dtype)


def _array(tensor: Any) -> np.ndarray:
    if tensor.dtype not in DTYPES:
        raise DataError(f"data type {tensor.dtype} of a tensor is not supported; send float32 or int64")
    dtype, sparse = DTYPES[tensor.dtype], tensor.sparse
    if not tensor.HasField("sparse"):
        return _reshape(_numbers(tensor.dense, dtype), tensor.shape)
    crow, col = _numbers(sparse.crow, "<i8"), _numbers(sparse.col, "<i8")
    return _dense(_numbers(sparse.values, dtype), crow, col, tensor.shape)


def _json_array(tensor: Mapping[str, Any]) -> np.ndarray:
    values = np.asarray(tensor["data"], {"float32": np.float32, "int64": np.int64}[tensor["dtype"]])
    if (crow := tensor.get("sparse_crow_indices")) is None:
        return _reshape(values, tensor.get("shape") or ())
    return _dense(values, np.asarray(crow), np.asarray(tensor["sparse_col_indices"]), tensor["shape"])


def _reshape(values: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    if not shape:
        return values
    if min(shape) < 0 or int(np.prod(shape)) != values.size:
        raise DataError(f"a tensor of shape {list(shape)} has {values.size} values")
    return values.reshape(shape)


def _dense(values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """A CSR matrix as [N, K]; absent cells are 0."""
    counts = np.diff(crow)
    fits = len(shape) == 2 and len(crow) == shape[0] + 1 and len(col) == len(values) == counts.sum()
    if not fits or (counts < 0).any() or (len(col) and not 0 <= col.min() <= col.max() < shape[1]):
        raise DataError(f"the indices of a sparse tensor of shape {list(shape)} are damaged")
    if shape[0] * shape[1] > MAX_SPARSE_CELLS:
        raise DataError(f"a sparse tensor of shape {list(shape)} is too large")
    made = np.zeros(shape, values.dtype)
    made[np.repeat(np.arange(shape[0]), counts), col] = values
    return made


def _top(cells: TopTokens) -> dict[str, Any]:
    width = max(map(len, cells), default=0)
    padded = [[*cell, *[(0, NO_LOGPROB)] * (width - len(cell))] for cell in cells]
    table = np.asarray(padded, np.float64).reshape(len(cells), width, 2)
    ids, logprobs = table[:, :, 0].astype("<i4").tobytes(), table[:, :, 1].astype("<f4").tobytes()
    return {"token_ids": ids, "logprobs": logprobs, "k": width, "length": len(cells)}
