"""Writes an export in 8 or 4 bits beside the export, by llmcompressor of another environment.

export/ ─llmcompressor_guest.py─▶ .export-w8a8.<hex>/ ─ answers compared ─ rename ─▶ export-w8a8/
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from runner.core.errors import EnvironmentProblem
from runner.interfaces import GenerativeModel, TrainableModel, as_generative
from runner.launch.export import staged_folder
from runner.launch.export_check import check_quantized
from runner.model.model_folder import MODEL_CARD
from runner.run_dir.manifest import PromptStyle

GUEST = Path(__file__).with_name("llmcompressor_guest.py")
LARGEST_DIFF = {"w8a8": 0.1, "w4a16": 0.5}  # mean over the tokens of all answers, in nats
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def refuse_quantizing(model: TrainableModel, python: Path) -> None:
    """Raise EnvironmentProblem where the model or the environment will not do."""
    config = model.inner.config
    if model.module is not model.inner and not model.merges:
        raise EnvironmentProblem("--quantize: the export is an adapter\n  type --merge too")
    if as_generative(model) is None or model.media or any(getattr(config, name, 0) for name in EXPERTS):
        raise EnvironmentProblem("--quantize is for dense language models of text; leave it out")
    asks = "from importlib.metadata import version; version('llmcompressor')"
    if subprocess.run([str(python), "-c", asks], capture_output=True, check=False).returncode:
        install = "in an environment of its own: pip install 'llmcompressor>=0.14,<0.15', then --with ENV"
        raise EnvironmentProblem(f"--quantize: {python} has no llmcompressor\n  {install}")


def write_quantized_export(
    model: GenerativeModel, folder: Path, scheme: str, python: Path, prompts: Sequence[str], style: PromptStyle
) -> tuple[Path, str]:
    """Write a quantized copy under the folder's name with -`scheme`; returns it and the check's result.

    python: of an environment with llmcompressor. Raises EnvironmentProblem where it fails, ParityError for other
    answers; an earlier folder is then unchanged.
    """
    target = folder.with_name(f"{folder.name}-{scheme}")
    with staged_folder(target) as new:
        with tempfile.TemporaryDirectory() as logs:  # which llmcompressor writes where it runs
            words = (python, "-P", GUEST, folder.absolute(), new.absolute(), scheme, torch.get_num_threads())
            done = subprocess.run([*map(str, words)], cwd=logs, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise EnvironmentProblem(f"--quantize {scheme}: {python} failed: {last}")
        found = check_quantized(model, new, prompts, style, python, LARGEST_DIFF[scheme])
        card = (folder / MODEL_CARD).read_text(encoding="utf-8").partition("## Check\n")[0]
        text = f"{card}## Check\n\nQuantized to {scheme} by llmcompressor and compared with the run: {found}.\n"
        (new / MODEL_CARD).write_text(text, encoding="utf-8")
    return target, found
