"""What a user can set of the server of `run tinker`."""

from typing import Any

from pydantic import Field

from runner.spec.base import LOOPBACK, Config


class TinkerConfig(Config):
    """The server of `run tinker`: its address, who may use it, and its limits."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address that the server listens at.")
    port: int = Field(default=8010, ge=0, le=65535, description="Port that it listens at; 0 = any free one.")
    key_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with the API keys that clients may use, one per line, each starting with tml-; null = any "
        "key, on loopback alone. No other key has access to what a key creates.",
    )
    command: list[str] = Field(
        default=[],
        description="Client program that is started with TINKER_BASE_URL and TINKER_API_KEY once the server is ready; "
        "the server ends with it. python is the server's own. [] = none: it serves until a signal.",
    )
    max_tenants: int = Field(default=8, ge=1, description="Maximum number of training clients at once.")
    max_samplers: int = Field(
        default=8,
        ge=1,
        description="Number of sampler weights kept on the device; above it, idle ones are removed. All stay on disk.",
    )
    max_requests: int = Field(default=4096, ge=1, description="Maximum number of unanswered requests of a key.")
    max_request_values: int = Field(
        default=1 << 24, ge=1, description="Maximum number of values (tokens, targets, weights) of a request."
    )
    session_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds without a heartbeat after which the training clients of a session end.",
    )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if not job.algorithm.serves:
            text = f"is for run tinker, but this is algorithm={job.algorithm.name}; leave it out"
            return [] if self == TinkerConfig() else [("tinker", text)]
        found = []
        if self.host not in LOOPBACK and self.key_file is None:
            text = "other machines could use the server without a key; write keys into a file that only you can read"
            found.append(("tinker.host", f"{text}, and type tinker.key_file=FILE"))
        return found
