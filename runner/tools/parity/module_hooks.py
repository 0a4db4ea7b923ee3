"""Records a learner's first step: inputs and outputs of each module, predictions, every gradient.

    weight/ROLE/PARAMETER     as they are before the first step
    input/ROLE/MODULE         the first tensor that it takes  ┐ of the first micro-batch, in the order in which
    output/ROLE/MODULE        the first tensor that it gives  ┘ modules finish: a part before the whole
    output/ROLE/loss input N  what the loss is a function of: logprobs, values, …
    gradient/ROLE/PARAMETER   of the first optimizer step, before it is clipped

The head over the vocabulary is not watched: a hook would make it run in another way. Its output is in `logprobs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.batch import Batch
from runner.core.metrics import Metrics
from runner.interfaces import LossFn, Outputs, State
from runner.tools.parity.recording import TensorSketch, first_tensor, sketch_tensor
from runner.trainer.learner import LocalLearner


class RecordingLearner:
    """A learner that does what the one inside does, and fills `prints` during its first step.

    likelihood: Σ −logprobs of the tokens trained on in this step (of all where it learns none), and how many they were;
        where a loss needs logprobs
    """

    def __init__(self, learner: LocalLearner, role: str, prints: dict[str, TensorSketch]) -> None:
        self._learner, self._role, self._prints = learner, role, prints
        model: Any = learner.model
        self._model = model
        self._scored = self._stepped = False
        self.likelihood = (0.0, 0)
        for name, parameter in model.module.named_parameters():
            prints[f"weight/{role}/{name}"] = sketch_tensor(parameter)

    def begin_step(self, step: int) -> None:
        """See `Learner`."""
        self.likelihood = (0.0, 0)
        self._learner.begin_step(step)

    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs:
        """See `Learner`; not watched, since what it gives is in what the loss sees."""
        return self._learner.forward(batch, needs)

    def forward_backward(
        self, batch: Batch, loss: LossFn, keep: frozenset[str] = frozenset()
    ) -> tuple[Metrics, Outputs]:
        """See `Learner`."""
        with self._hook_modules():
            metrics, outputs = self._learner.forward_backward(batch, loss, keep | loss.needs)
        if not self._scored:
            self._scored = True
            for name in sorted(loss.needs):
                self._prints[f"output/{self._role}/loss input {name}"] = sketch_tensor(outputs[name])
        if "logprobs" in outputs:
            self._count_likelihood(outputs["logprobs"], batch)
        return metrics, {name: outputs[name] for name in keep}

    def measure(self, batch: Batch, loss: LossFn) -> Outputs:
        """See `Learner`; not watched."""
        return self._learner.measure(batch, loss)

    def optim_step(self) -> Metrics:
        """See `Learner`."""
        if not self._stepped:
            self._stepped = True
            for name, parameter in self._model.trainable().items():
                if parameter.grad is not None:
                    self._prints[f"gradient/{self._role}/{name}"] = sketch_tensor(parameter.grad)
        return self._learner.optim_step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner`."""
        return self._learner.weights()

    def state_dict(self) -> State:
        """See `Learner`."""
        return self._learner.state_dict()

    def load_state_dict(self, state: State) -> None:
        """See `Learner`."""
        self._learner.load_state_dict(state)

    def _count_likelihood(self, logprobs: Tensor, batch: Batch) -> None:
        chosen = batch.tokens["weight"] != 0
        if not chosen.any():  # a step without contrast, which learns nothing
            chosen = batch.tokens["parent"] >= 0
        trained = logprobs.cpu().double()[chosen.cpu()]
        total, count = self.likelihood
        self.likelihood = (total - float(trained.sum()), count + len(trained))

    @contextmanager
    def _hook_modules(self) -> Iterator[None]:
        """Hooks on every module that runs by being called, for the first micro-batch of the first step."""
        if self._scored:
            yield
            return
        head = self._model.inner.get_output_embeddings()
        named = [(name, m) for name, m in self._model.module.named_modules() if name and m is not head]
        handles = [m.register_forward_hook(self._module_hook(name), with_kwargs=True) for name, m in named]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _module_hook(self, name: str) -> Any:
        place = f"{self._role}/{name}"

        @torch.no_grad()
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if f"output/{place}" in self._prints:  # another micro-batch, or activations that are computed again
                return
            taken, given = first_tensor((*args, *kwargs.values())), first_tensor(output)
            if taken is not None:
                self._prints[f"input/{place}"] = sketch_tensor(taken)
            if given is not None:
                self._prints[f"output/{place}"] = sketch_tensor(given)

        return hook
