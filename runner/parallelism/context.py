"""A model of which each rank computes some of a batch's tokens (context parallelism; how: runner.model.context)."""

from __future__ import annotations

from math import gcd
from typing import Any, Literal, Protocol

from torch import Tensor, distributed

from runner.core.errors import Problem, SpecError
from runner.interfaces import Decide, Peers
from runner.parallelism.probed import refuse_another

Style = Literal["ulysses", "ring"]


class Spreadable(Protocol):
    """What is needed of a model."""

    inner: Any

    @property
    def padded(self) -> bool: ...  # whether its rows lie side by side

    def share_tokens(self, group: Any, style: Style) -> None: ...

    # hidden states of a handful of tokens, and whether they are still the same
    def probed(self) -> Tensor: ...

    def computes(self, wanted: Tensor) -> bool: ...


def spread(model: Spreadable, group: Any, everyone: Peers, *, style: Style | None, slices: int, decide: Decide) -> None:
    """Let each rank of `group` compute its tokens of every batch from now on. Collective over everyone.

    model: with its weights, or its pieces of them; style: None = ulysses where it can be; slices: in how many its
    layers are cut. Raises SpecError, on all ranks, for a model that cannot, or is another one then.
    """
    name = type(model.inner).__name__
    if model.padded:
        raise refused(f"{name} runs padded rows (model.layout), of which no rank can have a part")
    wanted, style = model.probed(), _settled(model, distributed.get_world_size(group), style, slices, decide)
    model.share_tokens(group, style)
    refuse_another(model, wanted, everyone, refused, "from some tokens of a row, beside its attention")


def _settled(model: Spreadable, ranks: int, style: Style | None, slices: int, decide: Decide) -> Style:
    heads = model.inner.config.get_text_config().num_attention_heads // slices
    fits = heads % ranks == 0
    if style == "ulysses" and not fits:
        most = gcd(heads, ranks)
        text = f"cp={ranks} does not divide the {heads} heads of a slice; type parallelism.cp_style=ring"
        raise SpecError([Problem("parallelism.cp", f"{text}, or parallelism.cp={most}" if most > 1 else text)])
    if style is None:
        style = "ulysses" if fits else "ring"
        decide.state("parallelism.cp_style", style, f"cp={ranks}, and {heads} heads{' of a slice' * (slices > 1)}")
    return style


def refused(why: str) -> SpecError:
    return SpecError([Problem("parallelism.cp", f"{why}; type parallelism.cp=1, with parallelism=fsdp or tp")])
