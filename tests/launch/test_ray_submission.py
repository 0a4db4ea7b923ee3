"""Jobs that are handed to a Ray cluster by its web address: a real head with Ray's dashboard, real jobs."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.launch.several import Job, wait_until
from tests.launch.test_ray_parcel import REWARD
from tests.ports import free_port
from tests.ray_head import Head, head

pytest.importorskip("ray")
pytest.importorskip("aiohttp")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SECRET = "not-for-anybody-else-0123456789"
ASKED = "is asked to stop, and saves"


@pytest.fixture(scope="module")
def there() -> Iterator[Head]:
    """The cluster."""
    with head() as one:
        yield one
    assert not one.folder.exists()


class Laptop(Job):
    """A command that is typed where the cluster's folder is not."""

    def __init__(self, cwd: Path, cluster: Head, address: str | None = None) -> None:
        (cwd / "laptop").mkdir()
        super().__init__(cwd / "laptop")
        self.latest = cwd / "cluster" / "outputs" / "latest"
        self.where = ("device=cpu", "tracker=none", "launch=ray", f"launch.address={address or cluster.address}")
        self.where += (f"launch.folder={cwd / 'cluster'}", "launch.attempts=1")
        self.exported = {**cluster.environment, "NO_PROXY": "127.0.0.1", "WANDB_API_KEY": SECRET}


def test_a_job_with_files_of_its_user_is_the_same_job_there(there: Head, tmp_path: Path) -> None:
    """Its end, its log, its weights; and what is secret is nowhere on the cluster's disk."""
    one = Laptop(tmp_path, there)
    (one.cwd / "mine.py").write_text(REWARD)
    words = ("+recipe=grpo_demo", "init_from=null", "reward=function", "reward.path=mine.py:score", "steps=2")
    words += ("evaluation.every=0", "parallelism=single")
    said = one.run(*words, *one.where, **one.exported)
    assert "with it: 1 file" in said and "done     2 steps" in said and "in one placement group" in said
    assert "WANDB_API_KEY (a secret" in said and SECRET not in said
    assert not (one.cwd / "outputs").exists()
    (tmp_path / "here").mkdir()
    here = Job(tmp_path / "here")
    (here.cwd / "mine.py").write_text(REWARD)
    here.run(*words, "device=cpu", "tracker=none")
    assert one.curve() == here.curve() and one.weights(2) == here.weights(2)
    kept = [path for root in (there.folder, tmp_path / "cluster") for path in root.rglob("*") if path.is_file()]
    assert len(kept) > 20 and not [path for path in kept if SECRET.encode() in path.read_bytes()]


def test_a_jobs_exit_code_is_the_commands(there: Head, tmp_path: Path) -> None:
    one = Laptop(tmp_path, there)
    words = ("data=file", "data.path=/nowhere/at/all.jsonl", "model=tiny", "steps=2")
    said = one.run(*words, *one.where, code=3, **one.exported)
    assert "data.path=/nowhere/at/all.jsonl: no such file" in said and "ended with exit code 3" in said
    said = one.run(*words, *one.where, code=2, **{**one.exported, "RAY_AUTH_TOKEN": "another"})
    assert "does not take this machine's token" in said


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_makes_the_job_save_and_twice_leaves_it_to_itself(presses: int, there: Head, tmp_path: Path) -> None:
    """The step in hand is finished, which takes longer than the 3 s that Ray gives a job of its own accord: 64 calls of
    a reward that sleeps."""
    one = Laptop(tmp_path, there)
    (one.cwd / "mine.py").write_text(f"import time\n{REWARD.replace('    return', '    time.sleep(0.1); return')}")
    words = ("+recipe=grpo_demo", "init_from=null", "reward=function", "reward.path=mine.py:score")
    words += ("steps=5000", "evaluation.every=0", "checkpoint.every=5000", "parallelism=single")
    process = one.start(*words, *one.where, **one.exported)
    wait_until(lambda: one.steps() >= 1, process)
    process.send_signal(signal.SIGINT)
    if presses == 2:
        wait_until(lambda: ASKED in one.said(), process)
        process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130, one.said()
    if presses == 1:
        assert "a checkpoint was written" in one.said() and "has stopped; to go on, on a node" in one.said()
    else:
        assert "is left to itself, and ends once it has saved; `ray job logs --follow" in one.said()
    end = time.monotonic() + 120
    while one.status()["state"] == "running" and time.monotonic() < end:
        time.sleep(0.1)
    assert one.status()["exit_code"] == 143 and list((one.latest / "checkpoints").glob("step-*"))


@contextmanager
def wire(to: int) -> Iterator[tuple[int, threading.Event]]:
    """A port that leads to another one; while the event is set, it hangs up on everybody."""
    port, cut, done = free_port(), threading.Event(), threading.Event()
    held: list[socket.socket] = []

    def carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                target.sendall(content)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with socket.create_server(("127.0.0.1", port)) as listener:
            listener.settimeout(0.1)
            while not done.is_set():
                if cut.is_set():
                    for one in held:
                        with suppress(OSError):
                            one.shutdown(socket.SHUT_RDWR)
                with suppress(TimeoutError):
                    near = listener.accept()[0]
                    far = socket.create_connection(("127.0.0.1", to))
                    held.extend((near, far))
                    for pair in ((near, far), (far, near)):
                        threading.Thread(target=carry, args=pair, daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port, cut
    finally:
        done.set()
        thread.join()
        for one in held:
            one.close()


def test_a_connection_that_is_lost_is_taken_up_again_where_the_log_was(there: Head, tmp_path: Path) -> None:
    with wire(int(there.address.rpartition(":")[2])) as (port, cut):
        one = Laptop(tmp_path, there, f"http://127.0.0.1:{port}")
        words = ("+recipe=sft_demo", "steps=30", "evaluation.every=0", "model=tiny")
        process = one.start(*words, *one.where, **one.exported)
        wait_until(lambda: one.steps() >= 1, process)
        cut.set()
        wait_until(lambda: "the connection is lost" in one.said(), process)
        cut.clear()
        assert process.wait(300) == 0, one.said()
    said = one.said()
    assert said.count("in one placement group") == 1 == said.count("done     30 steps"), said
    steps = [line for line in said.splitlines() if line.startswith("step=")]
    assert len(steps) == len(set(steps))
