"""The options that name a function or class in the user's own file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field

from runner.core.errors import Problem, SpecError
from runner.core.package import recipes_dir
from runner.spec.base import ComponentConfig, absolute_if_local


class UserCodeConfig(ComponentConfig):
    """A component that is made of the user's code, which runs in processes of its own."""

    path_example: ClassVar[str]  # FILE.py:NAME
    takes_classes: ClassVar[bool] = False
    path: str = Field(min_length=1, description="File and function, e.g. my_reward.py:score.")
    env: tuple[str, ...] = Field(
        default=(), strict=False, description="Further environment variables that are passed to the function."
    )

    @property
    def file(self) -> Path:
        """The file named by `path`; `recipe:FILE.py` is one that is shipped beside the recipes."""
        name = self.path.rpartition(":")[0]
        shipped = name.removeprefix("recipe:")
        return Path(name).expanduser() if shipped == name else recipes_dir() / shipped

    @property
    def function(self) -> str:
        """The function or class named by `path`."""
        return self.path.rpartition(":")[2]

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if str(self.file).endswith(".py") and self.function.isidentifier():
            return found
        wanted = "FILE.py:CLASS" if self.takes_classes else "FILE.py:FUNCTION"
        key = f"{self.group}.path"
        return [*found, (key, f"expected {wanted}, got '{self.path}'; e.g. {key}={self.path_example}")]

    def with_absolute_paths(self) -> Self:
        """The same config with the path of its file made absolute."""
        return self.model_copy(update={"path": f"{absolute_if_local(str(self.file))}:{self.function}"})

    def with_user_files(self, change: Callable[[Path], Path]) -> Self:
        """The same config with the path of its file changed, of which a run keeps a copy."""
        return self.model_copy(update={"path": f"{change(self.file)}:{self.function}"})

    def preflight(self) -> None:
        """Raise SpecError where the file or what it is to have is missing; nothing of it is run."""
        from runner.user_code.source_check import source_fault

        key = f"{self.group}.path"
        if message := source_fault(self.file, self.function, f"{key}={self.path_example}", self.takes_classes):
            raise SpecError([Problem(key, message)])
