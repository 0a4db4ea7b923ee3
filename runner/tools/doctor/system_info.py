"""The facts that checks use: files, environment variables, installed packages, command output.

Nothing here imports what it describes: versions come from package metadata, and whatever may fail on import runs in a
child process with a deadline.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, cast

from runner.core.subprocess import ChildProcess, descendants, kill
from runner.device.config import DeviceConfig
from runner.device.device_kinds import NPU
from runner.spec.registry import default_registry

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
        return lines[-1] if lines else f"ended with {self.code} and said nothing"


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
    sampler: str | None = None  # what a job is meant to sample with, and to be launched by; None = nobody said
    launch: str | None = None
    elsewhere: str | None = None  # why a job's processes do not run on this machine
    parts: tuple[tuple[str, Callable[[], None]], ...] = ()  # what the parts of a job check themselves
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, Package] = field(default_factory=dict)  # by normalised name: torch-npu
    site: tuple[Path, ...] = ()  # the folders packages lie in
    python: tuple[int, int, int] = (3, 11, 0)
    system: str = "Linux"
    arch: str = "x86_64"
    kernel: str = ""
    work: Path = Path(".")
    free_bytes: Callable[[Path], int] = field(default=lambda path: shutil.disk_usage(path).free)
    total_bytes: Callable[[Path], int] = field(default=lambda path: shutil.disk_usage(path).total)
    may: Callable[[Path, int], bool] = field(default=os.access)
    run: RunCommand = field(default=lambda words, deadline_s, extra: CommandResult(None, err="no command can be run"))

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
        said = "\n".join([*err.decode(errors="replace").strip().splitlines()[-1:], f"no end after {deadline_s:.0f} s"])
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
