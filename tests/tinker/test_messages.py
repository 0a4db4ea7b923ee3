"""Messages as arrays: every form of a tensor, records of several shapes, and damaged bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.errors import DataError
from runner.inference.engine import TokenEvent
from runner.tinker.messages import MESSAGES, PassResult, SampleResult, decode_pass_request, read_pass_request
from tests.tinker.servers import encode_pass, supervised

INT32, INT64 = np.dtype("<i4"), np.dtype("<i8")


def request(tensor: dict[str, Any], **chunk: Any) -> bytes:
    chunks = [chunk or {"text": {"tokens": np.asarray([5, 6], INT32).tobytes()}}]
    row = {"chunks": chunks, "inputs": [{"key": "target_tokens", "value": tensor}]}
    options = [{"key": "a", "value": {"number": 0.5}}, {"key": "b", "value": {"text": "much"}}]
    message = MESSAGES["PassRequest"](model_id="m", seq_id=3, data=[row], loss_fn="ppo", options=options)
    return bytes(message.SerializeToString())


def sparse(crow: list[int], col: list[int]) -> dict[str, Any]:
    given = {"values": [7, 8, 9], "crow": crow, "col": col}
    columns = {name: np.asarray(v, INT64).tobytes() for name, v in given.items()}
    return {"sparse": columns, "dtype": 2, "shape": [2, 3]}


def test_a_request_has_the_fields_of_the_wire() -> None:
    # model_id "m" (field 1), seq_id 3 (2), a datum (3) of a chunk of the ids 5 and 6, loss_fn "ppo" (4)
    wire = b"\x0a\x01m\x10\x03\x1a\x0e\x0a\x0c\x0a\x0a\x0a\x08\x05\x00\x00\x00\x06\x00\x00\x00\x22\x03ppo\x30\x01"
    found = decode_pass_request(wire)
    assert (found.model_id, found.seq_id, found.loss_fn, found.forward_only) == ("m", 3, "ppo", True)
    assert found.read_data()[0].ids.tolist() == [5, 6]


def test_a_tensor_is_dense_or_sparse() -> None:
    dense = {"dense": np.asarray([1, 2], INT64).tobytes(), "dtype": 2, "shape": [2]}
    found = decode_pass_request(request(dense))
    assert found.config == {"a": 0.5, "b": "much"}
    assert found.read_data()[0].inputs["target_tokens"].tolist() == [1, 2]
    [datum] = decode_pass_request(request(sparse([0, 1, 3], [2, 0, 1]))).read_data()
    assert datum.inputs["target_tokens"].tolist() == [[0, 0, 7], [8, 9, 0]]
    columns = {"sparse_crow_indices": [0, 1, 3], "sparse_col_indices": [2, 0, 1]}
    tensor = {"data": [7, 8, 9], "dtype": "int64", "shape": [2, 3], **columns}
    rows = [{"model_input": {"chunks": [{"tokens": [5, 6]}]}, "loss_fn_inputs": {"target_tokens": tensor}}]
    body = {"model_id": "m", "forward_input": {"data": rows, "loss_fn": "ppo"}}
    [other] = read_pass_request(body, forward_only=True).read_data()
    np.testing.assert_equal(other.inputs, datum.inputs)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ({"dense": b"12345", "dtype": 2}, "5 bytes are not an array of int64"),
        ({"dense": b"12345678", "dtype": 4}, "data type 4 of a tensor is not supported"),
        ({"dense": b"12345678", "dtype": 2, "shape": [3]}, r"a tensor of shape \[3\] has 1 values"),
        (sparse([0, 1], [2, 0, 1]), "are damaged"),
        (sparse([0, 1, 3], [2, 0, 3]), "are damaged"),
    ],
)
def test_a_damaged_tensor_is_refused(tensor: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        decode_pass_request(request(tensor)).read_data()


def test_images_and_audio_are_refused() -> None:
    for kind in ("image", "dmel"):
        with pytest.raises(DataError, match=f"a chunk of {kind}"):
            decode_pass_request(request({}, **{kind: {}})).read_data()


def test_a_record_has_datums_of_one_shape() -> None:
    arrays = [np.full(shape, at, np.float32) for at, shape in enumerate(((3,), (2,), (2, 4), (1,)))]
    records = MESSAGES["PassResponse"].FromString(PassResult(arrays, {"loss:sum": 1.5}).to_protobuf()).records
    assert [record.num_datums for record in records] == [2, 1, 1]
    [field] = records[0].fields
    assert np.frombuffer(field.value.data, "<f4").tolist() == [0, 0, 0, 1, 1]
    assert np.frombuffer(field.value.offsets, "<i8").tolist() == [0, 12, 20] and not field.value.trailing_shape
    assert list(records[1].fields[0].value.trailing_shape) == [4]


def test_likeliest_tokens_that_are_absent_have_no_log_probability() -> None:
    event = TokenEvent("r#0", 7, -0.5, -0.5, ((7, -0.5), (8, -1.5)), 0, "length")
    result = SampleResult([[event]], True, [None, -1.0], [(), ((3, -1.0), (4, -2.0))])
    found = MESSAGES["SampleResponse"].FromString(result.to_protobuf())
    [sequence] = found.sequences
    assert sequence.stop_reason == 1 and np.frombuffer(sequence.top.token_ids, "<i4").tolist() == [7, 8]
    assert np.isnan(np.frombuffer(found.prompt_logprobs, "<f4")[0])
    assert np.frombuffer(found.prompt_top.logprobs, "<f4").tolist() == [-99999, -99999, -1, -2]
    assert (found.prompt_top.k, found.prompt_top.length) == (2, 2)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_data_error(content: bytes) -> None:
    for body in (content, encode_pass("m", 1, supervised(), "ppo")[: len(content)]):
        try:
            decode_pass_request(body).read_data()
        except DataError:
            continue
