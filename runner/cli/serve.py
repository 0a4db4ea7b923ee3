"""`run serve`: the settings that are typed, and the server that is started with them."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from runner.cli.args import UsageError, is_override
from runner.cli.overrides import TRUST
from runner.spec.suggest import nearest_word

ENGINES = ("auto", "torch", "vllm")
LOGPROBS_MODES = ("raw", "processed")


def run(args: Namespace) -> int:
    """Serve a model until a signal. Raises UsageError."""
    words = [word for word in args.words if not is_override(word)]
    typed = dict(_read_setting(word) for word in args.words if is_override(word))
    if len(words) > 1:
        raise UsageError(
            f"'{words[1]}' is not supported: run serve takes one model; to add an adapter: --adapter NAME={words[1]}"
        )
    from runner.inference.engine_process import EngineSettings
    from runner.inference.serve import ServeSettings, serve

    own = {name: typed.pop(name) for name in ("device", "trust_remote_code", "max_num_seqs") if name in typed}
    source = words[0] if words else "latest"
    checkpoint: Any = args.checkpoint or "last"
    model = EngineSettings(source, checkpoint=checkpoint, base=args.base, adapters=tuple(args.adapter or ()), **own)
    return serve(model, ServeSettings(**typed, vllm_options=tuple(args.literal)), args.api_key_file)


def _one_of(*words: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return value

    return read


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not value.isdecimal() or not low <= int(value) <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return int(value)

    return read


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError("seconds above 0")
    return seconds


def _switch(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("true or false")
    return value == "true"


def _text(value: str) -> str:
    if not value:
        raise ValueError("a text")
    return value


SETTINGS: dict[str, Callable[[str], Any]] = {
    "engine": _one_of(*ENGINES),
    "host": _text,
    "port": _whole(0, 65535),
    "device": _text,
    "max_num_seqs": _whole(1, 4096),
    "grace_s": _seconds,
    "start_timeout_s": _seconds,
    "logprobs_mode": _one_of(*LOGPROBS_MODES),
    "weight_updates": _switch,
}


def _read_setting(word: str) -> tuple[str, Any]:
    """Name and value of a word such as port=8001. Raises UsageError."""
    name, _, value = word.lstrip("+").partition("=")
    if word.startswith(TRUST):
        return "trust_remote_code", value.lower() == "true"
    if (read := SETTINGS.get(name)) is None:
        near = nearest_word(name, SETTINGS)
        known = f"did you mean {near}=?" if near else f"settings: {', '.join(SETTINGS)}"
        raise UsageError(f"run serve: no setting named '{name}'; {known}")
    try:
        return name, read(value)
    except ValueError as error:
        raise UsageError(f"run serve: {name}={value}: expected {error}") from None
