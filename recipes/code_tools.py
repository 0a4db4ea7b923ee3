"""The environment=code_tools: tools that run what the policy writes, in the sandbox of reward=code."""

import re

from runner.reward.code import RunResult, SandboxError, find_sandbox
from runner.reward.config import CodeConfig
from runner.user_code.worker import EpisodeError

CONFIG = CodeConfig()
SANDBOX, REASONS = find_sandbox(CONFIG)  # bubblewrap, or else Landlock
for NAME, REASON in REASONS.items():
    print(f"no sandbox of {NAME}: {REASON}")  # to environment.log


class CodeTools:
    """Each call runs alone: no file and no variable of an earlier one, no network."""

    def reset(self, prompt: object) -> None:
        """Nothing to prepare."""

    def python(self, code: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            code: the program; use print to see values
        """
        return run(code)

    def bash(self, command: str) -> str:
        """Run a command in bash, and return what it prints.

        Args:
            command: the command
        """
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": "."}
        program = f"import os; os.execve('/bin/bash', ['bash', '-c', {command!r}], {environment!r})"
        return run(program)


def run(program: str) -> str:
    """What the policy reads of a run; without a sandbox the episode is left out."""
    try:
        result = SANDBOX(CONFIG, program, "")
    except (SandboxError, OSError) as error:
        raise EpisodeError(f"the sandbox failed: {error}") from error
    return describe(result)


def describe(result: RunResult) -> str:
    """Its output, then its errors, without the frames of the sandbox, and its exit code."""
    if result.exit_code is None:
        raise TimeoutError(f"ended by a limit of the sandbox ({CONFIG.timeout_s:g} s); output: {result.stdout[:200]}")
    failure = f"exit code {result.exit_code}" if result.exit_code else ""
    stderr = re.sub(r'  File "<(string|frozen runpy)>".*\n( {4}.*\n)*', "", result.stderr)  # 3.13 has source lines
    return "\n".join(filter(None, (result.stdout.rstrip(), stderr.rstrip(), failure))) or "no output"
