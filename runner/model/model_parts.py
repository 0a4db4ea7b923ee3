"""The parts of a model (language model, vision, aligner, routers), and what is done with each."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from runner.core.errors import Problem, SpecError
from runner.interfaces import Decide
from runner.model.config import ModelPart
from runner.model.parameters import is_tied
from runner.model.router_replay import find_routers

ALIGNER = re.compile(r"merger|projector|connector|aligner|image_newline|embed_vision|embed_audio")
DEFAULT_FREEZE: tuple[ModelPart, ...] = ("vision", "aligner")


def has_vision_part(inner: Any) -> bool:
    """Whether a transformers model has other parts than the language model."""
    return inner.config.get_text_config() is not inner.config


def part_finder(inner: Any) -> Callable[[str], ModelPart]:
    """The function from the full name of a module or parameter to its part.

    Encoders of sound count as vision.
    """
    if not has_vision_part(inner):
        return lambda name: "language"
    decoder = inner.get_decoder()
    path = next(name for name, part in inner.named_modules() if part is decoder)
    backbone = f"{path.rpartition('.')[0]}."

    def part_of(name: str) -> ModelPart:
        is_beside = f"{name}.".startswith(backbone) and not f"{path}.".startswith(f"{name}.")
        if not is_beside or f"{name}.".startswith(f"{path}."):
            return "language"
        return "aligner" if ALIGNER.search(name) else "vision"

    return part_of


def decoder_blocks(inner: Any, absent: Collection[object]) -> list[nn.Module]:
    """The layers of the language model that are not `absent`, first to last; empty if they are not named.

    A vision part is none of them: it runs on the ranks that have images, so that all gather it with the embedding.
    """
    named, part_of = set(inner._no_split_modules or ()), part_finder(inner)
    own = (part for name, part in inner.named_modules() if part not in absent and part_of(name) == "language")
    # fully_shard derives a class of its own for a layer
    return [part for part in own if not named.isdisjoint(kind.__name__ for kind in type(part).__mro__)]


def splittable_ends(inner: Any, head: nn.Module | None) -> list[nn.Module]:
    """The embedding and `head` (a plain matrix or None) that can be split by rows; if tied, both or none."""
    embedding = inner.get_input_embeddings()
    plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    if is_tied(inner.get_output_embeddings(), embedding) and not (plain and head):
        return []
    return [*([embedding] if plain else []), *([head] if head else [])]


def freeze_parts(inner: Any, parts: tuple[ModelPart, ...] | None, decide: Decide) -> set[str]:
    """Freeze `parts` (model.freeze) of a transformers model; returns the names of their modules.

    Raises SpecError for parts that the model does not have, and where nothing is left to train.
    """
    has_vision = has_vision_part(inner)
    if not has_vision and parts not in (None, ("router",)):
        text = f"{type(inner).__name__} has no vision part; leave it out"
        raise SpecError([Problem("model.freeze", text)])
    chosen = (DEFAULT_FREEZE if has_vision else ()) if parts is None else parts
    found = find_routers(inner)
    # what peft puts on a router lies beside its base_layer
    routers = tuple(f"{name.removesuffix('.base_layer')}." for name, part in inner.named_modules() if part in found)
    if "router" in chosen and not routers:
        raise SpecError([Problem("model.freeze", f"{type(inner).__name__} has no routers; leave router out")])
    if not has_vision and not chosen:
        return set()
    part_of = part_finder(inner)

    def is_chosen(name: str) -> bool:
        return part_of(name) in chosen or ("router" in chosen and f"{name}.".startswith(routers))

    frozen = [p for name, p in inner.named_parameters() if is_chosen(name)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    names = {name for name, _ in inner.named_modules() if is_chosen(name)}
    if len(frozen) == sum(1 for _ in inner.parameters()):
        raise SpecError([Problem("model.freeze", "all parts are frozen; leave out the part to train")])
    millions = sum(p.numel() for p in frozen) / 1e6
    why = f"{millions:.3g} million parameters of {type(inner).__name__} keep their values"
    decide.record_fact("model.freeze", f"[{', '.join(chosen)}]", why if frozen else "all parts are trained")
    return names
