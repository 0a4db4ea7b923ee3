"""A model that one rank has loaded, spread over the devices of all.

numbers taken out ──▶ structure cut, divided, sharded on `meta` ──▶ numbers handed out ──▶ compared with what it was
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from runner.core.errors import SpecError
from runner.distributed.work_partition import on_first
from runner.interfaces import Decide, Device, Peers
from runner.parallelism.config import MeshConfig, ParallelismConfig, ShardedConfig
from runner.parallelism.groups import Groups
from runner.parallelism.mesh import Mesh
from runner.parallelism.probed import refuse_another
from runner.parallelism.weights import Weights, slots


@dataclass(frozen=True, slots=True)
class Spreading:
    """Where models go: `groups` is None where each rank has all of them; everyone: all ranks."""

    config: ParallelismConfig
    mesh: Mesh
    groups: Groups | None
    everyone: Peers
    device: Device
    decide: Decide

    def spread(self, model: Any) -> None:
        """Spread `model` in place, before it has an optimizer. Collective; raises SpecError where that cannot be."""
        device = self.device.torch_device
        offload = isinstance(self.config, ShardedConfig) and self.config.cpu_offload
        wanted = on_first(self.everyone, model.probed) if self.mesh.parts > 1 else None
        weights = Weights(model.whole, self.everyone, device)
        kinds = {frozenset(map(type, block.modules())): block for block in reversed(model.blocks())}
        with weights.lent(model.whole, list(kinds.values())):  # what the device exchanges is tried out there
            self.device.fuse(model.inner)
        if self.groups is not None:
            self._in_pieces(model, self.groups)
        absent = [name for name, slot in slots(model.whole) if slot.tensor in model.stage.elsewhere]
        weights.hand_out(model.whole, torch.device("cpu") if offload else device, absent)
        model.device = device
        with torch.no_grad():
            model.whole.run(lambda: None)  # fully_shard looks at its pieces while all that learns is known to
        model.stage.settle()
        if wanted is not None:
            refuse_another(model, wanted, self.everyone, *self._refusal())
        if self.groups is not None and self.mesh.cp > 1:
            self._share_tokens(model, self.groups)

    def _refusal(self) -> tuple[Callable[[str], SpecError], str]:
        """What refuses a model that is another one now, and what was done to it."""
        if self.mesh.pp > 1:
            from runner.parallelism import stages

            return stages.refused, "in stages"
        if self.mesh.tp > 1:
            from runner.parallelism import tensor

            return tensor.refused, "when its layers are cut"
        from runner.parallelism import experts

        return experts.refused, "when its experts lie apart"

    def _in_pieces(self, model: Any, groups: Groups) -> None:
        """Make of each parameter what this rank holds of it, while there are no numbers."""
        if self.mesh.tp > 1:
            from runner.parallelism.tensor import cut

            cut(model, groups.weights["tp"], decide=self.decide)
        if self.mesh.ep > 1:
            from runner.parallelism import experts

            alone = self.mesh.tp == 1 and not isinstance(self.config, ShardedConfig)
            experts.spread(model, groups.experts["ep"], alone=alone, decide=self.decide)
        if isinstance(self.config, MeshConfig) and groups.borders is not None:
            from runner.parallelism.stages import divide

            chunks, device = self.config.pp_chunks, self.device.torch_device
            divide(model, groups.borders, groups.of["pp"], chunks=chunks, device=device)
        if isinstance(self.config, ShardedConfig):
            from runner.parallelism.shard import shard

            shard(
                model,
                groups.weights,
                groups.experts if self.mesh.ep > 1 else None,
                device=self.device.torch_device,
                reshard=self.config.reshard_after_forward,
                offload=self.config.cpu_offload,
                decide=self.decide,
            )

    def _share_tokens(self, model: Any, groups: Groups) -> None:
        from runner.parallelism.context import spread

        style = self.config.cp_style if isinstance(self.config, MeshConfig) else None
        spread(model, groups.of["cp"], self.everyone, style=style, slices=self.mesh.tp, decide=self.decide)
