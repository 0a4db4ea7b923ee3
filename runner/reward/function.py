"""A user's reward function, as in TRL: score(prompts, completions, **columns) -> list[float | None].

It is called once per group, with keywords only, in processes of its own (`worker_pool.py`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import Problem, SpecError
from runner.core.rng import derive_seed
from runner.interfaces.rewards import Group, GroupScorer, GroupScores, ScoringFailures, encode_json, reward_arguments
from runner.reward.config import FunctionConfig
from runner.reward.worker_pool import WorkerPool
from runner.user_code.process import CapturedOutput, FunctionTarget, WorkerStartError

if TYPE_CHECKING:
    from runner.interfaces import Decide


def build(
    config: FunctionConfig, *, seed: int, decide: Decide, steps: int = 0, folder: Path | None = None, **_: Any
) -> GroupScorer:
    """Start the first worker. Raises SpecError if the file or the function is missing or does not import.

    steps: of the job; folder: where reward.log is kept, with what the function prints and logs, and full tracebacks
    """
    target = FunctionTarget.from_config(config, decide)
    output = CapturedOutput(target.label, None if folder is None else folder / "reward.log")
    pool = WorkerPool(target, config.workers, config.timeout_s, output)
    try:
        pool.start()
    except WorkerStartError as error:
        pool.close()
        raise SpecError([Problem("reward.path", f"{target.file} cannot be used: {error}; fix the file")]) from error

    def ask(group: Group) -> GroupScores:
        given = reward_arguments(group)
        own = derive_seed(seed, "reward", hashlib.sha256(encode_json(given)).hexdigest())
        state = {"global_step": group[0].step, "max_steps": steps}
        return pool.call(given | {"trainer_state": state}, len(group), own)

    failures = ScoringFailures(target.label, config.max_failures, f"fix {target.file}")
    return GroupScorer(ask, failures, pool.workers, pool.close)
