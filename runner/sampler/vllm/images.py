"""Images in prompts for vLLM, which expands each by itself: its ids must be ours.

… 5 M M M M 7 …  ──▶  … 5 P 7 …, the image  ──vLLM──▶  … 5 i i i i 7 …     M: media id, P: placeholder, i: image token
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.core.errors import EnvironmentProblem
from runner.core.images import decode_image
from runner.core.media import MEDIA_ID, media_runs
from runner.interfaces.media import images_of, vocabulary_ids

SHOWN = 8  # ids of each side in an error


def vllm_prompt(ids: Sequence[int], tokenizer: Any, version: int) -> dict[str, Any]:
    """A prompt as vLLM takes it.

    version: of the weights, as vLLM keeps what they made of an image under its name
    """
    reader = images_of(tokenizer)
    if reader is None or max(ids) < MEDIA_ID:
        return {"prompt_token_ids": list(ids)}
    place = tokenizer(reader.placeholder, add_special_tokens=False)["input_ids"]
    runs, found, start = media_runs(ids, reader.count), list[int](), 0
    for one, places in runs:
        written = tokenizer(reader.read(one).text, add_special_tokens=False)["input_ids"]
        begin = places[0] - written.index(reader.token_id)
        found += [*ids[start:begin], *place]
        start = begin + len(written)
    return {
        "prompt_token_ids": [*found, *ids[start:]],
        "multi_modal_data": {"image": [decode_image(reader.image_bytes(one)) for one, _ in runs]},
        "multi_modal_uuids": {"image": [f"{one:x}-{version}" for one, _ in runs]},
    }


def check_prompt_ids(ids: Sequence[int], theirs: Sequence[int], tokenizer: Any) -> None:
    """Raise EnvironmentProblem unless vLLM has made of a prompt what the trainer computes."""
    ours, got = vocabulary_ids(ids, images_of(tokenizer)), list(theirs)
    if ours != got:
        pairs = enumerate(zip(ours, got, strict=False))
        at = next((at for at, (one, other) in pairs if one != other), min(len(ours), len(got)))
        text = f"{len(ours)} tokens, from {at} on {ours[at : at + SHOWN]}, but vLLM {len(got)}: {got[at : at + SHOWN]}"
        raise EnvironmentProblem(
            f"sampler=vllm expands an image otherwise than the model's image processor: ours is {text}\n"
            "  type sampler=torch, or install a vLLM whose transformers is the trainer's"
        )
