"""The publisher: which version of the weights each step is sampled with, on every route, and that it is probed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.build.samplers import _first_rank_on_host, _weight_sync_probe, _weights_to_send
from runner.cli.job_builder import compose_job
from runner.core.errors import RunnerError, SamplerError, StorageError
from runner.core.rank_info import RankInfo
from runner.core.tolerance import TOLERANCES
from runner.device.config import CudaConfig
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.interfaces import Request, Rollout, StepResult
from runner.parallelism.parallel_context import ParallelContext
from runner.parallelism.rollout_partition import Rank0Sampler
from runner.trainer.learner import LocalLearner
from runner.trainer.loop import ExperienceQueue
from runner.weight_sync.publisher import Publisher, scores
from runner.weight_sync.store_dir import reserve_dir
from runner.weight_sync.sync_probe import ROWS, TOKENS, SyncProbe
from runner.weight_sync.transports import DeviceCopy, SameModel, SharedFiles, WeightTransport
from runner.weight_sync.weight_store import StoredWeights, WeightStore
from tests.model import zoo
from tests.parallelism.worlds import on_ranks


@pytest.mark.parametrize("tf32", [True, False])
def test_the_probe_allows_what_the_device_that_was_built_computes_in(tf32: bool, workdir: Path) -> None:
    config = CudaConfig(tf32=tf32)
    device: Any = SimpleNamespace(matmul_precision=lambda dtype: config.matmul_precision(str(dtype)[len("torch.") :]))
    policy = SimpleNamespace(
        compute_dtype=torch.float32,
        inner=SimpleNamespace(dtype=torch.float32),
        limits=lambda: SimpleNamespace(vocab_size=8),
    )
    spec = compose_job(["+recipe=grpo_demo", "device=auto"]).spec
    assert _weight_sync_probe(spec, policy, device).limit == TOLERANCES["tf32" if tf32 else "float32"].logprobs


class Remembers:
    """A sampler that keeps what it was given, and says of the rows what it is told to."""

    temperature = 1.0
    max_new_tokens = 1
    max_model_len = None

    def __init__(self) -> None:
        self.tensors: Mapping[str, Tensor] | None = None
        self.version = -1
        self.loads: list[int] = []
        self.calls: list[str] = []
        self.says: Callable[[Mapping[str, Tensor] | None], list[list[list[float]]]] = lambda tensors: [[]]

    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        self.tensors, self.version = tensors, version
        self.loads.append(version)

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        raise AssertionError("nothing is sampled here")

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        return self.says(self.tensors)

    def pop_metrics(self) -> dict[str, float]:
        return {"queue": 3.0}

    def release_memory(self) -> None:
        self.calls.append("release")

    def close(self) -> None:
        self.calls.append("close")


def shared(weights: Any, folder: Path) -> WeightTransport:
    return SameModel()


def handed(weights: Any, folder: Path) -> WeightTransport:
    return DeviceCopy(weights, by_reference=True)


def copied(weights: Any, folder: Path) -> WeightTransport:
    return DeviceCopy(weights)


def shelving(weights: Any, folder: Path) -> WeightTransport:
    shelf = WeightStore(reserve_dir(folder / "run", 0, folder))
    return SharedFiles(weights, lambda: iter([("fixed", torch.ones(3))]), peers=SINGLE_PROCESS, store=shelf, source=0)


SLOW = pytest.mark.slow
ROUTES = [(shared, 0), (handed, 0), *((copied, lag) for lag in (0, 1, 2, 4)), *((shelving, lag) for lag in (0, 1, 3))]


@pytest.mark.parametrize(("made", "lag"), ROUTES)
@pytest.mark.parametrize("first", [0, 3])
def test_a_step_is_sampled_with_exactly_the_weights_that_are_due(
    made: Callable[[Any, Path], WeightTransport], lag: int, first: int, tmp_path: Path
) -> None:
    weight = torch.tensor([float(first)])
    sampler = Remembers()

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield "w", weight

    publisher = Publisher(made(weights, tmp_path), sampler, lag)
    seen: dict[int, tuple[int, float]] = {}

    def collect(step: int) -> int:
        value = weight if sampler.tensors is None else sampler.tensors["w"]
        seen[step] = (sampler.version, float(value))
        return step

    publisher.publish(first)
    with ExperienceQueue(publisher.before(collect), first + 8, lag, encode=lambda _: {}, decode=lambda _: 0) as feed:
        feed.start(first)
        for step in range(first, first + 8):
            feed.take(step)
            weight += 1  # the update
            publisher.publish(step + 1)
            feed.on_weights_published(step)
    due = {step: max(step - lag, first) for step in range(first, first + 8)}
    assert seen == {step: (version, float(version)) for step, version in due.items()}
    assert sampler.loads == sorted(set(due.values())), "each version once"
    assert sampler.calls == ([] if lag else ["release"] * 8), "beside the trainer it makes room for it"
    publisher.close()
    assert not (tmp_path / "run").exists() and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", [copied, shelving])
def test_no_more_versions_are_kept_than_are_due(made: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    route = made(lambda: iter([("w", torch.zeros(1))]), tmp_path)
    publisher = Publisher(route, Remembers(), 2)
    for version in range(9):
        publisher.publish(version)
    kept = route._kept if made is copied else route._held
    assert sorted(kept) == [6, 7, 8]
    files = {path.name for path in tmp_path.glob("*/*.safetensors")}
    assert files == (set() if made is copied else {"fixed-0000.safetensors", *(f"v{v}-0000.safetensors" for v in kept)})
    publisher.close()


def metrics(publisher: Publisher) -> dict[str, float]:
    """What the publisher adds to a step's metrics."""
    end = StepResult(1, {}, last=False)
    publisher.on_step(end)
    return end.values


def test_what_a_sync_takes_is_measured(tmp_path: Path) -> None:
    publisher = Publisher(shelving(lambda: iter([("w", torch.zeros(1000))]), tmp_path), Remembers(), 1)
    for version in range(3):
        publisher.publish(version)
    publisher.load_for(2)
    found = metrics(publisher)
    assert found.pop("sampler/queue") == 3.0
    seconds, rate = found["weight_sync/send_s"], found["weight_sync/gb_per_s"]
    assert 4000 < found["weight_sync/bytes"] < 4400 and math.isclose(rate, found["weight_sync/bytes"] / seconds / 1e9)
    assert found.keys() == {"weight_sync/send_s", "weight_sync/gb_per_s", "weight_sync/load_s", "weight_sync/bytes"}
    publisher.close()


def learner() -> LocalLearner:
    model = zoo.causal("qwen2")
    options: dict[str, Any] = {"lr": 1.0, "clip_norm": None, "factor": lambda step: 1.0, "seed": 0}
    optimizer = torch.optim.SGD(model.trainable().values(), lr=0.1)
    return LocalLearner(model, optimizer, budget=40, device=zoo.CPU, **options)


def test_scores_are_those_of_the_plain_model() -> None:
    probe = SyncProbe.from_seed(5, zoo.VOCAB, 1e-3)
    one = learner()
    found = scores(one, probe.rows)
    wanted = zoo.reference(zoo.module("qwen2"), [list(row) for row in probe.rows])
    assert [len(row) for row in found] == [TOKENS - 1] * ROWS
    assert (torch.tensor(found) - wanted.view(ROWS, TOKENS)[:, 1:]).abs().max() < 1e-5  # float32
    assert probe.rows == SyncProbe.from_seed(5, zoo.VOCAB, 1e-3).rows != SyncProbe.from_seed(6, zoo.VOCAB, 1e-3).rows


@pytest.mark.parametrize(
    ("wrong", "wrong_loads"),
    [
        ("off", 0),
        ("off", 1),
        ("one engine of two", 2),
        *(pytest.param(kind, count, marks=SLOW) for kind in ("shape", "nan", "none") for count in (1, 2)),
    ],
)
def test_a_sampler_that_says_something_else_is_loaded_once_more_and_then_refused(
    wrong_loads: int, wrong: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, sampler, probe = learner(), Remembers(), SyncProbe.from_seed(0, zoo.VOCAB, 1e-3)
    publisher = Publisher(DeviceCopy(one.weights), sampler, 1, probe=probe, learner=one)
    right = scores(one, probe.rows)
    off = [[value + 0.01 for value in row] for row in right]
    answers = {
        "off": [off],
        "shape": [[row[1:] for row in right]],
        "nan": [[[math.nan, *row[1:]] for row in right]],
        "one engine of two": [right, off],
        "none": [],
    }

    def says(tensors: object) -> list[list[list[float]]]:
        return answers[wrong] if len(sampler.loads) <= wrong_loads else [right]

    sampler.says = says
    publisher.publish(4)
    if wrong_loads == 2:
        with pytest.raises(
            SamplerError, match=r"after the sync of version 4, twice.*sampler\.sync_logprob_tolerance=0\.001"
        ) as error:
            publisher.load_for(4)
        assert error.value.exit_code == 75
    else:
        publisher.load_for(4)
        assert metrics(publisher)["weight_sync/logprob_error"] == 0.0
    assert sampler.loads == [4] * min(wrong_loads + 1, 2)
    assert caplog.text.count("sending the weights again") == min(wrong_loads, 1)
    assert ("sampler 1 of 0 to 1 differs" in caplog.text) == (wrong == "one engine of two" and wrong_loads > 0)


def first_reads(world: ParallelContext, folder: Path, full: bool) -> tuple[str, bool, list[float]]:
    """Rank 0 writes and reads, for a sampler that it alone speaks to."""
    one = Remembers()

    def drained() -> Iterator[tuple[str, Tensor]]:
        for at in range(3):
            tensor = torch.full((2,), float(at))
            world.world_peers.all_reduce_([tensor])  # collective, as what makes pieces whole is
            yield f"t{at}", tensor
        if full and world.place.is_rank0:
            raise OSError(28, "No space left on device")

    leads = world.place.is_rank0
    shelf = WeightStore(reserve_dir(folder / "run", 0, folder)) if leads else None
    route = SharedFiles(drained, None, peers=world.world_peers, store=shelf, source=0 if leads else None)
    publisher = Publisher(route, Rank0Sampler(lambda: one, world.rollout_peers), 0, peers=world.rollout_peers)
    said = ""
    try:
        publisher.publish(0)
        publisher.load_for(0)
    except RunnerError as error:
        assert error.exit_code == StorageError.exit_code
        said = str(error)
    loaded = isinstance(one.tensors, StoredWeights)
    values = [float(one.tensors[f"t{at}"][0]) for at in range(3)] if one.tensors else []
    publisher.close()
    return said, loaded, values


@pytest.mark.parametrize("full", [False, True])
def test_one_rank_writes_what_all_drain_and_its_troubles_are_everyones(tmp_path: Path, full: bool) -> None:
    (said, loaded, values), (other, too, nothing) = on_ranks(2, first_reads, tmp_path, full)
    assert (loaded, too, nothing) == (not full, False, [])
    if full:
        assert said.startswith("cannot write the weights v0") and other.startswith("rank 0: cannot write the weights")
    else:
        assert (said, other, values) == ("", "", [0.0, 2.0, 4.0])
    assert list(tmp_path.iterdir()) == []


def each_reads(world: ParallelContext, folder: Path) -> tuple[int, str, dict[str, list[float]]]:
    """An engine in each rank, which reads what the first rank of its machine has written."""
    one, leads = Remembers(), world.place.local_rank == 0
    weights = partial(iter, [("w", torch.full((4,), 7.0))])
    shelf = WeightStore(reserve_dir(folder / "run", 0, folder)) if leads else None
    route = SharedFiles(weights, weights_of_base, peers=world.world_peers, store=shelf, source=0)
    publisher = Publisher(route, one, 1, peers=world.rollout_peers)
    publisher.publish(0)
    publisher.load_for(0)
    assert isinstance(one.tensors, StoredWeights)
    found = len(one.loads), one.tensors.digest, {name: tensor.tolist() for name, tensor in one.tensors.items()}
    world.world_peers.all_gather(0)
    publisher.close()
    return found


def weights_of_base() -> Iterator[tuple[str, Tensor]]:
    yield "base", torch.zeros(2)


def test_engines_of_all_ranks_read_one_copy(tmp_path: Path) -> None:
    found = on_ranks(2, each_reads, tmp_path)
    assert found[0] == found[1] and found[0][2] == {"base": [0.0, 0.0], "w": [7.0] * 4}
    assert list(tmp_path.iterdir()) == []


def writer(world: ParallelContext) -> int:
    place = RankInfo(world.place.rank, world.place.size, 0, 1)
    return _first_rank_on_host(replace(world, place=place))


def test_ranks_that_see_their_own_cards_alone_have_one_writer_on_a_machine() -> None:
    """As Ray's actors do, whose places are those of ranks with a machine each: two writers would claim one folder."""
    assert on_ranks(2, writer) == [0, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_room_for_versions_is_what_they_take_in_the_types_of_the_engine(dtype: str) -> None:
    spec = compose_job(["+recipe=grpo_demo", "sampler=vllm", f"sampler.dtype={dtype}"]).spec
    changed, fixed, sizes = _weights_to_send(spec, None, zoo.causal("qwen2"), keep=True)  # type: ignore[arg-type]
    assert fixed is not None
    assert tuple(sum(tensor.nbytes for _, tensor in tensors()) for tensors in (changed, fixed)) == sizes
