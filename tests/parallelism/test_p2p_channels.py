"""From the trainer's pieces to another program's model: published, shelved, loaded and probed, in every layout.

The engine here is transformers: it knows the blueprint and what is on the shelf, and nothing of the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from runner.core.auto_choices import Decisions
from runner.core.errors import RunnerError, SamplerError
from runner.interfaces import Request, Rollout, StepResult
from runner.parallelism.parallel_context import ParallelContext
from runner.parallelism.rollout_partition import Rank0Sampler
from runner.trainer.learner import LocalLearner
from runner.weight_sync.publisher import Publisher
from runner.weight_sync.store_dir import reserve_dir
from runner.weight_sync.sync_probe import SyncProbe
from runner.weight_sync.transports import SharedFiles
from runner.weight_sync.weight_checksum import weights_digest
from runner.weight_sync.weight_store import StoredWeights, WeightStore
from tests.model import zoo
from tests.parallelism import test_learning as plain
from tests.parallelism.forked import ranks
from tests.parallelism.test_fsdp import made
from tests.parallelism.test_published import LAYOUTS
from tests.parallelism.worlds import alone, meshed

SLOW = pytest.mark.slow
VERSIONS = 3
LIMIT = 1e-5  # mean |difference| of float32; measured: 2e-7, in slices 9e-7, where an adapter was merged 1.4e-6


class Engine:
    """A sampler whose model comes from files alone; stale: names that it reports as loaded, and leaves as they are."""

    temperature = 1.0
    max_new_tokens = 4
    max_model_len = None

    def __init__(self, blueprint: Path, stale: Sequence[str] = ()) -> None:
        self.model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(blueprint)).eval()
        self._blueprint, self._stale, self._version = blueprint, stale, -1
        self.loaded: list[int] = []

    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        assert isinstance(tensors, StoredWeights)
        assert tensors.digest == tensors.compute_digest()
        fresh = not self.loaded or version == self._version
        names = [name for name in tensors if fresh or name in tensors.changed]
        state = self.model.state_dict()
        if not state.keys() >= tensors.keys():  # experts, which transformers puts together as it reads them
            state = {}
            save_file(dict(tensors), self._blueprint / "model.safetensors", {"format": "pt"})
            self.model = AutoModelForCausalLM.from_pretrained(self._blueprint).eval()
        for name in names if state else ():
            if name not in self._stale or not self.loaded:
                state[name].copy_(tensors[name])
        self.loaded.append(len(names))
        self._version = version
        if state and not self._stale:  # what is in the engine is what was sent
            held = {name: state[name] for name in tensors}
            assert weights_digest(held) == tensors.digest

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        raise AssertionError("nothing is sampled here")

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        found = zoo.reference(self.model, [list(row) for row in rows]).split([len(row) for row in rows])
        return [[row[1:].tolist() for row in found]]

    def pop_metrics(self) -> dict[str, float]:
        return {}

    def release_memory(self) -> None: ...

    def close(self) -> None: ...


def publishing(model: Any, learner: LocalLearner, world: ParallelContext, folder: Path, stale: Sequence[str]) -> Any:
    """Rank 0 writes, and has the engine."""
    leads = world.place.is_rank0
    if leads:
        model.save_configs(folder / "blueprint")
    engine = Engine(folder / "blueprint", stale) if leads else None
    shelf = WeightStore(reserve_dir(folder / "run", 0, folder)) if leads else None
    ways = (partial(model.hf_tensors, way, keep=leads) for way in ("changed", "fixed"))
    route = SharedFiles(*ways, peers=world.world_peers, store=shelf, source=0 if leads else None)
    sampler: Any = Rank0Sampler(lambda: engine, world.rollout_peers)  # type: ignore[arg-type,return-value]
    probe = SyncProbe.from_seed(1, zoo.VOCAB, LIMIT)
    options: dict[str, Any] = {"probe": probe, "learner": learner, "peers": world.rollout_peers}
    return Publisher(route, sampler, 0, **options), engine


def sent(world: ParallelContext, model: Any, folder: Path, stale: Sequence[str]) -> tuple[list[float], list[int], str]:
    """How far the engine was off after each of some steps, and how many tensors it loaded; or what went wrong."""
    learner = plain.learner(model, world)
    learner._gradients, learner._stage = world.gradient_reducer(model), model.stage
    learner._drawing = world.replica_peers
    publisher, engine = publishing(model, learner, world, folder, stale)
    found = []
    try:
        for version in range(VERSIONS):
            publisher.publish(version)
            publisher.load_for(version)
            publisher.on_step(end := StepResult(version, {}, last=False))
            found.append(end.values["weight_sync/logprob_error"])
            learner.begin_step(version)
            learner.forward_backward(plain.given(version), plain.CrossEntropy())
            learner.optim_step()
    except RunnerError as error:
        assert error.exit_code == SamplerError.exit_code
        return found, [], str(error)
    finally:
        publisher.close()
    return found, engine.loaded if engine else [], ""


@pytest.mark.parametrize(
    ("layout", "kind", "adapter"),
    [
        ("fsdp", "qwen3", True),
        *(
            pytest.param(layout, kind, adapter, marks=SLOW if kind == "qwen3" and adapter else pytest.mark.soak)
            for layout in LAYOUTS
            for kind in ("qwen3", "llama")
            for adapter in (True, False)
            if layout != "ep" and (layout, kind, adapter) != ("fsdp", "qwen3", True)
        ),
        pytest.param("ep", "qwen3_moe", False, marks=SLOW),
    ],
)
def test_every_layout_sends_what_another_program_computes_with(
    tmp_path: Path, layout: str, kind: str, adapter: bool
) -> None:
    def work(rank: int) -> tuple[list[float], list[int], str]:
        world, model = meshed(*LAYOUTS[layout]), made(kind, adapter, tie_word_embeddings=True)
        world.shard(model, Decisions())
        return sent(world, model, tmp_path, ())

    found = ranks(LAYOUTS[layout][1].world_size, work)
    for differences, _, error in found:
        assert len(differences) == VERSIONS and max(differences) < LIMIT and error == ""
    first, *later = found[0][1]
    assert len(later) == VERSIONS - 1 and all(count < first if adapter else count == first for count in later)
    assert [path.name for path in tmp_path.iterdir()] == ["blueprint"]


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=SLOW)])
def test_an_engine_that_keeps_an_old_head_is_found(tmp_path: Path, several: bool) -> None:
    """As an engine does that reports success and leaves a tied head as it was."""

    def work(rank: int) -> tuple[list[float], list[int], str]:
        world, model = meshed(*LAYOUTS["fsdp"]) if several else alone(), made("llama", False)
        if several:
            world.shard(model, Decisions())
        return sent(world, model, tmp_path, ("lm_head.weight",))

    for differences, _, error in ranks(2, work) if several else [work(0)]:
        assert differences[0] < LIMIT and len(differences) == 1, "it is found at once, where the head has changed"
        assert "after the sync of version 1, twice" in error
