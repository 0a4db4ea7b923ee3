"""Weights through Ray's object store: put by one process, fetched and copied by another, in a cluster of their own.

python -P -m runner.launch.ray.driver_connection arms.object_store '{"folder": FOLDER, "megabytes": MEGABYTES}'

A line on stdin is a turn, and is answered by its seconds. Tensors go as arrays, which Ray maps; as tensors it would
pickle them. There is no digest, and no other machine.
"""

from __future__ import annotations

import json
import sys
import time

import ray
import torch
from ray import ObjectRef

from arms.holding import MEGABYTE, Holding, weights


class Receiver:
    """The process that has use for weights."""

    def __init__(self, megabytes: int) -> None:
        torch.set_num_threads(1)
        self._own = Holding(megabytes)

    def load(self, named: dict[str, ObjectRef], version: int) -> None:
        """Fetch each, and copy it."""
        found = {name: torch.from_numpy(ray.get(array)).view(torch.bfloat16) for name, array in named.items()}
        self._own.load_weights(found, version)


def main(asked: str) -> None:
    """Take turns until stdin ends."""
    given = json.loads(asked)
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=2 * given["megabytes"] * MEGABYTE,
        _node_ip_address="127.0.0.1",
        _temp_dir=f"{given['folder']}/ray",
        num_cpus=1,
        log_to_driver=False,
        logging_level="ERROR",
    )
    receiver = ray.remote(Receiver).remote(given["megabytes"])
    source = weights(given["megabytes"])
    for version, _ in enumerate(sys.stdin):
        begin = time.perf_counter()
        put = {name: ray.put(tensor.view(torch.int16).numpy()) for name, tensor in source.items()}
        ray.get(receiver.load.remote(put, version))
        del put
        print(time.perf_counter() - begin, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
