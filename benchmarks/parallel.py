"""What it costs to be one of several ranks: time beside the learning, bytes sent, bytes held.

    python benchmarks/parallel.py [--only CASE …] [--steps 6] [--out FILE]

overhead  one process, against the same as the only rank of a process group (gloo), with a whole model and with one that
          FSDP2 has in a single piece: processor seconds of a step, the arms in turn, so that all meet the same machine
sent      what each rank writes to its sockets in a step, the mean over ranks, against the textbook's (`run plan`)
held      what the fullest rank keeps of weights and optimizer state, against its ideal share

A model of Qwen2 type (of Qwen3-MoE type where there are experts) learns packed rows of unequal lengths, AdamW, float32,
one thread a rank. All ways of spreading it over as many ranks must end with the same loss. Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from runner.algorithm.sft import CrossEntropy
from runner.build.components import build_device, build_model, build_tokenizer
from runner.build.learners import build_learner
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch, pack, with_totals
from runner.core.rank_info import RankInfo
from runner.distributed.dtensor_utils import local_tensor
from runner.parallelism import process_groups as groups
from runner.parallelism.config import DdpConfig, FsdpConfig, MeshConfig, SingleConfig
from runner.parallelism.mesh import Mesh
from runner.parallelism.parallel_context import ParallelContext, build
from runner.parallelism.process_groups import ProcessGroupCollectives
from runner.spec.job import JobSpec
from runner.tools.plan.model import architecture, tensor_parallel_config
from runner.tools.plan.rank_layout import model_weights, rank_layout
from runner.tools.plan.traffic import sent_bytes_by_purpose
from runner.trainer.learner import LocalLearner

JOB = (
    "algorithm=sft model=tiny model.hidden_size=256 model.intermediate_size=768 model.layers=4 data=demo device=cpu "
    "algorithm.batch_size=16 algorithm.micro_batch_tokens=512 schedule=constant schedule.warmup_steps=0 tracker=none"
)
MIXTURE = "model=tiny_moe model.intermediate_size=128"
CASES = {
    "ddp, 2 ranks": "parallelism=ddp launch.devices=2",
    "ddp": "parallelism=ddp",
    "fsdp, 2 ranks": "parallelism=fsdp launch.devices=2",
    "fsdp": "parallelism=fsdp",
    "hsdp": "parallelism=hsdp",
    "tp": "parallelism=tp",
    "tp × fsdp": "parallelism=fsdp parallelism.tp=2",
    "cp, ulysses": "parallelism=cp",
    "cp, ring": "parallelism=cp parallelism.cp_backend=ring",
    "cp × fsdp": "parallelism=fsdp parallelism.cp=2",
    "pp": "parallelism=pp",
    "pp, 2 chunks × ddp": "parallelism=ddp parallelism.pp=2 parallelism.pp_virtual_stages=2",
    "pp × fsdp": "parallelism=fsdp parallelism.pp=2",
    "ep": f"{MIXTURE} parallelism=ep",
    "ep × fsdp": f"{MIXTURE} parallelism=fsdp parallelism.ep=2",
}
WARM_UP = 2  # steps that are not counted
ROWS, LONGEST = 16, 128
GROUP_S = 60.0  # that one rank waits for another


def composed(words: str) -> JobSpec:
    """The job of a case; four ranks where it does not say how many."""
    chosen = dict(word.split("=", 1) for word in f"{JOB} launch.devices=4 {words}".split())
    return compose_job([f"{key}={value}" for key, value in chosen.items()]).spec


def batch(step: int) -> Batch:
    """Rows of 16 to 128 random tokens."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(16, LONGEST + 1, (ROWS,), generator=generator).tolist()
    ids = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]
    packed = pack(ids, [[1.0] * n for n in lengths])
    return with_totals(packed, packed.count())


def learner(spec: JobSpec, world: ParallelContext) -> LocalLearner:
    """The job's model with its optimizer, spread as `world` says."""
    decide = Decisions()
    model = build_model(spec, build_tokenizer(spec, decide), world.device, decide, world=world)
    if world.place.size == 1 and world.groups is not None:  # an only rank, whose model is built as that of one process
        world.shard(model, decide)
    return build_learner(spec, "policy", model, world, decide)


def one_step(subject: LocalLearner, step: int) -> float:
    """Learn from a step's batch; the loss."""
    subject.begin_step(step)
    metrics, _ = subject.forward_backward(batch(step), CrossEntropy())
    subject.optim_step()
    return metrics.result()["train/loss"]


def only_rank(config: MeshConfig, device: Any) -> ParallelContext:
    """The world of the only rank of a process group, which a job never is: it would be `single`."""
    mesh, place, timeout = Mesh(), RankInfo(), timedelta(seconds=GROUP_S)
    found = groups.create_groups(mesh, "cpu", "gloo", timeout, 1)
    peers = ProcessGroupCollectives(distributed.group.WORLD, GROUP_S)
    return ParallelContext(config, device, place, mesh, found, *[peers] * 5)


def overhead(count: int) -> dict[str, Any]:
    """All arms in one process, step by step in turn; of each its median ratio to a single process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    distributed.init_process_group("gloo", rank=0, world_size=1)
    spec = composed("launch.devices=1 parallelism=single")
    device = build_device(spec, Decisions())
    worlds = {"single": build(SingleConfig(), device=device, place=RankInfo())}
    worlds |= {config.name: only_rank(config, device) for config in (DdpConfig(), FsdpConfig())}
    arms: dict[str, LocalLearner] = {}
    for name, world in worlds.items():
        arms[name] = learner(spec, world)
    found: dict[str, list[float]] = {name: [] for name in arms}
    for step in range(count):
        for name, subject in arms.items():
            before = time.process_time()
            one_step(subject, step)
            found[name].append(time.process_time() - before)
    distributed.destroy_process_group()
    single = found["single"][WARM_UP:]
    ratios = {n: [b / a for a, b in zip(single, times[WARM_UP:], strict=True)] for n, times in found.items()}
    return {"seconds": statistics.median(single), **{name: statistics.median(all_) for name, all_ in ratios.items()}}


def rank(place: RankInfo, port: int, count: int, name: str, out: Any) -> None:
    """One of several: the bytes that it writes in each step, and those that it holds."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    spec = composed(CASES[name])
    world = build(spec.parallelism, device=build_device(spec, Decisions()), place=place)
    subject, sent, loss = learner(spec, world), [], 0.0
    for step in range(count):
        before = written()
        loss = one_step(subject, step)
        sent.append(written() - before)
    weights = [p for p in subject.model.trainable().values() if not p.is_meta]
    states = [t for entry in subject.optimizer.state.values() for t in entry.values() if t.ndim]
    held = sum(local_tensor(t).untyped_storage().nbytes() for t in (*weights, *states))
    out.put((place.rank, loss, statistics.mean(sent[WARM_UP:]), held))
    world.close()


def measured(name: str, count: int) -> dict[str, Any]:
    """A case on its ranks: losses, bytes sent and held, and what they should be."""
    spec = composed(CASES[name])
    size = spec.launch.world
    context = multiprocessing.get_context("spawn")
    out, port = context.Queue(), free_port()
    places = [RankInfo(at, size, at, size) for at in range(size)]
    ranks = [context.Process(target=rank, args=(place, port, count, name, out)) for place in places]
    for one in ranks:
        one.start()
    found = [out.get(timeout=600) for _ in ranks]
    for one in ranks:
        one.join()
    _, losses, sent, held = zip(*found, strict=True)
    return {
        "case": name,
        "ranks": size,
        "losses": sorted(losses),
        "sent_bytes": statistics.mean(sent),
        "held_bytes": max(held),
        **ideal(spec, count),
    }


def ideal(spec: JobSpec, count: int) -> dict[str, float]:
    """Bytes that a rank should send in a step of these batches, in the mean over the stages; those of the whole, and of
    the fullest rank's share of it, with the two numbers that AdamW keeps for each."""
    shape, _ = architecture(spec.model)
    spread = rank_layout(spec.parallelism, spec.launch.world, shape)
    whole = model_weights(spec, "lm", shape).all
    model = model_weights(spec, "lm", tensor_parallel_config(shape, spread.mesh.tp))
    steps = [batch(step).num_tokens / spread.mesh.dp_size for step in range(WARM_UP, count)]
    tokens = round(statistics.mean(steps))
    cuts = -(-tokens // spec.algorithm.micro_batch_tokens)
    stages = spread.stages(len(model.layers))
    sent = [sum(sent_bytes_by_purpose(spec, shape, spread, at, [model], tokens, cuts).values()) for at in stages]
    share = max(spread.rank_share(model, stage).bytes for stage in stages)
    return {"textbook_bytes": statistics.mean(sent), "share_bytes": 3 * share, "whole_bytes": 3 * whole.bytes}


def written() -> int:
    """Bytes that this process has handed to write(), sockets included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def free_port() -> int:
    """A port that nobody listens to now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def said(one: dict[str, Any]) -> str:
    """A line of the table."""
    sent, textbook = one["sent_bytes"] / 2**20, one["textbook_bytes"] / 2**20
    held, share = (one[key] / one["whole_bytes"] for key in ("held_bytes", "share_bytes"))
    ratio = f"{sent / textbook:6.2f}"
    return f"{one['case']:20s}{sent:12.2f}{textbook:12.2f}{ratio}{held:12.2%}{share:12.2%}"


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if ranks did not learn the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["overhead", *CASES], default=["overhead", *CASES])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    cost = overhead(2 * asked.steps) if "overhead" in asked.only else {}
    if cost:
        print(f"the only rank of a group, beside a step of {cost['seconds'] * 1000:.0f} ms of one process (processor):")
        print(f"  a copy {cost['ddp'] - 1:+.1%}, one piece (FSDP2) {cost['fsdp'] - 1:+.1%}")
    print(f"{'a rank, and a step':20s}{'MiB sent':>12s}{'textbook':>12s}{'':6s}{'held':>12s}{'ideal':>12s}", flush=True)
    cases = []
    for name in (case for case in CASES if case in asked.only):
        cases.append(measured(name, asked.steps))
        print(said(cases[-1]), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps({"overhead": cost, "cases": cases}, indent=2))
    mixed = [[loss for one in cases if one["case"].startswith("ep") == of for loss in one["losses"]] for of in (0, 1)]
    return int(any(max(losses) - min(losses) > 1e-4 for losses in mixed if losses))


if __name__ == "__main__":
    sys.exit(main())
