"""Images of rollout servers: each is sent once, what is sampled does not change, and none is kept for long."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.adapter import lora
from runner.adapter.config import NoAdapterConfig
from runner.core.auto_choices import Decisions
from runner.core.errors import RunnerError
from runner.core.media import MEDIA_ID
from runner.data.demo_shapes import draw
from runner.inference.http import http_url, listen, serve_in_thread
from runner.inference.rollout_server import LIMITS, RolloutServer
from runner.interfaces import Request
from runner.model import tiny
from runner.model.config import TinyVlConfig
from runner.sampler.server.pool import SamplerPool
from runner.sampler.server.protocol import Endpoint, endpoint_path
from runner.sampler.torch import TorchSampler
from runner.weight_sync.store_dir import reserve_dir
from runner.weight_sync.weight_store import WeightStore
from tests.model.zoo import CPU
from tests.sampler.server.processes import CONFIG, TOKEN


def made(max_pixels: int | None = None) -> tuple[TorchSampler, Any, Any]:
    """A sampler over a tiny image-text model, its reader of images, and the model."""
    config = TinyVlConfig(hidden_size=32, intermediate_size=48, layers=2, kv_heads=2, dtype="float32")
    own: Any = tiny.tokenizer(config)
    own.image_reader = tiny.image_reader(config, own, max_pixels=max_pixels)
    model = tiny.build(config, tokenizer=own, device=CPU, seed=0, decide=Decisions())
    lora.train_all(NoAdapterConfig(), model, decide=Decisions())
    return TorchSampler(CONFIG, model=model, decide=Decisions()), own.image_reader, model


@contextmanager
def serving(folder: Path, sampler: Any, reader: Any) -> Iterator[list[str]]:
    """A rollout server in a thread of this process; yields the paths of what it was sent."""
    server, asked = RolloutServer(sampler, TOKEN, images=reader), list[str]()
    answer = server._answer

    def note(verb: str, *more: Any) -> bytes:
        asked.append(verb)
        return answer(verb, *more)

    server._answer = note  # type: ignore[method-assign]
    listener = listen("127.0.0.1", 0)
    url = http_url("127.0.0.1", listener.getsockname()[1])
    Endpoint(url, os.getpid(), server.session).write(endpoint_path(folder, 0))

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            server.run()

    def end() -> bytes:
        raise KeyboardInterrupt

    thread = threading.Thread(target=run)
    with serve_in_thread(server.app, listener, LIMITS):
        thread.start()
        try:
            yield asked
        finally:
            server._queue.put((Future(), end))
            thread.join()


@contextmanager
def pool(folder: Path, reader: Any, model: Any) -> Iterator[SamplerPool]:
    """The client of the server, which has loaded the weights of the model."""
    store = WeightStore(reserve_dir(folder / "run", 1 << 20, folder))
    store.put(0, {name: value.detach() for name, value in model.trainable().items()}.items())
    client = SamplerPool(CONFIG, 1, folder, token=TOKEN, vocab_size=model.limits().vocab_size, images=reader)
    client.load_weights(store.get(0), 0)
    try:
        yield client
    finally:
        client.close()
        store.close()


def requests(reader: Any, *numbers: int) -> list[Request]:
    """Two answers to each of some drawings, and to text alone."""
    entries = [reader.add(draw(number), several=False)[0] for number in numbers]
    prompts = [(3, *[entry.id] * entry.count, 4, 5) for entry in entries] + [(3, 4, 5)]
    return [Request(prompt, 7 * at + k, 6, at) for at, prompt in enumerate(prompts) for k in range(2)]


def test_each_image_is_sent_once_and_the_samples_are_those_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, own, model = made()
    served, reader, _ = made()
    asked = requests(own, 1, 2)
    with serving(tmp_path, served, reader) as posts, pool(tmp_path, own, model) as client:
        wanted = sampler.sample(asked)
        assert wanted[0].ids != wanted[2].ids and client.sample(asked) == wanted
        assert posts == ["/weights/load", "/rollouts/sample", *["/rollouts/image"] * 2, "/rollouts/sample"]
        again = requests(own, 2, 3)
        assert client.sample(again) == sampler.sample(again)
        assert posts[5:] == ["/rollouts/sample", "/rollouts/image", "/rollouts/sample"]
        monkeypatch.setattr("runner.model.image_reader.MAX_IMAGES_BYTES", 0)
        assert client.sample(again[:2]) == sampler.sample(again[:2]) and posts[8:] == ["/rollouts/sample"]
        assert asked[0].prompt[1] >= MEDIA_ID and asked[0].prompt[1] not in reader, "it was of an earlier step"
        assert client.sample(asked) == wanted and posts[9:].count("/rollouts/image") == 1


def test_an_image_that_is_processed_otherwise_there_ends_the_job(tmp_path: Path) -> None:
    _, own, model = made()
    served, reader, _ = made(max_pixels=256)
    with (
        serving(tmp_path, served, reader),
        pool(tmp_path, own, model) as client,
        pytest.raises(RunnerError, match="an image has another id than the trainer's") as error,
    ):
        client.sample(requests(own, 1))
    assert error.value.exit_code == 3
