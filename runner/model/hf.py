"""Any Hugging Face causal LM, by folder or hub id. Weights come from safetensors only; no code of the model's runs
unless model.trust_remote_code says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from runner.errors import EnvironmentProblem, SecurityRefusal
from runner.model.build import DTYPES, drawn, placed
from runner.model.causal import CausalLM
from runner.model.config import HfConfig
from runner.model.quiet import no_progress_bar
from runner.protocols import Decide

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SAFE_ENDINGS = (".safetensors", ".safetensors.index.json")


def tokenizer(config: HfConfig) -> Any:
    """The model's tokenizer. Raises EnvironmentProblem if it cannot be had, SecurityRefusal if it is code."""
    path = config.tokenizer or config.path
    path = _checked(path, "model.tokenizer" if config.tokenizer else "model.path")
    revision = None if config.tokenizer else config.revision
    with _worded(path):
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=config.trust_remote_code)


def build(config: HfConfig, *, tokenizer: Any, device: torch.device, seed: int, decide: Decide) -> CausalLM:
    """The model with its own weights, or, with from_scratch, with weights drawn from `seed`.

    Raises EnvironmentProblem if it cannot be had or does not fit the tokenizer, SecurityRefusal if its weights are
    pickles or it is code.
    """
    path = _checked(config.path, "model.path")
    with _worded(path):
        architecture = _architecture(path, config)
        if config.from_scratch:
            module = drawn(lambda: _from_scratch(config, architecture), seed)
        else:
            module = _pretrained(path, config, architecture, decide)
    _check_vocabulary(module, tokenizer)
    _mend_generation_config(path, module.generation_config, decide)
    return CausalLM(placed(module, DTYPES[config.dtype], device), tokenizer, config, seed=seed, decide=decide)


def _architecture(path: str, config: HfConfig) -> Any:
    """The model's config, without what in it could fetch code or pickles: attention kernels, odd weight files."""
    found = AutoConfig.from_pretrained(path, revision=config.revision, trust_remote_code=config.trust_remote_code)
    found._attn_implementation = None  # transformers then takes the best of its own
    weights = getattr(found, "transformers_weights", None)
    if weights and not str(weights).endswith(SAFE_ENDINGS):
        raise SecurityRefusal(f"model.path={path}: its config names {weights} as weights; only safetensors are loaded")
    return found


def _from_scratch(config: HfConfig, architecture: Any) -> nn.Module:
    return AutoModelForCausalLM.from_config(
        architecture, dtype=torch.float32, trust_remote_code=config.trust_remote_code
    )


def _pretrained(path: str, config: HfConfig, architecture: Any, decide: Decide) -> nn.Module:
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"  # or transformers asks a service of the hub to convert pickles
    with no_progress_bar():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=architecture,
            revision=config.revision,
            dtype=DTYPES[config.dtype],
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    module, info = loaded
    absent = sorted(info["missing_keys"]) + [str(key) for key in info.get("mismatched_keys", ())]
    if absent:
        raise EnvironmentProblem(
            f"model.path={path} lacks {len(absent)} of the model's weights, e.g. {absent[0]}; is it a causal LM?\n"
            "  for random weights set model.from_scratch=true"
        )
    unused = sorted(info["unexpected_keys"])
    if unused:
        reason = f"the architecture has no place for {unused[0]} and its like"
        decide("model.path", "all weights", f"{len(unused)} left out", reason)
    return module


def _mend_generation_config(path: str, config: Any, decide: Decide) -> None:
    """Some published models carry sampling options without do_sample, which transformers loads but refuses to save:
    found here, and not when the trained model is written."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        decide("generation_config", "as published", "do_sample=true", " ".join(str(error).split())[:200])
        config.do_sample = True
    with _worded(path):
        config.validate(strict=True)


def _checked(path: str, key: str) -> str:
    """The folder or hub id; raises for a local path that is not there, is no model folder, or holds pickles only."""
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith(("/", ".", "~")) or path.count("/") > 1:
            raise EnvironmentProblem(f"{key}={path}: no such folder; give a model folder or a hub id (owner/name)")
        return path
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise EnvironmentProblem(f"{key}={path} is a PEFT adapter, not a model; give the folder of its base model")
    pickles = sorted(found.name for pattern in PICKLES for found in folder.glob(pattern))
    if key == "model.path" and pickles and not list(folder.glob("*.safetensors")):
        raise SecurityRefusal(
            f"{key}={path} has its weights as pickles ({pickles[0]}), which can run code when loaded, so they are not\n"
            "  convert them once, where you trust them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return str(folder)


@contextmanager
def _worded(path: str) -> Iterator[None]:
    """Turn what transformers raises about a model it cannot get into errors that say what to type."""
    try:
        yield
    except (OSError, ImportError) as error:
        raise EnvironmentProblem(
            f"{path} cannot be loaded: {_first_lines(error)}\n"
            "  is it a model folder, or a hub id that this machine can reach?"
        ) from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise SecurityRefusal(
                f"{path} brings Python code of its own, which is not run\n"
                "  if you have read that code: model.trust_remote_code=true"
            ) from error
        raise EnvironmentProblem(f"{path} cannot be loaded: {_first_lines(error)}") from error


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).strip().splitlines()[:2])


def _check_vocabulary(module: Any, tokenizer: Any) -> None:
    rows = module.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise EnvironmentProblem(
            f"the tokenizer has {len(tokenizer)} ids, the model rows for {rows}\n  set model.tokenizer to one that fits"
        )
