"""Each mistake of an environment, put into a machine that is otherwise in order: the doctor names it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from runner.doctor.finding import Finding, Verdict
from runner.doctor.machine import Answer, Machine, Package
from runner.doctor.report import exit_code
from tests.doctor.machines import GB, GOOD, ascend, commands, entries, findings, packages, with_environment

PROBLEM, WARNING, UNKNOWN, OK = Verdict.PROBLEM, Verdict.WARNING, Verdict.UNKNOWN, Verdict.OK
Change = Callable[[Machine], Machine]
NO_LIBRARY = """Traceback (most recent call last):
  File "torch/__init__.py", line 3020, in _import_device_backends
ImportError: libhccl.so: cannot open shared object file: No such file or directory

The above exception was the direct cause of the following exception:

RuntimeError: Failed to load the backend extension: torch_npu.
"""


def installed(**versions: str | None) -> Change:
    """Other versions; None = not installed."""

    def change(machine: Machine) -> Machine:
        kept = {k: v for k, v in (GOOD | {n.replace("_", "-"): v for n, v in versions.items()}).items() if v}
        return dataclasses.replace(machine, packages=packages(**{k.replace("-", "_"): v for k, v in kept.items()}))

    return change


def variables(**values: str) -> Change:
    return lambda machine: with_environment(machine, **values)


def without(*names: str) -> Change:
    def change(machine: Machine) -> Machine:
        kept = {name: value for name, value in machine.environment.items() if name not in names}
        return dataclasses.replace(machine, environment=kept)

    return change


def removed(*paths: str) -> Change:
    def change(machine: Machine) -> Machine:
        for path in paths:
            machine.path(path).unlink()
        return machine

    return change


def written(path: str, text: str) -> Change:
    def change(machine: Machine) -> Machine:
        machine.path(path).parent.mkdir(parents=True, exist_ok=True)
        machine.path(path).write_text(text)
        return machine

    return change


def both(*changes: Change) -> Change:
    def change(machine: Machine) -> Machine:
        for one in changes:
            machine = one(machine)
        return machine

    return change


def answering(answer: Answer) -> Change:
    return lambda machine: dataclasses.replace(machine, run=commands("a2", python=answer))


def built_for(soc: str) -> Change:
    """vllm-ascend's wheel, whose build info names the chip it is for."""

    def change(machine: Machine) -> Machine:
        folder = machine.root / "site"
        (folder / "vllm_ascend").mkdir(parents=True)
        (folder / "vllm_ascend/_build_info.py").write_text(f"# generated\n__device_type__ = '{soc}'\n")
        return dataclasses.replace(machine, site=(folder,))

    return change


SERVING = {"vllm": "0.23.0", "vllm_ascend": "0.23.0"}
ATB = {"ATB_HOME_PATH": "/usr/local/Ascend/nnal/atb/9.1.0/atb/cxx_abi_1"}

MISTAKES = {
    "torch and torch_npu of two releases": (
        installed(torch="2.13.0+cpu"),
        ("torch, torch_npu", PROBLEM, "must be the same release", "torch==2.10.0 torch_npu==2.10.0.post4"),
    ),
    "torch_npu is missing": (
        installed(torch_npu=None),
        ("torch, torch_npu", PROBLEM, "without torch_npu", "torch_npu==2.10.0.post4"),
    ),
    "torch_npu for another CANN": (
        installed(torch_npu="2.10.0.post2"),
        ("torch_npu, CANN", PROBLEM, "built for CANN 9.0.1 or 9.0.0", "torch_npu==2.10.0.post4"),
    ),
    "torch_npu that no table has": (
        installed(torch="2.13.0", torch_npu="2.13.0"),
        ("torch_npu, CANN", UNKNOWN, "does not have this torch_npu", ""),
    ),
    "vllm of another number than vllm-ascend": (
        installed(vllm="0.33.0", vllm_ascend="0.23.0"),
        ("vllm, vllm-ascend", PROBLEM, "needs vllm 0.23.0", "vllm==0.23.0"),
    ),
    "vllm-ascend without vllm": (
        installed(vllm_ascend="0.23.0"),
        ("vllm, vllm-ascend", PROBLEM, "without vllm", "vllm==0.23.0"),
    ),
    "vllm-ascend beside another torch_npu": (
        installed(torch_npu="2.10.0.post2", **SERVING),
        ("vllm, vllm-ascend", WARNING, "torch_npu 2.10.0.post4, not 2.10.0.post2", ""),
    ),
    "vllm-ascend that no table has": (
        installed(vllm="0.31.0", vllm_ascend="0.31.0"),
        ("vllm, vllm-ascend", UNKNOWN, "not in the table", ""),
    ),
    "a wheel for A3 on A2": (
        both(installed(**SERVING), built_for("A3")),
        ("wheel, chip", PROBLEM, "built for A3, and this is a Ascend910B3", "SOC_VERSION=ascend910b3"),
    ),
    "vllm-ascend without ATB": (
        both(
            installed(**SERVING),
            without("ATB_HOME_PATH"),
            lambda machine: shutil.rmtree(machine.path("/usr/local/Ascend/nnal")) or machine,
        ),
        ("ATB", PROBLEM, "no ATB in /usr/local/Ascend/nnal/atb", "Ascend-cann-nnal"),
    ),
    "the ATB of vllm-ascend was not sourced": (
        both(installed(**SERVING), without("ATB_HOME_PATH")),
        ("ATB", PROBLEM, "ATB_HOME_PATH is not set", "source /usr/local/Ascend/nnal/atb/set_env.sh"),
    ),
    "ATB of the old C++ ABI": (
        variables(ATB_HOME_PATH="/usr/local/Ascend/nnal/atb/9.1.0/atb/cxx_abi_0"),
        ("ATB", PROBLEM, "undefined symbols", "--cxx_abi=1"),
    ),
    "a Python that torch_npu has no wheel for": (
        lambda machine: dataclasses.replace(installed(torch="2.10.0")(machine), python=(3, 14, 0)),
        ("python", PROBLEM, "torch-npu 2.10.0.post4 takes 3.10 to 3.13", "python3.11"),
    ),
    "two allocator variables": (
        variables(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True", PYTORCH_ALLOC_CONF="expandable_segments:True"),
        ("allocator", PROBLEM, "are both set", "unset PYTORCH_NPU_ALLOC_CONF"),
    ),
    "allocator settings that exclude one another": (
        variables(PYTORCH_NPU_ALLOC_CONF="max_split_size_mb:128,expandable_segments:True"),
        ("allocator", PROBLEM, "excludes max_split_size_mb", "export"),
    ),
    "an allocator setting twice": (
        variables(PYTORCH_NPU_ALLOC_CONF="max_split_size_mb:128,max_split_size_mb:64"),
        ("allocator", PROBLEM, "max_split_size_mb stands twice", "export"),
    ),
    "an allocator setting without a value": (
        variables(PYTORCH_ALLOC_CONF="expandable_segments"),
        ("allocator", PROBLEM, "no key:value", "expandable_segments:True"),
    ),
    "EVENT below EXEC": (
        variables(HCCL_EXEC_TIMEOUT="3600", HCCL_EVENT_TIMEOUT="1868"),
        ("HCCL time-outs", PROBLEM, "must be above", "export HCCL_EVENT_TIMEOUT=3668"),
    ),
    "EXEC raised, EVENT left at its default": (
        variables(HCCL_EXEC_TIMEOUT="7200"),
        ("HCCL time-outs", PROBLEM, "HCCL_EVENT_TIMEOUT=1868", "export HCCL_EVENT_TIMEOUT"),
    ),
    "EVENT above EXEC, but not above what EXEC is counted as": (
        variables(HCCL_EXEC_TIMEOUT="1800", HCCL_EVENT_TIMEOUT="1830"),
        ("HCCL time-outs", PROBLEM, "as 1836", "export HCCL_EVENT_TIMEOUT=1904"),
    ),
    "CONNECT out of range": (
        variables(HCCL_CONNECT_TIMEOUT="60"),
        ("HCCL time-outs", PROBLEM, "outside 120", "export HCCL_CONNECT_TIMEOUT=600"),
    ),
    "a time-out that is no number": (
        variables(HCCL_CONNECT_TIMEOUT="10min"),
        ("HCCL time-outs", PROBLEM, "no whole number", "unset HCCL_CONNECT_TIMEOUT"),
    ),
    "EXEC = for ever": (
        variables(HCCL_EXEC_TIMEOUT="0"),
        ("HCCL time-outs", WARNING, "not honoured by every release", "HCCL_EXEC_TIMEOUT=7208"),
    ),
    "a value HCCL does not document": (
        variables(HCCL_DETERMINISTIC="1"),
        ("other variables", WARNING, "known: true, false, strict", "unset HCCL_DETERMINISTIC"),
    ),
    "numbers that saturate": (
        variables(INF_NAN_MODE_ENABLE="0"),
        ("other variables", WARNING, "no guard sees an overflow", "unset INF_NAN_MODE_ENABLE"),
    ),
    "two names of one switch": (
        variables(HCCL_ASYNC_ERROR_HANDLING="0", TORCH_HCCL_ASYNC_ERROR_HANDLING="1"),
        ("other variables", WARNING, "the older name", "unset HCCL_ASYNC_ERROR_HANDLING"),
    ),
    "visible devices beyond the count": (
        variables(ASCEND_RT_VISIBLE_DEVICES="0,1,3,4"),
        ("visible devices", PROBLEM, "asks for 4 devices; there are 4, so 4 is dropped", "=0,1,3"),
    ),
    "a visible device twice": (
        variables(ASCEND_RT_VISIBLE_DEVICES="0,0"),
        ("visible devices", PROBLEM, "0 stands twice", "export"),
    ),
    "a visible device that is no number": (
        variables(ASCEND_RT_VISIBLE_DEVICES="0-3"),
        ("visible devices", PROBLEM, "'0-3' is no device number", "export"),
    ),
    "no visible device": (
        variables(ASCEND_RT_VISIBLE_DEVICES=""),
        ("visible devices", PROBLEM, "no device is visible", "unset ASCEND_RT_VISIBLE_DEVICES"),
    ),
    "no CANN": (
        both(
            lambda machine: shutil.rmtree(machine.path("/usr/local/Ascend/cann-9.1.0")) or machine,
            without("ASCEND_HOME_PATH"),
        ),
        ("CANN", PROBLEM, "2.10.0.post4 was built for CANN 9.1.0", "Ascend-cann-toolkit_9.1.0_linux-aarch64.run"),
    ),
    "set_env.sh was not sourced": (
        without("ASCEND_HOME_PATH", "LD_LIBRARY_PATH"),
        ("CANN environment", PROBLEM, "was not sourced", "source /usr/local/Ascend/cann-9.1.0/set_env.sh"),
    ),
    "the libraries are not on LD_LIBRARY_PATH": (
        variables(LD_LIBRARY_PATH="/usr/local/Ascend/driver/lib64"),
        ("CANN environment", PROBLEM, "no folder of LD_LIBRARY_PATH holds libhccl.so", "set_env.sh"),
    ),
    "ASCEND_HOME_PATH leads nowhere": (
        variables(ASCEND_HOME_PATH="/opt/cann"),
        ("CANN environment", PROBLEM, "/opt/cann is no folder", "set_env.sh"),
    ),
    "two CANNs mixed": (
        both(
            written("/opt/cann-8/lib64/libhccl.so", ""),
            variables(LD_LIBRARY_PATH="/opt/cann-8/lib64:/usr/local/Ascend/cann-9.1.0/lib64"),
        ),
        ("CANN environment", WARNING, "two CANNs are mixed", "set_env.sh"),
    ),
    "torch_npu cannot be loaded": (
        answering(Answer(1, "", NO_LIBRARY)),
        ("import torch", PROBLEM, "ImportError: libhccl.so", "source /usr/local/Ascend/cann-9.1.0/set_env.sh"),
    ),
    "torch_npu of another ABI": (
        answering(Answer(1, "", "ImportError: libtorch_npu.so: undefined symbol: _ZN3c10")),
        ("import torch", PROBLEM, "undefined symbol", "docs/npu-versions.md"),
    ),
    "import torch aborts": (
        answering(Answer(-6, "", "Fatal Python error: Aborted")),
        ("import torch", PROBLEM, "Aborted", "problems above"),
    ),
    "no device files": (
        removed(*(f"/dev/davinci{number}" for number in range(4))),
        ("device files", PROBLEM, "no /dev/davinci0", "npu-driver"),
    ),
    "a container without a manager device": (
        both(written("/.dockerenv", ""), removed("/dev/devmm_svm")),
        ("device files", PROBLEM, "no /dev/devmm_svm", "--device /dev/devmm_svm"),
    ),
    "a container without mounts": (
        both(written("/.dockerenv", ""), written("/etc/ascend_install.info", "")),
        ("container mounts", PROBLEM, "without /usr/local/dcmi", "-v /usr/local/dcmi:/usr/local/dcmi"),
    ),
    "firmware that the driver does not take": (
        written("/usr/local/Ascend/firmware/version.info", "Version=9.1.0.1.100\n"),
        ("driver, firmware", PROBLEM, "takes firmware 6.4.0 to 6.4.99 or 7.0.0 to 8.9.9", "npu-firmware"),
    ),
    "no driver": (
        removed("/usr/local/Ascend/driver/version.info"),
        ("driver, firmware", PROBLEM, "no /usr/local/Ascend/driver/version.info", "npu-driver"),
    ),
    "npu-smi does not reach the driver": (
        lambda machine: dataclasses.replace(machine, run=commands("unreachable")),
        ("npu-smi", PROBLEM, "-8005", "HwHiAiUser"),
    ),
    "fewer device files than chips": (
        removed("/dev/davinci3"),
        ("numbering", WARNING, "npu-smi lists 4 chips, /dev has 3", ""),
    ),
    "a disk that is full": (
        lambda machine: dataclasses.replace(machine, free_bytes=lambda path: 10**6),
        ("disk", PROBLEM, "not enough for any checkpoint", "free some space"),
    ),
    "Docker's shared memory": (
        both(
            written("/.dockerenv", ""),
            lambda machine: dataclasses.replace(machine, total_bytes=lambda path: 64 * 10**6),
        ),
        ("shared memory", WARNING, "64 MB", "--shm-size=16g"),
    ),
    "a variable of W&B that the job overrules": (
        variables(WANDB_MODE="online"),
        ("W&B", WARNING, "WANDB_MODE=online is not followed", "unset WANDB_MODE"),
    ),
    "the antlr of math-verify's extra": (
        installed(antlr4_python3_runtime="4.13.2"),
        ("antlr", PROBLEM, "Hydra needs 4.9", "antlr4-python3-runtime==4.9.3"),
    ),
}


def machine(folder: Path) -> Machine:
    return with_environment(ascend("a2", folder), **ATB)


def seen(found: dict[tuple[str, str], Finding], check: str) -> Finding:
    groups = ("npu", "machine", "packages")
    return next(found[group, check] for group in groups if (group, check) in found)


def test_a_machine_in_order_has_nothing_to_mend(tmp_path: Path) -> None:
    made = entries(machine(tmp_path))
    bad = [e.record() for e in made if e.finding.verdict not in (OK, Verdict.SKIPPED)]
    assert (bad, exit_code(made)) == ([], 0)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_what_mends_it(mistake: str, tmp_path: Path) -> None:
    change, (check, verdict, evidence, remedy) = MISTAKES[mistake]
    before = findings(machine(tmp_path))
    found = seen(findings(change(machine(tmp_path / "again"))), check)
    assert (found.verdict, evidence in found.evidence, remedy in (found.remedy or "")) == (verdict, True, True), found
    assert seen(before, check) != found


@pytest.mark.parametrize("mistake", [name for name, (_, told) in MISTAKES.items() if told[1] is PROBLEM])
def test_a_problem_ends_with_2(mistake: str, tmp_path: Path) -> None:
    assert exit_code(entries(MISTAKES[mistake][0](machine(tmp_path)))) == 2


def test_what_packages_demand_of_one_another(tmp_path: Path) -> None:
    demanding = Package("vllm", "0.23.0", ("torch==2.11.0", "nonsense ; extra == 'gone'", "transformers<5.21"))
    there = packages(torch="2.10.0", transformers="5.23.0") | {"vllm": demanding}
    found = findings(dataclasses.replace(machine(tmp_path), packages=there))["packages", "demands"]
    assert found.verdict is WARNING
    assert "torch==2.11.0, not 2.10.0" in found.evidence and "transformers<5.21, not 5.23.0" in found.evidence
    own = {"posttrain-run": Package("posttrain-run", "0.1.0", ("torch>=2.10",)), **packages(torch="2.7.1")}
    assert (
        findings(dataclasses.replace(machine(tmp_path / "own"), packages=own))["packages", "demands"].verdict is PROBLEM
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


def test_a_machine_without_npu_and_gpu_is_a_cpu_machine(tmp_path: Path) -> None:
    (tmp_path / "root/dev/shm").mkdir(parents=True)
    plain = Machine(
        root=tmp_path / "root",
        packages=packages(torch="2.13.0", antlr4_python3_runtime="4.9.3", wandb="0.31.0"),
        work=tmp_path,
        free_bytes=lambda path: 500 * GB,
        total_bytes=lambda path: 64 * GB,
        run=commands("none"),
    )
    made = entries(plain)
    assert exit_code(made) == 0
    assert [(e.check, e.finding.verdict) for e in made if e.group in ("npu", "cuda")] == [("", Verdict.SKIPPED)] * 2
    asked = entries(dataclasses.replace(plain, wanted="npu"))
    assert exit_code(asked) == 2 and asked[5].finding.evidence.startswith("no /dev/davinci0")


@pytest.mark.parametrize(
    ("answer", "verdict", "evidence", "remedy"),
    [
        (Answer(None, err="no end after 30 s", late=True), PROBLEM, "a card hangs", "dmesg"),
        (Answer(None, err="npu-smi: No such file or directory"), PROBLEM, "does not answer", "export PATH"),
        (Answer(127, err="npu-smi: libdcmi.so: cannot open shared object file"), PROBLEM, "libdcmi.so", "HwHiAiUser"),
        (Answer(0, "a table of tomorrow\n"), UNKNOWN, "it ends: a table of tomorrow", ""),
    ],
)
def test_npu_smi_that_shows_no_chips(
    answer: Answer, verdict: Verdict, evidence: str, remedy: str, tmp_path: Path
) -> None:
    def run(words: Sequence[str], deadline_s: float, extra: Mapping[str, str]) -> Answer:
        return answer if words[0] == "npu-smi" else Answer(0, "2.10.0\n")

    found = findings(dataclasses.replace(machine(tmp_path), run=run))["npu", "npu-smi"]
    assert found.verdict is verdict and evidence in found.evidence and remedy in (found.remedy or ""), found


def test_metadata_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    odd = {**packages(torch="2.10.0"), "vllm": Package("vllm", "0.23.0", ("torch ==",))}
    found = findings(dataclasses.replace(machine(tmp_path), packages=odd))["packages", "demands"]
    assert found.verdict is WARNING and "vllm's metadata cannot be read" in found.evidence
