"""Mathematical equality by math-verify, in processes that can be killed at a time limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import EnvironmentProblem
from runner.reward.config import MathConfig
from runner.reward.group_scorer import (
    Group,
    GroupScorer,
    GroupScores,
    ScoringFailure,
    ScoringFailures,
    UnscorableError,
    require_column,
)
from runner.reward.worker_pool import CapturedOutput, FunctionTarget, WorkerPool, WorkerStartError

if TYPE_CHECKING:
    from runner.interfaces import Completion

EQUALITY = FunctionTarget(Path(__file__).with_name("equality.py"), "score", imports_siblings=False)


def build(config: MathConfig, *, folder: Path | None = None, **_: Any) -> GroupScorer:
    """Start the first process. Raises EnvironmentProblem if math-verify is missing or broken."""
    config.preflight()
    pool = WorkerPool(EQUALITY, config.workers, config.timeout_s, CapturedOutput("reward=math", folder))
    try:
        pool.start()
    except WorkerStartError as error:
        pool.close()
        raise EnvironmentProblem(f'math-verify cannot be used: {error}\n  pip install "posttrain-run[math]"') from error

    def one(completion: Completion) -> GroupScores:
        try:
            wanted = str(require_column(completion, config.column, "column"))
        except UnscorableError as reason:
            return GroupScores([None], (ScoringFailure(reason.kind, str(reason)),))
        return pool.call({"answers": [completion.text], "wanted": [wanted]}, 1, seed=0)

    def ask(group: Group) -> GroupScores:
        scored = [one(completion) for completion in group]
        return GroupScores([s.values[0] for s in scored], tuple(fault for s in scored for fault in s.failures))

    faults = ScoringFailures(
        "reward=math", config.max_failures, "set reward.column to a column of mathematical answers"
    )
    return GroupScorer(ask, faults, pool.workers, pool.close)
