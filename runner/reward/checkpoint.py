"""Looks at a reward model's folder without torch: whether it is a model, with weights that can run no code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from runner.core.errors import EnvironmentProblem, SecurityRefusal

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")  # how their classes are called
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check(path: str) -> None:
    """Raise EnvironmentProblem or SecurityRefusal; a hub id, which is not here, passes."""
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith(("/", ".", "~")) or path.count("/") > 1:
            raise EnvironmentProblem(
                f"reward.path={path}: no such folder; give the folder of a reward model or a hub id"
            )
        return
    if not (folder / "config.json").is_file():
        what = "a PEFT adapter" if (folder / "adapter_config.json").exists() else "no model folder (no config.json)"
        raise EnvironmentProblem(f"reward.path={path} is {what}; give the folder of a whole reward model")
    refuse_language_model(path, json.loads((folder / "config.json").read_text()).get("architectures"))
    if list(folder.glob("*.safetensors")):
        return
    if pickles := sorted(found.name for pattern in PICKLES for found in folder.glob(pattern)):
        raise SecurityRefusal(
            f"reward.path={path} has its weights as pickles ({pickles[0]}), which can run code when loaded\n"
            "  convert them once, where you trust them: "
            "AutoModelForSequenceClassification.from_pretrained(...).save_pretrained(...)"
        )
    raise EnvironmentProblem(f"reward.path={path} holds no weights (*.safetensors)")


def refuse_language_model(path: str, architectures: Sequence[str] | None) -> None:
    """Raise EnvironmentProblem where a model's config says that it writes text."""
    if found := next((name for name in architectures or () if name.endswith(LANGUAGE_MODELS)), None):
        raise EnvironmentProblem(
            f"reward.path={path} is a language model ({found}), not a sequence classifier\n"
            "  make a reward model of it: run algorithm=rm model=hf model.path=… data=… (docs/preference.md)"
        )
