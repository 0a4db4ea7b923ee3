"""`infer` shows the model what training showed it; an export goes where it was asked to, and nowhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import CheckpointError, DataError, EnvironmentProblem
from runner.data.config import FileConfig
from runner.data.prepare import build
from runner.launch.infer_export import export, prompt_ids, push
from runner.run_dir.folder import RunFolder, hold_lock, write_json
from tests.data.conftest import byte_tokenizer, chat

PLAIN = {"prompt": "sort 31", "completion": " 13"}
TALK = {"messages": chat("sort 31", "13")}


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(("row", "style"), [(PLAIN, "text"), (TALK, "chat")], ids=["text", "chat"])
def test_a_prompt_has_the_very_tokens_of_training(row: dict[str, Any], style: str, bos: bool, tmp_path: Path) -> None:
    tokenizer, path = byte_tokenizer(bos=bos), tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    config = FileConfig(path=str(path), eval_path=str(path), cache=False)
    data = build(config, tokenizer=tokenizer, seed=0, decide=Decisions(), cache_dir=tmp_path, kind="sft")
    assert data.prompt_style == style
    [question] = data.held_out_questions()
    assert prompt_ids(tokenizer, "sort 31", data.prompt_style) == list(question.prompt_ids)


def test_plain_text_needs_no_chat_template_and_begins_like_every_text() -> None:
    tokenizer = byte_tokenizer(template=None, bos=True)
    asked = prompt_ids(tokenizer, "<|bos|>once", "text")
    assert asked == prompt_ids(tokenizer, "once", "text") and asked.count(tokenizer.bos_token_id) == 1


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="the prompt is empty"):
        prompt_ids(byte_tokenizer(), "", "text")


def test_a_running_run_gets_no_export_into_its_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lock = hold_lock(folder)
    try:
        with pytest.raises(EnvironmentProblem, match="is running this job"):
            export(folder, compose_job(["+recipe=sft_demo"]).spec, 4, None)
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        ({}, "continue it with: run resume"),
        ({"state": "running"}, "if it is running, the first one comes after step 50"),
        ({"state": "failed", "exit_code": 3, "error": "bad row\nmore"}, "bad row; correct that and start a new run"),
        ({"state": "interrupted", "exit_code": 130}, "continue it with: run resume"),
    ],
)
def test_a_run_without_a_checkpoint_is_answered_with_what_to_do(
    status: dict[str, object], advice: str, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    write_json(folder.status, status)
    folder.spec.write_text("{}")
    with pytest.raises(CheckpointError, match=f"no checkpoint was written yet; .*{advice}"):
        export(folder, compose_job(["+recipe=sft_demo"]).spec, "last", None)
    (saved := tmp_path / "clients" / "train-0" / "weights" / "sentence").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"those of its training clients are folders: {saved}"):
        export(folder, compose_job(["+recipe=sft_demo"]).spec, "last", None)


def test_a_new_repository_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ModelScope's own default is public, and its upload makes the repository where none was made before."""
    repositories: dict[str, str] = {}

    class HubApi:
        def create_repo(self, repo_id: str, visibility: str = "public", exist_ok: bool = False) -> None:
            assert exist_ok or repo_id not in repositories
            repositories.setdefault(repo_id, visibility)

        def upload_folder(self, repo_id: str, folder_path: str) -> None:
            self.create_repo(repo_id, exist_ok=True)
            assert folder_path == str(tmp_path)

    for name in ("modelscope", "modelscope.hub", "modelscope.hub.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["modelscope.hub.api"], "HubApi", HubApi, raising=False)
    assert push(tmp_path, "modelscope:me/model") == "https://modelscope.cn/models/me/model"
    repositories["me/open"] = "public"
    push(tmp_path, "modelscope:me/open")
    assert repositories == {"me/model": "private", "me/open": "public"}


@pytest.mark.parametrize("asked", [{"check": True}, {"other": Path("env/bin/python")}], ids=["check", "with"])
def test_a_check_of_a_reward_model_is_refused(asked: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="a reward model has none"):
        export(RunFolder(tmp_path), compose_job(["+recipe=rm_demo"]).spec, "last", None, **asked)
    (tmp_path / "spec.yaml").write_text("{}")
    with pytest.raises(CheckpointError, match="no checkpoint was written yet"):  # of a policy, beside its critic
        export(RunFolder(tmp_path), compose_job(["+recipe=ppo_demo"]).spec, "last", None, **asked)


def test_an_out_that_is_taken_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(EnvironmentProblem, match="choose another --out"):
            export(RunFolder(tmp_path), compose_job(["+recipe=sft_demo"]).spec, "last", out)
