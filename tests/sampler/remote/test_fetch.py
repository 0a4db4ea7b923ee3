"""Files of other machines: several at a time, each once, in the order that was asked for, and no handle lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from http.client import HTTPException

import pytest

from runner.sampler.remote import fetch
from runner.sampler.remote.fetch import Fetched, UnfetchedError, over_http
from runner.sampler.remote.offer import Server
from tests.sampler.remote.processes import until

URLS = [f"http://trainer/1-1/v1-{at:04d}.safetensors" for at in range(40)]


class Source:
    """A `Get` of files that hold their addresses; broken: those that cannot be had."""

    def __init__(self, broken: frozenset[str] = frozenset()) -> None:
        self.broken, self.asked, self.most = broken, list[str](), 0
        self._now, self._several = 0, threading.Barrier(2, timeout=60.0)

    def get(self, url: str, handle: int) -> None:
        self.asked.append(url)
        self._now += 1
        self.most = max(self.most, self._now)
        if not self.broken:
            self._several.wait()  # for another one
        self._now -= 1
        if url in self.broken:
            raise OSError("the line was cut")
        os.write(handle, url.encode())


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_several_come_at_a_time_and_stay_until_others_are_asked_for() -> None:
    before, source = handles(), Source()
    fetched = Fetched(source.get)
    found = fetched.files([*URLS, URLS[0]])
    assert [path.read_bytes().decode() for path in found] == [*URLS, URLS[0]]
    assert fetched.files(URLS[:2]) == found[:2] and sorted(source.asked) == URLS, "each was fetched once"
    assert 1 < source.most <= fetch.AT_ONCE and handles() == before + 2
    fetched.close()
    assert handles() == before


def test_after_a_failure_no_more_are_asked_for_and_the_others_are_kept() -> None:
    before, source = handles(), Source(broken=frozenset(URLS[2:3]))
    fetched = Fetched(source.get)
    fetched.files(URLS[:1])
    source.broken = frozenset(URLS[1:])
    with pytest.raises(UnfetchedError, match=r"v1-00\d\d\.safetensors cannot be fetched: the line was cut"):
        fetched.files(URLS)
    assert source.asked.count(URLS[0]) == 1 and handles() == before + 1
    source.broken = frozenset(["none"])
    assert len(fetched.files(URLS)) == len(URLS) and source.asked.count(URLS[0]) == 1
    fetched.close()


def test_what_has_not_begun_when_one_fails_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "AT_ONCE", 1)
    source = Source(broken=frozenset(URLS))
    failed = threading.Event()

    def get(url: str, handle: int) -> None:
        if source.asked:
            failed.wait(0.2)  # while the first one's failure is noticed
        source.get(url, handle)

    with pytest.raises(UnfetchedError, match="v1-0000"):
        Fetched(get).files(URLS)
    assert len(source.asked) < 5


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises; who starts the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_leaves_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "AT_ONCE", 1)
    asked, interrupted = list[str](), threading.Event()

    def get(url: str, handle: int) -> None:
        asked.append(url)
        interrupted.wait(0.3)  # while the others are put into the queue, then while the signal is noticed
        if len(asked) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before, fetched = handles(), Fetched(get)
    with pytest.raises(KeyboardInterrupt):
        fetched.files(URLS)
    assert len(asked) < 5
    fetched.close()
    until(lambda: handles() == before)


def test_what_nobody_has_thought_of_leaves_no_handle() -> None:
    def get(url: str, handle: int) -> None:
        raise TypeError("no length")

    before = handles()
    with pytest.raises(TypeError, match="no length"):
        Fetched(get).files(URLS)
    assert handles() == before


def test_a_refusal_leaves_no_connection() -> None:
    before, server = handles(), Server("127.0.0.1", "token", {})
    with server.running(), pytest.raises(HTTPException, match="status 404") as raised:
        over_http("token", f"{server.url}/none", -1)
    until(lambda: handles() == before)  # the server's thread has its end
    del raised  # whose frames have what was open
