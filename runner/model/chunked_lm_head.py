"""The LM head in chunks: log-probabilities and entropies without materializing all logits.

The vocabulary is all ids on this rank, or a run of them on each of several ranks.

    hidden [S, H] ──chunk by chunk──▶ logits [chunk, V] ──log-softmax in float32──▶ logprobs [S], entropy [S]
    of V/tp ids   ──top, sum of exponentials over the ranks──▶ log-probabilities

Three ways: `score` of a linear head makes the logits again in the backward pass; `linear` knows the gradient of its
result beforehand and makes the head's gradient while the logits are there; any other head module is called
chunk by chunk under checkpointing. For other functions of the logits than these two see
`runner.model.chunked_logit_loss`.

No rank makes the logits of another one's ids (the loss-parallel head of Shoeybi et al., 1909.08053, section 3), but for
a function that has to see whole rows of them, chunk by chunk.

Legend: S predicted tokens (hidden states of their parents), n of them in a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from runner.distributed import dtensor_utils
from runner.model.parameters import cast_inputs_to_float32, original_class, stored_parameter


class VocabShard:
    """All ids."""

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Log-probabilities [n, V] of logits, in float32 or better."""
        return F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def gather_targets(self, values: Tensor, targets: Tensor) -> Tensor:
        """What `values` [n, V] has for each token's target id, [n]."""
        return values.gather(1, targets[:, None])[:, 0]

    def add_at_targets(self, values: Tensor, targets: Tensor, amounts: Tensor) -> Tensor:
        """`values`, with `amounts` [n] added there, in place."""
        return values.scatter_add_(1, targets[:, None], amounts[:, None])

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sums over ids that each rank has made of its own, over all ids; in place."""
        return values

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Of all ids."""
        return logits

    def local_logits(self, logits: Tensor) -> Tensor:
        """Of this rank's ids."""
        return logits


@dataclass(frozen=True, slots=True)
class PartialVocab(VocabShard):
    """The ids from `first` to before `end`, as many as each of the `size` ranks of `group` has.

    All ranks call the same verbs for the same tokens; what is [n] comes out alike on all of them.
    """

    group: Any
    size: int
    first: int
    end: int

    def log_softmax(self, logits: Tensor) -> Tensor:
        """See `VocabShard`; of this rank's ids."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = wide.amax(1, keepdim=True)
        distributed.all_reduce(top, distributed.ReduceOp.MAX, group=self.group)
        wide = wide - top
        return wide.sub_(self.sum_over_ranks(wide.exp().sum(1, keepdim=True)).log_())

    def gather_targets(self, values: Tensor, targets: Tensor) -> Tensor:
        """See `VocabShard`."""
        places, mine = self._local_targets(targets)
        return self.sum_over_ranks(VocabShard.gather_targets(self, values, places).masked_fill(~mine, 0))

    def add_at_targets(self, values: Tensor, targets: Tensor, amounts: Tensor) -> Tensor:
        """See `VocabShard`."""
        places, mine = self._local_targets(targets)
        return VocabShard.add_at_targets(self, values, places, amounts.masked_fill(~mine, 0))

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """See `VocabShard`."""
        distributed.all_reduce(values, group=self.group)
        return values

    def gather_logits(self, logits: Tensor) -> Tensor:
        """See `VocabShard`."""
        logits = logits.contiguous()
        parts = [torch.empty_like(logits) for _ in range(self.size)]
        distributed.all_gather(parts, logits, group=self.group)
        return torch.cat(parts, 1)

    def local_logits(self, logits: Tensor) -> Tensor:
        """See `VocabShard`."""
        return logits[:, self.first : self.end]

    def _local_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Where the targets are among this rank's ids, 0 for those of others, and which are its own."""
        mine = (targets >= self.first) & (targets < self.end)
        return (targets - self.first).masked_fill(~mine, 0), mine


ALL_IDS = VocabShard()
WEIGHT_ROWS = 4096  # of a product that is added to a gradient in a wider type: not as many as the weight has


def local_vocab(head: nn.Module) -> tuple[Tensor, VocabShard]:
    """What this rank holds of a plain head's weight [V, H], differentiable, as it is stored, and the ids
    that it makes logits of."""
    weight: Any = stored_parameter(head, "weight")
    if not isinstance(weight, DTensor):
        return weight, ALL_IDS
    rows, mesh = dtensor_utils.local_slice(weight)[0], weight.device_mesh
    if rows == slice(0, len(weight)):
        return weight.to_local(), ALL_IDS
    return weight.to_local(), PartialVocab(mesh.get_group(), mesh.size(), rows.start, rows.stop)


def is_plain_linear(head: nn.Module) -> bool:
    """Whether the head is nothing but hidden · weightᵀ + bias, so that its gradient can be written down."""
    own = all(hook is cast_inputs_to_float32 for hook in head._forward_pre_hooks.values())
    return original_class(head) is nn.Linear and not head._forward_hooks and own


def chunked_logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    chunk: int,
    compute: torch.dtype | None = None,
    temperature: Tensor | None = None,
    *,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p(targets | hidden), and with `entropy` that of p(· | hidden) in nats.

    Differentiable in hidden and head. hidden [S, H], targets int64 [S]; `compute` is the data type of the matrix
    products (None: that of the weight); `temperature` float [S] divides the logits, in float32 or better (None: 1).
    Returns [S] in float32 (float64 for a float64 head). Entropies cost two passes over the chunk's log-probabilities,
    and as much memory.
    """
    if not is_plain_linear(head):
        return _checkpointed_chunks(head, hidden, targets, chunk, temperature, entropy)
    weight, ids = local_vocab(head)
    operands = partial(LogitOperands, compute=compute, ids=ids, temperature=temperature)
    values: tuple[Tensor, Tensor | None] = _ChunkedLogprobs.apply(
        hidden, weight, stored_parameter(head, "bias"), targets, chunk, operands, entropy
    )
    return values


def chunked_logprob_loss(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    chunk: int,
    compute: torch.dtype | None = None,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ coefficients · logprobs, differentiable once in hidden and head, and the logprobs, detached.

    Shapes as in `chunked_logprobs`; coefficients float [S], constant.
    """
    if not (is_plain_linear(head) and torch.is_grad_enabled()):
        values, _ = chunked_logprobs(head, hidden, targets, chunk, compute, temperature)
        return (values * coefficients).sum(), values.detach()
    weight, ids = local_vocab(head)
    operands = partial(LogitOperands, compute=compute, ids=ids, temperature=temperature)
    bias = stored_parameter(head, "bias")
    total, values = _ChunkedLogprobLoss.apply(hidden, weight, bias, targets, coefficients, chunk, operands)
    return total, values


def logprobs_and_entropy(logits: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """logits [S, V], targets int64 [S] → log-softmax at the targets, entropy if asked; [S], float32 up."""
    log_softmax = ALL_IDS.log_softmax(logits)
    return ALL_IDS.gather_targets(log_softmax, targets), _entropy(log_softmax) if entropy else None


def _entropy(log_softmax: Tensor) -> Tensor:
    return -(log_softmax.exp() * _finite(log_softmax)).sum(1)


def _finite(log_softmax: Tensor) -> Tensor:
    """So that p·log p is 0 where p is; torch.special.entr, which says so too, has no kernel on an NPU."""
    return log_softmax.clamp(min=torch.finfo(log_softmax.dtype).min)


def divide_logits(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Logits [n, V] by their token's temperature [n], in float32 or better; None = as they are."""
    if temperature is None:
        return logits
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None]


def _checkpointed_chunks(
    head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int, temperature: Tensor | None, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    def piece(span: slice) -> tuple[Tensor, Tensor | None]:
        part = None if temperature is None else temperature[span]
        return logprobs_and_entropy(divide_logits(head(hidden[span]), part), targets[span], entropy)

    spans = list(chunk_spans(len(hidden), chunk)) or [slice(0, 0)]
    if torch.is_grad_enabled():
        pieces = [checkpoint(piece, span, use_reentrant=False) for span in spans]
    else:
        pieces = [piece(span) for span in spans]
    entropies = [found for _, found in pieces if found is not None]
    return torch.cat([found for found, _ in pieces]), torch.cat(entropies) if entropy else None


class LogitOperands:
    """The head's tensors in the data type of the matrix products, and buffers for their gradients.

    Weight and logits are those of this rank's ids.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compute: torch.dtype | None,
        ids: VocabShard,
        temperature: Tensor | None = None,
    ) -> None:
        self.ids, dtype, self.temperature = ids, compute or weight.dtype, temperature
        self.hidden = hidden.detach().to(dtype)
        self.weight = weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.types = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        self.grads: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)

    def allocate_gradients(self, needed: tuple[bool, ...]) -> None:
        """Make gradient buffers; those that sum over chunks hold at least float32."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        self.grads = (
            torch.empty_like(self.hidden) if needed[0] else None,
            torch.zeros_like(self.weight, dtype=wide) if needed[1] else None,
            torch.zeros_like(self.bias, dtype=wide) if needed[2] and self.bias is not None else None,
        )

    def logits(self, span: slice) -> Tensor:
        """[chunk, V] of one chunk of tokens, divided by their temperature."""
        temperature = None if self.temperature is None else self.temperature[span]
        return divide_logits(F.linear(self.hidden[span], self.weight, self.bias), temperature)

    def log_softmax(self, span: slice) -> Tensor:
        """The same as log-probabilities, in float32 or better."""
        return self.ids.log_softmax(self.logits(span))

    def accumulate(
        self, span: slice, log_softmax: Tensor, targets: Tensor, grad: Tensor, grad_entropy: Tensor | None = None
    ) -> None:
        """Add the gradients of one chunk's logprobs and entropies [chunk]; overwrites `log_softmax`.

        ∂logprob/∂logits = onehot − p;  ∂entropy/∂logits = −p·(log p + entropy).
        """
        if grad_entropy is None:
            d_logits = log_softmax.exp_().mul_(-grad[:, None])
        else:
            p = log_softmax.exp()
            log_softmax = _finite(log_softmax)
            entropy = self.ids.sum_over_ranks(-(p * log_softmax).sum(1, keepdim=True))
            d_logits = log_softmax.add_(entropy).mul_(grad_entropy[:, None])
            d_logits = d_logits.add_(grad[:, None]).mul_(p).neg_()
        self.add_logit_gradients(span, self.ids.add_at_targets(d_logits, targets, grad))

    def add_logit_gradients(self, span: slice, d_logits: Tensor) -> None:
        """Add what one chunk's gradient of its logits [chunk, V] means for hidden states, weight and bias."""
        d_hidden, d_weight, d_bias = self.grads
        if self.temperature is not None:
            d_logits = d_logits / self.temperature[span, None]
        if d_bias is not None:
            d_bias += d_logits.sum(0)
        d_logits = d_logits.to(self.weight.dtype)
        if d_hidden is not None:
            torch.mm(d_logits, self.weight, out=d_hidden[span])
        if d_weight is not None and d_weight.dtype == d_logits.dtype:
            d_weight.addmm_(d_logits.t(), self.hidden[span])
        elif d_weight is not None:
            for ids in chunk_spans(len(d_weight), WEIGHT_ROWS):
                d_weight[ids].add_(d_logits[:, ids].t() @ self.hidden[span])

    def results(self) -> tuple[Tensor | None, ...]:
        """Gradients in the data types of what they belong to."""
        if self.grads[0] is not None:
            self.ids.sum_over_ranks(self.grads[0])
        return tuple(None if g is None else g.to(t) for g, t in zip(self.grads, self.types, strict=True))


def chunk_spans(count: int, chunk: int) -> Iterator[slice]:
    """The chunks of `count` tokens."""
    return (slice(start, start + chunk) for start in range(0, count, chunk))


class _ChunkedLogprobs(torch.autograd.Function):
    """Logits of several chunks are made twice: forward for the values, backward for the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        make_operands: Callable[..., LogitOperands],
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.chunk, ctx.make_operands, ctx.log_softmax = chunk, make_operands, None
        ctx.set_materialize_grads(False)
        operands = make_operands(hidden, weight, bias)
        logprobs = hidden.new_empty(len(targets), dtype=torch.promote_types(operands.weight.dtype, torch.float32))
        entropy = torch.empty_like(logprobs) if with_entropy else None
        for span in chunk_spans(len(targets), chunk):
            log_softmax = operands.log_softmax(span)
            logprobs[span] = operands.ids.gather_targets(log_softmax, targets[span])
            if entropy is not None:
                entropy[span] = operands.ids.sum_over_ranks(_entropy(log_softmax))
            ctx.log_softmax = log_softmax if len(targets) <= chunk else None
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(grad_entropy) if grad_entropy is not None else None
        if grad is None:
            return (None,) * 7
        operands = ctx.make_operands(hidden, weight, bias)
        operands.allocate_gradients(ctx.needs_input_grad[:3])
        for span in chunk_spans(len(targets), ctx.chunk):
            part = None if grad_entropy is None else grad_entropy[span]
            made, ctx.log_softmax = ctx.log_softmax, None  # which `accumulate` overwrites
            made = operands.log_softmax(span) if made is None else made
            operands.accumulate(span, made, targets[span], grad[span], part)
        return (*operands.results(), None, None, None, None)


class LossWithKnownGradient(torch.autograd.Function):
    """A loss whose forward pass leaves the gradients of hidden, weight and bias in `ctx.grads`."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, scaled; nothing for the other inputs."""
        if ctx.grads is None:
            raise RuntimeError("backward runs only once for this loss: its gradient buffers are freed")
        scaled = tuple(None if g is None else g.mul_(grad) for g in ctx.grads)
        ctx.grads = None
        return (*scaled, *[None] * (len(ctx.needs_input_grad) - len(scaled)))


class _ChunkedLogprobLoss(LossWithKnownGradient):
    """Logits are made once: the gradient of Σ coefficients · logprobs is known up to a scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        coefficients: Tensor,
        chunk: int,
        make_operands: Callable[..., LogitOperands],
    ) -> tuple[Tensor, Tensor]:
        operands = make_operands(hidden, weight, bias)
        operands.allocate_gradients(ctx.needs_input_grad[:3])
        out = hidden.new_empty(len(targets), dtype=torch.promote_types(operands.weight.dtype, torch.float32))
        factors = coefficients.to(out.dtype)
        for span in chunk_spans(len(targets), chunk):
            log_softmax = operands.log_softmax(span)
            out[span] = operands.ids.gather_targets(log_softmax, targets[span])
            operands.accumulate(span, log_softmax, targets[span], factors[span])
        ctx.grads = operands.results()
        ctx.mark_non_differentiable(out)
        return (out * factors).sum(), out
