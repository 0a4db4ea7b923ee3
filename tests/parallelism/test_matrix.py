"""Every layout that fits four ranks, for every algorithm, all weights and LoRA, as whole jobs of three steps to their
export, against one process. A cover of it is in `make test-all`, all of it, on several families, in `make soak`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from runner.core.errors import SpecError
from tests.model import zoo
from tests.parallelism.jobs import in_one, on_ranks, spec_of
from tests.parallelism.test_jobs import REWARDED, UNSTEADY
from tests.parallelism.test_learning import difference

LAYOUTS = {
    "dp4": "parallelism=ddp",
    "fsdp4": "parallelism=fsdp",
    "hsdp2x2": "parallelism=hsdp",
    "tp4": "parallelism=tp",
    "tp2xfsdp2": "parallelism=fsdp parallelism.tp=2",
    "tp2xdp2": "parallelism=ddp parallelism.tp=2",
    "ulysses4": "parallelism=cp parallelism.cp_backend=ulysses",
    "ring4": "parallelism=cp parallelism.cp_backend=ring",
    "cp2xdp2": "parallelism=ddp parallelism.cp=2",
    "cp2xfsdp2": "parallelism=fsdp parallelism.cp=2",
    "cp2xtp2": "parallelism=cp parallelism.tp=2",
    "pp4": "parallelism=pp",
    "pp2x2xdp2": "parallelism=ddp parallelism.pp=2 parallelism.pp_virtual_stages=2",
    "pp2xfsdp2": "parallelism=fsdp parallelism.pp=2",
    "pp2xtp2": "parallelism=pp parallelism.tp=2",
    "pp2xcp2": "parallelism=pp parallelism.cp=2",
    "ep4": "parallelism=ep",
    "ep2xdp2": "parallelism=ep parallelism.ep=2",
    "ep2xfsdp4": "parallelism=fsdp parallelism.ep=2",
    "ep2xpp2": "parallelism=ep parallelism.pp=2",
}
ENDS = str(list(range(0, zoo.VOCAB, 3))).replace(" ", "")  # or a fresh model's answers were equally long
SAMPLED = f"sampler=torch sampler.max_new_tokens=6 sampler.stop_token_ids={ENDS} algorithm.batch_size=3"
FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
ALGORITHMS = {
    "sft": "algorithm=sft algorithm.batch_size=6 algorithm.mini_batches=2 algorithm.micro_batch_tokens=40",
    "dpo": "algorithm=dpo algorithm.batch_size=4",
    "grpo": f"algorithm=grpo algorithm.group_size=3 {SAMPLED} {REWARDED}",
    "ppo": f"algorithm=ppo algorithm.mini_batches=3 {SAMPLED} {REWARDED}",
    "cpt": "algorithm=cpt algorithm.batch_size=2",
    "rm": "algorithm=rm algorithm.batch_size=3",
    "kto": "algorithm=kto algorithm.batch_size=5",
    "opd": f"algorithm=opd algorithm.teacher=TEACHER {SAMPLED}",
    "distill": "algorithm=distill algorithm.teacher=TEACHER algorithm.batch_size=3",
}
ADAPTERS = {"full": "adapter=none", "lora": "adapter=lora adapter.targets=[q_proj,v_proj]"}
COMMON = (
    "data=demo data.items=64 data.held_out=6 steps=3 optimizer=sgd optimizer.lr=0.01 tracker=none checkpoint.every=0 "
    "evaluation.every=0"
)
# Relative L2 differences in float32, of the first update's gradients, and of the weights at the end. A loss of whitened
# advantages is a small difference of large sums, so that single numbers have an absolute bound, too.
GRADIENTS, WEIGHTS = 1e-4, 1e-5
Case = tuple[str, str, str, str]
REFUSED = {("pp2x2xdp2", "distill"): "parallelism.pp_virtual_stages: distill runs its teacher between its own passes"}


def cases() -> Iterator[Case]:
    """The first four algorithms on every family, the others on one, in turn."""
    for number, (layout, algorithm, adapter) in enumerate(product(LAYOUTS, ALGORITHMS, ADAPTERS)):
        own = number // 2 % len(FAMILIES)
        if (layout, algorithm) in REFUSED:
            continue
        families = FAMILIES if algorithm in list(ALGORITHMS)[:4] else FAMILIES[own : own + 1]
        for family in ("qwen3_moe",) if layout.startswith("ep") else families:
            yield layout, family, algorithm, adapter


def cover() -> Iterator[Case]:
    """Each layout twice, each algorithm with each adapter; families in turn."""
    for number, layout in enumerate(LAYOUTS):
        for turn, adapter in enumerate(ADAPTERS):
            family = "qwen3_moe" if layout.startswith("ep") else FAMILIES[(number + turn) % len(FAMILIES)]
            yield layout, family, list(ALGORITHMS)[(number + 4 * turn) % len(ALGORITHMS)], adapter


class Alone:
    """What one process comes to, found once for each job."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[tuple[str, ...], dict[str, Any]] = {}

    def words(self, family: str, algorithm: str, adapter: str) -> list[str]:
        folder, teacher = self.root / family, self.root / f"{family}-teacher"
        if not folder.exists():
            for seed, one in enumerate((folder, teacher)):
                zoo.causal(family, seed=seed, num_hidden_layers=4, num_key_value_heads=4).save(one)
        chosen = ALGORITHMS[algorithm].replace("TEACHER", str(teacher))
        return f"model=hf model.path={folder} {COMMON} {chosen} {ADAPTERS[adapter]}".split()

    def found(self, *job: str) -> dict[str, Any]:
        if job not in self.known:
            self.known[job] = in_one(self.words(*job), self.root / "-".join(job))
        return self.known[job]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    root = tmp_path_factory.mktemp("matrix")
    yield Alone(root)
    shutil.rmtree(root)


NO_ROUTER_METRICS = ("pp", "cp", "ulysses", "ring")  # layouts in which no rank has all tokens of all layers


def compare(alone: Alone, layout: str, *job: str) -> None:
    wanted = alone.found(*job)
    found = on_ranks(4, [*alone.words(*job), *LAYOUTS[layout].split()], alone.root / "-".join((layout, *job)))
    assert difference(found[0]["export"], wanted["export"]) < WEIGHTS
    reached = {name: one for rank in found for name, one in rank["gradients"].items()}
    for rank in found:
        assert difference(reached | rank["gradients"], wanted["gradients"]) < GRADIENTS  # a stage has its own layers'
        assert difference(rank["weights"], wanted["weights"]) < WEIGHTS
        for mine, other in zip(rank["steps"], wanted["steps"], strict=True):
            unseen = "router/" if any(part in layout for part in NO_ROUTER_METRICS) else "-"
            steady = {k: v for k, v in other.items() if not k.endswith(UNSTEADY) and not k.startswith(unseen)}
            assert {name: mine[name] for name in steady} == pytest.approx(steady, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(cover()), ids="-".join)
def test_a_layout_does_what_one_process_does(case: Case, alone: Alone, workdir: Path) -> None:
    compare(alone, *case)


@pytest.mark.parametrize("case", REFUSED, ids="-".join)
def test_what_does_not_go_together_is_said(case: tuple[str, str], tmp_path: Path) -> None:
    layout, algorithm = case
    with pytest.raises(SpecError, match=REFUSED[case]):
        spec_of([*Alone(tmp_path).words("qwen2", algorithm, "full"), *LAYOUTS[layout].split()], 4)


@pytest.mark.soak
@pytest.mark.parametrize("case", [case for case in cases() if case not in list(cover())], ids="-".join)
def test_every_layout_does_what_one_process_does(case: Case, alone: Alone, workdir: Path) -> None:
    compare(alone, *case)
