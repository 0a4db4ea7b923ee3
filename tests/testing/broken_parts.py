"""What the factories of `broken` make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from runner.data.demo import build as build_demo
from runner.interfaces import (
    BaseCallback,
    Completion,
    EnvironmentFactory,
    Observation,
    Prompt,
    Request,
    Rollout,
    SamplerWrapper,
    StepResult,
)
from runner.sampler.torch import TorchSampler

COUNT = itertools.count()


class Reward:
    def __init__(self, way: str, tokenizer: Any) -> None:
        self.way, self.tokenizer = way, tokenizer

    def score(self, groups: Sequence[Sequence[Completion]]) -> Any:
        if self.way == "flat":
            return [1.0 for group in groups for _ in group]
        return [[self.rate(one) for one in group] for group in groups]

    def rate(self, one: Completion) -> float | None:
        if self.way == "decodes":  # which is right
            text = self.tokenizer.decode([*one.prompt.ids, *one.ids])
            return float(text == "sort 21: 12 é") if one.prompt.columns else None
        if self.way in ("wrong", "nan"):
            return 0.5 if self.way == "wrong" else float("nan")
        return float(one.text == one.prompt.columns.get("answer")) + (next(COUNT) if self.way == "drifts" else 0)

    def close(self) -> None:
        pass


def reward(config: Any, *, tokenizer: Any, **_: Any) -> Reward:
    return Reward(config.way, tokenizer)


class Environment:
    heard = 0

    def __init__(self, way: str) -> None:
        self.way = way

    def reset(self, prompt: Prompt) -> None:
        if self.way == "shared":
            Environment.heard = 0

    def step(self, answer: str) -> Any:
        Environment.heard += 1
        return "fine" if self.way == "text" else Observation("tool", str(Environment.heard))


def environment(config: Any, **_: Any) -> EnvironmentFactory:
    return EnvironmentFactory(lambda: Environment(config.way), 4)


class Optimizer(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float, way: str) -> None:
        super().__init__(parameters, lr=lr)
        self.way, self.done = way, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.done += 1
        for group in self.param_groups:
            rates = {"up": -group["lr"], "own rate": 1e-3, "hidden": group["lr"] / self.done}
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-rates.get(self.way, group["lr"]))
                elif self.way == "unused":
                    p.add_(group["lr"])


def optimizer(config: Any, *, parameters: Mapping[str, Any], decide: Any) -> Optimizer:
    return Optimizer(list(parameters.values())[: 1 if config.way == "some" else None], config.lr, config.way)


def schedule(config: Any, *, steps: int) -> Callable[[int], float]:
    asked: list[int] = []

    def factor(step: int) -> float:
        asked.append(step)
        return {"high": 2.0, "zero": 0.0, "nan": float("nan"), "memory": 1 / len(asked)}[config.way]

    return factor


def adapter(config: Any, model: Any, *, decide: Any) -> Any:
    model.module.requires_grad_(config.way != "none")
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.5)
    return model


class Sampler(SamplerWrapper):
    way = ""

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        found = super().sample([replace(one, seed=0) for one in requests] if self.way == "seed" else requests)
        if self.way == "sure":
            return [replace(o, logprobs=[0.0] * len(o.ids)) for o in found]
        if self.way == "zeros":
            return [replace(o, logprobs=[0.0] * len(o.ids), raw_logprobs=[0.0] * len(o.ids)) for o in found]
        if self.way == "version":
            return [Rollout(o.ids, o.logprobs, o.raw_logprobs, 0, o.finish) for o in found]
        return {"few": found[:1], "order": [found[0]] * len(found)}.get(self.way, found)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        found = super().score(rows)
        return [[[x / 2 for x in row] for row in engine] for engine in found] if self.way == "score" else found

    def pop_metrics(self) -> dict[str, float]:
        return {"sampler/repeated": 1.0} if self.way == "prefix" else {}


def sampler(config: Any, *, model: Any, decide: Any) -> Sampler:
    made = Sampler(TorchSampler(config, model=model, decide=decide))
    made.way = config.way
    return made


def data(config: Any, **context: Any) -> Any:
    made: Any = build_demo(config, **context)
    taken, take = itertools.count(), made.take
    if config.way == "fingerprint":
        made.fingerprint = str(next(COUNT))
    elif config.way == "round":
        made.take = lambda step, count, round=0: take(step, count)
    elif config.way == "shifted":
        made.take = lambda step, count, round=0: take(step, count + round)[round:]
    elif config.way == "next":
        made.take = lambda step, count, round=0: take(step + round, count)
    elif config.way == "chance":
        made.take = lambda step, count, round=0: take(step, count, round and next(COUNT) + 1)
    else:
        made.take = lambda step, count, round=0: take(step + next(taken), count)
    return made


class Callback(BaseCallback):
    def __init__(self, way: str) -> None:
        self.way, self.seen = way, 0

    def on_step(self, end: StepResult) -> None:
        self.seen += 1
        if self.way == "removes":
            end.values.clear()
        end.values["mine/seen"] = self.seen if self.way == "integer" else float(self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2} if self.way == "set" else self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = 0 if self.way == "state" else state["seen"]


def callback(config: Any, **_: Any) -> Callback:
    return Callback(config.way)


class Tracker:
    def __init__(self, way: str) -> None:
        self.way = way

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def finish(self, status: str) -> Any:
        return "done" if self.way == "text" else []


def tracker(config: Any, *, folder: Any, spec: Mapping[str, Any], **_: Any) -> Tracker:
    if config.way == "secret":
        (folder.root / "mine.json").write_text(repr(spec))
    return Tracker(config.way)
