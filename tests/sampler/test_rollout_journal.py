"""The journal: a killed run learns from the very rollouts that it had drawn, though they cannot be repeated."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runner.core.errors import StorageError
from runner.distributed.work_partition import SINGLE_PROCESS
from runner.interfaces import Request, Rollout
from runner.model.tiny import byte_tokenizer
from runner.parallelism.parallel_context import ParallelContext
from runner.parallelism.rollout_partition import PartitionedSampler
from runner.sampler.rollout_journal import RolloutJournal
from runner.trainer.loop import ExperienceQueue
from runner.weight_sync.publisher import Publisher
from runner.weight_sync.transports import DeviceCopy
from tests.parallelism.worlds import on_ranks

STEPS, EVERY, ROWS = 24, 5, 3


class Dice:
    """A sampler that never draws the same twice, and whose answers depend on its weights."""

    temperature = 1.0
    max_new_tokens = 8
    max_model_len = None

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.version, self.bias = -1, 0.0

    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        self.version = version
        self.bias = 0.0 if tensors is None else float(tensors["w"].sum())

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        self.asked += requests
        return [self.drawn(request) for request in requests]

    def drawn(self, request: Request) -> Rollout:
        dice = random.Random(os.urandom(8))
        ids = tuple(dice.randrange(300) for _ in range(request.max_new_tokens))
        logprobs = tuple(math.log(dice.random() + 1e-300) + self.bias for _ in ids)
        return Rollout(ids, logprobs, logprobs[::-1] if request.raw else None, self.version, "length")

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        return [[[0.0] * (len(row) - 1) for row in rows]]

    def pop_metrics(self) -> dict[str, float]:
        return {}

    def release_memory(self) -> None: ...

    def close(self) -> None: ...


class Arriving:
    """A source of two requests, the second of which arrives after the answer to the first."""

    def __init__(self, asked: Sequence[Request]) -> None:
        self.asked, self.answers = asked, list[Rollout]()

    def take(self, wait: bool) -> list[tuple[int, Request]]:
        assert wait
        at = len(self.answers)
        return [(at, self.asked[at])] if at < len(self.asked) else []

    def answer(self, number: int, rollout: Rollout) -> None:
        assert number == len(self.answers)
        self.answers.append(rollout)


def test_answers_to_requests_that_arrive_one_by_one_are_recorded_as_they_come(tmp_path: Path) -> None:
    asked = [Request((1, 2), seed, 4, 0) for seed in range(2)]

    class Dying(Dice):
        def sample(self, requests: Sequence[Request]) -> list[Rollout]:
            if self.asked:
                raise KeyboardInterrupt
            return super().sample(requests)

    killed, first = Arriving(asked), RolloutJournal(Dying(), tmp_path, SINGLE_PROCESS, lambda: 0)
    first.load_weights(None, 0)
    with pytest.raises(KeyboardInterrupt):
        first.sample_continuously(killed)
    resumed, second = Arriving(asked), RolloutJournal(inner := Dice(), tmp_path, SINGLE_PROCESS, lambda: 0)
    second.load_weights(None, 0)
    second.sample_continuously(resumed)
    assert resumed.answers[0] == killed.answers[0] and inner.asked == asked[1:]


class Refuses(Dice):
    """One that must not be asked."""

    def drawn(self, request: Request) -> Rollout:
        raise AssertionError(f"{request} is not in the journal")


def requests(step: int, count: int = ROWS, raw: bool = False) -> list[Request]:
    return [Request((step, at, 7), 1000 * step + at, 4, at, raw) for at in range(count)]


def journal(folder: Path, sampler: Dice | None = None, committed: Callable[[], int] = lambda: 0) -> RolloutJournal:
    return RolloutJournal(sampler or Dice(), folder, SINGLE_PROCESS, committed)


# ---- exact resume ----------------------------------------------------------------------------------------------------


def train(root: Path, lag: int, sampler: Dice, prunes: bool, archive: Path | None = None, ends: bool = True) -> Tensor:
    """As the loop: what is trained on is a function of the rollouts and of what was trained on before.

    ends: False = it waits in the last step until it is killed
    """
    saved = root / "saved"
    state: dict[str, Any] = pickle.loads(saved.read_bytes()) if saved.exists() else {"step": 0, "w": torch.zeros(4)}
    weight, first = state["w"].double(), state["step"]

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield "w", weight

    asked = RolloutJournal(sampler, root / "journal", SINGLE_PROCESS, lambda: first_of(saved) if prunes else 0)
    publisher = Publisher(DeviceCopy(weights), asked, lag)
    collect = publisher.before(lambda step: asked.sample(requests(step)))
    with ExperienceQueue(
        collect, STEPS, lag, encode=lambda found: {"rollouts": found}, decode=lambda kept: kept["rollouts"]
    ) as feed:
        if "feed" in state:
            feed.load_state_dict(state["feed"])
        publisher.publish(first)
        feed.start(first)
        for step in range(first, STEPS):
            for rollout in feed.take(step):
                weight = (weight * 1.7 + torch.tensor(rollout.logprobs) + torch.tensor(rollout.ids) / 7) % 5.0
            publisher.publish(step + 1)
            feed.on_weights_published(step)
            time.sleep(0.01 if ends or step + 1 < STEPS else 300)
            if (step + 1) % EVERY == 0:
                content = pickle.dumps({"step": step + 1, "w": weight, "feed": feed.state_dict()})
                if archive is not None:
                    shutil.copytree(root / "journal", archive, dirs_exist_ok=True)
                (root / "aside").write_bytes(content)
                os.replace(root / "aside", saved)
    return weight


def first_of(saved: Path) -> int:
    return int(pickle.loads(saved.read_bytes())["step"]) if saved.exists() else 0


def attempt(root: Path, lag: int, archive: Path, ends: bool) -> None:
    weight = train(root, lag, Dice(), prunes=True, archive=archive, ends=ends)
    shutil.copytree(root / "journal", archive, dirs_exist_ok=True)
    (root / "done").write_bytes(pickle.dumps(weight))


@pytest.mark.parametrize(
    ("lag", "seed"),
    [(1, 0), *(pytest.param(lag, seed, marks=pytest.mark.slow) for lag in (0, 2) for seed in (1, 2))],
)
def test_killed_at_any_moment_it_ends_as_the_rollouts_of_its_journal_say(tmp_path: Path, lag: int, seed: int) -> None:
    root, archive, dice = tmp_path / "run", tmp_path / "archive", random.Random(seed)
    root.mkdir()
    context, kills = multiprocessing.get_context("fork"), 0
    while not (root / "done").exists():
        process = context.Process(target=attempt, args=(root, lag, archive, kills >= 2))
        process.start()
        process.join(dice.uniform(0.01, 0.1 + 0.03 * 1.1**kills))
        kills += process.is_alive()
        process.kill()
        process.join()
        assert kills < 500
    pages = [int(path.stem[1:]) for path in (root / "journal").iterdir()]
    assert kills >= 2 and len(pages) <= 2 * EVERY + lag, "bounded by what a resume may need"
    replay = tmp_path / "replay"
    replay.mkdir()
    shutil.copytree(archive, replay / "journal")
    wanted = train(replay, lag, Refuses(), prunes=False)
    assert torch.equal(pickle.loads((root / "done").read_bytes()), wanted)


def test_without_the_journal_it_would_not(tmp_path: Path) -> None:
    found = [train(tmp_path, 0, Dice(), prunes=False) for _ in range(2)]
    assert torch.equal(*found), "the second one trained on the first one's"
    shutil.rmtree(tmp_path / "journal")
    (tmp_path / "saved").unlink()
    assert not torch.equal(found[0], train(tmp_path, 0, Dice(), prunes=False))


# ---- what is kept ----------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5),
    raw=st.booleans(),
    finish=st.sampled_from(["stop", "length"]),
)
def test_every_bit_comes_back(tmp_path_factory: Any, bits: list[int], raw: bool, finish: str) -> None:
    folder = tmp_path_factory.mktemp("journal")
    floats = [struct.unpack("<d", struct.pack("<Q", one))[0] for one in bits]
    floats = [one if math.isfinite(one) else 0.1 for one in floats]
    experts = np.array(bits, np.uint64).view(np.int16).reshape(-1, 2, 2)
    raws = tuple(floats[::-1]) if raw else None
    wanted = Rollout(tuple(range(len(floats))), tuple(floats), raws, 5, finish, experts=experts)
    sampler = Dice()
    sampler.drawn = lambda request: wanted  # type: ignore[method-assign]
    request = [Request((1, 2), 2**62 + 1, 9, 0, raw)]
    assert journal(folder, sampler).sample(request) == [wanted]
    [again] = journal(folder, Refuses()).sample(request)
    assert again == wanted and again.experts is not None and again.experts.dtype == np.int16
    np.testing.assert_array_equal(again.experts, experts)


def test_only_the_very_same_request_has_the_recorded_answer(tmp_path: Path) -> None:
    one = journal(tmp_path)
    one.load_weights(None, 3)
    asked = Request((1, 2), 5, 4, 0)
    wanted = one.sample([asked])
    others = [
        Request((1, 3), 5, 4, 0),
        Request((1, 2), 6, 4, 0),
        Request((1, 2), 5, 3, 0),
        Request((1, 2), 5, 4, 0, raw=True),
    ]
    again = journal(tmp_path, sampler := Dice())
    again.load_weights(None, 3)
    found = again.sample([others[0], asked, *others[1:]])
    assert found[1] == wanted[0] and sampler.asked == others, "and only the others are drawn"
    later = journal(tmp_path, sampler := Dice())
    later.load_weights(None, 4)
    later.sample([asked])
    assert sampler.asked == [asked], "of another version"


def test_the_same_request_twice_has_two_answers_in_their_order(tmp_path: Path) -> None:
    one = journal(tmp_path)
    twice = requests(0, 1) * 2
    wanted = [*one.sample(twice), *one.sample(twice[:1])]
    again = journal(tmp_path, Refuses())
    assert [*again.sample(twice[:1]), *again.sample(twice)] == wanted


def test_a_line_with_a_number_beyond_64_bits_is_drawn_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal(tmp_path).sample(requests(0))
    (page,) = tmp_path.iterdir()
    *first, last = page.read_text().splitlines()
    page.write_text("\n".join([*first, json.dumps(json.loads(last) | {"ids": [2**70]})]) + "\n")
    journal(tmp_path, sampler := Dice()).sample(requests(0))
    assert sampler.asked == requests(0)[2:] and "these rollouts are sampled again" in caplog.text


@pytest.mark.parametrize("cut", ["middle", "newline", pytest.param("nothing of it", marks=pytest.mark.slow)])
def test_a_torn_line_is_said_and_drawn_again(tmp_path: Path, cut: str, caplog: pytest.LogCaptureFixture) -> None:
    wanted = journal(tmp_path).sample(requests(0))
    (page,) = tmp_path.iterdir()
    content = page.read_bytes()
    page.write_bytes(content[: {"middle": -20, "newline": -1, "nothing of it": content[:-1].rindex(b"\n") + 1}[cut]])
    again = journal(tmp_path, sampler := Dice())
    found = again.sample(requests(0))
    assert found[:2] == wanted[:2] and found[2] != wanted[2] and sampler.asked == requests(0)[2:]
    assert ("these rollouts are sampled again" in caplog.text) is (cut != "nothing of it")
    assert journal(tmp_path, Refuses()).sample(requests(0)) == found
    assert all(json.loads(line) for line in page.read_text().splitlines())


def test_what_was_drawn_after_another_answer_is_of_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the newest checkpoint is damaged, and the run continues from one before, whose pages are gone."""
    one = journal(tmp_path)
    for version in range(5):
        one.load_weights(None, version)
        one.sample(requests(version))
    (tmp_path / "v2.jsonl").unlink()
    again = journal(tmp_path, sampler := Dice())
    for version in range(1, 5):
        again.load_weights(None, version)
        again.sample(requests(version))
    assert sampler.asked == [request for version in (2, 3, 4) for request in requests(version)]
    assert "removed the rollouts of versions 3 to 4" in caplog.text


def test_what_no_checkpoint_needs_is_removed(tmp_path: Path) -> None:
    newest = [0]
    one = journal(tmp_path, committed=lambda: newest[0])
    for version in range(9):
        one.load_weights(None, version)
        one.sample(requests(version))
        newest[0] = version // 4 * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"v{version}.jsonl" for version in range(4, 9)]


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = journal(tmp_path / "journal")
    shutil.rmtree(tmp_path / "journal")
    with pytest.raises(StorageError, match=r"cannot write the rollout journal in .*run resume"):
        one.sample(requests(0))


def on_a_rank(world: ParallelContext, folder: Path, refuses: bool) -> tuple[list[Rollout], int]:
    """Each rank has an engine, rank 0 the journal."""
    engine = Refuses() if refuses else Dice()
    sampler = PartitionedSampler(engine, world.rollout_peers, nullcontext, byte_tokenizer(512))
    return RolloutJournal(sampler, folder, world.rollout_peers, lambda: 0).sample(requests(0, 5)), len(engine.asked)


def test_all_ranks_have_the_rollouts_of_rank_0s_journal(tmp_path: Path) -> None:
    (wanted, own), (other, too) = on_ranks(2, on_a_rank, tmp_path, False)
    assert wanted == other and own + too == 5 and min(own, too) > 0
    assert on_ranks(2, on_a_rank, tmp_path, True) == [(wanted, 0)] * 2
