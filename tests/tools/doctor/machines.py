"""Machines made of fixtures: what npu-smi printed, the files of driver and CANN, device files, packages, variables."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.device import device_stats
from runner.tools.doctor.cann import KERNELS as KERNEL_FOLDER
from runner.tools.doctor.report import CheckResult, ReportEntry
from runner.tools.doctor.run_checks import run_checks
from runner.tools.doctor.system_info import CommandResult, Package, SystemInfo

FIXTURES = Path(__file__).with_name("fixtures")
CHIPS = {"a2": 4, "a3": 4, "310p": 2, "first": 2, "950": 2, "unreachable": 1}
CANN = {
    "a2": "/usr/local/Ascend/cann-9.1.0",
    "950": "/usr/local/Ascend/cann-9.1.0",
    "a3": "/usr/local/Ascend/ascend-toolkit/latest",
    "310p": "/usr/local/Ascend/ascend-toolkit/latest",
    "first": "/usr/local/Ascend/ascend-toolkit/latest",
}
KERNELS = {"a2": "ascend910b", "a3": "ascend910_93", "310p": "ascend310p", "first": "ascend910", "950": "ascend950"}
COMPILER = {  # what CANN's operator compiler needs
    "attrs": "25.4.0",
    "decorator": "5.2.1",
    "numpy": "2.3.5",
    "protobuf": "6.33.1",
    "psutil": "7.1.3",
    "pyyaml": "6.0.3",
    "scipy": "1.16.3",
    "sympy": "1.14.0",
}
GOOD = {
    "torch": "2.10.0",
    "torch-npu": "2.10.0.post4",
    "antlr4-python3-runtime": "4.9.3",
    "wandb": "0.31.0",
    **COMPILER,
}
MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")
GB = 10**9
QUERY = """0, NVIDIA H100 80GB HBM3, GPU-1a, 512, 81559, 0, 31, 70.21
1, NVIDIA H100 80GB HBM3, GPU-2b, 40000, 81559, 97, 55, [N/A]
"""
BANNER = "| NVIDIA-SMI 575.51.03    Driver Version: 575.51.03    CUDA Version: 12.9     |"
TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-47\nGPU1\tNV18\t X \tSYS\t0-47\nNIC0\tPIX\tSYS\t X\n"
)


def packages(**versions: str) -> dict[str, Package]:
    """Installed distributions; `_` in a name stands for `-`."""
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    return {name: Package(name, version) for name, version in named.items()}


def ascend(name: str, folder: Path, **changes: Any) -> SystemInfo:
    """A machine with NPUs and everything in order: CANN, its environment, the torch pair of CANN 9.1."""
    root = folder / "root"
    if (FIXTURES / name / "root").is_dir():
        shutil.copytree(FIXTURES / name / "root", root)
    for node in (*(f"davinci{number}" for number in range(CHIPS[name])), *MANAGERS, "shm/.keep"):
        (root / "dev" / node).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / node).touch()
    (root / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    (root / "usr/local/bin/npu-smi").touch()
    home = CANN.get(name, "")
    if home:
        for part in (f"{KERNEL_FOLDER}/{KERNELS[name]}", "python/site-packages/tbe"):
            (root / home.lstrip("/") / part).mkdir(parents=True)
    machine = SystemInfo(
        wanted="npu",
        root=root,
        environment={
            "ASCEND_HOME_PATH": home,
            "ASCEND_OPP_PATH": f"{home}/opp",
            "LD_LIBRARY_PATH": f"/usr/local/Ascend/driver/lib64:{home}/lib64",
            "PYTHONPATH": f"{home}/python/site-packages",
            "HOME": "/people/somebody",
        },
        packages=packages(**{key.replace("-", "_"): version for key, version in GOOD.items()}),
        arch="aarch64",
        work=folder,
        free_bytes=lambda path: 500 * GB,
        total_bytes=lambda path: 64 * GB,
        run=commands(name),
    )
    return replace(machine, **changes)


def commands(
    name: str, python: CommandResult | None = None
) -> Callable[[Sequence[str], float, Mapping[str, str]], CommandResult]:
    """What npu-smi printed on that machine; every Python child answers `python`."""

    def run(words: Sequence[str], deadline_s: float, extra: Mapping[str, str]) -> CommandResult:
        if words[0] == "npu-smi":
            file = FIXTURES / name / "npu-smi" / ("_".join(words[1:]) + ".txt")
            return CommandResult(0, file.read_text()) if file.is_file() else CommandResult(1, "", "invalid parameter")
        if words[0].endswith("nvidia-smi"):
            return CommandResult(None, err="nvidia-smi: No such file or directory")
        return python or CommandResult(0, "2.10.0\n")

    return run


def nvidia(folder: Path, built: str | None = "12.8", child: CommandResult | None = None) -> SystemInfo:
    """Two GPUs, and a torch built for this CUDA; the children of the tiny real run answer `child`."""
    (folder / "root/dev/shm").mkdir(parents=True)
    for number in range(2):
        (folder / f"root/dev/nvidia{number}").touch()
    (folder / "site/torch").mkdir(parents=True)
    (folder / "site/torch/version.py").write_text(f"cuda: Optional[str] = {built!r}\n")

    def run(words: Sequence[str], deadline_s: float, extra: Mapping[str, str]) -> CommandResult:
        if child is not None and "runner.tools.doctor.smoke_test" in words:
            return child
        answers = {device_stats.QUERY: QUERY, ("nvidia-smi",): BANNER, ("nvidia-smi", "topo", "-m"): TOPO}
        if "--query-compute-apps=pid,name,used_memory" in words:
            return CommandResult(0, "4711, python, 39000 MiB\n")
        return CommandResult(0, answers.get(tuple(words), "2.13.0\n"))

    return SystemInfo(
        wanted="cuda",
        root=folder / "root",
        site=(folder / "site",),
        packages=packages(torch="2.13.0", antlr4_python3_runtime="4.9.3", wandb="0.31.0"),
        work=folder,
        free_bytes=lambda path: 500 * GB,
        total_bytes=lambda path: 64 * GB,
        run=run,
    )


def with_environment(machine: SystemInfo, **variables: str) -> SystemInfo:
    """The machine with more variables."""
    return replace(machine, environment={**machine.environment, **variables})


def findings(machine: SystemInfo) -> dict[tuple[str, str], CheckResult]:
    """(group, check) → finding, without the tiny real run."""
    return {(entry.group, entry.check): entry.finding for entry in entries(machine)}


def entries(machine: SystemInfo) -> list[ReportEntry]:
    """The whole examination, without the tiny real run."""
    return list(run_checks(machine, trial=False))
