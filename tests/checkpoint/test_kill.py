"""`kill -9` at every named instant of a save, and at random ones: what was committed stays whole."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.checkpoint import step_folders

FAILPOINTS = re.findall(r'failpoint\("([\w.]+)"\)', Path(step_folders.__file__).read_text())
assert len(FAILPOINTS) >= 8
ROOT = Path(__file__).resolve().parents[2]


class Victim:
    """Starts savers and kills them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("victim.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert self._read() == "ready"

    def start(
        self, root: Path, first: int, last: int, *, keep: int = 1, failpoint: str = "", background: bool = False
    ) -> int:
        saves = {"first": first, "last": last, "keep": keep, "background": background}
        order = {"root": str(root), "failpoint": failpoint, **saves}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def end(self) -> int:
        """The saver's end, as a return code: negative for a signal."""
        return os.waitstatus_to_exitcode(int(self._read()))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    started = Victim()
    yield started
    started.close()


def newest(root: Path) -> int:
    """The newest checkpoint's step; fails unless it is whole at once, without any fall-back, and right."""
    words: list[str] = []
    loaded = step_folders.load(root, report=words.append)
    assert words == []
    if loaded is None:
        return 0
    values = {float(v) for t in loaded.state["policy"]["tensors"].values() for v in t.unique()}
    assert (loaded.state["algorithm"], values) == ({"step": loaded.step}, {float(loaded.step)})
    return loaded.step


BACKGROUND = pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])


@BACKGROUND
@pytest.mark.parametrize("point", FAILPOINTS)
def test_killed_at_a_named_instant(victim: Victim, tmp_path: Path, point: str, background: bool) -> None:
    victim.start(tmp_path, 1, 2, background=background)
    assert victim.end() == 0
    victim.start(tmp_path, 3, 3, failpoint=f"{point}:kill", background=background)
    assert victim.end() == -signal.SIGKILL, "the failpoint was not reached"
    committed = point in ("checkpoint.after_rename", "checkpoint.before_trash", "checkpoint.in_trash")
    assert newest(tmp_path) == (3 if committed else 2)
    victim.start(tmp_path, 4, 4)
    assert victim.end() == 0
    assert newest(tmp_path) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"], "nothing is left lying about"


def test_killed_in_the_middle_of_its_first_save(victim: Victim, tmp_path: Path) -> None:
    victim.start(tmp_path, 1, 1, failpoint="checkpoint.before_rename:kill")
    assert victim.end() == -signal.SIGKILL
    assert step_folders.load(tmp_path, report=pytest.fail) is None, "nothing was committed: a fresh start, not an error"


@pytest.mark.parametrize(
    "background", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["at once", "in the background"]
)
def test_fifteen_random_kills(victim: Victim, tmp_path: Path, background: bool) -> None:
    moments, step = random.Random(0), 0
    for at in range(15):
        pid = victim.start(tmp_path, step + 1, step + 10**6, keep=moments.choice((1, 2)), background=background)
        is_saving, end = at % 3 > 0, time.monotonic() + 60  # most kills must hit a saver that is saving
        while is_saving and step_folders.committed_steps(tmp_path)[-1:] <= [step] and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(moments.uniform(0.005, 0.2))
        os.kill(pid, signal.SIGKILL)
        assert victim.end() == -signal.SIGKILL
        reached = newest(tmp_path)
        assert reached >= step + is_saving
        step = reached
