"""Programs that run episodes of environment=agent: for each one a command, or a request to a server.

    {"prompt", "columns", "seed"} ──stdin──▶ command (OPENAI_BASE_URL, OPENAI_API_KEY) ──last line of stdout──▶ result
    {… "base_url", "api_key"}     ──POST───▶ server                                    ──body───────────────▶ result

The guard of a command (`runner.user_code.guarded_command`) kills all that it has started.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import select
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from runner.core.http_client import ClientError, failure_reason, request, run_coroutine
from runner.core.subprocess import POLL_S, READ_BYTES, ChildProcess
from runner.core.untrusted_text import parse_json, shorten
from runner.environment.config import AgentEnvironmentConfig, is_url
from runner.environment.processes import EpisodeFailure
from runner.interfaces import EpisodeResult
from runner.interfaces.rewards import encode_json
from runner.user_code import guarded_command
from runner.user_code.process import END_S, CapturedOutput, exit_words, variables_without_secrets

RESULT_BYTES = 1 << 20
LONGEST_S = 1e6  # of a request; `check` ends it earlier
Check = Callable[[], None]  # raises EpisodeFailure where the episode must end


def run_program(
    config: AgentEnvironmentConfig, task: Mapping[str, Any], url: str, key: str, check: Check, output: CapturedOutput
) -> EpisodeResult:
    """The result of the program that plays an episode. Raises EpisodeFailure.

    url, key: of the policy; output: gets what a command prints
    """
    if not is_url(config.command):
        return read_result(_run_command(config, encode_json(task), url, key, check, output))
    body = encode_json({**task, "base_url": url, "api_key": key})
    return read_result(run_coroutine(_post(config.command, body, check)))


def read_result(text: bytes) -> EpisodeResult:
    """The score and the further values in a program's last line, if it is JSON. Raises EpisodeFailure."""
    try:
        found = parse_json(text)
    except ValueError:
        return EpisodeResult()
    values = found if isinstance(found, dict) else {"reward": found}
    score = values.pop("reward", None)
    if score is None:
        return EpisodeResult(None, values)
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise EpisodeFailure(
            "wrong result", f"expected a number or null as reward, got {shorten(json.dumps(score), 60)}"
        )
    return EpisodeResult(float(score), values)


def _run_command(
    config: AgentEnvironmentConfig, stdin: bytes, url: str, key: str, check: Check, output: CapturedOutput
) -> bytes:
    """The last line that the command prints."""
    variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    with ExitStack() as ends:
        given = ends.enter_context(tempfile.TemporaryFile())
        given.write(stdin)
        given.seek(0)
        ours, connection = os.pipe()
        ends.callback(os.close, connection)
        try:
            process = ChildProcess(
                [sys.executable, "-P", guarded_command.__file__, str(ours), *shlex.split(config.command)],
                stdin=given.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(ours,),
                env=variables_without_secrets(config.env) | variables,
            )
        except OSError as error:
            raise EpisodeFailure("no process", f"no process can start: {error}") from error
        finally:
            os.close(ours)
        ends.enter_context(process)  # which closes its pipes, and waits for the process
        ends.callback(process.stop, END_S)
        result = _read_output(process, check, output)
        while not process.ends_within(POLL_S):
            check()
    if process.returncode:
        words = exit_words(process.returncode)
        raise EpisodeFailure(words, f"{Path(shlex.split(config.command)[0]).name}: {words}; see environment.log")
    return result


def _read_output(process: ChildProcess, check: Check, output: CapturedOutput) -> bytes:
    """The last line on stdout, which is the result where it is JSON.

    All else that is printed goes to `output`. Raises EpisodeFailure for a last line above RESULT_BYTES.
    """
    assert process.stdout is not None and process.stderr is not None
    stdout = process.stdout.fileno()
    held = {stdout: b"", process.stderr.fileno(): b""}  # a line that is not whole; of stdout also the last one
    waiting = select.poll()
    for stream in held:
        waiting.register(stream, select.POLLIN)
    opened, is_cut = set(held), False
    while opened:
        has_ended = not process.is_running()  # checked before reading, so that its last output is read
        ready = waiting.poll(POLL_S * 1000)
        if not ready and has_ended:  # where its guard was killed, others may hold the streams
            break
        for stream, _ in ready:
            if not (content := os.read(stream, READ_BYTES)):
                waiting.unregister(stream)
                opened.remove(stream)
            text = held[stream] + content
            end = (text.rstrip() if stream == stdout else text).rfind(b"\n") + 1
            if stream == stdout:
                is_cut = len(text) - end > RESULT_BYTES or (is_cut and end == 0)
            end = len(text) if len(text) - end > RESULT_BYTES else end
            _add_lines(output, text[:end])
            held[stream] = text[end:]
        check()
    if is_cut:
        raise EpisodeFailure("wrong result", f"the last line on stdout is longer than {RESULT_BYTES:,} bytes")
    result = held.pop(stdout).strip()
    if not _is_json(result):
        held[stdout] = result
    for rest in held.values():
        _add_lines(output, rest)
    return result


def _add_lines(output: CapturedOutput, text: bytes) -> None:
    for line in text.decode(errors="replace").splitlines():
        output.add_line(line)


def _is_json(text: bytes) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


async def _post(url: str, body: bytes, check: Check) -> bytes:
    """The body that the server answers with."""
    task = asyncio.create_task(request("POST", url, timeout_s=LONGEST_S, largest_bytes=RESULT_BYTES, body=body))
    try:
        while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
            check()
        status, content = task.result()
    except (OSError, ClientError) as error:
        raise EpisodeFailure(f"no response ({type(error).__name__})", f"{url}: {failure_reason(error)}") from error
    finally:
        task.cancel()
    if status != 200:
        text = shorten(content.decode(errors="replace"), 200)
        raise EpisodeFailure(f"status {status}", f"{url}: status {status}: {text!r}")
    return content
