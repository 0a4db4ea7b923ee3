"""The manifest says what a run was made of, and no secret gets into it; canaries of every known shape are masked."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.run_dir import manifest
from runner.run_dir.manifest import (
    DIFF_BYTES,
    allowed_environment,
    code_state,
    collect_manifest,
    fingerprint,
    redact,
    redact_values,
)

# Put together here, so that no scanner takes this file for a leak.
CANARIES = {
    "hugging face": "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "openai": "sk-" + "proj-Ab12Cd34Ef56Gh78Ij90",
    "anthropic": "sk-" + "ant-api03-Ab12Cd34Ef56Gh78",
    "wandb": "0123456789abcdef" * 2 + "01234567",
    "wandb, on premises": "local-" + "0123456789abcdef" * 2 + "01234567",
    "aws id": "AKIA" + "IOSFODNN7EXAMPLE",
    "github": "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789",
    "gitlab": "glpat-" + "abcdefghij0123456789",
    "slack": "xoxb-" + "123456789012-abcdefghij",
    "google": "AIza" + "SyA-1234567890abcdefghijklmnopqrstu",
    "jwt": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijk",
}


@pytest.mark.parametrize("name", CANARIES)
@pytest.mark.parametrize("frame", ["{}", "before {} after", "key='{}',", "https://{}@host/x", "[{}]", "a\n{}\nb"])
def test_a_known_shape_is_masked_wherever_it_stands(name: str, frame: str) -> None:
    said = redact(frame.format(CANARIES[name]))
    secret = CANARIES[name].removeprefix("local-")
    assert secret not in said and secret[8:] not in said
    assert "***" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:pass@host/repo.git", "https://***@host/repo.git"),
        ("ssh://me@host/x http://ok.example/a@b", "ssh://***@host/x http://ok.example/a@b"),
        ("Authorization: Bearer abcdefghijklmnop", "Authorization: Bearer ***"),
        ("run --api-key=abc12345 x", "run --api-key=*** x"),
        ('{"password": "hunter22"}', '{"password": "***"}'),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG+bPx", "aws_secret_access_key = ***"),
        ("a -----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- b", "a *** b"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE cut", "***"),
    ],
)
def test_what_stands_beside_a_secret_stays(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "step=18/30 train/loss=0.1234 perf/tokens_per_s=12345.6789012345",
        "model.tokenizer=/models/Qwen3-0.6B max_new_tokens=1234567890",
        "sk-learn-like-names-without-numbers, task-oriented-dialogue-2024, risk-1234567890123456789",
        "the key to success; token: none; password?",
        "sha256 " + "ab" * 32,
        "https://huggingface.co/Qwen/Qwen3-0.6B user@host.example",
        "decided  attention: sdpa instead of flash (head_dim 264)",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact(text) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Nd", "Cs"]), max_size=60))
def test_text_without_digits_or_markers_is_left_alone(text: str) -> None:
    if "://" not in text and "BEGIN" not in text:
        assert redact(text) == text
        assert redact(redact(text)) == redact(text)


def test_values_of_secret_variables_are_masked_whatever_they_look_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_THING", "tea for two, and two for tea")
    monkeypatch.setenv("DB_PASSWORD", "tea for two")
    monkeypatch.setenv("SHORT_KEY", "true")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsehoods")
    monkeypatch.setenv("MAX_TOKENS", "1234567890")
    said = redact("tea for two, and two for tea; tea for two; true; falsehoods; 1234567890")
    assert said == "***; ***; true; falsehoods; 1234567890"


def test_fields_that_hold_secrets_are_masked_and_others_are_not() -> None:
    sha = "0123456789" * 4
    tree = {
        "api_key": "abc", "hf_token": "x", "tokenizer": "path/a", "max_new_tokens": 64, "token": "", "key": 5,
        "commit": sha, "note": sha, "list": [{"password": "p"}, ("a", CANARIES["openai"])],
    }  # fmt: skip
    assert redact_values(tree) == {
        "api_key": "***", "hf_token": "***", "tokenizer": "path/a", "max_new_tokens": 64, "token": "", "key": 5,
        "commit": sha, "note": "***", "list": [{"password": "***"}, ["a", "***"]],
    }  # fmt: skip


def test_the_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "120")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("HF_HOME", "https://me:pw@host/x")
    monkeypatch.setenv("VLLM_API_KEY", "12345")
    monkeypatch.setenv("HF_TOKEN", CANARIES["hugging face"])
    monkeypatch.setenv("UNRELATED", "x")
    kept = allowed_environment()
    assert kept["ASCEND_RT_VISIBLE_DEVICES"] == "0,1" and kept["HCCL_CONNECT_TIMEOUT"] == "120"
    assert kept["TOKENIZERS_PARALLELISM"] == "false"
    assert kept["HF_HOME"] == "https://***@host/x"
    assert not {"VLLM_API_KEY", "HF_TOKEN", "UNRELATED", "PATH"} & set(kept)


def git(folder: Path, *command: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "init.defaultBranch=trunk"]
    done = subprocess.run(["git", *who, "-C", str(folder), *command], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "a.py").write_text("one\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_a_clean_checkout(repository: Path) -> None:
    state = code_state(repository)
    assert state["commit"] == git(repository, "rev-parse", "HEAD")
    assert (state["branch"], state["dirty"], state["diff"], state["changed_files"]) == ("trunk", False, "", [])


def test_changes_are_in_the_diff_without_their_secrets(repository: Path) -> None:
    (repository / "a.py").write_text(f"one\nKEY = '{CANARIES['hugging face']}'\n")
    (repository / "new.txt").write_text("untracked")
    state = code_state(repository)
    assert state["dirty"] and state["changed_files"] == [" M a.py", "?? new.txt"]
    assert "+KEY = '***'" in state["diff"] and CANARIES["hugging face"] not in json.dumps(state)


def test_a_large_diff_is_cut_and_says_so(repository: Path) -> None:
    (repository / "a.py").write_text("x" * 79 + "\n" * 1 + ("y" * 79 + "\n") * 30_000)
    diff = code_state(repository)["diff"]
    assert DIFF_BYTES < len(diff) < DIFF_BYTES + 100
    assert diff.endswith(f"[cut after {DIFF_BYTES} bytes]\n")


def test_a_repository_cannot_make_the_manifest_run_a_program(repository: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n")
    trap.chmod(0o755)
    for name in ("core.fsmonitor", "diff.external", "diff.x.textconv", "core.pager"):
        git(repository, "config", name, str(trap))
    (repository / ".gitattributes").write_text("*.py diff=x\n")
    (repository / "a.py").write_text("two\n")
    assert "+two" in code_state(repository)["diff"]
    assert not (tmp_path / "sprung").exists()


def test_a_repository_without_a_commit_and_a_detached_one(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    (tmp_path / "empty/a").write_text("staged\n")
    git(tmp_path / "empty", "add", "a")
    state = code_state(tmp_path / "empty")
    assert state["commit"] is None and state["branch"] == "trunk" and "+staged" in state["diff"]
    git(repository, "checkout", "-q", "--detach")
    assert code_state(repository)["branch"] is None


def test_no_checkout_and_no_git_say_why(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not a git repository" in code_state(tmp_path)["reason"]
    assert "not tracked" in code_state(repository, below="runner")["reason"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_state(repository) == {"reason": "git is not installed"}


def test_a_manifest_is_json_with_everything_in_it_and_no_secret(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    monkeypatch.setenv("MY_TOKEN", "a canary that sings")
    monkeypatch.setattr(sys, "argv", ["run", f"hub.token={CANARIES['hugging face']}", "a canary that sings"])
    found = collect_manifest({"name": "toy"}, {"name": "cpu", "threads": 1, "note": CANARIES["aws id"]})
    text = json.dumps(found)
    assert "sings" not in text and not [c for c in CANARIES.values() if c in text]
    assert found["working_directory"]["commit"] == git(repository, "rev-parse", "HEAD")
    assert found["packages"]["pytest"] == pytest.__version__
    assert found["device"] == {"name": "cpu", "threads": 1, "note": "***"}
    assert found["argv"] == ["run", "hub.token=***", "***"]
    assert {"written", "code", "python", "platform", "environment", "spec_sha256"} <= set(found)


def test_the_fingerprint_of_a_spec_does_not_depend_on_order() -> None:
    assert (
        fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1}) != fingerprint({"a": 2, "b": [1, 2]})
    )


def test_redacting_a_line_is_cheap() -> None:
    begin = time.process_time()
    for _ in range(200):
        redact("step=18/30 train/loss=0.1234 elapsed=00:11 " * 5)
    assert (time.process_time() - begin) / 200 < 2e-3


@pytest.mark.parametrize(
    "text",
    ["://", "token=", "eyJ", "eyJ-", "sk-", "sk-a", "a-", "a.", "a.b://", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----",
     "Bearer ", "password: ", "hf_", "ghp_aaaaaaaaaaaaaaaaaaaaa", "xoxb-", "0123456789abcdef", "http://a:b@", "a@"],
)  # fmt: skip
def test_hostile_text_takes_no_quadratic_time(text: str) -> None:
    hostile = text * (200_000 // len(text))
    begin = time.process_time()
    redact(hostile)
    redact(hostile + "token")
    assert time.process_time() - begin < 2.0


def test_importing_it_imports_no_torch() -> None:
    program = (
        "import sys, runner.run_dir.manifest, runner.run_dir.folder\n"
        "sys.exit(bool({'torch', 'numpy', 'wandb'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(manifest.__file__).parents[2]).returncode == 0
