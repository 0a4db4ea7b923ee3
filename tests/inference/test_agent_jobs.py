"""Jobs of environment=agent as their user sees them: layouts, evaluation, kill and resume, what they learn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.several import Job, alive, gone, wait_until
from tests.launch.test_sampled_runs import SMALL

# Two turns, by the standard library alone, which starts faster than OpenAI's client.
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


COMMAND = f"environment.command={sys.executable} my_agent.py"
AHEAD = ("algorithm.lag=1", "launch.samplers=2")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words",
    [("parallelism=ddp", "launch.devices=2"), AHEAD, ("algorithm=ppo",)],
    ids=["two_ranks", "ahead_on_two_samplers", "ppo"],
)
def test_programs_train_a_policy(words: tuple[str, ...], tmp_path: Path) -> None:
    """Each episode of every step has its two turns in one row; `run eval` plays the same ones."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    job = Job(tmp_path)
    job.run(*SMALL[:-1], "environment=agent", COMMAND, "steps=2", "checkpoint.every=100", *words)
    curve = job.curve()
    assert len(curve) == 2
    assert all(row["environment/turns"] == 2 and row["environment/rows"] == 1 for row in curve)
    assert [row["rollout/staleness"] for row in curve] == ([0, 1] if words == AHEAD else [0, 0])
    if words[0] == "parallelism=ddp":
        teacher = str(job.latest.resolve() / "export")
        assert "length          16" in job.run("eval", "latest")
        alike = [word for word in SMALL[:-1] if not word.startswith("reward")]
        opd = ("algorithm=opd", f"algorithm.teacher={teacher}", "reward=none", "steps=1", "checkpoint.every=100")
        job.run(*alike, "environment=agent", COMMAND, *opd)
        [row] = job.curve()
        assert row["environment/turns"] == 2 and row["environment/num_failed"] == 0


# A server of agents with OpenAI's client: the two tools of recipe agent_demo are the program's own.
VAULT = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from openai import OpenAI

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "?", "parameters": {"type": "object"}}}
    for name in ("find_key", "unlock")
]

def play(task):
    has_key = is_open = False
    messages = task["prompt"]
    with OpenAI(base_url=task["base_url"], api_key=task["api_key"]) as client:
        for turn in range(4):
            said = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
            messages.append(said)
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                if call.function.name == "find_key":
                    has_key, text = True, "a key"
                elif call.function.name == "unlock":
                    is_open, text = is_open or has_key, "open" if has_key else "error: no key"
                else:
                    text = "error: no such tool"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return {"reward": float(is_open)}

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        content = json.dumps(play(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass

class Server(ThreadingHTTPServer):
    request_queue_size = 256  # five, the default, make most of many clients at once wait for seconds

server = Server(("127.0.0.1", 0), Handler)
open("port", "w").write(str(server.server_port))
server.serve_forever()
"""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_program_learns_what_the_class_of_agent_demo_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The greedy episodes of the same weights are the same; over all steps sampled rewards are within 0.05."""
    monkeypatch.setattr("tests.launch.several.DEADLINE_S", 1500)
    (tmp_path / "vault.py").write_text(VAULT)
    job, curves = Job(tmp_path), []
    with subprocess.Popen([sys.executable, "vault.py"], cwd=tmp_path) as server:
        try:
            wait_until(lambda: (tmp_path / "port").exists() and bool((tmp_path / "port").read_text()), server)
            url = f"http://127.0.0.1:{(tmp_path / 'port').read_text()}/"
            agent = ("environment=agent", f"environment.command={url}", "environment.workers=128")
            for words in ((), agent):
                job.run("+recipe=agent_demo", "data.held_out=32", "checkpoint.best=null", "tracker=none", *words)
                curves.append([json.loads(line) for line in (job.latest / "metrics.jsonl").read_text().splitlines()])
        finally:
            server.kill()
    first, second = (
        {name: row[name] for name in row if name.startswith("eval/")} for row in (curve[0] for curve in curves)
    )
    assert first == second and first["eval/reward/num_failed"] == 0
    rewards = [[row["reward/mean"] for row in curve if "reward/mean" in row] for curve in curves]
    means = [sum(curve) / len(curve) for curve in rewards]
    assert abs(means[0] - means[1]) < 0.05 and all(sum(curve[-5:]) / 5 > 0.7 for curve in rewards), rewards


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_trains_on_the_calls_that_it_has_recorded(tmp_path: Path) -> None:
    """What the killed attempt has written of its steps is written again, to the byte but for times."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    job, words = Job(tmp_path), [*SMALL[:-1], "environment=agent", COMMAND, "steps=4", "checkpoint.every=100"]
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
