"""What a user can set of the callbacks that plug-ins add."""

from typing import ClassVar

from runner.spec.base import ComponentConfig


class CallbackConfig(ComponentConfig):
    """What sees the start, each finished step and the end of a run; a job has any number of them."""

    group: ClassVar[str] = "callbacks"
