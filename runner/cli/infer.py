"""`run infer` and `run chat`: completions of prompts, and a conversation in the terminal."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.cli.args import UsageError
from runner.cli.job import describe_source, resolve_source
from runner.core.errors import DataError, EnvironmentProblem
from runner.core.images import decode_image
from runner.tracker.text import escape_controls, print_text

if TYPE_CHECKING:
    from runner.inference.engine import SamplingParams
    from runner.inference.model_source import LoadedModel, ModelSource
    from runner.inference.torch_engine import TorchEngine


def infer(args: Namespace) -> int:
    """Answer prompts: those typed, those of a file (one a line), or line by line from the keyboard."""
    _check_sampling(args)
    images = [Path(_check_image(name)) for name in args.image or ()]
    source, prompts, settings = resolve_source(args)
    if args.file:
        prompts += _read_prompts(args.file)
    loaded, engine, params = _start_engine(args, source, settings)
    from runner.inference.generate import stream_answer
    from runner.launch.infer_export import prompt_ids

    style, asked = loaded.prompt_style, "prompts are plain text"
    if style == "chat":
        context = loaded.tokenizer.decode(prompt_ids(loaded.tokenizer, "PROMPT", style, loaded.chat))
        asked = f"prompts go through the chat template: {context!r}"
    elif images:
        engine.close()
        raise UsageError("--image: the model was trained on plain text, whose prompts have no place for images")
    at = "" if loaded.step is None else f", step {loaded.step}"
    about = (f"{describe_source(source)}{at}, {asked}", loaded.stop_text())
    print_text("\n".join(filter(None, about)), file=sys.stderr)
    several = args.file is not None or len(prompts) > 1
    shown_as = escape_controls if sys.stdout.isatty() else str  # a terminal obeys what a model or a file says
    with closing(engine):
        for prompt in prompts or _typed_prompts():
            if several:
                print(shown_as(f"> {prompt}"))
            ids = prompt_ids(loaded.tokenizer, prompt, style, loaded.chat, images)
            length = 0
            for piece in stream_answer(engine, loaded.tokenizer, ids, params):
                length += len(piece)
                print(shown_as(piece), end="", flush=True)
            print()
            if not length:
                print("(an empty completion)", file=sys.stderr)
    return 0


def _check_image(name: str) -> str:
    """The name of an image file. Raises UsageError where there is none, or not an image in it."""
    if not Path(name).is_file():
        raise UsageError(f"--image {name}: no such file; images are not fetched from a URL, download them first")
    try:
        decode_image(Path(name).read_bytes())
    except DataError as error:
        raise UsageError(f"--image {name}: {error}") from error
    return name


def chat(args: Namespace) -> int:
    """Answer lines of the terminal until Ctrl-D. Raises UsageError."""
    _check_sampling(args)
    source, more, settings = resolve_source(args)
    if more:
        raise UsageError(f"'{more[0]}' is not supported: run chat takes one model; type messages in the chat")
    loaded, engine, params = _start_engine(args, source, settings)
    if loaded.tokenizer.chat_template is None:
        engine.close()
        text = f"{source.text} has no chat template; use plain prompts: run infer {source.text} PROMPT"
        raise EnvironmentProblem(text)
    from runner.data.chat import Renderer
    from runner.data.config import ChatConfig
    from runner.inference.generate import Conversation
    from runner.inference.terminal_chat import run_chat

    step = "" if loaded.step is None else f", step {loaded.step}"
    print_text(f"{describe_source(source)}{step}; /help lists the commands", file=sys.stderr)
    if loaded.prompt_style == "text":
        print("it was trained on plain text, not on conversations", file=sys.stderr)
    if stops := loaded.stop_text():
        print_text(stops, file=sys.stderr)
    renderer = Renderer(loaded.tokenizer, ChatConfig(date=loaded.chat.date))
    with closing(engine):
        run_chat(Conversation(engine, renderer, params, system=args.system or ""))
    return 0


def _start_engine(
    args: Namespace, source: ModelSource, settings: Mapping[str, Any]
) -> tuple[LoadedModel, TorchEngine, SamplingParams]:
    """The model of `run infer` and `run chat`, its engine, and how it is sampled from. Raises UsageError."""
    if len(source.adapters) > 1:
        raise UsageError(f"run {args.verb} takes one adapter; run serve supports several by name")
    from runner.inference.model_source import load_source

    loaded = load_source(source, **settings)
    from runner.core.auto_choices import Decisions
    from runner.inference.engine import SamplingParams
    from runner.inference.torch_engine import TorchEngine

    params = SamplingParams(
        args.temperature,
        args.top_p or 1.0,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed or 0,
        stop=loaded.stop,
        stop_token_ids=loaded.stop_token_ids,
    )
    return loaded, TorchEngine(loaded.model, decide=Decisions(), max_num_seqs=1), params


def _read_prompts(path: Path) -> list[str]:
    """One prompt per line of a text file; empty lines are left out."""
    if not path.exists() or path.is_dir():  # a pipe will do, as in --file <(command)
        raise EnvironmentProblem(f"{path}: no such file; expected one prompt per line")
    from runner.data.readers import read_whole_text

    return [line.rstrip("\r") for line in read_whole_text(path, "--file").split("\n") if line.strip()]


def _check_sampling(args: Namespace) -> None:
    """Raise UsageError for a sampling option that is out of range, or has no effect."""
    for name, value, good, wanted in (
        ("--max-new-tokens", args.max_new_tokens, args.max_new_tokens >= 1, "1 or more"),
        ("--temperature", args.temperature, 0 <= args.temperature < float("inf"), "0 or more"),
        ("--top-p", args.top_p, args.top_p is None or 0 < args.top_p <= 1, "above 0, at most 1"),
        ("--seed", args.seed, args.seed is None or 0 <= args.seed < 2**63, "0 to 2^63 - 1"),
    ):
        if not good:
            raise UsageError(f"{name} {value}: expected {wanted}")
    if args.temperature == 0 and (args.top_p is not None or args.seed is not None):
        raise UsageError("--top-p and --seed need sampling; set --temperature above 0 too")


def _typed_prompts() -> Iterator[str]:
    """Lines of standard input, with a prompt sign at a terminal, until it ends."""
    count = 0
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True, file=sys.stderr)
        if not (line := sys.stdin.readline()):
            break
        if line.strip():
            count += 1
            yield line.rstrip("\r\n")
    if not count and not sys.stdin.isatty():
        raise UsageError("no prompt: type one, or send lines on standard input")
