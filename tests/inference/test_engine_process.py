"""The engine and its client over real pipes: events, scores, refusals, and what happens when either side ends."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.core.auto_choices import Decisions
from runner.core.errors import CheckpointError, DataError, EnvironmentProblem
from runner.core.subprocess import JsonLines
from runner.inference import engine_client
from runner.inference.engine import GenerationRequest, SamplingParams
from runner.inference.engine_client import EngineClient, EngineLost
from runner.inference.engine_process import EngineHost, EngineSettings, _run_and_report, load_engine
from runner.inference.torch_engine import TorchEngine
from tests.inference.model_folders import write_adapter
from tests.inference.test_torch_engine import GREEDY, run, tokens
from tests.model.zoo import causal, rows

MODEL = causal("qwen2")
PROMPT = tuple(rows((6,))[0])


@pytest.fixture
def pipes() -> Iterator[tuple[int, int, int, int]]:
    """The client's ends and the engine's, each for reading and for writing."""
    theirs, mine = os.pipe(), os.pipe()
    yield mine[0], theirs[1], theirs[0], mine[1]
    for descriptor in (*theirs, *mine):
        with suppress(OSError):  # whoever used it has closed it
            os.close(descriptor)


@asynccontextmanager
async def connected(
    pipes: tuple[int, int, int, int], work: Callable[[JsonLines], None], **options: float
) -> AsyncIterator[EngineClient]:
    """A client of an engine in a thread, whose end of the connection closes with it."""
    reading, writing, theirs, answers = pipes
    codes: list[int] = []

    def serve() -> None:
        lines = JsonLines(theirs, answers)
        codes.append(_run_and_report(lines, lambda: work(lines)))
        os.close(answers)

    thread = threading.Thread(target=serve)
    thread.start()
    client = await EngineClient.connect(reading, writing, **options)
    try:
        yield client
    finally:
        await client.close()
        await asyncio.to_thread(thread.join)


def serving(lines: JsonLines) -> None:
    EngineHost(MODEL, EngineSettings(source="none", max_num_seqs=4), {}).run(lines)


async def answer(client: EngineClient, params: SamplingParams, count: int = 1) -> list[list[int]]:
    """The ids of several answers to one prompt."""
    found: list[list[int]] = [[] for _ in range(count)]
    async with client.open([GenerationRequest("", PROMPT, params)] * count) as events:
        async for event in events:
            found[int(event.request_id)].append(event.token_id)
    return found


def test_answers_and_scores_are_those_of_the_engine(pipes: tuple[int, int, int, int]) -> None:
    engine = TorchEngine(MODEL, decide=Decisions())
    wanted = tokens(run(engine, [GenerationRequest("0", PROMPT, GREEDY)])["0"])
    scores = engine.score(PROMPT, 2)
    engine.close()

    async def work() -> None:
        async with connected(pipes, serving) as client:
            several = await asyncio.gather(*(answer(client, GREEDY, 3) for _ in range(5)))
            assert several == [[wanted] * 3] * 5 and client.num_requests == 0
            got = await client.score(PROMPT, 2, None)
            assert [s.logprob for s in got] == pytest.approx([s.logprob for s in scores], abs=1e-5)
            assert [[i for i, _ in s.top_logprobs] for s in got] == [[i for i, _ in s.top_logprobs] for s in scores]
            for refused in (answer(client, SamplingParams(adapter="x")), client.score(PROMPT, 0, "x")):
                with pytest.raises(DataError, match="no adapter is named 'x'"):
                    await refused
            assert await answer(client, GREEDY) == [wanted]

    asyncio.run(work())


def test_leaving_early_cancels_the_requests(pipes: tuple[int, int, int, int]) -> None:
    async def work() -> None:
        async with connected(pipes, serving) as client:
            params = SamplingParams(temperature=0, max_new_tokens=30_000, ignore_eos=True)
            async with client.open([GenerationRequest("", PROMPT, params)] * 9) as events:
                await anext(events)
            assert client.num_requests == 0
            await answer(client, GREEDY)  # which has a row at once, or it would wait for 30,000 tokens

    asyncio.run(work())


async def lost(client: EngineClient, request: Awaitable[Any]) -> EngineLost:
    """The error of a request; every later one gets the same."""
    with pytest.raises(EngineLost) as error:
        await request
    assert client.failed.is_set()
    with pytest.raises(EngineLost):
        await answer(client, GREEDY)
    return error.value


def test_an_engine_that_fails_names_its_reason_and_exit_code(pipes: tuple[int, int, int, int]) -> None:
    broken = causal("llama")

    def work(lines: JsonLines) -> None:
        host = EngineHost(broken, EngineSettings(source="none"), {})
        with torch.no_grad():
            broken.causal.get_output_embeddings().weight.fill_(float("nan"))
        host.run(lines)

    async def check() -> None:
        async with connected(pipes, work) as client:
            error = await lost(client, answer(client, GREEDY, 3))
            assert error.exit_code == 5 and "not finite" in str(error)

    asyncio.run(check())


def test_an_engine_that_cannot_load_is_an_error_before_the_first_request(pipes: tuple[int, int, int, int]) -> None:
    def work(lines: JsonLines) -> None:
        raise DataError("no such thing")

    async def check() -> None:
        async with connected(pipes, work) as client:
            error = await lost(client, client.wait_ready())
            assert (error.exit_code, str(error)) == (3, "no such thing")

    asyncio.run(check())


def test_an_engine_that_hangs_is_noticed(pipes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "WATCH_INTERVAL_S", 0.05)

    def work(lines: JsonLines) -> None:
        while lines.receive(60) is not None:  # it reads, and answers nothing
            pass

    async def check() -> None:
        async with connected(pipes, work, hang_timeout_s=0.2) as client:
            error = await lost(client, answer(client, GREEDY))
            assert error.exit_code == 6 and "sent no message for 0.2 s" in str(error)

    asyncio.run(check())


def test_adapters_are_loaded_by_name(tmp_path: Path) -> None:
    MODEL.module.save_pretrained(tmp_path / "base")
    MODEL.tokenizer.save_pretrained(tmp_path / "base")
    for seed, name in enumerate(("one", "two")):
        tuned = attach(LoraConfig(rank=4, alpha=64), causal("qwen2"), decide=Decisions())
        torch.manual_seed(seed)
        for key, p in tuned.module.named_parameters():
            if "lora_B" in key:
                p.data.normal_()
        tuned.module.save_pretrained(tmp_path / name)
    base, one, two = (str(tmp_path / name) for name in ("base", "one", "two"))

    def greedy(settings: EngineSettings, adapter: str | None) -> list[int]:
        (tmp_path / "tokenizer").mkdir(exist_ok=True)
        host, info = load_engine(settings, tmp_path / "tokenizer")
        assert set(info.adapters) >= ({adapter} if adapter else set())
        params = SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True, adapter=adapter)
        found = tokens(run(host.engine, [GenerationRequest("0", PROMPT, params)])["0"])
        host.engine.close()
        return found

    both = EngineSettings(source=base, adapters=(one, f"second={two}"), device="cpu")
    answers = [greedy(both, adapter) for adapter in (None, "one", "second")]
    assert len({tuple(ids) for ids in answers}) == 3
    assert greedy(EngineSettings(source=base, device="cpu"), None) == answers[0]
    assert greedy(EngineSettings(source=one, base=base, device="cpu"), None) == answers[1]

    host, _ = load_engine(EngineSettings(source=base, device="cpu"), tmp_path / "tokenizer")

    def said(adapter: str | None) -> list[int]:
        params = SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True, adapter=adapter)
        return tokens(run(host.engine, [GenerationRequest("0", PROMPT, params)])["0"])

    broken = write_adapter(tmp_path / "broken", base, kind="qwen2", target_modules=["q_proj"])
    tensors = load_file(broken / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), broken / "adapter_model.safetensors", {"format": "pt"})
    for _ in range(2):
        with pytest.raises(CheckpointError, match="it lacks 1 tensors"):
            host._load_adapter("a", str(broken))
        assert said(None) == answers[0], "what could not be loaded leaves nothing behind"
        host._load_adapter("a", one)
        assert said("a") == answers[1] and said(None) == answers[0]
        with pytest.raises(CheckpointError, match="it lacks 1 tensors"):
            host._load_adapter("b", str(broken))
        host._load_adapter("b", two)
        assert [said(adapter) for adapter in (None, "a", "b")] == answers
        host._unload_adapter("a")
        assert said("b") == answers[2]
        with pytest.raises(DataError, match="no adapter is named 'a'"):
            said("a")
        host._unload_adapter("b")
        assert said(None) == answers[0]


def write_with_template(folder: Path, base: Path, template: str) -> str:
    """An adapter's folder with a tokenizer of its own, as an export has it."""
    write_adapter(folder, base, kind="qwen2")
    tokenizer = deepcopy(MODEL.tokenizer)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_adapters_with_another_chat_template_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MODEL.save(base := tmp_path / "base")
    own = str(MODEL.tokenizer.chat_template)
    equal = write_with_template(tmp_path / "equal", base, own)
    one, other = (write_with_template(tmp_path / name, base, f"{{# {name} #}}{own}") for name in ("one", "other"))
    bare = str(write_adapter(tmp_path / "bare", base, kind="qwen2"))

    def load(*adapters: str) -> EngineHost:
        (tmp_path / "tokenizer").mkdir(exist_ok=True)
        return load_engine(EngineSettings(source=str(base), adapters=adapters, device="cpu"), tmp_path / "tokenizer")[0]

    for pair in ((one, other), (one, bare), (bare, one), (equal, one)):
        with pytest.raises(
            EnvironmentProblem, match=r"another chat template than .*share one\n  serve it alone: run serve"
        ):
            load(*pair)
    capsys.readouterr()
    load(equal, bare)._load_adapter("more", equal)
    assert not capsys.readouterr().err
    host = load(one)
    assert "the base base is served with the chat template of its adapters" in capsys.readouterr().err
    for folder in (other, bare):
        with pytest.raises(EnvironmentProblem, match="another chat template than the served model"):
            host._load_adapter("more", folder)
    with pytest.raises(EnvironmentProblem, match="another chat template than the served model"):
        load()._load_adapter("more", one)
