"""A Ray cluster of this machine that is not the sweep's own: python -m tests.sweep.ray_cluster OPTIONS-AS-JSON

It says its address, and ends with its stdin.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile

import ray

if __name__ == "__main__":
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    context = ray.init(
        _node_ip_address="127.0.0.1", _temp_dir=folder, object_store_memory=10**8, **quiet, **json.loads(sys.argv[1])
    )
    print(context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
