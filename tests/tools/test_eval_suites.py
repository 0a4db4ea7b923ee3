"""Harnesses as guests of `run eval`: what is refused, what their result files say, and one real task of lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers.models.llama import LlamaTokenizer

from runner.core.errors import EnvironmentProblem
from runner.inference.model_source import AdapterSource, ModelSource
from runner.tools.eval_suites import (
    SUITES,
    _inspect_results,
    _lm_eval_results,
    _serve_words,
    _with_error,
    installed_version,
    run_suite,
    run_suites,
)
from tests import command
from tests.launch.several import gone
from tests.small import JUDGED

PYTHON = os.environ.get("RUN_SUITE_PYTHON", "")  # of an environment with lm-eval; see `run doctor suite=lm_eval`
RESULTS = {  # written by lm-eval 0.4.13, shortened
    "results": {
        "sort": {"alias": "sort", "sample_len": 24, "exact_match,none": 0.25, "exact_match_stderr,none": 0.09},
        "gsm": {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": "N/A"},
    },
    "versions": {"sort": 1.0, "gsm": 3.0},
}
LOG = {  # written by Inspect 0.3.285, shortened
    "status": "success",
    "eval": {"task": "sort", "task_version": 2},
    "results": {"scores": [{"name": "exact", "metrics": {"mean": {"value": 0.25}, "stderr": {"value": 0.13}}}]},
}


def test_result_files_are_read_with_the_versions_of_their_tasks(tmp_path: Path) -> None:
    (tmp_path / "results/model").mkdir(parents=True)
    (tmp_path / "results/model/results_2026-01-01.json").write_text(json.dumps(RESULTS))
    found = _lm_eval_results(tmp_path)
    assert found["tasks"] == {"sort": 1.0, "gsm": 3.0}
    assert found["values"]["sort/exact_match"] == 0.25 and found["values"]["gsm/exact_match/strict-match"] == 0.5
    assert "sort/sample_len" not in found["values"], "it is no metric"
    assert _with_error("sort/exact_match", found["values"]) == "0.25 ± 0.09"
    (tmp_path / "log.json").write_text(json.dumps(LOG))
    assert _inspect_results(tmp_path)["values"] == {"sort/exact/mean": 0.25, "sort/exact/stderr": 0.13}
    (tmp_path / "log.json").write_text(json.dumps(LOG | {"status": "error", "error": {"message": "no route"}}))
    with pytest.raises(EnvironmentProblem, match=r"has the status error: .*no route"):
        _inspect_results(tmp_path)
    scores = [{"name": "exact", "metrics": {"mean": {"value": None}}}]
    (tmp_path / "log.json").write_text(json.dumps(LOG))
    (tmp_path / "log2.json").write_text(json.dumps(LOG | {"results": {"scores": scores}}))
    twice = _inspect_results(tmp_path)
    assert twice["tasks"] == {"sort": 2, "sort#2": 2} and twice["values"]["sort#2/exact/mean"] is None
    assert twice["values"]["sort/exact/mean"] == 0.25 and _with_error("sort#2/exact/mean", twice["values"]) == "null"
    with pytest.raises(EnvironmentProblem, match="inspect left no log"):
        _inspect_results(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentProblem, match="left no result file"):
        _lm_eval_results(tmp_path / "elsewhere")


def test_the_server_gets_the_checkpoint_and_the_base_that_were_typed() -> None:
    run = ModelSource("latest", "run", "r", "/runs/r", checkpoint="best", base="/models/moved")
    words = ["/runs/r", "port=0", "--checkpoint", "best", "--base", "/models/moved", "device=cpu"]
    assert _serve_words(run, "cpu") == words
    adapter = ModelSource("lora", "folder", "lora", "/models/base", adapters=(AdapterSource("lora", "/lora"),))
    assert _serve_words(adapter, None) == ["lora", "port=0", "--base", "/models/base"]
    assert _serve_words(ModelSource("O/N", "hub", "O/N", "O/N"), None) == ["O/N", "port=0"]


def test_the_numbers_of_a_model_are_written_before_the_next_one_fails(tmp_path: Path, monkeypatch: Any) -> None:
    def one_of_two(source: ModelSource, *_: object) -> dict[str, Any]:
        if source.text == "B":
            raise EnvironmentProblem("the second harness ended")
        return {"suite": "inspect", "version": "1", "values": {"sort/exact/mean": None}}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runner.tools.eval_suites.run_suite", one_of_two)
    sources = [ModelSource(name, "hub", name, name) for name in "AB"]
    with pytest.raises(EnvironmentProblem, match="second harness"):
        run_suites(sources, "inspect", ["sort"], Path("python"), [], None)
    [written] = tmp_path.glob("outputs/eval/*/results.json")
    [record] = json.loads(written.read_text())
    assert record["source"] == "A" and record["values"] == {"sort/exact/mean": None}


HARNESS = f"""
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--output_path") + 1])
folder.mkdir()
(folder / "results_1.json").write_text({json.dumps(RESULTS)!r})
(folder / "words.json").write_text(json.dumps(sys.argv))
print("WARNING [api_models:576] Context length (9) > max_length (4). Left truncating context.", file=sys.stderr)
"""


@contextmanager
def models_of(limit: int | None) -> Iterator[str]:
    """The address of a server that lists one model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "m", "max_model_len": limit}]}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("limit", "starts", "more", "expected"),
    [
        (8192, True, [], "max_length=8192,add_bos_token=True"),
        (8192, False, [], "max_length=8192,add_bos_token=False"),
        (8192, True, ["--apply_chat_template"], "max_length=8192,add_bos_token=False"),  # which has one itself
        (512, True, [], "max_length=2048,add_bos_token=True"),  # the server refuses what is too long
        (None, True, [], "max_length=2048,add_bos_token=True"),
    ],
)
def test_lm_eval_gets_the_length_and_the_bos_of_the_model(
    limit: int | None,
    starts: bool,
    more: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "lm_eval.py").write_text(HARNESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, answer in (
        ("runner.tools.eval_suites.installed_version", "0"),
        ("runner.tools.eval_suites._serve_model", models_of(limit)),
        ("runner.tools.eval_suites.source_spec", None),
        ("runner.build.build_tokenizer", llama_tokenizer(starts)),
    ):
        monkeypatch.setattr(name, lambda *_, answer=answer: answer)
    source = ModelSource("x", "hub", "x", "x")
    run_suite(source, "lm_eval", ["sort"], Path(sys.executable), tmp_path, more, None)
    words = json.loads((tmp_path / "results/words.json").read_text())
    assert words[words.index("--model_args") + 1].endswith(f",{expected}")
    said = capsys.readouterr().err
    assert "lm_eval: 1 warning of truncation, the first: WARNING [api_models:576] Context length (9)" in said


def llama_tokenizer(starts: bool) -> LlamaTokenizer:
    tokenizer = LlamaTokenizer(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "▁": 4}, merges=[])
    template = {"single": "<s> $A", "special_tokens": [("<s>", 1)]} if starts else {"single": "$A"}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**template)
    return tokenizer


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 250
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_harness_ends_with_a_killed_evaluation(tmp_path: Path) -> None:
    (tmp_path / "lm_eval.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(120)"
    )
    code = f"""if True:
        import contextlib, pathlib
        from runner.tools import eval_suites as s
        s.installed_version = lambda *_: "0"
        s._write_tokenizer = lambda *_: None
        s._serve_model = lambda *_: contextlib.nullcontext("http://nowhere")
        s._max_model_len = lambda _: 2048
        source = s.ModelSource("x", "hub", "x", "x")
        s.run_suite(source, "lm_eval", ["t"], pathlib.Path({sys.executable!r}), pathlib.Path("."), [], None)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    finally:
        parent.kill()
        parent.wait()
    assert gone([int((tmp_path / "pid").read_text())])


def test_an_environment_without_the_harness_is_named_with_the_line_to_install_it() -> None:
    with pytest.raises(EnvironmentProblem, match=r"has no inspect_ai; type: python3 -m venv .venv-eval"):
        installed_version(SUITES["inspect"], Path(sys.executable))
    with pytest.raises(EnvironmentProblem, match="cannot be started"):
        installed_version(SUITES["lm_eval"], Path("/nowhere/python"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["suite=lm_eval", "tasks=gsm8k"],
            "--suite-python PYTHON is missing\n  in a separate environment: python3 -m venv",
        ),
        (["suite=lm_eval"], "type suite=lm_eval|inspect and tasks=TASK,TASK"),
        (["suite=helm", "tasks=a"], "type suite=lm_eval|inspect"),
        (["suite=lm_eval", "tasks=a", "+evaluation=sort"], "+evaluation cannot be set"),
        (["--", "--num_fewshot", "5"], "words after -- are for suite=NAME"),
    ],
)
def test_mistakes_are_answered_at_once(words: list[str], message: str, tmp_path: Path) -> None:
    assert message in command.run("eval", "latest", *words, cwd=tmp_path, code=2)


def test_the_doctor_prints_how_an_environment_is_made(tmp_path: Path) -> None:
    said = command.run("doctor", "suite=lm_eval", cwd=tmp_path)
    assert "pip install 'lm-eval[hf,api]==0.4.13'" in said and "--suite-python .venv-eval/bin/python" in said


TASK = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: options
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="RUN_SUITE_PYTHON names no environment with lm-eval")
def test_lm_eval_against_the_server_has_the_numbers_of_our_own_multiple_choice(tmp_path: Path) -> None:
    rows = [{"prompt": f"Choose {at}\n", "options": [f" {at}", f" {at + 1}!"], "answer": at % 2} for at in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "letters.yaml").write_text(TASK)
    command.run(*JUDGED, cwd=tmp_path)
    words = ["eval", "latest", "suite=lm_eval", "tasks=letters.yaml", "--suite-python", PYTHON]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", "runner", *words], cwd=tmp_path, env=offline, check=True)
    command.run(
        "eval", "latest", "evaluation.sets.mine={data: {name: file, path: rows.jsonl}, choices: options}", cwd=tmp_path
    )
    harness, ours = (
        json.loads(line)["values"] for line in (tmp_path / "outputs/latest/evaluations.jsonl").read_text().splitlines()
    )
    assert harness["letters/acc"] == ours["mine/accuracy"] and harness["letters/acc_norm"] == ours["mine/accuracy_norm"]
