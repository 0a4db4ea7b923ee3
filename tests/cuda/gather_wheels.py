"""Gather the wheels that a GPU machine without a network lacks, to run this project and its tests for CUDA there.

    pyproject.toml ──requirements──▶ not in the machine's package list ──pip download──▶ wheel ──requirements──▶ …

    python tests/cuda/gather_wheels.py [--installed LIST] [--folder FOLDER]     here, where there is a network
    python3 -m pip install --no-index --no-deps FOLDER/*.whl                    there

LIST is what `python3 -m pip freeze` or `python3 -m pip list` prints on that machine. A package that it does not name is
gathered, and one whose version there is not in the range asked for. What only an sdist exists of is built here, if it
is pure Python. wandb, half of what would be gathered, is left out: `tracker=wandb` alone needs it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.markers import default_environment
from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
LIMIT_BYTES = 40 * MIB
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]
TESTED_WITH = ("pytest", "pytest-timeout", "hypothesis")  # of the extra `dev`, what the tests of tests/cuda import
LEFT_OUT = ("wandb",)
MACHINE = {
    **default_environment(),
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
}


def main() -> int:
    """Gather into a new folder; returns 1 if it became larger than the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--installed", type=Path, default=Path(__file__).with_name("installed.txt"))
    parser.add_argument("--folder", type=Path, default=ROOT / "dist" / "wheels-cuda")
    given = parser.parse_args()
    if given.folder.exists() and any(given.folder.iterdir()):
        sys.exit(f"{given.folder} is not empty: remove it, or name another with --folder")
    given.folder.mkdir(parents=True, exist_ok=True)
    for wheel in gather(installed(given.installed.read_text(encoding="utf-8")), given.folder):
        print(f"{wheel.stat().st_size / MIB:7.1f} MiB  {wheel.name}", flush=True)
    total = sum(wheel.stat().st_size for wheel in given.folder.glob("*.whl"))
    print(f"{total / MIB:7.1f} MiB  in {given.folder}; at most {LIMIT_BYTES // MIB}")
    print(f"there: python3 -m pip install --no-index --no-deps {given.folder.name}/*.whl")
    return int(total > LIMIT_BYTES)


def gather(there: Mapping[str, Version | None], folder: Path) -> Iterator[Path]:
    """Download what the machine lacks into `folder`, wheel by wheel; there: see `installed`."""
    found: dict[str, Version] = {}
    waiting = list(roots())
    while waiting:
        wanted = waiting.pop(0)
        name = canonicalize_name(wanted.name)
        if name in found:
            if not wanted.specifier.contains(found[name], prereleases=True):
                sys.exit(f"{name} {found[name]} was gathered, and {wanted} is required as well: pin it in constraints/")
            continue
        if name in there and ((version := there[name]) is None or wanted.specifier.contains(version, prereleases=True)):
            continue
        wheel = download(wanted, folder)
        found[name] = parse_wheel_filename(wheel.name)[1]
        waiting += requirements(wheel, wanted.extras)
        yield wheel


def roots() -> Iterator[Requirement]:
    """What the project requires at run time, and its tests for CUDA."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = map(Requirement, project["dependencies"])
    yield from (one for one in needed if one.name not in LEFT_OUT)
    tested = map(Requirement, project["optional-dependencies"]["dev"])
    yield from (one for one in tested if one.name in TESTED_WITH)


def installed(text: str) -> dict[str, Version | None]:
    """The packages of a `pip freeze` or `pip list`, under their canonical names; a version that it does not tell is
    None, and taken for a right one."""
    found = dict[str, Version | None]()
    for line in text.splitlines():
        name, version, *_ = [*re.split(r"\s*===?\s*|\s+", line.partition("#")[0].partition(" @ ")[0].strip()), ""]
        if not name or name == "Package" or name.startswith("-"):
            continue
        try:
            found[canonicalize_name(name)] = Version(version)
        except InvalidVersion:
            found[canonicalize_name(name)] = None
    return found


def download(wanted: Requirement, folder: Path) -> Path:
    """The newest wheel of the machine's kind that CI's constraints allow, now in `folder`."""
    with TemporaryDirectory() as scratch:
        common = ["--quiet", "--disable-pip-version-check", "--no-deps", "-c", str(ROOT / "constraints" / "cpu.txt")]
        kind = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
        kind += [word for platform in PLATFORMS for word in ("--platform", platform)]
        failed = pip("download", *common, *kind, "--dest", scratch, str(wanted))
        if failed:
            failed_too = pip("wheel", *common, "--wheel-dir", scratch, str(wanted))
            if failed_too:
                sys.exit(f"{wanted}: no wheel for Python {PYTHON} on Linux x86-64, and none can be built\n{failed_too}")
        [wheel] = Path(scratch).glob("*.whl")
        if failed and not wheel.name.endswith("-none-any.whl"):
            sys.exit(
                f"{wheel.name} was built for this machine: {wanted} has no wheel for another, and is no pure Python"
            )
        return Path(shutil.move(wheel, folder / wheel.name))


def pip(*words: str) -> str:
    """Error in a command of pip; empty where nothing did."""
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def requirements(wheel: Path, extras: set[str]) -> Iterator[Requirement]:
    """What a wheel, installed with these extras, requires on the machine."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [one for one in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one)]
        metadata = parse_email(archive.read(name))[0]
    for one in map(Requirement, metadata.get("requires_dist", [])):
        choices = ["", *extras]
        if one.marker is None or any(one.marker.evaluate({**MACHINE, "extra": extra}) for extra in choices):
            yield one


if __name__ == "__main__":
    sys.exit(main())
