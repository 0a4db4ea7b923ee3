"""The protocol over HTTP: order, retries, keys, limits, errors, what ends. The SDK's own tests are in test_sdk.py."""

from __future__ import annotations

import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.cli.main import main
from runner.core.errors import EnvironmentProblem, SpecError, TrainingDiverged
from runner.tinker import requests
from runner.tinker.checkpoints import CheckpointPath
from runner.tinker.messages import MESSAGES, Datum
from runner.tinker.server import BuiltServer, read_keys
from runner.tinker.state import BaseModel, ServerState
from tests.tinker.servers import Client, Records, encode_pass, running, spec_of, supervised

Server = tuple[str, Records, BuiltServer]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = ("tinker.max_tenants=4", "tinker.max_requests=600", "tinker.max_request_values=40000")
    with running(tmp_path_factory.mktemp("run"), *words) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    made = Client(server[0])
    yield made
    for session in made.http.get("sessions").json()["sessions"]:
        made.post(f"sessions/{session}/finish", {})


def losses(client: Client, model_id: str, first: int, count: int) -> list[float]:
    """The losses of passes and steps, all sent before the first answer; all steps are done."""
    passes, steps = [], []
    for seq in range(first, first + 2 * count, 2):
        passes.append(client.begin_pass(model_id, seq, supervised()))
        steps.append(client.begin_step(model_id, seq + 1))
    found = [client.result(one)["metrics"]["loss:sum"] for one in passes]
    for one in steps:
        client.result(one)
    return found


def when_held(monkeypatch: pytest.MonkeyPatch, started: Mapping[str, str], work: Callable[[], object]) -> None:
    """Do `work` in a thread as soon as the server holds a request for the result of `started`."""
    held, get = threading.Event(), requests.Futures.get

    def note(futures: requests.Futures, request_id: str, owner: str) -> Any:
        if request_id == started["request_id"]:
            held.set()
        return get(futures, request_id, owner)

    monkeypatch.setattr(requests.Futures, "get", note)
    threading.Thread(target=lambda: held.wait(60) and work(), daemon=True).start()


def test_a_client_trains_saves_and_samples(server: Server, client: Client) -> None:
    session = client.session()
    model_id = client.train(session)
    assert model_id == f"{session}:train:0"
    info = client.post("get_info", {"model_id": model_id})
    assert info["lora_rank"] == 4 and Path(info["model_data"]["tokenizer_id"], "tokenizer.json").is_file()
    found = losses(client, model_id, 1, 4)
    assert found == sorted(found, reverse=True) and found[-1] < found[0]
    saved = client.result(client.post("save_weights", {"model_id": model_id, "seq_id": 9, "path": "a"}))
    assert saved["path"] == f"tinker://{model_id}/weights/a"
    body = {"model_id": model_id, "seq_id": 10, "sampling_session_seq_id": 0, "kind": "snapshot"}
    sampler = client.result(client.post("save_weights_for_sampler", body))["sampling_session_id"]
    assert client.http.get(f"samplers/{sampler}").json()["base_model"] == info["model_name"]
    sampled = sample(client, sampler, 0, num_samples=2, prompt_logprobs=True, topk_sample_logprobs=2)
    assert [len(one["tokens"]) for one in sampled["sequences"]] == [5, 5] and len(sampled["prompt_logprobs"]) == 3
    assert sample(client, sampler, 1, num_samples=2)["sequences"] == sampled["sequences"], "the seed decides"
    assert "another loss than stable_reinforce" in sample(client, sampler, 2, record_stability_info=True)["error"]
    steps = [metrics for owner, metrics in server[1].steps if owner == model_id]
    assert len(steps) == 4 and steps[0]["grad_norm:mean"] > 0


def test_a_session_that_ends_frees_its_samplers_but_not_those_that_another_has(server: Server, client: Client) -> None:
    session, other = client.session(), client.session()
    model_id = client.train(session)
    paths = []
    for seq, name in enumerate(("own", "shared"), 1):
        body = {"model_id": model_id, "seq_id": seq, "path": name}
        paths.append(client.result(client.post("save_weights_for_sampler", body))["path"])
    body = {"model_id": model_id, "seq_id": 3, "sampling_session_seq_id": 9, "kind": "inflight"}
    sampler = client.result(client.post("save_weights_for_sampler", body))["sampling_session_id"]
    assert len(sample(client, sampler, 0)["sequences"]) == 1
    for number, (owner, path) in enumerate([(session, paths[0]), (session, paths[1]), (other, paths[1])]):
        body = {"session_id": owner, "sampling_session_seq_id": number, "model_path": path}
        sampler = client.post("create_sampling_session", body)["sampling_session_id"]
        assert len(sample(client, sampler, 0)["sequences"]) == 1
    loaded = server[2].service._samplers
    assert {f"{model_id}/inflight", *paths} <= {key.partition("#")[0] for key in loaded}
    client.post(f"sessions/{session}/finish", {})
    assert len(sample(client, sampler, 1)["sequences"]) == 1
    assert [key.partition("#")[0] for key in loaded if model_id in key] == [paths[1]]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("2 GiB"), TrainingDiverged("not finite")], ids=["memory", "nan"]
)
def test_sampling_that_the_device_refuses_fails_alone(
    error: Exception, server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = client.post("create_sampling_session", body)["sampling_session_id"]
    engine = server[2].service._engine

    def fail() -> Any:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(engine, "step", fail)
    assert str(error) in sample(client, sampler, 0)["error"]
    assert len(sample(client, sampler, 1)["sequences"]) == 1


def test_a_base_in_a_folder_below_the_root_has_a_name_that_the_sdk_keeps_whole() -> None:
    limits: Any = None
    names = {
        name: BaseModel(name, (), "", limits, 1.0).loadable_name for name in ("/models/a", "/a/b/c", "Qwen/a", "/a")
    }
    assert names == {"/models/a": "//models/a", "/a/b/c": "/a/b/c", "Qwen/a": "Qwen/a", "/a": "/a"}


def sample(client: Client, sampler: str, seq_id: int, **more: Any) -> Any:
    params = {"max_tokens": 5, "seed": 3, "temperature": 1.0, "stop": []}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": params, **more}
    return client.result(client.post("asample", body))


def test_requests_are_computed_in_the_order_of_their_numbers(client: Client) -> None:
    session = client.session()
    first, other = client.train(session, 0), client.train(session, 1)
    wanted = losses(client, first, 1, 3)
    started = {}
    for seq in (6, 5, 3, 4, 2, 1):  # of which none can be computed before the last one came
        started[seq] = client.begin_step(other, seq) if seq % 2 == 0 else client.begin_pass(other, seq, supervised())
    assert [client.result(started[seq])["metrics"]["loss:sum"] for seq in (1, 3, 5)] == wanted


def test_a_request_that_is_sent_again_is_computed_once(server: Server, client: Client) -> None:
    session = client.session()
    one, other = client.train(session, 0), client.train(session, 1)
    assert client.train(session, 0) == one
    wanted = losses(client, one, 1, 2)
    for seq in range(1, 5):
        again = [client.begin_pass(other, seq, supervised()) if seq % 2 else client.begin_step(other, seq)] * 2
        again.append(client.begin_pass(other, seq, supervised()) if seq % 2 else client.begin_step(other, seq))
        assert len({str(started) for started in again}) == 1
        answers = [client.result(started) for started in again]
        assert answers[0] == answers[1] == answers[2]
        if seq % 2:
            assert answers[0]["metrics"]["loss:sum"] == wanted[seq // 2]
    assert sum(owner == other for owner, _ in server[1].steps) == 2
    key = {"X-Idempotency-Key": "one"}
    sessions = {client.http.post("create_session", json={}, headers=key).json()["session_id"] for _ in range(3)}
    assert len(sessions) == 1


def test_clients_beside_one_that_fails_waits_or_sends_much_get_the_numbers_they_get_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client.session()
    models = [client.train(session, number) for number in range(4)]
    wanted = losses(client, models[0], 1, 3)
    stuck = client.begin_pass(models[1], 2, supervised())  # number 1 never comes
    bad = [
        Datum(one.ids, {"target_tokens": one.inputs["target_tokens"], "logprobs": zeros, "advantages": zeros * np.nan})
        for one in supervised()
        for zeros in [np.zeros(len(one.ids))]
    ]
    failed = [client.begin_pass(models[2], seq, bad, "importance_sampling") for seq in range(1, 4)]
    large = [client.begin_pass(models[0], seq, supervised([(1, 2, 3)] * 1250)) for seq in (7, 8)]
    assert losses(client, models[3], 1, 3) == wanted
    for started in failed:
        answer = client.result(started)
        assert answer["category"] == "user" and "advantages have a value that is NaN" in answer["error"]
    assert {client.result(started)["metrics"]["tokens:sum"] for started in large} == {2500}
    when_held(monkeypatch, stuck, lambda: client.post(f"sessions/{session}/finish", {}))
    assert "has ended" in client.result(stuck)["error"]


def test_many_chunks_out_of_order(client: Client) -> None:
    data = supervised([(1 + at % 7, 2, 3, 4 + at % 5) for at in range(2500)])
    model_id = client.train(client.session())
    chunks = [data[1000:2000], data[2000:], data[:1000]]
    started = [client.begin_pass(model_id, seq, part) for seq, part in zip((2, 3, 1), chunks, strict=True)]
    found = []
    for one in (started[2], *started[:2]):
        answer = client.http.post("retrieve_future", json=one, headers={"Accept": "application/x-protobuf"})
        assert answer.headers["content-type"] == "application/x-protobuf"
        [record] = MESSAGES["PassResponse"].FromString(answer.content).records
        [logprobs] = record.fields
        offsets = np.frombuffer(logprobs.value.offsets, "<i8")
        assert len(offsets) == record.num_datums + 1 and set(np.diff(offsets)) == {12}
        found += np.frombuffer(logprobs.value.data, "<f4").reshape(-1, 3).tolist()
    assert len(found) == 2500
    np.testing.assert_allclose(found[35:70], found[:35], atol=1e-5)  # rows repeat every 35


def test_old_sdks_send_and_read_json(client: Client) -> None:
    model_id = client.train(client.session())
    [datum] = supervised([(5, 9, 11, 40)])
    inputs = {
        name: {"data": v.tolist(), "dtype": "float32" if v.dtype.kind == "f" else "int64", "shape": [3]}
        for name, v in datum.inputs.items()
    }
    row = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": datum.ids.tolist()}]},
        "loss_fn_inputs": inputs,
    }
    given = {"data": [row], "loss_fn": "cross_entropy"}
    forward = client.post("forward", {"model_id": model_id, "seq_id": 1, "forward_input": given})
    passed = client.post("forward_backward", {"model_id": model_id, "seq_id": 2, "forward_backward_input": given})
    answers = [client.result(one) for one in (forward, passed)]
    assert answers[0] == answers[1] and answers[0]["loss_fn_outputs"][0]["logprobs"]["shape"] == [3]
    assert client.result(client.begin_step(model_id, 3, learning_rate=0.0))["metrics"]["grad_norm:mean"] > 0


def test_another_keys_ids_are_not_found(server: Server, client: Client) -> None:
    session = client.session()
    model_id = client.train(session)
    started = client.begin_pass(model_id, 1, supervised())
    path = client.result(client.post("save_weights", {"model_id": model_id, "seq_id": 2, "path": "a"}))["path"]
    body = {"session_id": session, "sampling_session_seq_id": 7, "model_path": path}
    sampler = client.post("create_sampling_session", body)["sampling_session_id"]
    other = Client(server[0], "tml-other")
    own = other.session()
    for route, given, status in (
        ("retrieve_future", started, 404),
        ("get_info", {"model_id": model_id}, 404),
        ("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}}, 404),
        ("session_heartbeat", {"session_id": session}, 410),
        ("weights_info", {"tinker_path": path}, 404),
        ("create_sampling_session", {"session_id": own, "sampling_session_seq_id": 0, "model_path": path}, 404),
        ("asample", {"sampling_session_id": sampler, "seq_id": 0}, 404),
    ):
        other.post(route, given, status)
    for route in (f"training_runs/{model_id}", f"training_runs/{model_id}/checkpoints", f"samplers/{sampler}"):
        assert other.http.get(route).status_code == 404
    assert other.http.delete(f"training_runs/{model_id}/checkpoints/weights/a").status_code == 404
    assert other.http.get("training_runs").json()["training_runs"] == []
    load = {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": True}
    assert "no training client" in other.result(other.post("load_weights", load))["error"]
    assert "loss:sum" in client.result(started)["metrics"]


@pytest.mark.parametrize("path", ["tinker://../weights/a", "tinker://x/weights/../../a", "/etc/passwd", "tinker://a/b"])
def test_paths_lead_nowhere_else(client: Client, path: str) -> None:
    body = {"session_id": client.session(), "sampling_session_seq_id": 0, "model_path": path}
    assert client.http.post("create_sampling_session", json=body).status_code in (400, 404)
    model_id = client.train(client.session())
    answer = client.result(client.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "../a"}))
    assert "is not supported; use letters" in answer["error"]


def test_checkpoints_are_listed_expire_and_are_deleted(server: Server, client: Client) -> None:
    model_id = client.train(client.session())
    for seq, name in enumerate("abc", 1):
        body = {"model_id": model_id, "seq_id": seq, "path": name, "user_metadata": {"n": name}, "ttl_seconds": 3600}
        client.result(client.post("save_weights", body))
    url = f"training_runs/{model_id}"
    found = client.http.get(f"{url}/checkpoints").json()["checkpoints"]
    assert [one["checkpoint_id"] for one in found] == ["weights/c", "weights/b", "weights/a"]
    assert found[0]["user_metadata"] == {"n": "c"} and found[0]["size_bytes"] > 1000 and found[0]["expires_at"]
    assert client.http.put(f"{url}/checkpoints/weights/b/ttl", json={"ttl_seconds": None}).json()["expires_at"] is None
    client.http.put(f"{url}/checkpoints/weights/c/ttl", json={"ttl_seconds": 1})
    assert client.http.delete(f"{url}/checkpoints/weights/a").status_code == 204
    assert client.http.delete(f"{url}/checkpoints/weights/a").status_code == 404
    time.sleep(1.1)
    every = [one["tinker_path"] for one in client.http.get("checkpoints").json()["checkpoints"]]
    assert [path for path in every if model_id in path] == [f"tinker://{model_id}/weights/b"]
    (server[2].store.folder(model_id) / "weights" / "a").mkdir()  # of a checkpoint that is written again just now
    (server[2].store.folder(model_id) / "weights" / "a" / "checkpoint.json").write_text("{}")
    server[2].store.delete_expired()
    shutil.rmtree(server[2].store.folder(model_id) / "weights" / "a")
    assert [one.name for one in (server[2].store.folder(model_id) / "weights").iterdir()] == ["b"]
    runs = client.http.get("training_runs", params={"limit": 1}).json()
    assert runs["training_runs"][0]["training_run_id"] == model_id and runs["cursor"]["limit"] == 1
    assert runs["training_runs"][0]["last_checkpoint"]["checkpoint_id"] == "weights/b"


def test_limits_have_an_answer_of_their_own(client: Client) -> None:
    session = client.session()
    models = [client.train(session, number) for number in range(4)]
    body = {"session_id": session, "model_seq_id": 4, "base_model": "tiny", "lora_config": {"rank": 4}}
    assert "tinker.max_tenants=4" in client.result(client.post("create_model", body))["error"]
    for number, (wrong, said) in enumerate(
        (
            ({"lora_config": {"rank": 0}}, "full fine-tuning is not supported"),
            ({"lora_config": {"rank": 4}, "base_model": "Qwen/Other"}, "is not served here"),
            ({"lora_config": {"rank": 4}, "optimizer_config": {"type": "dimuon"}}, "optimizer 'dimuon'"),
        ),
        5,
    ):
        answer = client.result(client.post("create_model", {**body, **wrong, "model_seq_id": number}))
        assert said in answer["error"] and answer["category"] == "user"
    large = client.begin_pass(models[0], 1, supervised([[1] * 4_190_000]))  # 64 MB, which the limit on bodies allows
    assert "above tinker.max_request_values=40000" in client.result(large)["error"]
    answer = client.http.post("optim_step", content=b"x" * (65 << 20), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    for seq in range(3, 603):  # number 2 never comes
        if client.http.post("optim_step", json={"model_id": models[1], "seq_id": seq}).status_code == 429:
            break
    assert seq > 500
    assert client.http.post("optim_step", json={"model_id": models[0], "seq_id": 3}).status_code == 429


def test_500_futures_wait_at_once(server: Server, client: Client) -> None:
    model_id = client.train(client.session())
    started = [client.begin_step(model_id, seq) for seq in range(500, 0, -1)]
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda one: Client(server[0]).result(one), started))  # one connection pool each
    assert all("grad_norm:mean" in answer["metrics"] for answer in answers)


def test_a_pending_future_is_held(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.tinker.training_routes.HOLD_S", 0.5)
    model_id = client.train(client.session())
    started = client.begin_step(model_id, 2)
    begin = time.monotonic()
    answer = client.http.post("retrieve_future", json=started)
    assert answer.status_code == 408 and answer.json()["type"] == "try_again" and time.monotonic() - begin >= 0.5
    monkeypatch.setattr("runner.tinker.training_routes.HOLD_S", 200.0)
    when_held(monkeypatch, started, lambda: client.begin_step(model_id, 1))
    begin = time.monotonic()
    assert client.http.post("retrieve_future", json=started).status_code == 200
    assert time.monotonic() - begin < 150, "an event wakes it"


def test_a_slow_client_holds_nobody(server: Server, client: Client) -> None:
    host, port = server[0].removeprefix("http://").split(":")
    head = b"POST /api/v1/optim_step HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: tml-a\r\nContent-Length: 999\r\n\r\n{"
    slow = [socket.create_connection((host, int(port))) for _ in range(50)]
    for one in slow:
        one.sendall(head)
    model_id = client.train(client.session())
    assert len(losses(client, model_id, 1, 2)) == 2
    for one in slow:
        one.close()


def test_a_session_without_heartbeat_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.tinker.server.CLEAN_UP_S", 1)
    monkeypatch.setattr(requests, "GAP_S", 0.5)
    states = list[ServerState]()

    def build_state(*parts: Any) -> ServerState:
        states.append(ServerState(*parts))
        return states[0]

    monkeypatch.setattr("runner.tinker.server.ServerState", build_state)
    with running(tmp_path, "tinker.session_timeout_s=300") as (url, records, _):
        client = Client(url)
        session, other = client.session(), client.session()
        sampling = {"session_id": other, "sampling_session_seq_id": 0, "base_model": "tiny"}
        asked = [client.post("create_sampling_session", sampling) for _ in range(2)]
        assert asked[0] == asked[1], "a request that is sent again"
        model_id = client.train(session)
        gone = client.train(other)
        wanted = losses(client, gone, 1, 2)
        stuck = client.begin_step(model_id, 2)
        answer = client.result(stuck)
        assert "request 1 of this client did not arrive within 0.5 s" in answer["error"]
        found = losses(client, model_id, 3, 1)
        sessions = states[0].sessions
        before = sessions[session].last_seen
        client.post("session_heartbeat", {"session_id": session})
        assert sessions[session].last_seen > before
        sessions[other].last_seen -= 400
        end = time.monotonic() + 60
        while not records.ended and time.monotonic() < end:
            time.sleep(0.05)
        assert records.ended == [gone] and other not in client.http.get("sessions").json()["sessions"]
        assert found + losses(client, model_id, 5, 1) == wanted
        answer = client.http.post("session_heartbeat", json={"session_id": other})
        assert answer.status_code == 410 and "create a new client from its last checkpoint" in answer.text


def test_a_plan_counts_one_client(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "+recipe=tinker_demo"]) == 0
    said = capsys.readouterr().out
    assert "clients  one training client is counted" in said and "tokens per rank" not in said


UNUSED = (
    *("steps=5", "epochs=1", "schedule.warmup_steps=2", "checkpoint.every=5", "checkpoint.keep=3"),
    *("checkpoint.export=false", "watch.hang_timeout_s=60", "evaluation.every=5", "chat.train_on=all"),
)


def test_an_option_that_the_server_does_not_use_is_an_error() -> None:
    more = ("reward=exact", "environment=calculator", "callbacks=[stop_when]", "callbacks.stop_when.metric=train/loss")
    with pytest.raises(SpecError) as caught:
        spec_of(*UNUSED, *more)
    found = {problem.key: problem.message for problem in caught.value.problems}
    assert found["reward"] == "run tinker does not support reward=exact; type reward=none" and "environment" in found
    for key in ("callbacks.stop_when", *(word.partition("=")[0] for word in UNUSED)):
        assert found[key] == "is not used by run tinker, because its clients run the training loop; leave it out"
    spec_of("chat.date=2026-01-31", "chat.template=chatml", "algorithm.micro_batch_tokens=512")


def test_keys_of_a_file_are_the_only_ones(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(EnvironmentProblem, match="No such file"):
        read_keys(str(file))
    file.write_text("secret\n")
    file.chmod(0o644)
    with pytest.raises(EnvironmentProblem, match="other users can read it; type: chmod 600"):
        read_keys(str(file))
    file.chmod(0o600)
    with pytest.raises(EnvironmentProblem, match="each starting with tml-"):
        read_keys(str(file))
    file.write_bytes(b"\xff")
    with pytest.raises(EnvironmentProblem, match="not UTF-8"):
        read_keys(str(file))
    file.write_bytes(b"\xef\xbb\xbftml-one\ntml-two\n")  # a byte-order mark is no part of a key
    assert read_keys(str(file)) == {"tml-one", "tml-two"}
    with running(tmp_path / "run", f"tinker.key_file={file}") as (url, _, _):
        assert Client(url, "tml-one").session() and Client(url, "tml-two").session()
        for client in (Client(url, "tml-three"), Client(url, "")):
            client.post("create_session", {}, 401)
            assert client.http.get("healthz").json() == {"status": "ok"}


def test_a_web_page_cannot_reach_it_by_a_name_of_its_own(server: Server) -> None:
    client = Client(server[0])
    assert client.http.post("create_session", json={}, headers={"Host": "evil.example"}).status_code == 400


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"session_id": 3}', b"\xff"])
def test_malformed_bodies_are_errors_of_the_user(client: Client, body: bytes) -> None:
    for path in ("create_model", "optim_step", "asample", "retrieve_future", "load_weights", "forward_backward"):
        answer = client.http.post(path, content=body)
        assert answer.status_code in (400, 404, 410) and answer.json()["category"] == "user"
    model_id = client.train(client.session())
    wrong = encode_pass(model_id, 1, supervised(), "cross_entropy")[:-3]
    answer = client.http.post("forward_backward", content=wrong, headers={"Content-Type": "application/x-protobuf"})
    assert answer.status_code == 400


def test_a_signal_saves_clients_that_have_new_steps(tmp_path: Path) -> None:
    with running(tmp_path) as (url, records, built):
        client = Client(url)
        session = client.session()
        trained, saved, fresh = (client.train(session, number) for number in range(3))
        for model_id in (trained, saved):
            losses(client, model_id, 1, 2)
        client.result(client.post("save_weights", {"model_id": saved, "seq_id": 5, "path": "a"}))
        records.stop._receive(signal.SIGUSR1, None)
        losses(client, trained, 5, 1)
    paths = [f"tinker://{trained}/weights/signal-00000{steps}" for steps in (2, 3)]
    assert [line.split()[1] for line in records.said if line.startswith("saved")] == paths
    record, _, optimizer = built.store.read(CheckpointPath.parse(paths[1]), optimizer=True)
    assert record.step == 3 and optimizer
    assert built.store.checkpoints(fresh) == []
