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
from runner.reward.worker_pool import CapturedOutput, FunctionTarget, WorkerPool, WorkerStartError

if TYPE_CHECKING:
    from runner.interfaces import Decide


def build(config: FunctionConfig, *, seed: int, decide: Decide, folder: Path | None = None, **_: Any) -> GroupScorer:
    """Start the first worker. Raises SpecError if the file or the function is missing or does not import.

    folder: where reward.log is kept, with what the function prints and full tracebacks
    """
    config.preflight()
    file = config.file.resolve()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    decide("reward.path", config.path, config.path, f"sha256 {digest}")
    label = f"{file.name}:{config.function}"
    pool = WorkerPool(
        FunctionTarget(file, config.function, env=config.env),
        config.workers,
        config.timeout_s,
        CapturedOutput(label, folder),
    )
    try:
        pool.start()
    except WorkerStartError as error:
        pool.close()
        raise SpecError([Problem("reward.path", f"{file} cannot be used: {error}; fix the file")]) from error

    def ask(group: Group) -> GroupScores:
        given = reward_arguments(group)
        return pool.call(given, len(group), derive_seed(seed, "reward", hashlib.sha256(encode_json(given)).hexdigest()))

    return GroupScorer(ask, ScoringFailures(label, config.max_failures, f"fix {file}"), pool.workers, pool.close)
