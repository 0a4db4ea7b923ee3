"""Any Hugging Face causal LM, by folder or hub id; weights come from safetensors only.

The model's own code runs only with model.trust_remote_code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.hub import cached_file, extract_commit_hash
from transformers.utils.peft_utils import find_adapter_config_file

from runner.core.errors import EnvironmentProblem, SecurityError
from runner.core.progress_bars import no_progress_bar
from runner.interfaces import Decide
from runner.model.batch_layout import check_row_length, max_row_length
from runner.model.causal_lm import model_class_for_head
from runner.model.config import HfConfig
from runner.model.initial_weights import (
    DTYPES,
    HEADS,
    CheckArchitecture,
    InstallFusedOps,
    WeightsSource,
    init_with_seed,
    place_on_device,
)
from runner.model.transformers_model import TransformersModel
from runner.spec.base import Dtype, Head

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SAFE_ENDINGS = (".safetensors", ".safetensors.index.json")


def tokenizer(config: HfConfig, key: str = "model.path") -> Any:
    """The model's tokenizer; `key` is the option that says its path.

    Raises EnvironmentProblem if it cannot be had, SecurityRefusal if it is code.
    """
    path = config.tokenizer or config.path
    path = _check_path(path, "model.tokenizer" if config.tokenizer else key)
    revision = None if config.tokenizer else config.revision
    with _translate_errors(path, key):
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=config.trust_remote_code)


def build(
    config: HfConfig,
    *,
    tokenizer: Any,
    device: torch.device,
    seed: int,
    decide: Decide,
    head: Head = "lm",
    init_from: str | None = None,
    longest: int = 0,
    key: str = "model.path",
    fit: InstallFusedOps | None = None,
    admit: CheckArchitecture | None = None,
    stored: Dtype | None = None,
) -> TransformersModel:
    """The model with its own weights, those of `init_from`, or, with from_scratch, random from `seed`.

    head="scalar" makes a sequence classifier with one label; a head that the weights lack is drawn from `seed`.
    head="lm+value" is a causal LM with a value head beside it. `key` is the option that says the path; `fit` sees the
    module first (see `placed`), `admit` its config before that; `stored` is the data type of its weights, None = that
    it computes in. On the meta device no weights are read, nor checked.
    Raises SpecError if rows of `longest` tokens are too long for it, EnvironmentProblem if it cannot be had or does not
    fit the tokenizer, SecurityRefusal if its weights are pickles or it is code.
    """
    key = key if init_from is None else "init_from"
    path = _check_path(init_from or config.path, key)
    kept = DTYPES[stored or config.compute_dtype]
    auto, scratch = _AUTO[head], config.from_scratch and init_from is None
    with _translate_errors(path, key):
        source = _weights_source(path, key, config.revision, f"from seed {seed}" if scratch else None)
        config = config.model_copy(
            update={"revision": source.commit or config.revision}
        )  # one commit for config and weights
        architecture = _architecture(path, key, config, head)
        check_row_length(longest, max_row_length(architecture))
        if admit is not None:
            admit(architecture)
        if scratch or device.type == "meta":
            dtype = torch.float32 if scratch else kept
            module = init_with_seed(lambda: _init_random(auto, config, architecture, dtype), seed)
        else:
            module = init_with_seed(lambda: _load_pretrained(auto, path, key, config, architecture, kept, decide), seed)
    _check_vocabulary(module, tokenizer)
    if head != "scalar" and device.type != "meta":  # where the config is not the published one
        _fix_generation_config(path, module.generation_config, decide)
    made = model_class_for_head(head)
    module = place_on_device(module, kept, device, fit, DTYPES[config.compute_dtype])
    return made(module, tokenizer, config, seed=seed, decide=decide, source=source)


def _weights_source(path: str, key: str, revision: str | None, drawn: str | None) -> WeightsSource:
    """The folder, or the hub commit of `revision`. Raises EnvironmentProblem if it is an adapter."""
    if find_adapter_config_file(path, revision=revision) is not None:
        raise _adapter_error(path, key)
    if Path(path).exists():
        return WeightsSource(folder=Path(path), drawn=drawn)
    return WeightsSource(
        commit=extract_commit_hash(cached_file(path, "config.json", revision=revision), None), drawn=drawn
    )


def _adapter_error(path: str, key: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{key}={path} holds a PEFT adapter (adapter_config.json), which would be loaded, trained and saved unasked\n"
        "  give the folder of its base model, or merge the two first, in Python: "
        "AutoPeftModelForCausalLM.from_pretrained(…).merge_and_unload().save_pretrained(…)"
    )


_AUTO: dict[Head, Any] = {
    "lm": AutoModelForCausalLM,
    "scalar": AutoModelForSequenceClassification,
    "lm+value": AutoModelForCausalLM,
}


def _architecture(path: str, key: str, config: HfConfig, head: Head) -> Any:
    """The model's config without entries that fetch code or pickles: attention kernels, odd weight files."""
    found = AutoConfig.from_pretrained(path, revision=config.revision, trust_remote_code=config.trust_remote_code)
    found._attn_implementation = None  # transformers then takes the best of its own
    if head == "scalar":
        found.num_labels = 1
    weights = getattr(found, "transformers_weights", None)
    if weights and not str(weights).endswith(SAFE_ENDINGS):
        raise SecurityError(f"{key}={path}: its config names {weights} as weights; only safetensors are loaded")
    return found


def _init_random(auto: Any, config: HfConfig, architecture: Any, dtype: torch.dtype) -> Any:
    return auto.from_config(architecture, dtype=dtype, trust_remote_code=config.trust_remote_code)


def _load_pretrained(
    auto: Any, path: str, key: str, config: HfConfig, architecture: Any, dtype: torch.dtype, decide: Decide
) -> Any:
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"  # or transformers asks a service of the hub to convert pickles
    with no_progress_bar():
        loaded: Any = auto.from_pretrained(
            path,
            config=architecture,
            revision=config.revision,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    module, info = loaded
    absent = sorted(set(info["missing_keys"]) - {"score.weight"}) + [
        str(key) for key in info.get("mismatched_keys", ())
    ]
    if absent:
        raise EnvironmentProblem(
            f"{key}={path} lacks {len(absent)} of the model's weights, e.g. {absent[0]}; is it a causal LM?\n"
            "  model.from_scratch=true keeps model.path's architecture and draws random weights"
        )
    unused = sorted(set(info["unexpected_keys"]) - HEADS)
    if unused:
        reason = f"the architecture has no place for {unused[0]} and its like"
        decide(key, "all weights", f"{len(unused)} left out", reason)
    return module


def _fix_generation_config(path: str, config: Any, decide: Decide) -> None:
    """Remove sampling options without do_sample, which transformers loads but refuses to save.

    Found here, and not when the trained model is written.
    """
    try:
        config.validate(strict=True)
    except ValueError as error:
        decide("generation_config", "as published", "do_sample=true", " ".join(str(error).split())[:200])
        config.do_sample = True
    with _translate_errors(path):
        config.validate(strict=True)


def _check_path(path: str, key: str) -> str:
    """The folder or hub id; raises for a local path that is missing, no model folder, or has only pickles."""
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith(("/", ".", "~")) or path.count("/") > 1:
            raise EnvironmentProblem(f"{key}={path}: no such folder; give a model folder or a hub id (owner/name)")
        return path
    if key != "model.tokenizer" and (folder / "adapter_config.json").exists():
        raise _adapter_error(path, key)
    pickles = sorted(found.name for pattern in PICKLES for found in folder.glob(pattern))
    if key != "model.tokenizer" and pickles and not list(folder.glob("*.safetensors")):
        raise SecurityError(
            f"{key}={path} has its weights as pickles ({pickles[0]}), which can run code when loaded, so they are not\n"
            "  convert them once, where you trust them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return str(folder)


@contextmanager
def _translate_errors(path: str, key: str = "model.path") -> Iterator[None]:
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
            ours = key.startswith("model.") or key == "init_from"
            hint = "if you have read that code: model.trust_remote_code=true" if ours else f"choose another {key}"
            raise SecurityError(f"{path} brings Python code of its own, which is not run\n  {hint}") from error
        raise EnvironmentProblem(f"{path} cannot be loaded: {_first_lines(error)}") from error


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).strip().splitlines()[:2])


def _check_vocabulary(module: Any, tokenizer: Any) -> None:
    rows = module.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise EnvironmentProblem(
            f"the tokenizer has {len(tokenizer)} ids, the model rows for {rows}\n  set model.tokenizer to one that fits"
        )
