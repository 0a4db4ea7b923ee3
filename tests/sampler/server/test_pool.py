"""Samplers in processes of their own: what they draw, and what becomes of it where one dies, lies, or is cut off."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from runner.core import http_client
from runner.core.errors import RunnerError, SamplerError
from runner.distributed.work_partition import balance_by_cost, group_by_prompt
from runner.interfaces import Request, Rollout
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.server import rollout_client
from runner.sampler.server.pool import SamplerPool
from runner.sampler.server.protocol import SAMPLE, SCORE, Array
from runner.weight_sync.store_dir import reserve_dir
from runner.weight_sync.weight_store import StoredWeights, WeightStore
from tests.model.zoo import VOCAB, rows
from tests.sampler.server.processes import CONFIG, DEADLINE_S, TOKEN, Process, local, samplers, until, weights
from tests.sampler.server.proxies import edited, wire

PROMPTS = [tuple(row) for row in rows((3, 1, 9, 17, 5))]
REQUESTS = [
    Request(prompt, seed=100 * group + k, max_new_tokens=6 + 5 * k, group=group, raw=k == 1)
    for group, prompt in enumerate(PROMPTS)
    for k in range(3)
]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[WeightStore]:
    """A shelf of a run's, with its weights of versions 1 and 2."""
    made = WeightStore(reserve_dir(tmp_path / "run", 1 << 20, tmp_path))
    for version in (1, 2):
        made.put(version, weights(version).items())
    yield made
    made.close()


@contextmanager
def client(folder: Path, count: int = 1, **options: Any) -> Iterator[SamplerPool]:
    """The samplers there, as rank 0 sees them."""
    config = TorchSamplerConfig(**CONFIG.model_dump() | {"timeout_s": options.pop("timeout_s", 300.0)})
    pool = SamplerPool(config, count, folder, token=TOKEN, vocab_size=VOCAB, **options)
    try:
        yield pool
    finally:
        pool.close()


def drawn(version: int, count: int = 1) -> list[Rollout]:
    """What so many samplers draw of the requests, computed in this process."""
    members, costs = group_by_prompt(REQUESTS)
    owners = balance_by_cost(costs, count)
    found: dict[int, Rollout] = {}
    for one in range(count):
        hand = [at for group, owner in zip(members, owners, strict=True) if owner == one for at in group]
        found |= dict(zip(hand, local(version).sample([REQUESTS[at] for at in hand]), strict=True))
    return [found[at] for at in range(len(REQUESTS))]


def in_background(work: Any) -> tuple[threading.Thread, list[Any]]:
    """Do it in a thread; what it gave, or raised, is in the list then."""
    found: list[Any] = []

    def do() -> None:
        try:
            found.append(work())
        except RunnerError as error:
            found.append(error)

    thread = threading.Thread(target=do)
    thread.start()
    return thread, found


def test_two_samplers_draw_bit_for_bit_what_this_process_draws(
    tmp_path: Path, shelf: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with samplers(tmp_path, 2), client(tmp_path, 2) as pool:
        for version in (1, 2):
            pool.load_weights(shelf.get(version), version)
            assert pool.sample(REQUESTS) == drawn(version, 2)
            own = local(version).score([PROMPTS[0], PROMPTS[3]])
            assert pool.score([PROMPTS[0], PROMPTS[3]]) == own * 2
        assert pool.sample(REQUESTS[3:6]) == local(2).sample(REQUESTS[3:6])  # one group: for one of the two
        assert pool.sample([]) == []
        assert pool.max_model_len == local().max_model_len
        pool.release_memory()
        numbers = pool.pop_metrics()
    assert TOKEN not in caplog.text, "the token stays out of logs"
    assert numbers.pop("tokens_per_s") > 0 and numbers.pop("load_s") > 0
    assert numbers == {"queue": 9.0, "restarts": 0.0, "resyncs": 0.0, "rejected": 0.0}


def test_a_sampler_killed_while_it_draws_is_replaced_and_draws_the_same(
    tmp_path: Path, shelf: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    with samplers(tmp_path, 2, gate=gate, begun=begun) as started, client(tmp_path, 2) as pool:
        pool.load_weights(shelf.get(1), 1)
        gate.touch()
        thread, found = in_background(lambda: pool.sample(REQUESTS))
        until(lambda: begun.exists() and len(begun.read_text().splitlines()) == 2)
        started[1].kill()
        gate.unlink()
        started.append(started[1].again())
        thread.join()
        assert found == [drawn(1, 2)]
        numbers = pool.pop_metrics()
    assert (numbers["restarts"], numbers["resyncs"], numbers["rejected"]) == (1, 1, 0)
    assert "does not respond; waiting" in caplog.text and "is a new process" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["goes on", "is replaced"])
def test_a_stopped_sampler_is_noticed_by_its_silence(
    ending: str, tmp_path: Path, shelf: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    with samplers(tmp_path, gate=gate, begun=begun) as started, client(tmp_path, silence_s=1.5) as pool:
        pool.load_weights(shelf.get(1), 1)
        gate.touch()
        thread, found = in_background(lambda: pool.sample(REQUESTS))
        until(begun.exists)
        started[0].send(signal.SIGSTOP)
        until(lambda: "no heartbeat" in caplog.text)
        gate.unlink()
        if ending == "goes on":
            started[0].send(signal.SIGCONT)
        else:
            started[0].kill()
            started.append(started[0].again())
        thread.join()
        assert found == [drawn(1)]
        assert pool.pop_metrics()["restarts"] == (ending == "is replaced")
        until(lambda: pool.sample(REQUESTS[:3]) == local(1).sample(REQUESTS[:3]))  # what was left over disturbs nothing


@pytest.mark.parametrize("there", ["no endpoint", pytest.param("a dead one's", marks=pytest.mark.slow)])
def test_a_sampler_that_never_answers_is_a_fault_in_time(there: str, tmp_path: Path, shelf: WeightStore) -> None:
    if there == "a dead one's":
        with samplers(tmp_path) as started:
            started[0].endpoint()
    begin = time.monotonic()
    with client(tmp_path, timeout_s=0.5) as pool, pytest.raises(SamplerError) as raised:
        pool.load_weights(shelf.get(1), 1)
    assert 0.5 <= time.monotonic() - begin < 30 and raised.value.exit_code == 75
    why = (
        r"sampler 0 \(not started\).*does not listen yet"
        if there == "no endpoint"
        else r"sampler 0 \(http.*Connection refused"
    )
    assert raised.match(f"{why}.*0.log.*sampler.timeout_s")


@pytest.mark.slow
def test_answers_that_wait_for_a_sampler_are_given_up_at_once(tmp_path: Path, shelf: WeightStore) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    with samplers(tmp_path, gate=gate, begun=begun), client(tmp_path) as pool:
        pool.load_weights(shelf.get(1), 1)
        gate.touch()
        thread, found = in_background(lambda: pool.sample(REQUESTS))
        until(begun.exists)
        begin = time.monotonic()
        pool.close()
        thread.join()
        assert time.monotonic() - begin < 30  # the gate stays closed for longer
        assert isinstance(found[0], SamplerError)
        with pytest.raises(SamplerError, match="the samplers are closed"):
            pool.sample(REQUESTS)


def test_an_answer_lost_on_its_way_is_not_drawn_again(tmp_path: Path, shelf: WeightStore) -> None:
    begun = tmp_path / "begun"
    cuts = [(1 << 20, "cut"), (40, "cut"), (3000, "cut"), (0, "cut")]  # the load, then three questions
    with (
        samplers(tmp_path, begun=begun) as started,
        wire(started[0], tmp_path / "far", cuts) as far,
        client(far) as pool,
    ):
        pool.load_weights(shelf.get(1), 1)
        assert pool.sample(REQUESTS) == drawn(1)
        assert pool.pop_metrics()["restarts"] == 0
    assert begun.read_text() == f"{len(REQUESTS)}\n"


@pytest.mark.slow
def test_a_wire_that_goes_dead_is_left(tmp_path: Path, shelf: WeightStore) -> None:
    cuts = [(1 << 20, "cut"), (100, "dead"), (3000, "dead")]
    with (
        samplers(tmp_path) as started,
        wire(started[0], tmp_path / "far", cuts) as far,
        client(far, silence_s=1.5) as pool,
    ):
        pool.load_weights(shelf.get(1), 1)
        assert pool.sample(REQUESTS) == drawn(1)


@pytest.mark.slow
def test_other_weights_than_meant_are_replaced_and_their_answers_never_used(
    tmp_path: Path, shelf: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    with samplers(tmp_path), client(tmp_path) as pool, client(tmp_path) as other:
        pool.load_weights(shelf.get(1), 1)
        other.load_weights(shelf.get(2), 2)
        for one, version in ((pool, 1), (other, 2), (pool, 1)):
            assert one.sample(REQUESTS) == drawn(version)
            assert one.pop_metrics()["resyncs"] == 1
    assert "but version 1 was requested; loading that version again" in caplog.text


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_replaced_sampler_says_of_fixed_rows_what_was_said_before_or_is_not_used(
    times: int, tmp_path: Path, shelf: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the bytes that are meant, and answers with something else: no digest shows it."""
    left = [0.5] * times

    def ill(path: str, header: dict[str, Any], arrays: list[Array]) -> None:
        if path == SCORE and len(scored) > 1 and left:
            arrays[1][0] -= 100 * left.pop()
        scored.append(path) if path == SCORE and "error" not in header else None

    scored: list[str] = []
    with samplers(tmp_path) as started, edited(started[0], tmp_path / "far", ill) as far, client(far) as pool:
        for version in (1, 2):  # of the first there is a mark, too, which is no matter
            pool.load_weights(shelf.get(version), version)
            pool.score(PROMPTS[2:4])
        with client(tmp_path) as other:
            other.load_weights(shelf.get(1), 1)
        if times == 1:
            assert pool.sample(REQUESTS) == drawn(2)
        else:
            with pytest.raises(SamplerError, match=r"sampler 0 .*from its earlier scores of version 2 after 2 reloads"):
                pool.sample(REQUESTS)
        assert pool.pop_metrics()["resyncs"] == 1
    assert "after a reload: it is not used" in caplog.text


def lies(path: str, header: dict[str, Any], arrays: list[Array]) -> None:
    """A sampler that says it has other weights whenever it has sampled."""
    if path == SAMPLE:
        header["held"]["digest"] = "0"


@pytest.mark.slow
def test_a_sampler_that_keeps_other_weights_is_a_fault(tmp_path: Path, shelf: WeightStore) -> None:
    with samplers(tmp_path) as started, edited(started[0], tmp_path / "far", lies) as far, client(far) as pool:
        pool.load_weights(shelf.get(1), 1)
        with pytest.raises(SamplerError, match=r"sampler 0 .* has version 1 \(0\).*although it loaded that"):
            pool.sample(REQUESTS)


@pytest.mark.slow
def test_weights_that_changed_on_their_way_are_not_loaded(tmp_path: Path, shelf: WeightStore) -> None:
    weights = shelf.get(1)
    path = weights.files[-1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with samplers(tmp_path) as started, client(tmp_path) as pool:
        with pytest.raises(SamplerError, match="version 1 differ from those sent"):
            pool.load_weights(weights, 1)
        path.unlink()
        with pytest.raises(SamplerError, match=r"version 1 cannot be read: .*No such file"):
            pool.load_weights(weights, 1)
        assert started[0].process.is_alive()
        pool.load_weights(shelf.get(2), 2)
        assert pool.sample(REQUESTS) == drawn(2)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A sampler for tests that leave it alive."""
    with samplers(tmp_path_factory.mktemp("lasting")) as started:
        yield started[0]


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_answers_that_cannot_be_are_asked_for_once_more(
    times: int, lasting: Process, tmp_path: Path, shelf: WeightStore
) -> None:
    left = [math.nan] * times

    def ill(path: str, header: dict[str, Any], arrays: list[Array]) -> None:
        if path == SAMPLE and left:
            arrays[2][arrays[0][:4].sum()] = left.pop()

    with edited(lasting, tmp_path / "far", ill) as far, client(far) as pool:
        pool.load_weights(shelf.get(1), 1)
        if times == 1:
            assert pool.sample(REQUESTS) == drawn(1)
        else:
            with pytest.raises(SamplerError, match=r"sampler 0 .*2 invalid responses: answer 4 .* nan; see .*0.log"):
                pool.sample(REQUESTS)
        assert pool.pop_metrics()["rejected"] == times


@pytest.mark.slow
def test_scores_that_cannot_be_are_a_fault(lasting: Process, tmp_path: Path, shelf: WeightStore) -> None:
    def ill(path: str, header: dict[str, Any], arrays: list[Array]) -> None:
        if path == SCORE:
            arrays[1][-1] = math.nan

    with edited(lasting, tmp_path / "far", ill) as far, client(far) as pool:
        pool.load_weights(shelf.get(1), 1)
        with pytest.raises(SamplerError, match=r"sampler 0 .*2 invalid responses"):
            pool.score([[1, 2, 3], [4, 5]])


@pytest.mark.slow
def test_what_a_sampler_raises_keeps_its_words_and_its_code(lasting: Process, shelf: WeightStore) -> None:
    with client(lasting.folder) as pool:
        pool.load_weights(shelf.get(1), 1)
        with pytest.raises(RunnerError, match=r"sampler 0 \(http.*\): ValueError: .*at least one token") as raised:
            pool.sample([Request((1, 2), 1, 0, 0)])
        assert raised.value.exit_code == 1
        wrong = StoredWeights(shelf.get(1).files, 1)
        with pytest.raises(ValueError, match="version 2 from files"):
            pool.load_weights(wrong, 2)
        with pytest.raises(ValueError, match="from files, not from None"):
            pool.load_weights(None, 2)
        assert pool.sample(REQUESTS) == drawn(1)


@pytest.mark.slow
def test_weights_of_another_model_are_an_error(lasting: Process, shelf: WeightStore) -> None:
    foreign = shelf.put(3, [("no.such.parameter", next(iter(weights(1).values())))])
    with client(lasting.folder) as pool:
        with pytest.raises(RunnerError, match="ValueError: these weights do not match the sampler's") as raised:
            pool.load_weights(foreign, 3)
        assert raised.value.exit_code == 1
        pool.load_weights(shelf.get(1), 1)
        assert pool.sample(REQUESTS) == drawn(1)


def test_weights_are_sent_to_another_machine_and_held_no_longer_than_they_are_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "runner")
    shelf = WeightStore(reserve_dir(tmp_path / "run", 1 << 20, tmp_path))
    fixed, *names = weights(1)
    shelf.keep([(fixed, weights(1)[fixed])])
    for version in (1, 2):
        shelf.put(version, [(name, weights(version)[name]) for name in names])
    with samplers(tmp_path, elsewhere=True) as started, client(tmp_path) as pool:
        endpoint = started[0].endpoint()
        for version in (1, 2):
            pool.load_weights(shelf.get(version), version)
            reference = local()
            reference.load_weights(weights(version) | {fixed: weights(1)[fixed]}, version)
            assert pool.sample(REQUESTS) == reference.sample(REQUESTS)
            held = [path for path in Path(f"/proc/{endpoint.pid}/fd").iterdir() if "memfd:" in str(path.readlink())]
            assert len(held) == 1  # what is the same in every version
        sent = [line for line in caplog.messages if "sending" in line]
        assert [line.rpartition(": ")[2] for line in sent] == ["sending 2 files", "sending 1 files"]
        shelf.get(2).files[-1].unlink()
        with pytest.raises(SamplerError, match="version 2 cannot be read"):
            pool.load_weights(shelf.get(2), 2)
    shelf.close()


@pytest.mark.slow
def test_a_container_that_does_not_see_the_files_is_sent_them(
    tmp_path: Path, shelf: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "runner")
    with samplers(tmp_path), client(tmp_path) as pool, shelf.get(1).files[0].open("rb") as file:
        handle = os.dup2(file.fileno(), 900)  # a path that means something in this process only
        own = StoredWeights([Path(f"/proc/self/fd/{handle}")], 1)
        try:
            for _ in range(2):
                pool.load_weights(own, 1)
                assert pool.sample(REQUESTS) == drawn(1)
        finally:
            os.close(handle)
    assert caplog.text.count("cannot read the weights of version 1") == 2


def during_upload(to: Process, do: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something when the third block of weights is about to be sent to a server."""
    blocks, read, send, url = itertools.count(1), http_client._file_blocks, rollout_client.request, to.endpoint().url
    target: ContextVar[str] = ContextVar("target")

    async def send_to(method: str, where: str, **options: Any) -> tuple[int, bytes]:
        target.set(where)
        return await send(method, where, **options)

    async def read_and_do(*args: Any) -> AsyncIterator[bytes]:
        async for content in read(*args):
            if target.get().startswith(url) and next(blocks) == 3:
                do()
            yield content

    monkeypatch.setattr(http_client, "UPLOAD_BYTES", 4096)
    monkeypatch.setattr(http_client, "_file_blocks", read_and_do)
    monkeypatch.setattr(rollout_client, "request", send_to)


def test_a_sampler_killed_while_it_is_sent_weights_is_replaced(
    tmp_path: Path, shelf: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with samplers(tmp_path, elsewhere=True) as started, client(tmp_path) as pool:

        def kill() -> None:
            started[0].kill()
            started.append(started[0].again())

        during_upload(started[0], kill, monkeypatch)
        pool.load_weights(shelf.get(1), 1)
        assert pool.sample(REQUESTS) == drawn(1) and len(started) == 2


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["continues", "is replaced"])
def test_of_two_samplers_one_stopped_while_it_is_sent_weights_does_not_hold_the_other(
    ending: str, tmp_path: Path, shelf: WeightStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def health(of: Process) -> dict[str, Any]:
        with urllib.request.urlopen(
            urllib.request.Request(of.endpoint().url + "/health", headers={"Authorization": f"Bearer {TOKEN}"})
        ) as response:
            return dict(json.load(response))

    with samplers(tmp_path, 2, elsewhere=True) as started, client(tmp_path, 2, silence_s=1.5) as pool:
        other = started[1]
        assert health(other)["held"]["version"] == -1
        during_upload(started[0], lambda: started[0].send(signal.SIGSTOP), monkeypatch)
        thread, found = in_background(lambda: pool.load_weights(shelf.get(1), 1))
        until(lambda: health(other)["held"]["version"] == 1)  # while the first one is stopped
        until(lambda: "sampler 0" in caplog.text and "no heartbeat" in caplog.text)
        if ending == "continues":
            started[0].send(signal.SIGCONT)
        else:
            started[0].kill()
            started.append(started[0].again())
        thread.join(DEADLINE_S)
        assert found == [None] and pool.sample(REQUESTS) == drawn(1, 2)


@pytest.mark.slow
def test_a_byte_that_changes_on_its_way_is_noticed_and_all_of_it_is_sent_again(
    tmp_path: Path, shelf: WeightStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, changed = http_client._file_blocks, list[bool]()

    async def change(*args: Any) -> AsyncIterator[bytes]:
        async for content in read(*args):
            if not changed:
                changed.append(True)
                content = content[:-1] + bytes([content[-1] ^ 1])
            yield content

    monkeypatch.setattr(http_client, "_file_blocks", change)
    with samplers(tmp_path, elsewhere=True), client(tmp_path) as pool:
        pool.load_weights(shelf.get(1), 1)
        assert pool.sample(REQUESTS) == drawn(1)
    assert "differ from those sent" in caplog.text and "the weights are sent again" in caplog.text


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_samplers_killed_and_stopped_at_random_moments_draw_the_same(tmp_path: Path, shelf: WeightStore) -> None:
    moment, over = random.Random(0), threading.Event()
    wanted = {version: drawn(version, 2) for version in (1, 2)}
    steps = 0

    def trouble() -> None:
        for turn in range(12):
            begin = steps
            while steps == begin and not over.is_set():  # both servers have answered since the last kill
                over.wait(0.01)
            over.wait(moment.uniform(0, 0.4))
            at = turn % 2
            if moment.random() < 0.3:
                started[at].send(signal.SIGSTOP)
                over.wait(moment.uniform(0, 2))
            started[at].kill()
            over.wait(moment.uniform(0, 0.3))
            started[at] = started[at].again()

    with samplers(tmp_path, 2) as started, client(tmp_path, 2, silence_s=1.5) as pool:
        thread, _ = in_background(trouble)
        try:
            while thread.is_alive() or steps % 2:
                version = 1 + steps % 2
                pool.load_weights(shelf.get(version), version)
                assert pool.sample(REQUESTS) == wanted[version]
                steps += 1
        finally:
            over.set()
            thread.join()
        numbers = pool.pop_metrics()
    assert numbers["restarts"] > 5 and numbers["rejected"] == 0
