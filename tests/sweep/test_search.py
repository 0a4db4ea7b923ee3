"""Searches: they find what is good, stop what is hopeless, and go on where they were killed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.cli.expand import Expansion, expand
from runner.cli.main import main
from runner.errors import SpecError
from runner.sweep.plan import SweepFolder, find
from runner.sweep.record import Record
from runner.sweep.space import Dimension
from tests.sweep import toy

pytest.importorskip("optuna")
ROOT = Path(__file__).resolve().parents[2]
BASE = ("+recipe=sft_demo", "sweep.search=optuna", "sweep.trials=4")


def space(*words: str) -> dict[str, Dimension]:
    found: Expansion = expand([*BASE, *words])
    return {dimension.key: dimension for dimension in found.space}


def study(folder: SweepFolder) -> list[str]:
    """The states of the trials in the journal, as another program reads them."""
    program = (
        "import optuna, sys; from optuna.storages import JournalStorage as S;"
        "from optuna.storages.journal import JournalFileBackend as B;"
        "print(*[t.state.name for t in optuna.load_study(study_name='sweep', storage=S(B(sys.argv[1]))).trials])"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(folder.root / "optuna.log")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_the_space_is_hydras_grammar(workdir: Path) -> None:
    found = space("optimizer.lr=tag(log,interval(1e-5,1e-2))", "seed=range(0,10,3)", "optimizer=adamw,sgd", "steps=5")
    lr, seed, which = found["optimizer.lr"], found["seed"], found["optimizer"]
    assert (lr.kind, lr.low, lr.high, lr.log) == ("float", 1e-5, 1e-2, True)
    assert (seed.kind, seed.low, seed.high, seed.step) == ("int", 0, 9, 3)
    assert which.values == (("optimizer=adamw", "adamw"), ("optimizer=sgd", "sgd"))
    assert space("algorithm.batch_size=int(interval(8,64))")["algorithm.batch_size"].kind == "int"
    assert lr.typed(0.001234567) == ("optimizer.lr=0.00123457", "0.00123457")


def test_a_recipe_can_be_a_search(workdir: Path) -> None:
    (workdir / "recipes").mkdir()
    (workdir / "recipes" / "mine.yaml").write_text(
        "defaults: [sft_demo]\nsweep:\n  search: optuna\n  trials: 3\n  over:\n"
        "    optimizer.lr: tag(log,interval(1e-5,1e-2))\n    seed: [1, 2]\n"
    )
    found = expand(["+recipe=mine"])
    assert [d.key for d in found.space] == ["optimizer.lr", "seed"] and found.options.trials == 3
    assert [d.key for d in expand(["+recipe=mine", "seed=7"]).space] == ["optimizer.lr"]


def test_hydras_way_to_ask_for_it(workdir: Path) -> None:
    found = expand(["+recipe=sft_demo", "hydra/sweeper=optuna", "sweep.trials=2", "optimizer.lr=interval(1e-5,1e-2)"])
    assert found.options.search == "optuna"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*BASE, "steps=3"], "nothing varies"),
        ([*BASE, "optimizer.lr=interval(1,0)"], "is empty"),
        ([*BASE, "optimizer.lr=tag(log,interval(0,1))"], "needs an interval above 0"),
        ([*BASE, "optimizer.lr=interval(-1,1)"], "expected a number above 0, got -1"),
        (["+recipe=sft_demo,dpo_demo", *BASE[1:]], "cannot vary the recipe"),
        (["sweep.search=optuna", "seed=1,2"], "sweep.trials: must be given"),
        (["sweep.trials=3", "seed=1,2"], "is for sweep.search=optuna"),
        (["sweep.prune=true", "seed=1,2"], "is for sweep.search=optuna"),
        (["sweep.search=optuma", "seed=1,2"], "'optuma'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_cannot_be_searched_is_refused(words: list[str], message: str, workdir: Path) -> None:
    with pytest.raises(SpecError) as caught:
        expand(words)
    assert message in str(caught.value)


def test_a_search_must_know_what_is_better(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "model=tiny", "optimizer.lr=interval(1e-4,1e-2)", *BASE[1:]]) == 2
    assert "sweep.metric: must be given" in capsys.readouterr().err


def test_it_finds_a_good_value_and_stops_hopeless_jobs(tmp_path: Path) -> None:
    folder, code = toy.search(tmp_path, ["curve"], trials=20, prune=True, parallel=2)
    assert code == 0
    states = toy.states(folder)
    assert len(states) == 20 and set(states) == {"done", "pruned"}
    results = json.loads(folder.results.read_text())
    best = float(results["jobs"][results["best"]]["varied"]["optimizer.lr"])
    assert abs(math.log10(best) + 3) < 0.6  # a grid of seven values from 1e-6 to 1 comes as close as 0.5
    assert sorted(study(folder)) == ["COMPLETE"] * states.count("done") + ["PRUNED"] * states.count("pruned")
    assert "search   optuna, tpe; the hopeless are stopped early" in folder.log.read_text()


def test_killed_half_way_it_goes_on(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.sweep.toy",
        str(tmp_path),
        "search",
        "curve",
        '{"trials": 8, "parallel": 1}',
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 30
    while not list(tmp_path.glob("*/003/metrics.jsonl")):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    process.wait()
    [root] = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    folder = SweepFolder(root)
    begun = len(find(str(root))[1].jobs)
    assert begun < 8
    assert toy.go_on(folder, ["curve"]) == 0
    assert toy.states(folder) == ["done"] * 8 and study(folder) == ["COMPLETE"] * 8
    assert [toy.starts(folder, i) for i in range(begun - 1)] == [1] * (begun - 1)
    assert toy.go_on(folder, ["curve"], trials=10) == 0  # a search can be made longer
    assert len(Record.read(folder)) == 10


def test_failures_are_told_and_a_second_try_counts(tmp_path: Path) -> None:
    folder, code = toy.search(tmp_path, ["curve", "raises"], trials=4, parallel=1)
    assert (code, toy.states(folder)) == (9, ["done", "failed"] * 2)
    assert study(folder) == ["COMPLETE", "FAIL"] * 2
    found, made = find(str(folder.root))
    wanted, options = toy.drive.Wanted(retry_failed=True), toy.SweepConfig.model_validate(made.options)
    assert toy.drive.resume(found, made, wanted, options, toy.command_of(found, ["curve"]), toy.propose) == 0
    assert sorted(study(folder)) == ["COMPLETE"] * 4 + ["FAIL"] * 2


def test_a_search_is_resumed_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = toy.search(tmp_path / "sweeps", ["curve"], trials=1)
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "resume", str(folder.root), "sweep.trials=2"]) == 2
    assert "resume it where it began: cd " in capsys.readouterr().err
