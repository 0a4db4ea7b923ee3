"""What samples, where it does, and what brings the policy's weights there.

torch             in each rank, over the policy (lag 0) or a copy of it
an engine         in each rank, beside the policy
launch.samplers   rollout servers that the job starts: rank 0 is their client, for all ranks
a server          that others run: rank 0 is its client, for all ranks
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch

from runner.build.components import build_blank_model, build_device, build_model, build_tokenizer, longest_row
from runner.build.result_check import build_component
from runner.build.router_replay import hook_routers
from runner.checkpoint.store import CheckpointStore
from runner.core.auto_choices import Decisions
from runner.core.rank_info import Host
from runner.core.tolerance import tolerance_of
from runner.interfaces import Device, GenerativeModel, Learner, Sampler, TrainableModel
from runner.interfaces.media import ImageReader, images_of
from runner.interfaces.sampling import InterruptibleSampler
from runner.model.export import meta_tensors
from runner.model.initial_weights import DTYPES
from runner.parallelism.parallel_context import ParallelContext
from runner.parallelism.rollout_partition import PartitionedSampler, Rank0Sampler
from runner.run_dir.folder import RunFolder
from runner.sampler.base import SamplingConfig
from runner.sampler.rollout_journal import RolloutJournal
from runner.sampler.server.job_token import job_token
from runner.sampler.server.pool import SamplerPool
from runner.spec.base import Head
from runner.spec.job import JobSpec
from runner.trainer.callbacks import DeviceStats
from runner.weight_sync.publisher import Publisher
from runner.weight_sync.store_dir import reserve_dir
from runner.weight_sync.sync_probe import SyncProbe
from runner.weight_sync.transports import DeviceCopy, SameModel, SharedFiles, Weights, WeightTransport
from runner.weight_sync.weight_store import WeightStore


def build_sampler(
    spec: JobSpec,
    policy: GenerativeModel,
    world: ParallelContext,
    decide: Decisions,
    folder: RunFolder,
    store: CheckpointStore,
) -> Sampler:
    """The sampler as every rank calls it. What does not repeat bit for bit has a journal.

    Programs call at moments of their own, so that the batches that their calls are sampled in do not repeat.
    """
    peers, tokenizer = world.rollout_peers, policy.tokenizer
    if spec.launch.samplers:
        sampler: Sampler = Rank0Sampler(lambda: _sampler_pool(spec, policy, folder), peers)
    elif spec.sampler.served:
        sampler = Rank0Sampler(lambda: make_local_sampler(spec, policy, decide, folder), peers)
    elif spec.sampler.engine:
        sampler = PartitionedSampler(make_local_sampler(spec, policy, decide, folder), peers, nullcontext, tokenizer)
    else:
        head = _policy_head(spec)
        ahead = spec.algorithm.steps_ahead() > 0
        model = build_model(spec, tokenizer, world.device, decide, head, world.as_ddp()) if ahead else policy
        own = make_local_sampler(spec, model, decide, folder)
        sampler = PartitionedSampler(own, peers, partial(world.summon_full_params, model), tokenizer)
    _report_episode_limit(spec, sampler, decide)
    _report_padding(policy.limits().vocab_size, tokenizer, decide)
    if spec.sampler.engine or spec.sampler.is_interruptible or not spec.environment.is_repeatable():
        sampler = RolloutJournal(sampler, folder.journal, peers, lambda: min(store.steps(), default=0))
    return sampler


def _policy_head(spec: JobSpec) -> Head:
    """The head of the policy, which its copy needs for the weights that it gets."""
    return next(iter(spec.algorithm.trained_models().values()))


def _sampler_pool(spec: JobSpec, policy: GenerativeModel, folder: RunFolder) -> SamplerPool:
    assert isinstance(spec.sampler, SamplingConfig)  # or nothing would be sampled
    count, vocab_size = spec.launch.samplers // spec.sampler.cards(), policy.limits().vocab_size
    options: dict[str, Any] = {"vocab_size": vocab_size, "images": images_of(policy.tokenizer)}
    return SamplerPool(spec.sampler, count, folder.samplers, token=job_token(), **options)


def make_local_sampler(spec: JobSpec, model: TrainableModel, decide: Decisions, folder: RunFolder) -> Sampler:
    """The sampler of this process. An engine reads from a folder of its own, which it removes."""
    options: Mapping[str, Any] = {}
    if spec.sampler.shares_model:
        hook_routers(spec, model, decide)
    if spec.sampler.engine:
        served = {"recomputed": not spec.algorithm.needs_sampler_logprobs()}
        own = served if spec.sampler.served else {"longest": engine_row_limit(spec)}
        shutil.rmtree(folder.engine, ignore_errors=True)  # of a process that was killed
        folder.engine.mkdir(parents=True)
        options = {"folder": folder.engine, **own}
    sampler: Sampler = build_component(spec.sampler, model=model, decide=decide, **options)
    return sampler


def engine_row_limit(spec: JobSpec) -> int:
    """Tokens of the longest row that an engine gets; 2**31 = as the model allows.

    That is where only the trainer reads the data, and where an environment adds messages and tools of any length.
    """
    unknown = spec.data.max_length is None or spec.environment.most_turns() > 1
    return 2**31 if unknown else longest_row(spec)


def _report_padding(vocab_size: int, tokenizer: Any, decide: Decisions) -> None:
    """Say that the embedding has rows without a token.

    They are not masked in sampling: then samples would come from another distribution than the one that is trained,
    whose softmax has all rows, as in transformers, in vLLM and in the loss of supervised training.
    """
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens < vocab_size:
        text = f"the vocabulary has {tokens}; the model gives ids above them some probability, and they have no text"
        decide.record_fact("sampler", f"samples from all {vocab_size} ids", text)


def _report_episode_limit(spec: JobSpec, sampler: Sampler, decide: Decisions) -> None:
    """Where the policy's turns alone may outgrow the model: the words of the environment come on top."""
    turns = spec.environment.most_turns()
    whole = (spec.data.max_length or 0) + spec.episode_tokens()
    if turns > 1 and sampler.max_model_len is not None and whole > sampler.max_model_len:
        alone = ", without the environment's messages" if spec.environment.episode_token_limit() is None else ""
        asked = f"a prompt and {turns} turns can have {whole} tokens{alone}"
        decide.record_fact("environment", f"episodes are truncated at {sampler.max_model_len} tokens", asked)


def build_worker_sampler(
    spec: JobSpec, decide: Decisions, folder: RunFolder
) -> tuple[Sampler, DeviceStats, ImageReader | None]:
    """The sampler of a rollout server, the reader of its device's load, and that of its images.

    The torch sampler starts with the job's initial weights, an engine without any.
    """
    device, tokenizer = build_device(spec, decide), build_tokenizer(spec, decide)
    head = _policy_head(spec)
    if spec.sampler.engine:  # which makes its own model of what this one says that it is
        model = build_blank_model(spec, tokenizer, decide, head)
    else:
        model = build_model(spec, tokenizer, device, decide, head)
    interval_s = spec.watch.device_stats_interval_s
    activity = DeviceStats(device.stats_readers() if interval_s else (), interval_s)
    return make_local_sampler(spec, model, decide, folder), activity, images_of(tokenizer)


def build_publisher(
    spec: JobSpec,
    folder: RunFolder,
    sampler: Sampler,
    learner: Learner,
    policy: GenerativeModel,
    world: ParallelContext,
) -> Publisher:
    """What brings the weights of `learner`, whose model is `policy`, to the sampler."""
    lag = spec.algorithm.steps_ahead()
    if not spec.launch.samplers and not spec.sampler.weights_to_send():  # the ranks', or one that is sent nothing
        route: WeightTransport = SameModel()
        if lag and not spec.sampler.served:
            route = copies = DeviceCopy(learner.weights)
            if spec.sampler.is_interruptible:
                cast(InterruptibleSampler, sampler).set_weight_source(copies.newest)
        return Publisher(route, sampler, lag, peers=world.rollout_peers)
    route = _weight_route(spec, learner, policy, world, folder)
    probe = _weight_sync_probe(spec, policy, world.device)
    return Publisher(route, sampler, lag, probe=probe, learner=learner, peers=world.rollout_peers)


def _weight_route(
    spec: JobSpec, learner: Learner, policy: GenerativeModel, world: ParallelContext, folder: RunFolder
) -> WeightTransport:
    place = world.place
    apart = spec.launch.samplers > 0 or spec.sampler.served  # only rank 0 connects to it
    pieces = policy.whole.is_sharded or world.config.deepspeed
    own = not pieces and policy.module is policy.inner  # whole here, with nothing to be merged
    if not apart and own:  # an engine in the rank, which draws while that waits
        return DeviceCopy(partial(policy.hf_tensors, "all"), by_reference=True)
    first = 0 if apart else _first_rank_on_host(world)
    changed, fixed, size = _weights_to_send(spec, learner, policy, keep=place.rank == first)
    store = WeightStore(reserve_dir(folder.root, _shared_memory_bytes(spec, size))) if place.rank == first else None
    source = None if apart and not place.is_rank0 else first
    return SharedFiles(changed, fixed, peers=world.world_peers, store=store, source=source)


def _shared_memory_bytes(spec: JobSpec, size: tuple[int, int]) -> int:
    """Bytes for all versions in memory: size[0] per version and size[1] shared between them.

    As many versions as the lag needs, and one of a server.
    """
    return (spec.algorithm.steps_ahead() + 1 + spec.sampler.extra_weight_copies()) * size[0] + size[1]


def _first_rank_on_host(world: ParallelContext) -> int:
    """The first rank on this machine, which writes for all ranks there. Collective.

    Local ranks do not tell: each of Ray's actors sees its own cards alone, as on a machine of its own.
    """
    machines = world.world_peers.all_gather(Host.current())
    return machines.index(machines[world.place.rank])


def _weights_to_send(
    spec: JobSpec, learner: Learner, policy: GenerativeModel, *, keep: bool
) -> tuple[Weights, Weights | None, tuple[int, int]]:
    """Names of the weights that are sent after each step and before the first one, and their bytes."""
    if not (ways := spec.sampler.weights_to_send()):  # the same model elsewhere
        size = sum(one.numel() * one.itemsize for one in meta_tensors(policy.trainable()).values())
        return learner.weights, None, (size, 0)
    dtype, own = _engine_dtype(spec, policy), policy.inner.dtype
    send = [partial(policy.hf_tensors, way, keep=keep, dtype=dtype) for way in ways]
    sizes = [*(policy.hf_tensor_bytes(way) * (dtype or own).itemsize // own.itemsize for way in ways), 0]
    return send[0], send[1] if send[1:] else None, (sizes[0], sizes[1])


def _engine_dtype(spec: JobSpec, policy: GenerativeModel) -> torch.dtype | None:
    """The data type that an engine of ours computes in; None = it is not ours to say."""
    products = next(name for name, dtype in DTYPES.items() if dtype == policy.compute_dtype)
    dtype = spec.sampler.weights_dtype(products)
    return None if dtype is None else DTYPES[dtype]


def _weight_sync_probe(spec: JobSpec, policy: GenerativeModel, device: Device) -> SyncProbe:
    types = {policy.compute_dtype, _engine_dtype(spec, policy) or policy.inner.dtype}
    usual = tolerance_of(*map(device.matmul_precision, types)).logprobs
    given = spec.sampler.logprob_tolerance()
    return SyncProbe.from_seed(spec.seed, policy.limits().vocab_size, usual if given is None else given)
