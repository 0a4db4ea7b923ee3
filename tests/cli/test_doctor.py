"""`run doctor` on the command line: its words, its flags, and that it imports neither torch nor Hydra."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.version import cuda

from runner.cli.args import flags_of, parse
from runner.cli.doctor import _machine
from runner.cli.main import main
from runner.tools.doctor.run_checks import run_checks
from runner.tools.doctor.system_info import SystemInfo

HEAVY = {"torch", "transformers", "datasets", "peft", "wandb", "numpy", "hydra", "omegaconf"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["npu"], "not an override; type npu=VALUE"),
        (["device=cpu", "x"], "not an override; type x=VALUE"),
        (["device=npu", "device=cpu"], "set twice"),
        (["device="], "no device named ''"),
        (["+recipe=sft_npuu"], "no recipe named 'sft_npuu'; did you mean 'sft_npu'?"),
    ],
)
def test_words_that_are_neither_a_device_nor_a_job(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


def steps(text: str) -> list[str]:
    """The numbered steps of an error or of a report, each with the line to type below it."""
    lines = text.partition("do this, in order")[2].splitlines()[1:]
    return list(itertools.takewhile(lambda line: re.match(r"  (\d+\.|   )", line), lines))


BARE = pytest.mark.skipif(
    any(Path("/dev").glob("davinci[0-9]*"))
    or any(Path("/dev").glob("nvidia[0-9]*"))
    or bool(shutil.which("nvidia-smi")),
    reason="this machine has cards",
)
NPU = ("driver_", "toolkit_", "source /", "torch_npu==")
JOBS = {  # what its steps say, in order, and the job that is tried here instead
    "+recipe=grpo_npu": (
        (*NPU[:3], "nnal_", NPU[3], "vllm-ascend==", "hf download"),
        "run '+recipe=[grpo_npu,rehearse]' reward=rehearsal sampler=torch",
    ),
    "+recipe=sft_npu device=npu": ((*NPU, "hf download"), "run '+recipe=[sft_npu,rehearse]'"),
    "device=cuda": (("ubuntu-drivers", *(() if cuda else ("torch==",))), "run +recipe=sft_demo device=cpu"),
    "launch=slurm device=cuda": (("slurm-client",), "run +recipe=sft_demo device=cpu"),
    "+recipe=grpo_demo sampler=vllm": (("VLLM_VENV",), "run +recipe=grpo_demo sampler=torch device=cpu"),
}
if importlib.util.find_spec("torchao") is None:  # the job's own words would not start on the CPU either
    JOBS["optimizer=adamw8bit"] = (("torchao>=",), "run '+recipe=[sft_demo,rehearse]'")


@BARE
@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
@pytest.mark.parametrize("job", JOBS)
def test_a_job_and_the_doctor_list_the_same_steps_in_the_same_order(
    job: str, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(workdir))  # no npu-smi, nvidia-smi, sbatch
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(SystemInfo, "in_container", False)
    assert main(job.split()) == 2
    said, (parts, instead) = capsys.readouterr().err, JOBS[job]
    found = steps(said)
    places = [next((i for i, line in enumerate(found) if part in line), -1) for part in parts]
    assert places == sorted(places) and -1 not in places, said
    doctor = shlex.split(said.partition("for details: run ")[2].splitlines()[0])
    assert main([*doctor, "--no-trial"]) == 2
    report = capsys.readouterr().out
    assert steps(report) == found and found, report
    assert f"to try the job on this machine first: {instead}\n" in said
    assert main([*shlex.split(instead)[1:], "--cfg", "job"]) == 0
    assert not list(workdir.iterdir()), "nothing is left of the job"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("device=cudaa", "no device named 'cudaa'; did you mean 'cuda'? (auto, cpu, cuda, npu"),
        ("sampler=vlm", "no sampler named 'vlm'; did you mean 'vllm'?"),
        ("sampler=none", "no sampler named 'none' (server, torch, vllm)"),
    ],
)
def test_a_mistyped_name_gets_the_nearest(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", word]) == 2
    assert f"run doctor: {said}" in capsys.readouterr().err


def test_words_and_flags() -> None:
    machine = _machine(parse(["doctor", "--json", "--no-trial", "device=npu"]))
    assert (machine.wanted, machine.sampler, machine.launch, machine.parts) == ("npu", None, None, ())
    machine = _machine(parse(["doctor", "launch=ray", "sampler=vllm"]))
    assert (machine.wanted, machine.sampler, machine.launch) == ("auto", "vllm", "ray")
    assert {"--json", "--no-trial", "--spec", "--config-dir"} <= set(flags_of("doctor"))


def test_a_cluster_s_devices_are_not_looked_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    machine = _machine(parse(["doctor", "launch=slurm", "steps=1"]))
    made = {entry.group: entry.finding for entry in run_checks(machine, trial=True) if entry.group in ("npu", "cuda")}
    assert {finding.evidence for finding in made.values()} == {
        "launch=slurm starts the job's processes on other machines"
    }


def test_it_works_without_torch_and_hydra(workdir: Path) -> None:
    program = (
        "import sys\nfrom runner.cli.main import main\ncode = main(sys.argv[1:])\n"
        f"heavy = {HEAVY!r} & set(sys.modules)\nassert not heavy, heavy\nsys.exit(code)"
    )
    words = ["doctor", "device=npu", "--no-trial", "--json"]
    env = {**os.environ, "PATH": str(workdir)}  # no npu-smi
    done = subprocess.run([sys.executable, "-c", program, *words], env=env, capture_output=True, text=True, timeout=110)
    report = json.loads(done.stdout)
    if not any(Path("/dev").glob("davinci[0-9]*")):
        assert (done.returncode, report["exit_code"], report["ready"]) == (2, 2, {"npu": False})
    assert "Traceback" not in done.stderr and list(workdir.iterdir()) == []
