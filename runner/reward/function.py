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
from runner.run_dir.user_files import original_path
from runner.user_code.process import CapturedOutput, FunctionTarget, WorkerStartError

if TYPE_CHECKING:
    from runner.interfaces import Decide


def build(
    config: FunctionConfig, *, seed: int, decide: Decide, steps: int = 0, folder: Path | None = None, **_: Any
) -> GroupScorer:
    """Start the first worker. Raises SpecError if the file or the function is missing or does not import.

    steps: of the job; folder: where reward.log is kept, with what the function prints and logs, and full tracebacks
    """
    config.preflight()
    source = config.file.resolve()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    file = original_path(source)
    path = f"{file}:{config.function}"
    decide("reward.path", path, path, f"sha256 {digest}")
    label = f"{file.name}:{config.function}"
    pool = WorkerPool(
        FunctionTarget(file, config.function, env=config.env, copy=source),
        config.workers,
        config.timeout_s,
        CapturedOutput(label, None if folder is None else folder / "reward.log"),
    )
    try:
        pool.start()
    except WorkerStartError as error:
        pool.close()
        raise SpecError([Problem("reward.path", f"{file} cannot be used: {error}; fix the file")]) from error

    def ask(group: Group) -> GroupScores:
        given = reward_arguments(group)
        own = derive_seed(seed, "reward", hashlib.sha256(encode_json(given)).hexdigest())
        state = {"global_step": group[0].step, "max_steps": steps}
        return pool.call(given | {"trainer_state": state}, len(group), own)

    return GroupScorer(ask, ScoringFailures(label, config.max_failures, f"fix {file}"), pool.workers, pool.close)
