"""What a cross-entropy needs of ``hidden @ weight.T + bias`` where ``weight`` holds some of the classes: logits that
never exist whole.

Each rank of a divided vocabulary finds, chunk by chunk of tokens, the log-sum-exp of its own classes, the target's
logit if the class is its own, and the sum of its logits. The ranks then exchange these numbers alone
(sharding/spmd/vocabulary.py), and autograd's way back through the exchange tells each the gradients of its numbers,
from which it makes the gradients of its logits: four matrix products, because the probabilities are known only after
the exchange. Source: Shoeybi et al. 2019, "Megatron-LM", section 3, in the chunks of linear_cross_entropy.py.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator
from mindspeed_fx.kernels.cpu import narrow_product
from mindspeed_fx.kernels.linear_cross_entropy import _work
from mindspeed_fx.kernels.linear_cross_entropy_chunks import add_product, pieces, times_weight
from mindspeed_fx.kernels.linear_cross_entropy_work import BLOCK, CHUNK, full_chunk, onednn

ELSEWHERE, IGNORED, INVALID = -1, -2, -3
"""Targets that are no class of ``weight``: a class of another part, a token that does not count, no class at all."""


def _fake(hidden, weight, bias, target, softcap, sums):
    numbers = [hidden.new_empty(target.shape, dtype=accumulation_dtype(hidden.dtype)) for _ in range(3)]
    return numbers[0], numbers[1], numbers[2] if sums else hidden.new_empty(0, dtype=numbers[0].dtype)


@operator(
    "linear_logsumexp(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, float softcap, bool sums) -> (Tensor, "
    "Tensor, Tensor)",
    _fake,
    opaque=True,
)
def linear_logsumexp(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, softcap: float, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, picked logit and sum of the logits of every token, logits = softcap * tanh((hidden weight^T + bias)
    / softcap).

    Args:
        hidden: [tokens, hidden], float; weight: [classes, hidden] and bias: [classes] or None, of the same type.
        target: [tokens], int64: a class of ``weight``, :data:`ELSEWHERE` or :data:`IGNORED`.
        softcap: bound on the logits; 0 is off.
        sums: whether the third result is wanted; without, it is empty.

    Returns:
        three times [tokens] in the accumulation type; zero for ignored tokens, the second also where the target is
        elsewhere.

    Raises:
        IndexError: another target.
    """
    wide = accumulation_dtype(hidden.dtype)
    lse, picked, total = (hidden.new_zeros(target.shape, dtype=wide) for _ in range(3))
    for at, logits, own in _chunks(hidden, weight, bias, target, softcap):
        picked[at] = logits.gather(1, own.clamp(min=0).unsqueeze(1)).squeeze(1) * (own >= 0)
        if sums:
            total[at] = logits.sum(-1)
        top = logits.amax(-1, keepdim=True)
        lse[at] = logits.sub_(top).exp_().sum(-1).log() + top.squeeze(1)
    return lse, picked, total if sums else total.new_empty(0)


def _fake_backward(grad, grad_picked, grad_sums, hidden, weight, bias, target, lse, softcap, needed):
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else hidden.new_empty(0)
        for x, need in zip((hidden, weight, bias), needed)
    )


@operator(
    "linear_logsumexp_backward(Tensor grad, Tensor grad_picked, Tensor grad_sums, Tensor hidden, Tensor weight, "
    "Tensor? bias, Tensor target, Tensor lse, float softcap, bool[3] needed) -> (Tensor, Tensor, Tensor)",
    _fake_backward, opaque=True,
)  # fmt: skip
def linear_logsumexp_backward(grad, grad_picked, grad_sums, hidden, weight, bias, target, lse, softcap, needed):
    """Gradients of hidden, weight and bias, of size 0 where not ``needed``, from those of the three results [tokens]
    (the third empty where it is): of the logits grad * exp(logits - lse) + grad_picked at the target + grad_sums. The
    logits are recomputed."""
    wide = lse.dtype
    dhidden = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needed[0] else hidden.new_empty(0)
    dweight = torch.empty(weight.shape, dtype=wide, device=hidden.device) if needed[1] else hidden.new_empty(0)
    dbias = hidden.new_zeros(weight.shape[0], dtype=wide) if needed[2] else hidden.new_empty(0)
    first = True
    for at, logits, own in _chunks(hidden, weight, bias, target, softcap):
        slope = 1 - (logits / softcap).square_() if softcap else None
        d = logits.sub_(lse[at].unsqueeze(1)).exp_().mul_(grad[at].unsqueeze(1))
        d.scatter_add_(1, own.clamp(min=0).unsqueeze(1), (grad_picked[at] * (own >= 0)).unsqueeze(1).to(wide))
        if grad_sums.numel():
            d.add_(grad_sums[at].unsqueeze(1))
        d = d if slope is None else d.mul_(slope)
        d = d if narrow_product.problem(hidden.dtype, hidden.device.type) is None else d.to(hidden.dtype)
        if needed[2]:
            dbias += d.sum(0, dtype=wide)
        if needed[0]:
            dhidden[at] = times_weight(d, weight).to(hidden.dtype)
        if needed[1]:
            add_product(dweight, d, hidden[at], 1.0, first)
        first = False
    if first and needed[1]:
        dweight.zero_()  # every token is ignored
    return dhidden, dweight.to(hidden.dtype), dbias.to(hidden.dtype)


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, softcap: float
) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
    """(which tokens, their logits [n, classes] in the accumulation type, to be overwritten, their targets); ignored
    ones in none.
    """
    wide, kept = accumulation_dtype(hidden.dtype), (target != IGNORED).nonzero().squeeze(1)
    if not len(kept):
        return
    low, high = torch.aminmax(target[kept])
    if low < ELSEWHERE or high >= weight.shape[0]:
        raise IndexError("Target out of bounds: a token's target is neither a class nor ignore_index.")
    own = onednn(hidden, weight)
    rows = full_chunk(len(kept), weight.shape[0], wide, BLOCK if own else CHUNK)
    with torch.autocast(hidden.device.type, enabled=False):  # what a caller's autocast would cast was cast before
        for at in pieces(kept, len(target), rows):
            x = hidden[at]
            logits = _logits(x, weight, bias, own).to(wide)
            yield at, logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits, target[at]


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, own: bool) -> Tensor:
    if own:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if narrow_product.problem(x.dtype, x.device.type) is None:
        return narrow_product.multiply(x, weight.t(), x.new_empty(len(x), len(weight), dtype=torch.float32), bias)
    return torch.nn.functional.linear(x, weight, bias)


def _setup(ctx, inputs, output):
    hidden, weight, bias, target, ctx.softcap, _ = inputs
    ctx.save_for_backward(hidden, weight, bias, target, output[0])


def _backward(ctx, grad, grad_picked, grad_sums):
    hidden, weight, bias, target, lse = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:3])
    grads = torch.ops.mindspeed.linear_logsumexp_backward(
        grad, grad_picked, grad_sums, hidden, weight, bias, target, lse, ctx.softcap, needed
    )
    return *(g if need else None for g, need in zip(grads, needed)), None, None, None


torch.library.register_autograd("mindspeed::linear_logsumexp", _backward, setup_context=_setup, lib=LIBRARY)


@linear_logsumexp.shard
def _sharding_rule(hidden, weight, bias, target, softcap, sums):
    """By token. By class the results of two parts are not those of the whole: vocabulary.py puts them together."""
    return [([0, 0, 0 if sums else REPLICATED], [0, REPLICATED, REPLICATED, 0])]


@linear_logsumexp_backward.shard
def _sharding_rule_backward(grad, grad_picked, grad_sums, hidden, weight, bias, target, lse, softcap, needed):
    results = [p if need else REPLICATED for p, need in zip((0, PARTIAL, PARTIAL), needed)]
    return [(results, [0, 0, REPLICATED if 0 in grad_sums.shape else 0, 0, REPLICATED, REPLICATED, 0, 0])]


@linear_logsumexp.costs
def _cost(out, hidden, weight, bias, target, softcap, sums):
    return _work(out, hidden, weight, (False,) * 3, bias, target)


@linear_logsumexp_backward.costs
def _backward_cost(out, grad, grad_picked, grad_sums, hidden, weight, bias, target, lse, softcap, needed):
    return _work(out, hidden, weight, needed, bias, target, grad, grad_picked, grad_sums, lse, is_backward=True)
