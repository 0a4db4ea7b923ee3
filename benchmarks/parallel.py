"""What it costs to be one of several ranks: time beside the learning, and bytes sent.

    python benchmarks/parallel.py [--ranks 2 4] [--steps 12] [--out FILE]

overhead  one process, against the same as the only rank of a process group (gloo): processor seconds of a step
bytes     what each rank writes to its sockets in a step, against 2·(N − 1)/N of the gradients' bytes, which is what a
          ring of N ranks has to send for a sum that all have in the end (Patarasuk & Yuan 2009); of a sharded model
          against (N − 1)/N of gradients, summed, and of weights, gathered for the forward and for the backward pass
held      what a rank of a sharded model keeps of weights and optimizer state, against 1/N of them

A model of Qwen2 type learns packed rows of unequal lengths, AdamW, float32, one thread a rank. Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from runner.algorithm.sft import CrossEntropy
from runner.batch import Batch, pack, with_totals
from runner.decisions import Decisions
from runner.device.config import CpuConfig
from runner.device.cpu import Cpu
from runner.learner import LocalLearner
from runner.model import tiny
from runner.model.config import TinyConfig
from runner.parallelism.config import DdpConfig, FsdpConfig, MeshConfig
from runner.parallelism.group import GroupPeers
from runner.parallelism.world import World, build
from runner.place import Place
from runner.protocols import Peers
from runner.shards import local
from runner.sharing import ALONE

CONFIG = TinyConfig(hidden_size=256, intermediate_size=768, layers=4)
WARM_UP = 2  # steps that are not counted
ROWS, LONGEST, BUDGET = 16, 128, 1024


def batch(step: int) -> Batch:
    """Rows of 16 to 128 random tokens."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(16, LONGEST + 1, (ROWS,), generator=generator).tolist()
    ids = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]
    packed = pack(ids, [[1.0] * n for n in lengths])
    return with_totals(packed, packed.count())


def learner(peers: Peers, world: World | None = None) -> LocalLearner:
    """The model of the table, from the same weights on every rank, spread as `world` says."""
    decide = Decisions()
    model: Any = tiny.build(CONFIG, tokenizer=tiny.tokenizer(CONFIG), device=torch.device("cpu"), seed=0, decide=decide)
    if world is not None:
        world.shard(model, decide)
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=1e-3, fused=True)
    return LocalLearner(
        model, optimizer, lr=1e-3, clip_norm=1.0, factor=lambda _: 1.0, budget=BUDGET, seed=0,
        device=torch.device("cpu"), peers=peers,
    )  # fmt: skip


def one_step(subject: LocalLearner, step: int) -> float:
    """Learn from a step's batch; the loss."""
    subject.begin_step(step)
    metrics, _ = subject.forward_backward(batch(step), CrossEntropy())
    subject.optim_step()
    return metrics.result()["train/loss"]


def overhead(count: int) -> dict[str, Any]:
    """Both arms in one process, step by step in turn, so that both meet the same machine."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    arms = {"single": learner(ALONE), "ddp": learner(GroupPeers(torch.distributed.group.WORLD, 60.0))}
    found: dict[str, list[float]] = {name: [] for name in arms}
    for step in range(count):
        for name, subject in arms.items():
            before = time.process_time()
            one_step(subject, step)
            found[name].append(time.process_time() - before)
    torch.distributed.destroy_process_group()
    single, ddp = (found[name][WARM_UP:] for name in arms)
    ratios = [b / a for a, b in zip(single, ddp, strict=True)]
    return {"seconds": statistics.median(single), "ratio": statistics.median(ratios)}


def rank(place: Place, port: int, count: int, config: MeshConfig, out: Any) -> None:
    """One of several: the bytes that it writes in each step, and those that it holds."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = Cpu(CpuConfig(), decide=lambda *_: None)
    device.prepare()
    world = build(config, device=device, place=place)
    subject, sent, loss = learner(world.peers, world), [], 0.0
    for step in range(count):
        before = written()
        loss = one_step(subject, step)
        sent.append(written() - before)
    weights = list(subject.model.trainable().values())
    states = [t for entry in subject.optimizer.state.values() for t in entry.values() if t.ndim]
    held = sum(local(t).untyped_storage().nbytes() for t in (*weights, *states))
    out.put((place.rank, loss, sent[WARM_UP:], sum(p.numel() * p.element_size() for p in weights), held))
    world.close()


def moved(size: int, count: int, config: MeshConfig) -> dict[str, Any]:
    """Bytes sent by a rank in a step, the mean over ranks and steps, and the ring's; bytes held by the fullest rank."""
    context = multiprocessing.get_context("spawn")
    out, port = context.Queue(), free_port()
    places = [Place(at, size, at, size) for at in range(size)]
    ranks = [context.Process(target=rank, args=(place, port, count, config, out)) for place in places]
    for one in ranks:
        one.start()
    found = [out.get(timeout=600) for _ in ranks]
    for one in ranks:
        one.join()
    _, _, sent, gradients, held = zip(*found, strict=True)
    ring = (2 if config.name == "ddp" else 3) * (size - 1) / size * gradients[0]
    return {
        "parallelism": config.name,
        "ranks": size,
        "held_bytes": max(held),
        "whole_bytes": 3 * gradients[0],  # AdamW keeps two numbers for each
        "losses": sorted(loss for _, loss, *_ in found),
        "gradient_bytes": gradients[0],
        "ring_bytes": ring,
        "sent_bytes": statistics.mean(b for per_rank in sent for b in per_rank),
    }


def written() -> int:
    """Bytes that this process has handed to write(), sockets included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def free_port() -> int:
    """A port that nobody listens to now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if ranks did not learn the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    cost = overhead(asked.steps)
    print(f"one rank of a group: {cost['ratio'] - 1:+.1%} of a step of {cost['seconds'] * 1000:.0f} ms (processor)")
    counts = [moved(size, asked.steps, config) for config in (DdpConfig(), FsdpConfig()) for size in asked.ranks]
    for one in counts:
        sent, ring = one["sent_bytes"] / 2**20, one["ring_bytes"] / 2**20
        more = sent / ring - 1
        held, share = one["held_bytes"] / 2**20, one["held_bytes"] / one["whole_bytes"]
        print(
            f"{one['parallelism']}, {one['ranks']} ranks: {sent:.2f} MiB sent per rank and step; a ring {ring:.2f} MiB "
            f"({more:+.1%}); {held:.2f} MiB held of weights and optimizer state, {share:.2%} of the whole"
        )
    if asked.out:
        asked.out.write_text(json.dumps({"overhead": cost, "moved": counts}, indent=2))
    losses = [loss for one in counts for loss in one["losses"]]
    return int(max(losses) - min(losses) > 1e-4)


if __name__ == "__main__":
    raise SystemExit(main())
