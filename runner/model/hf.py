"""Load a causal LM or image-text model from a folder or hub id; weights from safetensors only.

The model's own code runs only with model.trust_remote_code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoTokenizer,
)
from transformers.utils.hub import cached_file, extract_commit_hash
from transformers.utils.peft_utils import find_adapter_config_file

from runner.core.errors import CheckpointError, EnvironmentProblem, SecurityError
from runner.core.progress_bars import no_load_report, no_progress_bar
from runner.interfaces import Decide
from runner.model.auto_class import auto_class, is_image_text, refuse_other_kind
from runner.model.batch_layout import check_row_length, max_row_length
from runner.model.causal_lm import model_class_for_head
from runner.model.config import HfConfig
from runner.model.image_processor import load_image_processor
from runner.model.image_reader import FileImageReader
from runner.model.initial_weights import (
    DTYPES,
    HEADS,
    CheckArchitecture,
    InstallFusedOps,
    WeightsSource,
    init_with_seed,
    place_on_device,
    refuse_nonfinite_weights,
)
from runner.model.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    TOKENIZERS,
    adapter_base,
    check_adapter_base,
    check_model_folder,
    has_tokenizer,
    is_adapter,
    read_adapter_config,
    read_header,
    read_json,
    refuse_quantized,
)
from runner.model.peft_adapter import attach_adapter
from runner.model.transformers_model import TransformersModel
from runner.spec.base import Dtype, Head

SAFE_ENDINGS = (".safetensors", ".safetensors.index.json")


def tokenizer(config: HfConfig, key: str = "model.path") -> Any:
    """The model's tokenizer; `key` is the option that says its path.

    Raises EnvironmentProblem if it cannot be had, SecurityError if it is code.
    """
    path = config.tokenizer or config.path
    path = _check_path(path, "model.tokenizer" if config.tokenizer else key)
    revision = None if config.tokenizer else config.revision
    if not config.tokenizer:
        weights = find_weights(config, key)
        own = weights.adapter is not None and has_tokenizer(weights.adapter)
        path, revision = (str(weights.adapter), None) if own else (weights.path, weights.revision)
    if Path(path).is_dir() and not has_tokenizer(path):  # of which transformers would make an empty one
        option = key if key != "model.path" else "model.tokenizer"
        raise EnvironmentProblem(
            f"{path} has no tokenizer ({', '.join(TOKENIZERS)})\n"
            f"  copy its tokenizer into the folder, or in a job type {option}=FOLDER"
        )
    with translate_errors(path, key):
        made = AutoTokenizer.from_pretrained(
            path,
            revision=revision,
            trust_remote_code=config.trust_remote_code,
            clean_up_tokenization_spaces=False,  # which would turn the text "a , b != c" into "a, b!= c"
        )
    if not made.chat_template and (file := Path(path) / "chat_template.json").is_file():  # an older form of processors
        made.chat_template = read_json(file).get("chat_template")
    return made


def image_reader(
    config: HfConfig, tokenizer: Any, min_pixels: int | None = None, max_pixels: int | None = None
) -> FileImageReader | None:
    """The reader of images for the model; None for one of text alone. Raises what `architecture` raises."""
    found = architecture(config, tokenizer)
    if not is_image_text(found):
        return None
    weights = find_weights(config)
    path, revision = weights.path, weights.revision
    if weights.adapter is not None and (weights.adapter / "preprocessor_config.json").is_file():
        path, revision = str(weights.adapter), None  # which has the limits of pixels of its training
    load = partial(load_image_processor, path, revision, found, tokenizer, min_pixels=min_pixels, max_pixels=max_pixels)
    return FileImageReader(load)


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
    module first (see `place_on_device`), `admit` its config before that; `stored` is the data type of its weights,
    None = that it computes in. On the meta device no weights are read, nor checked.
    Raises SpecError if rows of `longest` tokens are too long for it, EnvironmentProblem if it cannot be had or does not
    fit the tokenizer, SecurityError if its weights are pickles or it is code.
    """
    key = key if init_from is None else "init_from"
    kept = DTYPES[stored or config.compute_dtype]
    weights = find_weights(config, key, init_from)
    path, scratch = weights.path, config.from_scratch and init_from is None
    if scratch and weights.adapter is not None:
        raise EnvironmentProblem(
            f"model.from_scratch=true and {key}={weights.adapter}, an adapter: leave one of them out"
        )
    with translate_errors(path, key):
        source = weights_source(weights, f"from seed {seed}" if scratch else None)
        # one commit for config and weights
        config = config.model_copy(update={"revision": source.commit or weights.revision})
        architecture = _architecture(path, key, config, head)
        auto = auto_class(architecture, head)
        check_row_length(longest, max_row_length(architecture))
        if admit is not None:
            admit(architecture)
        if scratch or device.type == "meta":
            options = {"dtype": torch.float32 if scratch else kept, "trust_remote_code": config.trust_remote_code}
            module = init_with_seed(lambda: auto.from_config(architecture, **options), seed)
        else:
            module = init_with_seed(lambda: _load_pretrained(auto, path, key, config, architecture, kept, decide), seed)
            source = replace(source, unread=_unread_tensors(source.files, module))
    _check_vocabulary(module, tokenizer)
    if head != "scalar" and device.type != "meta":  # where the config is not the published one
        _fix_generation_config(path, module.generation_config, decide)
    module = place_on_device(module, kept, device, fit, DTYPES[config.compute_dtype], config.quantization, decide)
    if weights.adapter is not None:
        if device.type != "meta":
            check_adapter_base(weights.adapter, path, decide, config.quantization)
        module = attach_adapter(module, weights.adapter, head=head)
    return model_class_for_head(head)(module, tokenizer, config, seed=seed, decide=decide, source=source)


@dataclass(frozen=True, slots=True)
class WeightsLocation:
    """The folder or hub id of a model's weights, and the folder of an adapter that is put on it."""

    path: str
    revision: str | None = None
    adapter: Path | None = None


def find_weights(config: HfConfig, key: str = "model.path", init_from: str | None = None) -> WeightsLocation:
    """Where `config`, or the folder `init_from`, has its weights.

    An adapter's base is model.base, or the one that the adapter names; that of an adapter in `init_from` is the
    model's. Raises EnvironmentProblem, CheckpointError or SecurityError for a folder that cannot be used, naming `key`.
    """
    adapter, path = _find_adapter(init_from or config.path, key, None if init_from else config.revision)
    if init_from is not None and adapter is not None:
        return replace(find_weights(config), adapter=adapter)
    if adapter is not None:
        base = _check_path(config.base or adapter_base(adapter), "model.base" if config.base else key)
        return WeightsLocation(base, read_adapter_config(adapter).get("revision"), adapter)
    if config.base is not None and init_from is None:
        raise EnvironmentProblem(f"model.base={config.base} is for an adapter, but {key}={path} is none; leave it out")
    return WeightsLocation(path, None if init_from else config.revision)


def _find_adapter(path: str, key: str, revision: str | None) -> tuple[Path | None, str]:
    """The adapter's folder, downloaded where it is on the hub, or None; and the path that was checked."""
    path = _check_path(path, key)
    if Path(path).exists():
        return (Path(path) if is_adapter(path) else None), path
    with translate_errors(path, key):
        if find_adapter_config_file(path, revision=revision) is None:
            return None, path
        if cached_file(path, "config.json", revision=revision, _raise_exceptions_for_missing_entries=False):
            raise _both_error(path, key)
        with no_progress_bar():
            files = [ADAPTER_CONFIG, ADAPTER_WEIGHTS, *TOKENIZERS, "*.jinja", "*.json"]
            return Path(snapshot_download(path, revision=revision, allow_patterns=files)), path


def weights_source(weights: WeightsLocation, drawn: str | None = None) -> WeightsSource:
    """The folder, or the commit that `revision` means now. Raises EnvironmentProblem if it is an adapter."""
    if Path(weights.path).exists():
        folder = Path(weights.path)
        return WeightsSource(folder=folder, drawn=drawn, adapter=weights.adapter, files=folder)
    config = cached_file(weights.path, "config.json", revision=weights.revision)
    commit, files = extract_commit_hash(config, None), Path(str(config)).parent
    return WeightsSource(commit=commit, drawn=drawn, adapter=weights.adapter, files=files)


def _both_error(path: str, key: str) -> EnvironmentProblem:
    text = f"{key}={path} has a model (config.json) and an adapter (adapter_config.json); transformers would load both"
    return EnvironmentProblem(f"{text}\n  move one of them into its own folder, and give the folder that you need")


def architecture(config: HfConfig, tokenizer: Any, init_from: str | None = None, head: Head = "lm") -> Any:
    """The transformers config of the model that `build` loads. Raises what `build` raises for such a path."""
    key = "model.path" if init_from is None else "init_from"
    weights = find_weights(config, key, init_from)
    with translate_errors(weights.path, key):
        return _architecture(weights.path, key, config.model_copy(update={"revision": weights.revision}), head)


def _architecture(path: str, key: str, config: HfConfig, head: Head) -> Any:
    """The model's config without entries that fetch code or pickles: attention kernels, odd weight files."""
    found = AutoConfig.from_pretrained(path, revision=config.revision, trust_remote_code=config.trust_remote_code)
    refuse_other_kind(found, f"{key}={path}", head)
    refuse_quantized(f"{key}={path}", getattr(found, "quantization_config", None))  # of a hub id
    found._attn_implementation = None  # transformers then takes the best of its own
    if head == "scalar":
        found.num_labels = 1
    if (weights := getattr(found, "transformers_weights", None)) and not str(weights).endswith(SAFE_ENDINGS):
        raise SecurityError(f"{key}={path}: its config names {weights} as weights; only safetensors are loaded")
    return found


def _load_pretrained(
    auto: Any, path: str, key: str, config: HfConfig, architecture: Any, dtype: torch.dtype, decide: Decide
) -> Any:
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"  # or transformers requests a conversion of pickles from the hub
    with no_progress_bar(), no_load_report():
        loaded: Any = auto.from_pretrained(
            path,
            config=architecture,
            revision=config.revision,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    module, info = loaded
    for name, stored, expected in sorted(info.get("mismatched_keys", ())):
        raise CheckpointError(
            f"{key}={path}: {name} has shape {list(stored)}, but {list(expected)} in config.json: another model's "
            "weights, or a transposed tensor\n"
            "  copy or download both again"
        )
    absent = sorted(set(info["missing_keys"]) - {"score.weight"})
    if absent:
        raise EnvironmentProblem(
            f"{key}={path} lacks {len(absent)} of the model's weights, e.g. {absent[0]}; is it a causal LM?\n"
            "  model.from_scratch=true keeps the architecture of model.path and initializes random weights"
        )
    unused = sorted(set(info["unexpected_keys"]) - HEADS)
    if unused:
        reason = f"the architecture does not have {unused[0]} and similar tensors"
        decide(key, "all weights", f"{len(unused)} ignored", reason)
    refuse_nonfinite_weights(module.state_dict(), f"{key}={path}")
    return module


def _unread_tensors(folder: Path | None, module: Any) -> tuple[str, ...]:
    """Names of a folder's tensors that transformers skips, as the architecture does not have them."""
    patterns = [re.compile(pattern) for pattern in module._keys_to_ignore_on_load_unexpected or ()]
    shards = folder.glob("*.safetensors") if folder and patterns else ()
    names = [name for shard in shards for name in read_header(shard)]
    return tuple(name for name in names if any(pattern.search(name) for pattern in patterns))


def _fix_generation_config(path: str, config: Any, decide: Decide) -> None:
    """Remove sampling options without do_sample, which transformers loads but refuses to save.

    Found here, and not when the trained model is written.
    """
    try:
        config.validate(strict=True)
    except ValueError as error:
        decide("generation_config", "as published", "do_sample=true", " ".join(str(error).split())[:200])
        config.do_sample = True
    with translate_errors(path):
        config.validate(strict=True)


def _check_path(path: str, key: str) -> str:
    """The folder or hub id; raises for a local path that is missing, no model folder, or has only pickles."""
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith(("/", ".", "~")) or path.count("/") > 1:
            raise EnvironmentProblem(f"{key}={path}: no such folder; set it to a model folder or a hub id (owner/name)")
        return path
    if key == "model.tokenizer":
        return str(folder)
    if is_adapter(folder) and (folder / "config.json").exists():
        raise _both_error(path, key)
    check_model_folder(folder, key, needs_weights=False)  # checked before; a shape is enough for some
    return str(folder)


@contextmanager
def translate_errors(path: str, key: str = "model.path") -> Iterator[None]:
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
            hint = "if you have read that code, type model.trust_remote_code=true" if ours else f"choose another {key}"
            raise SecurityError(f"{path}{_kind(path)} contains Python code, which is not executed\n  {hint}") from error
        raise EnvironmentProblem(f"{path} cannot be loaded: {_first_lines(error)}") from error


def _kind(path: str) -> str:
    """The model type of a path that transformers has read, in words; nothing for a tokenizer alone."""
    file = cached_file(path, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return f" (model_type={read_json(Path(file)).get('model_type')})" if file else ""


def _first_lines(error: Exception) -> str:
    """Two lines, without the lists of all models that transformers knows."""
    text = " ".join(str(error).strip().splitlines()[:2])
    return re.split(r"Model type should be one of|, or contain one of the following strings", text)[0].strip()


def _check_vocabulary(module: Any, tokenizer: Any) -> None:
    rows = module.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise EnvironmentProblem(
            f"the tokenizer has {len(tokenizer)} ids, and the embedding {rows} rows\n"
            "  set model.tokenizer to the tokenizer of this model"
        )
