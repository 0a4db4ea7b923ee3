"""Checks of the machine as such: system, Python, container, disk, shared memory, Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from runner.tools.doctor.check_result import CheckResult, ok, problem, skip, warning
from runner.tools.doctor.system_info import SystemInfo
from runner.tools.doctor.versions import PYTHON, release

GB = 10**9
PROJECT = "posttrain-run"
SHELF = 32 * GB  # two versions of a model of 7 billion in bfloat16
ARCHITECTURES = ("x86_64", "aarch64")


def platform(machine: SystemInfo) -> CheckResult:
    """Linux on a processor that torch_npu has wheels for."""
    seen = f"{machine.system} {machine.kernel} {machine.arch}".replace("  ", " ")
    if machine.system != "Linux":
        return warning(f"{seen}; only Linux is tested, and there are no NPUs elsewhere")
    if machine.arch not in ARCHITECTURES:
        return warning(f"{seen}; wheels of torch and torch_npu exist for {' and '.join(ARCHITECTURES)}")
    return ok(seen)


def python(machine: SystemInfo, names: Sequence[str] = (PROJECT, "torch", "transformers")) -> CheckResult:
    """A Python that these packages take."""
    version = ".".join(map(str, machine.python))
    there = [name for name in names if name in machine.packages]
    if not there:
        return skip(f"{names[0]} is not installed")
    refused = [f"{name} {machine.version(name)} takes {wants}" for name, wants in _takes(machine, there)]
    if refused:
        return problem(f"{version}; {'; '.join(refused)}", "python3.11 -m venv .venv && .venv/bin/pip install -e .")
    return ok(f"{version}, which {', '.join(there)} take{'s' if len(there) == 1 else ''}")


def _takes(machine: SystemInfo, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those of these packages that do not take this Python, and which ones they do."""
    version = ".".join(map(str, machine.python))
    for name in names:
        package = machine.packages.get(name)
        if package and package.python and version not in SpecifierSet(package.python):
            yield name, package.python
        elif package and name == "torch-npu":
            low, high = PYTHON.get(".".join(release(package.version).split(".")[:2]), ("0", "99"))
            if not Version(low) <= Version(f"{machine.python[0]}.{machine.python[1]}") <= Version(high):
                yield name, f"{low} to {high}"


def disk(machine: SystemInfo) -> CheckResult:
    """Room for checkpoints where the command is run."""
    free = machine.free_bytes(machine.work)
    seen = f"{free / GB:.1f} GB free in {machine.work}"
    if not machine.may(machine.work, os.W_OK):
        return problem(f"{machine.work} cannot be written", "cd to a folder of yours; runs are written to ./outputs")
    if free < 0.2 * GB:
        return problem(f"{seen}: not enough for any checkpoint", "free some space, or cd to another disk")
    if free < 20 * GB:
        return warning(
            f"{seen}; a full checkpoint of a 0.6 B model takes 7 GB, of a 7 B one 90 GB",
            "checkpoint.keep=1 adapter=lora, or cd to a larger disk",
        )
    return ok(seen)


def shared_memory(machine: SystemInfo) -> CheckResult:
    """Processes of one machine talk through /dev/shm; containers get 64 MB of it."""
    if not machine.exists("/dev/shm"):
        return warning("no /dev/shm: processes of one machine cannot share memory", "mount -t tmpfs tmpfs /dev/shm")
    total = machine.total_bytes(machine.path("/dev/shm"))
    if total < 1 * GB:
        remedy = "docker run --shm-size=16g … (or --ipc=host)" if machine.in_container else "mount -o remount,size=16G"
        return warning(f"/dev/shm has {total / 10**6:.0f} MB: too little for several processes", remedy)
    if machine.sampler == "vllm" and total < SHELF:
        return warning(
            f"/dev/shm has {total / GB:.1f} GB; weights for engines pass through it, 15 GB for each version of "
            "7 billion in bfloat16, else through the run's folder",
            "run plan says how much a job puts there; docker run --shm-size=64g … (or --ipc=host)",
        )
    return ok(f"/dev/shm has {total / GB:.1f} GB")


def wandb(machine: SystemInfo) -> CheckResult:
    """The default tracker: installed, and whether its variables say other than the job will."""
    version = machine.version("wandb")
    if version is None:
        return warning("not installed: a run continues without it and says so", "pip install wandb, or tracker=none")
    overruled = [name for name in ("WANDB_MODE", "WANDB_DISABLED") if name in machine.environment]
    if overruled:
        named = ", ".join(f"{name}={machine.environment[name]}" for name in overruled)
        return warning(f"{version}; {named} is not followed: a job's tracker.mode decides", f"unset {overruled[0]}")
    home = machine.environment.get("HOME", "/root")
    known = "WANDB_API_KEY" in machine.environment or "api.wandb.ai" in (machine.read(f"{home}/.netrc") or "")
    how = "a key is there, tracker.mode=online works" if known else "no key: for tracker.mode=online, wandb login"
    return ok(f"{version}, offline by default; {how}")
