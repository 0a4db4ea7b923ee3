"""Select, add and remove the LoRA adapters of a peft model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from runner.core.progress_bars import no_peft_warnings
from runner.model.parameters import cast_on_read


class SharedByAdapters:
    """A base that several adapters share; each use names the one that computes, for a block."""

    module: nn.Module
    inner: Any

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        """Data type of matrix products where it may not be that of the stored weights."""
        raise NotImplementedError

    def adapter_disabled(self) -> AbstractContextManager[Any]:
        """While it computes what its base computes; without an adapter it does anyway."""
        module: Any = self.module
        return nullcontext() if self.module is self.inner else module.disable_adapter()

    @contextmanager
    def adapter_active(self, name: str) -> Iterator[None]:
        """Compute with this adapter of a peft model, whose parameters are the trainable ones meanwhile."""
        module: Any = self.module
        before = module.active_adapter
        module.set_adapter(name)
        try:
            yield
        finally:
            module.set_adapter(before)

    def add_adapter(self, name: str, settings: Any) -> None:
        """Add a peft adapter of these settings (a `peft.PeftConfig`) beside those there are, in float32."""
        module: Any = self.module
        with no_peft_warnings():
            module.add_adapter(name, settings)
        for parameter_name, parameter in module.named_parameters():
            if f".{name}." in parameter_name:
                parameter.data = parameter.data.float()
        if self._compute_dtype is not None:
            cast_on_read(module, self._compute_dtype)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter and free its memory."""
        with no_peft_warnings():
            self.module.delete_adapter(name)  # type: ignore[operator]
