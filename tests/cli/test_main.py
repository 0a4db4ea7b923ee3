"""The command as a user meets it: exit codes, messages, speed of answers, and nothing heavy imported."""

from __future__ import annotations

import ast
import errno
import getpass
import io
import json
import os
import platform
import pwd
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import runner
from runner.cli import infer, job
from runner.cli import main as module
from runner.cli.args import parse
from runner.cli.help import first_sentence
from runner.cli.job_builder import compose_job
from runner.cli.main import main
from runner.core import package
from runner.core.errors import DataError, EnvironmentProblem
from runner.core.package import conf_dir

ROOT = Path(runner.__file__).resolve().parent.parent
DATA, SETS = (
    ", ".join(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))) for group in ("data", "evaluation")
)
HEAVY = {"torch", "transformers", "datasets", "peft", "wandb", "numpy", "rich"}


def in_process(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


WITHOUT_TORCH = {
    "+recipe=sft_demo optimizer.lrr=1 device=gpu data.max_lenght=x": 2,
    "--cfg job": 0,
    "--help": 0,
    "list": 0,
    "explain optimizer.lr": 0,
    "schema": 0,
    "-sc install=bash": 0,
    "resume nowhere": 2,
    "infer nowhere": 2,
    "export nowhere": 2,
    "model._target_=os.system": 8,
}


def test_answers_need_no_torch_and_leave_no_folder(workdir: Path) -> None:
    """One process answers all: what one of them imported would still be there after it."""
    program = (
        "import json, sys\nfrom runner.cli.main import main\n"
        "for line, expected in json.loads(sys.argv[1]).items():\n"
        "    code = main(line.split())\n"
        f"    heavy = {HEAVY!r} & set(sys.modules)\n"
        "    assert (code, heavy) == (expected, set()), (line, code, heavy)\n"
    )
    command = [sys.executable, "-c", program, json.dumps(WITHOUT_TORCH)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=workdir, env=env, capture_output=True, text=True)
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    assert list(workdir.iterdir()) == []


def test_what_the_machine_lacks_is_named_with_the_mistakes(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lacks = "device=npu"  # a device that no test machine has
    code, _, err = in_process(
        ["+recipe=grpo_demo", "algorithm.group_size=1", "steps=-1", "optimizer.lr=-1", lacks], capsys
    )
    assert code == 2 and "the job spec has 4 problems" in err
    assert all(key in err for key in ("steps: ", "optimizer.lr: ", "algorithm.group_size: ", "device: device=npu"))


def test_python_m_runner_is_the_command(workdir: Path) -> None:
    command = [sys.executable, "-m", "runner", "--version"]
    result = subprocess.run(
        command, cwd=workdir, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    first, second = result.stdout.splitlines()
    assert first.startswith(f"run {runner.__version__}") and "," not in first.partition("commit")[0]
    assert f"torch {version('torch')}" in second and f"transformers {version('transformers')}" in second
    assert second.startswith(f"Python {platform.python_version()}") and "CANN" in second


def test_output_that_nobody_reads_leaves_the_exit_code(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}

    def run(verb: str, output: int) -> tuple[int, str]:
        command = [sys.executable, "-m", "runner", verb]
        done = subprocess.run(command, cwd=workdir, env=own, stdout=output, stderr=subprocess.PIPE, text=True)
        return done.returncode, done.stderr

    read, write = os.pipe()
    os.close(read)
    assert run("list", write) == (0, "")
    code, said = run("lisst", write)
    assert code == 2 and "Exception ignored" not in said
    os.close(write)
    with open("/dev/full", "wb") as full:
        code, said = run("list", full.fileno())
        assert code == 7 and "the disk is full" in said and "Exception ignored" not in said
    monkeypatch.setattr(sys, "stdout", None)  # of a process that was started with >&-
    assert main(["list"]) == 0
    assert sys.stdout is not None
    sys.stdout.close()


def test_the_three_mistakes(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+recipe=sft_demo", "optimizer.lrr=1", "device=gpu", "data.max_lenght=x"]
    code, out, err = in_process(words, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: the job spec has 3 problems\n")
    for hint in ("did you mean 'lr'?", "did you mean 'cuda'?", "did you mean 'max_length'?"):
        assert hint in err


def test_cfg_prints_yaml_that_is_the_job(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = in_process(["--cfg", "job"], capsys)
    named, again, _ = in_process(["--cfg", "job", "+recipe=sft_demo"], capsys)
    assert (code, named, out) == (0, 0, again)
    assert yaml.safe_load(out)["name"] == "sft_demo"
    assert err == "no recipe, model or data is set: using +recipe=sft_demo\n"
    (workdir / "spec.yaml").write_text(out)
    code, third, _ = in_process(["--spec", "spec.yaml", "--cfg", "job", "seed=3"], capsys)
    assert yaml.safe_load(third) == yaml.safe_load(out) | {"seed": 3}


def test_prompts_come_from_a_file_or_a_pipe(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"\xef\xbb\xbfone\r\n\ntwo\xe2\x80\xa8lines\n")
    os.close(writing)
    assert infer._read_prompts(Path(f"/dev/fd/{reading}")) == ["one", "two\u2028lines"]
    os.close(reading)
    for path in (tmp_path, tmp_path / "nowhere.txt"):
        with pytest.raises(EnvironmentProblem, match="no such file; expected one prompt per line"):
            infer._read_prompts(path)


@pytest.mark.parametrize("words", ["list", "help verbs", "explain loss", "explain chat"])
def test_a_terminal_without_utf_8_shows_escapes(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    assert main(words.split()) == 0
    assert raw.getvalue().isascii()


def test_a_row_token_by_token_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert "run explain chat data=file" in in_process(["help"], capsys)[1]
    assert "run explain chat data=file" in in_process(["data"], capsys)[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rsume", "latest"], "no verb named 'rsume'; did you mean 'resume'? e.g. run resume latest"),
        (["zzz"], "no verb named 'zzz'\n"),
        (["optimizer.lr"], "run optimizer.lr=VALUE"),
        (["steps"], "no verb named 'steps'; to set the option: run steps=VALUE"),
        (["trian"], "no verb named 'trian'; did you mean 'train'? to train: run +recipe=NAME"),
        (["--hlep"], "did you mean --help?"),
        (["algorithm=grpo", "sampler=server", "reward=exact"], "sampler.url: must be given: sampler.url=…"),
        (["foo=1"], "foo: not an option of a job; for all options: run help options"),
        (["optimizer.foo=1"], "not an option of optimizer=adamw; for all options: run explain optimizer"),
        (["seed=1,2"], "a sweep over several values, type: run -m"),
        (["--multirun"], "the sweep varies"),
        (["--lr", "3"], "written without dashes"),
        (["sft_demo"], "run +recipe=sft_demo"),
        (["recipes/mine.yaml"], "run +recipe=recipes/mine.yaml"),
        (["--config", "mine.yaml"], "is a recipe: +recipe=FILE.yaml"),
        (["infer", "latest", "--max_new_tokens", "3"], "did you mean --max-new-tokens?"),
        (["explain", "recipe"], "run list recipe"),
        (["explain", "+recipe=sft_demo"], "run --cfg job +recipe=sft_demo"),
        (["explain", "evaluation.everyy"], "did you mean 'evaluation.every'?"),
        (["--spec", "."], "spec.yaml: no such file"),
        (["--spec"], "expected one argument; type --spec SPEC (a run's folder or its spec.yaml"),
        (["--info"], "expected one argument; type --info defaults|searchpath (print the files of a job"),
        (["--cfg", "all"], "invalid choice"),
        (["list", "devise"], "no group named 'devise'; did you mean 'device'?"),
        (["explain"], "one key"),
        (["explain", "adamw"], "no option named 'adamw'; to choose it: run optimizer=adamw"),
        (["explain", "foo"], "no option named 'foo'; for all options: run help options"),
        (["explain", "learning_rate"], "type optimizer.lr=…"),
        (["schema", "x"], "job or recipe"),
        (["-sc", "install=tcsh"], "install=bash|fish|zsh"),
        (["infer", "latest", "--temperature", "-1"], "--temperature -1.0: expected 0 or more"),
        (["infer", "latest", "--top-p", "0"], "--top-p 0.0: expected above 0, at most 1"),
        (["export", "latest", "--checkpoint", "newest"], "expected a step, best or last, got 'newest'\n"),
        (["resume", "elsewhere", "steps=4"], "is not a run"),
        (["--spec", "nowhere.yaml"], "no such file"),
        (["resume", "latest", "--spec", "x"], "run resume: unrecognized arguments: --spec"),
        (["resume", "latest", "--config-dir", "x"], "unrecognized arguments: --config-dir"),
        (["export", "latest", "--cfg", "job"], "unrecognized arguments: --cfg"),
        (["export", "latest", "--seed", "1"], "unrecognized arguments: --seed"),
        (["infer", "latest", "--out", "x"], "unrecognized arguments: --out"),
        (["infer", "latest", "--spec", "x"], "unrecognized arguments: --spec"),
        (["list", "--cfg", "job"], "unrecognized arguments: --cfg"),
        (["schema", "--config-dir", "."], "unrecognized arguments: --config-dir"),
        (["infer", "latest", "--top-p", "0.5", "hi"], "set --temperature above 0"),
        (["infer", "latest", "--seed", "0", "hi"], "set --temperature above 0"),
        (
            ["infer", "latest", "--image", "https://x.y/a.png"],
            "--image https://x.y/a.png: no such file; images are",
        ),
        (["infer", "latest", "--image", __file__], f"--image {__file__}: not an image; expected one of PNG"),
        (["infer", "latest", "optimizer.lr=1"], "write it after --: run infer latest -- 'optimizer.lr=1'"),
        (
            ["infer", "latest", "+recipe=sft_demo"],
            "only device=…, model.dtype=…, model.path=… and model.trust_remote_code=… can be",
        ),
        (["export", "latest", "steps=3"], "run export: only device=…, model.dtype=…, model.path=… and"),
        (["resume", "latest", "--", "steps=3"], "only run infer, run serve and run eval take words after --"),
        (["--", "device=cpu"], "only run infer, run serve and run eval take words after --"),
        (["--config-dir", "nowhere"], "no such folder"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_usage_errors_exit_2_and_say_what_to_type(
    words: list[str], message: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = in_process(words, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err
    assert list(workdir.iterdir()) == []


def test_an_unknown_verb_is_answered_with_the_list(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = in_process(["surgeon"], capsys)
    for verb in ("list", "explain", "schema", "resume", "infer", "export", "doctor", "parity", "bench"):
        assert f"\n  {verb} " in err


def used(*words: str) -> tuple[str, list[str], dict]:
    """What `run infer` makes of its words: the run, the prompts, the run's device."""
    source, prompts, settings = job.resolve_source(parse(["infer", *words]))
    return Path(source.path).name, prompts, settings["device"] or {}


def test_a_word_of_infer_is_a_run_a_setting_or_a_prompt(workdir: Path) -> None:
    folder = workdir / "outputs" / "latest"
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(yaml.safe_dump(compose_job(["+recipe=sft_demo"]).data))
    where, prompts, device = used("latest", "device=cuda", "sort 31", "2+2=4", "--", "steps=3", "--seed")
    assert (where, prompts) == ("latest", ["sort 31", "2+2=4", "steps=3", "--seed"])
    assert device["name"] == "cuda"
    assert used("2+2=4")[:2] == ("latest", ["2+2=4"])
    assert used("sort 31")[:2] == ("latest", ["sort 31"])
    assert used("device.threads=2", "--", "hi")[1:][0] == ["hi"]
    assert used("device.threads=2")[2] | {"name": "cpu", "threads": 2} == used("device.threads=2")[2]


@pytest.mark.parametrize(
    ("state", "said"), [("failed", "failed before its first checkpoint"), ("running", "has no checkpoint yet")]
)
def test_a_newest_run_without_a_checkpoint_is_passed_over_with_the_reason(
    state: str, said: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = yaml.safe_dump(compose_job(["+recipe=sft_demo"]).data)
    for name in ("a", "b"):
        (workdir / "outputs" / "2026-01-01" / name).mkdir(parents=True)
        (workdir / "outputs" / "2026-01-01" / name / "spec.yaml").write_text(spec)
    whole = workdir / "outputs" / "2026-01-01" / "a" / "checkpoints" / "step-00000002" / "MANIFEST.json"
    whole.parent.mkdir(parents=True)
    whole.touch()
    (workdir / "outputs" / "2026-01-01" / "b" / "status.json").write_text(f'{{"state": "{state}"}}')
    (workdir / "outputs" / "latest").symlink_to("2026-01-01/b")
    assert used("sort 31")[0] == "a"
    assert f"b {said}; using the newest run that has one" in capsys.readouterr().err


def test_a_config_dir_also_serves_a_spec(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "more" / "optimizer").mkdir(parents=True)
    (workdir / "more" / "optimizer" / "mine.yaml").write_text("defaults: [adamw]\nlr: 0.125\n")
    (workdir / "spec.yaml").write_text(yaml.safe_dump(compose_job(["+recipe=sft_demo"]).data))
    words = ["--spec", "spec.yaml", "--config-dir", "more", "optimizer=mine", "--cfg", "job"]
    code, out, err = in_process(words, capsys)
    assert (code, yaml.safe_load(out)["optimizer"]["lr"]) == (0, 0.125), err
    code, _, err = in_process(["--spec", "spec.yaml", "--config-dir", "nowhere", "--cfg", "job"], capsys)
    assert code == 2 and "no such folder" in err


def raiser(error: BaseException):  # type: ignore[no-untyped-def]
    def parse(_: object) -> None:
        raise error

    return parse


@pytest.mark.parametrize(
    ("error", "code"), [(DataError("line 3"), 3), (KeyboardInterrupt(), 130), (ZeroDivisionError("oops"), 1)]
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "parse", raiser(error))
    assert in_process([], capsys)[0] == code


def test_our_own_bug_says_where_the_traceback_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "parse", raiser(ZeroDivisionError("oops")))
    _, _, err = in_process([], capsys)
    assert "a bug in this project: ZeroDivisionError: oops" in err and "Traceback" not in err
    written = Path(err.partition("the traceback is in ")[2].partition(";")[0])
    assert "ZeroDivisionError: oops" in written.read_text()
    written.unlink()
    assert "Traceback" in in_process(["--debug"], capsys)[2]


def test_a_full_disk_is_a_storage_error_with_the_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "parse", raiser(OSError(errno.ENOSPC, "No space left on device", "/scratch/x")))
    code, _, err = in_process([], capsys)
    assert code == 7 and "error: /scratch/x: the disk is full\n" in err and "a bug in" not in err
    assert in_process([], capsys)[0] == 7
    monkeypatch.setattr(module, "parse", raiser(OSError(errno.EIO, "I/O error")))
    assert in_process([], capsys)[0] == 1


def test_an_error_of_a_plug_in_names_the_plug_in_and_its_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a library of the plug-in's raised it; what this project raises below a plug-in is ours."""
    scope: dict[str, Any] = {"__name__": "words.deep", "json": json, "raiser": raiser}
    source = "def broken(_): json.loads('{')\ndef calls_us(_): raiser(KeyError('ours'))(0)\n"
    exec(compile(source, "/site/words/deep.py", "exec"), scope)
    point = SimpleNamespace(name="w", value="words.config:Words", dist=SimpleNamespace(name="run-words"))
    monkeypatch.setattr(package, "entry_points", lambda group: [point] if group == "runner.losses" else [])
    monkeypatch.setattr(module, "parse", scope["broken"])
    code, _, err = in_process([], capsys)
    assert code == 2 and "the plug-in run-words raised JSONDecodeError: Expecting" in err
    assert "/site/words/deep.py:1, broken\n  the traceback is in" in err and "a bug in" not in err
    monkeypatch.setitem(raiser.__globals__, "__name__", "runner.tests")
    monkeypatch.setattr(module, "parse", scope["calls_us"])
    assert in_process([], capsys)[0] == 1


def test_a_user_without_an_entry_or_a_home_gets_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HOME", "USER", "RUNNER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "x")  # so that what the command sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    assert package.cache_folder() == tmp_path / "cache"
    home = tmp_path / f"run-home-uid-{os.getuid()}"
    code, _, err = in_process(["--version"], capsys)
    assert code == 0 and f"has no home folder; using {home}; set HOME" in err
    assert Path.home() == home and home.stat().st_mode & 0o777 == 0o700 and getpass.getuser()
    assert in_process(["--version"], capsys)[2] == ""
    monkeypatch.delenv("HOME")
    home.rmdir()
    home.symlink_to(tmp_path)
    code, _, err = in_process(["--version"], capsys)
    assert code == 2 and "is another user's; set HOME" in err


def test_a_traceback_has_no_secret_and_needs_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "hf_" + "abcdefghijklmnopqrstuvwxyz01234567"
    monkeypatch.setattr(module, "parse", raiser(ZeroDivisionError(f"{secret} \udcff")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, _, err = in_process([], capsys)
    [written] = tmp_path.glob("run-traceback-*")
    assert "ZeroDivisionError: *** " in written.read_text() and secret not in written.read_text() + err
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    _, _, err = in_process([], capsys)
    assert "its traceback cannot be written: " in err and "Traceback" in err and secret not in err
    assert secret not in in_process(["--debug"], capsys)[2]


def test_list_shows_own_recipes_with_their_first_comment(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "recipes").mkdir()
    (workdir / "recipes" / "mine.yaml").write_text("# @package _global_\n# What mine does.\nsteps: 3\n")
    _, out, _ = in_process(["list"], capsys)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "mine What mine does." in lines and "adamw AdamW (Loshchilov & Hutter, 1711.05101)." in lines
    _, out, _ = in_process(["list", "optimizer"], capsys)
    assert out.splitlines()[0] == "optimizer" and "recipe" not in out


def test_schema_is_json_that_discriminates_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = in_process(["schema"], capsys)
    schema = json.loads(out)
    assert schema["properties"]["device"]["discriminator"]["mapping"]["npu"] == "#/$defs/NpuConfig"
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["optimizer.lr"],
            [
                "meaning  Peak learning rate; the schedule multiplies it. null = 1e-5, with adapter=lora 1e-4.",
                "type     number or null",
                "range    above 0",
                "default  null",
                "set by   recipe/sft_demo",
            ],
        ),
        (["optimizer.lr", "model=tiny"], ["now      null", "set by   optimizer/adamw"]),
        (["optimizer.lr=", "optimizer.lr=0.5"], ["now      0.5", "set by   command line"]),
        (["steps", "steps=300"], ["unit     steps", "now      300"]),
        (["adapter.rank"], ["now      not used: an option of adapter=lora", "default  16"]),
        (["data.path", "data=file"], ["default  none: it must be set", "now      ???"]),
        (["evaluation"], [f"  choose with +evaluation=[NAME]: {SETS}", "  evaluation.every=50"]),
        (["evaluation.every"], ["unit     steps", "range    at least 0"]),
        (["optimizer", "optimizer=sgd"], ["optimizer=sgd: Stochastic gradient descent.", "  optimizer.momentum=0.0"]),
        (["data=file"], [f"  choose with data=NAME: {DATA}", "  data.path=???"]),
        (["optimizer.lr"], ["note: no recipe, model or data is set: using +recipe=sft_demo"]),
        (["watch"], ["  watch.hang_timeout_s=1800.0"]),
    ],
    ids=lambda v: " ".join(v),
)
def test_explain(words: list[str], lines: list[str], workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = in_process(["explain", *words], capsys)
    assert code == 0
    assert [line for line in lines if line not in out.splitlines()] == []


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["One sentence that is", "wrapped. Another", "one."], "One sentence that is wrapped."),
        (["Dr. Who, e.g. No, by (E. Mitch, 2023)", "and on. Then"], "Dr. Who, e.g. No, by (E. Mitch, 2023) and on."),
        (["it climbs above 0.6. How far", "is open."], "it climbs above 0.6."),
        (["falls to 0.5 with cpt. [mit]"], "falls to 0.5 with cpt. [mit]"),
        (["a title", "", "a paragraph"], "a title"),
        ([], ""),
    ],
)  # fmt: skip
def test_a_list_shows_the_first_sentence(lines: list[str], said: str) -> None:
    assert first_sentence(lines) == said


def test_a_recipe_is_listed_with_a_whole_sentence(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipes").mkdir()
    Path("recipes/mine.yaml").write_text("# @package _global_\n#\n# Half a sentence,\n# and its end. More.\nsteps: 2\n")
    _, out, _ = in_process(["list", "recipe"], capsys)
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()[1:]}
    assert rows["mine"] == "Half a sentence, and its end."
    assert all(said.endswith((".", "]", ")")) for said in rows.values()), rows


HYDRA_ALONE = """
from hydra import compose, initialize_config_dir
with initialize_config_dir(config_dir=sys.argv[1], version_base="1.3"):
    compose("job")
"""


def cpu_seconds(command: list[str], cwd: Path) -> float:
    before = os.times()
    subprocess.run(command, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--cfg", "job"], ["optimizer.lrr=1"]], ids=" ".join)
def test_an_answer_takes_little_more_than_hydra_alone(words: list[str], workdir: Path) -> None:
    """As a ratio of CPU time, in turns: the wall clock of a shared machine proves nothing."""
    alone = [sys.executable, "-c", f"import sys{HYDRA_ALONE}", str(conf_dir())]
    ours = [sys.executable, "-m", "runner", *words]
    pairs = [(cpu_seconds(ours, workdir), cpu_seconds(alone, workdir)) for _ in range(5)]
    assert min(a for a, _ in pairs) < 3 * min(b for _, b in pairs), pairs  # 2.2 to 2.5 on a shared machine


def test_no_name_steers_the_terminal(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    title = "\x1b]0;owned\x07"
    for words in (["resume", f"no{title}"], [f"name=x{title}"], [f"--bad{title}"], ["explain", f"x{title}"]):
        with suppress(SystemExit):
            assert main(words) == 2
        said = "".join(capsys.readouterr())
        assert "owned" in said and "\x1b" not in said and "\x07" not in said, words


def test_no_name_of_a_file_or_a_recipe_steers_the_terminal(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    title = "\x1b]0;owned\x07"
    Path("recipes").mkdir()
    Path("recipes", f"x{title}.yaml").write_text(f"# One.{title}\ndefaults: [sft_demo]\nsteps: 3\n")
    Path("outputs", f"run{title}").mkdir(parents=True)
    recipe = f"+recipe=recipes/x{title}.yaml"
    for words in (
        ["list", "recipe"],
        ["help", "recipes"],
        [recipe, "--info", "defaults"],
        ["report", f"outputs/run{title}"],
    ):
        with suppress(SystemExit):
            main(words)
        said = "".join(capsys.readouterr())
        assert "owned" in said and "\x1b" not in said and "\x07" not in said, words


def test_all_that_is_printed_has_its_control_characters_written_out() -> None:
    """Each print is of a literal, JSON or YAML, or text that `runner.tracker.text` has escaped."""
    escape = {"dumps", "safe_dump", "safe_dump_all", "escape_controls", "shown_as"}

    def is_safe(node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return ast.unparse(node.func).rpartition(".")[2] in escape
        if isinstance(node, ast.IfExp):
            return is_safe(node.body) and is_safe(node.orelse)
        return isinstance(node, ast.Constant) or ast.unparse(node).isupper()  # a constant of the module

    found = []
    for path in (*ROOT.glob("runner/cli/*.py"), *ROOT.glob("runner/launch/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and not all(map(is_safe, node.args)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
