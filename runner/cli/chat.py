"""`run chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import sys
from argparse import Namespace

from runner.cli.args import UsageError
from runner.cli.job import check_sampling, describe_source, resolve_source
from runner.core.errors import EnvironmentProblem
from runner.tracker.text import print_text


def run(args: Namespace) -> int:
    """Answer lines of the terminal until Ctrl-D. Raises UsageError."""
    check_sampling(args)
    source, more, settings = resolve_source(args)
    if more:
        raise UsageError(f"'{more[0]}' is not supported: run chat takes one model; type messages in the chat")
    if len(source.adapters) > 1:
        raise UsageError("run chat takes one adapter; run serve supports several by name")
    from runner.inference.model_source import load_source

    loaded = load_source(source, **settings)
    if loaded.chat_template is None:
        text = f"{source.text} has no chat template; use plain prompts: run infer {source.text} PROMPT"
        raise EnvironmentProblem(text)
    from runner.core.auto_choices import Decisions
    from runner.data.chat import Renderer
    from runner.data.config import ChatConfig
    from runner.inference.engine import SamplingParams
    from runner.inference.generate import Conversation
    from runner.inference.terminal_chat import run_chat
    from runner.inference.torch_engine import TorchEngine

    step = "" if loaded.step is None else f", step {loaded.step}"
    print_text(f"{describe_source(source)}{step}; /help lists the commands", file=sys.stderr)
    if loaded.prompt_style == "text":
        print("it was trained on plain text, not on conversations", file=sys.stderr)
    if stops := loaded.stop_text():
        print_text(stops, file=sys.stderr)
    params = SamplingParams(
        args.temperature,
        args.top_p or 1.0,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed or 0,
        stop=loaded.stop,
        stop_token_ids=loaded.stop_token_ids,
    )
    engine = TorchEngine(loaded.model, decide=Decisions(), max_num_seqs=1)
    try:
        run_chat(
            Conversation(
                engine,
                Renderer(loaded.tokenizer, ChatConfig(kwargs=loaded.chat.kwargs)),
                params,
                system=args.system or "",
            )
        )
    finally:
        engine.close()
    return 0
