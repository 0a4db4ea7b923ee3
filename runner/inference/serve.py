"""`run serve`: an engine behind an HTTP server, until a signal.

engine=torch   this process: HTTP, templates, tokenizer ◀─pipes─▶ child: `engine_process`, the model
engine=vllm    this process: supervision                 ─────▶ child: `vllm serve`, which listens itself
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from runner.core.errors import DataError, EnvironmentProblem
from runner.data.readers import read_whole_text
from runner.inference.engine_process import EngineSettings
from runner.inference.model_source import ModelSource, source_spec
from runner.spec.base import LOOPBACK, Config

EngineName = Literal["auto", "torch", "vllm"]


class ServeSettings(Config):
    """Settings of `run serve`.

    engine: auto = vLLM where it is installed and the device is no CPU
    grace_s: for what is in flight at a signal
    start_timeout_s: until vLLM answers
    weight_updates: whether a trainer with the key may replace the weights
    vllm_options: further words of `vllm serve`
    """

    engine: EngineName = "auto"
    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(8000, ge=0, le=65535)
    grace_s: float = Field(30.0, gt=0)
    start_timeout_s: float = Field(1800.0, gt=0)
    logprobs_mode: Literal["raw", "processed"] = "raw"
    weight_updates: bool = False
    vllm_options: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where clients reach it."""
        from runner.inference.http import http_url

        return http_url(self.host, self.port)


def serve(model: EngineSettings, settings: ServeSettings, api_key_file: Path | None = None) -> int:
    """Serve a model until a signal. Raises Interrupted then, and what the engine failed with."""
    keys = [] if api_key_file is None else read_api_keys(api_key_file, "--api-key-file")
    if len(keys) > 1:
        raise EnvironmentProblem(f"--api-key-file {api_key_file}: expected one key, which has no spaces")
    api_key = keys[0] if keys else None
    if settings.host not in LOOPBACK and api_key is None:
        raise EnvironmentProblem(
            f"host={settings.host}: other machines could use the model without a key; write a key into a file that "
            "only you can read, and type --api-key-file FILE"
        )
    if settings.weight_updates and api_key is None:
        raise EnvironmentProblem(
            "weight_updates=true: anyone who reaches the server could replace its model; add --api-key-file FILE"
        )
    source = model.parse()
    if source.kind == "run":  # which run is latest is decided once
        model = model.model_copy(update={"source": source.path})
    if _choose_engine(source, model.device, settings) == "vllm":
        if settings.weight_updates and settings.host not in LOOPBACK:  # the routes of its development mode have no key
            text = f"weight_updates=true host={settings.host}: vLLM replaces weights without a key"
            raise EnvironmentProblem(f"engine=vllm {text}; type engine=torch, or host=127.0.0.1")
        from runner.inference.vllm_process import serve_vllm

        return serve_vllm(source, model, settings, api_key)
    if settings.vllm_options:
        raise EnvironmentProblem(f"{settings.vllm_options[0]}: words after -- are for engine=vllm; leave them out")
    return _serve_torch(model, settings, api_key)


def _choose_engine(source: ModelSource, device: str | None, settings: ServeSettings) -> EngineName:
    """The engine that serves; auto says what it chose."""
    if settings.engine != "auto":
        return settings.engine
    kind = source_spec(source, device=device).device.kind.name
    if kind == "cpu":
        engine: EngineName = "torch"
        reason = "on the CPU"
    elif shutil.which("vllm") is None:
        engine, reason = "torch", "vllm is not installed; it is faster for many clients on a card"
    else:
        engine, reason = "vllm", f"vllm is installed, and the device is {kind}"
    print(f"engine=auto: {engine} ({reason})", file=sys.stderr)
    return engine


def read_api_keys(path: Path, option: str) -> list[str]:
    """The keys in a file, one per line, that no other user can read; option: names the file.

    The group may read a file of another user, as it does a secret of Kubernetes with fsGroup. Raises
    EnvironmentProblem.
    """
    try:
        keys = read_whole_text(path, option).split()
        found = path.stat()
        others = found.st_mode & (0o077 if found.st_uid == os.getuid() else 0o037)
    except (OSError, DataError) as error:
        raise EnvironmentProblem(f"{option} {path}: cannot be read: {error}") from error
    if not keys or not all(key.isascii() and key.isprintable() for key in keys):
        raise EnvironmentProblem(f"{option} {path}: expected a key on each line, of ASCII text without spaces")
    if others:
        raise EnvironmentProblem(f"{option} {path}: other users can read it; type: chmod 600 {path}")
    return keys


def _serve_torch(model: EngineSettings, settings: ServeSettings, api_key: str | None) -> int:
    from runner.inference.http import listen

    listen(settings.host, settings.port).close()  # that it can be had is known before the model is loaded
    from runner.inference.server import run_server

    asyncio.run(run_server(model, settings, api_key))
    return 0
