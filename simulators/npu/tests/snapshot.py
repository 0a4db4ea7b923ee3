"""Writes npu_schemas.json from the wheel: the signatures of the operators that the simulator has.

python simulators/npu/tests/snapshot.py, from the root of the checkout; it is the newest torch_npu that fits torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    done = subprocess.run(
        [sys.executable, str(HERE / "card.py"), "schemas"], check=True, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(done.stdout.splitlines()[-1])["schemas"]
    (HERE / "npu_schemas.json").write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
