"""Generate with an exported folder, by transformers (and peft) alone.

This program imports nothing of this project, so it sees what any other user of the folder sees.

python export_probe.py < {"folder", "base": that an adapter is loaded onto, null = the one that it names, "dtype",
                          "threads", "questions": [{"text", "style", "answer", "image": its path}]}
                       > {"stack": versions, "answers": [{"prompt_ids", "greedy_ids", "logprobs": of the answer's ids}]}
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

# It computes on the CPU, so neither torch nor transformers may load torch_npu, which fails without CANN.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.modules["torch_npu"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)


def load(folder: Path, base: str | None, dtype: str) -> Any:
    """The folder's model in evaluation mode; an adapter with its base."""
    is_adapter, revision = (folder / "adapter_config.json").is_file(), None
    if is_adapter and base is None:
        from peft import PeftConfig

        config = PeftConfig.from_pretrained(str(folder))
        base, revision = config.base_model_name_or_path, config.revision
    source: Any = base or folder
    has_vision = hasattr(AutoConfig.from_pretrained(source, revision=revision), "vision_config")
    kind = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    name = "dtype" if version("transformers") >= "5" else "torch_dtype"  # releases before 4.56 know the second alone
    model = kind.from_pretrained(source, revision=revision, **{name: getattr(torch, dtype)}).eval()
    if is_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder).eval()
    if (folder / "generation_config.json").is_file():  # which an adapter's base does not have
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def prompt_ids(tokenizer: Any, text: str, style: str) -> list[int]:
    """A prompt tokenized by the folder's tokenizer."""
    if style == "chat":
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def image_inputs(model: Any, tokenizer: Any, folder: Path, text: str, image: str) -> tuple[list[int], dict[str, Any]]:
    """The ids of a message with an image and its values, by the folder's processor and template."""
    from PIL import Image
    from transformers import AutoImageProcessor

    choice = {"backend": "pil"} if version("transformers") >= "5" else {"use_fast": False}  # without torchvision
    processor = AutoImageProcessor.from_pretrained(folder, **choice)
    values = dict(processor(images=[Image.open(image)], return_tensors="pt"))
    content = [{"type": "image"}, {"type": "text", "text": text}]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    count = int(values["image_grid_thw"].prod()) // processor.merge_size**2
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return [one for i in ids for one in [i] * (count if i == model.config.image_token_id else 1)], values


def with_kinds(model: Any, ids: torch.Tensor, values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward; newer models are told which ids are of images."""
    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    known = inspect.signature(plain.forward).parameters
    kinds = {"mm_token_type_ids": (ids == model.config.image_token_id).long()} if "mm_token_type_ids" in known else {}
    return {"input_ids": ids, **values, **(kinds if values else {})}


@torch.no_grad()
def answer(model: Any, tokenizer: Any, folder: Path, question: dict[str, Any]) -> dict[str, Any]:
    """The greedy completion, and log p of each id of the question's completion."""
    given, values = question["answer"], dict[str, Any]()
    if question["image"] is None:
        prompt = prompt_ids(tokenizer, question["text"], question["style"])
    else:
        prompt, values = image_inputs(model, tokenizer, folder, question["text"], question["image"])
    own = model.generation_config
    ends = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    settings = GenerationConfig(do_sample=False, max_new_tokens=question["max_new_tokens"], eos_token_id=ends)
    settings.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    model.generation_config = settings  # without the folder's sampling options
    start = question["begin"] + prompt
    ids = torch.tensor([start])
    inputs = with_kinds(model, ids, values)
    greedy = model.generate(**inputs, attention_mask=torch.ones_like(ids))[0, len(start) :].tolist()
    model.generation_config = own
    logits = model(**with_kinds(model, torch.tensor([start + given]), values)).logits[0, len(start) - 1 : -1].float()
    logprobs = torch.log_softmax(logits, -1)[range(len(given)), given].tolist() if given else []
    return {"prompt_ids": start, "greedy_ids": greedy, "logprobs": logprobs}


def main() -> None:
    """Read the questions from stdin, write the answers to stdout."""
    asked = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    torch.set_num_threads(asked["threads"])
    folder = Path(asked["folder"])
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder, asked["base"], asked["dtype"])
    libraries = ["transformers", *(["peft"] if hasattr(model, "peft_config") else [])]
    answers = [answer(model, tokenizer, folder, question) for question in asked["questions"]]
    json.dump({"stack": ", ".join(f"{name} {version(name)}" for name in libraries), "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
