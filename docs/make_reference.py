"""Writes docs/reference.md from the config classes: every group, component and option. `make generate` runs it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from pydantic import BaseModel

from runner.algorithm.loss_registry import built_in
from runner.cli.conf import BESIDE, scalar
from runner.cli.config_sources import plain_default
from runner.interfaces.losses import INPUTS, Kind
from runner.spec.base import ComponentConfig
from runner.spec.job import CallbacksConfig, JobSpec
from runner.spec.registry import Registry, built_in_registry
from runner.spec.schema import CALLBACKS, groups_of, model_schema, sections
from runner.spec.suggest import expected_type

PATH = Path(__file__).with_name("reference.md")
HEAD = """# Reference

Look up every option of a job: what it accepts, its default, and what it does. `run explain` prints one option, with
its current value and where that was set:

```
run explain optimizer.lr
```

What a run writes: [run folder](run-folder.md), [checkpoints](checkpoints.md), [metrics](metrics.md).
Written by `docs/make_reference.py` from the config classes; do not edit.
"""


def sentence(cls: type[BaseModel]) -> str:
    """The class's docstring on one line."""
    return " ".join((cls.__doc__ or "").split())


def row(cls: type[BaseModel], name: str) -> str:
    """The row of one option."""
    info = cls.model_fields[name]
    default = (
        "*required*"
        if info.is_required()
        else f"`{scalar(plain_default(info.get_default(call_default_factory=True)))}`"
    )
    takes = expected_type(model_schema(cls)[name]).replace("|", "\\|")
    return f"| `{name}` | {takes} | {default} | {info.description} |"


def table(cls: type[BaseModel], without: Collection[str], common: type[BaseModel] | None = None) -> list[str]:
    """A row for each option of `cls` that is neither in `without` nor the same in `common`; nothing without any."""
    body = [row(cls, name) for name in cls.model_fields if name not in without]
    if common is not None:
        shared = {row(common, name) for name in common.model_fields}
        body = [one for one in body if one not in shared]
    return ["", "| option | takes | default | meaning |", "| --- | --- | --- | --- |", *body] if body else []


def group(name: str, registry: Registry) -> Iterator[str]:
    """One group: the options that all its components have, then those that a component adds or changes."""
    classes = list(registry.classes(name).values())
    common = next(
        c for c in reversed(classes[0].__mro__) if issubclass(c, ComponentConfig) and c is not ComponentConfig
    )
    yield from ["", f"## {name}", "", sentence(common), *table(common, {"name"})]
    for cls in classes:
        yield from ["", f"### {name}={cls.component_name()}", "", sentence(cls), *table(cls, {"name"}, common)]


TITLES: dict[Kind, str] = {
    "policy_loss": "`policy_loss` of grpo, ppo, opd",
    "advantage": "`advantage` of grpo",
    "kl_estimator": "`kl_estimator` of grpo, ppo, opd",
    "aggregation": "`loss_aggregation` of grpo, ppo, opd",
    "correction": "`correction` of grpo, ppo, opd: off-policy corrections",
    "preference_loss": "`loss` of dpo: preference losses",
    "divergence": "`divergence` of distill",
}
SYMBOLS: dict[Kind, str] = {
    "policy_loss": "r: `ratio`; A: `advantages`; π: the policy; sg: stop-gradient",
    "advantage": "R: reward of an answer, less its KL penalty; r_t: that of token t; group: the answers to one prompt",
    "kl_estimator": "d = log π − log π_ref of the token; r: `ratio`",
    "aggregation": "each formula is the weight of one trained token in the loss",
    "correction": "ρ = π_old / π_sampler, the policy before the update over the one that sampled",
    "divergence": "P: the teacher's distribution of a token; Q: the student's; KL(P ‖ Q) = Σ P·(log P − log Q)",
    "preference_loss": "of each answer, over its tokens: d: the sum of log π − log π_ref, p: the sum of log π, "
    "n: their number; c: chosen, r: rejected; σ: sigmoid",
}


def losses() -> Iterator[str]:
    """The registered functions of each kind: formula, paper and options with their defaults; the inputs of the kind."""
    yield from ["", "## Losses", "", "A package adds its own: [extend](extend.md)."]
    for kind, title in TITLES.items():
        yield from [
            "",
            f"### {title}",
            "",
            f"Symbols: {SYMBOLS[kind]}.",
            "",
            "| name | formula | paper | options |",
            "| --- | --- | --- | --- |",
        ]
        for one in built_in()[kind].values():
            options = ", ".join(f"`{name}` = {scalar(option.default)}" for name, option in one.options.items())
            yield f"| `{one.name}` | {one.formula} | {one.paper} | {options} |"
        yield from ["", "Inputs:", "", *(f"- `{name}`: {meaning}" for name, meaning in INPUTS[kind].items())]


def reference() -> str:
    """The whole page."""
    registry = built_in_registry()
    groups, parts = groups_of(registry), sections()
    lines = [HEAD, "## The job", *table(JobSpec, {*groups, *parts, CALLBACKS})]
    for name, cls in (parts | BESIDE).items():
        lines += ["", f"## {name}", "", sentence(cls), *table(cls, ())]
    lines += [
        "",
        f"## {CALLBACKS}",
        "",
        f"{sentence(CallbacksConfig)} Chosen with `{CALLBACKS}=[NAME,…]`; see [extend](extend.md).",
    ]
    for name, callback in registry.classes(CALLBACKS).items():
        lines += ["", f"### {CALLBACKS}=[{name}]", "", sentence(callback), *table(callback, {"name"})]
    for name in groups:
        lines += group(name, registry)
    lines += losses()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(reference(), encoding="utf-8")
