"""A run reads the user's files as they were when it began, in new workers and when it is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.job_builder import compose_job
from runner.core.errors import StorageError
from runner.reward.config import FunctionConfig
from runner.run_dir.folder import RunFolder
from runner.run_dir.user_files import copy_user_files, imported_files, original_path, with_copied_files
from runner.spec.job import JobSpec
from tests.command import run
from tests.reward.samples import answer, made
from tests.reward.test_trial import SMALL

REWARD = """
import os
from pathlib import Path
import helper
import words.short

def score(completions):
    if completions == ["die"]:
        os._exit(1)
    known = Path(__file__).with_name("list.txt").read_text()
    return [helper.value() + words.short.VALUE + len(known)] * len(completions)
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    """A reward with a helper that imports another, a package, and data beside it: each scores 1 + 2 + 4."""
    folder = tmp_path / "mine"
    (folder / "words").mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "helper.py").write_text("from deeper import VALUE\ndef value(): return VALUE")
    (folder / "deeper.py").write_text("import json, helper\nVALUE = 1")
    (folder / "words/__init__.py").touch()
    (folder / "words/short.py").write_text("VALUE = 2")
    (folder / "list.txt").write_text("four")
    (folder / "other.py").write_text("VALUE = 3")
    return folder / "reward.py"


def grpo(*words: str) -> JobSpec:
    every = f"evaluation.every={int(any('evaluation' in word for word in words))}"
    return compose_job([*(every if word == "evaluation.every=0" else word for word in SMALL), *words]).spec


def begun(tmp_path: Path, spec: JobSpec) -> tuple[RunFolder, JobSpec]:
    """A run folder with copies, and the spec that its processes build from."""
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.spec.touch()
    copy_user_files(spec, folder)
    return folder, with_copied_files(spec, folder)


def test_a_replaced_worker_runs_the_code_that_the_run_began_with(tmp_path: Path, reward_file: Path) -> None:
    spec = grpo("reward=function", f"reward.path={reward_file}:score")
    folder, copied = begun(tmp_path, spec)
    assert isinstance(copied.reward, FunctionConfig) and folder.user_files in copied.reward.file.parents
    reward = made(copied.reward)
    assert reward.score([[answer("4")]]) == [[7.0]]
    for edited in (reward_file, reward_file.with_name("helper.py"), reward_file.parent / "words/short.py"):
        edited.write_text("VALUE = 100\ndef value(): return 100\ndef score(completions): return [100.0]")
    reward_file.with_name("deeper.py").unlink()
    assert reward.score([[answer("die")], [answer("4")]]) == [[None], [7.0]]  # the second by a new process
    reward.close()


def test_errors_name_the_file_of_the_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad.py").write_text("def score(completions):\n    raise ValueError('seen')")
    _, copied = begun(tmp_path, grpo("reward=function", f"reward.path={tmp_path}/bad.py:score"))
    assert isinstance(copied.reward, FunctionConfig)
    assert original_path(copied.reward.file) == tmp_path / "bad.py"
    reward = made(copied.reward)
    reward.score([[answer("4")]])
    reward.close()
    assert "ValueError: seen (bad.py:2 in score)" in caplog.text


def test_what_a_file_imports_beside_it_is_found(reward_file: Path) -> None:
    names = ["deeper.py", "helper.py", "words/__init__.py", "words/short.py"]
    assert sorted(str(file.relative_to(reward_file.parent)) for file in imported_files(reward_file)) == names
    reward_file.write_text("def broken(")
    assert imported_files(reward_file) == []


def test_rewards_of_sums_and_of_evaluation_sets_and_templates_are_copied(tmp_path: Path, reward_file: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    part = f"{{name: function, path: '{reward_file}:score'}}"
    spec = grpo(
        "reward=sum",
        f"reward.parts=[{part}]",
        f"chat.template={tmp_path}/chat.jinja",
        f"+evaluation.sets.own={{data: {{name: demo}}, reward: {part}}}",
    )
    folder, copied = begun(tmp_path, spec)
    text = json.dumps(copied.model_dump(mode="json"))
    assert text.count(str(folder.user_files)) == 3 and str(folder.user_files) not in json.dumps(
        spec.model_dump(mode="json")
    )


def test_a_run_without_copies_reads_the_files_themselves(tmp_path: Path, reward_file: Path) -> None:
    spec = grpo("reward=function", f"reward.path={reward_file}:score")
    assert with_copied_files(spec, RunFolder(tmp_path / "older")) == spec


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path, reward_file: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/user_files").touch()
    with pytest.raises(StorageError, match=r"cannot copy .*reward\.py"):
        copy_user_files(grpo("reward=function", f"reward.path={reward_file}:score"), RunFolder(tmp_path / "run"))


def test_a_resumed_run_keeps_its_reward(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 0.25")
    (tmp_path / "score.py").write_text(
        "import helper\ndef score(completions): return [helper.VALUE] * len(completions)"
    )
    words = ("reward=function", "reward.path=score.py:score", "algorithm.zero_variance=keep")
    run(*SMALL, *words, "steps=1", cwd=tmp_path)
    (tmp_path / "score.py").unlink()
    (tmp_path / "helper.py").write_text("VALUE = 9")
    run("resume", "latest", "steps=2", cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "outputs/latest/metrics.jsonl").read_text().splitlines()]
    assert [row["reward/mean"] for row in rows if "reward/mean" in row] == [0.25, 0.25]
