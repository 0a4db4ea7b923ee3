"""What the report says, how it ends, and that a check that fails is our bug and stops no other."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from runner.tools.doctor import run_checks as module
from runner.tools.doctor.report import (
    CheckResult,
    CheckStatus,
    ReportEntry,
    as_json,
    exit_code,
    ok,
    print_report,
    problem,
    skip,
    warning,
)
from runner.tools.doctor.system_info import SystemInfo
from tests.tools.doctor.machines import ascend, entries

LONG = "a text that is far longer than a line of a terminal can be " * 4
MADE = [
    ReportEntry("machine", "platform", ok("Linux")),
    ReportEntry("npu", "CANN", problem("no CANN", "install CANN")),
    ReportEntry("npu", "ATB", skip("only vllm-ascend needs it")),
    ReportEntry("npu", "wheel, chip", skip("only vllm-ascend needs it")),
    ReportEntry("npu", "CANN environment", problem(LONG, "source set_env.sh")),
    ReportEntry("npu", "numbering", problem("again", "install CANN")),
    ReportEntry("cuda", "", skip("no sign of a GPU")),
    ReportEntry("packages", "antlr", warning("odd", "show its state")),
    ReportEntry("trial on cpu", "kernels", ok("fine")),
]


def text(made: list[ReportEntry], devices: tuple[str, ...] = ("cpu", "npu")) -> str:
    out = io.StringIO()
    assert print_report(iter(made), devices, out) == made
    return out.getvalue()


def test_the_report_ends_with_what_to_do_in_order_and_who_is_ready() -> None:
    end = text(MADE).partition("do this, in order\n")[2].splitlines()
    assert end == [
        "  1. no CANN; again",
        "     install CANN",
        f"  2. {LONG}",
        "     source set_env.sh",
        "",
        "check these",
        "  show its state",
        "",
        "cpu   ready",
        "npu   not ready: 3 problems",
    ]


def test_lines_are_aligned_and_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = text(MADE).partition("do this")[0].splitlines()
    column = next(line for line in lines if "Linux" in line).index("Linux")
    assert all(len(line) <= 100 for line in lines)
    wrapped = [line for line in lines if "far longer" in line]
    assert len(wrapped) >= 3 and all(line[:column].isspace() for line in wrapped[1:])


def test_what_was_left_out_is_one_line_per_group() -> None:
    lines = [line for line in text(MADE).splitlines() if line.startswith("  -")]
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        "left out           ATB, wheel, chip: only vllm-ascend needs it",
        "no sign of a GPU",
    ]


def test_json_says_the_same() -> None:
    report = json.loads(as_json(MADE, ("cpu", "npu")))
    assert (report["format"], report["exit_code"], report["ready"]) == (1, 2, {"cpu": True, "npu": False})
    assert report["todo"] == ["install CANN", "source set_env.sh"]
    assert report["findings"][1] == {
        "group": "npu",
        "check": "CANN",
        "verdict": "problem",
        "evidence": "no CANN",
        "remedy": "install CANN",
    }


def test_exit_codes() -> None:
    assert exit_code([MADE[0], MADE[7]]) == 0
    assert exit_code(MADE) == 2
    assert exit_code([*MADE, ReportEntry("npu", "x", CheckResult(CheckStatus.BUG, "…"))]) == 1


def test_a_check_that_fails_is_named_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(machine: SystemInfo) -> CheckResult:
        raise KeyError("lost")

    monkeypatch.setattr(module, "HOST", (("odd one", broken), *module.HOST))
    machine = ascend("a2", tmp_path)
    made = entries(machine)
    assert (made[0].check, made[0].finding.verdict) == ("odd one", CheckStatus.BUG)
    assert "bug in this project: KeyError: 'lost' (test_report.py:" in made[0].finding.evidence
    assert len(made) > 20 and exit_code(made) == 1
