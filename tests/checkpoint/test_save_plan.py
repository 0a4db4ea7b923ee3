"""Ranks that each have some of the state write one checkpoint: the one that a process with all of it writes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from runner.checkpoint.config import SafetensorsConfig
from runner.checkpoint.format import is_intact, read_manifest
from runner.checkpoint.store import CheckpointStore
from runner.core.errors import CheckpointError, RunnerError
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.parallelism.process_groups import ProcessGroupCollectives
from runner.trainer.optimizer_state import learner_state, load_parameters, restore_learner_state
from tests.parallelism.forked import TIMEOUT_S, ranks

NAMES = [f"layers.{layer}.{part}" for layer in range(4) for part in ("matrix", "vector")]


def store(root: Path, many: bool) -> CheckpointStore:
    made = CheckpointStore(SafetensorsConfig(keep=99), root=root, report=pytest.fail)
    made.peers = ProcessGroupCollectives(torch.distributed.group.WORLD, TIMEOUT_S) if many else SINGLE_PROCESS
    return made


def contents(root: Path, step: int = 1) -> dict[str, bytes]:
    folder = root / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "MANIFEST.json"}


def parameters(held: set[int]) -> dict[str, nn.Parameter]:
    """Those of four layers, of which only some are here."""
    made: dict[str, nn.Parameter] = {}
    for at, name in enumerate(NAMES):
        shape = (3, at + 1) if name.endswith("matrix") else (5,)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(at))
        made[name] = nn.Parameter(values if int(name.split(".")[1]) in held else values.to("meta"))
    return made


def learnt(held: set[int], steps: int) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """The same, after some steps whose gradients are the parameters themselves."""
    own = parameters(held)
    here = [p for p in own.values() if not p.is_meta]
    groups = [{"params": [p for p in here if p.ndim == 2], "weight_decay": 0.1}]
    groups += [{"params": [p for p in here if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    step(own, optimizer, steps)
    return own, optimizer


def step(own: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for parameter in own.values():
            if not parameter.is_meta:
                parameter.grad = parameter.detach().clone()
        optimizer.step()


STAGES = [{0, 1}, {2, 3}]
WHOLE = {0, 1, 2, 3}


@pytest.mark.parametrize("stages", [STAGES, [{0, 2}, {1, 3}]], ids=["in a row", "interleaved"])
def test_stages_write_what_one_process_would_and_go_on_from_either(tmp_path: Path, stages: list[set[int]]) -> None:
    def work(rank: int) -> None:
        own, optimizer = learnt(stages[rank], 2)
        store(tmp_path / "many", True).save(1, {"policy": learner_state(own, optimizer)}, {})
        for source in ("many", "one"):
            loaded = store(tmp_path / source, True).load(mapped=True)
            fresh, again = learnt(stages[rank], 0)
            assert loaded is not None
            restore_learner_state(fresh, again, loaded.state["policy"])
            step(fresh, again, 1)
            store(tmp_path / source, True).save(2, {"policy": learner_state(fresh, again)}, {})

    own, optimizer = learnt(WHOLE, 2)
    store(tmp_path / "one", False).save(1, {"policy": learner_state(own, optimizer)}, {})
    ranks(2, work)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    step(own, optimizer, 1)
    store(tmp_path / "straight", False).save(2, {"policy": learner_state(own, optimizer)}, {})
    assert contents(tmp_path / "many", 2) == contents(tmp_path / "one", 2) == contents(tmp_path / "straight", 2)


def test_what_lies_elsewhere_is_still_checked(tmp_path: Path) -> None:
    own, optimizer = learnt(WHOLE, 1)
    tensors = learner_state(own, optimizer)["tensors"]
    part = parameters({0, 1})
    load_parameters(part, tensors)
    assert all(p.is_meta or torch.equal(p, own[name]) for name, p in part.items())
    part[NAMES[-1]] = nn.Parameter(torch.empty(6, device="meta"))
    with pytest.raises(CheckpointError, match=r"layers\.3\.vector: .*\[5\] in the checkpoint"):
        load_parameters(part, tensors)
    del part[NAMES[-1]]
    with pytest.raises(CheckpointError, match="differ in 1 parameters"):
        load_parameters(part, tensors)


def drawn(moments: random.Random) -> list[dict[str, Any]]:
    """A state, and what each of three ranks has of it: every tensor, some of its optimizer's values, all the rest."""
    types = (torch.float32, torch.bfloat16, torch.int64)
    tensors = {f"t{at}": torch.full((at % 3, 4), at, dtype=moments.choice(types)) for at in range(9)}
    values = {name: {"steps": at, "at": [at, 0.5]} for at, name in enumerate(tensors)}
    owners = {name: moments.sample(range(3), moments.randint(1, 3)) for name in tensors}
    return [
        {
            "policy": {
                "tensors": {n: tensors[n] for n in moments.sample(sorted(own), len(own))},
                "optimizer": {"values": {n: values[n] for n in sorted(own)}, "groups": [{"lr": 0.1}]},
                "seen": 3,
            },
            "algorithm": {"tensors": {"all": torch.arange(3)}, "text": "é"},
        }
        for own in ([n for n in tensors if any(r == rank for r in owners[n]) or rank == 3] for rank in range(4))
    ]


def test_any_share_out_of_names_is_the_same_file(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for case in range(20):
            state = drawn(random.Random(case))[rank]
            store(tmp_path / f"many{case}", True).save(1, state, {})

    ranks(3, work)
    for case in range(20):
        store(tmp_path / f"one{case}", False).save(1, drawn(random.Random(case))[3], {})
        assert contents(tmp_path / f"many{case}") == contents(tmp_path / f"one{case}"), case


def test_no_bit_of_a_file_that_several_ranks_wrote_can_change_unnoticed(tmp_path: Path) -> None:
    whole = {"rows": torch.randn(5, 3), "columns": torch.randn(3, 4), "all": torch.randn(2), "one": torch.tensor(1)}

    def work(rank: int) -> None:
        mesh, ways = init_device_mesh("cpu", (2,)), {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}
        tensors = {n: distribute_tensor(whole[n], mesh, [way]) for n, way in ways.items()} | {"one": whole["one"]}
        store(tmp_path / "many", True).save(1, {"policy": {"tensors": tensors}}, {})

    ranks(2, work)
    store(tmp_path / "one", False).save(1, {"policy": {"tensors": whole}}, {})
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    record = read_manifest(tmp_path / "many" / "step-00000001").files["policy.safetensors"]
    shards = [dict(part.shards) for part in record.parts]
    assert shards == [{"one": "", "all": "0:2", "columns": "0:3,0:2", "rows": "0:3,0:3"},
                      {"columns": "0:3,2:4", "rows": "3:5,0:3"}]  # fmt: skip
    path = tmp_path / "many" / "step-00000001" / "policy.safetensors"
    content = path.read_bytes()
    for position in range(len(content) * 8):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert not is_intact(path, record), position
    path.write_bytes(content)
    assert is_intact(path, record)


def test_copies_on_several_ranks_are_the_first_ones(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        tensors = {"all": torch.tensor([rank])} | ({"some": torch.tensor([rank])} if rank else {})
        store(tmp_path, True).save(1, {"policy": {"tensors": tensors, "rank": rank}}, {})

    ranks(3, work)
    loaded = store(tmp_path, False).load()
    assert loaded is not None and loaded.state["policy"]["rank"] == 0
    assert {n: int(t) for n, t in loaded.state["policy"]["tensors"].items()} == {"all": 0, "some": 1}


CONTRADICTIONS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "shape": (
        [{"tensors": {"w": torch.zeros(2)}}, {"tensors": {"w": torch.zeros(3)}}],
        r"ranks 0 and 1 have different tensors in section policy: w is F32\[2\] and F32\[3\]",
    ),
    "type": (
        [{"tensors": {"w": torch.zeros(2)}}, {"tensors": {"w": torch.zeros(2).half()}}],
        r"w is F32\[2\] and F16\[2\]",
    ),
    "optimizer": (
        [{"optimizer": {"groups": [{"lr": 0.1}]}}, {"optimizer": {"groups": [{"lr": 0.2}]}}],
        r"ranks 0 and 1 have different values of policy\.optimizer\.groups\[0\]\.lr: 0\.1 and 0\.2",
    ),
    "groups": (
        [{"optimizer": {"groups": [{"lr": 0.1}]}}, {"optimizer": {"groups": []}}],
        r"different values of policy\.optimizer\.groups",
    ),
    "section": ([{"tensors": {}}, {}], r"ranks 0 and 1 have different state sections \(policy\)"),
}


def test_ranks_that_contradict_each_other_write_nothing(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for states, says in CONTRADICTIONS.values():
            with pytest.raises(RunnerError, match=says) as caught:
                store(tmp_path, True).save(1, {"policy": states[rank]}, {})
            assert "no checkpoint was written; earlier ones are unchanged" in str(caught.value)

    ranks(2, work)
    assert not list(tmp_path.iterdir())


def test_tied_tensors_are_tied_whoever_has_them(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        weight = torch.full((2, 2), 3.0)
        tensors = {"embed": weight, "head": weight} if rank else {"norm": torch.ones(2)}
        store(tmp_path, True).save(1, {"policy": {"tensors": tensors}}, {})

    ranks(2, work)
    loaded = store(tmp_path, False).load()
    assert loaded is not None
    tensors = loaded.state["policy"]["tensors"]
    assert tensors["head"] is tensors["embed"] and tensors.keys() == {"embed", "head", "norm"}
