"""vLLM on the processor against the sampler in plain PyTorch: the same job, tokens per second of sampling.

Needs an environment with vLLM, whose Python is named with --vllm (`make test-vllm` makes one).
"""

from __future__ import annotations

from typing import Any

import report

from parts import jobs, plan
from parts.plan import Plan

TORCH, VLLM = "torch", "vllm"
STEPS, QUICK_STEPS = 8, 5
CASES = {
    "1 M, 64 answers of 64": "algorithm.batch_size=8 algorithm.group_size=8 sampler.max_new_tokens=64",
    "4 M, 64 answers of 64": (
        "algorithm.batch_size=8 algorithm.group_size=8 sampler.max_new_tokens=64 model.hidden_size=256 "
        "model.intermediate_size=768"
    ),
    "1 M, 256 answers of 32": "algorithm.batch_size=32 algorithm.group_size=8 sampler.max_new_tokens=32",
}
JOB = "algorithm=grpo model=tiny model.layers=4 data=demo data.max_length=128 reward=rehearsal optimizer.lr=1e-6"


def measure(at: Plan) -> dict[str, Any]:
    """Case → arm → rounds; nothing without an environment."""
    if not at.vllm:
        plan.say("vLLM is not measured: --vllm PYTHON names an environment that has it")
        return {}
    steps = QUICK_STEPS if at.quick else STEPS
    found = {}
    for name in list(CASES)[: 1 if at.quick else None]:
        plan.say(f"vLLM against torch: {name}")
        arms = {arm: f"{JOB} {CASES[name]} steps={steps} sampler={arm}" for arm in (TORCH, VLLM)}
        found[name] = jobs.side_by_side(arms, at, at.vllm)
    return found


def show(measured: dict[str, Any]) -> str:
    """Tokens for a second of collecting, and how far the reported log-probabilities are from the trainer's."""
    rows = []
    for case, arms in measured.items():
        for arm, rounds in arms.items():
            speeds = [rate(one) / rate(base) for one, base in zip(rounds, arms[TORCH], strict=True)]
            speed = sorted(map(rate, rounds))[len(rounds) // 2]
            off = max(one["mismatch/logprob_diff"] for one in rounds)
            rows.append((f"{case}: {arm}", f"{speed:.0f}", plan.shown(speeds) if arm == VLLM else "", f"{off:.1e}"))
    return report.table(("model, answers", "tokens/s", "times torch", "off the trainer"), rows) if rows else "no vLLM"


def rate(one: dict[str, float]) -> float:
    """Tokens for a second in which they, and their rewards, were waited for."""
    return one["rollout/tokens"] / one["time/data_wait_s"]


def problems(measured: dict[str, Any]) -> list[str]:
    """Log-probabilities that are not the trainer's."""
    return [
        f"{case}, {arm}: reported log-probabilities are off by {one['mismatch/logprob_diff']:.1e}"
        for case, arms in measured.items()
        for arm, rounds in arms.items()
        for one in rounds
        if not one["mismatch/logprob_diff"] < 1e-4
    ]
