"""Check that an exported folder generates like the run's model.

Another process loads the folder with transformers alone, and gets the run's own prompts; so does one of another
environment, where one is given. Tokens and log-probabilities are compared with those of the run's model.

run's model ─▶ greedy answers, log-probabilities ─┐
folder ─export_probe.py─▶ the same ───────────────┴─▶ ExportCheck | ParityError
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runner.core.auto_choices import Decisions
from runner.core.batch import pack
from runner.core.errors import ParityError
from runner.core.quantized_weight import QuantizedWeight
from runner.core.tolerance import tolerance_of
from runner.data.config import ChatConfig
from runner.data.control_tokens import ControlTokens
from runner.interfaces import GenerativeModel, Request
from runner.interfaces.media import images_of, vocabulary_ids
from runner.launch.infer_export import prompt_ids
from runner.launch.run_messages import ChatMarkers
from runner.model.model_folder import is_adapter
from runner.run_dir.folder import RunFolder
from runner.run_dir.manifest import PromptStyle
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler
from runner.tracker.jsonl import complete_lines
from runner.trainer.answer_evaluator import ShorteningSampler

PROBE = Path(__file__).with_name("export_probe.py")
NUM_PROMPTS = 8
MAX_NEW_TOKENS = 24
LARGEST_CHECKED = 2_000_000_000  # bytes of weights; above, only with --check
IMAGE_PROMPT = "What is in the picture?"  # asked about a drawn one, where the model reads images
FALLBACK = ("Hello", "What is 2 + 2?", "Write one sentence about the sea.")  # for a run without samples


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """The result. max_logprob_diff: in nats, over all tokens of all completions.

    num_same: prompts whose greedy completions are equal
    """

    num_prompts: int
    num_tokens: int
    num_same: int
    max_logprob_diff: float
    by: str

    def __str__(self) -> str:
        count = f"{self.num_same} of {self.num_prompts} greedy completions are the same"
        same = "the same greedy tokens" if self.num_same == self.num_prompts else count
        text = f"{self.num_prompts} prompts, {self.num_tokens} tokens: {same}"
        return f"{text}, log-probabilities within {self.max_logprob_diff:.1e} ({self.by})"


def check_export(
    model: GenerativeModel, folder: Path, prompts: Sequence[str], style: PromptStyle, other: Path | None = None
) -> ExportCheck:
    """Compare an exported folder with its model, which does not change.

    other: the Python of an environment that loads the folder as well. Raises ParityError if the folder cannot be
    loaded, tokenizes a prompt otherwise, generates other tokens in float32, or has log-probabilities that differ by
    more than the data type's rounding.
    """
    asked: list[tuple[str, Path | None]] = [(prompt, None) for prompt in prompts]
    reader, base = images_of(model.tokenizer), None
    has_processor = style == "chat" and (folder / "preprocessor_config.json").is_file()
    with tempfile.TemporaryDirectory() as temporary:
        # Readers without merge_size count tokens by code of their own.
        if reader is not None and has_processor and "merge_size" in reader.how:
            image = Path(temporary, "image.png")
            image.write_bytes(_draw_image())
            asked.append((IMAGE_PROMPT, image))
        if is_adapter(folder) and any(isinstance(p, QuantizedWeight) for p in model.module.parameters()):
            base = str(Path(temporary, "base"))
            _write_dequantized_base(model, Path(base))
        return _compare_answers(model, folder, asked, style, other, base)


def _write_dequantized_base(model: GenerativeModel, folder: Path) -> None:
    """Write the base of an adapter, which holds the numbers that its codes mean in training."""
    model.save_configs(folder)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.hf_tensors("base")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _draw_image() -> bytes:
    """A PNG that no two places of have the same color."""
    from PIL import Image

    content, ramp = io.BytesIO(), Image.linear_gradient("L").resize((96, 64))
    channels = (ramp, ramp.transpose(Image.Transpose.ROTATE_180), Image.radial_gradient("L").resize((96, 64)))
    Image.merge("RGB", channels).save(content, "PNG")
    return content.getvalue()


def _compare_answers(
    model: GenerativeModel,
    folder: Path,
    asked: Sequence[tuple[str, Path | None]],
    style: PromptStyle,
    other: Path | None,
    base: str | None = None,
) -> ExportCheck:
    """See `check_export`; each prompt with its image or None; base: the folder to load an adapter onto."""
    prompts = [prompt for prompt, _ in asked]
    ids, answers, logprobs = _own_answers(model, asked, style)
    expected = list(zip(prompts, ids, answers, logprobs, strict=True))
    questions = _questions(model, asked, ids, answers, style)
    dtype = str(model.compute_dtype).removeprefix("torch.")
    stacks, largest, num_same = list[str](), 0.0, len(prompts)
    for python in (sys.executable, *([str(other)] if other else [])):
        stack, found = _generate_from_folder(python, model, folder, questions, base)
        stacks.append(stack)
        same = sum(one["greedy_ids"] == answer for one, answer in zip(found, answers, strict=True))
        num_same = min(num_same, same)
        for (prompt, own, answer, wanted), theirs in zip(expected, found, strict=True):
            if theirs["prompt_ids"] != vocabulary_ids(own, images_of(model.tokenizer)):
                raise _unlike(stack, f"its tokenizer or chat template gives other tokens for {prompt!r}")
            diff = max((abs(a - b) for a, b in zip(wanted, theirs["logprobs"], strict=True)), default=0.0)
            largest = max(largest, diff)
            if not diff <= (tolerance := tolerance_of(dtype).values):
                text = f"log-probabilities of the completion of {prompt!r} differ by {diff:.2g}; {dtype} explains"
                raise _unlike(stack, f"{text} {tolerance:g}")
            if dtype == "float32" and theirs["greedy_ids"] != answer:
                raise _unlike(stack, f"the greedy completion of {prompt!r} has other tokens")
    return ExportCheck(len(prompts), sum(map(len, answers)), num_same, largest, " and ".join(stacks))


def check_quantized(
    model: GenerativeModel, folder: Path, prompts: Sequence[str], style: PromptStyle, python: Path, largest: float
) -> str:
    """Compare the scores of a quantized export with its model's; the result in words.

    Both score the model's own greedy answers; `python` loads the export.
    Raises ParityError where the mean difference of log-probabilities is above `largest`, in nats.
    """
    asked: list[tuple[str, Path | None]] = [(prompt, None) for prompt in prompts]
    ids, answers, logprobs = _own_answers(model, asked, style)
    stack, found = _generate_from_folder(str(python), model, folder, _questions(model, asked, ids, answers, style))
    diffs = [
        abs(a - b) for own, one in zip(logprobs, found, strict=True) for a, b in zip(own, one["logprobs"], strict=True)
    ]
    same = sum(one["greedy_ids"] == answer for one, answer in zip(found, answers, strict=True))
    mean = sum(diffs) / len(diffs)
    if not mean <= largest:
        text = f"log-probabilities differ by {mean:.2g} per token, more than {largest:g} ({stack})"
        raise ParityError(f"the quantized export: {text}\n  it was removed; w8a8 differs less than w4a16")
    text = f"{same} of {len(prompts)} greedy answers are the same, log-probabilities differ by {mean:.1e} per token"
    return f"{text}, at most {largest:g} ({stack})"


def _own_answers(
    model: GenerativeModel, asked: Sequence[tuple[str, Path | None]], style: PromptStyle
) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """The ids of prompts, the model's greedy answers, and log p of each of their tokens."""
    ids = [prompt_ids(model.tokenizer, prompt, style, images=[image] if image else []) for prompt, image in asked]
    config = TorchSamplerConfig(top_k=1, max_new_tokens=MAX_NEW_TOKENS)  # the likeliest tokens
    sampler = ShorteningSampler(TorchSampler(config, model, decide=Decisions()))
    requests = [
        Request(tuple(prompt), seed=0, max_new_tokens=MAX_NEW_TOKENS, group=at) for at, prompt in enumerate(ids)
    ]
    answers = [list(answer.ids) for answer in sampler.sample(requests)]  # with the end token: none is empty
    return ids, answers, _logprobs(model, ids, answers)


def _unlike(stack: str, why: str) -> ParityError:
    return ParityError(
        f"the export does not generate like the run: {why} ({stack})\n"
        "  it was removed; run export --no-check writes it without the check"
    )


def _logprobs(model: GenerativeModel, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[float]]:
    """log p of each token of each completion."""
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    batch = pack(rows, [[1.0] * len(row) for row in rows]).to(model.device)
    with torch.no_grad():
        values = model.outputs(batch, frozenset({"logprobs"}))["logprobs"].float().cpu().tolist()
    found, begin = [], 0
    for prompt, row in zip(prompts, rows, strict=True):
        found.append(values[begin + len(prompt) : begin + len(row)])
        begin += len(row)
    return found


def _questions(
    model: GenerativeModel, asked: Sequence[tuple[str, Path | None]], ids: Any, answers: Any, style: PromptStyle
) -> list[dict[str, Any]]:
    """What the program that loads the folder is given of each prompt, its ids and its answer."""
    options = {"style": style, "max_new_tokens": MAX_NEW_TOKENS}
    return [
        {**options, "text": prompt, "begin": _begin(model.tokenizer, prompt, own, style), "answer": answer}
        | {"image": image and str(image)}
        for (prompt, image), own, answer in zip(asked, ids, answers, strict=True)
    ]


def _generate_from_folder(
    python: str, model: GenerativeModel, folder: Path, questions: Sequence[Mapping[str, Any]], base: str | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """The versions of the libraries that loaded the folder, and what they generated."""
    dtype = str(model.compute_dtype).removeprefix("torch.")
    asked = {"folder": str(folder), "base": base, "dtype": dtype, "threads": torch.get_num_threads()}
    given = json.dumps({**asked, "questions": questions})
    done = subprocess.run([python, "-P", str(PROBE)], input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise _unlike(python, f"transformers cannot load it: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found["stack"], found["answers"]


def _begin(tokenizer: Any, prompt: str, ids: Sequence[int], style: PromptStyle) -> list[int]:
    """The tokens before a plain text in training, which no exported folder records."""
    plain = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return list(ids[: len(ids) - plain]) if style == "text" else []


def run_prompts(folder: RunFolder, tokenizer: Any, style: PromptStyle, chat: ChatConfig) -> list[str]:
    """The run's own prompts: those of its newest evaluation, without their images."""
    rows = map(json.loads, complete_lines(folder.samples))
    texts = [str(row["prompt"]) for row in rows if row.get("prompt")][-8 * NUM_PROMPTS :]
    markers = ChatMarkers.from_tokenizer(tokenizer, chat) if style == "chat" else None
    plain = [markers.user_message(text) if markers else text for text in texts]
    if images_of(tokenizer):  # whose places in a prompt are nothing without them: the folder gets the text alone
        plain = [ControlTokens(tokenizer, "").special.sub("", text) for text in plain]
    unique = list(dict.fromkeys(text for text in plain if text.strip()))
    return unique[-NUM_PROMPTS:] or list(FALLBACK)
