"""The package of docs/extend.md, built and installed: listed, explained, completed, refused, trained with and swept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_plugin import ROOT, run

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
SMALL = ("steps=1", "init_from=null", "tracker=none", "evaluation.every=0", "algorithm.batch_size=2")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's package."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    files = re.findall(r"`([\w./]+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert [name for name, _ in files] == ["pyproject.toml", "run_losses/__init__.py"]
    for name, text in files:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    flags = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", target, source], check=True)
    return target


def test_each_function_of_the_page_is_short(site: Path) -> None:
    functions = re.split(r"\n(?=@)", (site / "run_losses" / "__init__.py").read_text())[1:]
    assert len(functions) == 3 and all(len(function.splitlines()) <= 30 for function in functions)


def test_its_values_are_listed_and_its_options_explained(site: Path, workdir: Path) -> None:
    listed = run(site, workdir, "explain", "algorithm.objective", "algorithm=grpo").stdout
    assert "one of clip, cispo, sapo, reinforce, two_sided" in listed
    assert "objective=two_sided   max(−min(r, delta)·A, −clip(r, 0.8, 1.2)·A)   (INTELLECT-2 2505.07291)" in listed
    option = run(site, workdir, "explain", "algorithm.delta", "algorithm=grpo").stdout
    assert "null = 4.0 (two_sided)." in option and "range    above 1" in option
    words = ("algorithm=grpo", "algorithm.objective=two_sided", "algorithm.delta=3", "algorithm.advantage=max_rl")
    explained = run(site, workdir, "explain", "loss", *words).stdout
    assert "algorithm.delta=3   Largest ratio of a token" in explained and "MaxRL 2602.02710" in explained
    assert (
        "algorithm.penalty=50 " in run(site, workdir, "explain", "loss", "algorithm=dpo", "algorithm.loss=dpop").stdout
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("run algorithm.advantage=max", ["algorithm.advantage=max_rl"]),
        ("run algorithm=grpo algorithm.delt", ["algorithm.delta="]),
        ("run algorithm.loss=dp", ["algorithm.loss=dpop"]),
    ],
)
def test_they_are_completed(line: str, found: list[str], site: Path, workdir: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]), "COMP_LINE": line}
    words = [sys.executable, "-m", "runner", "-sc", "query=bash"]
    assert subprocess.run(words, cwd=workdir, env=env, capture_output=True, text=True).stdout.split() == found


def test_a_slip_is_answered_with_the_nearest_name(site: Path, workdir: Path) -> None:
    slips = ("algorithm.objective=two_side", "algorithm.delta=1", "algorithm.advantage=maxrl")
    wrong = run(site, workdir, "+recipe=grpo_demo", *slips)
    assert wrong.returncode == 2
    for said in ("did you mean 'two_sided'?", "expected a number above 1 or null, got 1", "did you mean 'max_rl'?"):
        assert said in wrong.stderr
    unused = run(site, workdir, "+recipe=grpo_demo", "algorithm.delta=3")
    assert "algorithm.delta: not used with objective=clip; it belongs to objective=two_sided" in unused.stderr


def test_nothing_of_it_imports_torch_before_a_job_is_checked(site: Path) -> None:
    program = "import sys; from runner.spec.registry import default_registry as r; r().classes('algorithm')['grpo']"
    program += "(objective='two_sided'); assert 'run_losses' in sys.modules and 'torch' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)


def test_a_job_trains_with_its_policy_loss_and_its_advantage(site: Path, workdir: Path) -> None:
    words = ("algorithm.objective=two_sided", "algorithm.delta=3", "algorithm.advantage=max_rl")
    small = (*SMALL, "algorithm.group_size=2", "algorithm.zero_variance=keep", "algorithm.epochs=2")
    result = run(site, workdir, "+recipe=grpo_demo", *words, *small)
    assert result.returncode == 0, result.stderr
    metrics = json.loads((workdir / "outputs" / "latest" / "metrics.jsonl").read_text().splitlines()[0])
    assert {"train/loss", "policy/clipped_dual", "policy/clipped_low"} <= metrics.keys()


def test_a_sweep_tries_its_preference_loss(site: Path, workdir: Path) -> None:
    result = run(site, workdir, "-m", "+recipe=dpo_demo", "algorithm.loss=sigmoid,dpop", *SMALL)
    assert result.returncode == 0, result.stderr
    losses = {json.loads(p.read_text().splitlines()[0])["train/loss"] for p in workdir.rglob("metrics.jsonl")}
    assert len(list(workdir.rglob("metrics.jsonl"))) == 2, result.stdout
    assert losses


def test_a_package_that_fails_is_named_and_every_command_works(site: Path, workdir: Path) -> None:
    (workdir / "run_losses.py").write_text("raise RuntimeError('broken')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(workdir), str(site)])}
    for words in (["list", "algorithm"], ["explain", "loss", "algorithm=grpo"], ["--cfg", "job", "+recipe=sft_demo"]):
        result = subprocess.run(
            [sys.executable, "-m", "runner", *words], cwd=workdir, env=env, capture_output=True, text=True
        )
        assert result.returncode == 0 and result.stdout
        [line] = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
        assert "plug-in run-losses (run_losses) are left out: RuntimeError: broken" in line
