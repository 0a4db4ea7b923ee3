"""Jobs of environment=agent as their user sees them: killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.launch.several import Job, alive, gone, wait_until
from tests.launch.test_sampled_runs import SMALL

AGENT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
open("pids", "a").write(f"{os.getpid()}\\n")
messages = task["prompt"]
for turn in range(2):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("Content-Type", "application/json")
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [said, {"role": "user", "content": "and?"}]
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_trains_on_the_calls_that_it_has_recorded(tmp_path: Path) -> None:
    """What the killed attempt has written of its steps is written again, to the byte but for times."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    command = f"environment.command={sys.executable} my_agent.py"
    job, words = Job(tmp_path), [*SMALL[:-1], "environment=agent", command, "steps=4", "checkpoint.every=100"]
    process = job.start(*words)
    metrics = job.latest / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, process)
    before = job.curve()
    [rank] = job.pids()
    programs = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    process.kill()
    os.kill(rank, signal.SIGKILL)
    process.wait()
    assert gone(alive(programs), 20.0)
    job.run("resume", "latest")
    after = job.curve()
    assert len(after) == 4 and json.dumps(after[: len(before)]) == json.dumps(before)
    assert all(line["environment/turns"] == 2 and line["environment/rows"] == 1 for line in after)
