"""The learner whose gradients, optimizer and weights DeepSpeed keeps; see `parallelism.zero`.

Its state is that of any other learner: whole tensors by name, put together one after the other in the first rank's host
memory, so that a run continues under any layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from runner.core.errors import CheckpointError
from runner.interfaces import State
from runner.parallelism.deepspeed_zero import DeepSpeedZero
from runner.trainer.learner import LocalLearner
from runner.trainer.optimizer_state import load_parameters


class DeepSpeedLearner(LocalLearner):
    """One model and its optimizer in parts on all ranks, which do their share of each mini-batch.

    zero: what was made of the model and the optimizer
    """

    def __init__(self, *arguments: Any, zero: DeepSpeedZero, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._zero = zero
        self.reads_late = False

    def _backward(self, total: Tensor, is_last: bool) -> None:
        self._zero.backward(total)

    def _step_optimizer(self) -> Tensor:
        norm = self._zero.step()
        self._check_grad_norm(norm)
        return norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `LocalLearner`. Collective."""
        yield from ((name, self._zero.full_parameter(parameter)) for name, parameter in self._parameters.items())

    def state_dict(self) -> State:
        """See `learner_state`; the tensors are on the first rank alone. Collective."""
        tensors, values = dict[str, Tensor](), dict[str, dict[str, Any]]()
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for name, value in self.weights():
            self._keep(tensors, f"param/{name}", value)
        for parameter, key, value in self._zero.optimizer_entries():
            name = names[id(parameter)]
            if isinstance(value, Tensor):
                self._keep(tensors, f"optim/{key}/{name}", value)
            else:
                values.setdefault(name, {})[key] = value
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return {"tensors": tensors, "optimizer": {"groups": groups, "values": values}}

    def _keep(self, tensors: dict[str, Tensor], name: str, value: Tensor) -> None:
        if self._peers.rank == 0:
            tensors[name] = value.to("cpu", copy=True)

    def load_state_dict(self, state: State) -> None:
        """Restore the `state_dict` of any learner. Collective.

        Raises CheckpointError unless names, shapes and groups are exactly this model's.
        """
        tensors: Mapping[str, Tensor] = state["tensors"]
        with self._zero.writable_parameters():
            load_parameters(self._parameters, tensors)
        if len(state["optimizer"]["groups"]) != len(self.optimizer.param_groups):
            raise CheckpointError("the checkpoint's optimizer has other parameter groups than this one")
        kept: dict[Any, dict[str, Any]] = {
            parameter: dict(state["optimizer"]["values"].get(name, {})) for name, parameter in self._parameters.items()
        }
        for full, tensor in tensors.items():
            kind, _, rest = full.partition("/")
            key, _, name = rest.partition("/")
            if kind == "optim" and name in self._parameters:
                kept[self._parameters[name]][key] = tensor
        self._zero.load_states({p: tensors[f"param/{name}"] for name, p in self._parameters.items()}, kept)
