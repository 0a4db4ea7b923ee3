"""Messages of a run: model, data and an example prompt; and the console that shows logs.

spec, built job ─▶ run_facts · data_text · example_prompt        logging, warnings ─▶ console_logging ─▶ screen, run.log
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.media import without_media
from runner.core.rank_info import RankInfo
from runner.data.config import ChatConfig
from runner.run_dir.folder import display_path
from runner.spec.evaluation import AnswersConfig
from runner.spec.job import JobSpec
from runner.tracker.console import Console
from runner.tracker.text import count_noun, format_number, format_rate

if TYPE_CHECKING:  # it brings torch, which may be broken
    from runner.interfaces import TrainableModel

LONGEST_EXAMPLE = 100  # characters of a prompt in a suggested command
NO_EXAMPLE = '"…"'
FIRST_WORDS = 4  # of a plain text, as a prompt to continue from
LOGGER = "runner"
RETRIES = "huggingface_hub.utils._http"


def longer_schedule_note(before: JobSpec, spec: JobSpec) -> str | None:
    """That other steps change a decaying schedule, a function of step and steps alone."""
    if spec.steps == before.steps or not spec.schedule.falls:
        return None
    moved = f"schedule={spec.schedule.name} now ends at step {spec.steps}, not {before.steps}"
    return f"note: {moved}: the learning rate is that of a run of {spec.steps} steps, and jumps if it had begun to fall"


def changed_evaluation_note(before: JobSpec, spec: JobSpec) -> str | None:
    """That the metrics of later evaluations are of other options than those that they are compared with."""
    then, now = before.evaluation, spec.evaluation
    found = [f"evaluation.{key}" for key in AnswersConfig.model_fields if getattr(then, key) != getattr(now, key)]
    found += [f"evaluation.sets.{key}" for key in then.sets if key in now.sets and then.sets[key] != now.sets[key]]
    if not found:
        return None
    text = "values of eval/ metrics before and after this resume cannot be compared"
    return f"note: {', '.join(found)} changed: {text}; checkpoint.best and callbacks.stop_when still compare them"


def run_facts(spec: JobSpec, model: TrainableModel) -> dict[str, str]:
    """The facts of a run's first line: model, adapter, parameters, device, seed."""
    everything = sum(_numbers(p) for p in model.module.parameters())
    trainable = sum(_numbers(p) for p in model.trainable().values())
    share = "all" if trainable >= everything else format_rate(trainable)
    return {
        "name": spec.name,
        "model": f"{spec.model.source or spec.model.name}{_first_weights(spec)}",
        "adapter": spec.adapter.name,
        "parameters": f"{format_rate(everything)} parameters, {share} trainable",
        "device": spec.device.name,
        "seed": str(spec.seed),
    }


def _numbers(parameter: Any) -> int:
    """The size of a parameter; of one that DeepSpeed shards, its full size."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _first_weights(spec: JobSpec) -> str:
    """The source of the initial weights, if it is not model.path."""
    if spec.init_from is not None:
        return f" (weights of {display_path(Path(spec.init_from))})"
    return " (random weights)" if spec.model.draws_weights else ""


def ranks_text(spec: JobSpec, place: RankInfo, folder: Path) -> str:
    """The layout of the job's ranks, and the logs of ranks without a screen."""
    own = spec.parallelism
    text = f"ranks    {place.size}: parallelism={own.name}"
    if not own.deepspeed:
        text += f", {own.mesh(place.size)}"
    logs = f"{display_path(folder / 'ranks')}/1.log" + (f" to {place.size - 1}.log" if place.size > 2 else "")
    return f"{text}; this is rank 0, logs of the others: {logs}"


def data_text(spec: JobSpec, items: int) -> str:
    """The number of data items, items per step, steps and epochs; how to look at a row of the user's."""
    per_step = spec.algorithm.batch_size
    amount = "a stream" if spec.data.is_stream else count_noun(items, "item")
    text = f"data     {amount} · {per_step} per step · {count_noun(spec.steps, 'step')}"
    if not (spec.data.is_mixture or spec.data.is_stream):  # the sources of a mixture have different epochs
        text += f" = {format_number(float(f'{spec.steps * per_step / items:.3g}'))} epochs"
    look = "\ntokens   run explain chat, with the options of this run: a row token by token, and what is trained on"
    return text + (look if spec.data.renames_columns else "")


@dataclass(frozen=True, slots=True)
class ChatMarkers:
    """The text that a chat template puts around the last user's message."""

    opening: str
    closing: str
    special: tuple[str, ...] = ()  # end-of-turn and similar tokens

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, chat: ChatConfig) -> ChatMarkers:
        """The markers of a tokenizer with a chat template."""
        from runner.data.chat import Renderer

        rendered = Renderer(tokenizer, chat).render_prompt([{"role": "user", "content": "MESSAGE"}])
        before, _, after = "".join(segment.text for segment in rendered).rpartition("MESSAGE")
        return cls(before[max(before.rfind("<"), before.rfind("["), 0) :], after, tuple(tokenizer.all_special_tokens))

    def user_message(self, prompt: str) -> str:
        """The last user's message of a rendered prompt; the whole prompt if it ends otherwise."""
        if not (self.opening and self.closing and prompt.endswith(self.closing)):
            return prompt
        _, opened, message = prompt.removesuffix(self.closing).rpartition(self.opening)
        return message if opened else prompt

    def without_special(self, text: str) -> str:
        """A text without its special tokens."""
        for token in self.special:
            text = text.replace(token, "")
        return text


def plain_sample(row: Mapping[str, Any], turn: ChatMarkers | None) -> Mapping[str, Any]:
    """A sample with the user's last message instead of the rendered prompt, without special tokens."""
    if turn is None:
        return row
    plain = {name: turn.without_special(text) for name, text in row.items() if isinstance(text, str)}
    if "prompt" in plain:
        plain["prompt"] = turn.without_special(turn.user_message(row["prompt"]))
    return {**row, **plain}


def example_prompt(items: Sequence[Any], tokenizer: Any, turn: ChatMarkers | None) -> str:
    """The first item's prompt, quoted for a shell; "…" if it is too long to type."""
    item = items[0]
    if hasattr(item, "weights"):
        text = _context(item, tokenizer)
    else:
        text = tokenizer.decode(without_media(item.ids if hasattr(item, "ids") else item.prompt))
    text = turn.user_message(text) if turn else text.strip()
    ids = item.ids if hasattr(item, "ids") else item.prompt
    if turn and len(without_media(ids)) < len(ids):
        return f"--image FILE {_quote(turn.without_special(text))}"
    fits = text.isprintable() and 0 < len(text) <= LONGEST_EXAMPLE
    return _quote(text) if fits else NO_EXAMPLE


def _context(item: Any, tokenizer: Any) -> str:
    """Text before the first trained token; the first words if all tokens are trained."""
    first = next((at for at, weight in enumerate(item.weights) if weight > 0), 0)
    if first > 1:  # the first token is never predicted
        return str(tokenizer.decode(without_media(item.ids[:first])))
    return " ".join(tokenizer.decode(without_media(item.ids), skip_special_tokens=True).split()[:FIRST_WORDS])


def _quote(text: str) -> str:
    return f'"{text}"' if not set(text) & set('"$`\\!') else shlex.quote(text)


class _ToConsole(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.message(record.getMessage(), record.levelname.lower())


@contextmanager
def console_logging(path: Path, *, silent: bool = False) -> Iterator[Console]:
    """A console that also shows logs under "runner" and Python's warnings inside the block.

    silent: only in the log at `path`, for ranks that do not print to the user
    """
    loggers = [logging.getLogger(LOGGER), logging.getLogger("py.warnings")]
    levels = {name: logging.getLogger(name).level for name in (LOGGER, RETRIES)}
    with open(os.devnull, "w") as nowhere:
        console = Console(path, nowhere if silent else None)
        handler = _ToConsole(console)
        logging.captureWarnings(True)
        for logger in loggers:
            logger.addHandler(handler)
            logger.propagate = False
        loggers[0].setLevel(logging.INFO)
        logging.getLogger(RETRIES).setLevel(logging.ERROR)  # it logs five lines per file before the error
        try:
            yield console
        finally:
            logging.captureWarnings(False)
            for logger in loggers:
                logger.removeHandler(handler)
                logger.propagate = True
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            console.stop([])
