"""`run chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import sys
from argparse import Namespace

from runner.cli.args import UsageError
from runner.cli.job import describe_source, resolve_source, start_engine
from runner.core.errors import EnvironmentProblem
from runner.tracker.text import print_text


def run(args: Namespace) -> int:
    """Answer lines of the terminal until Ctrl-D. Raises UsageError."""
    source, more, settings = resolve_source(args)
    if more:
        raise UsageError(f"'{more[0]}' is not supported: run chat takes one model; type messages in the chat")
    loaded, engine, params = start_engine(args, source, settings)
    if loaded.chat_template is None:
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
    renderer = Renderer(loaded.tokenizer, ChatConfig(kwargs=loaded.chat.kwargs))
    try:
        run_chat(Conversation(engine, renderer, params, system=args.system or ""))
    finally:
        engine.close()
    return 0
