"""What draws rollouts: a server that runs already."""

import os
import socket
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from runner.core.errors import EnvironmentProblem
from runner.sampler.base import DrawingConfig, Sent
from runner.spec.base import address_problem

KNOCK_S = 10.0  # for a server to be there
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class VllmServerConfig(DrawingConfig):
    """A server that runs already draws: vLLM, or another that speaks OpenAI's completions and gives token ids."""

    factory: ClassVar[str] = "runner.sampler.server.build:build"
    engine: ClassVar[bool] = True
    served: ClassVar[bool] = True
    name: Literal["vllm_server"] = "vllm_server"
    url: str = Field(description="Address of the server, e.g. http://127.0.0.1:8000.")
    model: str | None = Field(
        default=None, min_length=1, description="Name that the server has the model by; null = the only one it has."
    )
    key_variable: str | None = Field(
        default=None, min_length=1, description="Environment variable with the server's key; null = it wants none."
    )
    sync: Literal["none", "adapter", "reload"] = Field(
        default="none",
        description="What the server gets after a step: none = nothing, its weights are what they are; adapter = the "
        "adapter under a new name; reload = all weights, merged, through vLLM's endpoints for development.",
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="Folder that both this machine and the server see, for weights; null = the server is on this one.",
    )
    sleep: bool = Field(
        default=False, description="Put the server to sleep while training, where it shares the cards with it."
    )
    retries: int = Field(
        default=10, ge=0, description="Further tries of a request after no answer, or a status of 429 or 500 to 599."
    )

    def sent(self) -> tuple[Sent, ...]:
        sent: dict[str, tuple[Sent, ...]] = {"none": (), "adapter": ("adapter",), "reload": ("changed", "fixed")}
        return sent[self.sync]

    def copies(self) -> int:
        """Versions that lie in this machine's memory for the server, beside those that the lag needs: an adapter is
        copied, and the one before goes once it was read; all weights are linked, and those before go then."""
        return 0 if self.folder else {"none": 0, "adapter": 2, "reload": 1}[self.sync]

    def preflight(self) -> None:
        """Raise EnvironmentProblem where the key is not there."""
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            text = f"the environment variable {self.key_variable} is not set; type export {self.key_variable}=..."
            raise EnvironmentProblem(f"sampler.key_variable: {text}")

    def preflight_here(self) -> None:
        """Raise EnvironmentProblem where nobody listens: a run that has begun would wait for it, as for a restart."""
        at = urlsplit(self.url)
        try:
            port = at.port or {"http": 80, "https": 443}[at.scheme]
            socket.create_connection((at.hostname or "", port), KNOCK_S).close()
        except OSError as error:
            text = f"nobody listens at {self.url} ({error.strerror or error}); start the server, and wait until it does"
            raise EnvironmentProblem(f"sampler.url: {text}") from error

    def problems(self, job: Any) -> list[tuple[str, str]]:
        wrong = address_problem(self.url)
        found = [] if wrong is None else [("sampler.url", wrong)]
        if job.launch.samplers:
            found.append(("launch.samplers", f"the server at {self.url} samples; type launch.samplers=0"))
        if self.sleep and job.algorithm.steps_ahead():
            found.append(("sampler.sleep", "sampling goes on while training (algorithm.lag); leave it out"))
        return [*found, *(self._unsent(job) if self.sync == "none" else self._sent(job, wrong is None))]

    def _unsent(self, job: Any) -> list[tuple[str, str]]:
        text = "is about weights that are sent, and sampler.sync=none sends none; leave it out"
        given = {"folder": self.folder, "probe": self.probe}
        found = [(f"sampler.{name}", text) for name, value in given.items() if value is not None]
        if job.algorithm.samples and not job.algorithm.weighs_samples():
            text = (
                "none leaves the server its weights, and this algorithm learns from the policy's own answers; type"
                " sampler.sync=adapter (adapter=lora) or reload, or weigh the samples: algorithm.correction=tis"
            )
            found.append(("sampler.sync", text))
        return found

    def _sent(self, job: Any, understood: bool) -> list[tuple[str, str]]:
        found = []
        if self.sync == "adapter" and job.adapter.trains_base:
            found.append(("sampler.sync", "adapter=none has no adapter to send; type sampler.sync=reload"))
        if self.sync == "adapter" and job.adapter.needs_whole_layers:
            found.append(("sampler.sync", "vLLM knows no DoRA; type sampler.sync=reload"))
        if understood and self.folder is None and urlsplit(self.url).hostname not in LOOPBACK:
            text = f"{urlsplit(self.url).hostname} may be another machine; set sampler.folder=PATH, seen by both"
            found.append(("sampler.folder", text))
        return found
