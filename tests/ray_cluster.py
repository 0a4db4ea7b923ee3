"""Ray clusters of this machine that are nobody's own: `with cluster({"num_cpus": 4, "resources": {"NPU": 8}}) as one`.

python -m tests.ray_cluster NODES-AS-JSON starts them, says where, fills the object store when it reads a line, and ends
with its stdin.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
STORE_BYTES = 10**8
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass
class Cluster:
    """`raylets`: the process that is a node, of each; without it Ray takes the node for lost."""

    address: str
    raylets: list[int]
    process: subprocess.Popen[str]

    def fill_store(self) -> None:
        """Keep as much in the head's object store as it takes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("fill\n")
        self.process.stdin.flush()
        assert "full" in self.process.stdout.readline()


@contextmanager
def cluster(*nodes: dict[str, Any]) -> Iterator[Cluster]:
    """A cluster with a password, which this process holds in its environment meanwhile. `nodes`: the head first."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), **QUIET}.items():
            patch.setenv(name, value)
        with subprocess.Popen(
            [sys.executable, "-m", "tests.ray_cluster", json.dumps(nodes)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            yield Cluster(**json.loads(process.stdout.readline()), process=process)
            process.communicate()


def main(nodes: list[dict[str, Any]]) -> None:
    import ray
    from ray.cluster_utils import Cluster as Nodes

    ray._private.utils.write_ray_address = lambda *_: None  # where every program of this machine would look for one
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    output = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no address
    quiet = {
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
        "node_ip_address": "127.0.0.1",
        "temp_dir": folder,
    }
    head, *more = nodes
    many = Nodes(initialize_head=True, head_node_args={**quiet, **head})
    for options in more:
        many.add_node(**{**quiet, **options})
    many.wait_for_nodes()
    raylets = [node.all_processes["raylet"][0].process.pid for node in many.list_all_nodes()]
    os.write(output, json.dumps({"address": many.address, "raylets": raylets}).encode() + b"\n")
    kept = []
    for _ in sys.stdin:
        ray.init(address=many.address, log_to_driver=False)
        kept = [ray.put(bytes(STORE_BYTES // 10)) for _ in range(9)]
        os.write(output, f"full of {len(kept)} objects\n".encode())
    ray.shutdown()
    many.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
