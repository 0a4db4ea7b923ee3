"""An adapter by itself, as vLLM reads it: a PEFT folder for each version, of which the newest stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PARTS = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_embedding_B")


def of_adapter(name: str) -> bool:
    """Whether a tensor has the name of an adapter's, and not of a model's."""
    return any(part in name for part in PARTS)


class Adapters:
    """Folders below `room`, with the config that the adapter has in `source`."""

    def __init__(self, source: Path, room: Path) -> None:
        self._config, self._room, self._count = (source / CONFIG).read_text(), room, 0
        self.request: Any = None  # vLLM's, for the newest

    @property
    def rank(self) -> int:
        """The largest of its matrices' ranks."""
        config = json.loads(self._config)
        return max(config["r"], *config.get("rank_pattern", {}).values(), 0)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the next answers be drawn with these. vLLM reads the folder when it is first asked with the request."""
        from vllm.lora.request import LoRARequest

        self._count += 1  # a number of its own for each: vLLM keeps what it has read under it, and its cache too
        folder = self._room / f"adapter-{self._count}"
        folder.mkdir()
        (folder / CONFIG).write_text(self._config)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
        self.request = LoRARequest(f"adapter-{self._count}", self._count, str(folder))
        shutil.rmtree(self._room / f"adapter-{self._count - 1}", ignore_errors=True)
