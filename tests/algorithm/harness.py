"""A small real job of policy optimization: tiny model, torch sampler, a reward that is a function of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from runner.algorithm.policy.config import PolicyConfig
from runner.algorithm.policy.policy_gradient import PolicyOptimization, build
from runner.core.signals import StopSignal
from runner.data.chat import Renderer
from runner.device.config import CpuConfig
from runner.device.cpu import Cpu
from runner.distributed.work_partition import SingleProcess
from runner.interfaces import Callback, Completion, EnvironmentFactory, EvalQuestion, Observation, Prompt
from runner.interfaces.learning import AlgorithmInputs
from runner.model import tiny
from runner.model.config import TinyConfig
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler
from runner.trainer.learner import LocalLearner
from runner.trainer.loop import ExperienceQueue, TrainingJob
from runner.trainer.reference_model import FrozenModel
from runner.weight_sync.publisher import Publisher
from runner.weight_sync.transports import DeviceCopy, SameModel

CPU = torch.device("cpu")
CONFIG = TinyConfig(hidden_size=32, intermediate_size=48, layers=2, kv_heads=2)
Rate = Callable[[Completion], float | None]


def silent(*words: str) -> None:
    """A decision that nobody reads."""


silent.record_fact = silent  # type: ignore[attr-defined]


class Prompts:
    """Prompts of different lengths, a pure function of (step, round)."""

    fingerprint = "prompts"
    columns = ()

    def __len__(self) -> int:
        return 10**6

    def take(self, step: int, count: int, round: int = 0) -> Sequence[Prompt]:
        generator = torch.Generator().manual_seed(step * 100 + round)
        found = []
        for at in range(count):
            ids = torch.randint(97, 122, (2 + at % 5,), generator=generator).tolist()
            found.append(Prompt(tuple(ids), bytes(ids).decode()))
        return found

    def held_out_questions(self) -> Sequence[EvalQuestion]:
        return ()

    def held_out_items(self) -> Sequence[Any]:
        return ()


class Rated:
    """A reward that is a function of one completion."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[float | None]]:
        return [[self.rate(one) for one in group] for group in groups]

    def close(self) -> None:
        pass


class Nods:
    """An environment that says a word to every turn."""

    def reset(self, prompt: Prompt) -> None:
        pass

    def step(self, answer: str) -> Observation | None:
        return Observation("tool", "continue")


def even_bytes(completion: Completion) -> float:
    """The share of even token ids: something that every sample differs in."""
    return sum(i % 2 == 0 for i in completion.ids) / len(completion.ids)


def make_model(seed: int, head: str = "lm") -> Any:
    return tiny.build(
        CONFIG,
        tokenizer=tiny.tokenizer(CONFIG),
        device=CPU,
        seed=seed,
        decide=silent,
        head=head,  # type: ignore[arg-type]
    )


def job_of(
    config: PolicyConfig,
    steps: int = 1,
    rate: Rate = even_bytes,
    callbacks: Sequence[Callback] = (),
    lr: float = 1e-2,
    temperature: float = 1.0,
    sgd: bool = False,
    environments: EnvironmentFactory | None = None,
    stop_token_ids: Sequence[int] = (),
    double: bool = False,
    **sampling: Any,
) -> TrainingJob:
    """The whole job, wired as `runner.build` does it; double: its models are in float64."""
    head = config.trained_models()["policy"]

    def model_of(seed: int, head: str = "lm") -> Any:
        made = make_model(seed, head)
        if double:
            made.module.double()
        return made

    policy = model_of(1, head)
    ahead = config.lag > 0
    sampler = TorchSampler(
        TorchSamplerConfig(max_new_tokens=6, temperature=temperature, stop_token_ids=tuple(stop_token_ids), **sampling),
        model=model_of(1, head) if ahead else policy,
        decide=silent,
    )
    algorithm: PolicyOptimization = build(
        config,
        AlgorithmInputs(
            Prompts(),
            policy.tokenizer,
            3,
            silent,
            sampler,
            Rated(rate) if config.needs_reward else None,
            environments,
            extend=Renderer(policy.tokenizer).extend,
        ),
    )

    def learner(model: Any, prefix: str) -> LocalLearner:
        parameters = list(model.trainable().values())
        optimizer = torch.optim.SGD(parameters, lr=lr) if sgd else torch.optim.AdamW(parameters, lr=lr)
        budget = config.micro_batch_tokens
        return LocalLearner(
            model,
            optimizer,
            lr=lr,
            clip_norm=None,
            factor=lambda _: 1.0,
            budget=budget,
            seed=0,
            device=CPU,
            prefix=prefix,
        )

    learners = {"policy": learner(policy, "train")}
    if "critic" in config.trained_models():
        learners["critic"] = learner(model_of(2, "scalar"), "critic")
    frozen = {role: FrozenModel(model_of(7), budget=64, device=CPU) for role in config.frozen_models()}
    route = DeviceCopy(learners["policy"].weights) if config.lag else SameModel()
    publisher = Publisher(route, sampler, config.lag)
    return TrainingJob(
        steps=steps,
        device=Cpu(CpuConfig(), decide=silent),
        peers=SingleProcess(),
        algorithm=algorithm,
        feed=ExperienceQueue(
            publisher.before(algorithm.collect), steps, config.lag, encode=algorithm.encode, decode=algorithm.decode
        ),
        publish=publisher.publish,
        learners=learners,
        models={**learners, **frozen},
        callbacks=callbacks,
        stop=StopSignal(),
        flops={role: one.model.flops.batch_flops for role, one in learners.items()},
        peak_flops=1e9,
    )
