"""What the tests of preferences start from: small models, random pairs, plain passes over one answer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from runner.adapter import lora
from runner.adapter.config import LoraConfig, NoAdapterConfig
from runner.adapter.lora import train_all
from runner.interfaces import LabeledCompletion, PreferencePair
from runner.model import tiny
from runner.model.config import TinyConfig
from runner.trainer.learner import LocalLearner
from runner.trainer.reference_model import FrozenModel

CPU = torch.device("cpu")
WHOLE = 10**6
CONFIG = TinyConfig(hidden_size=32, intermediate_size=48, layers=2, kv_heads=2, lm_head_chunk_tokens=17)
TOKENIZER = tiny.tokenizer(CONFIG)


class Given:
    """Items in the order of a list, over and over."""

    fingerprint = "x"
    longest = 99

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def take(self, step: int, count: int, round: int = 0) -> Sequence[Any]:
        return [self.items[(step * count + i) % len(self.items)] for i in range(count)]

    def held_out_questions(self) -> Sequence[Any]:
        return ()

    def held_out_items(self) -> Sequence[Any]:
        return ()


def ids(generator: torch.Generator, low: int, high: int) -> tuple[int, ...]:
    count = int(torch.randint(low, high + 1, (1,), generator=generator))
    return tuple(torch.randint(0, 250, (count,), generator=generator).tolist())


def pairs(count: int, seed: int = 1) -> list[PreferencePair]:
    """Pairs of 1 to 9 tokens behind prompts of 1 to 12; every other one has a margin."""
    generator = torch.Generator().manual_seed(seed)
    return [
        PreferencePair(
            ids(generator, 1, 12), ids(generator, 1, 9), ids(generator, 1, 9), None if n % 2 else 0.3 * (n + 1)
        )
        for n in range(count)
    ]


def judged(count: int, seed: int = 1) -> list[LabeledCompletion]:
    """The chosen answers of pairs, two in three of them good."""
    return [LabeledCompletion(p.prompt, p.chosen, n % 3 > 0) for n, p in enumerate(pairs(count, seed))]


def model(
    seed: int = 5, *, head: Any = "lm", layout: Any = "packed", adapter: bool = False, double: bool = False
) -> Any:
    """A small model; its weights are larger than a fresh one's, so that models of two seeds differ visibly."""
    config = CONFIG.model_copy(update={"batch_layout": layout})
    made = tiny.build(config, tokenizer=TOKENIZER, device=CPU, seed=seed, decide=refuse, head=head)
    enlarge(made.inner, seed)
    if adapter:
        made = lora.attach(LoraConfig(rank=4), made, decide=refuse)
        for number, parameter in enumerate(made.trainable().values()):  # B starts at zero, where nothing is adapted
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
    else:
        made = train_all(NoAdapterConfig(), made, decide=refuse)
    if double:
        made.module.double()
    return made


def enlarge(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15, generator=generator)


def refuse(feature: str, *words: str) -> None:
    assert feature == "export", f"what is tested must be what runs, but it was decided: {feature} {words}"


def learner(made: Any, *, budget: int = WHOLE, lr: float = 0.1) -> LocalLearner:
    return LocalLearner(
        made,
        torch.optim.SGD(list(made.trainable().values()), lr=lr),
        lr=lr,
        clip_norm=None,
        factor=lambda step: 1.0,
        budget=budget,
        seed=0,
        device=CPU,
    )


def frozen(made: Any) -> FrozenModel:
    return FrozenModel(made, budget=50, device=CPU)


def copied(made: Any) -> FrozenModel:
    """A frozen copy of a model without adapter."""
    return frozen(deepcopy(made))


def backward(subject: LocalLearner, algorithm: Any, models: dict[str, Any], step: int = 0) -> tuple[Any, Any]:
    """(the first mini-batch of a step, the metrics of a pass with gradient over it)."""
    [role] = algorithm.losses
    batch = next(algorithm.prepare(algorithm.collect(step), models))
    subject.begin_step(step)
    return batch, subject.forward_backward(batch, algorithm.losses[role])[0]


def gradients(subject: LocalLearner) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in subject.model.trainable().items() if p.grad is not None}


def train(subject: LocalLearner, algorithm: Any, models: dict[str, Any], steps: int) -> list[dict[str, float]]:
    """Whole steps; returns the metrics of each."""
    values = []
    [loss] = algorithm.losses.values()
    for step in range(steps):
        subject.begin_step(step)
        for batch in algorithm.prepare(algorithm.collect(step), models):
            metrics, _ = subject.forward_backward(batch, loss)
            subject.optim_step()
            values.append(metrics.result())
    return values


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """The relative L2 difference of all tensors together is below `bound`."""
    assert found.keys() == expected.keys() and expected
    difference = sum(float((found[n].double() - e.double()).square().sum()) for n, e in expected.items())
    size = sum(float(e.double().square().sum()) for e in expected.values())
    assert size > 0 and (difference / size) ** 0.5 < bound, (difference / size) ** 0.5


def plain(made: Any) -> Any:
    """The same weights in a transformers model with transformers' own attention, written out."""
    twin = deepcopy(made.module)
    twin.set_attn_implementation("eager")
    return twin


def plain_logprob(module: Any, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """log p(answer | prompt), 0-d, from the transformers model alone: one sequence, all logits."""
    whole = torch.tensor([[*prompt, *answer]])
    logprobs = torch.log_softmax(module(input_ids=whole, use_cache=False).logits[0], -1)
    places = range(len(prompt), whole.shape[1])
    return torch.stack([logprobs[t - 1, whole[0, t]] for t in places]).sum()


def plain_score(module: Any, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """The score of an answer, 0-d, from the transformers classifier alone."""
    return module(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, 0]


def plain_gradients(total: Tensor, twin: Any) -> dict[str, Tensor]:
    parameters = dict(twin.named_parameters())
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}
