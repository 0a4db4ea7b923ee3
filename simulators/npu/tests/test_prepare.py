"""Making the simulator: what is said where that cannot be done, and that what has its name is whole."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_simulator import prepare as module
from npu_simulator.config import NpuSimConfig
from npu_simulator.prepare import COMMAND, NotFetched, is_cuda_build, parts, prepare
from npu_simulator.process import Pretence, enter
from runner.cli.main import main
from runner.core.errors import EnvironmentProblem

pytestmark = pytest.mark.skipif(is_cuda_build(), reason="torch is built for CUDA")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_a_compiler_it_ends_with_2_and_the_command_and_leaves_no_run(
    bare: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(workdir))
    assert main(["+recipe=sft_demo", "device=npu_sim"]) == 2
    said = capsys.readouterr().err
    assert "g++" in said and COMMAND in said and "device=cpu" in said
    assert not (workdir / "outputs").exists() and not bare.exists()


def test_beside_a_torch_for_cuda_it_ends_with_2_and_what_to_install(
    bare: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "is_cuda_build", lambda: True)
    assert main(["+recipe=sft_demo", "device=npu_sim"]) == 2
    assert "built for CUDA" in capsys.readouterr().err and not bare.exists()


def test_offline_it_ends_with_2_and_the_command(
    bare: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_need_tools", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(workdir))
    assert main(["+recipe=sft_demo", "device=npu_sim"]) == 2
    said = capsys.readouterr().err
    version = importlib.metadata.version("torch").partition("+")[0]
    assert "first use" in said, "it is announced before it begins"
    assert f"pip cannot fetch torch_npu=={version}.*" in said and COMMAND in said
    assert [path.name for path in parts().wheel.parent.iterdir()] == [".lock"], "nothing half-made is left"
    with pytest.raises(NotFetched):
        prepare(lambda text: None)


def test_what_gpp_says_is_shown(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_need_tools", lambda: None)
    monkeypatch.setattr(module, "_fetch", lambda folder: None)
    monkeypatch.setattr(module, "build_stub", lambda *arguments: None)
    broken = [sys.executable, "-c", "import sys; sys.exit('kernels.cpp:7: error: something')"]
    monkeypatch.setattr(module, "_compile", lambda *arguments: broken)
    with pytest.raises(EnvironmentProblem, match=r"kernels.cpp:7: error: something"):
        prepare(lambda text: None)
    assert parts().wheel.is_dir() and not parts().built.exists(), "what was made before is kept"


def test_the_second_of_two_processes_waits_and_finds_it_made(bare: Path) -> None:
    program = (
        "import sys, time\n"
        "from npu_simulator import prepare as module\n"
        "def make(name):\n"
        "    def made(*arguments):\n"
        "        time.sleep(0.5); print('made', name); (arguments[-1] / name).touch()\n"
        "    return made\n"
        "module._need_tools = lambda: None\n"
        "module._fetch, module._build = make('wheel'), make('built')\n"
        "found = module.prepare(lambda text: None)\n"
        "assert (found.wheel / 'wheel').exists() and (found.built / 'built').exists()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(said) == ["", "made wheel\nmade built\n"], "once, by one of them"


def test_who_builds_removes_what_killed_builders_left_and_what_nobody_uses(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_need_tools", "_fetch", "_build"):
        monkeypatch.setattr(module, name, lambda *arguments: None)
    home = parts().wheel.parent
    for name in (".built-0-killed", ".wheel-killed", "built-unused", "built-anothers"):
        (home / name).mkdir(parents=True)
        (home / name / "libascendcl.so").touch()
    os.utime(home / "built-unused", (0, 0))
    made = prepare(lambda text: None)
    assert {path.name for path in home.iterdir()} == {".lock", "wheel", made.built.name, "built-anothers"}
    os.utime(made.built, (0, 0))
    prepare(lambda text: None)
    assert made.built.stat().st_mtime > 1e9, "its use is noted"


def test_changed_sources_are_built_anew_beside_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = parts()
    for name in ("cann.c", "kernels.cpp", "hccl.cpp", "stub.py"):
        (tmp_path / name).write_bytes((module.SOURCES / name).read_bytes() + b"\n")
    monkeypatch.setattr(module, "SOURCES", tmp_path)
    assert parts().built != before.built and parts().wheel == before.wheel


def test_a_process_that_has_torch_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", module)
    with pytest.raises(EnvironmentProblem, match="torch is imported already"):
        enter(parts(), Pretence(1, 1 << 30, "Ascend910B3"))


def test_a_shell_with_the_real_cann_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libopapi.so").touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    with pytest.raises(EnvironmentProblem, match=r"without its set_env.sh"):
        enter(parts(), Pretence(1, 1 << 30, "Ascend910B3"))


@pytest.mark.timeout(600)  # it may be the first to build it
def test_doctor_prepares_it_ahead_and_examines_nothing(
    simulator: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(simulator))
    assert main(COMMAND.split()[1:]) == 0
    said = capsys.readouterr()
    assert said.out == "npu_sim is ready\n" and said.err == "", "it is there already"
    assert main(["doctor", "--prepare", "npu_sim", "device=cpu"]) == 2


@pytest.mark.parametrize("wrong", [{"cards": 0}, {"cards": 65}, {"memory_gib": 0}, {"soc": "910B3"}])
def test_what_cannot_be_pretended_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NpuSimConfig(**wrong)
