"""Environment presets: what the user set stands, what a job needs is there, and the timeouts of HCCL fit together."""

from __future__ import annotations

import os
import subprocess
import sys
from glob import glob
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.device import process_setup
from runner.device.process_setup import (
    CUDA_DETERMINISTIC,
    HCCL_DEFAULTS,
    PRESETS,
    hccl_objection,
    hccl_port_presets,
    resolve_presets,
    set_environment,
)
from runner.run_dir.manifest import allowed_environment
from runner.spec.job import JobSpec

EVERY = [*PRESETS.values(), CUDA_DETERMINISTIC]
NAMES = sorted({name for preset in EVERY for name in preset.variables})


def job(workdir: Path, *words: str) -> JobSpec:
    return compose_job(list(words)).spec


@pytest.mark.parametrize("preset", EVERY, ids=lambda p: p.name)
def test_each_variable_has_a_reason_and_is_kept_in_the_manifest(
    preset: process_setup.Preset, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, variable in preset.variables.items():
        assert len(variable.reason.split()) >= 3, name
        monkeypatch.setenv(name, variable.value)
        assert allowed_environment()[name] == variable.value


@given(st.dictionaries(st.sampled_from([*NAMES, "PYTORCH_ALLOC_CONF"]), st.sampled_from(["0", "1", "mine"])))
def test_what_the_user_set_always_stands_and_is_reported(own: dict[str, str]) -> None:
    for chosen in (
        (PRESETS["train"], PRESETS["deterministic"]),
        (PRESETS["colocated_rl"],),
        (PRESETS["disaggregated_rl"],),
    ):
        found = resolve_presets(chosen, own)
        assert not found.set.keys() & own.keys()
        differing = {n for p in chosen for n, v in p.variables.items() if n in own and own[n] != v.value}
        assert differing <= found.kept.keys() <= own.keys()
        assert all(found.kept[name][0] == own[name] for name in found.kept)


def test_the_allocator_is_never_configured_under_both_its_names() -> None:
    found = resolve_presets([PRESETS["train"]], {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    assert "PYTORCH_NPU_ALLOC_CONF" not in found.set
    assert found.kept["PYTORCH_ALLOC_CONF"][0] == "max_split_size_mb:64"


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda p: p.name)
def test_hccl_timeouts_of_each_preset_fit_together(preset: process_setup.Preset) -> None:
    values = {name: variable.value for name, variable in preset.variables.items()}
    assert hccl_objection(values) is None
    execute = int(values.get("HCCL_EXEC_TIMEOUT", HCCL_DEFAULTS["HCCL_EXEC_TIMEOUT"]))
    assert execute % 68 == 0, "CANN rounds to steps of 68 seconds"


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"HCCL_EXEC_TIMEOUT": "20000"}, "rounds up to 20060, a multiple of 68; export HCCL_EVENT_TIMEOUT=20128"),
        ({"HCCL_EXEC_TIMEOUT": "1860"}, "must be above HCCL_EXEC_TIMEOUT=1860, which HCCL rounds up to 1904"),
        ({"HCCL_CONNECT_TIMEOUT": "9000"}, "outside 120 … 7200"),
        ({"HCCL_CONNECT_TIMEOUT": "soon"}, "not an integer number"),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            "both set, which makes torch_npu exit; unset PYTORCH_NPU_ALLOC_CONF",
        ),
        ({"TASK_QUEUE_ENABLE": "7"}, "torch_npu accepts only 0, 1, 2; unset TASK_QUEUE_ENABLE"),
    ],
)
def test_what_hccl_or_torch_npu_would_end_the_process_over_is_refused_before(
    own: dict[str, str], said: str, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentProblem, match=said):
        set_environment(job(workdir, "device=npu"), Decisions())


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["device=npu"], ["train"]),
        (["device=npu", "device.deterministic=true"], ["train", "deterministic"]),
        (["device=npu", "+recipe=grpo_demo"], ["colocated_rl"]),
        (["device=npu", "+recipe=grpo_demo", "launch.samplers=2"], ["disaggregated_rl"]),
        (["device=npu", "+recipe=grpo_demo", "sampler=vllm"], ["colocated_rl", "vllm"]),
        (["device=cpu", "+recipe=grpo_demo", "sampler=vllm"], ["vllm"]),
        (["device=npu", "device.env_preset=debug"], ["debug"]),
        (["device=cuda"], []),
        (["device=cuda", "device.deterministic=true"], ["deterministic"]),
        (["device=cpu"], []),
    ],
)
def test_the_job_chooses_its_presets(words: list[str], wanted: list[str], workdir: Path) -> None:
    spec = job(workdir, *words)
    assert [preset.name for preset in spec.device.environment(spec)] == wanted


def rank(port: int | str, size: int = 2) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(port)}


def first_port(port: int) -> int:
    [preset] = hccl_port_presets(rank(port))
    return int(preset.variables["HCCL_IF_BASE_PORT"].value)


@given(st.integers(1024, 65535))
def test_hccl_meets_in_ports_that_nobody_else_is_given(port: int) -> None:
    block = range(first_port(port), first_port(port) + 16)
    assert block[0] >= 20000 and block[-1] < 32768, "Linux hands out 32768 … 60999"
    assert port not in block, "where the processes of the job meet themselves"


@given(st.integers(1024, 65535), st.integers(1, 796))
def test_jobs_that_meet_elsewhere_have_other_ports(port: int, apart: int) -> None:
    one, other = first_port(port), first_port(port + apart)
    spare = 32768 - 16
    assert abs(one - other) >= 16 or one == other == spare, "but for the few that would meet in their own block"


def test_few_jobs_share_the_spare_block_and_one_process_needs_none() -> None:
    assert sum(first_port(port) == 32768 - 16 for port in range(1024, 65536)) == 16
    assert hccl_port_presets({}) == hccl_port_presets(rank(29500, size=1)) == hccl_port_presets(rank("none")) == ()


def test_ports_are_said_and_the_users_stand(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rank(29500).items():
        monkeypatch.setenv(name, value)
    spec = job(workdir, "device=npu")
    found = resolve_presets(spec.device.environment(spec), {})
    assert found.set["HCCL_IF_BASE_PORT"].value == str(20000 + 16 * (29500 % 797))
    for own in ("HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE"):
        found = resolve_presets(spec.device.environment(spec), {own: "50000"})
        assert "HCCL_IF_BASE_PORT" not in found.set and found.kept[own][0] == "50000"


def test_it_is_set_said_and_strict_allows_it(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")
    decisions = Decisions(strict=True)
    set_environment(job(workdir, "device=npu", "device.deterministic=true"), decisions)
    assert os.environ["TASK_QUEUE_ENABLE"] == "0" and os.environ["HCCL_DETERMINISTIC"] == "strict"
    facts = {fact["feature"]: fact for fact in decisions.records()["facts"]}
    assert facts["environment.TASK_QUEUE_ENABLE"]["value"] == "0"
    assert "not 2" in facts["environment.TASK_QUEUE_ENABLE"]["reason"]
    assert "HCCL_DETERMINISTIC=strict" in facts["environment"]["reason"]
    assert facts["environment"]["value"] == "train + deterministic"


def test_the_documentation_has_every_variable_with_its_reason() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
    rows = {tuple(cell.replace("`", "").strip() for cell in line.strip("|").split("|")) for line in text.splitlines()}
    wanted = {
        (preset.name + " (cuda)" * (preset is CUDA_DETERMINISTIC), f"{name}={variable.value}", variable.reason)
        for preset in EVERY
        for name, variable in preset.variables.items()
    }
    assert wanted - rows == set()


# A GPU that is seen before torch is imported, and not by torch.
AS_IF_READY = """
import sys
from runner.device.config import CudaConfig
CudaConfig.preflight = lambda self: None
from runner.cli.main import main
sys.exit(main())
"""
CARD = ("device=cuda", "device.deterministic=true")


@pytest.mark.slow
@pytest.mark.skipif(bool(glob("/dev/nvidia[0-9]*")), reason="a GPU is present")
@pytest.mark.parametrize(
    "layout",
    [(), pytest.param(("parallelism=ddp", "launch.devices=2"), marks=pytest.mark.slow)],
    ids=["one process", "two"],
)
def test_a_command_sets_it_before_torch_is_imported(layout: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AS_IF_READY, "+recipe=sft_demo", *CARD, "tracker=none", *layout],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "sees no GPU" in done.stderr
    [line] = [text for text in (done.stdout + done.stderr).splitlines() if "environment: " in text]
    assert line.endswith("environment: deterministic (CUBLAS_WORKSPACE_CONFIG=:4096:8)"), "and not: too late"
