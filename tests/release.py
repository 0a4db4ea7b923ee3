"""`make release`: builds the wheel and the sdist, and checks the wheel in a fresh environment without a network.

commit ─▶ dist/*.whl, dist/*.tar.gz ─▶ a new venv ─▶ demo, GRPO and a server, from another folder ─▶ dist/notes.md
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

import runner

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
FOR_TESTS = ("dev", "vllm-cpu-test")
NO_NETWORK = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh")
SERVE = """
import subprocess, sys, time, urllib.request
server = subprocess.Popen([sys.argv[1], "serve", "latest", "port=8123"])
for _ in range(120):
    try:
        print(urllib.request.urlopen("http://127.0.0.1:8123/v1/models").read().decode())
        break
    except OSError:
        time.sleep(0.5)
server.terminate()
sys.exit(server.wait() != 143)
"""


def main() -> int:
    """Build, check and write the notes; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pip", default="", help="arguments of pip install")
    pip_args = parser.parse_args().pip.split()
    version = runner.__version__
    _check_commit(version)
    shutil.rmtree(DIST, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST), cwd=ROOT)
    wheel, sdist = *DIST.glob("*.whl"), *DIST.glob("*.tar.gz")
    (DIST / "notes.md").write_text(release_notes((ROOT / "CHANGELOG.md").read_text(), version))
    with tempfile.TemporaryDirectory() as scratch:
        environment, elsewhere = Path(scratch, "venv"), Path(scratch, "elsewhere")
        elsewhere.mkdir()
        venv.create(environment, with_pip=True)
        pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        limits = ["-c", str(ROOT / "constraints/cpu.txt"), *pip_args]
        _run(*pip, *limits, "torch")
        _run(*pip, *limits, str(wheel))
        _use(environment / "bin/run", elsewhere)
        _run(*pip, *pip_args, "uv")
        _resolve_extras(environment / "bin/uv", Path(scratch))
    for path in (wheel, sdist):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


def release_notes(changelog: str, version: str) -> str:
    """The section of a version, or of what is not released yet. Raises SystemExit where it is missing or empty."""
    sections = dict(re.findall(r"^## \[(.+?)\].*\n((?:(?!## \[).*\n?)*)", changelog, re.MULTILINE))
    notes = (sections.get(version) or sections.get("Unreleased") or "").strip()
    if notes:
        return notes + "\n"
    raise SystemExit(f"CHANGELOG.md has no section [{version}] or [Unreleased]")


def _check_commit(version: str) -> None:
    """Say, or refuse, what the release is made of: a tag of this version, and no uncommitted changes."""
    if changed := _output("git", "status", "--porcelain"):
        raise SystemExit(f"commit these first:\n{changed}")
    tags = _output("git", "tag", "--points-at", "HEAD").split()
    if versions := [tag for tag in tags if re.fullmatch(r"v\d.*", tag)]:
        if versions != [f"v{version}"]:
            raise SystemExit(f"the commit has the tag {', '.join(versions)}, and runner.__version__ is {version}")
    else:
        print(f"a trial: to release this commit, tag it first: git tag v{version}")


def _use(command: Path, folder: Path) -> None:
    """What the first user does, from another folder and without a network."""
    isolated = NO_NETWORK if subprocess.run([*NO_NETWORK, "true"], capture_output=True).returncode == 0 else ()
    if not isolated:
        print("no network namespaces here: the network stays on for the check")
    small = ["steps=3", "evaluation.every=0", "checkpoint.best=null"]
    _run(*isolated, str(command), "--version", cwd=folder)
    _run(*isolated, str(command), cwd=folder)
    _run(*isolated, str(command), "+recipe=grpo_demo", *small, cwd=folder)
    _run(*isolated, str(command), "infer", "latest", "sort 5031", cwd=folder)
    _run(*isolated, str(command.with_name("python")), "-c", SERVE, str(command), cwd=folder)


def _resolve_extras(uv: Path, scratch: Path) -> None:
    """All extras that a user can ask for fit together, on each release of Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [f"--extra={name}" for name in project["optional-dependencies"] if name not in FOR_TESTS]
    for python in ("3.11", "3.12", "3.13"):
        found = scratch / f"{python}.txt"
        words = ["pip", "compile", "--quiet", *extras, "--python-version", python, "--output-file", str(found)]
        _run(str(uv), *words, "pyproject.toml", cwd=ROOT)
        print(f"Python {python}: {sum('==' in line for line in found.read_text().splitlines())} packages")


def _run(*words: str, cwd: Path | None = None) -> None:
    print("$", *words, flush=True)
    subprocess.run(words, cwd=cwd, check=True, env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"})


def _output(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
