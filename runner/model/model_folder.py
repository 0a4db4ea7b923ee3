"""What a model folder is, whether its files are whole, whether the hub can be reached; without torch.

Weights are judged by their headers: a Git-LFS pointer, an empty or truncated file, an index that does not fit its
files, numbers that are quantized. Each is an error that names the file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import CheckpointError, EnvironmentProblem, SecurityError
from runner.core.fsync_io import sha256
from runner.core.untrusted_text import parse_json

if TYPE_CHECKING:  # it brings torch
    from runner.interfaces import Decide

MODELSCOPE = "modelscope:"  # before the id of a model of ModelScope
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MODEL_CARD = "README.md"
PROMPT_STYLE = "prompt_style"  # in the card's head, where prompts are plain text
BASE_WEIGHTS = "base_weights"  # in the card's head of an adapter: the digest of its base's weights
BASE_QUANTIZATION = "base_quantization"  # there too: model.quantization of the base that it was trained on
INDEX = "model.safetensors.index.json"
LAYER = re.compile(r"\.(\d+)\.")  # layers.3.mlp, h.3.attn, of experts more than that
INCOMPLETE = "copy or download all of its files"
LFS_POINTER = b"version https://git-lfs"
TOKENIZERS = ("tokenizer*", "vocab.*", "*.model")
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # bytes
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
HEADER_LIMIT = 100_000_000  # bytes; safetensors' own
# which change the base's weights as they are made, so that the saved adapter fits the changed base alone
INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


def says_plain_text(folder: Path) -> bool:
    """Whether the model card of an export says that prompts were plain text in training, and no chat."""
    return _card_value(folder, PROMPT_STYLE) == "text"


def base_quantization(folder: str | Path) -> str | None:
    """How the base of an adapter was quantized in training; None = its model card says nothing."""
    return _card_value(Path(folder), BASE_QUANTIZATION)


def _card_value(folder: Path, name: str) -> str | None:
    """A value in the head of an export's model card."""
    card = folder / MODEL_CARD
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines() if card.is_file() else []
    return next((line.removeprefix(f"{name}: ") for line in lines[:40] if line.startswith(f"{name}: ")), None)


def exported_step(folder: Path) -> int | None:
    """The step that the model card of an export names; None = there is no such card."""
    card = folder / MODEL_CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = re.search(r"^\| step \| (\d+) of \d+ \|$", text, re.MULTILINE)
    return int(found[1]) if found else None


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder is a PEFT adapter without its base."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder has the files of a tokenizer."""
    return any(any(Path(folder).glob(pattern)) for pattern in TOKENIZERS)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The settings of a PEFT adapter. Raises CheckpointError if they cannot be read.

    Raises EnvironmentProblem for an adapter that is not LoRA, or that fits no published base.
    """
    config = read_json(folder / ADAPTER_CONFIG)
    if (kind := str(config.get("peft_type"))) != "LORA":
        raise EnvironmentProblem(
            f"{folder}: an adapter of type {kind}; only LORA is supported\n"
            "  merge it into its base with peft: merge_and_unload(), then give that folder"
        )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(INITS_THAT_CHANGE_THE_BASE):
        raise EnvironmentProblem(
            f"{folder}: init_lora_weights={init} changed the base weights, and the adapter does not contain that "
            "change\n"
            "  save it with peft's path_initial_model_for_weight_conversion, or merge it into its base"
        )
    return config


def adapter_base(folder: str | Path) -> str:
    """The folder or hub id of an adapter's base. Raises EnvironmentProblem if there is none here."""

    folder = Path(folder)
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise EnvironmentProblem(f"{folder / ADAPTER_CONFIG} does not name the adapter's base; {BASE_HINT}")
    for path in (Path(base).expanduser(), folder / base):
        if (path / "config.json").is_file():
            return str(path.resolve())
    if is_hub_id(base) and not Path(base).expanduser().exists():
        return base
    raise EnvironmentProblem(f"{folder}: its base, {base}, is not a model folder here; {BASE_HINT}")


BASE_HINT = "set the folder or hub id of its base: model.base=FOLDER (run infer, chat, serve and export: --base FOLDER)"


def check_adapter_base(folder: Path, base: str, decide: Decide, quantization: str | None = None) -> None:
    """Compare an adapter's base with the one that it was trained on, where the adapter records that.

    base: a folder or hub id; quantization: how the base is stored here; facts say where it is another than in
    training. Reads a folder's weights in full (1 to 2 GB a second). Raises CheckpointError for other
    weights; a fact says that they could not be compared.
    """
    recorded, config = _card_value(folder, BASE_WEIGHTS), read_adapter_config(folder)
    if (trained := base_quantization(folder)) != quantization:
        text = f"the adapter {folder} was trained on {trained or 'a base in 16 or 32 bits'}, so answers differ a little"
        decide.record_fact("adapter's base", quantization or "not quantized", text)
    named, is_local = config.get("base_model_name_or_path"), Path(base).is_dir()
    if recorded and is_local:
        if (found := weights_digest(Path(base))) != recorded:
            raise CheckpointError(
                f"{base} has other weights (sha256 {found[:12]}) than the base of the adapter {folder} "
                f"({recorded[:12]}); {BASE_HINT}\n"
                f"  for the same weights in other files, remove the line {BASE_WEIGHTS} from {folder / MODEL_CARD}"
            )
    elif is_local or base != named or not config.get("revision"):
        lacks = f"the adapter {folder} names {named} as its base, and records no "
        lacks += "sha256 of its weights" if is_local else "commit of it"
        decide.record_fact("adapter's base", base, f"not compared: {lacks}, so other weights would not be noticed")


def weights_digest(folder: Path) -> str:
    """One digest of a folder's weights."""
    return files_digest(sorted(folder.glob("*.safetensors")))


def files_digest(files: Iterable[Path]) -> str:
    """One digest of the names and contents of files."""
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.name} {sha256(path)}\n".encode())
    return whole.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file of a model. Raises CheckpointError if it cannot be read."""
    _refuse_stub(path)
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy or download it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object; copy or download it again")
    return found


def check_model_folder(folder: Path, key: str, *, needs_weights: bool = True) -> None:
    """Check the files of a model or an adapter; `key` is the option that names the folder.

    needs_weights: whether a folder without them is refused, too; of a model each layer has to have some, since
    transformers allocates the whole model before it finds what is missing. Raises CheckpointError for a file that is
    damaged or missing, EnvironmentProblem for quantized weights, SecurityError for pickles.
    """
    adapter = is_adapter(folder)
    if not adapter and not (folder / "config.json").exists():
        raise EnvironmentProblem(f"{key}={folder} is not a model folder: it has no config.json")
    config = read_adapter_config(folder) if adapter else read_json(folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)
    shards = sorted(folder.glob(ADAPTER_WEIGHTS if adapter else "*.safetensors"))
    if not shards:
        _refuse_other_formats(folder, key)
        if needs_weights:
            raise CheckpointError(f"{key}={folder} has no weights (*.safetensors); {INCOMPLETE}")
    dtypes, layers = dict[str, str](), set[int]()
    for shard in shards:
        for name, tensor in read_header(shard).items():
            layers.update(int(number[1]) for number in LAYER.finditer(name))
            if len(tensor["shape"]) > 1 and tensor["dtype"] not in FLOATS:
                dtypes.setdefault(tensor["dtype"], f"{name} in {shard.name}")
    wrong = [f"{where} is {dtype}" for dtype, where in dtypes.items()]
    refuse_quantized(f"{key}={folder}", config.get("quantization_config"), wrong)
    if (folder / INDEX).is_file():
        _check_index(folder / INDEX)
    text_config = config.get("text_config", config)
    count = text_config.get("num_hidden_layers") if isinstance(text_config, dict) else None
    expected = range(count if needs_weights and not adapter and isinstance(count, int) else 0)
    if (absent := next((layer for layer in expected if layer not in layers), None)) is not None:
        text = f"{key}={folder} has no weights of layer {absent}; its config.json says that it has {count} layers"
        raise CheckpointError(f"{text}; {INCOMPLETE}")


def refuse_quantized(source: str, quantization: object, wrong: Sequence[str] = ()) -> None:
    """Raise EnvironmentProblem for a config's `quantization_config`, or quantized tensors (`wrong`)."""
    if not (quantization or wrong):
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    what = "; ".join([*wrong, *([f"quantization_config has {method}"] if method else [])])
    hint = "; adapter=lora model.quantization=nf4|int8 quantizes that" if method == "bitsandbytes" else ""
    raise EnvironmentProblem(
        f"{source} is quantized ({what or quantization}), which is not supported\n"
        f"  use the model that it was made of, in float32, bfloat16 or float16{hint}"
    )


def _check_index(path: Path) -> None:
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path} has no weight_map, which lists the file of each tensor; copy or download it again"
        )
    if not isinstance(index.get("metadata"), dict):
        raise CheckpointError(f'{path} has no metadata, which transformers requires; add "metadata": {{}}')
    for file in sorted({str(file) for file in weight_map.values()}):
        shard = path.parent / file
        wanted = [name for name, where in weight_map.items() if where == file]
        if shard.parent != path.parent or not shard.is_file():
            raise CheckpointError(
                f"{path.parent} lacks {file}, which {path.name} names for {len(wanted)} tensors; download it again"
            )
        if missing := sorted({*wanted} - read_header(shard).keys()):
            raise CheckpointError(f"{shard} lacks {missing[0]}, which {path.name} lists; copy or download both again")


def refuse_gguf(path: Path) -> None:
    """Raise EnvironmentProblem for a GGUF file, or a folder that has one."""
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if files and files[0].is_file():
        raise EnvironmentProblem(
            f"{files[0]} is a GGUF file, a format of llama.cpp that is not supported here\n"
            "  use the Hugging Face folder from which it was made: config.json, *.safetensors and the tokenizer"
        )


def _refuse_other_formats(folder: Path, key: str) -> None:
    refuse_gguf(folder)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickles:
        raise SecurityError(
            f"{key}={folder} has pickle weights ({pickles[0]}), which can run code when they are loaded\n"
            "  convert them once, if you trust them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Type, shape and place of each tensor of a safetensors file. Raises CheckpointError if truncated."""
    _refuse_stub(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, HEADER_LIMIT):
            raise _truncated_file_error(path, "its header is incomplete, or it is not a safetensors file")
        text = file.read(length)
    try:
        header = parse_json(text)
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = _checked_end(tensors)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _truncated_file_error(path, f"its header cannot be read ({error})") from error
    if size - 8 - length != end:
        raise _truncated_file_error(path, f"it has {size} bytes, but {8 + length + end} by its header")
    return tensors


def _checked_end(tensors: Mapping[str, Mapping[str, Any]]) -> int:
    """The end of the last tensor.

    Raises ValueError where a size is not that of the shape, or tensors overlap.
    """
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = tensor["data_offsets"]
        if (wide := SIZES.get(tensor["dtype"])) is not None and last - first != prod(tensor["shape"]) * wide:
            raise ValueError(f"{name} has {last - first} bytes, which does not match its shape {tensor['shape']}")
        if first != end:
            raise ValueError(f"{name} begins at byte {first}, where {before or 'the file'} ends at {end}")
        end, before = int(last), name
    return end


def _truncated_file_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is incomplete or damaged: {why}; copy or download it again")


def _refuse_stub(path: Path) -> None:
    """Raise CheckpointError for a missing or empty file, or the pointer that Git LFS leaves instead."""
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not start:
        raise CheckpointError(f"{path} is empty; copy or download it again")
    if start == LFS_POINTER:
        raise CheckpointError(
            f"{path} is a Git-LFS pointer, not the file itself\n"
            f"  git -C {path.parent} lfs pull\n"
            f"  or download it again: hf download OWNER/NAME --local-dir {path.parent}"
        )


ANSWER_S = 5.0  # for the hub to answer
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def check(path: str, key: str = "") -> None:
    """Raise EnvironmentProblem for a hub id whose files are neither cached nor available.

    The hub is switched off, or does not answer. `key` is the option that says the path, if one does.
    """
    if Path(path).expanduser().exists() or is_cached(path, os.environ):
        return
    if fault := hub_fault(os.environ):
        named, then = (f"{key}={path}", f"{key}=FOLDER") if key else (path, "that folder")
        text = f"{named} is not a folder here and not in the hub's cache, and {fault}"
        fetch = f"hf download {path} --local-dir {path.rpartition('/')[2]}"
        raise EnvironmentProblem(
            f"{text}\n  {fetch}  # on a machine that reaches the hub; then copy the folder, and type {then}"
        )


def fetch_modelscope(path: str, revision: str | None = None) -> str:
    """The folder that a model of ModelScope is downloaded to. Raises EnvironmentProblem.

    revision: of the model's repository; None: its newest
    """
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        text = f"{MODELSCOPE}{path} needs the package modelscope: pip install 'posttrain-run[modelscope]'"
        raise EnvironmentProblem(text) from error
    from runner.core.http_client import modelscope_site, site_fault

    hint = f"modelscope download --model {path} --local_dir {path.rpartition('/')[2]}"
    hint += "  # on a machine with access to it; then copy the folder here, and type its path"
    if fault := site_fault(modelscope_site(os.environ), ANSWER_S, os.environ):
        raise EnvironmentProblem(f"{MODELSCOPE}{path}: {fault}\n  {hint}")
    try:
        return str(snapshot_download(path, revision=revision))
    except Exception as error:  # modelscope's own, requests', OSError
        raise EnvironmentProblem(f"{MODELSCOPE}{path} cannot be downloaded: {error}\n  {hint}") from error


def is_hub_id(path: str) -> bool:
    """Whether a path that does not exist can be a hub id (owner/name).

    One that begins with an existing folder cannot.
    """
    if Path(path).expanduser().exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        return False
    return "/" not in path or not Path(path.split("/")[0]).is_dir()


def is_cached(path: str, environment: Mapping[str, str]) -> bool:
    """Whether a version of this model is in the cache of the hub."""
    home = environment.get("HF_HOME", f"{environment.get('XDG_CACHE_HOME', '~/.cache')}/huggingface")
    cache = Path(environment.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    return any((cache / f"models--{path.replace('/', '--')}").glob("snapshots/*/config.json"))


def hub_fault(environment: Mapping[str, str]) -> str | None:
    """Why nothing can be fetched from the hub; None = nothing is known against it."""
    for name in OFFLINE:
        if environment.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name}={environment[name]} forbids fetching it"
    from runner.core.http_client import site_fault

    return site_fault(environment.get("HF_ENDPOINT", "https://huggingface.co"), ANSWER_S, environment)
