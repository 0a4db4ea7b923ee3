"""What every test starts from: no account, network, or cache of the user's; one thread; nothing of the last test."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["tests.run_record"]

# Libraries read these once, when they are imported, so they are set before any test module is.
_SCRATCH = tempfile.TemporaryDirectory(prefix="runner-tests-", ignore_cleanup_errors=True)
_FIXED = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HF_HOME": f"{_SCRATCH.name}/huggingface",
    "XDG_CACHE_HOME": f"{_SCRATCH.name}/cache",
}
_FOREIGN = (
    "SWANLAB_",
    "WANDB_",
    "HYDRA_",
    "HF_TOKEN",
    "HUGGING_FACE_",
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_",
    "NO_COLOR",
    "FORCE_COLOR",
)
_SECRET = ("_API_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


def _is_foreign(name: str) -> bool:
    return name.startswith(_FOREIGN) or name.upper().endswith(_SECRET)


CARDS = os.environ.get("CUDA_VISIBLE_DEVICES")  # as the shell has it
for _name in [name for name in os.environ if _is_foreign(name)]:
    del os.environ[_name]
os.environ.update(_FIXED)

# A shell without job control starts background jobs with SIGINT ignored, which every child would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Same examples in every run, no deadline on shared cores; `make test-all` and `make soak` look further.
settings.register_profile("house", deadline=None, derandomize=True, database=None, max_examples=50)
settings.register_profile("all", deadline=None, derandomize=True, database=None)
settings.register_profile("soak", deadline=None, max_examples=2000, database=None, print_blob=True)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes of a slow test may share a busy core with those of another one."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collection, which would search it again and again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Environment variables, working folder and torch's global switches are as before when a test is over."""
    before, folder = dict(os.environ), Path.cwd()
    yield
    os.environ.clear()
    os.environ.update(before)
    os.chdir(folder)
    if torch := sys.modules.get("torch"):
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that the test stands in, as a user in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
