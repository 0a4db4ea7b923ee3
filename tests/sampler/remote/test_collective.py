"""Weights by collective: real samplers that believe they are on another machine, over gloo, killed and stopped in the
middle of what they are sent."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.build.samplers import build_collectives
from runner.cli.job_builder import compose_job
from runner.core.errors import OutOfMemory, SamplerError, SpecError
from runner.sampler.remote import backends, collective, pair
from runner.sampler.remote.backends import hosted, joined
from runner.sampler.remote.collective import Joined, PairServer
from runner.sampler.remote.listening import SILENCE_S
from runner.sampler.remote.pair import Pair, stages_on
from runner.sampler.remote.remotes import Remotes
from runner.sampler.remote.wire import authorization
from runner.weight_sync.shelf import Shelf
from runner.weight_sync.shelf_folder import claim
from tests.sampler.remote.processes import DEADLINE_S, GLOO, TOKEN, Process, local, samplers, until, weights
from tests.sampler.remote.test_remotes import REQUESTS, client, in_background

PIECE = 5000  # bytes: several of them in a file, and none of the files a multiple of it
NOBODY_LEFT_S = 10.0
LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "PIECE_BYTES", PIECE)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread and no socket of a test outlives it."""
    before = opened()
    yield
    end = time.monotonic() + 2 * NOBODY_LEFT_S
    while (left := [*threads(), *(set(opened()) - set(before))]) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []


def threads() -> list[str]:
    """The threads that pairs have."""
    return [one.name for one in threading.enumerate() if one.name == "pair" or "process_request" in one.name]


def opened() -> list[str]:
    """What this process has open, but for the pipes that its children have the other ends of."""
    gc.collect()  # an error's traceback may have the group that it was raised in, and that its sockets
    names = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, by a thread that ends
            names.append(os.readlink(path))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = {f"socket:[{row[9]}]": f" {row[1]} to {row[2]}" for row in rows}  # who of several is left
    return [name + ends.get(name, "") for name in names if not name.startswith(("pipe:", "/proc/"))]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    """Two versions, and a tensor that is the same in both."""
    folder = tmp_path_factory.mktemp("shelf")
    made = Shelf(claim(folder / "run", 1 << 20, folder))
    fixed, *names = weights(1)
    made.keep([(fixed, weights(1)[fixed])])
    for version in (1, 2):
        made.put(version, [(name, weights(version)[name]) for name in names])
    yield made
    made.close()


def drawn(version: int) -> Any:
    """What this process draws with a version of the shelf."""
    fixed, *_ = weights(1)
    reference = local()
    reference.load_weights(weights(version) | {fixed: weights(1)[fixed]}, version)
    return reference.sample(REQUESTS)


@contextmanager
def far(notes: Path, count: int = 1, **options: Any) -> Iterator[tuple[list[Process], Remotes]]:
    """Samplers of another machine, and rank 0's side of them."""
    with (
        samplers(notes, count, elsewhere=True, piece=PIECE) as started,
        client(notes, count, collectives=GLOO, **options) as remotes,
    ):
        yield started, remotes


def memory_of(process: Process) -> list[Path]:
    """The memory without a name that a process holds."""
    found = Path(f"/proc/{process.note().pid}/fd").iterdir()
    return [path for path in found if "memfd:weights" in str(path.readlink())]


def at_piece(number: int, do: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something with piece `number` of what rank 0 sends, once, just before it goes."""
    begin, left = pair._Lane.begin, [number]

    def disturbed(lane: Any, piece: Tensor, broadcast: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            do(piece)
        begin(lane, piece, broadcast)

    monkeypatch.setattr(pair._Lane, "begin", disturbed)


def test_what_arrives_is_the_same_to_the_bit_and_what_does_not_change_comes_once(
    tmp_path: Path, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "runner")
    with far(tmp_path) as (started, remotes):
        for version in (1, 2):
            remotes.load_weights(shelf.get(version), version)
            assert remotes.sample(REQUESTS) == drawn(version)
            [held] = memory_of(started[0])
            assert held.read_bytes() == shelf.get(version).files[0].read_bytes()
    asked = [one.getMessage() for one in caplog.records if "HEAD /" in one.getMessage()]
    assert [sum(name in line for line in asked) for name in ("fixed-0000", "v1-0000", "v2-0000")] == [1, 1, 1]
    assert caplog.text.count("weights go to 127.0.0.1 by gloo") == 1 and "is given up" not in caplog.text


@pytest.mark.slow
def test_two_samplers_are_served_in_turn(tmp_path: Path, shelf: Shelf) -> None:
    with far(tmp_path, 2) as (_, remotes):
        for version in (1, 2, 1):
            remotes.load_weights(shelf.get(version), version)
            rows = [REQUESTS[0].prompt]
            one, other = remotes.score(rows)
            reference = local()
            fixed, *_ = weights(1)
            reference.load_weights(weights(version) | {fixed: weights(1)[fixed]}, version)
            assert one == other == reference.score(rows)[0]


def test_a_sampler_killed_while_it_is_sent_weights_is_replaced(
    tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with far(tmp_path) as (started, remotes):

        def kill(_: Tensor) -> None:
            started[0].kill()
            started.append(started[0].again())

        started[0].note()
        at_piece(3, kill, monkeypatch)
        begin = time.monotonic()
        remotes.load_weights(shelf.get(1), 1)
        assert time.monotonic() - begin < backends.STALL_S
        assert remotes.sample(REQUESTS) == drawn(1) and len(started) == 2
    assert "the pair with 127.0.0.1 is given up: " in caplog.text
    assert caplog.text.count("is given up") == 1


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["goes on", "is replaced"])
def test_a_sampler_stopped_while_it_is_sent_weights_is_left_in_time(
    ending: str, tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (backends, pair):
        monkeypatch.setattr(module, "STALL_S", 2.0)
    with far(tmp_path, silence_s=1.5) as (started, remotes):
        started[0].note()
        at_piece(3, lambda _: started[0].send(signal.SIGSTOP), monkeypatch)
        thread, found = in_background(lambda: remotes.load_weights(shelf.get(1), 1))
        until(lambda: "is given up" in caplog.text)
        if ending == "goes on":
            started[0].send(signal.SIGCONT)
        else:
            started[0].kill()
            started.append(started[0].again())
        thread.join(DEADLINE_S)
        assert found == [None] and remotes.sample(REQUESTS) == drawn(1)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_byte_that_changes_on_its_way_is_noticed_and_all_of_it_is_sent_again(
    times: int, tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = [path.read_bytes() for path in shelf.get(1).files]
    whole = sum(-(-len(content) // PIECE) for content in files)

    def flip(piece: Tensor) -> None:
        piece[-1] ^= 1  # in this process's copy alone
        if times == 2:
            at_piece(whole, flip, monkeypatch)

    with far(tmp_path) as (_, remotes):
        at_piece(whole, flip, monkeypatch)
        if times == 1:
            remotes.load_weights(shelf.get(1), 1)
            assert remotes.sample(REQUESTS) == drawn(1)
        else:
            with pytest.raises(SamplerError, match="version 1 are not those that were sent"):
                remotes.load_weights(shelf.get(1), 1)
    assert "not those that were sent" in caplog.text
    assert [path.read_bytes() for path in shelf.get(1).files] == files


@pytest.mark.slow
def test_a_trainer_that_ends_meanwhile_waits_for_nobody(
    tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with far(tmp_path) as (started, remotes):
        started[0].note()
        there = threading.Event()

        def stop(_: Tensor) -> None:
            started[0].send(signal.SIGSTOP)
            there.set()

        at_piece(3, stop, monkeypatch)
        for module in (backends, pair):
            monkeypatch.setattr(module, "STALL_S", 2.0)
        thread, found = in_background(lambda: remotes.load_weights(shelf.get(1), 1))
        assert there.wait(DEADLINE_S)
        begin = time.monotonic()
        remotes.close()
        thread.join(DEADLINE_S)
        assert time.monotonic() - begin < 5 and isinstance(found[0], SamplerError)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backends, pair):
        monkeypatch.setattr(module, "FORM_S", 1.0)
        monkeypatch.setattr(module, "STALL_S", 1.0)  # of gloo's constructor


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_who_asks_for_a_pair_and_does_not_come_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = PairServer(GLOO, LOOPBACK, TOKEN, {})
    with server.running():
        for token, status in (("another", 401), (TOKEN, 200)):
            line = HTTPConnection(LOOPBACK, server.server_address[1], timeout=DEADLINE_S)
            line.request("GET", "/pair", headers={"Authorization": authorization(token)})
            response = line.getresponse()
            assert response.status == status
            response.read()
            if status == 200:
                assert line.sock.recv(1) == b"", "the connection ends"
            line.close()
    assert "is given up: " in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("store", ["nobody's", "silent"])
def test_a_pair_without_another_side_is_an_error_in_time(store: str) -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        port = silent.getsockname()[1]
        if store == "nobody's":
            silent.close()
        begin = time.monotonic()
        with pytest.raises(OSError):
            Pair(GLOO, 1, partial(joined, LOOPBACK, port), LOOPBACK, stages_on(GLOO.device))
        assert time.monotonic() - begin < 5


def test_what_a_library_is_told_for_a_pair_is_not_told_to_the_group_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = backends.SILENCED
    monkeypatch.setenv(first, "3")
    monkeypatch.delenv(second, raising=False)
    with backends.silenced():
        assert os.environ[first] == os.environ[second] == "0"
    assert os.environ[first] == "3" and second not in os.environ


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("launch.samplers=0", "launch=ray", "launch.address=auto", "device=cpu"), "here the ranks sample"),
        (("launch.samplers=1",), "whose files they map"),
        (("launch.samplers=1", "launch=ray"), "whose files they map"),
        (("sampler=vllm", "launch.samplers=1"), "whose files they map"),
    ],
)
def test_a_transport_that_nothing_takes_is_refused(words: tuple[str, ...], why: str) -> None:
    job = ("+recipe=grpo_demo", *words, "sampler.weight_transfer_backend=collective")
    with pytest.raises(SpecError) as raised:
        compose_job(job)
    assert [one.key for one in raised.value.problems] == ["sampler.weight_transfer_backend"] and why in str(
        raised.value
    )


def test_a_cluster_may_have_samplers_elsewhere() -> None:
    words = ("+recipe=grpo_demo", "launch=ray", "launch.address=auto", "device=cpu", "launch.samplers=1")
    spec = compose_job((*words, "sampler.weight_transfer_backend=collective")).spec
    device = SimpleNamespace(backend="cpu:gloo,npu:hccl", torch_device=torch.device("cpu"))
    found = build_collectives(spec, device)  # type: ignore[arg-type]
    assert found is not None and found.name == "hccl"
    assert build_collectives(compose_job(words).spec, device) is None  # type: ignore[arg-type]


def test_two_sides_in_one_process_move_bytes_both_of_which_are_waited_for() -> None:
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    sent, found = torch.arange(2 * PIECE + 7).to(torch.uint8), torch.zeros(2 * PIECE + 7, dtype=torch.uint8)
    ends = (sent, partial(hosted, listener)), (found, partial(joined, LOOPBACK, port))

    def side(rank: int) -> None:
        content, store = ends[rank]
        one = Pair(GLOO, rank, store, LOOPBACK, stages_on(GLOO.device))
        one.move(content, lambda: None)
        one.give_up()

    sides = [threading.Thread(target=side, args=(rank,)) for rank in range(2)]
    for one in sides:
        one.start()
    for one in sides:
        one.join(DEADLINE_S)
    assert torch.equal(found, sent)


@contextmanager
def two_sides(content: bytes, folder: Path, count: int = 1) -> Iterator[tuple[PairServer, str, list[Joined]]]:
    """Rank 0's side with one file, where that is, and so many samplers' sides, all in this process."""
    (folder / "weights").write_bytes(content)
    server = PairServer(GLOO, LOOPBACK, TOKEN, {"/weights": folder / "weights"})
    sides = [Joined(TOKEN, LOOPBACK, GLOO) for _ in range(count)]
    with server.running():
        yield server, f"{server.url}/weights", sides
        for side in sides:
            side.close()


def got(side: Joined, url: str) -> bytes:
    """What it gets."""
    with memory() as handle:
        side.get(url, handle)
        return os.pread(handle, os.fstat(handle).st_size, 0)


@contextmanager
def memory() -> Iterator[int]:
    handle = os.memfd_create("got")
    try:
        yield handle
    finally:
        os.close(handle)


def test_who_waits_for_others_in_vain_asks_again_and_keeps_its_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert backends.STALL_S < collective.TURN_S < SILENCE_S
    caplog.set_level("INFO", "runner")
    monkeypatch.setattr(collective, "TURN_S", 0.1)
    with two_sides(b"weights" * PIECE, tmp_path) as (server, url, [side]):
        assert got(side, url) == b"weights" * PIECE
        with server.turn, pytest.raises(HTTPException, match="others are sent weights"):
            got(side, url)
        assert got(side, url) == b"weights" * PIECE
    assert caplog.text.count("weights go to 127.0.0.1 by gloo") == 1


class OnCard:
    """A stage of a card that is the CPU."""

    made = 0

    def __init__(self, device: torch.device) -> None:
        OnCard.made += 1
        self.module = SimpleNamespace(stream=lambda _: nullcontext())
        self.stream = SimpleNamespace(synchronize=lambda: None)
        self.staged, self.pinned = torch.empty(2, PIECE, dtype=torch.uint8)


def test_all_samplers_are_sent_weights_by_way_of_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnCard, "made", 0)
    monkeypatch.setattr(collective, "stages_on", lambda device: (OnCard(device), OnCard(device)))
    content = os.urandom(3 * PIECE + 11)
    with two_sides(content, tmp_path, 3) as (_, url, sides):
        assert [got(side, url) for side in [*sides, *sides]] == 6 * [content]
    assert OnCard.made == 2 * (1 + len(sides))


def no_room(*_: Any) -> Any:
    raise torch.OutOfMemoryError("NPU out of memory.\nand a long table")


def test_a_card_without_room_is_said_at_once(tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "Stage", no_room)
    monkeypatch.setattr(pair, "PIECE_BYTES", 64 << 20)
    monkeypatch.setattr(pair, "_current", lambda _: nullcontext())
    monkeypatch.setattr(collective, "stages_on", lambda _: stages_on(torch.device("cuda:1")))
    words = r"128 MiB on cuda:1 and as much .*: NPU out of memory\.\n.*sampler\.weight_transfer_backend=http"
    with far(tmp_path) as (_, remotes), pytest.raises(OutOfMemory, match=words):
        remotes.load_weights(shelf.get(1), 1)


def test_memory_that_is_exhausted_as_a_pair_forms_is_no_broken_connection() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        Pair(GLOO, 1, no_room, LOOPBACK, stages_on(GLOO.device))


@pytest.mark.usefixtures("short")
def test_a_group_that_forms_too_late_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    left, given_up = list[tuple[Any, list[Any]]](), threading.Event()

    def late(*_: Any) -> str:
        assert given_up.wait(DEADLINE_S)
        return "a group"

    monkeypatch.setattr(pair, "group_of", late)
    monkeypatch.setattr(pair, "ended", lambda *of: left.append(of))
    with pytest.raises(TimeoutError, match="no group in 1 s"):
        Pair(GLOO, 1, lambda: None, LOOPBACK, stages_on(GLOO.device))
    given_up.set()
    until(lambda: left)
    assert left == [("a group", [])]


def test_bytes_go_as_a_type_that_every_library_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    types: list[torch.dtype] = []

    def broadcast(tensors: list[Tensor], _: Any) -> Any:
        types.extend(tensor.dtype for tensor in tensors)
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: True)

    group = SimpleNamespace(broadcast=broadcast, abort=lambda: None)
    monkeypatch.setattr(pair, "group_of", lambda *_: group)
    one = Pair(GLOO, 0, lambda: None, LOOPBACK, stages_on(GLOO.device))
    one.move(torch.zeros(PIECE, dtype=torch.uint8), lambda: None)
    one.give_up()
    assert types == [torch.int8, torch.int8], "HCCL documents no uint8"
