"""What the doctor says of the simulated NPU: what it is built with, what stands in its way, and a real run on it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from npu_simulator.process import OPERATORS
from runner.tools.doctor import smoke_tests
from runner.tools.doctor.report import CheckResult, CheckStatus
from runner.tools.doctor.run_checks import checked_devices, run_checks, visible_count
from runner.tools.doctor.system_info import CommandResult, SystemInfo, current_system
from tests.tools.doctor.changes import variables
from tests.tools.doctor.machines import findings, packages


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemInfo:
    """A machine with compilers, on which nothing was built yet."""
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "root/dev/shm").mkdir(parents=True)

    def run(words: Sequence[str], deadline_s: float, extra: Mapping[str, str]) -> CommandResult:
        return CommandResult(0, "13.2.0\n")

    return SystemInfo(
        wanted="npu_sim", root=tmp_path / "root", packages=packages(torch="2.13.0"), work=tmp_path, run=run
    )


def of_group(machine: SystemInfo) -> dict[str, CheckResult]:
    return {check: finding for (group, check), finding in findings(machine).items() if group == "npu_sim"}


def test_what_is_not_built_yet_is_said_with_the_command(bare: SystemInfo) -> None:
    found = of_group(bare)
    assert found["compiler"].evidence == "g++ 13.2.0, binutils"
    assert (
        found["simulator"].verdict is CheckStatus.WARNING
        and found["simulator"].remedy == "run doctor --prepare npu_sim"
    )
    assert (checked_devices(bare), visible_count(bare, "npu_sim")) == (["npu_sim"], 2)


@pytest.mark.parametrize(
    ("answers", "evidence", "remedy"),
    [
        ({"g++": CommandResult(None, err="g++: No such file or directory")}, "no g++", "install g++ 11 or newer"),
        ({"nm": CommandResult(None), "strings": CommandResult(None)}, "no nm, strings", "binutils"),
        (
            {"-dumpfullversion": CommandResult(0, "9.4.0\n")},
            "g++ 9.4.0: C++20 needs 11",
            "run doctor --prepare npu_sim",
        ),
    ],
)
def test_a_compiler_that_will_not_do(
    bare: SystemInfo, answers: dict[str, CommandResult], evidence: str, remedy: str
) -> None:
    def run(words: Sequence[str], deadline_s: float, extra: Mapping[str, str]) -> CommandResult:
        return next((answers[word] for word in words if word in answers), CommandResult(0, "13.2.0\n"))

    found = of_group(dataclasses.replace(bare, run=run))["compiler"]
    assert found.verdict is CheckStatus.PROBLEM and found.evidence == evidence and remedy in (found.remedy or "")


def test_a_shell_with_the_real_cann(bare: SystemInfo) -> None:
    bare.path("/opt/cann/lib64").mkdir(parents=True)
    bare.path(f"/opt/cann/lib64/{OPERATORS}").touch()
    loaded = variables(LD_LIBRARY_PATH="/lib:/opt/cann/lib64")(bare)
    found = of_group(loaded)["CANN"]
    assert found.verdict is CheckStatus.PROBLEM and "without its set_env.sh" in (found.remedy or "")
    tried = [entry.finding for entry in run_checks(loaded) if entry.group == "trial on npu_sim"]
    assert {finding.verdict for finding in tried} == {CheckStatus.SKIPPED}


@pytest.mark.parametrize(
    ("variable", "value", "check"),
    [
        ("HCCL_EVENT_TIMEOUT", "1000", "HCCL timeouts"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments", "allocator"),
        ("HCCL_IF_IP", "here", "HCCL network"),
        ("HCCL_BUFFSIZE", "many", "other variables"),
    ],
)
def test_its_variables_are_those_of_an_npu(bare: SystemInfo, variable: str, value: str, check: str) -> None:
    assert of_group(bare)[check].verdict is CheckStatus.OK
    assert of_group(variables(**{variable: value})(bare))[check].verdict is CheckStatus.PROBLEM


def test_what_making_it_said_is_shown(bare: SystemInfo) -> None:
    def run(words: Sequence[str], deadline_s: float, extra: Mapping[str, str]) -> CommandResult:
        made = "--prepare" in words
        return (
            CommandResult(2, "", "npu_sim: first use\nerror: pip cannot fetch torch_npu\n")
            if made
            else CommandResult(0, "13.2.0\n")
        )

    found = dict(smoke_tests.trials_of_device("npu_sim", 2))["preparation"](dataclasses.replace(bare, run=run))
    assert found.verdict is CheckStatus.PROBLEM and found.evidence == "it cannot be built: pip cannot fetch torch_npu"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_matmul_attention_a_sum_over_two_ranks_and_a_step(simulator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(simulator))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5")  # the cards of the trial are its own
    here = current_system("npu_sim")
    made = {entry.check: entry.finding for entry in run_checks(here) if entry.group == "trial on npu_sim"}
    said = json.dumps({check: finding.evidence for check, finding in made.items()})
    assert made["kernels"].verdict is CheckStatus.OK and "on 2 devices" in made["kernels"].evidence, said
    assert made["all-reduce"].evidence == "hccl sums over 2 processes", said
    assert made["training step"].verdict is CheckStatus.OK, said
