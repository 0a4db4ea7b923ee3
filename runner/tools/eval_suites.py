"""`run eval suite=…`: a harness in an environment of its own, against `run serve` of the model.

source ──▶ child `run serve` ◀──HTTP── child `PYTHON -m lm_eval | inspect_ai` ──▶ its result file ──▶ Evaluated

The harness gets the model's tokenizer as a folder, no network of ours, and words behind `--` as they are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runner.core.errors import EnvironmentProblem, Interrupted
from runner.core.fsync_io import error_reason
from runner.core.subprocess import ChildProcess
from runner.inference.model_source import ModelSource, source_spec
from runner.run_dir.folder import OUTPUTS, display_path, make_unique, write_atomic
from runner.tools.evaluate import append_evaluation
from runner.tracker.text import align_columns, count_noun, format_number, labeled_line, print_text

READY = re.compile(r"^.*: (http://\S+)/v1 \(", re.MULTILINE)
START_S, GRACE_S, POLL_S = 1800.0, 10.0, 0.2
LM_EVAL_LENGTH = 2048  # its own max_length for a server, from which it cuts the start of prompts


@dataclass(frozen=True, slots=True)
class Suite:
    """A harness: its module, named as its distribution, and what pip installs, in the versions tried."""

    module: str
    requirements: tuple[str, ...]

    def install_line(self, folder: str = ".venv-eval") -> str:
        """What to type for an environment that has it."""
        return f"python3 -m venv {folder} && {folder}/bin/pip install {' '.join(map(repr, self.requirements))}"


SUITES = {
    "lm_eval": Suite("lm_eval", ("lm-eval[hf,api]==0.4.13",)),
    "inspect": Suite("inspect_ai", ("inspect-ai==0.3.285", "openai==3.54.0")),
}


def installed_version(suite: Suite, python: Path) -> str:
    """The harness's version in an environment. Raises EnvironmentProblem where it is not there."""
    code = f"import importlib.metadata as m; print(m.version({suite.module!r}))"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(f"--suite-python {python}: cannot be started: {error_reason(error)}") from error
    if found.returncode:
        hint = f"type: {suite.install_line()}\n  then: --suite-python .venv-eval/bin/python"
        raise EnvironmentProblem(f"--suite-python {python}: it has no {suite.module}; {hint}")
    return found.stdout.strip()


def run_suites(
    sources: Sequence[ModelSource],
    name: str,
    tasks: Sequence[str],
    python: Path,
    more: Sequence[str],
    device: str | None,
) -> None:
    """Run a harness on each model, print its numbers side by side, and write results.json."""
    now = datetime.now(UTC)
    folder = make_unique(OUTPUTS / "eval", f"{now.strftime('%Y-%m-%d-%H%M%S')}-{name}", "folder of the evaluation")
    found = []
    for index, source in enumerate(sources):
        own = folder / str(index)
        own.mkdir()
        record = run_suite(source, name, tasks, python, own, more, device)
        about = {"source": source.text, "step": None, "checkpoint": source.checkpoint}
        found.append({"created": now.isoformat(timespec="seconds"), **about, **record})
        if source.kind == "run":
            known = {key: value for key, value in record["values"].items() if value is not None}
            harness = {"suite": name, "version": record["version"], "options": list(more)}
            sets = {key.partition("/")[0]: harness for key in known}
            append_evaluation(source, {**found[-1], "values": known, "sets": sets, "results": str(folder)})
        # as each model ends: the numbers of a model are not lost with the next one
        write_atomic(folder / "results.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    names = dict.fromkeys(key for one in found for key in one["values"] if "_stderr" not in key)
    rows = [[f"{name} {found[0]['version']}", *(one["source"] for one in found)]]
    rows += [[key, *(_with_error(key, one["values"]) for one in found)] for key in names]
    print_text("\n".join([*align_columns(rows), "", labeled_line("results", display_path(folder / "results.json"))]))


def _with_error(key: str, values: Mapping[str, float | None]) -> str:
    """0.52 ± 0.01, with the standard error that the harness gives; null for what it could not compute."""
    head, _, rest = key.rpartition("/")
    error = next((v for k, v in values.items() if k in (f"{key}_stderr", f"{head}_stderr/{rest}")), None)
    value = values.get(key)
    text = format_number(value) if value is not None else "null" if key in values else ""
    return text if error is None else f"{text} ± {format_number(error)}"


def run_suite(
    source: ModelSource,
    name: str,
    tasks: Sequence[str],
    python: Path,
    folder: Path,
    more: Sequence[str],
    device: str | None,
) -> dict[str, Any]:
    """Serve the model, run the harness in `folder`, and return its record: version, tasks and values.

    more: further words of the harness. Raises EnvironmentProblem where one of the two fails.
    """
    suite = SUITES[name]
    version = installed_version(suite, python)
    tokenizer = folder / "tokenizer"
    # a chat template writes the BOS itself
    add_bos = _write_tokenizer(source, tokenizer) and not any("--apply_chat_template" in word for word in more)
    with _serve_model(source, folder / "serve.log", device) as url:
        limits = {"max_length": _max_model_len(url), "add_bos_token": add_bos} if name == "lm_eval" else {}
        command = _command(name, source.name, url, tasks, folder, tokenizer, limits)
        environment = {**os.environ, "RUN_BASE_URL": f"{url}/v1", "RUN_API_KEY": "none", "OPENAI_API_KEY": "none"}
        with (folder / f"{name}.log").open("wb") as log:
            words = [str(python), "-m", suite.module, *command, *more]
            code = _wait(ChildProcess(words, end_signal=15, stdout=log, stderr=log, env=environment))
    if code:
        last = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-3:]
        raise EnvironmentProblem(
            f"{name} ended with code {code}; its log: {folder / f'{name}.log'}\n  " + "\n  ".join(last)
        )
    if cuts := _truncation_warnings(folder / f"{name}.log"):
        amount = count_noun(len(cuts), "warning")
        print_text(f"{name}: {amount} of truncation, the first: {cuts[0]}", file=sys.stderr)
    found = _lm_eval_results(folder) if name == "lm_eval" else _inspect_results(folder)
    if not found["values"]:
        raise EnvironmentProblem(f"{name} measured nothing: no metric in its result files; see {folder}")
    return {"suite": name, "version": version, "command": [suite.module, *command, *more], **found}


def _write_tokenizer(source: ModelSource, folder: Path) -> bool:
    """Write the model's tokenizer for the harness; whether it begins a plain text with BOS, and only that."""
    from runner import build
    from runner.core.auto_choices import Decisions
    from runner.model.export import write_tokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = build.build_tokenizer(source_spec(source), Decisions())
        write_tokenizer(folder, tokenizer)
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(tokenizer("a")["input_ids"] == [tokenizer.bos_token_id, *bare])


def _max_model_len(url: str) -> int:
    """The server's limit in tokens, or the harness's default where that is higher or there is no limit.

    The server refuses what is above its limit, where lm-eval cuts prompts without a word.
    """
    connection = HTTPConnection(urlsplit(url).netloc)
    try:
        connection.request("GET", "/v1/models")
        [model, *_] = json.loads(connection.getresponse().read())["data"]
    finally:
        connection.close()
    return max(model["max_model_len"] or 0, LM_EVAL_LENGTH)


def _truncation_warnings(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [line.strip() for line in lines if "WARNING" in line and "truncat" in line.lower()]


@contextmanager
def _serve_model(source: ModelSource, log: Path, device: str | None) -> Iterator[str]:
    """The address of a server of the model, which ends with the block. Raises EnvironmentProblem."""
    words = _serve_words(source, device)
    with log.open("wb") as file:
        child = ChildProcess([sys.executable, "-m", "runner", "serve", *words], end_signal=15, stdout=file, stderr=file)
    try:
        end = time.monotonic() + START_S
        while (ready := READY.search(text := log.read_text(errors="replace"))) is None:
            if not child.is_running() or time.monotonic() > end:
                raise EnvironmentProblem(f"run serve {' '.join(words)} did not start; {log}:\n  {text.strip()[-500:]}")
            time.sleep(POLL_S)
        yield ready[1]
    finally:
        child.stop(GRACE_S)


def _serve_words(source: ModelSource, device: str | None) -> list[str]:
    """What is typed after `run serve` for the same model, at any free port."""
    words = [source.path if source.kind == "run" else source.text, "port=0"]
    words += [] if source.checkpoint == "last" else ["--checkpoint", str(source.checkpoint)]
    words += ["--base", base] if (base := source.base or (source.path if source.adapters else None)) else []
    return [*words, f"device={device}"] if device else words


def _wait(child: ChildProcess) -> int:
    try:
        while child.is_running():
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        child.stop(GRACE_S)
        raise Interrupted(2, "interrupted; the harness was stopped") from None
    return int(child.returncode)


def _command(
    name: str,
    model: str,
    url: str,
    tasks: Sequence[str],
    folder: Path,
    tokenizer: Path,
    limits: Mapping[str, int],
) -> list[str]:
    """The words of the harness. limits: further arguments of lm-eval's model."""
    if name == "inspect":
        return ["eval", *tasks, "--model", f"openai-api/run/{model}", "--log-dir", str(folder), "--log-format", "json"]
    facts = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer": tokenizer,
        "tokenized_requests": True,
        "num_concurrent": 8,
        "max_retries": 3,
        **limits,
    }
    arguments = ",".join(f"{key}={value}" for key, value in facts.items())
    where = ["--output_path", str(folder / "results"), "--log_samples"]
    return ["--model", "local-completions", "--model_args", arguments, "--tasks", ",".join(tasks), *where]


def _lm_eval_results(folder: Path) -> dict[str, Any]:
    """Metrics of each task, with standard errors under NAME_stderr; versions of the tasks."""
    paths = sorted((folder / "results").glob("**/results_*.json"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        raise EnvironmentProblem(f"the harness left no result file ({folder}/results/**/results_*.json)")
    content = _read(paths[-1])
    values = {
        f"{task}/{metric.replace(',', '/').removesuffix('/none')}": float(value)
        for task, metrics in content["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and metric != "sample_len"
    }
    return {"tasks": dict(content.get("versions", {})), "values": values}


def _inspect_results(folder: Path) -> dict[str, Any]:
    """Metrics of each scorer of each task; None = it had none.

    A task's second log, as with other arguments, is TASK#2.
    Raises EnvironmentProblem where there is no log, or one that is no success.
    """
    tasks, values = dict[str, Any](), dict[str, float | None]()
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise EnvironmentProblem(f"inspect left no log ({folder}/*.json); see {folder / 'inspect.log'}")
    for path in paths:
        content = _read(path)
        if content.get("status") != "success":
            raise EnvironmentProblem(f"inspect: {path} has the status {content.get('status')}: {content.get('error')}")
        task = content["eval"]["task"]
        if earlier := sum(name.partition("#")[0] == task for name in tasks):
            task = f"{task}#{earlier + 1}"
        tasks[task] = content["eval"].get("task_version")
        for score in (content.get("results") or {}).get("scores", ()):
            for metric, found in score["metrics"].items():
                value = found["value"]
                values[f"{task}/{score['name']}/{metric}"] = None if value is None else float(value)
    return {"tasks": tasks, "values": values}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise EnvironmentProblem(f"{path}: not what the harness writes: {error}") from error
