"""What hands the policy's weights to the sampler: the route that fits where it runs, and the probe at its end."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch

from runner.folder import RunFolder
from runner.model.alone import blanks
from runner.model.build import DTYPES
from runner.parallelism.config import ZeroConfig
from runner.parallelism.world import World
from runner.place import Machine
from runner.protocols import Device, Learner, Sampler
from runner.publisher import Publisher
from runner.routes import Copied, Route, Shared, Shelving, Weights
from runner.sampler.base import DrawingConfig
from runner.sampler.probed import Probe
from runner.sampler.server.config import VllmServerConfig
from runner.shelf import Shelf
from runner.shelf_folder import claim
from runner.spec.job import JobSpec
from runner.tolerance import tolerance


def build_publisher(
    spec: JobSpec, folder: RunFolder, sampler: Sampler, learner: Learner, policy: Any, world: World
) -> Publisher:
    """What brings the weights of `learner`, whose model is `policy`, to the sampler."""
    lag = spec.algorithm.steps_ahead()
    if not spec.launch.samplers and not spec.sampler.sent():  # the ranks', or of somebody who is sent nothing
        route: Route = Copied(learner.weights) if lag and not spec.sampler.served else Shared()
        return Publisher(route, sampler, lag, peers=world.feed_peers)
    route = _sending(spec, learner, policy, world, folder)
    return Publisher(
        route, sampler, lag, probe=_probe(spec, policy, world.device), learner=learner, peers=world.feed_peers
    )


def _sending(spec: JobSpec, learner: Learner, policy: Any, world: World, folder: RunFolder) -> Route:
    place = world.place
    apart = spec.launch.samplers > 0 or spec.sampler.served  # rank 0 alone speaks to it
    pieces = policy.whole.sharded or isinstance(world.config, ZeroConfig)
    own = not pieces and policy.module is policy.inner  # whole here, with nothing to be merged
    if not apart and own:  # an engine in the rank, which draws while that waits
        return Copied(partial(policy.published, "all"), handed=True)
    first = 0 if apart else _first_here(world)
    changed, fixed, size = _sent(spec, learner, policy, keep=place.rank == first)
    shelf = Shelf(claim(folder.root, _room(spec, size))) if place.rank == first else None
    source = None if apart and not place.leads else first
    return Shelving(changed, fixed, peers=world.everyone, shelf=shelf, source=source)


def _room(spec: JobSpec, size: tuple[int, int]) -> int:
    """Bytes for versions of which size[0] differ and size[1] do not: as many as the lag needs, and a server's own."""
    beside = spec.sampler.copies() if isinstance(spec.sampler, VllmServerConfig) else 0
    return (spec.algorithm.steps_ahead() + 1 + beside) * size[0] + size[1]


def _first_here(world: World) -> int:
    """The first rank on this machine, which writes for all here. Ranks' places do not say it: Ray's actors each see
    their own cards alone, as on a machine of their own. Collective."""
    machines = world.everyone.gather(Machine.here())
    return machines.index(machines[world.place.rank])


def _sent(
    spec: JobSpec, learner: Learner, policy: Any, *, keep: bool
) -> tuple[Weights, Weights | None, tuple[int, int]]:
    """What is sent after each step and, unless it is nothing, before the first one; and how many bytes they are."""
    if not (ways := spec.sampler.sent()):  # the same model elsewhere
        size = sum(one.numel() * one.itemsize for one in blanks(policy.trainable()).values())
        return learner.weights, None, (size, 0)
    dtype, own = _engine_type(spec, policy), policy.inner.dtype
    send = [partial(policy.published, way, keep=keep, dtype=dtype) for way in ways]
    sizes = [*(policy.published_bytes(way) * (dtype or own).itemsize // own.itemsize for way in ways), 0]
    return send[0], send[1] if send[1:] else None, (sizes[0], sizes[1])


def _engine_type(spec: JobSpec, policy: Any) -> torch.dtype | None:
    """The data type that an engine of ours computes in; None = it is not ours to say."""
    if not hasattr(spec.sampler, "dtype"):
        return None
    return DTYPES[spec.sampler.dtype] if spec.sampler.dtype else cast(torch.dtype, policy.compute_type)


def _probe(spec: JobSpec, policy: Any, device: Device) -> Probe:
    types = {policy.compute_type, _engine_type(spec, policy) or policy.inner.dtype}
    usual = tolerance(*map(device.matmul_precision, types)).logprobs
    given = spec.sampler.probe if isinstance(spec.sampler, DrawingConfig) else None
    return Probe.of(spec.seed, policy.bounds().vocabulary, usual if given is None else given)
