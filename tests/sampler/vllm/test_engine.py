"""The order of an engine's verbs, of which the processor has no more than the order: without vLLM."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.core.errors import EnvironmentProblem, SamplerError
from runner.sampler.vllm import engine as engines
from runner.sampler.vllm.engine import VllmEngine, preserve_process_state

WEIGHTS = {"a": torch.ones(1), "b": torch.ones(1)}


class Recorded:
    """What an engine asks of vLLM's LLM; `fails`: with what it ends from then on."""

    def __init__(self, experts: bool, calls: list[Any]) -> None:
        self._experts, self._calls = experts, calls
        self.fails: Exception | None = None

    def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        if self.fails is not None:
            raise self.fails
        if method == "knows_experts":
            return [self._experts]
        self._calls.append((method, list(args[1]), args[2]))
        return [None]

    def sleep(self, level: int) -> None:
        self._calls.append("sleep")

    def wake_up(self, tags: list[str]) -> None:
        if self.fails is not None:
            raise self.fails
        self._calls.append(("wake", *tags))

    def generate(self, prompts: Any, params: Any, use_tqdm: bool, lora_request: Any) -> list[Any]:
        return []

    def reset_prefix_cache(self) -> bool:
        return True


Made = Callable[..., tuple[VllmEngine, Recorded, list[Any]]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    """An engine, the LLM that it speaks to, and what it asked of that."""

    def make(sleep: int = 1, experts: bool = False, cards: int = 1) -> tuple[VllmEngine, Recorded, list[Any]]:
        calls: list[Any] = []
        monkeypatch.setattr(engines, "free_cached_memory", lambda: calls.append("room"))
        monkeypatch.setattr(engines, "_start_llm", lambda arguments: Recorded(experts, calls))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        built = VllmEngine({"tensor_parallel_size": cards}, sleep=sleep, timeout_s=5, scratch=tmp_path)
        return built, built._llm, calls

    return make


def test_a_trainer_gives_its_spare_memory_back_before_an_engine_wakes(made: Made) -> None:
    """Or an engine finds the card full after the first step: what a trainer has freed, torch keeps for it."""
    engine, _, calls = made()
    engine.load(WEIGHTS, [*WEIGHTS], None)
    engine.release()
    del calls[:]
    engine.load(WEIGHTS, [*WEIGHTS], frozenset("a"))
    engine.generate([[1]], None, None)
    assert calls == ["room", ("wake", "weights"), ("load_tensors", ["a"], False), "room", ("wake", "kv_cache")]
    del calls[:]
    engine.generate([[1]], None, None)
    assert not calls


def test_an_engine_that_finds_no_room_is_no_bug_of_ours(made: Made) -> None:
    engine, llm, _ = made()
    engine.load(WEIGHTS, [*WEIGHTS], None)
    engine.release()
    llm.fails = RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62")
    with pytest.raises(SamplerError, match=r"allocate its memory again: CUDA Error.*sampler\.gpu_memory_utilization"):
        engine.generate([[1]], None, None)


@pytest.mark.parametrize("experts", [False, True])
def test_a_base_whose_adapter_comes_by_itself_is_given_once(experts: bool, made: Made) -> None:
    engine, _, calls = made(sleep=0, experts=experts)
    for _ in range(2):
        engine.load(WEIGHTS, [*WEIGHTS], frozenset())
    assert calls == [("load_tensors", ["a", "b"], True)]
    engine.load(WEIGHTS, [*WEIGHTS], frozenset("b"))  # experts take all weights or none
    assert calls[1:] == [("load_tensors", ["a", "b"], True) if experts else ("load_tensors", ["b"], False)]


def test_a_worker_that_ended_is_the_engines_end_and_no_bug(made: Made) -> None:
    engine, llm, _ = made(cards=2)
    llm.fails = RuntimeError("cancelled")  # what is heard of a worker that was killed
    with pytest.raises(SamplerError, match="engine died: RuntimeError: cancelled"):
        engine.load(WEIGHTS, [*WEIGHTS], None)
    engine, llm, _ = made(cards=1)
    llm.fails = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        engine.load(WEIGHTS, [*WEIGHTS], None)


def test_what_an_engine_says_in_the_environment_stays_where_it_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"VLLM_OWN": "1", "TRITON_ALL_BLOCKS_PARALLEL": "1", "ASCEND_CUSTOM_OPP_PATH": "/vendor:/cann"}
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "0", "ASCEND_CUSTOM_OPP_PATH": "/cann", "HOME": "/root"})
    with preserve_process_state():
        os.environ.update({**kept, "LOCAL_RANK": "7", "MASTER_PORT": "1"})
        del os.environ["HOME"]
    assert os.environ == {"LOCAL_RANK": "0", "HOME": "/root", **kept}


def test_workers_that_do_not_start_are_worded(monkeypatch: pytest.MonkeyPatch) -> None:
    def llm(**arguments: Any) -> Any:
        raise Exception("WorkerProc initialization failed; see stack trace")

    module = type("vllm", (), {"LLM": staticmethod(llm)})
    monkeypatch.setitem(__import__("sys").modules, "vllm", module)  # type: ignore[arg-type]
    asked: Mapping[str, Any] = {"tensor_parallel_size": 2}
    with pytest.raises(EnvironmentProblem, match="WorkerProc initialization failed"):
        engines._start_llm(asked)
    with pytest.raises(Exception, match="WorkerProc") as caught:
        engines._start_llm({"tensor_parallel_size": 1})
    assert not isinstance(caught.value, EnvironmentProblem)
