"""What torchrun says of a job's processes, as overrides; and who is a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.cli.job_builder import compose_job
from runner.core.errors import EnvironmentProblem, SpecError
from runner.core.rank_info import RankInfo, is_launched_rank, without_rank_variables
from runner.launch import preflight, torchrun
from runner.launch.local import start_run
from runner.launch.preflight import refuse_other_launcher

MEETING = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in MEETING.items():
        monkeypatch.setenv(name, value)


def test_the_layout_is_what_was_started(meeting: None) -> None:
    assert torchrun.torchrun_layout(RankInfo(0, 4, 0, 4), ["steps=3"]) == ["launch.devices=4", "launch.nodes=1"]
    assert torchrun.torchrun_layout(RankInfo(0, 8, 0, 4), []) == [
        "launch.devices=4",
        "launch.nodes=2",
        "launch.node_rank=0",
        "launch.rdzv_endpoint=node-0:29500",
    ]


def test_a_layout_that_is_typed_must_be_the_same(meeting: None) -> None:
    assert torchrun.torchrun_layout(RankInfo(0, 4, 0, 4), ["launch.devices=4"]) == ["launch.nodes=1"]
    with pytest.raises(EnvironmentProblem, match=r"launch\.devices=3: torchrun started 4 × 1 processes"):
        torchrun.torchrun_layout(RankInfo(0, 4, 0, 4), ["launch.devices=3"])
    with pytest.raises(EnvironmentProblem, match="start the same number on each machine"):
        torchrun.torchrun_layout(RankInfo(0, 5, 0, 3), [])


def test_a_rank_is_who_has_all_of_the_variables(monkeypatch: pytest.MonkeyPatch, meeting: None) -> None:
    assert not is_launched_rank(os.environ)
    for name, value in RankInfo(1, 2, 1, 2).to_environment().items():
        monkeypatch.setenv(name, value)
    assert is_launched_rank(os.environ)
    for name, value in RankInfo().to_environment().items():
        monkeypatch.setenv(name, value)
    assert not is_launched_rank(os.environ), "torchrun with one process"


def test_what_a_rank_starts_is_none() -> None:
    own = {**MEETING, **RankInfo(1, 2, 1, 2).to_environment(), "TORCHELASTIC_RUN_ID": "x"}
    assert without_rank_variables({**own, "HOME": "here"}) == {"HOME": "here"}


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sys.argv", ["run", "+recipe=sft_demo", "launch=torchrun", "launch.devices=4", "name=a b"])
    yield


def test_outside_the_command_to_type_is_said(typed: None) -> None:
    spec = compose_job(["+recipe=sft_demo", "launch=torchrun", "launch.devices=4", "parallelism=ddp"]).spec
    with pytest.raises(EnvironmentProblem) as refused:
        refuse_other_launcher(spec)
    said = str(refused.value).splitlines()[1].strip()
    assert said == (
        "torchrun --standalone --nproc_per_node=4 -m runner +recipe=sft_demo launch=torchrun 'name=a b'"
    )  # as it was typed, but for what torchrun says itself


def test_outside_on_several_machines_too(typed: None) -> None:
    words = ["+recipe=sft_demo", "launch=torchrun", "launch.devices=4", "launch.nodes=2", "parallelism=ddp"]
    with pytest.raises(EnvironmentProblem, match=r"torchrun --nnodes=2 --node_rank=0 --master_addr=HOST .* 0 to 1"):
        refuse_other_launcher(compose_job(words).spec)


def test_inside_it_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch, meeting: None) -> None:
    place = RankInfo(1, 2, 1, 2)
    for name, value in place.to_environment().items():
        monkeypatch.setenv(name, value)
    words = ["+recipe=sft_demo", "parallelism=ddp", *torchrun.torchrun_layout(place, [])]
    for launch in ("torchrun", "local"):
        refuse_other_launcher(compose_job([*words, f"launch={launch}"]).spec)
    with pytest.raises(EnvironmentProblem, match="launch=slurm: torchrun already started"):
        refuse_other_launcher(compose_job([*words, "launch=slurm"]).spec)
    with pytest.raises(EnvironmentProblem, match=r"launch\.attempts=3: torchrun starts only ranks, once"):
        refuse_other_launcher(compose_job([*words, "launch=local", "launch.attempts=3"]).spec)
    with pytest.raises(SpecError, match=r"launch\.samplers: torchrun starts only ranks"):
        compose_job(["+recipe=grpo_demo", "launch=torchrun", "launch.samplers=1"])


TWO = ("+recipe=sft_demo", "parallelism=ddp", "launch.devices=2")
PODS = {**MEETING, "RANK": "1", "WORLD_SIZE": "2"}  # of a PyTorchJob: RANK counts machines


@pytest.mark.parametrize(
    ("variables", "words", "said"),
    [
        (PODS, TWO, r"If the first two count machines, type: run … launch\.nodes=\$WORLD_SIZE"),
        (PODS, TWO[:1], r"launch\.nodes=\$WORLD_SIZE .*; if another command set them, type: unset RANK WORLD_SIZE"),
        (RankInfo(1, 2, 1, 2).to_environment(), TWO, "MASTER_ADDR or MASTER_PORT is not set; start with torchrun"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, TWO, "8 tasks, and each would run the whole job; type srun --ntasks=1 run"),
    ],
)
def test_copies_of_a_whole_job_are_refused(
    variables: dict[str, str], words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    job = compose_job(words)
    with pytest.raises(EnvironmentProblem, match=said):
        start_run(job.spec, words, job.origins)
    assert not list(tmp_path.iterdir())
    for name, value in without_rank_variables(os.environ).items():
        assert name not in variables, f"{name}={value} of a job that this one runs first"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (PODS, (*TWO, "launch.nodes=2", "launch.node_rank=1", "launch.rdzv_endpoint=node-0:29500")),
        ({**PODS, "RANK": "0", "WORLD_SIZE": "1"}, TWO),
        ({"WORLD_SIZE": "8", **MEETING}, TWO),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, TWO),  # a script of sbatch
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "3000"}, TWO),  # a shell of srun --pty
        ({"SLURM_STEP_NUM_TASKS": "2"}, ("+recipe=sft_demo", "launch=ray", "launch.address=auto", "device=cpu")),
    ],
)
def test_one_job_in_many_processes_is_no_copy(
    variables: dict[str, str], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "has_terminal", lambda: True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refuse_other_launcher(compose_job(words).spec)


def test_a_step_that_a_shell_of_srun_pty_starts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the variable of its shell, but no terminal."""
    monkeypatch.setattr(preflight, "has_terminal", lambda: False)
    for name, value in {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "3000"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentProblem, match="8 tasks"):
        refuse_other_launcher(compose_job(TWO).spec)
