"""Whole jobs on several ranks against one process: what they measure, learn and become, for each way of learning.

As `run` builds them: sampling, rewards, environments, references, evaluation and the feed's thread are shared out too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.algorithm.preferences import model
from tests.parallelism.jobs import in_one, on_ranks
from tests.parallelism.test_learning import difference

SMALL = (
    "model=tiny model.hidden_size=32 model.intermediate_size=48 model.layers=2 model.kv_heads=2 data=demo "
    "data.items=64 data.held_out=6 steps=3 optimizer=sgd optimizer.lr=0.1 tracker=none checkpoint.every=0 "
    "evaluation.max_new_tokens=8"
)
SAMPLED = "sampler=torch sampler.max_new_tokens=6 algorithm.batch_size=3 sampler.stop_token_ids=" + str(
    list(range(0, 512, 3))  # or a fresh model's answers were equally long
).replace(" ", "")
REWARDED = "reward=length reward.target=4"
# Bounds on relative L2 differences: of the first update's gradients, and of the weights at the end. Measured: 2.5e-6
# (rm, a loss of differences of scores; the others 3e-7) and 3e-8.
GRADIENTS, WEIGHTS = 1e-5, 1e-6
# Counts of numbers on one side of a bound, where the last bit decides, such as the margins of DPO's first step, which
# are 0; and the sampler's difference to the trainer, which is nothing but rounding.
UNSTEADY = ("accuracy", "critic/clip_frac", "logprob_diff", "prob_diff", "mismatch/kl")
FAST = {
    "sft": "algorithm=sft algorithm.batch_size=6 algorithm.mini_batches=3 algorithm.micro_batch_tokens=40 adapter=lora "
    "evaluation.every=2",
    "dpo": "algorithm=dpo algorithm.batch_size=3 algorithm.reference=cached evaluation.every=2",
    "kto": "algorithm=kto algorithm.batch_size=5 evaluation.every=0",
    "tools": "algorithm=grpo algorithm.group_size=3 data.task=sum environment=calculator evaluation.every=2",
    "ppo": "algorithm=ppo algorithm.mini_batches=3 evaluation.every=0",
}
SLOW = {
    "padded": "algorithm=sft algorithm.batch_size=6 model.batch_layout=padded evaluation.every=2",
    "cpt": "algorithm=cpt algorithm.batch_size=2 evaluation.every=2",
    "rm": "algorithm=rm algorithm.batch_size=3 evaluation.every=2",
    "dpo_lora": "algorithm=dpo algorithm.batch_size=4 algorithm.mini_batches=2 adapter=lora evaluation.every=2",
    "copied": "algorithm=kto algorithm.batch_size=4 algorithm.reference=copy evaluation.every=2",
    "resampled": "algorithm=dapo algorithm.group_size=2 evaluation.every=2",
    "ahead": "algorithm=grpo algorithm.group_size=4 algorithm.lag=1 algorithm.kl_estimator=k3 algorithm.kl_coef=0.1 "
    "evaluation.every=2",
    "lora": "algorithm=grpo algorithm.group_size=4 adapter=lora algorithm.mini_batches=3 evaluation.every=0",
    "whitened": "algorithm=reinforce_pp algorithm.group_size=2 evaluation.every=0",
    "opd": "algorithm=opd algorithm.teacher=teacher evaluation.every=0",
    "distill": "algorithm=distill algorithm.teacher=teacher algorithm.batch_size=3 evaluation.every=2",
    "shared": "algorithm=ppo algorithm.critic=shared evaluation.every=0",
    **FAST,
}


def compare(
    size: int,
    words: str,
    root: Path,
    *spread: str,
    gradients: float = GRADIENTS,
    kind: str = "tiny",
) -> None:
    """In `root`, the working folder, where a teacher is put if one is asked for; `spread` says how, else by copies."""
    name = words.split()[0].removeprefix("algorithm=")
    sampled = SAMPLED if name in ("grpo", "dapo", "ppo", "reinforce_pp", "opd") else ""
    rewarded = REWARDED if sampled and name != "opd" else ""
    if "teacher" in words:
        model(9).save(root / "teacher")
    typed = " ".join((SMALL.replace("model=tiny", f"model={kind}"), sampled, rewarded, words)).split()
    wanted, found = in_one(typed, root / "one"), on_ranks(size, [*typed, *spread], root / "several")
    unseen = "router/" if "parallelism=cp" in spread else ()  # not measured where ranks share tokens
    reached = {name: one for rank in found for name, one in rank["gradients"].items()}
    for rank in found:
        assert all(torch.equal(rank["weights"][name], one) for name, one in found[0]["weights"].items())
        assert difference(reached | rank["gradients"], wanted["gradients"]) < gradients  # a stage has its own layers'
        assert difference(rank["weights"], wanted["weights"]) < WEIGHTS
        for mine, other in zip(rank["steps"], wanted["steps"], strict=True):
            seen = {name: value for name, value in other.items() if not name.startswith(unseen)}
            assert mine.keys() == seen.keys()
            steady = {name: value for name, value in seen.items() if not name.endswith(UNSTEADY)}
            assert {name: mine[name] for name in steady} == pytest.approx(steady, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("words", FAST.values(), ids=FAST.keys())
def test_two_ranks_do_what_one_does(words: str, workdir: Path) -> None:
    compare(2, words, workdir)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_two_ranks_on_a_quantized_base_do_what_one_does(scheme: str, workdir: Path) -> None:
    if scheme == "nf4":
        pytest.importorskip("bitsandbytes")
    compare(2, f"{FAST['sft']} model.quantization={scheme}", workdir)


@pytest.mark.slow
@pytest.mark.parametrize("words", SLOW.values(), ids=SLOW.keys())
def test_four_ranks_do_what_one_does(words: str, workdir: Path) -> None:
    compare(4, words, workdir)
