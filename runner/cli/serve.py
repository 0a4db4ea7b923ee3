"""`run serve`: the settings that are typed, and the server that is started with them."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from runner.cli.args import UsageError, is_override
from runner.cli.overrides import TRUST
from runner.spec.base import Config
from runner.spec.suggest import nearest_word, value_complaint

ENGINE_SETTINGS = ("device", "max_num_seqs")  # those of the server's own engine that can be typed


def run(args: Namespace) -> int:
    """Serve a model until a signal. Raises UsageError."""
    words = [word for word in args.words if not is_override(word)]
    if len(words) > 1:
        raise UsageError(
            f"'{words[1]}' is not supported: run serve takes one model; to add an adapter: --adapter NAME={words[1]}"
        )
    from runner.inference.engine_process import EngineSettings
    from runner.inference.serve import ServeSettings, serve

    classes: dict[str, type[Config]] = dict.fromkeys(ENGINE_SETTINGS, EngineSettings)
    classes |= {name: ServeSettings for name in ServeSettings.model_fields if name != "vllm_options"}
    typed = dict(_read_setting(word, classes) for word in args.words if is_override(word))
    own = {name: typed.pop(name) for name in (*ENGINE_SETTINGS, "trust_remote_code") if name in typed}
    given = {"source": words[0] if words else "latest", "checkpoint": args.checkpoint or "last", "base": args.base}
    try:
        model = EngineSettings(**given, adapters=tuple(args.adapter or ()), **own)
        settings = ServeSettings(**typed, vllm_options=tuple(args.literal))
    except ValidationError as error:
        name, value = str(error.errors()[0]["loc"][0]), error.errors()[0]["input"]
        schema = classes[name].model_json_schema()["properties"][name]
        raise UsageError(f"run serve: {name}={value}: {value_complaint(schema, name, value)}") from None
    return serve(model, settings, args.api_key_file)


def _read_setting(word: str, known: Iterable[str]) -> tuple[str, Any]:
    """Name and value of a word such as port=8001. Raises UsageError for a name that is not known."""
    name, _, text = word.lstrip("+").partition("=")
    if word.startswith(TRUST):
        return "trust_remote_code", text.lower() == "true"
    if name not in known:
        near = nearest_word(name, known)
        meant = f"did you mean {near}=?" if near else f"settings: {', '.join(known)}"
        raise UsageError(f"run serve: no setting named '{name}'; {meant}")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text
