"""`run serve`: an engine behind an HTTP server, until a signal.

engine=torch   this process: HTTP, templates, tokenizer ◀─pipes─▶ child: `engine_process`, the model
engine=vllm    this process: supervision                 ─────▶ child: `vllm serve`, which listens itself
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runner.core.errors import EnvironmentProblem, Interrupted
from runner.core.subprocess import ChildProcess
from runner.inference.engine_process import EngineInfo, EngineSettings
from runner.inference.model_source import ModelSource, source_spec

if TYPE_CHECKING:
    from runner.inference.served_model import ServedModel

EngineName = Literal["auto", "torch", "vllm"]
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of `run serve`.

    engine: auto = vLLM where it is installed and the device is no CPU
    grace_s: for what is in flight at a signal
    start_timeout_s: until vLLM answers
    weight_updates: whether a trainer with the key may replace the weights
    vllm_options: further words of `vllm serve`
    """

    engine: EngineName = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    grace_s: float = 30.0
    start_timeout_s: float = 1800.0
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
    api_key = _read_api_key(api_key_file)
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
        model = replace(model, source=source.path)
    if _choose_engine(source, model.device, settings) == "vllm":
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


def _read_api_key(path: Path | None) -> str | None:
    """The key in a file. Raises EnvironmentProblem."""
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
        others = path.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentProblem(f"--api-key-file {path}: cannot be read: {error}") from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise EnvironmentProblem(f"--api-key-file {path}: expected one line of ASCII text without spaces")
    if others:
        raise EnvironmentProblem(f"--api-key-file {path}: other users can read it; type: chmod 600 {path}")
    return key


def _serve_torch(model: EngineSettings, settings: ServeSettings, api_key: str | None) -> int:
    from runner.inference.http import listen

    listen(settings.host, settings.port).close()  # that it can be had is known before the model is loaded
    asyncio.run(_run_server(model, settings, api_key))
    return 0


async def _run_server(model: EngineSettings, settings: ServeSettings, api_key: str | None) -> None:
    from runner.inference.http import listen
    from runner.inference.server import serve_http

    async with AsyncExitStack() as ends:
        served = await _until_signal(_start_engine(model, settings, ends))
        listener = ends.enter_context(listen(settings.host, settings.port))
        ready = partial(_print_ready, served.info, replace(settings, port=listener.getsockname()[1]), api_key)
        await serve_http(
            served,
            listener,
            grace_s=settings.grace_s,
            api_key=api_key,
            weight_updates=settings.weight_updates,
            on_ready=ready,
        )


async def _start_engine(model: EngineSettings, settings: ServeSettings, ends: AsyncExitStack) -> ServedModel:
    """The model, loaded in a child process that ends with `ends`."""
    from runner.inference.engine_client import EngineClient
    from runner.inference.served_model import ServedModel

    folder = Path(tempfile.gettempdir(), f"run-serve-{secrets.token_hex(8)}")  # the child's, for the tokenizer
    ends.callback(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, "-m", "runner.inference.engine_process", json.dumps(asdict(model)), str(folder)]
    child = ChildProcess(command, end_signal=signal.SIGKILL, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    ends.callback(child.stop, settings.grace_s)
    assert child.stdin is not None and child.stdout is not None
    writing = os.dup(child.stdin.fileno())
    child.stdin.close()
    client = await EngineClient.connect(child.stdout.fileno(), writing)
    ends.push_async_callback(client.close)
    info = await client.wait_ready()
    tokenizer = await asyncio.to_thread(_load_tokenizer, folder)
    return ServedModel(info, tokenizer, client, settings.logprobs_mode)


async def _until_signal(work: Coroutine[None, None, ServedModel]) -> ServedModel:
    """The result of `work`. Raises Interrupted where a signal comes first."""
    task, loop, received = asyncio.ensure_future(work), asyncio.get_running_loop(), list[int]()

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0], f"{signal.Signals(received[0]).name} during the load of the model") from None


def _load_tokenizer(folder: Path) -> Any:
    """The tokenizer that the engine's process has written; its folder is removed."""
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return tokenizer


def _print_ready(info: EngineInfo, settings: ServeSettings, api_key: str | None) -> None:
    names = ", ".join(dict.fromkeys([info.name, *info.adapters]))
    step = "" if info.step is None else f", step {info.step}"
    key = "no key needed" if api_key is None else "with the key of --api-key-file"
    print(f"{names}{step}: {settings.url}/v1 ({key}; Ctrl-C ends it)", flush=True)
