"""Makes what the simulated NPU is made of, once: the wheel of torch_npu, and four small libraries built with g++.

    the wheel that matches torch ──pip──▶ <cache>/npu_sim/torch-2.13.0-…/wheel/     never in site-packages
    its symbols, cann.c          ──gcc──▶ …/built-<digest>/lib*.so                  what torch_npu takes for CANN
    kernels.cpp, hccl.cpp        ──g++──▶ …/built-<digest>/*.so                     CPU kernels, collectives by gloo

Each folder is made aside and renamed, under a lock, so that what has its name is whole. Whoever builds also removes
what killed builders left, and libraries of other sources that nobody has used for a week. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from npu_simulator.stub import SONAMES, build_stub
from runner.core.errors import EnvironmentProblem
from runner.core.package import cache_folder

SOURCES = Path(__file__).resolve().parent
TOOLS = ("g++", "gcc", "nm", "strings")
COMMAND = "run doctor --prepare npu_sim"
CUDA_BUILD = "torch is built for CUDA here, and torch_npu does not load beside that build"
CPU_BUILD = (
    "install the one for the CPU: pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu"
)
PATIENCE_S = 600  # of one pip or g++
KEPT_S = 7 * 24 * 3600  # after their last use, libraries of other sources: of a second checkout, or an older version
EXTENSIONS = {"kernels": (), "hccl": ("-ltorch_python",)}
# -O1, because these files hand over and do not compute
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the parts lie: the folder that holds torch_npu, and the one with the libraries."""

    wheel: Path
    built: Path

    @property
    def whole(self) -> bool:
        """Whether both are there."""
        return self.wheel.is_dir() and self.built.is_dir()


def parts() -> Parts:
    """The parts for the torch and the Python of this process, made or not. Raises EnvironmentProblem without torch."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvironmentProblem("device=npu_sim: torch is not installed here") from error
    where = f"torch-{version}-{sys.implementation.cache_tag}-{platform.machine()}"
    home = cache_folder() / "npu_sim" / where
    return Parts(home / "wheel", home / f"built-{_digest()}")


def prepare(say: Say) -> Parts:
    """The parts, whole: what is missing is fetched and built now, and said.

    Raises EnvironmentProblem without a compiler, where pip finds no matching wheel, and for a torch built for CUDA.
    """
    found = parts()
    if is_cuda_build():
        raise NotFetched(f"device=npu_sim: {CUDA_BUILD}; {CPU_BUILD}")
    if found.whole:
        _mark_used(found.built)
        return found
    _need_tools()
    begin = time.monotonic()
    with _alone(found.wheel.parent, say):
        _prune(found)
        if not found.wheel.is_dir():
            say(f"npu_sim: first use: fetching {_requirement()} (about 45 MB, 150 MB unpacked) into {found.wheel}")
            _made(found.wheel, _fetch)
        if not found.built.is_dir():
            say("npu_sim: building four small libraries with g++, half a minute to a minute")
            _made(found.built, lambda folder: _build(found.wheel, folder))
    say(f"npu_sim: ready after {time.monotonic() - begin:.0f} s; kept in {found.wheel.parent}")
    return found


def is_cuda_build() -> bool:
    """Whether torch here is built for CUDA; torch_npu then ends the process when it is loaded."""
    found = importlib.util.find_spec("torch")
    return found is not None and Path(str(found.origin)).with_name("lib").joinpath("libtorch_cuda.so").exists()


def _mark_used(built: Path) -> None:
    if os.access(built, os.W_OK):  # a cache that others share may be closed to this user
        os.utime(built)


def _prune(found: Parts) -> None:
    """Remove what is left of builds that were killed, and what is no longer used; the caller holds the lock."""
    home, now = found.wheel.parent, datetime.now().timestamp()
    left = [*home.glob(".built-*"), *home.glob(".wheel-*")]
    old = [path for path in home.glob("built-*") if now - path.stat().st_mtime > KEPT_S]
    for path in (*left, *old):
        shutil.rmtree(path)


def _digest() -> str:
    """Of everything that the libraries depend on, beside the folder that they lie in."""
    text = hashlib.sha256(" ".join((*FLAGS, *SONAMES)).encode())
    for name in ("cann.c", "kernels.cpp", "hccl.cpp", "stub.py"):
        text.update((SOURCES / name).read_bytes())
    return text.hexdigest()[:12]


def _need_tools() -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise EnvironmentProblem(
            f"device=npu_sim: it is built once on this machine, and {', '.join(missing)} is missing; in this order:\n"
            f"  1. install a C++ compiler (g++ 11 or newer, with binutils)\n  2. {COMMAND}\n"
            "  or run it here: device=cpu"
        )


@contextmanager
def _alone(home: Path, say: Say) -> Iterator[None]:
    """One process at a time makes parts; another one waits, and finds them made."""
    home.mkdir(parents=True, exist_ok=True)
    with open(home / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"npu_sim: waiting for another process that is making it ({home})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _made(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a folder aside, then give it its name."""
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(aside)
        os.chmod(aside, 0o755)
        os.rename(aside, folder)
    finally:
        if aside.exists():
            shutil.rmtree(aside)


def _requirement() -> str:
    """torch_npu of exactly torch's version; a post-release says for which CANN it is, which is none here."""
    return f"torch_npu=={importlib.metadata.version('torch').partition('+')[0]}.*"


def _fetch(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    limits = ["--retries", "1", "--timeout", "20", "--no-deps", "--only-binary", ":all:"]
    try:
        _run([*pip, *limits, "--target", str(folder), _requirement()])
    except ToolFailed as error:
        raise NotFetched(
            f"device=npu_sim: pip cannot fetch {_requirement()} (it needs the network once):\n{error}\n"
            f"  in this order: 1. go online, or point pip at an index that has it  2. {COMMAND}\n"
            "  or run it here: device=cpu"
        ) from error


def _build(wheel: Path, folder: Path) -> None:
    """The stub of CANN, and both extensions at once: they take the time."""
    try:
        build_stub(wheel, SOURCES / "cann.c", folder, _run)
        _run_together([_compile(name, libraries, folder) for name, libraries in EXTENSIONS.items()])
    except ToolFailed as error:
        raise EnvironmentProblem(
            f"device=npu_sim: its libraries cannot be built for torch {importlib.metadata.version('torch')}:\n{error}"
        ) from error


def _compile(name: str, libraries: Sequence[str], folder: Path) -> list[str]:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    torch = Path(spec.submodule_search_locations[0])
    headers = (torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
    include = [f"-I{path}" for path in headers]
    link = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", *libraries]
    return ["g++", *FLAGS, *include, str(SOURCES / f"{name}.cpp"), "-o", str(folder / f"{name}.so"), *link]


class NotFetched(EnvironmentProblem):
    """There is no torch_npu for this torch, or no way to it."""


class ToolFailed(Exception):
    """pip, g++, gcc, nm or strings ended badly; the text is what it said."""


def _run(command: Sequence[str]) -> str:
    """What a command prints. Raises ToolFailed."""
    return _run_together([command])[0]


def _run_together(commands: Sequence[Sequence[str]]) -> list[str]:
    """What each of the commands prints, run side by side. Raises ToolFailed with what the first bad one said."""
    started = [_started(command) for command in commands]
    try:
        done = [process.communicate(timeout=PATIENCE_S) for process in started]
    except subprocess.TimeoutExpired as error:
        raise ToolFailed(f"  {error.cmd[0]} did not exit within {PATIENCE_S} s") from error
    finally:
        for process in started:
            process.kill()
    for process, command, (_, said) in zip(started, commands, done, strict=True):
        if process.returncode:
            lines = [line for line in said.strip().splitlines() if line.strip()][-8:]
            text = "\n".join(f"  {line}" for line in (f"{command[0]} exited with {process.returncode}", *lines))
            raise ToolFailed(text)
    return [out for out, _ in done]


def _started(command: Sequence[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    own = os.environ | {"PIP_USER": "0"}  # which pip refuses beside --target
    return subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
