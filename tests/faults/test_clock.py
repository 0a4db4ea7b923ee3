"""A clock that jumps by a day, back and forth, twice a second: waits are as long as they are meant to be.

A small C library, loaded before Python, moves what clock_gettime, gettimeofday and time say of the date.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.small import UNJUDGED

SOURCE = r"""
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long shift(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return (now.tv_nsec / 500000000) ? 86400 : -86400;
}
int clock_gettime(clockid_t clock, struct timespec *found) {
    int result = syscall(SYS_clock_gettime, clock, found);
    if (result == 0 && clock == CLOCK_REALTIME) found->tv_sec += shift();
    return result;
}
int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found != NULL) *found = now.tv_sec;
    return now.tv_sec;
}
"""
WAITS = """
    import sys, time
    from runner.core.http_client import request, run_coroutine
    from runner.core.subprocess import ChildProcess

    seen = set()
    while len(seen) < 2:
        seen.add(round((time.time() - float(sys.argv[2])) / 86400))
    assert seen == {-1, 1}, seen

    begin = time.monotonic()
    try:
        run_coroutine(request("GET", sys.argv[1], timeout_s=1.2, largest_bytes=1))
    except TimeoutError:
        pass
    assert 1.1 < time.monotonic() - begin < 60, "a silent server"

    child = ChildProcess(["sleep", "600"])
    begin = time.monotonic()
    assert not child.ends_within(1.2) and 1.1 < time.monotonic() - begin < 60, "a process that runs"
    child.kill()
    assert child.ends_within(60), "and ends"
    print("right")
"""


@pytest.fixture(scope="module")
def jumping(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the clock jumps."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(SOURCE)
    library = folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, folder / "clock.c"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def test_waits_do_not_follow_the_date(jumping: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        date = subprocess.run(["date", "+%s"], check=True, capture_output=True, text=True).stdout.strip()
        command = [sys.executable, "-c", textwrap.dedent(WAITS), url, date]
        done = subprocess.run(command, env=jumping, capture_output=True, text=True, timeout=250)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.slow
def test_two_ranks_and_their_supervisor_do_not_lose_one_another(jumping: dict[str, str], tmp_path: Path) -> None:
    words = (*UNJUDGED, "parallelism=ddp", "launch.devices=2", "steps=3", "checkpoint.every=1")
    command = [sys.executable, "-m", "runner", *words]
    done = subprocess.run(command, env=jumping, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    status = [sys.executable, "-m", "runner", "status", "latest"]
    said = subprocess.run(status, env=jumping, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "done" in said.stdout and "step 3 of 3" in said.stdout, said
