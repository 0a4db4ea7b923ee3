"""The sampler of a running server against stand-ins of several versions: what is drawn, how it is weighed, what is not.

Log-probabilities come as JSON, bit for bit, and are held to 1e-5 of a pass of our own in float32.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, EnvironmentProblem, SamplerError, StorageError
from runner.interfaces import Request, Rollout
from runner.model.tiny import byte_tokenizer
from runner.sampler.config import ServerSamplerConfig
from runner.sampler.server import openai_client as client_module
from runner.sampler.server.build import build
from runner.sampler.server.openai_sampler import OpenAiSampler
from runner.weight_sync.store_dir import reserve_dir
from runner.weight_sync.sync_probe import SyncProbe
from runner.weight_sync.weight_store import WeightStore
from tests.model.zoo import causal, module, rows
from tests.sampler.server.standin import OTHER, V10, V11, V14, V23, V32, Fault, StandIn, Version, served

PROMPTS = [tuple(row) for row in rows((3, 9, 17))]
RULE: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
ATOL = 5e-5  # one adapter merged into the weights, one beside them; processors round differently


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_WAIT_S", 0.01)


def asked(each: int = 2, length: int = 8, raw: bool = False) -> list[Request]:
    return [Request(p, 100 * g + k, length + k, g, raw) for g, p in enumerate(PROMPTS) for k in range(each)]


def stand_in(**options: Any) -> StandIn:
    return StandIn(module("qwen3"), tokenizer=byte_tokenizer(512), **options)


def whole(policy: Any) -> Any:
    """The policy as a plain model, its adapter merged."""
    made = module("qwen3")
    made.load_state_dict(dict(policy.hf_tensors("all")))
    return made


def made(url: str, own: Path, policy: Any = None, recomputed: bool = False, **options: Any) -> OpenAiSampler:
    defaults = {"max_num_seqs": 4, "max_new_tokens": 16, "retries": 3, "timeout_s": 200.0}
    config = ServerSamplerConfig(url=url, **defaults | options)
    own.mkdir(parents=True, exist_ok=True)
    return build(config, model=policy or causal("qwen3"), decide=Decisions(), folder=own, recomputed=recomputed)


@contextmanager
def sampling(server: StandIn, own: Path, policy: Any = None, **options: Any) -> Iterator[OpenAiSampler]:
    before = set(threading.enumerate())
    with served(server) as url:
        sampler = made(url, own, policy, **options)
        try:
            yield sampler
        finally:
            sampler.close()
    assert not [*own.parent.rglob("run-*-v[0-9]*-[0-9]*")]
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("sampler")]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[WeightStore]:
    made = WeightStore(reserve_dir(tmp_path / "run", 0, tmp_path))
    yield made
    made.close()


@torch.no_grad()
def plain(model: Any, request: Request, rollout: Rollout, temperature: float, top_p: float = 1.0) -> np.ndarray:
    """The log-probabilities of an answer, by one pass over the whole row and a sort of our own."""
    ids = torch.tensor([(*request.prompt, *rollout.ids)])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1].double() / temperature
    p, order = logits.softmax(-1).sort(-1, descending=True)
    p = torch.where(p.cumsum(-1) - p >= top_p, 0, p)
    p = torch.zeros_like(p).scatter(-1, order, p / p.sum(-1, keepdim=True))
    return p.gather(1, torch.tensor(rollout.ids)[:, None])[:, 0].log().numpy()


def check(model: Any, requests: Sequence[Request], got: Sequence[Rollout], **rule: float) -> None:
    assert len(got) == len(requests)
    for request, rollout in zip(requests, got, strict=True):
        np.testing.assert_allclose(rollout.logprobs, plain(model, request, rollout, **rule), atol=ATOL)
        assert 1 <= len(rollout.ids) <= request.max_new_tokens
        assert (rollout.finish == "length") == (len(rollout.ids) == request.max_new_tokens and rollout.ids[-1] != 258)


@pytest.mark.parametrize("version", [pytest.param(V10, marks=pytest.mark.slow), V32], ids=str)
def test_draws_with_a_seed_per_answer_and_reports_what_was_drawn_from(version: Version, tmp_path: Path) -> None:
    server = stand_in(version=version)
    with sampling(server, tmp_path, recomputed=True, **RULE) as sampler:
        got = sampler.sample(asked(raw=True))
        check(server.base, asked(), got, **RULE)
        assert sampler.sample(asked()[::-1])[0].ids == got[-1].ids
        assert server.most <= 4 < len(got) and len({*map(tuple, (one.ids for one in got))}) == len(got)
        assert {one["seed"] for one in server.bodies} == {one.seed for one in asked()}
        assert all(one.raw_logprobs is None for one in got)  # neither answers nor scores are at this temperature
        assert sampler.pop_metrics()["tokens_per_s"] > 0 and sampler.max_model_len == 128
    assert all(one["ignore_eos"] and one["stop_token_ids"] == [258] for one in server.bodies)


@pytest.mark.slow
def test_scores_are_those_of_a_plain_pass(tmp_path: Path) -> None:
    server = stand_in()
    with sampling(server, tmp_path) as sampler:
        [found] = sampler.score(PROMPTS)
    for row, scores in zip(PROMPTS, found, strict=True):
        request, rest = Request(row[:1], 0, 1, 0), Rollout(row[1:], (), None, 0, "stop")
        np.testing.assert_allclose(scores, plain(server.base, request, rest, 1.0), atol=ATOL)


@pytest.mark.slow
def test_an_answer_ends_where_we_end_it(tmp_path: Path) -> None:
    server = stand_in()
    with sampling(server, tmp_path) as sampler:
        whole = sampler.sample(asked(1, 12))[0]
    text = sampler._stops._tokenizer.decode(list(whole.ids[2:4]))
    for options, size in (({"stop_token_ids": (whole.ids[4],)}, 5), ({"stop": (text,)}, 4)):
        with sampling(server, tmp_path / "other", **options) as sampler:
            found = sampler.sample(asked(1, 12))[0]
        assert found.finish == "stop" and len(found.ids) <= size and found.ids == whole.ids[: len(found.ids)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "rule", "fits"),
    [
        ("processed", {"temperature": 0.7}, True),
        ("processed", {"top_k": 5}, True),
        ("processed", {"temperature": 0.7, "top_k": 5}, False),
        ("raw", {"top_p": 0.6}, True),
        ("raw", {"temperature": 0.7}, False),
        ("tempered", {"temperature": 0.7, "top_k": 5}, True),
    ],
)
def test_learns_what_log_probabilities_mean(mode: str, rule: dict[str, Any], fits: bool, tmp_path: Path) -> None:
    server = stand_in(mode=mode)
    with sampling(server, tmp_path, recomputed=True, **rule) as sampler:
        assert len(sampler.sample(asked(1))) == len(PROMPTS)
    with served(server) as url:
        if fits:
            sampler = made(url, tmp_path, **rule)
            for request, rollout in zip(asked(raw=True), sampler.sample(asked(raw=True)), strict=True):
                wanted = plain(server.base, request, rollout, rule.get("temperature", 1.0))
                np.testing.assert_allclose(rollout.raw_logprobs, wanted, atol=ATOL)
            sampler.close()
            return
        with pytest.raises(EnvironmentProblem, match="--logprobs-mode processed_logprobs"):
            made(url, tmp_path, **rule)


REFUSED = {
    "no token ids": ({"version": OTHER}, {}, "no token ids"),
    "a wrong key": ({"key": "secret"}, {}, "sampler.api_key_env"),
    "another model": ({}, {"model": "qwen"}, "has the models policy; type sampler.model"),
    "no adapters": ({"adapters_on": False}, {"weight_sync": "adapter"}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    "no development": ({"development_on": False}, {"weight_sync": "reload"}, "VLLM_SERVER_DEV_MODE=1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_a_server_that_cannot_do_it(case: str, tmp_path: Path) -> None:
    server, options, words = REFUSED[case]
    with served(stand_in(**server)) as url, pytest.raises(EnvironmentProblem, match=words):
        made(url, tmp_path, **options)


@pytest.mark.slow
def test_a_key_comes_from_the_environment_and_a_closing_v1_is_read_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret")
    with served(stand_in(key="secret")) as url:
        sampler = made(f"{url}/v1/", tmp_path, api_key_env="SERVER_KEY")
        assert len(sampler.sample(asked(1))) == len(PROMPTS)
        sampler.close()
        monkeypatch.delenv("SERVER_KEY")
        with pytest.raises(EnvironmentProblem, match="SERVER_KEY is not set"):
            made(url, tmp_path / "b", api_key_env="SERVER_KEY")


def moved(model: Any, by: float) -> None:
    with torch.no_grad():
        for at, parameter in enumerate(model.trainable().values()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(at))
            parameter.add_(noise, alpha=by)


def probe(model: Any) -> SyncProbe:
    return SyncProbe([list(row) for row in rows((9, 12))], 1e-4)


def expected(model: Any, probed: SyncProbe, version: int) -> None:
    scores = []
    for row in probed.rows:
        rest = Rollout(tuple(row[1:]), (), None, 0, "stop")
        scores.append(plain(whole(model), Request(tuple(row[:1]), 0, 1, 0), rest, 1.0).tolist())
    probed.expect(version, scores)


@pytest.mark.parametrize(
    "version", [V11, *(pytest.param(one, marks=pytest.mark.slow) for one in (V14, V23)), V32], ids=str
)
def test_reloads_all_weights_by_what_the_version_knows(version: Version, tmp_path: Path, shelf: WeightStore) -> None:
    policy, server = causal("qwen3"), stand_in(version=version)
    with sampling(server, tmp_path / "own", policy, weight_sync="reload") as sampler:
        shelf.keep(policy.hf_tensors("fixed"))
        probed = probe(policy)
        for step in (1, 2):
            moved(policy, 0.05)
            expected(policy, probed, step)
            probed.load(sampler, shelf.put(step, policy.hf_tensors("changed")), step)
            got = sampler.sample(asked())
            check(whole(policy), asked(), got, temperature=1.0)
            assert {one.version for one in got} == {step}
        assert len([*shelf.folder.glob("run-*/*")]) == 1
    assert server.calls.count("/reset_prefix_cache") == 2
    assert server.calls.count("/collective_rpc") == (1 + 2 if version.at_once else 1 + 3 + 2)


@pytest.mark.parametrize("version", [pytest.param(V11, marks=pytest.mark.slow), V32], ids=str)
def test_loads_an_adapter_under_a_new_name_and_unloads_the_old_one(
    version: Version, tmp_path: Path, shelf: WeightStore
) -> None:
    policy = attach(LoraConfig(rank=4, alpha=16.0), causal("qwen3"), decide=Decisions())
    server = stand_in(version=version)
    with sampling(server, tmp_path / "own", policy, weight_sync="adapter") as sampler:
        probed = probe(policy)
        for step in (1, 2):
            moved(policy, 0.2)
            expected(policy, probed, step)
            probed.load(sampler, shelf.put(step, policy.hf_tensors("adapter")), step)
            check(whole(policy), asked(), sampler.sample(asked()), temperature=1.0)
            assert list(server.adapters) == [server.bodies[-1]["model"]] and f"-v{step}-" in next(iter(server.adapters))
    assert not server.adapters


@pytest.mark.slow
def test_on_a_shared_disk_what_does_not_change_is_copied_once(tmp_path: Path, shelf: WeightStore) -> None:
    policy = attach(LoraConfig(rank=4, alpha=16.0), causal("qwen3"), decide=Decisions())
    server, disk = stand_in(), Path(tempfile.mkdtemp(dir="/dev/shm"))
    with sampling(server, tmp_path / "own", policy, weight_sync="reload", folder=str(disk)) as sampler:
        shelf.keep(policy.hf_tensors("fixed"))
        places = []
        for step in (1, 2):
            moved(policy, 0.2)
            sampler.load_weights(shelf.put(step, policy.hf_tensors("changed")), step)
            check(whole(policy), asked(), sampler.sample(asked()), temperature=1.0)
            places += [next(disk.rglob("fixed-0000.safetensors")).stat().st_ino]
        assert places[0] == places[1] != (shelf.folder / "fixed-0000.safetensors").stat().st_ino
        assert [path.name for path in disk.rglob("v*-0000.safetensors")] == ["v2-0000.safetensors"]
    disk.rmdir()


@pytest.mark.slow
def test_weights_that_were_not_taken_are_noticed(tmp_path: Path, shelf: WeightStore) -> None:
    policy, server = causal("qwen3"), stand_in(keeps_old_weights=True)
    with sampling(server, tmp_path / "own", policy, weight_sync="reload") as sampler:
        probed = probe(policy)
        moved(policy, 0.05)
        expected(policy, probed, 1)
        with pytest.raises(SamplerError, match="differs from the trainer"):
            probed.load(sampler, shelf.put(1, policy.hf_tensors("all")), 1)


@pytest.mark.parametrize("sync", ["reload", "adapter"])
def test_a_server_that_was_started_anew_is_loaded_again_and_its_answers_are_not_used(
    sync: str, tmp_path: Path, shelf: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    policy: Any = causal("qwen3")
    if sync == "adapter":
        policy = attach(LoraConfig(rank=4, alpha=16.0), policy, decide=Decisions())
    server = stand_in()
    with sampling(server, tmp_path / "own", policy, weight_sync=sync) as sampler:
        moved(policy, 0.2)
        sampler.load_weights(shelf.put(1, policy.hf_tensors("all" if sync == "reload" else "adapter")), 1)
        server.faults = [Fault("none-yet", 0), Fault("restart")]
        with caplog.at_level(logging.WARNING, "runner"):
            got = sampler.sample(asked())
        check(whole(policy), asked(), got, temperature=1.0)
        assert "lost weight version 1" in caplog.text and sampler.pop_metrics()["resyncs"] == 1


@pytest.mark.slow
def test_a_server_that_was_started_anew_and_takes_nothing_is_given_up(tmp_path: Path, shelf: WeightStore) -> None:
    policy, server = causal("qwen3"), stand_in()
    with sampling(server, tmp_path / "own", policy, weight_sync="reload") as sampler:
        moved(policy, 0.2)
        sampler.load_weights(shelf.put(1, policy.hf_tensors("all")), 1)
        server.faults, server.keeps_old_weights = [Fault("restart")], True
        with pytest.raises(SamplerError, match="its log-probabilities differ from before"):
            sampler.sample(asked())


@pytest.mark.slow
def test_a_server_that_gets_nothing_must_stay_as_it_is(tmp_path: Path) -> None:
    server = stand_in()
    with sampling(server, tmp_path) as sampler:
        sampler.load_weights(None, 7)
        assert {one.version for one in sampler.sample(asked(1))} == {0}
        with torch.no_grad():
            server.model.lm_head.weight.mul_(1.5)
        with pytest.raises(SamplerError, match="has other weights than at the start of the run"):
            sampler.sample(asked(1))


@pytest.mark.slow
def test_what_passes_is_waited_for(tmp_path: Path) -> None:
    server = stand_in()
    with sampling(server, tmp_path) as sampler:
        right = sampler.sample(asked())
        for kind in ("503", "reset", "cut"):
            server.faults = [Fault(kind, 3)]
            assert sampler.sample(asked()) == right
            assert sampler.pop_metrics()["retries"] == 3


WRONG = {
    "empty": "has 0 tokens",
    "long": "has 9 tokens, not 1 to 8",
    "foreign": "has the id 1000000",
    "infinite": "has no log-probability of token",
    "missing": "ids or log-probabilities are not numbers",
    "short": "ends after 1 of 8 tokens",
    "prompt": "prompt tokens, not the",
    "none": "does not have exactly one choice",
    "garbled": "is not JSON",
}


def test_an_answer_that_cannot_be_right_is_asked_for_once_more(tmp_path: Path) -> None:
    server, request = stand_in(), [Request(PROMPTS[0], 1, 8, 0)]
    with sampling(server, tmp_path) as sampler:
        right = sampler.sample(request)
        for kind, words in WRONG.items():
            server.faults = [Fault(kind, 1)]
            assert sampler.sample(request) == right
            assert sampler.pop_metrics()["rejected"] == 1
            server.faults = [Fault(kind, 2)]
            with pytest.raises(SamplerError, match=words):
                sampler.sample(request)
            sampler.pop_metrics()


@pytest.mark.slow
def test_what_the_server_refuses_is_said_at_once_and_a_slow_one_ends_at_the_deadline(tmp_path: Path) -> None:
    server = stand_in()
    with sampling(server, tmp_path, timeout_s=1.5) as sampler:
        server.faults = [Fault("400")]
        with pytest.raises(SamplerError, match="refuses to sample: status 400: top_k must be an integer"):
            sampler.sample(asked())
        server.faults = [Fault("slow", 99)]
        begun = time.monotonic()
        with pytest.raises(SamplerError, match=r"does not respond.*sampler\.timeout_s"):
            sampler.sample(asked(1))
        assert time.monotonic() - begun < 15


@pytest.mark.slow
def test_closing_ends_what_is_under_way(tmp_path: Path) -> None:
    server = stand_in()
    with sampling(server, tmp_path) as sampler:
        server.faults = [Fault("slow", 99)]
        closing = threading.Timer(0.3, sampler.close)
        closing.start()
        begun = time.monotonic()
        with pytest.raises(SamplerError, match="closed"):
            sampler.sample(asked())
        assert time.monotonic() - begun < 15
        closing.join()


@pytest.mark.slow
def test_nobody_there_is_said_before_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(stand_in()) as url:
        pass
    with pytest.raises(SamplerError, match=r"does not respond after 4 requests: .*refused"):
        made(url, tmp_path)
    assert [one.message.split(" (")[0] for one in caplog.records] == [f"{url} does not respond"]  # once, not four times


def test_a_new_job_finds_out_at_once_that_nobody_is_there() -> None:
    with served(stand_in()) as url:
        config = ServerSamplerConfig(name="server", url=url)
        config.preflight_here()
    with pytest.raises(EnvironmentProblem, match=f"sampler.url: no server listens at {url} .*refused"):
        config.preflight_here()


def test_a_page_that_a_web_server_gives_is_said_in_words() -> None:
    page = b"<html><head><style>p { margin: 0 }</style></head>\n <body><h1>Error</h1>\n<p>Not <b>found</b>.</p></body>"
    assert client_module._error_message(page) == "Error Not found ."
    assert (
        client_module._error_message(b'{"error": {"message": "' + b"x" * 400 + b'"}}')
        == "x" * client_module.MESSAGE_CHARS + " …"
    )


@pytest.mark.slow
def test_sleeps_while_it_is_not_asked(tmp_path: Path) -> None:
    server = stand_in()
    with sampling(server, tmp_path, sleep=True) as sampler:
        right = sampler.sample(asked(1))
        sampler.release_memory()
        assert server.asleep
        sampler.release_memory()
        assert sampler.sample(asked(1)) == right and not server.asleep
        sampler.release_memory()
    assert not server.asleep
    assert [path for path in server.calls if "/sleep" in path] == ["/sleep?level=1"] * 2


@pytest.mark.slow
def test_a_prompt_without_room_and_a_folder_without_rights_say_so(tmp_path: Path, shelf: WeightStore) -> None:
    policy = causal("qwen3")
    taken = tmp_path / "taken"
    taken.write_text("a file")
    with sampling(
        stand_in(max_model_len=20), tmp_path / "own", policy, weight_sync="reload", folder=str(taken)
    ) as sampler:
        with pytest.raises(DataError, match="exceed 20: the server's --max-model-len"):
            sampler.sample(asked())
        with pytest.raises(StorageError, match=r"set sampler\.folder"):
            sampler.load_weights(shelf.put(1, policy.hf_tensors("all")), 1)
