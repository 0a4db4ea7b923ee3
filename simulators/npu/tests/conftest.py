"""The simulator, made once for all runs of the tests, and child processes that run on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_simulator.prepare import TOOLS, NotFetched, prepare

# The rules of every test: nothing of the user's environment, nothing of the last test.
from tests.conftest import clean_environment, pytest_collection_modifyitems, workdir  # noqa: F401

FOREIGN = ("ASCEND_", "HCCL_", "PYTORCH_NPU_", "TASK_QUEUE_")
DEADLINE_S = 560  # of one process; a shared machine may be slow
Child = Callable[..., str]


@pytest.fixture(scope="session")
def simulator(request: pytest.FixtureRequest) -> Path:
    """The cache folder that holds the simulator: $RUNNER_CACHE, else pytest's own. Made now if it is not there."""
    cache = Path(os.environ.get("RUNNER_CACHE") or request.config.cache.mkdir("runner"))
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"the simulated NPU is built with {', '.join(missing)}, which is not here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNNER_CACHE", str(cache))
        try:
            prepare(lambda text: print(text, file=sys.stderr))
        except NotFetched as error:
            pytest.skip(str(error))
    return cache


@pytest.fixture(scope="session")
def child(simulator: Path) -> Child:
    """Runs a program in a process of its own, on the simulator; returns what it prints."""

    def run(program: str | Path, *words: str, folder: Path | None = None, code: int = 0, **more: str) -> str:
        own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        done = subprocess.run(
            [sys.executable, *([str(program)] if isinstance(program, Path) else ["-c", program]), *words],
            cwd=folder,
            env=own | {"RUNNER_CACHE": str(simulator), "PYTHONPATH": os.pathsep.join(sys.path)} | more,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == code, f"exited with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        return done.stdout if code == 0 else done.stdout + done.stderr

    return run
