"""How long training waits for a checkpoint: by torch.save, written at once, and in the background from a copy.

    python benchmarks/saving.py [--folder DISK] [--rounds 5] [--quick] [--out FILE]

torch     seconds of torch.save and fsync of the same state, with the earlier file removed
at_once   seconds of a checkpoint that training waits for; both arms also in seconds of the processor
blocked   seconds from the call until the next step may begin
written   seconds until the checkpoint is on the disk, while steps are made
first     the copy's first time, when its memory is new to the process

A model of Qwen2 type with 100 M parameters, AdamW after one step, float32, one thread: 1.2 GB. The arms save the same
state in turn, torch.save first in every second round; the files of the last two must be equal byte for byte. Seconds
are those of the disk; each ratio is of its round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from runner.checkpoint.config import SafetensorsConfig
from runner.checkpoint.store import CheckpointStore
from runner.trainer.optimizer_state import learner_state

SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 16_000,
    "tie_word_embeddings": False,
}
QUICK = SIZES | {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}


class Subject:
    """The model, its optimizer, and steps of 64 tokens."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = Qwen2ForCausalLM(Qwen2Config(**sizes))
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-4, fused=True)
        self.step()

    def step(self) -> None:
        """One update."""
        ids = torch.arange(64).reshape(1, -1)
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"policy": learner_state(self.parameters, self.optimizer)}


def measure(save: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of the processor; what others have written is on the disk before."""
    os.sync()
    begin, used = time.perf_counter(), time.process_time()
    save()
    return time.perf_counter() - begin, time.process_time() - used


def torch_save(subject: Subject, folder: Path, number: int) -> None:
    """What torch.save takes for a file that survives a power failure, in place of the earlier one."""
    with (folder / f"{number}.pt").open("xb") as file:
        torch.save(subject.state(), file)
        file.flush()
        os.fsync(file.fileno())
    (folder / f"{number - 1}.pt").unlink(missing_ok=True)


def one_round(subject: Subject, stores: dict[str, CheckpointStore], folder: Path, number: int) -> dict[str, float]:
    """The same state by all arms, then steps until the last one has written it."""
    arms = {
        "torch": lambda: torch_save(subject, folder, number),
        "at_once": lambda: stores["at once"].save(number, subject.state(), {}),
    }
    taken: dict[str, float] = {}
    for name in sorted(arms, reverse=number % 2 == 0):
        taken[f"{name}_s"], taken[f"{name}_cpu_s"] = measure(arms[name])
    begin = time.perf_counter()
    stores["background"].start(number, subject.state(), {})
    blocked = time.perf_counter() - begin
    steps = 0
    while len(stores["background"].steps()) == 0 or stores["background"].steps()[-1] < number:
        stores["background"].check()
        subject.step()
        steps += 1
    written = time.perf_counter() - begin
    stores["background"].close()
    return taken | {"blocked_s": blocked, "written_s": written, "steps_meanwhile": steps}


def same(root: Path, number: int) -> bool:
    """Whether both arms wrote the same bytes."""
    folders = (root / arm / f"step-{number:08d}" for arm in ("at once", "background"))
    one, other = ({p.name: p.read_bytes() for p in f.iterdir() if p.name != "MANIFEST.json"} for f in folders)
    return one == other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a model of 3 M parameters, of which seconds say little")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    subject = Subject(QUICK if asked.quick else SIZES)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        arms = ("at once", "background")
        stores = {
            arm: CheckpointStore(SafetensorsConfig(keep=1), root=Path(folder) / arm, report=print) for arm in arms
        }
        rounds = []
        for number in range(1, asked.rounds + 2):
            rounds.append(one_round(subject, stores, Path(folder), number))
            if not same(Path(folder), number):
                print(f"round {number}: the two checkpoints differ")
                return 1
    first, *later = rounds
    parameters = sum(p.numel() for p in subject.parameters.values())
    print(f"{parameters / 1e6:.0f} M parameters, {3 * 4 * parameters / 1e9:.2f} GB; the first background copy blocked "
          f"{first['blocked_s']:.2f} s")  # fmt: skip
    for name in first:
        values = [one[name] for one in later]
        print(f"{name:16} median {statistics.median(values):7.3f}   {min(values):.3f} to {max(values):.3f}")
    pairs = (("at_once_s", "torch_s"), ("at_once_cpu_s", "torch_cpu_s"), ("at_once_s", "blocked_s"))
    ratios = {f"{one} / {other}": [each[one] / each[other] for each in later] for one, other in pairs}
    for name, found in ratios.items():
        print(f"{name}: median {statistics.median(found):.2f}, {min(found):.2f} to {max(found):.2f}")
    if asked.out:
        asked.out.write_text(json.dumps({"first": first, "rounds": later, "ratios": ratios}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
