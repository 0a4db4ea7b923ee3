"""The package of docs/extend.md, built and installed: short, checked, listed, explained, completed, refused, trained
with, resumed and swept."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.test_plugin import ROOT, call_tests, run

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"`([\w./]+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))
PUBLIC = ("runner", "runner.spec", "runner.interfaces", "runner.interfaces.losses", "runner.testing")
SMALL = ("steps=1", "init_from=null", "tracker=none", "evaluation.every=0", "algorithm.batch_size=2")
ROLLOUTS = ("sampler.max_new_tokens=4", "algorithm.group_size=2", "algorithm.zero_variance=keep")
DEMO = ("+recipe=extras_demo", "init_from=null", *SMALL[3:], *ROLLOUTS, "checkpoint.every=1")
# Runs each command line of a JSON list in one process, and prints what each says.
SEVERAL = """
import contextlib, io, json, sys
from runner.cli.main import main
said = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    said.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""


class Said(NamedTuple):
    """What a command returned and printed."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files."""
    source = tmp_path_factory.mktemp("source")
    for name, text in FILES.items():
        (source / name).parent.mkdir(exist_ok=True, parents=True)
        (source / name).write_text(text)
    (source / "run_extras" / "__init__.py").touch()
    return source


@pytest.fixture(scope="module")
def site(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's package."""
    target = tmp_path_factory.mktemp("site")
    flags = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", target, source], check=True)
    return target


def environment(site: Path, *before: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *before, site]))}


def commands(site: Path, cwd: Path, *lines: str) -> list[Said]:
    """What `run` says to each line."""
    words = [sys.executable, "-c", SEVERAL, json.dumps([line.split() for line in lines])]
    result = subprocess.run(words, cwd=cwd, env=environment(site), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [Said(*one) for one in json.loads(result.stdout)]


def test_each_example_is_short_and_imports_public_packages_alone() -> None:
    modules = {name: text for name, text in FILES.items() if name.startswith("run_extras/")}
    whole = modules.pop("run_extras/losses.py")
    modules |= {part.split("(")[0]: part for part in re.split(r"\n(?=@)", whole)[1:]}
    sizes = {name: sum(bool(line.strip()) for line in text.splitlines()) for name, text in modules.items()}
    assert len(sizes) == 17 and max(sizes.values()) <= 30, sizes
    for text in (FILES["test_extras.py"], *(t for name, t in FILES.items() if name.endswith(".py"))):
        imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        ours = [node.module for node in imported if str(node.module).split(".")[0] == "runner"]
        assert set(ours) <= set(PUBLIC)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_its_own_test_passes(source: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call_tests(source / "test_extras.py", site, monkeypatch) == ["test_extras"]


def test_it_is_listed(site: Path, workdir: Path) -> None:
    listed, helped, recipes = commands(site, workdir, "list", "help", "help recipes")
    for line in (
        "  words  The share of a column's words that the answer has.",
        "  guess  Says that an answer is wrong, until it is right.",
        "  sums  Sums of two numbers, as prompts.",
        "  metered  sampler=torch with the metric sampler/tokens.",
        "callbacks\n  notify  Says once that a metric is below a bound.",
        "  csv  A CSV file in the run's folder.",
        "  lion  Lion (Chen et al., 2302.06675): the sign of a momentum; wants about a tenth of AdamW's lr.",
        "  restarts  Cosine with warm restarts (Loshchilov & Hutter, 1608.03983).",
        "  ia3  Learned factors on activations (Liu et al., 2205.05638).",
        "  extras_demo  The demo of this page's package: digits sorted, with words as the reward.",
    ):
        assert re.sub(" +", " ", line) in re.sub(" +", " ", listed.out)
    assert re.search(r"  newest +print the newest numbers of a run; `run newest outputs/latest`", helped.out)
    assert "extras_demo" in recipes.out and (listed.err, helped.err, recipes.err) == ("", "", "")


def test_losses_are_listed_and_their_options_explained(site: Path, workdir: Path) -> None:
    chosen = "algorithm=grpo algorithm.policy_loss=two_sided algorithm.delta=3 algorithm.advantage=max_rl"
    listed, option, loss, dpop, clipped, variation = commands(
        site,
        workdir,
        "explain algorithm.policy_loss algorithm=grpo",
        "explain algorithm.delta algorithm=grpo",
        f"explain loss {chosen}",
        "explain loss algorithm=dpo algorithm.loss=dpop",
        "explain loss algorithm=grpo algorithm.correction=clipped",
        "explain loss algorithm=distill algorithm.divergence=total_variation",
    )
    assert "one of clip, cispo, sapo, reinforce, two_sided" in listed.out
    formula = "policy_loss=two_sided   max(−min(r, delta)·A, −clip(r, 0.8, 1.2)·A)   (INTELLECT-2 2505.07291)"
    assert formula in listed.out
    assert "null = 4.0 (two_sided)." in option.out and "range    above 1" in option.out
    assert "algorithm.delta=3   Largest ratio of a token" in loss.out and "MaxRL 2602.02710" in loss.out
    assert "algorithm.penalty=50 " in dpop.out
    assert "c   clip(ρ, 0.5, correction_max)   (correction=clipped; OpenRLHF)" in clipped.out
    assert "algorithm.correction_max=2   Upper bound" in clipped.out
    assert "D   ½·Σ |P − Q|   (divergence=total_variation; f-DISTILL 2307.15190)" in variation.out


def test_a_callback_is_explained(site: Path, workdir: Path) -> None:
    group, section, bare, chosen, unknown = commands(
        site,
        workdir,
        "explain callbacks",
        "explain callbacks.notify",
        "explain callbacks.notify.below",
        "explain callbacks.notify.below callbacks=notify callbacks.notify.below=3",
        "explain callbacks.notify.belo",
    )
    assert "choose with callbacks=NAME: notify" in group.out
    assert (
        "callbacks.notify: Says once that a metric is below a bound.\n  callbacks.notify.metric=train/loss"
        in section.out
    )
    assert "meaning  Bound." in bare.out and "now      not used: choose it with callbacks=notify" in bare.out
    assert "now      3" in chosen.out and "set by   command line" in chosen.out
    assert (unknown.code, "did you mean 'callbacks.notify.below'?" in unknown.err) == (2, True)


COMPLETED = {
    "run algorithm.advantage=max": "algorithm.advantage=max_rl",
    "run algorithm=grpo algorithm.delt": "algorithm.delta=",
    "run algorithm.loss=dp": "algorithm.loss=dpop",
    "run reward=wo": "reward=words",
    "run callbacks=no": "callbacks=notify",
    "run callbacks=notify callbacks.notify.b": "callbacks.notify.below=",
    "run +recipe=ext": "+recipe=extras_demo",
    "run newe": "newest",
}
COMPLETE = """
import json, os, sys
from runner.cli.main import main
for line in json.loads(sys.argv[1]):
    os.environ["COMP_LINE"] = line
    main(["-sc", "query=bash"])
"""


def test_names_are_completed(site: Path, workdir: Path) -> None:
    words = [sys.executable, "-c", COMPLETE, json.dumps(list(COMPLETED))]
    done = subprocess.run(words, cwd=workdir, env=environment(site), capture_output=True, text=True)
    assert done.stdout.split() == list(COMPLETED.values()), done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("algorithm.policy_loss=two_side", "did you mean 'two_sided'?"),
        ("algorithm.policy_loss=two_sided algorithm.delta=1", "expected a number above 1 or null, got 1"),
        ("algorithm.advantage=maxrl", "did you mean 'max_rl'?"),
        ("algorithm.delta=3", "algorithm.delta: not used with policy_loss=clip; it belongs to policy_loss=two_sided"),
        ("callbacks=notfy", "callbacks: no callback named 'notfy'; did you mean 'notify'? (notify, stop_when)"),
        ("callbacks=notify", "callbacks.notify.below: must be given: callbacks.notify.below=…"),
        ("callbacks.notify.below=1", "callbacks.notify: is not chosen; type callbacks=notify"),
        (
            "callbacks.notfy.below=1",
            "callbacks.notfy: no callback named 'notfy'; did you mean 'notify'? (notify, stop_when)",
        ),
        ("callbacks=notify callbacks.notify.belo=1", "not an option of callbacks.notify; did you mean 'below'?"),
        ("callbacks=notify callbacks.notify.below=x", "callbacks.notify.below: expected a number, got 'x'"),
        ("callbacks=3", "callbacks: no callback named '3' (notify, stop_when)"),
    ],
)
def test_a_slip_is_answered(line: str, said: str, slips: dict[str, Said]) -> None:
    assert slips[line].code == 2 and said in slips[line].err


@pytest.fixture(scope="module")
def slips(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """What is said to each wrong line of the test above."""
    [mark] = [m for m in test_a_slip_is_answered.pytestmark if m.name == "parametrize"]  # type: ignore[attr-defined]
    lines = [line for line, _ in mark.args[1]]
    said = commands(site, tmp_path_factory.mktemp("slips"), *(f"--cfg job +recipe=grpo_demo {line}" for line in lines))
    return dict(zip(lines, said, strict=True))


def test_nothing_of_it_imports_torch_before_a_job_is_checked(site: Path) -> None:
    program = "import sys; from runner.spec.registry import default_registry as r; "
    program += "r().classes('algorithm')['grpo'](policy_loss='two_sided'); "
    program += "assert {'run_extras.losses', 'run_extras.adapter'} <= set(sys.modules) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], env=environment(site), check=True)


def test_a_job_uses_all_of_it_and_is_resumed(site: Path, workdir: Path) -> None:
    lines = (" ".join([*DEMO, "steps=2"]), "resume latest steps=3 callbacks.notify.below=1.5", "newest")
    result, again, numbers = commands(site, workdir, *lines)
    assert result.code == 0, result.err
    assert "notify   reward/mean is below 2.0 at step 1" in result.out
    folder = workdir / "outputs" / "latest"
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-3])
    assert first["step"] == 1
    assert {"reward/mean", "policy/clip_frac_dual", "correction/clip_frac", "notify/reached"} <= first.keys()
    assert (folder / "metrics.csv").read_text().startswith("1,train/loss,")
    assert again.code == 0, again.err
    assert "notify   " not in again.out, "its state says that the bound was reached"
    assert numbers.code == 0 and re.search(r"^step +3$", numbers.out, re.MULTILINE)


@pytest.mark.slow
def test_a_sweep_varies_it(site: Path, workdir: Path) -> None:
    result = run(site, workdir, "-m", *DEMO, "steps=1", "callbacks.notify.below=-1,3")
    assert result.returncode == 0, result.stderr
    rows = [
        json.loads(p.read_text().splitlines()[-1]) for p in sorted(workdir.glob("outputs/sweeps/2*/*/metrics.jsonl"))
    ]
    assert [row["notify/reached"] for row in rows] == [0.0, 1.0]
    titles = [p.read_text().splitlines()[0] for p in sorted(workdir.glob("outputs/sweeps/2*/*/metrics.csv"))]
    assert [title.partition(": ")[2] for title in titles] == ["below=-1", "below=3"]


@pytest.mark.slow
def test_a_sweep_tries_its_preference_loss(site: Path, workdir: Path) -> None:
    result = run(site, workdir, "-m", "+recipe=dpo_demo", "algorithm.loss=sigmoid,dpop", *SMALL)
    assert result.returncode == 0, result.stderr
    assert len(list(workdir.glob("outputs/sweeps/2*/*/metrics.jsonl"))) == 2


def test_where_its_losses_fail_the_rest_of_it_works(site: Path, workdir: Path) -> None:
    broken = workdir / "broken"
    (broken / "run_extras").mkdir(parents=True)
    for path in (site / "run_extras").rglob("*.py"):
        (broken / "run_extras" / path.name).write_text(path.read_text())
    (broken / "run_extras" / "losses.py").write_text("raise RuntimeError('broken')")
    for words in (
        ["list", "reward"],
        ["explain", "loss", "algorithm=grpo"],
        ["--cfg", "job", "+recipe=grpo_demo", "reward=words"],
    ):
        result = subprocess.run(
            [sys.executable, "-m", "runner", *words],
            cwd=workdir,
            env=environment(site, broken),
            capture_output=True,
            text=True,
        )
        assert "words" in result.stdout or words[0] == "explain"
        assert result.stderr.count("not loaded: losses (RuntimeError: broken)") == 1
        assert result.stderr.count("pip uninstall run-extras") == 1
