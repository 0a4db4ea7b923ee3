"""What an engine is built with, and what is refused before: without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, SpecError
from runner.device.process_setup import PRESETS
from runner.sampler.config import VllmSamplerConfig
from runner.sampler.vllm import versions
from runner.sampler.vllm import versions as need
from runner.sampler.vllm.arguments import EnginePlacement, engine_arguments, reports_raw_logprobs, sleep_level
from runner.sampler.vllm.build import _has_experts
from runner.sampler.vllm.sampler import is_adapter_tensor
from runner.sampler.vllm.versions import LAYOUT, npu_engine_options
from runner.sampler.vllm.weight_layout import has_experts, reload_all_weights
from tests.model.zoo import causal

JOB = ("+recipe=grpo_demo", "sampler=vllm")


def made(device: str = "cuda", beside: bool = True, environment: dict[str, str] | None = None, **given: Any) -> Any:
    home = {name: given.pop(name) for name in ("ranks", "rank", "experts") if name in given}
    where = EnginePlacement(Path("blueprint"), device, "bfloat16", 100, beside, **home)
    config = VllmSamplerConfig(**given)
    return engine_arguments(config, where, environment or {}), sleep_level(config, where)


def test_an_engine_beside_a_trainer_leaves_it_room_and_sleeps() -> None:
    found, sleep = made()
    assert sleep == 1 and found["enable_sleep_mode"] and found["gpu_memory_utilization"] == 0.45
    assert found["logprobs_mode"] == "processed_logprobs" and not found["enforce_eager"]
    assert "distributed_executor_backend" not in found and "enable_lora" not in found
    found, sleep = made(beside=False, tensor_parallel_size=4, kv_cache_memory_bytes=2 * 2**30)
    assert sleep == 0 and "enable_sleep_mode" not in found and found["gpu_memory_utilization"] == 0.9
    assert found["tensor_parallel_size"] == 4 and found["kv_cache_memory_bytes"] == 2 * 2**30
    assert made(ranks=2)[0]["distributed_executor_backend"] == "external_launcher"


def test_matching_the_trainer_is_options_of_a_release_that_has_them() -> None:
    assert "hf_overrides" not in made()[0]
    assert made(match="fp32_head")[0]["hf_overrides"] == {"head_dtype": "float32"}
    versions.check_match("fp32_head", Version("0.32.0"), "npu")
    versions.check_match("batch_invariant", Version("0.23"), "cuda")
    for preset, release, device, why in (
        ("fp32_head", "0.31", "cuda", "vLLM 0.31 may ignore a float32 head; 0.32 has it"),
        ("batch_invariant", "0.33", "cpu", "no batch-invariant kernels for cpu"),
    ):
        with pytest.raises(EnvironmentProblem, match=f"sampler.match={preset}: .*{why}"):
            versions.check_match(preset, Version(release), device)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["sampler.match=fp32_head"], "the whole engine computes in float32"),
        (["sampler.match=fp32_head", "model.dtype=bfloat16"], "type model.head_dtype=float32 as well"),
        (["sampler.match=batch_invariant", "model.dtype=bfloat16"], "no batch-invariant kernels for device=cpu"),
        (
            ["init_from=null", "model=tiny_moe", "model.router_replay=sampler"],
            "Runner V2 alone, which is not used; type model.router",
        ),
    ],
)
def test_a_preset_that_has_no_effect_is_refused(words: list[str], wrong: str) -> None:
    with pytest.raises(SpecError, match=wrong):
        compose_job([*JOB, *words])
    compose_job([*JOB, "sampler.match=fp32_head", "model.dtype=bfloat16", "model.head_dtype=float32"])


@pytest.mark.parametrize(
    ("rule", "mode", "known"),
    [
        ({"temperature": 0.7}, "processed_logprobs", True),
        ({"top_p": 0.5}, "raw_logprobs", True),
        ({"min_p": 0.1, "temperature": 0.7}, "processed_logprobs", False),
    ],
    ids=str,
)
def test_log_probabilities_are_those_before_truncation_where_vllm_has_them(
    rule: dict[str, Any], mode: str, known: bool
) -> None:
    assert made(**rule)[0]["logprobs_mode"] == mode
    assert reports_raw_logprobs(VllmSamplerConfig(**rule)) is known


@pytest.mark.parametrize("given", [("algorithm.lag=1",), ("algorithm.correction=tis",), ()], ids=str)
def test_a_rule_whose_log_probabilities_vllm_has_not_is_refused_where_they_are_learned_from(
    given: tuple[str, ...],
) -> None:
    words = (*JOB, "sampler.temperature=0.7", "sampler.top_p=0.9", "launch.samplers=1", *given)
    if not given:
        compose_job(words)
        return
    with pytest.raises(SpecError, match=r"sampler\.temperature.*vLLM reports them before both or after both"):
        compose_job(words)


def test_the_processor_knows_no_share_of_a_card_no_sleep_and_no_part_of_a_prompt() -> None:
    found, sleep = made("cpu")
    assert sleep == 0 and found["enforce_eager"] and found["kv_cache_memory_bytes"] == 2**30
    assert not {"gpu_memory_utilization", "enable_sleep_mode"} & found.keys()
    assert found["enable_chunked_prefill"] is False and found["max_num_batched_tokens"] >= 100


def test_an_npu_gets_plain_weights_and_segments_that_do_not_grow() -> None:
    colocated = {name: one.value for name, one in PRESETS["colocated_rl"].variables.items()}
    alone = {name: one.value for name, one in PRESETS["disaggregated_rl"].variables.items()}
    found, _ = made("npu", environment=colocated)
    assert found["additional_config"] == {"weight_nz_mode": 0} and found["enforce_eager"]
    assert made("npu", beside=False, environment=alone)[0]["additional_config"]
    with pytest.raises(EnvironmentProblem, match="expandable segments"):
        made("npu", environment=alone)
    for environment in ({}, {LAYOUT: "1"}, {LAYOUT: ""}):
        with pytest.raises(EnvironmentProblem, match=f"export {LAYOUT}=0"):
            npu_engine_options(environment, sleeps=False, experts=False)


def test_experts_on_an_npu_do_not_sleep(tmp_path: Path) -> None:
    """vllm-ascend 0.23 turns their matrices over as it wakes."""
    colocated = {name: one.value for name, one in PRESETS["colocated_rl"].variables.items()}
    with pytest.raises(EnvironmentProblem, match=r"sampler\.sleep=0, or .* launch\.samplers"):
        made("npu", environment=colocated, experts=True)
    assert made("npu", environment=colocated, experts=True, sleep=0)[1] == 0
    assert made(experts=True)[1] == 1, "on CUDA they do"
    for kind, experts in (("qwen3_moe", True), ("gpt_oss", True), ("qwen3", False)):
        (tmp_path / kind).mkdir()
        causal(kind).save_configs(tmp_path / kind)
        assert _has_experts(tmp_path / kind) == experts


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (200, 256), (512, 512)])
def test_there_is_room_for_an_adapter(rank: int, room: int) -> None:
    found, _ = made(rank=rank, weight_sync="adapter")
    assert (found["enable_lora"], found["max_lora_rank"], found["max_loras"]) == (True, room, 1)
    with pytest.raises(EnvironmentProblem, match=r"sampler\.weight_sync=merged"):
        made(rank=513, weight_sync="adapter")


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (("sampler.tensor_parallel_size=2",), "sampler.tensor_parallel_size", "set launch.samplers"),
        (("sampler.tensor_parallel_size=3", "launch.samplers=3"), "sampler.tensor_parallel_size", "model.heads=4"),
        (("algorithm.lag=1",), "algorithm.lag", "set launch.samplers, or algorithm.lag=0"),
        (("sampler.sleep=1",), "sampler.sleep", "no sleep mode on the CPU"),
        (("sampler.sleep=1", "launch.samplers=1"), "sampler.sleep", "no trainer shares the engine's device"),
        (("sampler.gpu_memory_utilization=0.5",), "sampler.gpu_memory_utilization", "sampler.kv_cache_memory_bytes"),
        (("sampler.timeout_s=9",), "sampler.timeout_s", "used only with launch.samplers"),
        (("sampler.weight_sync=adapter",), "sampler.weight_sync", "no adapter"),
        (
            ("sampler.weight_sync=adapter", "adapter=lora", "adapter.dora=true"),
            "sampler.weight_sync",
            "not support DoRA",
        ),
        (
            ("sampler.weight_sync=adapter", "adapter=lora", "adapter.modules_to_save=[lm_head]"),
            "sampler.weight_sync",
            "not support adapter.modules_to_save; type sampler.weight_sync=merged",
        ),
        (("sampler.enforce_eager=false",), "sampler.enforce_eager", "no CUDA graphs"),
        (("sampler.max_model_len=20", "data.max_length=64"), "sampler.max_model_len", "need"),
        (("sampler.temperature=0.001",), "sampler.temperature", "vLLM supports 0.01 to 2"),
        (("sampler.temperature=2.1",), "sampler.temperature", "vLLM supports 0.01 to 2"),
        (("model.heads=8",), "model.heads", "head size 16"),
    ],
)
def test_what_cannot_be_is_refused_at_once(words: tuple[str, ...], key: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        compose_job([*JOB, *words])
    assert any(one.key == key and said in one.message for one in caught.value.problems), caught.value


def test_the_processor_is_told_what_vllm_would_do_otherwise() -> None:
    spec = compose_job([*JOB, "device.threads=2"]).spec
    [preset] = spec.device.environment(spec)
    found = {name: one.value for name, one in preset.variables.items()}
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and found["OMP_NUM_THREADS"] == "2"
    assert found["VLLM_NO_USAGE_STATS"] == "1" and found["TORCH_COMPILE_DISABLE"] == "1"
    spec = compose_job([*JOB, "model.compile=true"]).spec
    assert "TORCH_COMPILE_DISABLE" not in spec.device.environment(spec)[0].variables


def test_workers_of_an_engine_are_no_forks_and_say_what_they_die_of() -> None:
    """vLLM starts them again by itself where CUDA is in use, but not where an NPU is."""
    for cards, method, level in ((1, None, "CRITICAL"), (2, "spawn", "ERROR")):
        spec = compose_job(
            [*JOB, f"sampler.tensor_parallel_size={cards}", f"launch.samplers={cards}", "algorithm.lag=1"]
        ).spec
        found = spec.device.environment(spec)[0].variables
        said = {name: one.value for name, one in found.items()}
        assert (said.get("VLLM_WORKER_MULTIPROC_METHOD"), said["VLLM_LOGGING_LEVEL"]) == (method, level)


def test_versions_are_known_new_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, word in (("0.32.0", "tested with"), ("0.23.0.post1", "tested with"), ("0.40.1", "newer than")):
        decide = Decisions(strict=True)
        versions.check_version(Version(text), decide)
        assert decide.entries[0].reason.startswith(word)
    with pytest.raises(EnvironmentProblem, match="sampler=server"):
        versions.check_version(Version("0.11.0"), Decisions())
    monkeypatch.setattr(need.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"(?s)for CUDA: pip install vllm.*for Ascend"):
        versions.installed_version()


def test_experts_are_known_and_taken_only_as_vllm_can() -> None:
    class FusedMoE(torch.nn.Module): ...

    class Better(FusedMoE): ...

    class Runner:
        def reload_weights(self, weights_iterator: Any = None) -> None:
            self.taken = dict(weights_iterator)

    assert has_experts(torch.nn.Sequential(Better())) and not has_experts(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    runner = Runner()
    reload_all_weights(runner, iter([("a", torch.ones(1))]), "cuda")
    assert list(runner.taken) == ["a"]
    with pytest.raises(EnvironmentProblem, match="packs experts once"):
        reload_all_weights(runner, iter(()), "cpu")
    with pytest.raises(EnvironmentProblem, match="newer vLLM"):
        reload_all_weights(object(), iter(()), "cuda")


def test_an_adapters_tensors_are_told_by_their_names() -> None:
    assert is_adapter_tensor("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    assert not is_adapter_tensor("model.layers.0.self_attn.q_proj.weight")
