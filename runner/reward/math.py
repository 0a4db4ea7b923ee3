"""Mathematical equality by math-verify, in processes that can be killed at a time limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import EnvironmentProblem
from runner.interfaces.rewards import GroupScorer, ScoringFailures, UnscorableError, require_text, score_each
from runner.reward.config import MathConfig
from runner.reward.worker_pool import WorkerPool
from runner.user_code.process import CapturedOutput, FunctionTarget, WorkerStartError

if TYPE_CHECKING:
    from runner.interfaces import Completion

EQUALITY = FunctionTarget(Path(__file__).with_name("equality.py"), "score", imports_siblings=False)


def build(config: MathConfig, *, folder: Path | None = None, **_: Any) -> GroupScorer:
    """Start the first process. Raises EnvironmentProblem if math-verify is missing or broken."""
    config.preflight()
    log = None if folder is None else folder / "reward.log"
    pool = WorkerPool(EQUALITY, config.workers, config.timeout_s, CapturedOutput("reward=math", log))
    try:
        pool.start()
    except WorkerStartError as error:
        pool.close()
        raise EnvironmentProblem(f'math-verify cannot be used: {error}\n  pip install "posttrain-run[math]"') from error

    def rate(completion: Completion) -> float:
        wanted = require_text(completion, config.column, "column")
        scored = pool.call({"answers": [completion.text], "wanted": [wanted]}, 1, seed=0)
        for failure in scored.failures:
            raise UnscorableError(failure.kind, failure.message)
        [value] = scored.values
        assert value is not None  # it has a score or a failure
        return float(value)

    remedy = "set reward.column to a column of mathematical answers"
    failures = ScoringFailures("reward=math", config.max_failures, remedy)
    return GroupScorer(score_each(rate), failures, pool.workers, pool.close)
