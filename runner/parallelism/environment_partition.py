"""Environments, partitioned over ranks; all ranks get what all environments say.

turns ──those of this rank──▶ its environments ──replies, gathered──▶ all, on every rank
episodes that were left out ──▶ a file, so that a resumed run trains on the same ones
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from runner.core.fsync_io import storage_errors
from runner.distributed.work_partition import run_on_rank0, run_partitioned
from runner.interfaces import (
    EnvironmentReply,
    Environments,
    EpisodeBatch,
    EpisodeResult,
    Prompt,
    RankCollectives,
    Rollout,
)
from runner.interfaces.environments import PolicyCall, ProgramEnvironments, ProgramEpisodes

log = logging.getLogger("runner")
POLL_S = 0.02  # between two questions whether any rank has replies


class PartitionedEnvironments:
    """Each episode's environment runs on one rank, which broadcasts what it says; see `Environments`.

    record: of episodes that were left out, which stay left out when a run is resumed; None = nothing is recorded
    """

    def __init__(self, inner: Environments, peers: RankCollectives, record: FailureRecord | None = None) -> None:
        self.inner, self.peers, self.record = inner, peers, record
        self.runs_programs, self.lockstep, self.roles = inner.runs_programs, inner.lockstep, inner.roles
        self.max_turns, self.max_episode_tokens = inner.max_turns, inner.max_episode_tokens
        self.max_episodes = inner.max_episodes and inner.max_episodes * peers.size

    def for_evaluation(self, peers: RankCollectives) -> PartitionedEnvironments:
        """The same for evaluations, of which nothing is recorded, by the thread that has `peers`."""
        return PartitionedEnvironments(self.inner, peers)

    def start_episodes(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> PartitionedEpisodes:
        """See `Environments`; all ranks start the same episodes."""
        batches: list[EpisodeBatch] = []
        failures, begun = self._choose_episodes(seeds)

        def work(mine: list[int]) -> Sequence[tuple[Prompt, str]]:
            chosen = [begun[i] for i in mine]
            batches.append(self.inner.start_episodes([prompts[at] for at in chosen], [seeds[at] for at in chosen]))
            return batches[0].starts

        started = run_partitioned(self.peers, [i % self.peers.size for i in range(len(begun))], work)
        starts = list(zip(prompts, failures, strict=True))
        for at, start in zip(begun, started, strict=True):
            starts[at] = start
        return PartitionedEpisodes(starts, begun, batches[0] if batches else None, self, seeds)

    def start_programs(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> PartitionedPrograms:
        """See `ProgramEnvironments`; all ranks start the same episodes."""
        failures, begun = self._choose_episodes(seeds)
        mine = begun[self.peers.rank :: self.peers.size]
        programs = cast(ProgramEnvironments, self.inner)
        batch = programs.start_programs([prompts[at] for at in mine], [seeds[at] for at in mine])
        return PartitionedPrograms(batch, begun, failures, self, seeds)

    def gather_results(
        self,
        begun: Sequence[int],
        failures: Sequence[str],
        seeds: Sequence[int],
        own_results: Callable[[list[int]], list[EpisodeResult]],
    ) -> list[EpisodeResult]:
        """The results of all episodes, of which those that failed are recorded; collective."""
        found = run_partitioned(self.peers, [i % self.peers.size for i in range(len(begun))], own_results)
        known = dict(zip(begun, found, strict=True))
        if self.record is not None:
            self.record.add(self.peers, seeds, {at: one.failure for at, one in known.items() if one.failure})
        return [known.get(at) or EpisodeResult(failure=failure) for at, failure in enumerate(failures)]

    def _choose_episodes(self, seeds: Sequence[int]) -> tuple[list[str], list[int]]:
        """Why each episode was left out by an earlier attempt, or ""; the numbers of the others. Collective."""
        failures = [""] * len(seeds) if self.record is None else self.record.known_failures(self.peers, seeds)
        return failures, [at for at, failure in enumerate(failures) if not failure]

    def close(self) -> None:
        """See `Environments`; not collective."""
        self.inner.close()


class PartitionedEpisodes:
    """The episodes of this rank; other ranks have the others. See `EpisodeBatch`; all ranks pass the same."""

    def __init__(
        self,
        starts: Sequence[tuple[Prompt, str]],
        begun: Sequence[int],
        mine: EpisodeBatch | None,
        owner: PartitionedEnvironments,
        seeds: Sequence[int],
    ) -> None:
        """begun: the episodes that were started; the i-th is the (i // size)-th of rank i % size."""
        self.starts, self._begun, self._mine, self._owner, self._seeds = starts, begun, mine, owner, seeds
        self._peers, self._places = owner.peers, {at: i for i, at in enumerate(begun)}
        self._submitted = list[tuple[int, str, bool]]()  # of several ranks, until all of them can hear of an error

    def submit(self, number: int, text: str, is_last: bool) -> None:
        """See `EpisodeBatch`."""
        if (own := self._own_number(number)) is None:
            return
        if self._peers.size > 1:
            self._submitted.append((own, text, is_last))
        else:
            self._require_mine().submit(own, text, is_last)

    def replies(self, wait_s: float) -> list[tuple[int, EnvironmentReply]]:
        """See `EpisodeBatch`; collective."""

        def work(_: list[int]) -> list[list[tuple[int, EnvironmentReply]]]:
            if self._mine is None:
                return [[]]
            for one in self._submitted:
                self._mine.submit(*one)
            self._submitted.clear()
            said = self._mine.replies(wait_s if self._peers.size == 1 else min(wait_s, POLL_S))
            return [[(self._begun[own * self._peers.size + self._peers.rank], reply) for own, reply in said]]

        return [one for said in run_partitioned(self._peers, range(self._peers.size), work) for one in said]

    def end_episode(self, number: int) -> None:
        """See `EpisodeBatch`."""
        if (own := self._own_number(number)) is not None:
            self._require_mine().end_episode(own)

    def results(self) -> list[EpisodeResult]:
        """See `EpisodeBatch`; collective."""
        failures = [failure for _, failure in self.starts]
        return self._owner.gather_results(self._begun, failures, self._seeds, lambda _: self._require_mine().results())

    def close(self) -> None:
        """See `EpisodeBatch`; not collective."""
        if self._mine is not None:
            self._mine.close()

    def _own_number(self, number: int) -> int | None:
        """The episode's number on this rank; None for that of another rank."""
        place = self._places[number]
        return place // self._peers.size if place % self._peers.size == self._peers.rank else None

    def _require_mine(self) -> EpisodeBatch:
        assert self._mine is not None  # this rank has such an episode
        return self._mine


@dataclass(frozen=True, slots=True)
class PartitionedPrograms:
    """The programs of this rank, whose calls all ranks get; see `ProgramEpisodes`.

    begun: the episodes that were started, see `PartitionedEpisodes`; failures: why each of all is left out, or ""
    """

    mine: ProgramEpisodes
    begun: Sequence[int]
    failures: Sequence[str]
    owner: PartitionedEnvironments
    seeds: Sequence[int]
    own_calls: dict[tuple[int, str], PolicyCall] = field(default_factory=dict)  # as `mine` numbers them

    def next_calls(self, wait_s: float) -> list[PolicyCall] | None:
        """See `ProgramEpisodes`; collective."""
        peers = self.owner.peers

        def work(_: list[int]) -> list[list[PolicyCall] | None]:
            if (own := self.mine.next_calls(wait_s)) is None:
                return [None]
            calls = [replace(call, episode=self.begun[call.episode * peers.size + peers.rank]) for call in own]
            self.own_calls.update({(one.episode, one.key): call for one, call in zip(calls, own, strict=True)})
            return [calls]

        ranks = run_partitioned(peers, range(peers.size), work)
        return None if all(calls is None for calls in ranks) else [call for calls in ranks for call in calls or ()]

    def answer(self, call: PolicyCall, rollout: Rollout | None) -> None:
        """See `ProgramEpisodes`; all ranks pass the same."""
        if (own := self.own_calls.pop((call.episode, call.key), None)) is not None:
            self.mine.answer(own, rollout)

    def results(self) -> list[EpisodeResult]:
        """See `ProgramEpisodes`; collective."""
        return self.owner.gather_results(self.begun, self.failures, self.seeds, lambda _: self.mine.results())

    def close(self) -> None:
        """See `ProgramEpisodes`; not collective."""
        self.mine.close()


class FailureRecord:
    """Episodes that were left out, by seed, in a file of rank 0.

    A tool that was too slow may be fast when the step is repeated. Episodes with the same seed are told apart by their
    order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] | None = None

    def known_failures(self, peers: RankCollectives, seeds: Sequence[int]) -> list[str]:
        """Why each episode was left out by an earlier attempt, "" where it was not. Collective.

        Raises StorageError.
        """
        if self._known is None:
            self._known = run_on_rank0(peers, self._read)
        found = [self._known.get(key, "") for key in _episode_keys(seeds)]
        if count := sum(map(bool, found)):
            log.warning("%d episodes are left out, as before the run was resumed", count)
        return found

    def add(self, peers: RankCollectives, seeds: Sequence[int], failed: Mapping[int, str]) -> None:
        """Write failures down, by the numbers of the episodes. Collective. Raises StorageError."""
        if not failed:
            return
        keys = _episode_keys(seeds)
        lines = "".join(json.dumps([keys[at], failure]) + "\n" for at, failure in failed.items())
        run_on_rank0(peers, lambda: self._append(lines))

    def _append(self, lines: str) -> None:
        with storage_errors(f"cannot write {self._path}"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(lines)

    def _read(self) -> dict[str, str]:
        with storage_errors(f"cannot read {self._path}"):
            lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        whole = lines[:-1] if lines and not lines[-1].endswith("]") else lines
        if len(whole) < len(lines):  # a kill interrupted the write: the step did not train
            self._path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
        return dict(json.loads(line) for line in whole)


def _episode_keys(seeds: Sequence[int]) -> list[str]:
    """A key for each episode: its seed, and which one it is of those with that seed."""
    seen = Counter[int]()
    keys = []
    for seed in seeds:
        keys.append(f"{seed}-{seen[seed]}")
        seen[seed] += 1
    return keys
