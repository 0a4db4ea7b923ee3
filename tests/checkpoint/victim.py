"""A process that saves checkpoints until it is told to stop, or killed; it forks, so that torch is imported once.

Reads one JSON order per line, {"root", "first", "last", "keep", "failpoint", "background"}, and answers with the
saver's pid; when the saver has ended it answers with its wait status.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from runner.checkpoint.config import SafetensorsConfig
from runner.checkpoint.store import CheckpointStore


def save_all(order: dict[str, Any]) -> None:
    os.environ["RUNNER_FAILPOINT"] = order["failpoint"]
    config = SafetensorsConfig(keep=order["keep"])
    store = CheckpointStore(config, root=Path(order["root"]), report=lambda words: None)
    for step in range(order["first"], order["last"] + 1):
        tensors = {f"layer{i}": torch.full((64, 64), float(step)) for i in range(4)}
        state = {"policy": {"tensors": tensors, "step": step}, "algorithm": {"step": step}}
        (store.start if order["background"] else store.save)(step, state, {"m": step})
        for tensor in tensors.values():
            tensor.fill_(-1.0)  # as training continues
        store.check()
    store.close()


def main() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                save_all(json.loads(line))
                status = 0
            finally:
                os._exit(status)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
