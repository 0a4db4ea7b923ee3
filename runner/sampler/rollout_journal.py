"""A journal of rollouts, so that a resumed run trains on the same ones.

For samplers whose output cannot be repeated bit for bit.

    requests ──in the journal?──▶ the recorded rollouts ─────────────────────────────┐
                └─ the others ──▶ sampler ──▶ appended to v<version>.jsonl, flushed ──┴─▶ rollouts, in order

A line is written before its rollout is used, so that the journal has all that a killed process has trained on. What a
checkpoint makes unnecessary is removed. Rank 0 writes the journal and sends the rollouts to the other ranks.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from runner.core.fsync_io import storage_errors
from runner.distributed.work_partition import run_on_rank0
from runner.interfaces import RankCollectives, Request, Rollout, Sampler, SamplerWrapper
from runner.interfaces.sampling import RequestSource, sample_from, sample_in_waves

log = logging.getLogger("runner")


class RolloutJournal(SamplerWrapper):
    """A sampler around another one, on all ranks, which pass the same requests.

    folder: where rank 0 keeps it; committed: the step of the newest checkpoint, 0 = there is none
    """

    def __init__(self, sampler: Sampler, folder: Path, peers: RankCollectives, committed: Callable[[], int]) -> None:
        super().__init__(sampler)
        self._peers, self._version = peers, 0
        made: list[JournalPages] = []
        run_on_rank0(peers, lambda: made.append(JournalPages(folder, committed)))
        self._pages = made[0] if made else None

    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        """See `Sampler`; later requests are for this version."""
        super().load_weights(tensors, version)
        self._version = version

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """See `Sampler`; all ranks pass the same. Raises StorageError where the journal cannot be written."""
        found = run_on_rank0(self._peers, lambda: self._require_pages().recorded_rollouts(self._version, requests))
        missing = [at for at in range(len(requests)) if at not in found]
        if missing:
            asked = [requests[at] for at in missing]
            drawn = self._sampler.sample(asked)
            run_on_rank0(self._peers, lambda: self._require_pages().record(self._version, asked, drawn))
            found.update(zip(missing, drawn, strict=True))
        return [found[at] for at in range(len(requests))]

    def sample_continuously(self, source: RequestSource) -> None:
        """See `ContinuousSampler`; several ranks sample in waves. Raises as `sample`."""
        if self._peers.size > 1:
            sample_in_waves(self.sample, source)
        else:
            sample_from(self._sampler, UnrecordedRequests(source, self._require_pages(), self._version))

    def _require_pages(self) -> JournalPages:
        assert self._pages is not None  # this is rank 0
        return self._pages


class JournalPages:
    """The journal's files, one for each version."""

    def __init__(self, folder: Path, committed: Callable[[], int]) -> None:
        """Reads what an earlier attempt left. Raises StorageError."""
        self._folder, self._committed = folder, committed
        self._known: dict[int, dict[str, deque[Rollout]]] = {}
        self._newest = -1
        with self._storage_errors():
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("v*.jsonl"):
                self._known[int(path.stem[1:])] = _read(path)
        if count := sum(len(one) for page in self._known.values() for one in page.values()):
            log.info("journal  %d rollouts of earlier attempts in %s", count, folder)

    def recorded_rollouts(self, version: int, requests: Sequence[Request]) -> dict[int, Rollout]:
        """The recorded rollouts of some of these requests, by their places; each is given once."""
        if version != self._newest:
            self._start_version(version)
        page = self._known.get(version, {})
        found = {at: page[key].popleft() for at, one in enumerate(requests) if page.get(key := _key(one))}
        if len(found) < len(requests):
            self._drop_above(version)
        return found

    def record(self, version: int, requests: Sequence[Request], rollouts: Sequence[Rollout]) -> None:
        """Write rollouts down. Raises StorageError."""
        lines = "".join(
            json.dumps({"key": _key(request), **_record(rollout)}) + "\n"
            for request, rollout in zip(requests, rollouts, strict=True)
        )
        with self._storage_errors(), self._path(version).open("a", encoding="utf-8") as file:
            file.write(lines)  # one write, and closed: from here on it survives this process

    def _storage_errors(self) -> AbstractContextManager[None]:
        text = f"cannot write the rollout journal in {self._folder}"
        return storage_errors(text, "; free disk space, then type: run resume")

    def _start_version(self, version: int) -> None:
        """Begin a version: what no resume can need any more is removed."""
        self._newest = version
        reach = self._committed()
        for path in self._folder.glob("v*.jsonl"):
            if int(path.stem[1:]) < min(reach, version):
                path.unlink(missing_ok=True)
        self._known = {one: page for one, page in self._known.items() if one >= version}

    def _drop_above(self, version: int) -> None:
        """Drop the records of later versions, as a request of this one has none.

        They belong to the run before it was resumed from an older checkpoint, whose weights were others.
        """
        if later := sorted(one for one in self._known if one > version):
            words = "journal: removed the rollouts of versions %d to %d, as their steps are repeated"
            log.warning(words, later[0], later[-1])
        for one in later:
            del self._known[one]
            self._path(one).unlink(missing_ok=True)

    def _path(self, version: int) -> Path:
        return self._folder / f"v{version}.jsonl"


def _record(rollout: Rollout) -> dict[str, Any]:
    """A rollout as JSON has it; its experts as the base64 of a NumPy file."""
    found = {name: getattr(rollout, name) for name in Rollout.__slots__ if name != "text"}
    found |= {name: values.tolist() for name, values in found.items() if isinstance(values, array)}
    if rollout.experts is not None:
        np.save(file := io.BytesIO(), rollout.experts, allow_pickle=False)
        found["experts"] = base64.b64encode(file.getvalue()).decode()
    return found


class UnrecordedRequests:
    """Of a source's requests those that the journal does not answer; see `RequestSource`."""

    def __init__(self, source: RequestSource, pages: JournalPages, version: int) -> None:
        self._source, self._pages, self._version = source, pages, version
        self._asked: dict[int, Request] = {}

    def take(self, wait: bool) -> list[tuple[int, Request]]:
        """See `RequestSource`."""
        while arrived := self._source.take(wait):
            found = self._pages.recorded_rollouts(self._version, [request for _, request in arrived])
            for at, rollout in found.items():
                self._source.answer(arrived[at][0], rollout)
            if missing := [one for at, one in enumerate(arrived) if at not in found]:
                self._asked.update(missing)
                return missing
        return []

    def answer(self, number: int, rollout: Rollout) -> None:
        """See `RequestSource`."""
        self._pages.record(self._version, [self._asked.pop(number)], [rollout])
        self._source.answer(number, rollout)


def _key(request: Request) -> str:
    """What has to be equal for a recorded rollout to be the answer."""
    asked = [request.seed, request.max_new_tokens, request.raw, *request.prompt]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()


def _read(path: Path) -> dict[str, deque[Rollout]]:
    """What a file holds; what follows its last whole line is cut away, and that is said."""
    page: defaultdict[str, deque[Rollout]] = defaultdict(deque)
    content, whole = path.read_bytes(), 0
    for line in content.splitlines(keepends=True):
        try:
            found: dict[str, Any] = {
                name: tuple(one) if isinstance(one, list) else one for name, one in json.loads(line).items()
            }
            if text := found.get("experts"):
                found["experts"] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
            key, rollout = found.pop("key"), Rollout(**found)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            break
        if not line.endswith(b"\n"):
            break
        page[key].append(rollout)
        whole += len(line)
    if whole < len(content):
        lost = len(content) - whole
        log.warning("%s: removed its last %d bytes, an incomplete line; these rollouts are sampled again", path, lost)
        with path.open("r+b") as file:
            file.truncate(whole)
    return page
