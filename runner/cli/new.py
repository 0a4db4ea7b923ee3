"""`run new KIND NAME`: write a package in ./NAME that adds a component, with a test.

`pip install ./NAME` installs it.

KIND ─▶ the texts below, with the name put in ─▶ NAME/pyproject.toml, NAME/run_NAME.py, NAME/test_run_NAME.py
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from string import Template
from typing import NamedTuple

from runner.cli.args import UsageError
from runner.spec import suggest
from runner.tracker.text import print_text

NAME = re.compile(r"[a-z][a-z0-9_]*")
PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "run-$dashed"
version = "0.1.0"
dependencies = ["posttrain-run"]

[project.entry-points."$group"]
$name = "$entry"
"""
HEAD = """from typing import Any, ClassVar, Literal

from pydantic import Field

"""


class Skeleton(NamedTuple):
    """A component that works: what its module and its test say, how it is found, and how it is tried."""

    module: str
    test: str
    try_it: str
    group: str = "runner.components"
    entry: str = "$module:${Name}Config"


REWARD = Skeleton(
    f'''"""The reward `$name`: the share of the expected words that an answer has."""

{HEAD}from runner.interfaces import Completion, GroupScorer, ScoringFailures, require_column, score_each
from runner.spec import RewardConfig


class ${{Name}}Config(RewardConfig):
    """The share of a column's words that the answer has."""

    factory: ClassVar[str] = "$module:build"
    name: Literal["$name"] = "$name"
    column: str = Field(default="answer", description="Column of the data with the expected words.")

    def required_columns(self) -> list[tuple[str, str]]:
        return [("reward.column", self.column)]


def build(config: ${{Name}}Config, **_: Any) -> GroupScorer:
    """The reward; a row without the column is not scored."""

    def rate(completion: Completion) -> float:
        words = str(require_column(completion, config.column, "column")).split()
        return sum(word in completion.text.split() for word in words) / max(len(words), 1)

    return GroupScorer(score_each(rate), ScoringFailures("reward=$name", 8, "set reward.column"))
''',
    """from $module import ${Name}Config

from runner.testing import check_reward


def test_reward() -> None:
    check_reward(${Name}Config(), {"4 5": 1.0, "4": 0.5, "": 0.0}, columns={"answer": "4 5"})
    check_reward(${Name}Config(), {"4": 0.0}, columns={"answer": ""})
""",
    "run +recipe=grpo_demo reward=$name",
)
ENVIRONMENT = Skeleton(
    f'''"""The environment `$name`: answers a guess."""

{HEAD}from runner.interfaces import EnvironmentFactory, Observation, Prompt
from runner.spec import EnvironmentConfig


class ${{Name}}Config(EnvironmentConfig):
    """Says that an answer is wrong, until it is right."""

    factory: ClassVar[str] = "$module:build"
    name: Literal["$name"] = "$name"
    max_turns: int = Field(default=4, ge=2, description="Most turns of the policy in one episode.")

    def most_turns(self) -> int:
        return self.max_turns


class ${{Name}}:
    def reset(self, prompt: Prompt) -> None:
        self._expected = str(prompt.columns["answer"])

    def step(self, answer: str) -> Observation | None:
        return None if answer == self._expected else Observation("tool", "wrong, try again")


def build(config: ${{Name}}Config, **_: Any) -> EnvironmentFactory:
    """An environment for each episode."""
    return EnvironmentFactory(${{Name}}, config.max_turns)
''',
    """from $module import ${Name}Config

from runner.interfaces import Observation
from runner.testing import check_environment


def test_environment() -> None:
    said = check_environment(${Name}Config(), ["3", "4"], columns={"answer": "4"})
    assert said == [Observation("tool", "wrong, try again")]
""",
    "run +recipe=grpo_demo environment=$name",
)
TRACKER = Skeleton(
    f'''"""The tracker `$name`: metrics in a CSV file."""

{HEAD}from runner.interfaces import RunFolder
from runner.spec import TrackerConfig


class ${{Name}}Config(TrackerConfig):
    """A CSV file in the run's folder."""

    factory: ClassVar[str] = "$module:${{Name}}"
    name: Literal["$name"] = "$name"
    file: str = Field(default="$name.csv", description="Name of the file.")


class ${{Name}}:
    def __init__(self, config: ${{Name}}Config, *, folder: RunFolder, **_: Any) -> None:
        self._file = (folder.root / config.file).open("a")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._file.writelines(f"{{step}},{{name}},{{value}}\\n" for name, value in metrics.items())

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """This file has numbers only."""

    def finish(self, status: str) -> list[str]:
        self._file.close()
        return [f"$name    {{self._file.name}}"]
''',
    """from $module import ${Name}Config

from runner.testing import check_tracker


def test_tracker() -> None:
    lines = check_tracker(${Name}Config())
    assert lines[0].endswith("$name.csv")
""",
    "run +recipe=sft_demo tracker=$name",
)
CALLBACK = Skeleton(
    f'''"""The callback `$name`: says when a metric falls below a bound."""

{HEAD}from runner.interfaces import BaseCallback, State, StepResult
from runner.spec import CallbackConfig


class ${{Name}}Config(CallbackConfig):
    """Says once that a metric is below a bound."""

    factory: ClassVar[str] = "$module:${{Name}}"
    name: Literal["$name"] = "$name"
    metric: str = Field(default="train/loss", description="Metric to watch.")
    below: float = Field(default=1.0, description="Bound.")


class ${{Name}}(BaseCallback):
    def __init__(self, config: ${{Name}}Config, **context: Any) -> None:
        self._config, self._say, self._reached = config, context["say"], False

    def on_step(self, end: StepResult) -> None:
        value = end.values.get(self._config.metric)
        if value is not None and value < self._config.below and not self._reached:
            self._reached = True
            self._say(f"{{self._config.metric}} is {{value:.4g}} at step {{end.step}}")

    def state_dict(self) -> State:
        return {{"reached": self._reached}}

    def load_state_dict(self, state: State) -> None:
        self._reached = state["reached"]
''',
    """from $module import ${Name}Config

from runner.testing import check_callback


def test_callback() -> None:
    callback = check_callback(${Name}Config(), values={"train/loss": 0.5})
    assert callback.state_dict() == {"reached": True}
""",
    "run +recipe=sft_demo callbacks=$name callbacks.$name.below=4",
)
OPTIMIZER = Skeleton(
    f'''"""The optimizer `$name`: NAdam of torch."""

{HEAD}from runner.spec import OptimizerConfig


class ${{Name}}Config(OptimizerConfig):
    """Adam with Nesterov momentum (Dozat, 2016)."""

    factory: ClassVar[str] = "$module:build"
    name: Literal["$name"] = "$name"
    momentum_decay: float = Field(default=4e-3, ge=0, description="Decay of the momentum's schedule.")


def build(config: ${{Name}}Config, *, parameters: dict[str, Any], decide: Any) -> Any:
    """The optimizer over `parameters`, name → parameter. The loop sets each group's lr before a step."""
    from torch.optim import NAdam  # here: every command imports this module

    options = {{"weight_decay": config.weight_decay, "momentum_decay": config.momentum_decay}}
    return NAdam(list(parameters.values()), lr=config.learning_rate, **options)
''',
    """from $module import ${Name}Config

from runner.testing import check_optimizer


def test_optimizer() -> None:
    check_optimizer(${Name}Config(lr=0.01))
""",
    "run +recipe=sft_demo optimizer=$name",
)
LOSS = Skeleton(
    '''"""The policy loss `$name`: PPO's clip in one direction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from runner.interfaces.losses import policy_loss, torch

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss("$name", paper="PPO 1707.06347", formula="−min(r, ${name}_high)·A")
def $name(
    ratio: Tensor,
    advantages: Tensor,
    *,
    ${name}_high: Annotated[float, Field(gt=1, description="Largest ratio that is rewarded")] = 1.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A ratio above the bound earns nothing where the advantage is positive."""
    loss = -torch.minimum(ratio * advantages, ratio.clamp(max=${name}_high) * advantages)
    return loss, {"clip_frac_high": (ratio > ${name}_high) & (advantages > 0)}
''',
    """from $module import $name

from runner.testing import check_loss


def test_loss() -> None:
    check_loss($name)
""",
    "run +recipe=grpo_demo algorithm.policy_loss=$name",
    group="runner.losses",
    entry="$module",
)
VERB = Skeleton(
    '''"""The verb `$name`: the newest numbers of a run."""

import json
from pathlib import Path


def main(words: list[str]) -> int:
    """print the newest numbers of a run; `run $name outputs/latest`"""
    file = Path(*(words or ["outputs/latest"])) / "metrics.jsonl"
    if not file.is_file():
        print(f"{file}: no such file")
        return 2
    newest = json.loads(file.read_text().splitlines()[-1])
    for name, value in newest.items():
        print(f"{name:32} {value}")
    return 0
''',
    """from pathlib import Path

import pytest
from $module import main


def test_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\\n')
    assert main([str(tmp_path)]) == 0
    assert "2.5" in capsys.readouterr().out
""",
    "run $name",
    group="runner.verbs",
    entry="$module:main",
)
SKELETONS = {
    "reward": REWARD,
    "loss": LOSS,
    "environment": ENVIRONMENT,
    "tracker": TRACKER,
    "callback": CALLBACK,
    "optimizer": OPTIMIZER,
    "verb": VERB,
}


def create(args: Namespace) -> int:
    """Write the package. Raises UsageError for an unknown kind, an invalid name, or an existing folder."""
    kinds = ", ".join(SKELETONS)
    if len(args.words) != 2:
        raise UsageError(f"run new: expected a kind and a name, e.g. run new reward words ({kinds})")
    kind, name = args.words[0], args.words[1].replace("-", "_")
    if kind not in SKELETONS:
        raise UsageError(f"run new: no kind '{kind}'{suggest.did_you_mean(kind, SKELETONS)} ({kinds})")
    if not NAME.fullmatch(name):
        raise UsageError(f"run new: '{name}' is not a valid name; use lowercase letters, digits and _")
    folder = Path(args.words[1])
    if folder.exists():
        raise UsageError(f"run new: {folder} exists; choose another name, or remove it")
    skeleton = SKELETONS[kind]
    texts = {"name": name, "dashed": name.replace("_", "-"), "module": f"run_{name}", "group": skeleton.group}
    texts["Name"] = name.title().replace("_", "")
    texts["entry"] = Template(skeleton.entry).substitute(texts)
    folder.mkdir()
    files = {"pyproject.toml": PROJECT, "$module.py": skeleton.module, "test_$module.py": skeleton.test}
    for path, text in files.items():
        (folder / Template(path).substitute(texts)).write_text(Template(text).substitute(texts), encoding="utf-8")
    print_text(f"wrote    {folder}\ntest it  pip install ./{folder} && python -m pytest {folder}")
    print_text(f"try it   {Template(skeleton.try_it).substitute(texts)}")
    return 0
