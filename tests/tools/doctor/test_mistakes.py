"""Each mistake of an environment, put into a machine that is otherwise in order: the doctor names it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from runner.device.ascend import toolkit_folders
from runner.tools.doctor import packages as package_checks
from runner.tools.doctor.env_variables import accepts
from runner.tools.doctor.report import CheckResult, CheckStatus, exit_code
from runner.tools.doctor.system_info import CommandResult, Package, SystemInfo
from runner.tools.doctor.versions import torch_npu_for
from tests.tools.doctor.changes import installed, without, written
from tests.tools.doctor.machines import GB, ascend, commands, entries, findings, packages, with_environment
from tests.tools.doctor.mistakes import HOME, MISTAKES

PROBLEM, WARNING, UNKNOWN, OK = CheckStatus.PROBLEM, CheckStatus.WARNING, CheckStatus.UNKNOWN, CheckStatus.OK
ATB = {"ATB_HOME_PATH": "/usr/local/Ascend/nnal/atb/9.1.0/atb/cxx_abi_1"}


def machine(folder: Path) -> SystemInfo:
    return with_environment(ascend("a2", folder), **ATB)


def seen(found: dict[tuple[str, str], CheckResult], check: str) -> CheckResult:
    groups = ("npu", "machine", "any device")
    return next(found[group, check] for group in groups if (group, check) in found)


def test_a_machine_in_order_has_nothing_to_mend(tmp_path: Path) -> None:
    made = entries(machine(tmp_path))
    bad = [e.record() for e in made if e.finding.verdict not in (OK, CheckStatus.SKIPPED)]
    assert (bad, exit_code(made)) == ([], 0)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_what_mends_it(mistake: str, tmp_path: Path) -> None:
    change, (check, verdict, evidence, remedy) = MISTAKES[mistake]
    before = findings(machine(tmp_path))
    found = seen(findings(change(machine(tmp_path / "again"))), check)
    assert (found.verdict, evidence in found.evidence, remedy in (found.remedy or "")) == (verdict, True, True), found
    assert seen(before, check) != found
    assert not re.search("…|IMAGE|<[A-Z]+>", found.remedy or ""), "a line that can be pasted"


@pytest.mark.parametrize("mistake", [name for name, (_, told) in MISTAKES.items() if told[1] is PROBLEM])
def test_a_problem_ends_with_2(mistake: str, tmp_path: Path) -> None:
    assert exit_code(entries(MISTAKES[mistake][0](machine(tmp_path)))) == 2


def test_a_missing_vllm_is_one_thing_to_do(tmp_path: Path) -> None:
    asked = dataclasses.replace(machine(tmp_path), sampler="vllm")
    assert (
        package_checks.vllm(dataclasses.replace(asked, wanted="npu")).verdict is CheckStatus.SKIPPED
    )  # the pair's check says it
    found = package_checks.vllm(dataclasses.replace(asked, wanted="cuda"))
    assert found.verdict is PROBLEM and "pip install vllm" in (found.remedy or "")


def test_what_packages_demand_of_one_another(tmp_path: Path) -> None:
    demanding = Package("vllm", "0.23.0", ("torch==2.11.0", "nonsense ; extra == 'gone'", "transformers<5.21"))
    there = packages(torch="2.10.0", transformers="5.23.0") | {"vllm": demanding}
    found = findings(dataclasses.replace(machine(tmp_path), packages=there))["any device", "demands"]
    assert found.verdict is WARNING
    assert "torch==2.11.0, not 2.10.0" in found.evidence and "transformers<5.21, not 5.23.0" in found.evidence
    own = {"posttrain-run": Package("posttrain-run", "0.1.0", ("torch>=2.7.1",)), **packages(torch="2.6.0")}
    assert (
        findings(dataclasses.replace(machine(tmp_path / "own"), packages=own))["any device", "demands"].verdict
        is PROBLEM
    )


def test_a_firmware_inside_the_range_with_more_parts_than_its_end(tmp_path: Path) -> None:
    change = written("/usr/local/Ascend/firmware/version.info", "Version=8.9.9.1.1\n")
    assert findings(change(machine(tmp_path)))["npu", "driver, firmware"].verdict is OK


@pytest.mark.parametrize("name", ["a3", "310p", "first", "950"])
def test_other_products_are_told_apart(name: str, tmp_path: Path) -> None:
    found = findings(ascend(name, tmp_path))["npu", "npu-smi"]
    expected = {
        "a3": (OK, "(A3, SoC Ascend910_9392)"),
        "310p": (WARNING, "made for inference"),
        "first": (WARNING, "not A2"),
        "950": (WARNING, "SDPA"),
    }
    assert found.verdict is expected[name][0] and expected[name][1] in found.evidence


def test_somebody_else_on_the_chips(tmp_path: Path) -> None:
    found = findings(ascend("a3", tmp_path))["npu", "in use"]
    assert found.verdict is WARNING and "40112 python on 0/0" in found.evidence and "0/1 40988" in found.evidence


@pytest.mark.parametrize(
    ("name", "cann"), [("a3", "8.5.0"), ("310p", "8.3.RC1"), ("first", "8.0.RC2"), ("950", "9.1.0")]
)
def test_cann_of_old_and_new_layouts(name: str, cann: str, tmp_path: Path) -> None:
    assert f"CANN {cann} in " in findings(ascend(name, tmp_path))["npu", "CANN"].evidence


@pytest.mark.parametrize("layout", ["cann", "ascend-toolkit/latest", "cann-9.1.0", "ascend-toolkit/9.1.0"])
def test_cann_of_a_user_s_own_is_found(layout: str, tmp_path: Path) -> None:
    own = without("ASCEND_HOME_PATH", "LD_LIBRARY_PATH", "ASCEND_OPP_PATH")(machine(tmp_path))
    home = f"/people/somebody/Ascend/{layout}"
    own.path(home).parent.mkdir(parents=True)
    own.path(HOME).rename(own.path(home))
    found = findings(own)
    assert found["npu", "CANN"].evidence == f"CANN 9.1.0 in {home}"
    assert found["npu", "CANN environment"].remedy == f"source {home}/set_env.sh"


def test_the_newest_of_several_canns_is_taken_and_conda_s_is_seen(tmp_path: Path) -> None:
    for version in ("cann-9.9.0", "cann-9.10.0"):
        (tmp_path / "usr/local/Ascend" / version).mkdir(parents=True)
    assert next(toolkit_folders({}, tmp_path)) == "/usr/local/Ascend/cann-9.10.0"
    (tmp_path / "opt/conda/Ascend/cann").mkdir(parents=True)
    assert list(toolkit_folders({"CONDA_PREFIX": "/opt/conda"}, tmp_path))[-1] == "/opt/conda/Ascend/cann"


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [("eth", True), ("=eth0", True), ("=eth", False), ("^eth", False), ("^=eth", True), ("enp,eth", True), ("", False)],
)
def test_how_hccl_chooses_an_interface(wanted: str, fits: bool) -> None:
    assert accepts(wanted, "eth0") is fits


def test_a_driver_in_another_place(tmp_path: Path) -> None:
    moved = machine(tmp_path)
    moved.path("/usr/local/Ascend/driver").rename(tmp_path / "driver")
    (moved.path("/opt/hw")).mkdir(parents=True)
    (tmp_path / "driver").rename(moved.path("/opt/hw/driver"))
    assert findings(moved)["npu", "driver, firmware"].verdict is PROBLEM
    written("/etc/ascend_install.info", "Driver_Install_Path_Param=/opt/hw\n")(moved)
    assert findings(moved)["npu", "driver, firmware"].evidence.startswith("driver ")


def test_checks_come_in_the_order_in_which_one_depends_on_another(tmp_path: Path) -> None:
    order = (
        "platform, device files, driver, firmware, npu-smi, in use, topology, CANN, CANN environment, ATB, "
        "torch, torch_npu, torch_npu, CANN, vllm, vllm-ascend, wheel, chip, Python, allocator, HCCL timeouts, "
        "visible devices, container mounts, disk, shared memory, W&B, antlr"
    )
    made = [entry.check for entry in entries(machine(tmp_path))]
    told = [check for check in made if check and check in order]
    assert ", ".join(dict.fromkeys(told)) == order


def test_a_machine_without_npu_and_gpu_is_a_cpu_machine(tmp_path: Path) -> None:
    (tmp_path / "root/dev/shm").mkdir(parents=True)
    plain = SystemInfo(
        root=tmp_path / "root",
        packages=packages(torch="2.13.0", antlr4_python3_runtime="4.9.3", wandb="0.31.0"),
        work=tmp_path,
        free_bytes=lambda path: 500 * GB,
        total_bytes=lambda path: 64 * GB,
        run=commands("none"),
    )
    made = entries(plain)
    assert exit_code(made) == 0
    assert [(e.check, e.finding.verdict) for e in made if e.group in ("npu", "cuda")] == [("", CheckStatus.SKIPPED)] * 2
    asked = entries(dataclasses.replace(plain, wanted="npu"))
    assert exit_code(asked) == 2 and asked[1].finding.evidence.startswith("no /dev/davinci0")


@pytest.mark.parametrize(
    ("answer", "verdict", "evidence", "remedy"),
    [
        (CommandResult(None, err="timeout after 30 s", late=True), PROBLEM, "a card hangs", "dmesg"),
        (CommandResult(None, err="npu-smi: No such file or directory"), PROBLEM, "does not respond", "export PATH"),
        (
            CommandResult(127, err="npu-smi: libdcmi.so: cannot open shared object file"),
            PROBLEM,
            "libdcmi.so",
            "HwHiAiUser",
        ),
        (CommandResult(0, "a table of tomorrow\n"), UNKNOWN, "last line: a table of tomorrow", ""),
    ],
)
def test_npu_smi_that_shows_no_chips(
    answer: CommandResult, verdict: CheckStatus, evidence: str, remedy: str, tmp_path: Path
) -> None:
    def run(words: Sequence[str], deadline_s: float, extra: Mapping[str, str]) -> CommandResult:
        return answer if words[0] == "npu-smi" else CommandResult(0, "2.10.0\n")

    found = findings(dataclasses.replace(machine(tmp_path), run=run))["npu", "npu-smi"]
    assert found.verdict is verdict and evidence in found.evidence and remedy in (found.remedy or ""), found


def test_metadata_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    odd = {**packages(torch="2.10.0"), "vllm": Package("vllm", "0.23.0", ("torch ==",))}
    found = findings(dataclasses.replace(machine(tmp_path), packages=odd))["any device", "demands"]
    assert found.verdict is WARNING and "vllm's metadata cannot be read" in found.evidence


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.12.0", "2.10.0"])
def test_a_bare_machine_is_told_a_cann_and_a_torch_npu_that_go_together(torch: str, tmp_path: Path) -> None:
    change, _ = MISTAKES["no CANN"]
    found = findings(installed(torch=torch, torch_npu=None)(change(machine(tmp_path))))
    toolkit, pair = seen(found, "CANN").remedy or "", seen(found, "torch, torch_npu").remedy or ""
    said = re.search(r"toolkit_(\S+)_linux", toolkit), re.search(r"torch_npu==(\S+)", pair)
    assert said[0] and said[1], (toolkit, pair)
    assert said[1][1] in torch_npu_for(said[0][1]), f"CANN {said[0][1]} and torch_npu {said[1][1]}"


def test_a_container_is_started_again_from_its_own_image(tmp_path: Path) -> None:
    there = written("/etc/hostname", "3f2a9c\n")(written("/.dockerenv", "")(machine(tmp_path)))
    assert there.docker_run("--gpus all") == (
        "docker run --gpus all -it $(docker inspect -f '{{.Config.Image}}' 3f2a9c)  # on the host"
    )
