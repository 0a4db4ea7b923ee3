"""`run serve`: the settings that are typed, and the server that is started with them."""

from __future__ import annotations

from argparse import Namespace
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from runner.cli.args import UsageError, is_override
from runner.cli.overrides import TRUST
from runner.spec.suggest import expected_type, nearest_word

Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SETTINGS: dict[str, Any] = {
    "engine": Literal["auto", "torch", "vllm"],
    "host": Text,
    "port": Annotated[int, Field(ge=0, le=65535)],
    "device": Text,
    "max_num_seqs": Annotated[int, Field(ge=1, le=4096)],
    "grace_s": Seconds,
    "start_timeout_s": Seconds,
    "logprobs_mode": Literal["raw", "processed"],
    "weight_updates": bool,
}


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


def _read_setting(word: str) -> tuple[str, Any]:
    """Name and value of a word such as port=8001. Raises UsageError."""
    name, _, value = word.lstrip("+").partition("=")
    if word.startswith(TRUST):
        return "trust_remote_code", value.lower() == "true"
    if name not in SETTINGS:
        near = nearest_word(name, SETTINGS)
        known = f"did you mean {near}=?" if near else f"settings: {', '.join(SETTINGS)}"
        raise UsageError(f"run serve: no setting named '{name}'; {known}")
    kind = TypeAdapter(SETTINGS[name])
    try:
        return name, kind.validate_python(yaml.safe_load(value), strict=True)
    except (ValidationError, yaml.YAMLError):
        expected = expected_type(kind.json_schema())
        raise UsageError(f"run serve: {name}={value}: expected {expected}") from None
