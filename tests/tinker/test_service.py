"""Training clients over one base: each computes what it computes alone, and its errors are its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.core.errors import CheckpointError, DataError
from runner.inference.engine import SamplingParams
from runner.interfaces.learning import OptimSettings
from runner.tinker.checkpoints import CheckpointPath, ClientRecord, NotFoundError
from runner.tinker.messages import Datum
from runner.tinker.sampling_routes import read_sampling_params, sampler_key
from runner.tinker.server import BuiltServer
from runner.tinker.service import SampleRequest, TrainingService
from tests.tinker.servers import LORA, built_server, supervised

ADAM = OptimSettings(lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
NAMES = [f"s{number}:train:0" for number in range(8)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltServer:
    return built_server(tmp_path_factory.mktemp("server"), "tinker.max_samplers=2")


@pytest.fixture
def service(built: BuiltServer) -> Iterator[TrainingService]:
    for name in NAMES:
        record = ClientRecord(name, "me", "tiny", LORA, "2026-01-01")
        built.store.add_client(record)
    yield built.service
    for name in NAMES:
        built.service.remove(name)
        shutil.rmtree(built.store.folder(name))


def step(service: TrainingService, name: str, number: int, *, lr: float = 1e-2) -> list[Any]:
    """A pass over rows of the client's own, and a step; everything that came back."""
    data = supervised([(number + 1, number + 2, number + 3, 40), (7, 8, number)], weight=0.5)
    passed = service.run_pass(name, data, "cross_entropy", {}, False)
    return [passed.logprobs, passed.metrics, service.optim_step(name, replace(ADAM, lr=lr))]


def alone(service: TrainingService, number: int, steps: int) -> list[Any]:
    name = NAMES[number]
    service.create(name, replace(LORA, seed=number, rank=2 + number))
    found = [step(service, name, number) for _ in range(steps)]
    service.remove(name)
    return found


def weights(service: TrainingService, name: str) -> dict[str, torch.Tensor]:
    return {key: p.detach().clone() for key, p in service._tenant(name).parameters.items()}


def test_eight_clients_in_turn_compute_what_each_does_alone(service: TrainingService) -> None:
    wanted = [alone(service, number, 3) for number in range(8)]
    for number in range(8):
        service.create(NAMES[number], replace(LORA, seed=number, rank=2 + number))
    found: list[list[Any]] = [[] for _ in range(8)]
    for _ in range(3):
        for number in range(8):
            found[number].append(step(service, NAMES[number], number))
            sample(service, None, f"r{number}")  # the base alone, between two of them
    np.testing.assert_equal(found, wanted)


def test_gradients_add_up_and_forward_only_touches_nothing(service: TrainingService) -> None:
    one, other = supervised([(1, 2, 3, 4)]), supervised([(9, 8, 7, 6, 5)])
    for name, passes in ((NAMES[0], [one, other]), (NAMES[1], [one + other])):
        service.create(name, LORA)
        for data in passes:
            service.run_pass(name, data, "cross_entropy", {}, False)
            service.run_pass(name, supervised(weight=9.0), "cross_entropy", {}, True)
        service.optim_step(name, ADAM)
    for key, value in weights(service, NAMES[0]).items():
        torch.testing.assert_close(value, weights(service, NAMES[1])[key], rtol=0, atol=1e-6)


def test_a_clients_error_is_its_own_and_leaves_its_gradient(service: TrainingService) -> None:
    good = supervised()
    bad = [Datum(one.ids, {**one.inputs, "weights": one.inputs["weights"] * 3e38}) for one in good]
    for name in NAMES[:2]:
        service.create(name, LORA)
        service.run_pass(name, good, "cross_entropy", {}, False)
    with pytest.raises(DataError, match="the loss is not finite"):
        service.run_pass(NAMES[0], bad, "cross_entropy", {}, False)
    metrics = [service.optim_step(name, ADAM) for name in NAMES[:2]]
    assert metrics[0] == metrics[1] and metrics[0]["grad_norm:mean"] > 0
    for key, value in weights(service, NAMES[0]).items():
        assert torch.equal(value, weights(service, NAMES[1])[key])


def test_settings_of_a_step_are_those_of_adamw(service: TrainingService) -> None:
    settings = [
        OptimSettings(1e-2, (0.9, 0.95), 1e-8, weight_decay=0.3),
        OptimSettings(3e-3, (0.5, 0.8), 1e-3, weight_decay=0.1, clip_norm=0.1),
    ]
    service.create(NAMES[0], LORA)
    tenant = service._tenant(NAMES[0])
    own = [torch.nn.Parameter(p.detach().clone()) for p in tenant.parameters.values()]
    reference = torch.optim.AdamW(own)
    for given in settings:
        service.run_pass(NAMES[0], supervised(), "cross_entropy", {}, False)
        for mine, theirs in zip(own, tenant.parameters.values(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.clone()
        if given.clip_norm:
            torch.nn.utils.clip_grad_norm_(own, given.clip_norm)
        reference.param_groups[0].update(lr=given.lr, betas=given.betas, eps=given.eps, weight_decay=given.weight_decay)
        reference.step()
        service.optim_step(NAMES[0], given)
    for mine, theirs in zip(own, tenant.parameters.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)


def test_a_step_without_a_gradient_changes_nothing(service: TrainingService) -> None:
    service.create(NAMES[0], LORA)
    before = weights(service, NAMES[0])
    assert service.optim_step(NAMES[0], ADAM)["grad_norm:mean"] == 0
    assert all(torch.equal(value, before[key]) for key, value in weights(service, NAMES[0]).items())


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_lora_is_where_the_client_wants_it(service: TrainingService, flags: dict[str, bool], kinds: set[str]) -> None:
    service.create(NAMES[0], replace(LORA, rank=3, **flags))
    found = weights(service, NAMES[0])
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in found} == kinds
    assert {p.shape[0] for name, p in found.items() if "lora_A" in name} == {3}
    with pytest.raises(DataError, match="no layers"):
        service.create(NAMES[1], replace(LORA, train_attn=False, train_mlp=False, train_unembed=False))


def save(service: TrainingService, name: str, kind: str, as_: str) -> CheckpointPath:
    target = CheckpointPath(name, kind, as_)
    service.save(target, False, None, None)
    return target


def test_a_client_continues_from_its_checkpoint_bit_for_bit(service: TrainingService) -> None:
    service.create(NAMES[0], LORA)
    step(service, NAMES[0], 0)
    state = save(service, NAMES[0], "weights", "a")
    wanted = [step(service, NAMES[0], 0) for _ in range(2)]
    service.load(NAMES[0], state, True)
    np.testing.assert_equal([step(service, NAMES[0], 0) for _ in range(2)], wanted)
    service.create(NAMES[1], LORA, state, True)
    np.testing.assert_equal([step(service, NAMES[1], 0) for _ in range(2)], wanted)
    service.create(NAMES[2], LORA, state, False)
    first, second = [step(service, NAMES[2], 0) for _ in range(2)]
    assert first[1] == wanted[0][1] and second[1] != wanted[1][1], "without the optimizer's state it starts again"


def test_a_load_that_fails_changes_nothing(service: TrainingService, built: BuiltServer) -> None:
    service.create(NAMES[0], LORA)
    service.create(NAMES[1], replace(LORA, rank=9))
    state = save(service, NAMES[0], "weights", "a")
    sampler = save(service, NAMES[0], "sampler_weights", "b")
    step(service, NAMES[0], 0)
    before = weights(service, NAMES[0])
    with pytest.raises(DataError, match="has another LoRA rank or targets"):
        service.load(NAMES[1], state, True)
    with pytest.raises(DataError, match="has no optimizer state"):
        service.load(NAMES[0], sampler, True)
    with pytest.raises(NotFoundError):
        service.load(NAMES[0], replace(state, name="c"), True)
    damaged = built.store.path(state) / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is corrupted"):
        service.load(NAMES[0], state, True)
    with pytest.raises(CheckpointError):
        service.create(NAMES[2], LORA, state, True)
    with pytest.raises(DataError, match="is closed; create a new client"):
        service.optim_step(NAMES[2], ADAM)
    with pytest.raises(DataError, match="exists; choose another name"):
        save(service, NAMES[0], "weights", "a")
    assert all(torch.equal(value, before[key]) for key, value in weights(service, NAMES[0]).items())


def sample(
    service: TrainingService,
    source: CheckpointPath | None,
    id: str = "r",
    *,
    count: int = 2,
    key: str = "",
    **params: Any,
) -> dict[str, Any]:
    """What became of the requests that are under way; at temperature 1 unless it is given."""
    own = SamplingParams(**{"max_new_tokens": 6, "seed": 5, "ignore_eos": True, **params})
    if source is not None and not key:
        key = sampler_key(source, service._store.record(source))
    service.submit(SampleRequest(id, (5, 6, 7), own, count, 2), source, key or None)
    found: dict[str, Any] = {}
    for _ in range(20):
        found |= service.advance(4)
    return found


def test_a_sampler_samples_from_the_weights_that_were_saved(service: TrainingService) -> None:
    service.create(NAMES[0], LORA)
    step(service, NAMES[0], 0)
    source = save(service, NAMES[0], "sampler_weights", "a")
    row = (5, 6, 7)
    logprobs = service.run_pass(NAMES[0], supervised([(*row, 9)]), "cross_entropy", {}, True).logprobs[0]
    wanted = sample(service, source)
    step(service, NAMES[0], 0)  # the sampler does not see it
    found = sample(service, source)
    assert found == wanted and len({tuple(e.token_id for e in answer) for answer in found["r"].sequences}) == 2
    assert found["r"].prompt_logprobs[0] is None
    np.testing.assert_allclose(found["r"].prompt_logprobs[1:], logprobs[:2], atol=1e-5)
    assert [len(cell) for cell in found["r"].prompt_top] == [0, 2, 2]
    assert sample(service, None) != found


@pytest.mark.parametrize("given", [{"temperature": 0.5, "top_p": 0.8}, {"top_k": 3}, {"temperature": 0}], ids=str)
def test_a_sampled_token_has_one_log_probability(service: TrainingService, given: dict[str, float]) -> None:
    params = read_sampling_params({"max_tokens": 6, "seed": 5, **given}, service._engine.limits, 3, 512)
    service.submit(SampleRequest("r", (5, 6, 7), params, 2), None, None)
    [answers] = [found.sequences for _ in range(20) for found in service.advance(4).values()]
    for event in (event for answer in answers for event in answer):
        assert dict(event.top_logprobs)[event.token_id] == pytest.approx(event.logprob, abs=1e-5)


def test_samplers_that_follow_a_client_get_its_newest_weights(service: TrainingService) -> None:
    service.create(NAMES[0], LORA)
    targets = [CheckpointPath(NAMES[0], "sampler_weights", name) for name in ("a", "b")]
    for target in targets:
        step(service, NAMES[0], 0, lr=0.1)
        service.publish("shared", target, False, None, None)
    wanted = sample(service, targets[1])
    assert sample(service, targets[0], key="shared") == wanted != sample(service, targets[0])


def test_weights_are_replaced_while_another_request_runs_in_bfloat16(tmp_path: Path) -> None:
    built = built_server(tmp_path, "model.dtype=bfloat16")
    built.store.add_client(ClientRecord(NAMES[0], "me", "tiny", LORA, "2026-01-01"))
    service = built.service
    service.create(NAMES[0], LORA)
    first, second = (CheckpointPath(NAMES[0], "sampler_weights", name) for name in ("a", "b"))
    step(service, NAMES[0], 0)
    service.publish("shared", first, False, None, None)
    step(service, NAMES[0], 0, lr=0.1)
    before = sample(service, None, key="shared")  # generates until the next weights arrive
    service.publish("shared", second, False, None, None)
    assert before != sample(service, None, key="shared") == sample(service, second)
    service.remove(NAMES[0])


def test_more_samplers_than_have_room_are_loaded_again(service: TrainingService) -> None:
    service.create(NAMES[0], LORA)
    sources = []
    for name in "abcd":
        step(service, NAMES[0], 0, lr=0.1)
        sources.append(save(service, NAMES[0], "sampler_weights", name))
    wanted = [sample(service, source) for source in sources]
    assert [sample(service, source) for source in reversed(sources)] == wanted[::-1]
    assert len(service._samplers) == 2


def test_samplers_without_a_request_are_not_activated(
    service: TrainingService, built: BuiltServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.create(NAMES[0], LORA)
    sources = [save(service, NAMES[0], "sampler_weights", name) for name in "ab"]
    names, activate = list[str](), built.model.adapter_active
    sample(service, sources[0])
    sample(service, sources[1], count=1, max_new_tokens=1)  # whose first step still finds the other's finished rows
    monkeypatch.setattr(built.model, "adapter_active", lambda name: names.append(name) or activate(name))
    sample(service, sources[1])
    assert len(set(names)) == 1


def test_weights_that_sample_nothing_fail_their_requests_alone(service: TrainingService, built: BuiltServer) -> None:
    for name in NAMES[:2]:
        service.create(name, LORA)
        step(service, name, 0)
    with torch.no_grad():
        for parameter in service._tenant(NAMES[0]).parameters.values():
            parameter.fill_(1e30)
    bad, good = (save(service, name, "sampler_weights", "a") for name in NAMES[:2])
    wanted = sample(service, good)
    own = SamplingParams(max_new_tokens=6, seed=5, ignore_eos=True)
    service.submit(SampleRequest("bad", (5, 6, 7), own, 1), bad, "bad")
    found = sample(service, good)
    assert "logits are not finite" in found.pop("bad")
    assert found == wanted


def test_requests_of_weights_that_do_not_arrive_fail(service: TrainingService, built: BuiltServer) -> None:
    service.create(NAMES[0], LORA)
    step(service, NAMES[0], 0)
    good, damaged = (save(service, NAMES[0], "sampler_weights", name) for name in "ab")
    service.submit(SampleRequest("r", (5, 6, 7), SamplingParams(max_new_tokens=60, ignore_eos=True), 2), good, "shared")
    service.advance(1)
    record = built.store.path(damaged) / "checkpoint.json"
    record.write_text(record.read_text().replace('"digest": "', '"digest": "x'))
    with pytest.raises(DataError, match="save them again"):
        service.load_sampler("shared", damaged)
    [(id, why)] = service.advance(1).items()
    assert id == "r" and "newest weights did not arrive" in str(why) and service.advance(1) == {}


def test_a_checkpoint_is_a_peft_adapter(service: TrainingService, built: BuiltServer, tmp_path: Path) -> None:
    from runner.inference.model_source import load_source, parse_source

    service.create(NAMES[0], LORA)
    step(service, NAMES[0], 0)
    state = save(service, NAMES[0], "weights", "a")
    loaded = load_source(parse_source(str(built.store.path(state))), device="cpu").model
    own, there = weights(service, NAMES[0]), loaded.trainable()
    assert {name.replace(".default.", ".") for name in there} == own.keys()
    for name, parameter in there.items():
        assert torch.equal(parameter, own[name.replace(".default.", ".")])
