"""algorithm.reference=cached as a whole: one model, the numbers of two, and a cache that outlives the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from runner import build
from runner.build import BuiltJob, precompute_reference
from runner.cli.job_builder import compose_job
from runner.cli.main import main
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.core.errors import CheckpointError
from runner.core.signals import StopSignal
from runner.interfaces import BaseCallback, StepResult
from runner.model import tiny
from runner.model.config import TinyConfig
from runner.run_dir.folder import RunFolder
from runner.spec.job import JobSpec
from runner.tracker.text import MACHINE_METRICS
from runner.trainer.loop import run_loop
from runner.trainer.reference_model import PrecomputedReference

SMALL = (
    "model=tiny",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.layers=2",
    "data=demo",
    "data.items=40",
    "data.held_out=6",
    "algorithm.batch_size=8",
    "evaluation.every=3",
    "evaluation.max_new_tokens=2",
    "optimizer.lr=1e-3",
    "tracker=none",
)
CACHED = "algorithm.reference=cached"
OWN_DATA = ("data=file", "data.max_length=256")
Row = dict[str, float]


@pytest.fixture(autouse=True)
def cache(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache of this test; at its end the files that an unfinished attempt holds are closed."""
    monkeypatch.setenv("RUNNER_CACHE", str(workdir / "cache"))
    yield workdir / "cache"
    for attempt in Attempt.unfinished:
        for callback in attempt.built.job.callbacks:
            callback.on_end()
    Attempt.unfinished.clear()


@lru_cache
def spec_of(words: tuple[str, ...]) -> JobSpec:
    """A small job's spec; the last word on an option counts."""
    chosen = dict(word.split("=", 1) for word in (*SMALL, *words))
    if chosen["data"] == "file":
        del chosen["data.items"], chosen["data.held_out"]
    return compose_job([f"{key}={value}" for key, value in chosen.items()]).spec


class Attempt:
    """A job built in a folder of its own: what it said, and the numbers of its steps."""

    unfinished: ClassVar[list[Attempt]] = []

    def __init__(self, where: str, *words: str) -> None:
        self.spec = spec_of(words)
        self.said, self.rows = Decisions(strict=False), list[Row]()
        folder = RunFolder(Path(where).absolute())
        folder.root.mkdir(exist_ok=True)
        store = build.build_store(self.spec, folder)
        outlets = build.OutputSinks([self._keep], self._pass, self._pass, lambda line: None)
        self.built: BuiltJob = build.build(self.spec, folder, store, self.said, StopSignal(), outlets)

    def _keep(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append({k: v for k, v in values.items() if not k.startswith(MACHINE_METRICS)})

    def _pass(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Samples, which nobody reads."""

    def run(self, first: int = 0) -> list[Row]:
        self.unfinished.append(self)
        run_loop(self.built.job, first)
        self.unfinished.remove(self)
        return self.rows

    @property
    def reference(self) -> Any:
        return self.built.job.models["reference"]

    @property
    def words(self) -> list[str]:
        """What was said of the reference."""
        return [f"{d.got}: {d.reason}" for d in self.said.entries if d.feature == "algorithm.reference"]


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_numbers_are_those_of_a_reference_that_is_asked_in_each_step(algorithm: str, adapter: str) -> None:
    """Bit for bit in the first epoch (5 steps of 8 items), to rounding in the others, whose batches are new."""
    words = [f"algorithm={algorithm}", f"adapter={adapter}", "steps=6", "algorithm.mini_batches=2"]
    wanted, cached = Attempt("one", *words), Attempt("two", *words, CACHED)
    assert cached.reference.model is cached.built.model, "there is one model"
    assert (wanted.reference.model is wanted.built.model) == (adapter == "lora")
    rows, found = wanted.run(), cached.run()
    assert found[:5] == rows[:5] and "eval/loss" in found[5]
    for row, other in zip(rows[5:], found[5:], strict=True):
        assert other == pytest.approx(row, rel=1e-3, abs=1e-5)


def test_a_second_run_computes_nothing_and_more_epochs_use_the_same(cache: Path) -> None:
    assert Attempt("one", "algorithm=dpo", "steps=5", CACHED).words[0].startswith("cached: 46 items computed in ")
    for number, words in enumerate((["steps=5"], ["steps=50"], ["seed=0", "steps=2", "evaluation.every=1"])):
        [said] = Attempt(f"again{number}", "algorithm=dpo", CACHED, *words).words
        assert said.startswith("cached: all items were in the cache; ")
    [folder] = (cache / "reference").iterdir()
    assert len(list(folder.iterdir())) == 1
    [more] = Attempt("fewer", "algorithm=dpo", "steps=1", "algorithm.share_prompts=false", CACHED).words
    assert more.startswith("cached: 14 items computed"), "another structure is another unit"


@pytest.mark.parametrize(
    "words",
    [
        ["seed=1"],
        ["model.batch_layout=padded"],
        ["model.dtype=bfloat16"],
        ["adapter=lora", "model.quantization=int8"],
    ],
)
def test_a_model_that_computes_otherwise_has_a_cache_of_its_own(words: list[str], cache: Path) -> None:
    for where, more in (("one", []), ("two", words)):
        [said] = Attempt(where, "algorithm=dpo", "steps=1", "evaluation.every=0", CACHED, *more).words
        assert said.startswith("cached: 8 items computed")
    assert len(list((cache / "reference").iterdir())) == 2


def key_of(*words: str, model: Any = None, facts: Mapping[str, Any] | None = None) -> str:
    """The key of a cache: of a job, of a model that is built, and of what a device says of itself."""
    spec = spec_of(("algorithm=dpo", *words))
    device: Any = SimpleNamespace(describe=lambda: facts or {"device": "cuda", "card": "A"})
    return precompute_reference._cache_key(spec, model or small(), {"weights": "1"}, device)


def small(**options: Any) -> Any:
    config = TinyConfig(hidden_size=32, intermediate_size=48, layers=1, **options)
    own = tiny.tokenizer(config)
    return tiny.build(config, tokenizer=own, device=torch.device("cpu"), seed=0, decide=Decisions())


def test_what_the_device_computes_with_is_in_the_key_and_what_moves_the_last_bits_is_not() -> None:
    one = key_of("device=cuda")
    assert key_of("device=cuda", facts={"device": "cuda", "card": "A", "threads": 3}) == one
    others = [
        key_of("device=cuda", "device.tf32=false"),
        key_of("device=cuda", "device.attention=sdpa"),
        key_of("device=cuda", facts={"device": "cuda", "card": "B"}),
        key_of("device=npu", "device.fused_ops=[]"),
        key_of("device=npu"),
        key_of("device=cuda", model=small(heads=2, kv_heads=2)),
        key_of("device=cuda", "adapter=lora"),
        key_of("device=cuda", "adapter=lora", "model.quantization=nf4"),
        key_of("device=cuda", "adapter=lora", "model.quantization=int8"),
        key_of("device=cuda", "model.head_dtype=float32"),
        key_of("device=cuda", "model.kernels=liger"),
        key_of("device=cuda", "model.kernels=liger", "device.tf32=false"),
    ]
    assert len({one, *others}) == 1 + len(others)
    assert key_of("device=cpu", "device.threads=2") == key_of("device=cpu")


def test_a_row_more_is_one_item_to_score(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n}?", "chosen": f" {n}.", "rejected": " No."} for n in range(6)]
    path = tmp_path / "pairs.jsonl"
    for count, scored in ((5, 5), (6, 1)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
        words = [f"data.path={path}", f"algorithm.batch_size={count}", "evaluation.every=0", "data.cache=false"]
        [said] = Attempt(f"of{count}", "algorithm=dpo", "steps=1", CACHED, *OWN_DATA, *words).words
        assert said.startswith(f"cached: {scored} item")


def test_what_was_computed_before_an_interruption_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    learn, calls = PrecomputedReference.precompute, iter(range(3))

    def interrupted(self: PrecomputedReference, batch: Batch) -> int:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return learn(self, batch)

    monkeypatch.setattr(PrecomputedReference, "precompute", interrupted)
    words = ["algorithm=dpo", "steps=5", "evaluation.every=0", CACHED]
    with pytest.raises(KeyboardInterrupt):
        Attempt("one", *words)
    monkeypatch.setattr(PrecomputedReference, "precompute", learn)
    [said] = Attempt("two", *words).words
    assert said.startswith("cached: 16 items computed")


def test_what_was_computed_reaches_the_disk_before_the_end(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a process that is killed outright loses little."""
    monkeypatch.setattr(precompute_reference, "WRITE_EVERY_S", 0.0)
    Attempt("one", "algorithm=dpo", "steps=5", "evaluation.every=0", CACHED)
    assert len(list((cache / "reference").glob("*/*.safetensors"))) == 5


def test_the_cache_may_be_deleted_while_a_run_computes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["algorithm=dpo", "steps=2", "evaluation.every=0"]
    wanted, learn = Attempt("one", *words).run(), PrecomputedReference.precompute

    def deleted(self: PrecomputedReference, batch: Batch) -> int:
        found = learn(self, batch)
        self.cache.write()
        shutil.rmtree(cache)
        return found

    monkeypatch.setattr(PrecomputedReference, "precompute", deleted)
    assert Attempt("two", *words, CACHED).run() == wanted


def test_an_adapter_shares_the_cache_of_its_base() -> None:
    Attempt("one", "algorithm=dpo", "steps=2", CACHED)
    [said] = Attempt("two", "algorithm=dpo", "steps=2", CACHED, "adapter=lora").words
    assert said.startswith("cached: all items were in the cache")


def test_a_damaged_file_is_computed_again_and_said(cache: Path) -> None:
    words = ["algorithm=dpo", "steps=2", CACHED]
    wanted = Attempt("one", *words).run()
    [path] = (cache / "reference").glob("*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-8])
    again = Attempt("two", *words)
    assert [line.partition(":")[0] for line in again.words] == ["computed again", "cached"]
    assert path.name in again.words[0] and again.words[1].startswith("cached: 22 items computed")
    assert again.run() == wanted and path.exists()


class Stop(BaseCallback):
    """Ends a run after a step, with the state that a checkpoint would hold."""

    def __init__(self, attempt: Attempt, after: int) -> None:
        self.attempt, self.after, self.state = attempt, after, dict[str, Any]()

    def on_step(self, end: StepResult) -> None:
        if end.step == self.after:
            sections = self.attempt.built.sections
            self.state = {n: part.state_dict() for n, part in sections.items()}
            self.state["identity"] = dict(self.attempt.built.identity)
            raise KeyboardInterrupt


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_resumed_run_is_the_same_bit_for_bit_even_without_its_cache(adapter: str, cache: Path) -> None:
    """What is computed again is of the model that the run began with, and not of the checkpoint's."""
    words = ["algorithm=dpo", "steps=6", f"adapter={adapter}", CACHED]
    wanted = Attempt("one", *words).run()
    broken = Attempt("two", *words)
    stop = Stop(broken, 3)
    broken.built.job.callbacks.append(stop)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    for path in (cache / "reference").glob("*/*"):
        path.unlink()
    resumed = Attempt("three", *words)
    tensors = stop.state["policy"]["tensors"]
    stop.state["policy"]["tensors"] = {name: tensor.clone() for name, tensor in tensors.items()}
    resumed.built.restore(stop.state)
    assert resumed.run(3) == wanted[3:]


def test_a_run_does_not_go_on_with_the_reference_of_another_model() -> None:
    one, other = (Attempt(name, "algorithm=dpo", "steps=1", CACHED, f"seed={n}") for n, name in enumerate(("a", "b")))
    assert isinstance(one.reference, PrecomputedReference) and torch.is_tensor(one.built.model.module.lm_head.weight)
    state = {"identity": {**other.built.identity, "data": one.built.identity["data"]}}
    with pytest.raises(CheckpointError, match=r"another model: random weights \(seed, options of model\): was"):
        one.built.restore(state)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm=dpo", "algorithm.loss=simpo"], "algorithm.loss=simpo has no reference model; leave it out"),
        (
            ["algorithm=grpo", "sampler=torch", "reward=exact", "algorithm.kl_estimator=k3"],
            "algorithm.reference: expected",
        ),
        (["algorithm=sft"], "algorithm.reference: not an option of algorithm=sft"),
    ],
)
def test_where_nothing_can_be_known_beforehand_it_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *words, CACHED]) == 2
    assert said in capsys.readouterr().err
