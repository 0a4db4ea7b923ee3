"""How far the sampler's log-probabilities are from the trainer's: data types, float32 heads and replayed experts.

Random weights, which are not trained; vLLM needs an environment, whose Python is named with --vllm.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import report

from parts import jobs
from parts.plan import Plan

MODELS = {"dense": "tiny", "experts": "tiny_moe"}
HALF, HEAD = "model.dtype=bfloat16", "model.head_dtype=float32"
CASES = {  # of either sampler: what is shown, and its options
    "float32": "model.dtype=float32",
    "bfloat16": HALF,
    "bfloat16, float32 head": f"{HALF} {HEAD}",
}
REPLAY = "model.router_replay=sampler"
JOB = (
    "algorithm=grpo model.layers=4 model.hidden_size=128 model.heads=4 data=demo data.max_length=128 reward=rehearsal "
    "optimizer.lr=1e-9 algorithm.batch_size=4 algorithm.group_size=4 sampler.max_new_tokens=32 steps=5"
)


def measure(at: Plan) -> dict[str, Any]:
    """Model, sampler, data type → rounds."""
    found = {}
    for (kind, name), (case, words) in product(MODELS.items(), CASES.items()):
        job = f"{JOB} model={name} {words}"
        arms = {f"{kind}, torch, {case}": f"{job} sampler=torch"}
        if kind == "experts":
            arms = {label: f"{words} model.router_replay=off" for label, words in arms.items()}
            arms[f"{kind}, torch, {case}, replay"] = f"{job} sampler=torch {REPLAY}"
        found |= jobs.side_by_side(arms, at, sys.executable)
        if at.vllm and kind == "dense":  # on the CPU it keeps the first weights of experts
            match = "sampler.match=fp32_head" if HEAD in words else ""
            found |= jobs.side_by_side({f"{kind}, vllm, {case}": f"{job} sampler=vllm {match}"}, at, at.vllm)
    return found


def show(measured: dict[str, Any]) -> str:
    """The largest of all rounds."""
    names = ("mismatch/kl", "mismatch/logprob_diff", "router/replay_diff_frac")
    rows = [
        (arm, *(f"{max(one[name] for one in rounds):.1e}" if name in rounds[0] else "" for name in names))
        for arm, rounds in measured.items()
    ]
    return report.table(("model, sampler, data type", "KL", "log-probabilities", "other experts"), rows)


def problems(measured: dict[str, Any]) -> list[str]:
    """Replayed experts that do not bring the two closer together."""
    found = []
    for arm, rounds in measured.items():
        if arm.endswith(", replay") and "bfloat16" in arm:
            own = measured[arm.removesuffix(", replay")]
            pairs = zip(rounds, own, strict=True)
            found += [f"{arm}: not closer" for one, base in pairs if one["mismatch/kl"] >= base["mismatch/kl"]]
    return found
