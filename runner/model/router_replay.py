"""Routers of mixtures of experts: their choices are recorded, counted, and replaced by given ones.

    hidden [n, H] ──router──▶ scores [n, E] ──top-k──▶ experts [n, k] ──gather──▶ weights [n, k] ──▶ experts' forward
                                                 ▲
                              given [n, k] ──────┘    rollout routing replay (R3, Ma et al., 2510.11370)

A transformers router returns (logits, weights, experts), and chooses by one top-k over its experts. There, and nowhere
else, the given experts are taken instead: the weights, and so the gradients, come from the router's own scores of
them, normalized and scaled as the architecture does it. Shared experts, group limits (which are part of the choice)
and auxiliary losses (which read the logits) stay as they are. A router that does not work this way is found by trial.

Legend: n tokens of a pass, H hidden size, M layers with experts, E experts, k experts of a token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runner.core.batch import Batch
from runner.interfaces.routing import ExpertCounts, ExpertRouting, Replays

CHANNEL = "experts"  # of a batch: int16 [T, M, k], -1 where the router chooses itself


class _GivenExperts(TorchFunctionMode):
    """In its block, top-k over `num_experts` scores takes `given`, int64 [n, k]; -1 = its own.

    own: what it would have taken, [n, k]; calls: how often that was
    """

    def __init__(self, num_experts: int, given: Tensor) -> None:
        super().__init__()
        self._num_experts, self._given = num_experts, given
        self.own, self.calls = given, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].ndim != 2 or args[0].shape[1] != self._num_experts:
            return found
        self.own, self.calls = found.indices, self.calls + 1
        chosen = torch.where(self._given < 0, self.own, self._given)
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))


class RouterHooks:
    """See `runner.interfaces.routing.ExpertRouting`; in force from its construction on."""

    def __init__(self, inner: Any, *, is_compiled: bool = False) -> None:
        """inner: a transformers model, of whose routers `replay_objection` finds nothing to say.

        is_compiled: its layers are; its routers are not then, as they count.
        """
        self._routers = find_routers(inner)
        self._num_experts: int = self._routers[0].num_experts
        self.replays: Replays | None = None
        self.records = self.counts_tokens = False
        self.token_experts = torch.empty(0)
        self._given: Tensor | None = None
        self._counted: Tensor | None = None
        self._chosen: list[Tensor] = [torch.empty(0)] * len(self._routers)
        self._counts: ExpertCounts | None = None
        for layer, router in enumerate(self._routers):
            forward = partial(self._route, layer, router.forward)
            router.forward = torch.compiler.disable(forward) if is_compiled else forward

    def replay(
        self,
        forward: Callable[..., Any],
        *,
        experts: Tensor | None = None,
        counted: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """`forward(**keywords)`, whose routers take `experts`, [n, M, k] by token; None = their own.

        They stay given until the next call, as checkpointed layers run again in the backward pass.
        counted: the tokens that metrics count, int64, as others are padding or a prompt again; None = all.
        """
        self._given, self._counted = experts, counted
        return forward(**keywords)

    def keep_token_experts(self, run: Callable[..., Tensor]) -> None:
        """Keep the experts of the last pass by the tokens of its batch; `run` lays a batch out, and undoes it."""
        self.token_experts = run(lambda input_ids, **_: self.last_experts(*input_ids.shape))

    def last_experts(self, rows: int, columns: int) -> Tensor:
        """See `ExpertRouting`."""
        return torch.stack(self._chosen, 1).to(torch.int16).unflatten(0, (rows, columns))

    def pop_counts(self) -> ExpertCounts | None:
        """See `ExpertRouting`."""
        counts, self._counts = self._counts, None
        return counts

    def _route(self, layer: int, forward: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """A router's forward."""
        if self._given is None:
            logits, weights, chosen = forward(hidden)
            given = own = None
        else:
            given = self._given[:, layer].long()
            with _GivenExperts(self._num_experts, given) as taken:
                logits, weights, chosen = forward(hidden)
            own = taken.own
        if self.records or self.replays == "old":
            self._chosen[layer] = chosen
        if self.counts_tokens:
            self._count(layer, logits.detach(), chosen, own, given)
        return logits, weights, chosen

    def _count(self, layer: int, logits: Tensor, chosen: Tensor, own: Tensor | None, given: Tensor | None) -> None:
        if self._counts is None:
            self._counts = ExpertCounts.zeros(len(self._routers), self._num_experts, logits.device)
        if (at := self._counted) is not None:
            logits, chosen = logits[at], chosen[at]
            own, given = (None if one is None else one[at] for one in (own, given))
        counts, first = self._counts, layer == 0
        counts.tokens += len(chosen) * first
        counts.chosen[layer].scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        counts.probability[layer] += logits.float().softmax(-1).sum(0)
        if own is not None and given is not None:
            known = given[:, 0] >= 0
            counts.given += known.sum() * first
            counts.differ[layer] += (known & (own.sort(1).values != given.sort(1).values).any(1)).sum()


def find_routers(inner: Any) -> list[Any]:
    """The routers of a transformers model, first layer to last: they know num_experts and top_k."""
    return [
        part
        for part in inner.modules()
        if isinstance(getattr(part, "top_k", None), int)
        and isinstance(getattr(part, "num_experts", None), int)
        and isinstance(getattr(part, "weight", None), nn.Parameter)
    ]


def replay_objection(inner: Any) -> str | None:
    """Why the routers of a transformers model cannot be given their experts, by trial; None = they can."""
    kinds = {type(router): router for router in find_routers(inner)}
    if not kinds:
        return f"{type(inner).__name__} has no routers"
    return next((found for found in map(_router_objection, kinds.values()) if found), None)


@torch.no_grad()
def _router_objection(router: Any) -> str | None:
    name, most, size = type(router).__name__, router.num_experts, router.top_k
    trial = copy.copy(router)  # with small numbers in place of its parameters, which may be sharded
    for kind in ("_parameters", "_buffers"):
        trial.__dict__[kind] = {
            key: None if one is None else torch.arange(one.numel()).sin().view(one.shape)
            for key, one in getattr(router, kind).items()
        }
    hidden = torch.arange(3 * router.weight.shape[1]).cos().view(3, -1)
    given = (torch.arange(size).flip(0) + torch.arange(3)[:, None]) % most
    try:
        with _GivenExperts(most, given) as taken:
            found = type(router).forward(trial, hidden)
    except Exception as error:  # a model's code may fail in any way on what it was not made for
        return f"{name} fails with {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if not (isinstance(found, tuple) and len(found) == 3 and taken.calls == 1 and found[1].shape == given.shape):
        return f"{name} does not return logits, weights and experts of one top-k"
    return None if torch.equal(found[2], given) else f"{name} does not return the experts of its top-k"


class WithRouters:
    """What `runner.model.transformers_model` does with the routers of its transformers model."""

    inner: Any
    _compiled: Any

    @property
    def routing(self) -> ExpertRouting | None:
        """The hooks of its routers; all models around the same transformers model share them."""
        return getattr(self.inner, "expert_routing", None)

    def hook_routers(self) -> str | None:
        """Let experts be counted, recorded and replayed; returns why not, where that is impossible."""
        if self.routing is None:
            if objection := replay_objection(self.inner):
                return objection
            self.inner.expert_routing = RouterHooks(self.inner, is_compiled=self._compiled is not None)
        return None

    def with_routing(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`run` of a forward pass, whose routers take the batch's experts; see `token_experts`."""
        if (routing := self.routing) is None:
            return run

        def run_routed(forward: Callable[..., Tensor]) -> Tensor:
            found = run(partial(routing.replay, forward))
            if routing.replays == "old" and not torch.is_grad_enabled():
                routing.keep_token_experts(run)
            return found

        return run_routed

    def drop_unused_experts(self, batch: Batch) -> Batch:
        """The batch without the experts of another model, which this one does not replay."""
        if CHANNEL not in batch.tokens or (self.routing is not None and self.routing.replays is not None):
            return batch
        return batch.without_tokens(CHANNEL)
