"""Two linears and the divergence of their distributions in one, for distillation: logits never exist whole.

Of each token, with s and t the student's and the teacher's probabilities at a temperature and m the mixture
beta t + (1 - beta) s,

    beta 0: KL(t || s);  beta 1: KL(s || t);  between: beta KL(t || m) + (1 - beta) KL(s || m)

Source: Agarwal et al. 2024, "On-Policy Distillation of Language Models" (arXiv 2306.13649), equation 1 and section 2.
By the student's logits the gradient is s - t, s (log(s / t) - KL(s || t)) and (1 - beta) s (log(s / m) - KL(s || m)),
over the temperature: known while a chunk's logits are there, so that a student's three products and a teacher's one are
all there are. The teacher has no gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import SOFTMAX, SPECIAL, Cost, size
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator
from mindspeed_fx.kernels.cpu.products import product_of
from mindspeed_fx.kernels.linear_cross_entropy import _by_token, _empty_gradient, _saved_dtype
from mindspeed_fx.kernels.linear_cross_entropy_chunks import add_product, pieces, times_weight
from mindspeed_fx.kernels.linear_cross_entropy_work import CHUNK, full_chunk

INPUTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher_hidden, Tensor teacher_weight, Tensor? teacher_bias, "
    "Tensor weights"
)


def linear_jsd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None = None,
    weights: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """The generalized Jensen-Shannon divergence of two linears' distributions; formulas at the top of this file.

    Args:
        hidden: [tokens, hidden], float, of the student.
        weight: [vocab, hidden], of the same type.
        bias: [vocab] of the same type, or None.
        teacher_hidden: [tokens, teacher_hidden], float.
        teacher_weight: [vocab, teacher_hidden], of the same type.
        teacher_bias: [vocab] of the same type, or None.
        weights: [tokens], of each token's divergence; tokens of weight 0 take part in no product. None: 1 / tokens.
        beta: 0 (KL from the teacher), 1 (KL from the student), or between.
        temperature: what logits are divided by.

    Returns:
        the sum [] of the divergences times their weights, in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes that do not fit, a beta outside of 0 to 1, or a temperature that is not above 0.
    """
    torch._check_value(0 <= beta <= 1, lambda: f"linear_jsd: beta={beta}; valid: from 0 to 1")
    torch._check_value(temperature > 0, lambda: f"linear_jsd: temperature={temperature}; valid: a number above 0")
    torch._check_value(
        hidden.dim() == teacher_hidden.dim() == 2 and hidden.shape[0] == teacher_hidden.shape[0],
        lambda: (
            f"linear_jsd: hidden is {list(hidden.shape)}, the teacher's {list(teacher_hidden.shape)}; valid: "
            "[tokens, hidden] both"
        ),
    )
    torch._check_value(
        weight.shape[0] == teacher_weight.shape[0],
        lambda: (
            f"linear_jsd: {weight.shape[0]} classes of the student and {teacher_weight.shape[0]} of the teacher; "
            "valid: as many"
        ),
    )
    if weights is None:
        weights = hidden.new_full(hidden.shape[:1], 1 / max(hidden.shape[0], 1), dtype=accumulation_dtype(hidden.dtype))
    torch._check_value(
        weights.shape == hidden.shape[:1],
        lambda: f"linear_jsd: weights is {list(weights.shape)}; valid: [{hidden.shape[0]}]",
    )
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    teacher = (x if x is None else x.detach() for x in (teacher_hidden, teacher_weight, teacher_bias, weights))
    return torch.ops.mindspeed.linear_jsd_total(hidden, weight, bias, *teacher, beta, temperature, needed)[0]


LIBRARY.define(
    "linear_jsd(Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher_hidden, Tensor teacher_weight, Tensor? "
    "teacher_bias=None, Tensor? weights=None, float beta=0.5, float temperature=1.0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("linear_jsd", linear_jsd, "CompositeImplicitAutograd")


def _fake_total(hidden, weight, bias, *others):
    grads = (_empty_gradient(x, hidden, need) for x, need in zip((hidden, weight, bias), others[-1]))
    return hidden.new_empty((), dtype=accumulation_dtype(hidden.dtype)), *grads


@operator(
    f"linear_jsd_total({INPUTS}, float beta, float temperature, bool[3] needed) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_total,
    opaque=True,
)
def linear_jsd_total(
    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, weights, beta, temperature, needed
):
    """The loss [] of :func:`linear_jsd`, and the gradients for an upstream gradient of 1, empty where not needed."""
    wide, (tokens, vocab) = accumulation_dtype(hidden.dtype), (hidden.shape[0], weight.shape[0])
    rows, total = full_chunk(tokens, vocab, wide), hidden.new_zeros((), dtype=wide)
    dhidden, dweight, dbias = (
        torch.zeros(x.shape, dtype=wide, device=x.device) if need else None
        for x, need in zip((hidden, weight, bias), needed)
    )
    student_logits, teacher_logits = (hidden.new_empty((rows, vocab), dtype=wide) for _ in range(2))
    first = True
    with torch.autocast(hidden.device.type, enabled=False):
        kept = weights.nonzero().squeeze(1)
        for at in pieces(kept, tokens, rows) if len(kept) else ():
            x, upstream = hidden[at], weights[at].to(wide)
            s = _log_probabilities(x, weight, bias, temperature, student_logits)
            t = _log_probabilities(teacher_hidden[at], teacher_weight, teacher_bias, temperature, teacher_logits)
            losses, d = _divergence(s, t, beta)
            total += (losses * upstream).sum()
            if not any(needed):
                continue
            d = d.mul_((upstream / temperature).unsqueeze(1))
            if dbias is not None:
                dbias += d.sum(0)
            if dhidden is not None:
                dhidden[at] = times_weight(d, weight)
            if dweight is not None:
                add_product(dweight, d, x, 1.0, first)
            first = False
    grads = (hidden.new_empty(0) if g is None else g.to(_saved_dtype(hidden)) for g in (dhidden, dweight, dbias))
    return total, *grads


def _log_probabilities(x, weight, bias, temperature: float, out: Tensor) -> Tensor:
    """log softmax((x weight^T + bias) / temperature), in ``out``."""
    logits = out[: x.shape[0]]
    product_of(x, weight.t(), logits)
    if bias is not None:
        logits += bias
    logits = logits.div_(temperature) if temperature != 1 else logits
    return logits.sub_(logits.logsumexp(1, keepdim=True))


def _divergence(s: Tensor, t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Each token's divergence, and its gradient by the student's logits (of temperature 1), from log-probabilities; the
    gradient takes the place of one of them."""
    if beta == 0:
        probability = t.exp()
        losses = (probability * (t - s)).sum(1)
        return losses, s.exp_().sub_(probability)
    if beta == 1:
        probability, ratio = s.exp(), s.sub_(t)
        losses = (probability * ratio).sum(1)
        return losses, ratio.sub_(losses.unsqueeze(1)).mul_(probability)
    mixture = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
    of_teacher = (t.exp() * t.sub_(mixture)).sum(1)
    probability, ratio = torch.exp(s, out=t), s.sub_(mixture)
    of_student = torch.mul(probability, ratio, out=mixture).sum(1)
    losses = beta * of_teacher + (1 - beta) * of_student
    return losses, ratio.sub_(of_student.unsqueeze(1)).mul_(probability).mul_(1 - beta)


def _setup(ctx, inputs, output):
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 10
    grads = torch.ops.mindspeed.linear_cross_entropy_total_backward(grad, *ctx.saved_tensors)
    return *(g.to(ctx.dtype) if asked else None for g, asked in zip(grads, ctx.needs_input_grad)), *(None,) * 7


torch.library.register_autograd("mindspeed::linear_jsd_total", _backward, setup_context=_setup, lib=LIBRARY)


@linear_jsd_total.shard
def _sharding_rule(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, weights, *settings):
    """By token: a weight says what a token counts, on any rank."""
    teacher = (0, REPLICATED, REPLICATED)
    return [([PARTIAL, *_by_token(settings[-1])], [0, REPLICATED, REPLICATED, *teacher, 0])]


@linear_jsd_total.costs
def _cost(out, hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, weights, beta, temperature, needed):
    """A product for each of two logits, one for each of two gradients; a chunk's logits are written and read by each of
    some ten passes, and every chunk reads both weights."""
    (tokens, width), vocab, item = hidden.shape, weight.shape[0], 8 if hidden.dtype == "float64" else 4
    gradients, logits = int(needed[0]) + int(needed[1]), tokens * vocab * item
    chunks = -(-logits // CHUNK)
    flops = 2 * tokens * vocab * ((1 + gradients) * width + teacher_hidden.shape[1])
    read = size(hidden, teacher_hidden, weights) + 6 * logits + (weight.bytes + teacher_weight.bytes) * chunks
    write = size(out) + 4 * logits
    vector = tokens * vocab * (2 * SOFTMAX + 2 * SPECIAL + 10)
    return Cost(flops, flops, vector, read, write, hidden.dtype, "float64" if item == 8 else "float32", 20 * chunks)
