"""What samples, and where it does.

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

from runner.build.parts import build_model, longest_row
from runner.checkpoint.store import CheckpointStore
from runner.decisions import Decisions
from runner.folder import RunFolder
from runner.parallelism.shared import FirstSampler, SharedSampler
from runner.parallelism.world import World
from runner.protocols import Device, Sampler
from runner.registry import default_registry
from runner.sampler.base import DrawingConfig, JobSamplerConfig
from runner.sampler.journal import Journal
from runner.sampler.remote.backends import Collectives
from runner.sampler.remote.remotes import Remotes
from runner.sampler.remote.secret import token
from runner.spec.job import JobSpec


def build_sampler(
    spec: JobSpec,
    policy: Any,
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
    spec: JobSpec, policy: Any, tokenizer: Any, device: Device, world: World, decide: Decisions, folder: RunFolder
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


def _remotes(spec: JobSpec, policy: Any, device: Device, folder: RunFolder) -> Remotes:
    assert isinstance(spec.sampler, DrawingConfig)  # or nothing would be sampled
    count = spec.launch.samplers // spec.sampler.cards()
    vocabulary, by = policy.bounds().vocabulary, collectives_of(spec, device)
    return Remotes(spec.sampler, count, folder.samplers, token=token(), vocabulary=vocabulary, collectives=by)


def collectives_of(spec: JobSpec, device: Device) -> Collectives | None:
    """By which weights get from this process, or to it, over the network; None = over HTTP."""
    if not isinstance(spec.sampler, JobSamplerConfig) or spec.sampler.transport != "collective":
        return None
    return Collectives(device.backend.rpartition(":")[2], device.torch_device)


def made(spec: JobSpec, model: Any, decide: Decisions, folder: RunFolder) -> Sampler:
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
