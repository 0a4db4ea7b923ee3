"""What samples, where it does, and what brings the policy's weights there.

torch             in each rank, over the policy (lag 0) or a copy of it
an engine         in each rank, beside the policy
launch.samplers   processes of their own: rank 0 speaks to them, for all
a server          that others run: rank 0 speaks to it, for all
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from runner.build.parts import build_blank_model, build_device, build_model, build_tokenizer, longest_row
from runner.checkpoint.store import CheckpointStore
from runner.core.auto_choices import Decisions
from runner.core.rank_info import Machine
from runner.core.tolerance import tolerance
from runner.interfaces import Device, GenerativeModel, Learner, Sampler, TrainableModel
from runner.model.build import DTYPES
from runner.model.export import blanks
from runner.parallelism.rollout_partition import FirstSampler, SharedSampler
from runner.parallelism.world import World
from runner.run_dir.folder import RunFolder
from runner.sampler.base import DrawingConfig
from runner.sampler.journal import Journal
from runner.sampler.probed import Probe
from runner.sampler.remote.backends import Collectives
from runner.sampler.remote.remotes import Remotes
from runner.sampler.remote.wire import job_token
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.trainer.callbacks import Activity
from runner.weight_sync.publisher import Publisher
from runner.weight_sync.routes import Copied, Route, Shared, Shelving, Weights
from runner.weight_sync.shelf import Shelf
from runner.weight_sync.shelf_folder import claim


def build_sampler(
    spec: JobSpec,
    policy: GenerativeModel,
    tokenizer: Any,
    device: Device,
    world: World,
    decide: Decisions,
    folder: RunFolder,
    store: CheckpointStore,
) -> Sampler:
    """The sampler as every rank asks it. What does not repeat bit for bit has a journal."""
    sampler = _sampler(spec, policy, tokenizer, device, world, decide, folder)
    _say_room(spec, sampler, decide)
    if spec.sampler.engine:
        sampler = Journal(sampler, folder.journal, world.feed_peers, lambda: min(store.steps(), default=0))
    return sampler


def _sampler(
    spec: JobSpec,
    policy: GenerativeModel,
    tokenizer: Any,
    device: Device,
    world: World,
    decide: Decisions,
    folder: RunFolder,
) -> Sampler:
    if spec.launch.samplers:
        return FirstSampler(lambda: _remotes(spec, policy, device, folder), world.feed_peers)
    if spec.sampler.served:
        return FirstSampler(lambda: made(spec, policy, decide, folder), world.feed_peers)
    if spec.sampler.engine:
        return SharedSampler(made(spec, policy, decide, folder), world.feed_peers, nullcontext)
    head = next(iter(spec.algorithm.learners().values()))  # the copy has the heads of the policy, whose weights it gets
    ahead = spec.algorithm.steps_ahead() > 0
    model = build_model(spec, tokenizer, device, decide, head, world.in_copies()) if ahead else policy
    return SharedSampler(made(spec, model, decide, folder), world.feed_peers, partial(world.whole, model))


def _remotes(spec: JobSpec, policy: GenerativeModel, device: Device, folder: RunFolder) -> Remotes:
    assert isinstance(spec.sampler, DrawingConfig)  # or nothing would be sampled
    count = spec.launch.samplers // spec.sampler.cards()
    vocabulary, by = policy.bounds().vocabulary, collectives_of(spec, device)
    return Remotes(spec.sampler, count, folder.samplers, token=job_token(), vocabulary=vocabulary, collectives=by)


def collectives_of(spec: JobSpec, device: Device) -> Collectives | None:
    """By which weights get from this process, or to it, over the network; None = over HTTP."""
    if not spec.sampler.collective():
        return None
    return Collectives(device.backend.rpartition(":")[2], device.torch_device)


def made(spec: JobSpec, model: TrainableModel, decide: Decisions, folder: RunFolder) -> Sampler:
    """The sampler of this process. An engine reads from a folder of its own, which it removes."""
    options: Mapping[str, Any] = {}
    if spec.sampler.engine:
        served = {"recomputed": not spec.algorithm.weighs_samples()}
        own = served if spec.sampler.served else {"longest": longest_row(spec)}
        shutil.rmtree(folder.engine, ignore_errors=True)  # of a process that was killed
        folder.engine.mkdir(parents=True)
        options = {"folder": folder.engine, **own}
    sampler: Sampler = default_registry().factory(spec.sampler)(spec.sampler, model=model, decide=decide, **options)
    return sampler


def _say_room(spec: JobSpec, sampler: Sampler, decide: Decisions) -> None:
    """Where the policy's turns alone may outgrow the model: the words of the environment come on top."""
    turns = spec.environment.most_turns()
    whole = spec.data.max_length + turns * spec.sampler.answer_tokens()
    if turns > 1 and sampler.longest is not None and whole > sampler.longest:
        asked = f"a prompt and {turns} turns may come to {whole} tokens without what the environment says"
        decide.state("environment", f"episodes end at {sampler.longest} tokens, cut off", asked)


def build_own_sampler(
    spec: JobSpec, decide: Decisions, folder: RunFolder
) -> tuple[Sampler, Collectives | None, Activity]:
    """The sampler on this process's devices, by what it gets weights over the network, and what watches its device;
    torch's has the weights that the job begins with, an engine none yet."""
    device, tokenizer = build_device(spec, decide), build_tokenizer(spec)
    head = next(iter(spec.algorithm.learners().values()))  # it has the heads of the policy, whose weights it gets
    if spec.sampler.engine:  # which makes its own model of what this one says that it is
        model = build_blank_model(spec, tokenizer, decide, head)
    else:
        model = build_model(spec, tokenizer, device, decide, head)
    activity = Activity(device.readings() if spec.watch.device_s else (), spec.watch.device_s)
    return made(spec, model, decide, folder), collectives_of(spec, device), activity


def build_publisher(
    spec: JobSpec, folder: RunFolder, sampler: Sampler, learner: Learner, policy: GenerativeModel, world: World
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


def _sending(spec: JobSpec, learner: Learner, policy: GenerativeModel, world: World, folder: RunFolder) -> Route:
    place = world.place
    apart = spec.launch.samplers > 0 or spec.sampler.served  # rank 0 alone speaks to it
    pieces = policy.whole.sharded or world.config.deepspeed
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
    return (spec.algorithm.steps_ahead() + 1 + spec.sampler.copies()) * size[0] + size[1]


def _first_here(world: World) -> int:
    """The first rank on this machine, which writes for all here. Ranks' places do not say it: Ray's actors each see
    their own cards alone, as on a machine of their own. Collective."""
    machines = world.everyone.gather(Machine.here())
    return machines.index(machines[world.place.rank])


def _sent(
    spec: JobSpec, learner: Learner, policy: GenerativeModel, *, keep: bool
) -> tuple[Weights, Weights | None, tuple[int, int]]:
    """What is sent after each step and, unless it is nothing, before the first one; and how many bytes they are."""
    if not (ways := spec.sampler.sent()):  # the same model elsewhere
        size = sum(one.numel() * one.itemsize for one in blanks(policy.trainable()).values())
        return learner.weights, None, (size, 0)
    dtype, own = _engine_type(spec, policy), policy.inner.dtype
    send = [partial(policy.published, way, keep=keep, dtype=dtype) for way in ways]
    sizes = [*(policy.published_bytes(way) * (dtype or own).itemsize // own.itemsize for way in ways), 0]
    return send[0], send[1] if send[1:] else None, (sizes[0], sizes[1])


def _engine_type(spec: JobSpec, policy: GenerativeModel) -> torch.dtype | None:
    """The data type that an engine of ours computes in; None = it is not ours to say."""
    products = next(name for name, dtype in DTYPES.items() if dtype == policy.compute_type)
    dtype = spec.sampler.weights_dtype(products)
    return None if dtype is None else DTYPES[dtype]


def _probe(spec: JobSpec, policy: GenerativeModel, device: Device) -> Probe:
    types = {policy.compute_type, _engine_type(spec, policy) or policy.inner.dtype}
    usual = tolerance(*map(device.matmul_precision, types)).logprobs
    given = spec.sampler.logprob_tolerance()
    return Probe.of(spec.seed, policy.bounds().vocabulary, usual if given is None else given)
