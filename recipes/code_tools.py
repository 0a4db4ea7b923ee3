"""The environment=code_tools: tools that run what the policy writes, in the sandbox of reward=code."""

from runner.reward.code import RunResult, find_sandbox
from runner.reward.config import CodeConfig

CONFIG = CodeConfig()
RUN, _ = find_sandbox(CONFIG)  # bubblewrap, or else Landlock


class CodeTools:
    """Each call runs alone: no file and no variable of an earlier one, no network."""

    def reset(self, prompt: object) -> None:
        """Nothing to prepare."""

    def python(self, code: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            code: the program; use print to see values
        """
        return describe(RUN(CONFIG, code, ""))

    def bash(self, command: str) -> str:
        """Run a command in bash, and return what it prints.

        Args:
            command: the command
        """
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": "."}
        program = f"import os; os.execve('/bin/bash', ['bash', '-c', {command!r}], {environment!r})"
        return describe(RUN(CONFIG, program, ""))


def describe(result: RunResult) -> str:
    """What the policy reads of a run."""
    if result.exit_code is None:
        raise TimeoutError(f"ended by a limit of the sandbox ({CONFIG.timeout_s:g} s); output: {result.stdout[:200]}")
    failure = f"exit code {result.exit_code}" if result.exit_code else ""
    return "\n".join(filter(None, (result.stdout.rstrip(), result.stderr.rstrip(), failure))) or "no output"
