"""The engine's process: reads requests as JSON lines, steps the engine, and sends every new token.

    {"submit": [request, …]} {"cancel": [id, …]} {"call": …} ─▶ engine ─▶ {"ready": …} {"events": […]} {"returned": …}

python -m runner.inference.engine_process SETTINGS FOLDER

SETTINGS: JSON of `EngineSettings`; FOLDER: where the tokenizer is written, for the front end to read and remove.

The front end holds the other ends of stdin and stdout. This process ends when they are closed.
"""

from __future__ import annotations

import base64
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, OutOfMemory, RunnerError
from runner.core.subprocess import JsonLines
from runner.inference.adapter_chat import check_chat, check_shared_chat
from runner.inference.engine import GenerationRequest, SamplingParams, TokenEvent
from runner.inference.model_source import ModelSource, fetch_source, load_source, parse_source
from runner.interfaces.media import images_of
from runner.spec.base import Config

if TYPE_CHECKING:
    from runner.interfaces import GenerativeModel

IDLE_WAIT_S = 3600.0
Json = dict[str, Any]


class EngineSettings(Config):
    """What the process loads and how it runs it.

    source, checkpoint, base, adapters: see `parse_source`; device: its name, None = the source's own
    """

    source: str
    checkpoint: int | Literal["best", "last"] = "last"
    base: str | None = None
    adapters: tuple[str, ...] = ()
    device: str | None = Field(None, min_length=1)
    trust_remote_code: bool = False
    max_num_seqs: int = Field(32, ge=1, le=4096)

    def parse(self) -> ModelSource:
        """The model that is meant. Raises EnvironmentProblem where there is none."""
        return parse_source(self.source, checkpoint=self.checkpoint, base=self.base, adapters=self.adapters)


class EngineInfo(Config):
    """What the front end has to know of a loaded model.

    adapters: names that a request may choose; length_limit: most tokens of prompt and answer; step: of a run's
    checkpoint; chat_date: see `ChatConfig`; image_token: placeholder and token id of an image, None = it reads none;
    run_stop, run_stop_token_ids: strings and ids at which a run's completions ended
    """

    name: str
    adapters: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    length_limit: int | None
    step: int | None
    chat_date: str | None
    image_token: tuple[str, int] | None = None
    run_stop: tuple[str, ...] = ()
    run_stop_token_ids: tuple[int, ...] = ()


class EngineHost:
    """An engine in this process, and what replaces the weights and adapters of its model."""

    def __init__(self, model: GenerativeModel, settings: EngineSettings, adapters: Mapping[str, str]) -> None:
        """adapters: as `TorchEngine` takes them. Raises SpecError for a model that cannot generate."""
        self._settings, self._num_loads = settings, 0
        self._start(model, adapters)

    def run(self, lines: JsonLines) -> None:
        """Answer requests until the front end disconnects."""
        while (messages := lines.receive(IDLE_WAIT_S if self.engine.is_idle else 0.0)) is not None:
            for message in messages:
                for reply in self._handle_message(message):
                    lines.send(reply)
            if events := self.engine.step():
                lines.send({"events": [encode_event(event) for event in events]})
            for id in self.engine.pop_failed():
                lines.send({"failed": id, "message": "the adapter's logits are not finite; its weights are damaged"})
        self.engine.close()

    def _start(self, model: GenerativeModel, adapters: Mapping[str, str], version: int = 0) -> None:
        from runner.inference.torch_engine import TorchEngine

        self._model, self._adapters = model, dict(adapters)
        self.engine = TorchEngine(
            model, decide=Decisions(), max_num_seqs=self._settings.max_num_seqs, adapters=self._adapters or None
        )
        self.engine.weight_version = version

    def _begin_load(self) -> int:
        """Leave the model as it is between requests; returns the next version.

        Raises DataError where requests run.
        """
        if not self.engine.is_idle:
            raise DataError("requests are running; weights can be loaded only between requests")
        self.engine.close()  # a merged adapter is taken out
        return self.engine.weight_version + 1

    def _handle_message(self, message: Json) -> Iterator[Json]:
        """The replies to a message; what cannot be done fails alone."""
        for one in message.get("submit", ()):
            try:
                self.engine.submit(decode_request(one))
            except DataError as error:
                yield {"failed": one["id"], "message": str(error)}
        for id in message.get("cancel", ()):
            self.engine.cancel(id)
        if call := message.get("call"):
            verbs: dict[str, Callable[..., Any]] = {
                "score": self._score,
                "add_image": self._add_image,
                "load_weights": self._load_weights,
                "load_adapter": self._load_adapter,
                "unload_adapter": self._unload_adapter,
            }
            try:
                yield {"returned": call["id"], "value": verbs[call["verb"]](*call["arguments"])}
            except (RunnerError, ValueError) as error:
                yield {"failed": call["id"], "message": str(error)}

    def _score(self, ids: Sequence[int], logprobs: int, adapter: str | None) -> list[tuple[float, Any]]:
        return [(score.logprob, score.top_logprobs) for score in self.engine.score(ids, logprobs, adapter)]

    def _add_image(self, content: str, several: bool) -> tuple[int, str, int]:
        """An image's id, its text in a rendered conversation, and its number of tokens.

        content: of its file, in base64. Raises DataError for one that cannot be read
        """
        reader = images_of(self._model.tokenizer)
        assert reader is not None  # or the front end would have refused it
        reader.forget(self.engine.image_ids())
        entry, made = reader.add(base64.b64decode(content), several=several)
        return entry.id, made.text, made.count

    def _load_weights(self, folder: str) -> None:
        """Copy the weights of a model's folder; they count as the next version.

        Raises RunnerError, and ValueError where they are another model's.
        """
        import torch

        found = load_source(parse_source(folder), device=self._settings.device).model.module.state_dict()
        own = self._model.module.state_dict()
        differing = sorted(own.keys() ^ found.keys()) or [n for n, t in own.items() if t.shape != found[n].shape]
        if differing:
            text = f"the weights in {folder} are not the served model's: {len(differing)} differ, such as"
            raise ValueError(f"{text} {differing[0]}; to serve an adapter, merge it first (run export --merge)")
        self.engine.weight_version = self._begin_load()
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(found[name])

    def _load_adapter(self, name: str, folder: str) -> None:
        """Read one more adapter, which requests may choose by its name. Raises RunnerError."""
        from runner.model.peft_adapter import attach_adapter

        if name in self._adapters:
            raise DataError(f"an adapter is named '{name}' already")
        if not self._adapters and hasattr(self._model.module, "get_base_model"):
            raise DataError("the served model is an adapter itself; serve its base: run serve BASE")
        base = fetch_source(self._settings.parse()).path if self._settings.adapters else None
        check_chat(self._model.tokenizer, folder, base, self._settings.trust_remote_code, "the served model")
        version = self._begin_load()
        self._num_loads += 1
        peft_name = f"loaded{self._num_loads}"
        try:
            module = attach_adapter(self._model.module, Path(folder), name=peft_name)
        except RunnerError:
            self._remove_layers(peft_name)
            raise
        model = self._model if self._adapters else self._model.with_peft_module(module, decide=Decisions())
        model.eval()
        self._start(model, {**self._adapters, name: peft_name}, version)

    def _unload_adapter(self, name: str) -> None:
        """Remove an adapter. Raises DataError where there is none of this name."""
        if name not in self._adapters:
            raise DataError(f"no adapter is named '{name}'")
        version = self._begin_load()
        self._remove_layers(self._adapters.pop(name))
        if not self._adapters:
            inner = self._model.module.get_base_model()  # type: ignore[operator]
            self._model = self._model.with_peft_module(inner, decide=Decisions())
        self._start(self._model, self._adapters, version)

    def _remove_layers(self, peft_name: str) -> None:
        """Remove what an adapter has put into the model, also where it was not attached to its end."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        module: Any = self._model.module
        if self._adapters:
            self._model.remove_adapter(peft_name)
            return
        inner = module.get_base_model() if hasattr(module, "get_base_model") else module
        for place, layer in list(inner.named_modules()):
            if isinstance(layer, BaseTunerLayer):
                inner.set_submodule(place, layer.get_base_layer())
        inner.__dict__.pop("peft_config", None)


def decode_request(content: Json) -> GenerationRequest:
    """The request that the client sent."""
    return GenerationRequest(content["id"], tuple(content["prompt_ids"]), SamplingParams(**content["params"]))


def encode_event(event: TokenEvent) -> list[Any]:
    """An event as a JSON array."""
    return [getattr(event, name) for name in TokenEvent.__slots__]


def decode_event(content: list[Any]) -> TokenEvent:
    """The same event again."""
    id, token, logprob, raw, tops, version, finish = content
    return TokenEvent(id, token, logprob, raw, tuple((i, v) for i, v in tops), version, finish)


def load_engine(settings: EngineSettings, folder: Path) -> tuple[EngineHost, EngineInfo]:
    """Load the model, and write its tokenizer into the folder. Raises what `load_source` raises."""
    source = settings.parse()
    loaded = load_source(source, device=settings.device, trust_remote_code=settings.trust_remote_code)
    # a single adapter that the source itself is can be merged; of others each request chooses one
    adapters = {} if list(loaded.adapters) == [loaded.name] else dict(loaded.adapters)
    if adapters:
        base_name = None if loaded.name in adapters else loaded.name
        check_shared_chat(source, settings.trust_remote_code, base_name)
    host = EngineHost(loaded.model, settings, adapters)
    loaded.tokenizer.save_pretrained(folder)
    limits, reader = host.engine.limits, images_of(loaded.tokenizer)
    info = EngineInfo(
        name=loaded.name,
        adapters=tuple(adapters),
        stop_token_ids=tuple(sorted(limits.stop_token_ids)),
        vocab_size=limits.vocab_size,
        length_limit=None if limits.length_limit is None else limits.length_limit[0],
        step=loaded.step,
        chat_date=loaded.chat.date,
        image_token=(reader.placeholder, reader.token_id) if reader and reader.how else None,
        run_stop=loaded.stop,
        run_stop_token_ids=loaded.stop_token_ids,
    )
    if stops := loaded.stop_text():
        logging.getLogger("runner").info("%s, unless a request has stops of its own", stops)
    return host, info


def _run_and_report(lines: JsonLines, work: Callable[[], None]) -> int:
    """The exit code of `work`; the front end is sent the reason of a failure."""
    try:
        work()
    except RunnerError as error:
        lines.send({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        code = OutOfMemory.exit_code if type(error).__name__ == "OutOfMemoryError" else 1
        lines.send({"error": f"{type(error).__name__}: {error}", "exit_code": code})
        return code
    return 0


def main(settings: str, folder: str) -> int:
    """Load the model and answer requests until the front end goes. Returns the exit code."""
    lines = JsonLines.to_parent()
    log = logging.getLogger("runner")  # says what was decided, on the screen of the front end
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)

    def work() -> None:
        parsed = EngineSettings.model_validate_json(settings)
        host, info = load_engine(parsed, Path(folder))
        lines.send({"ready": info.model_dump()})
        host.run(lines)

    return _run_and_report(lines, work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
