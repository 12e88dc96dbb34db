"""Linear and cross-entropy in one: ``cross_entropy(hidden @ weight.T + bias, target)`` whose logits never exist whole.

Rows of tokens are taken a chunk at a time. A scalar loss computes its gradients in the forward, for an upstream
gradient of 1, while the chunk's probabilities are there: three matrix products in all, as unfused; the backward scales.
A loss per token learns its upstream gradients only in the backward, which computes the logits again: four products.
Ignored tokens take part in no product. Source: Hsu et al. 2024, "Liger Kernel", fused linear cross-entropy; the
log-sum-exp term is the z-loss of PaLM, the soft-cap Gemma 2's.
"""

from __future__ import annotations

import itertools
from typing import Sequence

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import SOFTMAX, Cost, as_product, largest, once, size
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator
from mindspeed_fx.kernels.linear_cross_entropy_chunks import is_waited_for, parts, run_in_chunks
from mindspeed_fx.kernels.linear_cross_entropy_work import CHUNK, LEAST, SUMMED

SETTINGS = "int ignore_index, float label_smoothing, float z_loss, float softcap"
INPUTS = f"Tensor hidden, Tensor weight, Tensor? bias, Tensor target, {SETTINGS}"
REDUCTIONS = ("mean", "sum", "none")

# --------------------------------------------------------------------------- what a model calls


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of softcap * tanh(logits / softcap), logits = hidden weight^T + bias.

    Args:
        hidden: [tokens, hidden], float.
        weight: [vocab, hidden], of the same type.
        bias: [vocab] of the same type, or None.
        target: [tokens], int64; ``ignore_index`` marks tokens with zero loss and gradient.
        label_smoothing: weight in [0, 1) of the uniform distribution.
        z_loss: factor on the square of each token's log-sum-exp, which is added to its loss; 0 is off.
        softcap: bound on the logits; 0 is off.
        reduction: "mean" over the tokens that are not ignored, "sum" or "none".

    Returns:
        [] or [tokens], in float32 (float64 for float64 inputs).

    Raises:
        IndexError: a target is neither a class nor ``ignore_index``.
    """
    settings = (ignore_index, label_smoothing, z_loss, softcap)
    torch._check_value(reduction in REDUCTIONS, lambda: f"reduction is {reduction!r}; valid: {', '.join(REDUCTIONS)}")
    if reduction == "none":
        return torch.ops.mindspeed.linear_cross_entropy_tokens(hidden, weight, bias, target, *settings)
    # Here, above autograd, it is known which gradients anybody will ask for.
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    return torch.ops.mindspeed.linear_cross_entropy_total(
        hidden, weight, bias, target, *settings, reduction == "mean", needed
    )[0]


_DEFAULTED = INPUTS.replace("index", "index=-100")
for _setting in ("smoothing", "z_loss", "softcap"):
    _DEFAULTED = _DEFAULTED.replace(_setting, f"{_setting}=0.0")
LIBRARY.define(
    f"linear_cross_entropy({_DEFAULTED}, str reduction='mean') -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("linear_cross_entropy", linear_cross_entropy, "CompositeImplicitAutograd")


# --------------------------------------------------------------------------- mean and sum: gradients in the forward


def _empty_gradient(x: Tensor | None, like: Tensor, needed: bool) -> Tensor:
    """Empty gradient of ``x``; nothing when it is not needed. float16 waits for its loss scale in float32: before the
    scale, gradients of a mean underflow."""
    return torch.empty(x.shape, dtype=_saved_dtype(x), device=x.device) if needed else like.new_empty(0)


def _saved_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def _fake_total(hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, mean, needed):
    loss = hidden.new_empty((), dtype=accumulation_dtype(hidden.dtype))
    return loss, *(_empty_gradient(x, hidden, need) for x, need in zip((hidden, weight, bias), needed))


@operator(
    f"linear_cross_entropy_total({INPUTS}, bool mean, bool[3] needed) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_total,
    opaque=True,
)
def linear_cross_entropy_total(
    hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, mean, needed
):
    """:func:`linear_cross_entropy` summed or averaged, and the gradients for an upstream gradient of 1.

    Args:
        mean: divide by the number of tokens that are not ignored.
        needed: which gradients to compute: of hidden, weight, bias.

    Returns:
        loss [], and gradients shaped as hidden, weight and bias, of size 0 where not needed.
    """
    kept = (target != ignore_index).sum()
    if is_waited_for(hidden.device):
        kept = kept.item()
        scale = 1.0 / max(kept, 1) if mean else 1.0
    else:
        scale = kept.clamp(min=1).to(accumulation_dtype(hidden.dtype)).reciprocal() if mean else 1.0
    losses, *grads = run_in_chunks(
        hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, scale, needed
    )
    total = losses.sum()
    grads = (hidden.new_empty(0) if g is None else g.to(_saved_dtype(hidden)) for g in grads)
    return total / kept if mean else total, *grads


def _fake_total_backward(grad, dhidden, dweight, dbias):
    return tuple(torch.empty_like(g) for g in (dhidden, dweight, dbias))


@operator(
    "linear_cross_entropy_total_backward(Tensor grad, Tensor dhidden, Tensor dweight, Tensor dbias) -> (Tensor, "
    "Tensor, Tensor)",
    _fake_total_backward,
)
def linear_cross_entropy_total_backward(
    grad: Tensor, dhidden: Tensor, dweight: Tensor, dbias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward's gradients times the upstream gradient ``grad`` []. Inlined, so that Inductor scales in place."""
    return tuple(g * grad.to(g.dtype) for g in (dhidden, dweight, dbias))


def _setup_total(ctx, inputs, output):
    ctx.needed, ctx.dtype = inputs[-1], inputs[0].dtype
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_total(ctx, grad, *_):
    if grad is None:
        return (None,) * 10
    for name, asked, needed in zip(("hidden", "weight", "bias"), ctx.needs_input_grad, ctx.needed):
        torch._check(
            needed or not asked,
            lambda: f"linear_cross_entropy_total: the forward was not told that {name} needs a gradient",
        )
    grads = torch.ops.mindspeed.linear_cross_entropy_total_backward(grad, *ctx.saved_tensors)
    return *(g.to(ctx.dtype) if asked else None for g, asked in zip(grads, ctx.needs_input_grad)), *(None,) * 7


torch.library.register_autograd(
    "mindspeed::linear_cross_entropy_total", _backward_total, setup_context=_setup_total, lib=LIBRARY
)


# --------------------------------------------------------------------------- none: a loss per token


def _fake_tokens(hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap):
    return hidden.new_empty(target.shape, dtype=accumulation_dtype(hidden.dtype))


@operator(f"linear_cross_entropy_tokens({INPUTS}) -> Tensor", _fake_tokens, opaque=True)
def linear_cross_entropy_tokens(hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap):
    """:func:`linear_cross_entropy` per token: [tokens] in float32 (float64 for float64 inputs)."""
    return run_in_chunks(
        hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, 1.0, (False,) * 3
    )[0]


def _fake_tokens_backward(grad, hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, needed):
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else hidden.new_empty(0)
        for x, need in zip((hidden, weight, bias), needed)
    )


@operator(
    f"linear_cross_entropy_tokens_backward(Tensor grad, {INPUTS}, bool[3] needed) -> (Tensor, Tensor, Tensor)",
    _fake_tokens_backward,
    opaque=True,
)
def linear_cross_entropy_tokens_backward(
    grad, hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, needed
):
    """Gradients for hidden, weight and bias from ``grad`` [tokens], of size 0 where not needed; the logits are made
    again.
    """
    _, *grads = run_in_chunks(
        hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, grad, needed
    )
    return tuple(hidden.new_empty(0) if g is None else g.to(hidden.dtype) for g in grads)


def _setup_tokens(ctx, inputs, output):
    *tensors, ctx.ignore_index, ctx.label_smoothing, ctx.z_loss, ctx.softcap = inputs
    ctx.save_for_backward(*tensors)


def _backward_tokens(ctx, grad):
    needed = list(ctx.needs_input_grad[:3])
    settings = (ctx.ignore_index, ctx.label_smoothing, ctx.z_loss, ctx.softcap)
    grads = torch.ops.mindspeed.linear_cross_entropy_tokens_backward(grad, *ctx.saved_tensors, *settings, needed)
    return *(g if need else None for g, need in zip(grads, needed)), *(None,) * 5


torch.library.register_autograd(
    "mindspeed::linear_cross_entropy_tokens", _backward_tokens, setup_context=_setup_tokens, lib=LIBRARY
)


# --------------------------------------------------------------------------- sharding


def _by_token(needed: Sequence[bool]) -> list:
    """Placements of the three gradients where each rank has some of the tokens."""
    return [p if need else REPLICATED for p, need in zip((0, PARTIAL, PARTIAL), needed)]


@linear_cross_entropy_total.shard
def _ways_total(hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, mean, needed):
    """By token; a mean has to know how many tokens count on all ranks, so only the sum is divided."""
    return [] if mean else [([PARTIAL, *_by_token(needed)], [0, REPLICATED, REPLICATED, 0])]


@linear_cross_entropy_total_backward.shard
def _ways_total_backward(grad, dhidden, dweight, dbias):
    """Scaling: each gradient by itself, whatever its placement, a sum over ranks included."""
    own = [[REPLICATED] + ([*range(g.ndim), PARTIAL] if 0 not in g.shape else []) for g in (dhidden, dweight, dbias)]
    return [(list(p), [REPLICATED, *p]) for p in itertools.product(*own)]


@linear_cross_entropy_tokens.shard
def _ways_tokens(hidden, weight, bias, target, *settings):
    return [([0], [0, REPLICATED, REPLICATED, 0])]


@linear_cross_entropy_tokens_backward.shard
def _ways_tokens_backward(grad, hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, needed):
    return [(_by_token(needed), [0, 0, REPLICATED, REPLICATED, 0])]


# --------------------------------------------------------------------------- cost


def _work(out, hidden, weight, needed, *others, is_backward=False) -> Cost:
    """One product for the logits, one for each of two gradients, in chunks as large as on an accelerator
    (``chunk_in_triton``). They are too large for caches: a logit is written and read, and for gradients written as a
    probability and read by each product, in the accumulation type (16-bit inputs are narrowed first, which is not
    counted). Each chunk reads the weight, twice for dhidden, and updates dweight."""
    (tokens, width), vocab = hidden.shape, weight.shape[0]
    to_hidden, to_weight = int(needed[0]), int(needed[1])
    products, item = to_hidden + to_weight, 8 if hidden.dtype == "float64" else 4
    chunks = -(-tokens // largest(CHUNK // (vocab * item), SUMMED * width * to_weight, LEAST)) if vocab != 0 else 0
    logits = tokens * vocab * item
    read = (
        size(hidden, *others)
        + logits * (1 + products)
        + weight.bytes * chunks * (1 + to_hidden)
        + to_weight * weight.numel * item * (chunks - 1)
    )
    write = size(out) + logits * (2 if products else 1) + to_weight * weight.numel * item * (chunks - 1)
    product = 2 * tokens * width * vocab
    flops = (1 + products) * product
    work = Cost(
        flops,
        flops,
        (SOFTMAX + 3 * products) * tokens * vocab,
        read,
        write,
        hidden.dtype,
        "float64" if item == 8 else "float32",
        3 * chunks,
        again=product if is_backward else 0,
    )
    return as_product(work, tokens / chunks if chunks != 0 else 0, width, vocab, in_turn=True)


@linear_cross_entropy_total.costs
def _total_cost(out, hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, mean, needed):
    return _work(out, hidden, weight, needed, bias, target)


@linear_cross_entropy_total_backward.costs
def _total_backward_cost(out, grad, dhidden, dweight, dbias):
    return once(out, grad, dhidden, dweight, dbias, vector=dhidden.numel + dweight.numel + dbias.numel)


@linear_cross_entropy_tokens.costs
def _tokens_cost(out, hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap):
    return _work(out, hidden, weight, (False,) * 3, bias, target)


@linear_cross_entropy_tokens_backward.costs
def _tokens_backward_cost(
    out, grad, hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, needed
):
    return _work(out, hidden, weight, needed, bias, target, grad, is_backward=True)


linear_cross_entropy_total.parts = lambda hidden, weight, bias, target, ignored, s, z, cap, mean, needed: parts(
    hidden, weight, False, s, z, cap, needed
)
linear_cross_entropy_tokens.parts = lambda hidden, weight, bias, target, ignored, s, z, cap: parts(
    hidden, weight, False, s, z, cap, (False,) * 3
)
linear_cross_entropy_tokens_backward.parts = lambda grad, hidden, weight, bias, target, ignored, s, z, cap, needed: (
    parts(hidden, weight, True, s, z, cap, needed)
)
