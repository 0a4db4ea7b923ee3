"""The engine's process: reads requests as JSON lines, steps the engine, and sends every new token.

    {"submit": [request, …]} {"cancel": [id, …]} {"score": …} ─▶ engine ─▶ {"ready": …} {"events": […]} {"failed": …}

python -m runner.inference.engine_process SETTINGS        SETTINGS: JSON of `EngineSettings`

The front end holds the other ends of stdin and stdout. This process ends when they are closed.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, OutOfMemory, RunnerError
from runner.core.subprocess import JsonLines
from runner.inference.engine import Engine, GenerationRequest, SamplingParams, TokenEvent
from runner.inference.model_source import ModelSource, load_source, parse_source

if TYPE_CHECKING:
    from runner.interfaces import TrainableModel

IDLE_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the process loads and how it runs it.

    source, checkpoint, base, adapters: see `parse_source`; device: its name, None = the source's own
    """

    source: str
    checkpoint: int | Literal["best", "last"] = "last"
    base: str | None = None
    adapters: tuple[str, ...] = ()
    device: str | None = None
    trust_remote_code: bool = False
    max_num_seqs: int = 32

    def parse(self) -> ModelSource:
        """The model that is meant. Raises EnvironmentProblem where there is none."""
        return parse_source(self.source, checkpoint=self.checkpoint, base=self.base, adapters=self.adapters)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the front end has to know of a loaded model.

    adapters: names that a request may choose; tokenizer: folder of the tokenizer and its chat template; length_limit:
    most tokens of prompt and answer; step: of a run's checkpoint
    """

    name: str
    adapters: tuple[str, ...]
    tokenizer: str
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    length_limit: int | None
    step: int | None


def run_engine(engine: Engine, lines: JsonLines, load_folder: Callable[[Path], None]) -> None:
    """Answer requests until the front end disconnects. load_folder: reads other weights into the model."""
    while (messages := lines.receive(IDLE_WAIT_S if engine.is_idle else 0.0)) is not None:
        for message in messages:
            for reply in _handle_message(engine, message, load_folder):
                lines.send(reply)
        if events := engine.step():
            lines.send({"events": [encode_event(event) for event in events]})


def _handle_message(
    engine: Engine, message: dict[str, Any], load_folder: Callable[[Path], None]
) -> list[dict[str, Any]]:
    """The replies to a message; a request that cannot be answered fails alone."""
    replies: list[dict[str, Any]] = []
    for one in message.get("submit", ()):
        try:
            engine.submit(decode_request(one))
        except DataError as error:
            replies.append({"failed": one["id"], "message": str(error)})
    for id in message.get("cancel", ()):
        engine.cancel(id)
    if score := message.get("score"):
        try:
            scores = engine.score(score["ids"], score["logprobs"], score["adapter"])
            replies.append({"scored": score["id"], "scores": [[s.logprob, s.top_logprobs] for s in scores]})
        except DataError as error:
            replies.append({"failed": score["id"], "message": str(error)})
    if load := message.get("load"):
        try:
            load_folder(Path(load["folder"]))
            replies.append({"scored": load["id"], "scores": []})
        except (RunnerError, ValueError) as error:
            replies.append({"failed": load["id"], "message": str(error)})
    return replies


def _load_folder(engine: Engine, model: TrainableModel, settings: EngineSettings, folder: Path) -> None:
    """Copy the weights of a model's folder; they count as the next version.

    Raises RunnerError, and ValueError where they are another model's, or requests run.
    """
    import torch

    found = load_source(parse_source(str(folder)), device=settings.device).model.module.state_dict()
    own = model.module.state_dict()
    if differing := sorted(own.keys() ^ found.keys()) or [n for n, t in own.items() if t.shape != found[n].shape]:
        text = f"the weights in {folder} are not the served model's: {len(differing)} differ, such as {differing[0]}"
        raise ValueError(f"{text}; a model with adapters is served merged (run export --merge)")
    engine.load_weights(None, engine.weight_version + 1)  # a merged adapter is taken out before
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(found[name])


def encode_request(request: GenerationRequest) -> dict[str, Any]:
    """A request as a JSON object."""
    return {"id": request.id, "prompt_ids": request.prompt_ids, "params": asdict(request.params)}


def decode_request(content: dict[str, Any]) -> GenerationRequest:
    """The same request again."""
    params = content["params"]
    lists = {name: tuple(params[name]) for name in ("stop", "stop_token_ids")}
    return GenerationRequest(content["id"], tuple(content["prompt_ids"]), SamplingParams(**{**params, **lists}))


def encode_event(event: TokenEvent) -> list[Any]:
    """An event as a JSON array."""
    return [
        event.request_id,
        event.token_id,
        event.logprob,
        event.raw_logprob,
        event.top_logprobs,
        event.weight_version,
        event.finish_reason,
    ]


def decode_event(content: list[Any]) -> TokenEvent:
    """The same event again."""
    id, token, logprob, raw, tops, version, finish = content
    return TokenEvent(id, token, logprob, raw, tuple((i, v) for i, v in tops), version, finish)


def _load_engine(settings: EngineSettings, folder: Path) -> tuple[Engine, EngineInfo, TrainableModel]:
    loaded = load_source(settings.parse(), device=settings.device, trust_remote_code=settings.trust_remote_code)
    from runner.inference.torch_engine import TorchEngine

    # a single adapter that the source itself is can be merged; of others each request chooses one
    adapters = {} if list(loaded.adapters) == [loaded.name] else dict(loaded.adapters)
    engine = TorchEngine(loaded.model, decide=Decisions(), max_num_seqs=settings.max_num_seqs, adapters=adapters)
    loaded.tokenizer.save_pretrained(folder)
    limits = engine.limits
    info = EngineInfo(
        name=loaded.name,
        adapters=tuple(adapters),
        tokenizer=str(folder),
        stop_token_ids=tuple(sorted(limits.stop_token_ids)),
        vocab_size=limits.vocab_size,
        length_limit=None if limits.length_limit is None else limits.length_limit[0],
        step=loaded.step,
    )
    return engine, info, loaded.model


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


def main(settings: str) -> int:
    """Load the model and answer requests until the front end goes. Returns the exit code."""
    lines = JsonLines.to_parent()
    log = logging.getLogger("runner")  # says what was decided, on the screen of the front end
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="run-serve-") as folder:
            parsed = EngineSettings(**json.loads(settings))
            engine, info, model = _load_engine(parsed, Path(folder))
            lines.send({"ready": asdict(info)})
            run_engine(engine, lines, partial(_load_folder, engine, model, parsed))
            engine.close()

    return _run_and_report(lines, work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
