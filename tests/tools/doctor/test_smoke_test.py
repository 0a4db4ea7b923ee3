"""The tiny real run on the processor: real children, real sums, and what is said of those that fail or hang."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runner.core.subprocess import ChildProcess
from runner.tools.doctor import smoke_tests, system_info
from runner.tools.doctor.report import CheckStatus
from runner.tools.doctor.smoke_test import _attention, _matmul
from runner.tools.doctor.system_info import CommandResult, SystemInfo, current_system, run_command
from tests.launch.several import gone
from tests.tools.doctor.machines import nvidia, packages


@pytest.fixture(scope="module")
def here() -> SystemInfo:
    return current_system("cpu")


def tried(machine: SystemInfo, what: str, device: str = "cpu", count: int = 1):
    return dict(smoke_tests.trials_of_device(device, count))[what](machine)


def test_kernels_agree_with_the_reference(here: SystemInfo) -> None:
    found = tried(here, "kernels")
    assert found.verdict is CheckStatus.OK and "of float64" in found.evidence


@pytest.mark.slow
def test_two_processes_sum(here: SystemInfo) -> None:
    found = tried(here, "all-reduce")
    assert (found.verdict, found.evidence) == (CheckStatus.OK, "gloo sums over 2 processes")


@pytest.mark.slow
def test_one_training_step(here: SystemInfo) -> None:
    found = tried(here, "training step")
    assert found.verdict is CheckStatus.OK and "one step of model=tiny" in found.evidence


def test_the_references_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert _matmul(cpu) < 1e-5 and _attention(cpu) < 1e-5
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, is_causal: v)
    assert _attention(cpu) > 0.1
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, is_causal: v * torch.nan)
    assert _attention(cpu) == float("inf")


def record(**values: object) -> str:
    return json.dumps(values) + "\n"


GOOD = record(device="cuda:0", what="matmul", error=1e-4, good=True)


@pytest.mark.parametrize(
    ("answer", "verdict", "evidence"),
    [
        (
            CommandResult(0, GOOD + record(device="cuda:0", what="attention", error=1e-3, good=True)),
            "ok",
            "within 1e-03",
        ),
        (
            CommandResult(0, GOOD + record(device="cuda:1", what="matmul", error=0.5, good=False)),
            "problem",
            "off by 5.0e-01",
        ),
        (CommandResult(-6, GOOD, "terminate called"), "problem", "after matmul on cuda:0: terminate called"),
        (CommandResult(None, "", "timeout after 300 s"), "problem", "timeout after 300 s"),
        (CommandResult(1, "", "Traceback\nRuntimeError: out of cards\n"), "problem", "RuntimeError: out of cards"),
        (CommandResult(0, ""), "problem", "printed nothing"),
    ],
)
def test_what_is_made_of_a_child(answer: CommandResult, verdict: str, evidence: str, tmp_path: Path) -> None:
    found = tried(nvidia(tmp_path, child=answer), "kernels", "cuda")
    assert found.verdict == verdict and evidence in found.evidence, found


def test_a_training_step_that_fails_says_the_command_s_own_error(tmp_path: Path) -> None:
    answer = CommandResult(2, "", "folder x\nerror: device=cuda: no GPU\n  in order: 1. …\n")
    found = tried(nvidia(tmp_path, child=answer), "training step", "cuda")
    assert found.verdict is CheckStatus.PROBLEM and found.evidence.endswith("failed with code 2: device=cuda: no GPU")


def test_each_of_several_devices_takes_a_step_of_its_own(tmp_path: Path) -> None:
    machine = nvidia(tmp_path)
    asked = []

    def run(words: Sequence[str], deadline_s: float, extra: Mapping[str, str]) -> CommandResult:
        asked.append(extra.get("CUDA_VISIBLE_DEVICES"))
        return machine.run(words, deadline_s, extra)

    watched = replace(machine, run=run, environment={"CUDA_VISIBLE_DEVICES": "5,GPU-2b"})
    for name, trial in smoke_tests.trials_of_device("cuda", 2):
        if name.startswith("step"):
            trial(watched)
    assert [value for value in asked if value] == ["5", "GPU-2b"]


def test_nothing_is_tried_where_torch_does_not_import() -> None:
    broken = SystemInfo(
        packages=packages(torch="2.13.0"), run=lambda *_: CommandResult(1, "", "ImportError: libtorch.so")
    )
    assert tried(broken, "kernels").verdict is CheckStatus.SKIPPED


def test_nothing_is_tried_without_a_visible_device_or_a_build_for_it(tmp_path: Path) -> None:
    assert tried(nvidia(tmp_path / "none"), "kernels", "cuda", 0).verdict is CheckStatus.SKIPPED
    assert tried(nvidia(tmp_path / "cpu build", None), "kernels", "cuda", 2).verdict is CheckStatus.SKIPPED


@pytest.mark.parametrize("own_session", [False, True])
def test_a_command_past_its_deadline_is_killed_with_all_below_it(
    own_session: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '100'], start_new_session={own_session})\n"
        "print('begun', flush=True)\n"
        f"open({str(tmp_path / 'new')!r}, 'w').write(str(child.pid))\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pid')!r})\ntime.sleep(100)\n"
    )

    class BegunProcess(ChildProcess):
        def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
            while not (tmp_path / "pid").exists():  # its deadline begins then
                time.sleep(0.01)
            return super().communicate(input, timeout)

    monkeypatch.setattr(system_info, "ChildProcess", BegunProcess)
    begin = time.monotonic()
    answer = run_command([sys.executable, "-c", program], 1.0, {})
    assert (answer.code, answer.out, answer.last_line) == (None, "begun\n", "timeout after 1 s")
    assert time.monotonic() - begin < 90
    assert gone([int((tmp_path / "pid").read_text())]), "the child below it lives on"


def test_a_command_that_is_not_there() -> None:
    assert run_command(["no-such-command"], 1.0, {}).last_line == "no-such-command: No such file or directory"


def test_a_command_is_asked_once(tmp_path: Path) -> None:
    machine = current_system("auto")
    script = tmp_path / "count"
    script.write_text(f"#!/bin/sh\necho x >> {tmp_path}/calls\ncat {tmp_path}/calls\n")
    os.chmod(script, 0o755)
    assert [machine.command_result(str(script)).out for _ in range(3)] == ["x\n"] * 3
    assert machine.command_result(str(script), OTHER="1").out == "x\nx\n", "another environment is another question"
