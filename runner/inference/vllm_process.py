"""`vllm serve` as a supervised child: its command, its health within a deadline, its log, and its end."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from runner.core.auto_choices import Decisions
from runner.core.device_kinds import Kind
from runner.core.errors import CheckpointError, DeadlineExceeded, EnvironmentProblem, Interrupted, RankLost
from runner.core.signals import SignalRecorder
from runner.core.subprocess import POLL_S, ChildProcess
from runner.inference.adapter_chat import check_shared_chat
from runner.inference.engine_process import EngineSettings
from runner.inference.model_source import ModelSource, parse_source, source_spec
from runner.inference.serve import ServeSettings
from runner.model.model_folder import check_adapter_base, exported_step, read_adapter_config, read_json
from runner.run_dir.folder import OUTPUTS, RunFolder, display_path
from runner.sampler.vllm.arguments import RANKS
from runner.sampler.vllm.versions import LAYOUT

HEALTH_TIMEOUT_S = 5.0
EXIT_S = 10.0  # of vLLM, after the requests in flight
LOG_LINES = 15  # of the log that an error shows


def serve_vllm(source: ModelSource, model: EngineSettings, settings: ServeSettings, api_key: str | None) -> int:
    """Start vLLM and wait for its end.

    Raises Interrupted after a signal, DeadlineExceeded where it does not answer in time, RankLost where it ends by
    itself.
    """
    from runner.inference.http import listen

    program = shutil.which("vllm")
    if program is None:
        raise EnvironmentProblem(
            "engine=vllm: the program vllm is not installed; install it (docs/vllm.md), or type engine=torch"
        )
    if source.kind == "run" and any(source_spec(source, device=model.device).sampler.stop_criteria()):
        text = "the run's sampler.stop and sampler.stop_token_ids end only completions of requests that name them"
        print(f"engine=vllm: {text} (stop, stop_token_ids)", file=sys.stderr)
    if api_key is not None:
        text = "vLLM checks the API key below /v1 only; /invocations generates without one"
        print(f"engine=vllm: {text}. Let other machines reach /v1 alone, through a proxy", file=sys.stderr)
    log = _log_path(source)
    source, step = exported_source(source)
    check_adapters(source)
    with listen(settings.host, settings.port) as bound:  # that it can be had is known before vLLM is started
        settings = settings.model_copy(update={"port": bound.getsockname()[1]})
    kind = source_spec(source, device=model.device).device.kind
    command = vllm_command(source, model, settings, kind, chat_options(source, model, log.with_suffix("").resolve()))
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"engine=vllm: {shlex.join(command)}\n  log: {display_path(log)}", file=sys.stderr, flush=True)
    recorder = SignalRecorder()
    with open(log, "ab") as file, recorder.record_signals():
        environment = vllm_environment(os.environ, api_key, settings, kind)
        child = ChildProcess(
            [program, *command[1:]], end_signal=signal.SIGTERM, stdout=file, stderr=file, env=environment
        )
        try:
            _wait_healthy(child, settings, recorder, log)
            served = source.name if step is None else f"{source.name}, step {step}"
            print(f"{served}: {settings.url}/v1 (engine=vllm; Ctrl-C ends it)", flush=True)
            while child.is_running() and not recorder.stop_signals:
                time.sleep(POLL_S)
            _raise_if_ended(child, recorder, log)
        finally:
            _stop(child, settings.grace_s + EXIT_S, recorder)
    number = recorder.stop_signals[0]
    raise Interrupted(number, f"{signal.Signals(number).name}: vLLM stopped")


def exported_source(source: ModelSource) -> tuple[ModelSource, int | None]:
    """What vLLM reads of a source, and the step where it is known: of a run, the export of its checkpoint.

    Raises EnvironmentProblem where there is none, CheckpointError where no checkpoint is the best one.
    """
    if source.kind != "run":
        return source, None
    folder, named = RunFolder(Path(source.path)), source.checkpoint != "last"
    step, exported = _checkpoint_step(source, folder), exported_step(folder.export)
    export = folder.export if step is None or exported == step else folder.export_of(step)
    if not export.is_dir() and not named and (exported is None or exported > (step or 0)):
        export = folder.export
    step = exported if export == folder.export else step
    if not export.is_dir():
        wanted = "" if not named else f" --checkpoint {source.checkpoint}"
        text = f"engine=vllm reads exports, but {source.text} has none"
        text += "" if step is None else f" of checkpoint {step}"
        older = f"\n  export/ is of step {exported}: --checkpoint {exported} serves it" if exported is not None else ""
        raise EnvironmentProblem(f"{text}; type: run export {source.text}{wanted}{older}")
    if step is None and folder.has_checkpoint:
        text = f"does not say its step; it may be older than the newest checkpoint, {max(folder.saved_steps)}"
        print(f"engine=vllm: {display_path(export)} {text}", file=sys.stderr)
    found = parse_source(str(export), base=source.base)
    return replace(found, name=source.name), step


def _checkpoint_step(source: ModelSource, folder: RunFolder) -> int | None:
    """The step of a run's checkpoint; None = the newest one of a run without any. Raises CheckpointError."""
    if isinstance(source.checkpoint, int):
        return source.checkpoint
    if source.checkpoint == "last":
        return max(folder.saved_steps, default=None)
    from runner.checkpoint.store import CheckpointStore  # it brings torch

    report = logging.getLogger("runner").warning
    store = CheckpointStore(source_spec(source).checkpoint, root=folder.checkpoints, report=report)
    if (step := store.best()) is None:
        raise CheckpointError(f"{source.text}: the run did not measure checkpoint.best; type --checkpoint last")
    return step


def check_adapters(source: ModelSource) -> None:
    """Check adapters before vLLM loads them.

    Raises EnvironmentProblem for one that vLLM would ignore, CheckpointError for one of another base.
    """
    decide = Decisions()
    for folder in (Path(adapter.path) for adapter in source.adapters):
        if read_adapter_config(folder).get("target_parameters"):
            raise EnvironmentProblem(
                f"{folder} adapts experts (target_parameters), which vLLM ignores without an error; merge it:\n"
                f"  run export {folder} --merge --out FOLDER"
            )
        check_adapter_base(folder, source.path, decide)
    for fact in decide.entries:
        print(fact, file=sys.stderr)


NO_DOMAIN = "none.invalid"  # a name that no host can have (RFC 2606); without any, vLLM fetches every URL
DEFAULT_CHAT_OPTIONS = ("--generation-config", "vllm")  # and not the model's own, which would change what is sampled


def chat_options(source: ModelSource, model: EngineSettings, folder: Path) -> Sequence[str]:
    """Options that give vLLM the chat template and end tokens of adapters; it reads the base's.

    folder: where their end tokens are written, if there are any. Raises EnvironmentProblem where adapters differ.
    """
    tokenizer = check_shared_chat(source, model.trust_remote_code, _base_name(source))
    options = [] if tokenizer is None else ["--tokenizer", tokenizer]
    files = [Path(adapter.path) / "generation_config.json" for adapter in source.adapters]
    found = [read_json(file).get("eos_token_id") for file in files if file.is_file()]
    ends = {id for one in found if one is not None for id in (one if isinstance(one, list) else [one])}
    if not ends:
        return [*options, *DEFAULT_CHAT_OPTIONS]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}))
    return [*options, "--generation-config", str(folder)]


def _base_name(source: ModelSource) -> str:
    """The name by which requests choose the model without its adapters."""
    return f"{source.name}-base" if any(source.name == adapter.name for adapter in source.adapters) else source.name


def vllm_command(
    source: ModelSource,
    model: EngineSettings,
    settings: ServeSettings,
    kind: Kind,
    chat: Sequence[str] = DEFAULT_CHAT_OPTIONS,
) -> list[str]:
    """The command that serves a source as this project's own engine would. chat: see `chat_options`."""
    adapters = {adapter.name: adapter.path for adapter in source.adapters}
    command = ["vllm", "serve", source.path, "--host", settings.host, "--port", str(settings.port)]
    command += ["--served-model-name", _base_name(source), *chat]
    command += ["--logprobs-mode", f"{settings.logprobs_mode}_logprobs"]
    command += ["--max-num-seqs", str(model.max_num_seqs)]
    command += ["--shutdown-timeout", str(math.ceil(settings.grace_s))]  # 0, its default, aborts requests in flight
    command += ["--allowed-media-domains", NO_DOMAIN]
    command += [] if kind.engine_graphs else ["--enforce-eager"]
    # vLLM 0.32 ends on the CPU with a request that has a seed and is prefilled in chunks
    command += ["--no-enable-chunked-prefill"] if kind.name == "cpu" else []
    command += ["--trust-remote-code"] if model.trust_remote_code else []
    if adapters:
        rank = max(_adapter_rank(Path(folder)) for folder in adapters.values())
        command += ["--enable-lora", "--max-loras", str(len(adapters)), "--max-lora-rank", str(rank), "--lora-modules"]
        command += [f"{name}={folder}" for name, folder in adapters.items()]
    return [*command, *settings.vllm_options]


def vllm_environment(
    environment: Mapping[str, str], api_key: str | None, settings: ServeSettings, kind: Kind
) -> dict[str, str]:
    """The child's environment: a key is no word of a command, which every user of the machine can read."""
    own = {name: value for name, value in environment.items() if name not in ("VLLM_API_KEY", "VLLM_SERVER_DEV_MODE")}
    own |= {"VLLM_API_KEY": api_key} if api_key is not None else {}
    if settings.weight_updates:
        own["VLLM_SERVER_DEV_MODE"] = "1"
        if kind.engine_options is not None:  # on Ascend
            own[LAYOUT] = "0"  # weights can be replaced in the plain layout alone
    return own


def _adapter_rank(folder: Path) -> int:
    """The least rank that vLLM makes room for and the adapter fits in."""
    from runner.run_dir.folder import read_mapping

    rank = int(read_mapping(folder / "adapter_config.json")["r"])
    return next((known for known in RANKS if known >= rank), rank)


def _log_path(source: ModelSource) -> Path:
    folder = Path(source.path) if source.kind == "run" else Path(OUTPUTS)
    return folder / ("vllm.log" if source.kind == "run" else f"vllm-{Path(source.name).name}.log")


def _wait_healthy(child: ChildProcess, settings: ServeSettings, recorder: SignalRecorder, log: Path) -> None:
    """Wait until vLLM answers /health."""
    end = time.monotonic() + settings.start_timeout_s
    while not _is_healthy(settings):
        _raise_if_ended(child, recorder, log)
        if recorder.stop_signals:
            number = recorder.stop_signals[0]
            raise Interrupted(number, f"{signal.Signals(number).name} before vLLM responded")
        if time.monotonic() > end:
            text = f"vLLM did not respond at {settings.url}/health within {settings.start_timeout_s:g} s"
            raise DeadlineExceeded(f"{text}; its log is {display_path(log)}; for more time, type start_timeout_s=3600")
        time.sleep(POLL_S)


def _is_healthy(settings: ServeSettings) -> bool:
    connection = HTTPConnection(settings.host, settings.port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):  # it does not listen yet
        return False
    finally:
        connection.close()


def _stop(child: ChildProcess, grace_s: float, recorder: SignalRecorder) -> None:
    """Send vLLM SIGTERM; kill it after `grace_s` seconds, or at a second signal."""
    child.send_signal(signal.SIGTERM)
    end = time.monotonic() + grace_s
    while child.is_running() and time.monotonic() < end and len(recorder.stop_signals) < 2:
        time.sleep(POLL_S)
    child.stop(0)


def _raise_if_ended(child: ChildProcess, recorder: SignalRecorder, log: Path) -> None:
    """Raise RankLost where vLLM exited unexpectedly."""
    if child.is_running() or recorder.stop_signals:
        return
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    shown = "\n".join(f"  {line}" for line in lines)
    raise RankLost(f"vLLM exited with code {child.returncode}; the end of {display_path(log)}:\n{shown}")
