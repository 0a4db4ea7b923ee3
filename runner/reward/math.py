"""Mathematical equality by math-verify, in processes that can be killed: its own time limit makes an answer wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import EnvironmentProblem
from runner.reward.config import MathConfig
from runner.reward.output import Output
from runner.reward.pool import CannotStart, Pool, Target
from runner.reward.scorer import Fault, Faults, Group, Scored, Scorer, Unscorable, column

if TYPE_CHECKING:
    from runner.interfaces import Completion

EQUALITY = Target(Path(__file__).with_name("equality.py"), "score", here=False)


def build(config: MathConfig, *, folder: Path | None = None, **_: Any) -> Scorer:
    """Start the first process. Raises EnvironmentProblem if math-verify is missing or broken."""
    config.preflight()
    pool = Pool(EQUALITY, config.workers, config.timeout_s, Output("reward=math", folder))
    try:
        pool.start()
    except CannotStart as error:
        pool.close()
        raise EnvironmentProblem(f'math-verify cannot be used: {error}\n  pip install "posttrain-run[math]"') from error

    def one(completion: Completion) -> Scored:
        try:
            wanted = str(column(completion, config.column, "column"))
        except Unscorable as reason:
            return Scored([None], (Fault(reason.kind, str(reason)),))
        return pool.call({"answers": [completion.text], "wanted": [wanted]}, 1, seed=0)

    def ask(group: Group) -> Scored:
        scored = [one(completion) for completion in group]
        return Scored([s.values[0] for s in scored], tuple(fault for s in scored for fault in s.faults))

    faults = Faults("reward=math", config.max_failures, "set reward.column to a column of mathematical answers")
    return Scorer(ask, faults, pool.workers, pool.close)
