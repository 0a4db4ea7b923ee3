"""Lists of visible devices, and what NVIDIA's side says; the mistakes of an NPU are in test_mistakes.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.device_kinds import parse_visible
from runner.tools.doctor.report import CheckResult, CheckStatus
from runner.tools.doctor.system_info import SystemInfo
from tests.tools.doctor.machines import findings, nvidia, packages, with_environment


@given(st.lists(st.integers(0, 20), unique=True, min_size=1), st.integers(0, 21))
def test_numbers_are_read_in_their_order(ids: list[int], count: int) -> None:
    asked = parse_visible(", ".join(map(str, ids)))
    assert (asked.ids, asked.faults) == (tuple(ids), ())
    assert asked.out_of_range(count) == [number for number in ids if number >= count]


@pytest.mark.parametrize(
    ("text", "ids", "faults"),
    [
        ("", (), ()),
        (" 1 , 0 ", (1, 0), ()),
        ("0,,1", (0, 1), ("an empty entry",)),
        ("0,1,", (0, 1), ("an empty entry",)),
        ("-1", (), ("'-1' is not a device number",)),
        ("0-3", (), ("'0-3' is not a device number",)),
        ("all", (), ("'all' is not a device number",)),
        ("1,1,0", (1, 1, 0), ("1 is listed twice",)),
        ("GPU-1a,0", ("GPU-1a", 0), ()),
    ],
)
def test_what_is_wrong_in_a_list_is_said(text: str, ids: tuple[int | str, ...], faults: tuple[str, ...]) -> None:
    asked = parse_visible(text, ("GPU-",))
    assert (asked.ids, asked.faults) == (ids, faults)


def cuda(machine: SystemInfo) -> dict[str, CheckResult]:
    return {check: finding for (group, check), finding in findings(machine).items() if group == "cuda"}


def test_two_gpus_of_which_one_is_in_use(tmp_path: Path) -> None:
    found = cuda(nvidia(tmp_path))
    assert found["in use"].verdict is CheckStatus.WARNING
    assert "1: 40000 of 81559 MB" in found["in use"].evidence and "4711, python" in found["in use"].evidence
    others = {check: finding.verdict for check, finding in found.items() if check != "in use"}
    assert set(others.values()) == {CheckStatus.OK}, found
    assert found["topology"].evidence == "1 pair NV18"


@pytest.mark.parametrize(
    ("built", "verdict", "evidence"),
    [
        (None, CheckStatus.PROBLEM, "is a CPU build"),
        ("13.0", CheckStatus.PROBLEM, "is built for CUDA 13.0"),
        ("12.9", CheckStatus.OK, "is built for CUDA 12.9"),
    ],
)
def test_the_cuda_of_torch_against_the_driver(
    built: str | None, verdict: CheckStatus, evidence: str, tmp_path: Path
) -> None:
    found = cuda(nvidia(tmp_path, built))["driver, CUDA"]
    assert found.verdict is verdict and evidence in found.evidence


@pytest.mark.parametrize(
    ("variables", "check", "verdict", "evidence"),
    [
        (
            {"CUDA_VISIBLE_DEVICES": "0,2"},
            "visible devices",
            CheckStatus.PROBLEM,
            "the devices here are 0 to 1, so 2 is silently ignored",
        ),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2b"}, "visible devices", CheckStatus.OK, "1 of 2"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "visible devices", CheckStatus.PROBLEM, "'-1' is not a device number"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:False"},
            "allocator",
            CheckStatus.WARNING,
            "only one of them is read",
        ),
    ],
)
def test_variables_of_nvidia(
    variables: dict[str, str], check: str, verdict: CheckStatus, evidence: str, tmp_path: Path
) -> None:
    found = cuda(with_environment(nvidia(tmp_path), **variables))[check]
    assert found.verdict is verdict and evidence in found.evidence, found


def test_a_gpu_that_this_user_may_not_use(tmp_path: Path) -> None:
    locked = replace(nvidia(tmp_path), may=lambda path, mode: "nvidia" not in path.name)
    found = cuda(locked)["device files"]
    assert found.verdict is CheckStatus.PROBLEM and found.evidence == "no permission for /dev/nvidia0, /dev/nvidia1"


def test_torch_for_cuda_beside_torch_npu_and_a_gpu(tmp_path: Path) -> None:
    both = replace(nvidia(tmp_path), wanted="npu", packages=packages(torch="2.13.0", torch_npu="2.13.0"))
    found = findings(both)["npu", "torch, torch_npu"]
    assert found.verdict is CheckStatus.PROBLEM and "torch_npu does not load" in found.evidence
