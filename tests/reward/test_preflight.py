"""What is seen of a reward file without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.core.errors import CheckpointError, SpecError
from runner.inference.model_source import resolve_model_path
from runner.reward.config import FunctionConfig


@pytest.mark.parametrize("path", ["my_reward.py", "my_reward:score", "my_reward.py:", "my_reward.py:a b", ":score"])
def test_a_path_without_file_or_function_is_a_problem_of_the_spec(path: str) -> None:
    [(key, message)] = FunctionConfig(path=path).problems(None)
    assert key == "reward.path" and "e.g. reward.path=my_reward.py:score" in message


def test_preflight_names_the_file_and_the_path_becomes_absolute(workdir: Path) -> None:
    config = FunctionConfig(path="mine.py:score")
    with pytest.raises(SpecError, match=r"reward\.path: there is no file mine\.py") as caught:
        config.preflight()
    assert caught.value.exit_code == 2
    (workdir / "mine.py").write_text("def score(): ...")
    config.preflight()
    assert config.with_absolute_paths().path == f"{workdir.resolve()}/mine.py:score"


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize(
    ("text", "said"),
    [("{nope", "cannot be read"), ("[" * 100_000, "nested too deeply"), ("[1]", "is not a JSON object")],
)
def test_a_folder_whose_config_is_damaged_is_no_model(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name} .*{said}"):
        resolve_model_path(str(tmp_path), "reward.path")
