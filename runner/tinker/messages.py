"""The protobuf messages of the protocol, and what they hold as numpy arrays.

Field numbers are those of the package tinker_public that SDK 0.25 and later send. Arrays are little-endian.

    ForwardBackwardRequest, or the JSON of SDK 0.24 and earlier ──▶ PassRequest
    PassResult, SampleResult ──▶ ForwardBackwardOutput, SampleResponse, or JSON
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.core.errors import DataError
from runner.tinker.protobuf import Map, Message, decode, encode

TENSOR: Message = {
    1: ("dense", "bytes"),
    2: ("sparse", {1: ("values", "bytes"), 2: ("crow", "bytes"), 3: ("col", "bytes")}),
    3: ("dtype", "int"),
    4: ("shape", "ints"),
}
DATUM: Message = {
    1: ("chunks", [{1: ("text", {1: ("tokens", "bytes")}), 2: ("image", {}), 3: ("dmel", {})}]),
    2: ("inputs", Map(TENSOR)),
}
REQUEST: Message = {
    1: ("model_id", "text"),
    2: ("seq_id", "int"),
    3: ("data", [DATUM]),
    4: ("loss_fn", "text"),
    5: ("config", Map("double")),
    6: ("forward_only", "bool"),
    7: ("config_v2", Map({1: ("number", "double"), 2: ("text", "text")})),
}
BATCHED: Message = {1: ("data", "bytes"), 2: ("offsets", "bytes"), 3: ("dtype", "int"), 4: ("trailing_shape", "ints")}
OUTPUT: Message = {
    1: ("loss_fn_output_type", "text"),
    2: ("records", [{1: ("type_tag", "text"), 2: ("fields", Map(BATCHED)), 3: ("num_datums", "int")}]),
    3: ("metrics", Map("double")),
}
TOP: Message = {1: ("token_ids", "bytes"), 2: ("logprobs", "bytes"), 3: ("k", "int"), 4: ("length", "int")}
SAMPLE: Message = {
    1: ("sequences", [{1: ("stop_reason", "int"), 2: ("tokens", "bytes"), 3: ("logprobs", "bytes"), 4: ("top", TOP)}]),
    2: ("prompt_logprobs", "bytes"),
    3: ("topk_prompt_logprobs", TOP),
}
DTYPES: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<i8"),
    3: np.dtype("<i4"),
}  # 4, bfloat16, is sent by no SDK
FLOAT32 = 1
STOP_REASONS = ("stop", "length")
NO_LOGPROB = -99999.0  # of a cell of the likeliest tokens that is empty
TopTokens = Sequence[Sequence[tuple[int, float]]]  # of each position the likeliest (id, log-probability)


@dataclass(frozen=True, slots=True)
class Datum:
    """A row to train on: ids int64 [N]; inputs: arrays of the loss, by name, [N] or [N, K]."""

    ids: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class PassRequest:
    """forward_backward, or forward where `forward_only`. data: or why it cannot be read."""

    model_id: str
    seq_id: int
    data: Sequence[Datum] | DataError
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class PassResult:
    """logprobs: float32 of each datum, shaped as its targets; metrics: by `name:reduction`."""

    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """As SDK 0.24 and earlier read it."""
        outputs = [{"logprobs": _tensor_json(values)} for values in self.logprobs]
        return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": dict(self.metrics)}

    def to_protobuf(self) -> bytes:
        """A record for each run of datums whose shapes agree after the first dimension."""
        records = []
        first = 0
        for at in range(1, len(self.logprobs) + 1):
            if at == len(self.logprobs) or self.logprobs[at].shape[1:] != self.logprobs[first].shape[1:]:
                records.append(_record(self.logprobs[first:at]))
                first = at
        values = {"loss_fn_output_type": "ArrayRecord", "records": records, "metrics": self.metrics}
        return encode(OUTPUT, values)


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sampled answer; top: the likeliest tokens in the place of each, where they were requested."""

    stop_reason: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    top: TopTokens | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Sampled answers, and log-probabilities of the prompt, None at its first token."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Sequence[float | None] | None = None
    prompt_top: TopTokens | None = None

    def to_json(self) -> dict[str, Any]:
        """As SDK 0.24 and earlier may read it."""
        sequences = [
            {"stop_reason": one.stop_reason, "tokens": list(one.tokens), "logprobs": list(one.logprobs)}
            for one in self.sequences
        ]
        top = None if self.prompt_top is None else [list(map(list, cell)) or None for cell in self.prompt_top]
        found = {"prompt_logprobs": self.prompt_logprobs, "topk_prompt_logprobs": top}
        return {"type": "sample", "sequences": sequences, **found}

    def to_protobuf(self) -> bytes:
        """A SampleResponse."""
        sequences = [
            {
                "stop_reason": STOP_REASONS.index(one.stop_reason),
                "tokens": np.asarray(one.tokens, "<i4").tobytes(),
                "logprobs": np.asarray(one.logprobs, "<f4").tobytes(),
                "top": None if one.top is None else _top(one.top),
            }
            for one in self.sequences
        ]
        prompt = self.prompt_logprobs
        scores = [np.nan if value is None else value for value in prompt or ()]
        values = {
            "sequences": sequences,
            "prompt_logprobs": None if prompt is None else np.asarray(scores, "<f4").tobytes(),
            "topk_prompt_logprobs": None if self.prompt_top is None else _top(self.prompt_top),
        }
        return encode(SAMPLE, values)


def decode_pass_request(body: bytes) -> PassRequest:
    """The request in a protobuf body. Raises DataError where it is no such message."""
    found = decode(REQUEST, body)
    data = _read_data(
        lambda: [Datum(_ids(one["chunks"]), {n: _array(t) for n, t in one["inputs"].items()}) for one in found["data"]]
    )
    config = {name: value.get("text", value.get("number", 0.0)) for name, value in found["config_v2"].items()}
    return PassRequest(
        found.get("model_id", ""),
        found.get("seq_id", 0),
        data,
        found.get("loss_fn", ""),
        config or found["config"],
        found.get("forward_only", False),
    )


def read_pass_request(body: Mapping[str, Any], *, forward_only: bool) -> PassRequest:
    """The request in the JSON body of SDK 0.24 and earlier.

    Raises KeyError, TypeError or ValueError for another body.
    """
    given = body["forward_input" if forward_only else "forward_backward_input"]
    data = _read_data(
        lambda: [
            Datum(read_model_input(one["model_input"]), {n: _json_array(t) for n, t in one["loss_fn_inputs"].items()})
            for one in given["data"]
        ]
    )
    config = dict(given.get("loss_fn_config") or {})
    return PassRequest(str(body["model_id"]), int(body["seq_id"]), data, str(given["loss_fn"]), config, forward_only)


def _read_data(read: Callable[[], Sequence[Datum]]) -> Sequence[Datum] | DataError:
    try:
        return read()
    except DataError as error:
        return error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return DataError(f"the data are malformed: {type(error).__name__}: {error}")


def read_model_input(given: Mapping[str, Any]) -> np.ndarray:
    """The ids of a ModelInput in JSON, int64 [N]. Raises DataError for images and audio."""
    chunks = given["chunks"]
    _refuse_media([str(chunk.get("type", "encoded_text")) for chunk in chunks if "tokens" not in chunk])
    return np.asarray([i for chunk in chunks for i in chunk["tokens"]], np.int64)


def _ids(chunks: Sequence[Mapping[str, Any]]) -> np.ndarray:
    _refuse_media([name for chunk in chunks for name in chunk if name != "text"])
    tokens = b"".join(chunk["text"].get("tokens", b"") for chunk in chunks if "text" in chunk)
    return _numbers(tokens, np.dtype("<i4")).astype(np.int64)


def _refuse_media(kinds: Sequence[str]) -> None:
    if kinds:
        raise DataError(f"the model input has a chunk of {kinds[0]}; this server takes text alone")


def _numbers(content: bytes, dtype: np.dtype) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise DataError(f"{len(content)} bytes are no array of {dtype.name}")
    return np.frombuffer(content, dtype)


def _array(tensor: Mapping[str, Any]) -> np.ndarray:
    dtype = DTYPES.get(tensor.get("dtype", 0))
    if dtype is None:
        raise DataError(f"data type {tensor.get('dtype', 0)} of a tensor is not supported; send float32 or int64")
    if (sparse := tensor.get("sparse")) is None:
        return _reshape(_numbers(tensor.get("dense", b""), dtype), tensor.get("shape"))
    crow, col = (_numbers(sparse.get(name, b""), np.dtype("<i8")) for name in ("crow", "col"))
    return _dense(_numbers(sparse.get("values", b""), dtype), crow, col, tensor.get("shape") or ())


def _json_array(tensor: Mapping[str, Any]) -> np.ndarray:
    values = np.asarray(tensor["data"], {"float32": np.float32, "int64": np.int64}[tensor["dtype"]])
    if (crow := tensor.get("sparse_crow_indices")) is None:
        return _reshape(values, tensor.get("shape"))
    return _dense(values, np.asarray(crow), np.asarray(tensor["sparse_col_indices"]), tensor["shape"])


def _reshape(values: np.ndarray, shape: Sequence[int] | None) -> np.ndarray:
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
    if shape[0] * shape[1] > 1 << 26:
        raise DataError(f"a sparse tensor of shape {list(shape)} is too large")
    made = np.zeros(shape, values.dtype)
    made[np.repeat(np.arange(shape[0]), counts), col] = values
    return made


def _tensor_json(values: np.ndarray) -> dict[str, Any]:
    return {"data": values.ravel().tolist(), "dtype": "float32", "shape": list(values.shape)}


def _record(logprobs: Sequence[np.ndarray]) -> dict[str, Any]:
    arrays = [np.ascontiguousarray(values, "<f4") for values in logprobs]
    offsets = np.cumsum([0, *(values.nbytes for values in arrays)]).astype("<i8")
    batched = {
        "data": b"".join(values.tobytes() for values in arrays),
        "offsets": offsets.tobytes(),
        "dtype": FLOAT32,
        "trailing_shape": arrays[0].shape[1:],
    }
    return {"type_tag": "ArrayRecord", "fields": {"logprobs": batched}, "num_datums": len(arrays)}


def _top(cells: TopTokens) -> dict[str, Any]:
    width = max(map(len, cells), default=0)
    ids, logprobs = np.zeros((len(cells), width), "<i4"), np.full((len(cells), width), NO_LOGPROB, "<f4")
    for row, cell in enumerate(cells):
        for column, (token, logprob) in enumerate(cell):
            ids[row, column], logprobs[row, column] = token, logprob
    return {"token_ids": ids.tobytes(), "logprobs": logprobs.tobytes(), "k": width, "length": len(cells)}
