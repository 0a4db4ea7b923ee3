"""The facts that checks use: files, environment variables, installed packages, command output.

Nothing here imports what it describes: versions come from package metadata, and whatever may fail on import runs in a
child process with a deadline.

The checks of the machine as such stand below them: system, Python, container, disk, shared memory, Weights & Biases.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, cast

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from runner.core.device_kinds import NPU
from runner.core.subprocess import ChildProcess, descendants, kill
from runner.device.config import DeviceConfig
from runner.spec.registry import default_registry
from runner.tools.doctor.report import CheckResult, ok, problem, skip, warning
from runner.tools.doctor.versions import PYTHON, release

SIMULATED_CARDS = 2  # that the trial of a simulated device has
COMMAND_DEADLINE_S = 30.0
IMPORT_DEADLINE_S = 180.0


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command; code None: it could not be started (`err` says why) or timed out (`late`)."""

    code: int | None
    out: str = ""
    err: str = ""
    late: bool = False

    @property
    def last_line(self) -> str:
        """The line that usually says what went wrong."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else f"exited with code {self.code} and printed nothing"


@dataclass(frozen=True, slots=True)
class Package:
    """An installed distribution, as its metadata says."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    python: str | None = None


RunCommand = Callable[[Sequence[str], float, Mapping[str, str]], CommandResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemInfo:
    """A frozen view of one machine; tests build one from fixtures, `current_system` reads the real one."""

    wanted: str = "auto"  # the name of a device
    sampler: str | None = None  # what a job is meant to sample with, and to be launched by; None = not set
    launch: str | None = None
    elsewhere: str | None = None  # why a job's processes do not run on this machine
    parts: tuple[tuple[str, Callable[[], None]], ...] = ()  # what the parts of a job check themselves
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, Package] = field(default_factory=dict)  # by normalized name: torch-npu
    site: tuple[Path, ...] = ()  # the folders packages lie in
    python: tuple[int, int, int] = (3, 11, 0)
    system: str = "Linux"
    arch: str = "x86_64"
    kernel: str = ""
    work: Path = Path(".")
    free_bytes: Callable[[Path], int] = field(default=lambda path: shutil.disk_usage(path).free)
    total_bytes: Callable[[Path], int] = field(default=lambda path: shutil.disk_usage(path).total)
    may: Callable[[Path, int], bool] = field(default=os.access)
    run: RunCommand = field(default=lambda words, deadline_s, extra: CommandResult(None, err="commands cannot be run"))

    def path(self, name: str) -> Path:
        """A path of the machine, `/dev/davinci0`."""
        return self.root / name.lstrip("/")

    def exists(self, name: str) -> bool:
        """Whether there is something at that path."""
        return self.path(name).exists()

    def read(self, name: str | Path) -> str | None:
        """The text of a file, None where there is none or it may not be read."""
        try:
            return self.path(str(name)).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def glob(self, pattern: str) -> list[str]:
        """The machine's paths that match, sorted by number where they end in one."""
        found = ["/" + str(path.relative_to(self.root)) for path in self.root.glob(pattern.lstrip("/"))]
        return sorted(found, key=lambda name: (len(name), name))

    def docker_run(self, *flags: str) -> str:
        """The command that starts this container's image with more flags; a container's name is its host name."""
        name = (self.read("/etc/hostname") or "").strip()
        note = "on the host" if name else "on the host; CONTAINER: see docker ps"
        image = f"$(docker inspect -f '{{{{.Config.Image}}}}' {name or 'CONTAINER'})"
        return f"docker run {' '.join(flags)} -it {image}  # {note}"

    def command_result(self, *words: str, deadline_s: float = COMMAND_DEADLINE_S, **extra: str) -> CommandResult:
        """How a command ended. `extra` is added to its environment."""
        return self.run(words, deadline_s, extra)

    def version(self, name: str) -> str | None:
        """The version of an installed distribution."""
        package = self.packages.get(name.lower().replace("_", "-"))
        return package.version if package else None

    def read_package_file(self, package_file: str) -> str | None:
        """The text of a file of an installed package, found without importing it: `torch/version.py`."""
        for folder in self.site:
            try:
                return (folder / package_file).read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
        return None

    @property
    def nodes(self) -> list[str]:
        """The device files of the NPUs: one per chip."""
        return self.glob(str(NPU.nodes))

    @property
    def in_container(self) -> bool:
        """Whether this looks like a container."""
        return any(map(self.exists, ("/.dockerenv", "/run/.containerenv"))) or bool(
            {"KUBERNETES_SERVICE_HOST", "container"} & set(self.environment)
        )


def device_config(name: str) -> DeviceConfig:
    """The config of a device, built-in or a plug-in's, with its defaults."""
    return cast(DeviceConfig, default_registry().classes("device")[name](name=name))


def trial_simulator(name: str) -> DeviceConfig | None:
    """The same with the cards that its trial has; None for a real device."""
    return device_config(name).simulator(SIMULATED_CARDS)


def current_system(wanted: str, **job: Any) -> SystemInfo:
    """This machine, for a `job` where one is named (sampler, launch, elsewhere, parts).

    Each command is run once, however many checks need it.
    """
    found: dict[str, Package] = {}
    for one in distributions():
        about = {key: one.metadata[key] for key in ("Name", "Version", "Requires-Python") if key in one.metadata}
        if "Name" in about and "Version" in about:  # a damaged one lacks them
            name = about["Name"].lower().replace("_", "-")
            # Where two are on the path, the first is the one that is imported.
            package = Package(name, about["Version"], tuple(one.requires or ()), about.get("Requires-Python"))
            found.setdefault(name, package)
    return SystemInfo(
        wanted=wanted,
        **job,
        environment=dict(os.environ),
        packages=found,
        site=tuple(Path(entry) for entry in sys.path if entry),
        python=sys.version_info[:3],
        system=platform.system(),
        arch=platform.machine(),
        kernel=platform.release(),
        work=Path.cwd(),
        run=_cache_results(run_command),
    )


def run_command(words: Sequence[str], deadline_s: float, extra: Mapping[str, str]) -> CommandResult:
    """Run a command; kill it and its children at the deadline, or if this process is interrupted."""
    try:
        process = ChildProcess(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **extra})
    except OSError as error:
        return CommandResult(None, err=f"{words[0]}: {error.strerror}")
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _kill_tree(process)
        out, err = process.communicate()
        said = "\n".join([*err.decode(errors="replace").strip().splitlines()[-1:], f"timeout after {deadline_s:.0f} s"])
        return CommandResult(None, out.decode(errors="replace"), said, late=True)
    except BaseException:
        _kill_tree(process)
        raise
    return CommandResult(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def _kill_tree(process: ChildProcess) -> None:
    """Kill a command and all below it: what went into a session of its own would hold the pipes open."""
    below = descendants(process.pid)
    process.kill()
    kill(below)


def _cache_results(run: RunCommand) -> RunCommand:
    @functools.cache
    def once(words: tuple[str, ...], deadline_s: float, extra: tuple[tuple[str, str], ...]) -> CommandResult:
        return run(words, deadline_s, dict(extra))

    return lambda words, deadline_s, extra: once(tuple(words), deadline_s, tuple(sorted(extra.items())))


GB = 10**9
PROJECT = "posttrain-run"
SHELF = 32 * GB  # two versions of a model of 7 billion in bfloat16
ARCHITECTURES = ("x86_64", "aarch64")


def system_platform(machine: SystemInfo) -> CheckResult:
    """Linux on a processor that torch_npu has wheels for."""
    seen = f"{machine.system} {machine.kernel} {machine.arch}".replace("  ", " ")
    if machine.system != "Linux":
        return warning(f"{seen}; only Linux is tested, and NPUs need it")
    if machine.arch not in ARCHITECTURES:
        return warning(f"{seen}; wheels of torch and torch_npu exist for {' and '.join(ARCHITECTURES)}")
    return ok(seen)


def python(machine: SystemInfo, names: Sequence[str] = (PROJECT, "torch", "transformers")) -> CheckResult:
    """A Python that these packages take."""
    version = ".".join(map(str, machine.python))
    there = [name for name in names if name in machine.packages]
    if not there:
        return skip(f"{names[0]} is not installed")
    refused = [f"{name} {machine.version(name)} needs {wants}" for name, wants in _takes(machine, there)]
    if refused:
        return problem(f"{version}; {'; '.join(refused)}", "python3.11 -m venv .venv && .venv/bin/pip install -e .")
    return ok(f"{version}, supported by {', '.join(there)}")


def _takes(machine: SystemInfo, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those of these packages that do not take this Python, and which ones they do."""
    version = ".".join(map(str, machine.python))
    for name in names:
        package = machine.packages.get(name)
        if package and package.python and version not in SpecifierSet(package.python):
            yield name, package.python
        elif package and name == "torch-npu":
            minor = ".".join(release(package.version).split(".")[:2])
            low, high = PYTHON.get(package.version.partition("+")[0]) or PYTHON.get(minor, ("0", "99"))
            if not Version(low) <= Version(f"{machine.python[0]}.{machine.python[1]}") <= Version(high):
                yield name, f"{low} to {high}"


def disk(machine: SystemInfo) -> CheckResult:
    """Room for checkpoints where the command is run."""
    free = machine.free_bytes(machine.work)
    seen = f"{free / GB:.1f} GB free in {machine.work}"
    if not machine.may(machine.work, os.W_OK):
        return problem(f"{machine.work} is not writable", "cd to your own folder; runs are written to ./outputs")
    if free < 0.2 * GB:
        return problem(f"{seen}: not enough for any checkpoint", "free some space, or cd to another disk")
    if free < 20 * GB:
        return warning(
            f"{seen}; a full checkpoint of a 0.6 B model needs 7 GB, of a 7 B model 90 GB",
            "checkpoint.keep=1 adapter=lora, or cd to a larger disk",
        )
    return ok(seen)


def shared_memory(machine: SystemInfo) -> CheckResult:
    """Processes of one machine talk through /dev/shm; containers get 64 MB of it."""
    if not machine.exists("/dev/shm"):
        return warning("no /dev/shm: processes of one machine cannot share memory", "mount -t tmpfs tmpfs /dev/shm")
    total = machine.total_bytes(machine.path("/dev/shm"))

    def enlarge(size: int) -> str:
        in_place = f"mount -o remount,size={size}G /dev/shm"
        return machine.docker_run(f"--shm-size={size}g") if machine.in_container else in_place

    if total < 1 * GB:
        return warning(f"/dev/shm has {total / 10**6:.0f} MB: too little for several processes", enlarge(16))
    if machine.sampler == "vllm" and total < SHELF:
        return warning(
            f"/dev/shm has {total / GB:.1f} GB; weights for engines are stored there (15 GB per version of 7 billion "
            "in bfloat16), else in the run's folder",
            enlarge(64),
        )
    return ok(f"/dev/shm has {total / GB:.1f} GB")


def wandb(machine: SystemInfo) -> CheckResult:
    """The default tracker: installed, and whether its variables say other than the job will."""
    version = machine.version("wandb")
    if version is None:
        return warning("not installed: a run continues without it", "pip install wandb, or tracker=none")
    names = ("WANDB_MODE", "WANDB_DISABLED", "WANDB_DIR", "WANDB_RESUME", "WANDB_RUN_ID")
    overruled = [name for name in names if name in machine.environment]
    if overruled:
        named = ", ".join(f"{name}={machine.environment[name]}" for name in overruled)
        text = f"{version}; {named}: no effect, a job's own options are used"
        return warning(text, f"unset {' '.join(overruled)}")
    home = machine.environment.get("HOME", "/root")
    known = "WANDB_API_KEY" in machine.environment or "api.wandb.ai" in (machine.read(f"{home}/.netrc") or "")
    how = "an API key is set" if known else "no API key: for tracker.mode=online, wandb login"
    return ok(f"{version}, offline by default; {how}")


def swanlab(machine: SystemInfo) -> CheckResult:
    """A tracker that a job may choose."""
    if (version := machine.version("swanlab")) is None:
        return skip("not installed: tracker=swanlab needs it: pip install 'posttrain-run[swanlab]'")
    return ok(f"{version}, offline by default")
