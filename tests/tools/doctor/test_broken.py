"""A torch_npu without CANN, for real: `import torch` fails, the doctor says why, and jobs on the CPU run anyway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ENTRY_POINT = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
# What the wheel does first: it loads CANN's libraries.
MODULE = """
import ctypes
try:
    ctypes.CDLL("libhccl.so")
except OSError as error:
    raise ImportError(str(error)) from None
"""
SMALL = ("steps=1", "algorithm.batch_size=8", "data.items=16", "data.held_out=2", "tracker=none", "evaluation.every=0")


def site(folder: Path, torch_npu: str) -> Path:
    """A folder with a torch_npu of that version, as pip leaves it."""
    (folder / "torch_npu").mkdir(parents=True)
    (folder / "torch_npu/__init__.py").write_text(MODULE)
    info = folder / f"torch_npu-{torch_npu}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: torch_npu\nVersion: {torch_npu}\nRequires-Dist: torch=={torch_npu}.*\n"
    )
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return site(tmp_path_factory.mktemp("site"), version("torch").partition("+")[0])


def run(broken: Path, cwd: Path, *words: str, program: tuple[str, ...] = ("-m", "runner"), **more: str):
    return subprocess.run(
        [sys.executable, "-P", *program, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(broken), **more},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_the_environment_is_really_broken(broken: Path, workdir: Path) -> None:
    done = run(broken, workdir, program=("-c", "import torch"))
    assert done.returncode == 1 and "Failed to load the backend extension: torch_npu" in done.stderr


def test_the_doctor_diagnoses_it(broken: Path, workdir: Path) -> None:
    done = run(broken, workdir, "doctor", "--no-trial")
    assert (done.returncode, done.stderr) == (2, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert any(line.startswith("problem CANN no CANN toolkit") for line in lines)
    assert any(line.startswith("problem import torch import torch fails, because it loads torch_npu") for line in lines)
    assert "ImportError: libhccl.so: cannot open shared object file" in " ".join(lines)
    assert any(line.startswith("ok torch, torch_npu") for line in lines)
    end = done.stdout.partition("do this, in order\n")[2]
    assert "pip uninstall torch_npu" in end and "set_env.sh" in end and "npu   not ready" in end
    assert "Traceback" not in done.stdout and list(workdir.iterdir()) == []


@pytest.mark.parametrize("words", [("+recipe=sft_npu",), ("+recipe=grpo_npu", "device=npu")])
def test_a_job_on_an_npu_says_what_to_install_in_order(words: tuple[str, ...], broken: Path, workdir: Path) -> None:
    home = str(workdir / "home")
    done = run(broken, workdir, *words, HOME=home, ASCEND_HOME_PATH="", ASCEND_TOOLKIT_HOME="")
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr
    steps = [line.strip() for line in done.stderr.splitlines() if line.startswith("  ")]
    assert [step[:2] for step in steps[0:6:2]] == ["1.", "2.", "3."], done.stderr
    assert "no /dev/davinci0" in steps[0] and f"{home}/Ascend" in steps[2] and "set_env.sh" in steps[5]
    assert f"run doctor {' '.join(words)}" in done.stderr and ",rehearse]'" in done.stderr


def test_a_job_on_an_npu_names_the_cann_that_is_there(broken: Path, workdir: Path) -> None:
    """Somebody's own installation, in a shell where its set_env.sh was not sourced."""
    script = workdir / "home/Ascend/cann/set_env.sh"
    script.parent.mkdir(parents=True)
    script.touch()
    done = run(broken, workdir, "+recipe=sft_npu", HOME=str(workdir / "home"))
    assert done.returncode == 2 and f"source {script}" in done.stderr and "no CANN in" not in done.stderr, done.stderr


@pytest.mark.slow
def test_a_job_on_the_cpu_runs_and_says_what_it_left_out(broken: Path, workdir: Path) -> None:
    done = run(broken, workdir, "device=cpu", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in (done.stdout + done.stderr).splitlines() if "environment.torch_npu" in line]
    assert "device=cpu does not use it; CANN is not installed or not loaded" in line and "run doctor" in line


@pytest.mark.slow
def test_other_verbs_and_devices_too(broken: Path, workdir: Path) -> None:
    done = run(broken, workdir, "device=auto", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it cannot be loaded; CANN is not installed" in done.stdout + done.stderr
    asked = run(broken, workdir, "infer", "latest", "--max-new-tokens", "2", "sort 1")
    assert asked.returncode == 0, asked.stderr
    exported = run(broken, workdir, "export", "latest", "--out", "there", "device=cpu")
    assert exported.returncode == 0, exported.stderr
    refused = run(broken, workdir, "infer", "latest", "sort 1", "device=npu")
    assert refused.returncode == 2 and "run doctor device=npu" in refused.stderr, refused.stderr


@pytest.mark.slow
def test_a_doctor_asked_about_the_cpu_has_nothing_to_say_of_it(broken: Path, workdir: Path) -> None:
    done = run(broken, workdir, "doctor", "device=cpu", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ready"], report["todo"]) == (0, {"cpu": True}, [])


def test_a_torch_npu_for_another_torch_is_told_apart(tmp_path: Path) -> None:
    other = site(tmp_path / "other", "2.7.1")
    program = (
        "from runner.device.process_setup import *; from runner.core.device_kinds import *; "
        "print(hide_torch_npu('auto', CPU))"
    )
    done = run(other, tmp_path, program=("-c", program))
    assert done.stdout.startswith("it cannot be loaded; torch_npu 2.7.1 does not match torch"), done.stderr


def test_nothing_is_hidden_from_a_job_on_an_npu(broken: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.util, os\nfrom runner.device.process_setup import AUTOLOAD, NPU, hide_torch_npu\n"
        "print(hide_torch_npu('npu', NPU), importlib.util.find_spec('torch_npu') is not None, os.environ.get(AUTOLOAD))"
    )
    assert run(broken, tmp_path, program=("-c", program)).stdout == "None True None\n"
