"""Ray's client of its Jobs API: hands a job over, prints what it says, asks it to stop.

It speaks HTTP with the cluster's head, and neither starts nor joins Ray, so that it needs no process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from runner.errors import EnvironmentProblem, Interrupted
from runner.launch.verdict import JobFailed

ANSWER_S = 60.0  # for one answer of the head
QUIET_S = 30.0  # without a word of the job, after which the head is asked whether it is there
LOST_S = 60.0  # for a connection to come back
AGAIN_S = 3.0
LOST = 75  # exit code of a job that ended without one, or was killed
NO_PYTHON = 127  # a shell's
CHATTY = ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk")
CONNECTION = (OSError, RuntimeError, aiohttp.ClientError, asyncio.TimeoutError)


def connect(address: str) -> Jobs:
    """The Jobs API at an address. Raises EnvironmentProblem."""
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return Jobs(Client(address), address)
    except (*CONNECTION, AuthenticationError) as error:
        raise EnvironmentProblem(f"Ray at {address}: {error}") from error


class Client(JobSubmissionClient):
    """Ray's client, which waits for no answer for ever."""

    def _do_request(self, *words: Any, **options: Any) -> Any:
        return super()._do_request(*words, **{"timeout": ANSWER_S, **options})


class Jobs:
    """The jobs of a cluster."""

    def __init__(self, client: JobSubmissionClient, address: str) -> None:
        self._client, self._address = client, address
        self._printed, self._asked = 0, False  # characters of the log; whether the job was asked to stop
        self._lost_at: float | None = None

    def submit(self, entrypoint: str, package: Path, environment: Mapping[str, str]) -> str:
        """Hand a job over; returns Ray's name for it. Raises EnvironmentProblem where Ray does not take it."""
        try:
            surroundings = {"working_dir": str(package), "env_vars": dict(environment)}
            return str(self._client.submit_job(entrypoint=entrypoint, runtime_env=surroundings))
        except (*CONNECTION, ValueError) as error:
            raise EnvironmentProblem(f"Ray at {self._address} does not take the job: {error}") from error

    def follow(self, job: str, folder: str) -> int:
        """Print what a job says until it has ended; returns 0 where it ended well.

        Raises JobFailed with its exit code, Interrupted at Ctrl-C, EnvironmentProblem where its cluster is lost.
        """
        try:
            found = asyncio.run(self._followed(job))
        except asyncio.CancelledError:
            text = f"job {job} is left to itself, and ends once it has saved; {self._command('logs --follow', job)}"
            raise Interrupted(signal.SIGINT, f"{text} shows the rest") from None
        if found.status == JobStatus.SUCCEEDED:
            return 0
        if found.status == JobStatus.STOPPED and self._asked:
            go_on = f"on a node of the cluster: cd {folder} && run resume latest"
            raise Interrupted(signal.SIGINT, f"job {job} has stopped; to go on, {go_on}")
        raise JobFailed(self._verdict(job, found), code if (code := found.driver_exit_code) and code > 0 else LOST)

    async def _followed(self, job: str) -> JobDetails:
        """The job's end. Ctrl-C asks the job to stop; once more cancels this."""
        here = asyncio.current_task()
        assert here is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupted, job, here)
        while True:
            try:
                await self._print(job)
                found: JobDetails = await asyncio.to_thread(self._client.get_job_info, job)
                if found.status.is_terminal():
                    return found
            except CONNECTION as error:
                self._bear(error, job)
            await asyncio.sleep(AGAIN_S)

    def _bear(self, error: Exception, job: str) -> None:
        """Say that the connection is lost, once. Raises EnvironmentProblem where it does not come back."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            print(f"ray      the connection is lost ({error}); trying again", file=sys.stderr, flush=True)
        if time.monotonic() - self._lost_at > LOST_S:
            raise EnvironmentProblem(f"Ray at {self._address}: {error}; {self._goes_on(job)}") from error

    def _interrupted(self, job: str, here: asyncio.Task[Any]) -> None:
        if self._asked:
            here.cancel()
            return
        self._asked = True
        print(f"\nray      job {job} is asked to stop, and saves; Ctrl-C again leaves it to itself", flush=True)
        self._stopping = asyncio.get_running_loop().run_in_executor(None, self._stop, job)

    def _stop(self, job: str) -> None:
        try:
            self._client.stop_job(job)
        except CONNECTION as error:
            print(f"ray      it was not asked ({error}); to stop it: {self._command('stop', job)}", file=sys.stderr)

    async def _print(self, job: str) -> None:
        """Print the rest of the log, which Ray tells from its beginning each time, until it says no more."""
        told = 0
        async for text in _answered(self._client.tail_job_logs(job), self._client.get_version):
            sys.stdout.write(text[max(self._printed - told, 0) :])
            sys.stdout.flush()
            self._lost_at = None
            told += len(text)
            self._printed = max(self._printed, told)

    def _verdict(self, job: str, found: JobDetails) -> str:
        code = found.driver_exit_code
        if code == NO_PYTHON:
            return f"job {job}: there is no `python` where `ray start` was typed; start Ray in the runner's environment"
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return f"job {job} was killed ({name}); what it said is above"
        if code is not None:
            return f"job {job} ended with exit code {code}; what it said is above"
        if found.status == JobStatus.STOPPED:
            return f"job {job} was stopped by somebody else; it has saved, if it had made a step"
        return f"job {job}: {found.message or found.status}"

    def _goes_on(self, job: str) -> str:
        again, end = self._command("logs --follow", job), self._command("stop", job)
        return f"job {job} goes on without being followed; {again} follows it again, {end} ends it"

    def _command(self, what: str, job: str) -> str:
        return f"`ray job {what} --address {self._address} {job}`"


async def _answered(lines: AsyncIterator[str], ask: Any) -> AsyncIterator[str]:
    """What is said; where nothing is for a while, `ask` has to be answered, or the connection is lost."""
    while True:
        waiting = asyncio.ensure_future(anext(lines))
        try:
            while not (await asyncio.wait({waiting}, timeout=QUIET_S))[0]:
                await asyncio.to_thread(ask)
            yield waiting.result()
        except StopAsyncIteration:
            return
        finally:
            waiting.cancel()
