"""DeepSpeed's ZeRO as a learner (Rajbhandari et al., 1910.02054, section 5); it is imported only here.

    zero2    gradients and optimizer state are sharded, weights are replicated
    zero3    weights are sharded too; those of a layer are gathered for the layer, others for the whole pass

The model, the loss, the batches and the metrics are ours. DeepSpeed sums and clips gradients, makes the step and
distributes the weights. Its averages are undone: at stage 2 by its option for sums; at stage 3, which has no such
option, by a loss times the number of ranks, which is exact if that is a power of two.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.core.errors import CheckpointError, EnvironmentProblem
from runner.core.rank_info import RankInfo
from runner.interfaces import Decide, TrainableModel
from runner.parallelism.parallel_context import ParallelContext

PERSISTENT_LAYERS = 10  # times the hidden size: smaller parameters are not sharded, as in transformers
# which DeepSpeed 0.19 calls
NOISY_WARNING = "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"


class OptimizerEntry(NamedTuple):
    """Optimizer state of a parameter under a key: a tensor of its shape, one for all, or a plain value."""

    parameter: nn.Parameter
    key: str
    value: Any


class DeepSpeedZero:
    """One trained model and its optimizer in DeepSpeed's engine. Its methods are collective."""

    def __init__(
        self,
        model: TrainableModel,
        optimizer: torch.optim.Optimizer,
        world: ParallelContext,
        clip_norm: float | None,
        decide: Decide,
    ) -> None:
        """Wrap `model`, which is replicated on all ranks, and `optimizer` of its trainable parameters.

        Raises EnvironmentProblem if deepspeed cannot be imported.
        """
        deepspeed = _import_deepspeed(world.device.torch_device.type, world.place)
        stage: int = world.config.stage  # type: ignore[attr-defined]
        self._stage, self._whole, self._factor = stage, model.whole, world.place.size if stage == 3 else 1
        hidden = model.inner.config.get_text_config().hidden_size
        more = {"gradient_allreduce_op": "sum"} if stage == 2 else {}
        self._engine, *_ = deepspeed.initialize(
            model=model.whole,
            optimizer=optimizer,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,  # not used
                "managed_gradient_accumulation": False,  # the learner decides when to step
                "gradient_clipping": clip_norm or 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": PERSISTENT_LAYERS * hidden},
                **more,
            },
        )
        self._zero: Any = self._engine.optimizer
        self._optimizer = optimizer
        model.whole.register_forward_pre_hook(lambda *_: self._zero.clear_backward_seen_flag())
        if stage == 3:
            self._register_external_weights(model)
        fact = f"DeepSpeed {deepspeed.__version__}, ZeRO-{stage}"
        decide.record_fact("parallelism", fact, "its engine runs the optimizer")

    def _register_external_weights(self, model: TrainableModel) -> None:
        """Gather parameters outside of layers for a whole pass: the LM head's weight is used in chunks."""
        from deepspeed.runtime.zero import register_external_parameter

        inside = {id(parameter) for block in model.transformer_blocks() for parameter in block.parameters()}
        for parameter in model.whole.parameters():
            if id(parameter) not in inside:
                register_external_parameter(model.whole, parameter)
        model.whole.join_context = self._summon_full_params
        self._zero.parameter_offload.fwd_pre_hook.remove()  # it prefetches in the last pass's order; passes differ

    def backward(self, total: Tensor) -> None:
        """Add the gradient of a micro-batch's loss, a scalar, to the sharded gradients."""
        self._engine.backward(total * self._factor, scale_wrt_gas=False)

    def step(self) -> Tensor:
        """Clip, step, clear gradients; returns the norm of the summed gradient before clipping, float32 [].

        If it is not finite, nothing is updated.
        """
        self._engine.step()
        return torch.tensor(float("nan" if self._zero.overflow else self._engine.get_global_grad_norm()))

    def full_parameter(self, parameter: nn.Parameter) -> Tensor:
        """A full trainable parameter, detached, on every rank."""
        from deepspeed.utils import safe_get_full_fp32_param

        return parameter.detach() if self._stage == 2 else safe_get_full_fp32_param(parameter)

    def optimizer_entries(self) -> Iterator[OptimizerEntry]:
        """The optimizer's state with full tensors, on every rank."""
        from deepspeed.utils import safe_get_full_optimizer_state

        for parameters, flat in self._groups():
            entries = self._optimizer.state.get(flat, {})
            for parameter in parameters:
                for key, value in entries.items():
                    is_flat = isinstance(value, Tensor) and value.shape == flat.shape
                    full = safe_get_full_optimizer_state(parameter, key) if is_flat else value
                    yield OptimizerEntry(parameter, key, full)

    def writable_parameters(self) -> AbstractContextManager[None]:
        """A block with full parameters that all ranks may overwrite; `load_states` comes after it."""
        if self._stage == 2:
            return nullcontext()
        from deepspeed.runtime.zero import GatheredParameters

        return GatheredParameters(list(self._whole.parameters()), modifier_rank=0)

    def load_states(
        self, parameters: Mapping[nn.Parameter, Tensor], kept: Mapping[nn.Parameter, Mapping[str, Any]]
    ) -> None:
        """Overwrite the optimizer's copy of the parameters, and its state.

        Raises CheckpointError if a value that it has once for many parameters is not the same for all.
        """
        for parameter, value in parameters.items():
            self._write_shard(parameter, value, None)
        is_fused = bool(self._optimizer.defaults.get("fused"))
        for members, flat in self._groups():
            entries = [kept.get(parameter, {}) for parameter in members]
            keys = {key: None for entry in entries for key in entry}  # in order
            self._optimizer.state[flat] = {key: _group_entry(key, flat, entries, is_fused) for key in keys}
        if self._stage == 2:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
        for parameter, values in kept.items():
            for key, value in values.items():
                if isinstance(value, Tensor) and value.ndim:
                    self._write_shard(parameter, value, key)

    def _write_shard(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Overwrite this rank's shard of the optimizer's copy of a parameter, or of its state `key`."""
        if self._stage == 2:
            parameter.set_full_hp_param(value.to(parameter.device), key)  # type: ignore[attr-defined]
            return
        held: Any = parameter.ds_tensor  # type: ignore[attr-defined]
        flat, size = value.flatten(), held.numel()
        first = min(size * self._engine.global_rank, flat.numel())
        part = flat[first : first + size].to(held.device)
        self._zero.set_local_hp_param(nn.functional.pad(part, (0, size - part.numel())), parameter, key)

    def _groups(self) -> Iterator[tuple[list[nn.Parameter], Tensor]]:
        """Groups of parameters, each with the optimizer's flat tensor of them."""
        if self._stage == 2:
            return zip(self._zero.bit16_groups, self._zero.single_partition_of_fp32_groups, strict=True)
        return zip(self._zero.fp16_groups, self._zero.fp32_partitioned_groups_flat, strict=True)

    @contextmanager
    def _summon_full_params(self) -> Iterator[None]:
        """The full model on every rank, without the hooks that free a layer after its pass."""
        from deepspeed.runtime.zero import GatheredParameters

        offload, parameters = self._zero.parameter_offload, list(self._whole.parameters())
        with GatheredParameters(parameters):
            for parameter in parameters:
                parameter.ds_active_sub_modules.clear()
            for hook in (*offload.forward_hooks, *offload.backward_hooks):
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                yield
            finally:
                offload._register_deepspeed_module(self._whole)


def _group_entry(key: str, flat: Tensor, entries: list[Mapping[str, Any]], is_fused: bool) -> Any:
    """The state `key` of a group: a tensor to be filled, or the value that all parameters share.

    is_fused: a shared tensor (AdamW's number of steps) belongs on the device, as in torch's `load_state_dict`.
    """
    first = next(entry[key] for entry in entries if key in entry)
    if isinstance(first, Tensor) and first.ndim:
        return torch.zeros_like(flat)
    if any(entry.get(key) != first for entry in entries):
        text = f"DeepSpeed keeps one {key} for all parameters of a group, but the checkpoint has several"
        raise CheckpointError(f"{text}; continue with parallelism=ddp or fsdp")
    if not isinstance(first, Tensor):
        return first
    return first.to(flat.device, copy=True) if is_fused else first.clone()


def _import_deepspeed(device: str, place: RankInfo) -> Any:
    """Import deepspeed for the job's device. Raises EnvironmentProblem."""
    os.environ["DS_ACCELERATOR"] = device
    os.environ.update(place.to_environment())
    try:
        import deepspeed
        import deepspeed.ops
        import deepspeed.runtime.zero.utils as utils
    except (ImportError, RuntimeError) as error:
        text = f"DeepSpeed cannot be used: {type(error).__name__}: {error}"
        raise EnvironmentProblem(f'{text}\n  pip install "posttrain-run[deepspeed]"') from error
    deepspeed.utils.logger.setLevel("WARNING")
    # it would be compiled at its first use; gloo replaces it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    utils.warned = True  # about calls of `FsdpRoot` without tensors
    warnings.filterwarnings("ignore", NOISY_WARNING, FutureWarning)
    return deepspeed
