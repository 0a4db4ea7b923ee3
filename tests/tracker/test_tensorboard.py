"""TensorBoard: what is written is what its own reader reads, also after a resume."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.run_dir.folder import RunFolder
from runner.tracker.config import TensorboardConfig
from runner.tracker.console import Console

pytest.importorskip("tensorboard")


def tracker(root: Path, first_step: int) -> Any:
    from runner.tracker.tensorboard import build

    console = Console(root / "run.log", io.StringIO())
    return build(
        TensorboardConfig(),
        folder=RunFolder(root),
        spec={},
        run_id="r",
        name="n",
        first_step=first_step,
        console=console,
        decide=Decisions(),
    )


def scalars(root: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(root / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert len(found) == len(dict(found))
    return dict(found)


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    first = tracker(tmp_path, 0)
    for step in range(1, 7):
        first.log(step, {"train/loss": float(step)})
    first.log_samples(6, [{"prompt": "p", "answer": "a"}])
    assert first.finish("interrupted") == [f"view      tensorboard --logdir {tmp_path / 'tensorboard'}"]
    again = tracker(tmp_path, 4)
    for step in range(5, 9):
        again.log(step, {"train/loss": step + 0.5})
    again.finish("done")
    assert scalars(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.5, 6: 6.5, 7: 7.5, 8: 8.5}


def test_a_run_that_begins_anew_hides_the_first_attempt(tmp_path: Path) -> None:
    first = tracker(tmp_path, 0)
    first.log(1, {"train/loss": 1.0})
    first.finish("failed")
    again = tracker(tmp_path, 0)
    again.log(1, {"train/loss": 2.0})
    again.finish("done")
    assert scalars(tmp_path) == {1: 2.0}


def test_without_the_package_the_command_to_type_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install .*\[tensorboard\]"):
        tracker(tmp_path, 0)


def refuse(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_write_error_ends_the_sink_but_not_the_run(tmp_path: Path) -> None:
    sink = tracker(tmp_path, 0)
    sink._writer.add_scalar = refuse
    sink.log(1, {"train/loss": 1.0})
    sink.log(2, {"train/loss": 1.0})
    assert "No space left" in sink.finish("done")[0]
    assert (tmp_path / "run.log").read_text().count("tensorboard stops") == 1
    sink._writer.close()


def test_the_module_itself_imports_no_torch() -> None:
    program = "import runner.tracker.tensorboard, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2]).returncode == 0


def test_the_health_of_rl_is_a_panel_of_its_own(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = tracker(tmp_path, 0)
    log.log(1, {"train/loss": 1.0, "policy/entropy": 0.5, "mismatch/kl": 1e-4, "rollout/staleness": 2.0})
    log.finish("done")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    panel = {name for name in events.Tags()["scalars"] if name.startswith("health/")}
    assert panel == {"health/entropy", "health/sampler_kl", "health/staleness"}
