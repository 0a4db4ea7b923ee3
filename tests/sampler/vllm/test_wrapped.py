"""A base whose layers are wrapped for adapters, loaded as models of vLLM 0.23 are: by the names of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from runner.sampler.vllm.weight_layout import lora_wrapped_names, strip_lora_wrapper

STACKED = (("qkv_proj", "q_proj", 0), ("qkv_proj", "k_proj", 1), ("qkv_proj", "v_proj", 2))
SIZE = 2


class Wrapper(nn.Module):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Newer(Wrapper):
    """As later versions have it: the layer inside is loaded by the name of the one around."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None: ...


class Model(nn.Module):
    """An embedding and packed, biased queries, keys and values, with the loop of vLLM 0.23's models."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.embed_tokens = wrap(nn.Embedding(3, SIZE))
        self.norm = nn.LayerNorm(SIZE, bias=False)
        self.attn = nn.ModuleDict({"qkv_proj": wrap(nn.Linear(SIZE, 3 * SIZE)), "o_proj": wrap(nn.Linear(SIZE, SIZE))})

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        params, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            part = None
            for packed, single, number in STACKED:
                if single in name:
                    name, part = name.replace(single, packed), number
                    break
            if name not in params:
                continue  # as it does, without a word
            target = params[name] if part is None else params[name].narrow(0, SIZE * part, SIZE)
            target.copy_(tensor)
            loaded.add(name)
        return loaded


def weights() -> dict[str, Tensor]:
    made = {"embed_tokens.weight": torch.rand(3, SIZE), "norm.weight": torch.rand(SIZE)}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        made |= {f"attn.{name}.weight": torch.rand(SIZE, SIZE), f"attn.{name}.bias": torch.rand(SIZE)}
    return made


@pytest.mark.parametrize("wrap", [lambda layer: layer, Wrapper], ids=["plain", "wrapped"])
def test_every_tensor_arrives_in_its_place(wrap: Any) -> None:
    model, given = Model(wrap), weights()
    taken = model.load_weights(lora_wrapped_names(model, given.items()))
    found = {strip_lora_wrapper(name): tensor for name, tensor in model.named_parameters()}
    assert set(map(strip_lora_wrapper, taken)) == found.keys()
    for leaf in ("weight", "bias"):
        assert torch.equal(
            found[f"attn.qkv_proj.{leaf}"], torch.cat([given[f"attn.{one}_proj.{leaf}"] for one in "qkv"])
        )
        assert torch.equal(found[f"attn.o_proj.{leaf}"], given[f"attn.o_proj.{leaf}"])
    assert torch.equal(found["embed_tokens.weight"], given["embed_tokens.weight"])


def test_layers_that_take_the_hubs_names_get_these() -> None:
    given = weights()
    assert dict(lora_wrapped_names(Model(Newer), given.items())).keys() == given.keys()
