"""The gated delta rule, chunk by chunk: linear attention whose state forgets and corrects itself.

Per head, with a state S [k_dim, v_dim] that starts at ``state`` and, token by token,

    S <- e^g S;  S <- S + beta k (v - S^T k)^T;  out = scale S^T q

Within a chunk of C tokens this is a triangular system. With c = cumsum(g), D_ij = e^(c_i - c_j) for i >= j,
A = tril(beta k k^T, -1) * D and T = (I + A)^-1:

    U = T (beta v);  W = T (beta k e^c);  N = U - W S
    out = scale (q e^c) S + P N with P = scale q k^T * D;  S <- e^(c_C) S + (k e^(c_C - c))^T N

Only the line of S goes from chunk to chunk; all else is a product for all chunks at once. Without g it is the delta
rule. Sources: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv
2406.06484); Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464), section 3.3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.compat.placements import PARTIAL, REPLICATED, Even
from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import operator
from mindspeed_fx.kernels.gated_delta_rule_chunks import (
    SPAN,
    Block,
    Span,
    block_gradients,
    run_backward,
    run_forward,
)
from mindspeed_fx.kernels.recurrence import check_shapes, computed_in, like_bsnd, register_gradient, rows_of_tokens

CHUNK = 64
"""Tokens of a chunk where the caller names none, as the models have it."""

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? state, float scale, float? norm_eps=None, "
    f"int chunk={CHUNK}"
)


def fake(q, k, v, g, beta, state, scale, norm_eps=None, chunk=CHUNK):
    size, wide = (k.shape[3], v.shape[3]), computed_in(q, k, v, g, beta, state)
    number = (v.shape[2] + SPAN * chunk - 1) // (SPAN * chunk)
    return (
        like_bsnd(v),
        v.new_empty((*v.shape[:2], *size), dtype=wide),
        v.new_empty((*v.shape[:2], number, *size), dtype=wide),
    )


@operator(f"gated_delta_rule({SCHEMA}) -> (Tensor, Tensor, Tensor)", fake, opaque=True)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
    norm_eps: float | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gated delta rule over a sequence; the formula stands at the top of this file.

    Args:
        q, k: [batch, k_heads, seq, k_dim], float; k_heads divides heads, and serves as many that follow each other.
        v: [batch, heads, seq, v_dim].
        g: [batch, heads, seq], the logarithm of what the state is multiplied with, at most 0; None: nothing is
            forgotten (the delta rule).
        beta: [batch, heads, seq], how much of a key's value is replaced.
        state: [batch, heads, k_dim, v_dim] at the start; None: zeros.
        scale: factor on q.
        norm_eps: q and k become x / sqrt(sum(x^2) + norm_eps) first; None: they are taken as they are.
        chunk: tokens of a chunk; the result does not depend on it but for rounding.

    Returns:
        out [batch, heads, seq, v_dim] of the type of v, stored as [batch, seq, heads, v_dim], and the state at the end
        [batch, heads, k_dim, v_dim] in float32 (float64 where an argument is); of that type, too, for the gradient,
        the states before each span of chunks [batch, heads, spans, k_dim, v_dim].

    Raises:
        ValueError: shapes that do not fit, or a chunk of no tokens.
    """
    check(q, k, v, g, beta, state, chunk)
    results = fake(q, k, v, g, beta, state, scale, norm_eps, chunk)

    def block_of(span: Span, start: Tensor) -> Block:
        return Block(span, q, k, v, g, beta, start, scale, norm_eps, results[1].dtype)

    return run_forward(block_of, q, v, state, results, chunk)


def fake_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None, chunk=CHUNK):
    final = fake(q, k, v, g, beta, state, scale, norm_eps, chunk)[1]
    dg = v.new_empty(0) if g is None else like_bsnd(g)
    return *(like_bsnd(x) for x in (q, k, v)), dg, like_bsnd(beta), final if state is None else final.to(state.dtype)


@operator(
    f"gated_delta_rule_backward(Tensor grad, Tensor? grad_state, Tensor starts, {SCHEMA}) -> (Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor)",
    fake_backward,
    opaque=True,
)
def gated_delta_rule_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None, chunk=CHUNK):
    """Gradients of q, k, v, g (empty without g), beta and the state at the start, each as its argument, the first five
    stored with the sequence before the heads. ``grad`` is that of the result, ``grad_state`` that of the last state.

    What stands inside a chunk is computed again, a span of chunks at a time from the state before it, ``starts``.
    """
    check(q, k, v, g, beta, state, chunk)
    results = fake_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps, chunk)

    def block_of(span: Span, start: Tensor) -> Block:
        return Block(span, q, k, v, g, beta, start, scale, norm_eps, starts.dtype)

    return run_backward(block_of, block_gradients, (grad, grad_state), starts, q, v, results, chunk)


def check(q, k, v, g, beta, state, chunk):
    heads = v.shape[1]
    torch._check_value(chunk >= 1, lambda: f"gated_delta_rule: chunk={chunk}; valid: a number of tokens from 1 on")
    torch._check_value(
        q.shape[1] > 0 and heads % q.shape[1] == 0,
        lambda: f"gated_delta_rule: {q.shape[1]} heads of keys; valid: a divisor of {heads}, the heads of values",
    )
    wanted = {
        "k": (k, q.shape),
        "v": (v, (q.shape[0], heads, q.shape[2], v.shape[3])),
        "g": (g, v.shape[:3]),
        "beta": (beta, v.shape[:3]),
        "state": (state, (q.shape[0], heads, q.shape[3], v.shape[3])),
    }
    check_shapes("gated_delta_rule", wanted)


# --------------------------------------------------------------------------- gradient, placements, cost


register_gradient("gated_delta_rule", 6)


def _placements(q, v):
    """(q and k, their gradients, v and its like, the state, the states of spans, g and beta, their gradients): by
    batch; by heads, those that share a key together; by the width of v. A sequence stays whole."""
    yield 0, 0, 0, 0, 0, 0, 0
    yield (1 if q.shape[1] == v.shape[1] else Even(1)), 1, 1, 1, 1, 1, 1
    yield REPLICATED, PARTIAL, 3, 3, 4, REPLICATED, PARTIAL


@gated_delta_rule.shard
def strategies(q, k, v, g, beta, state, scale, norm_eps=None, chunk=CHUNK):
    return [
        ([values, final, states], [keys, keys, values, gate, gate, final])
        for keys, _, values, final, states, gate, _ in _placements(q, v)
    ]


@gated_delta_rule_backward.shard
def strategies_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None, chunk=CHUNK):
    return [
        (
            [dkeys, dkeys, values, REPLICATED if g is None else dgate, dgate, final],
            [values, final, states, keys, keys, values, gate, gate, final],
        )
        for keys, dkeys, values, final, states, gate, dgate in _placements(q, v)
    ]


def _computed_tokens(x, chunk):
    """Of every head of x together; the last chunk is computed whole."""
    return math.prod(x.shape[:2]) * -(-x.shape[2] // chunk) * chunk


def _work(k, v, chunk):
    """Matrix FLOP per token: (of a head of keys, of a head of values that the sequence's line of states needs, of one
    otherwise); and vector FLOP of a head of values."""
    d, e = k.shape[3], v.shape[3]
    return 2 * chunk * d * 2, 2 * 2 * d * e, 2 * d * e + 2 * chunk * (d + 2 * e) + chunk * chunk, SPECIAL * chunk


@gated_delta_rule.costs
def cost(out, q, k, v, g, beta, state, scale, norm_eps=None, chunk=CHUNK):
    """Products of k k^T and q k^T per head of keys; W S, (k e^..)^T N, (q e^c) S, T (U, W), P N and the inverse."""
    pairs, line, rest, vector = _work(k, v, chunk)
    tokens, key_tokens = (_computed_tokens(x, chunk) for x in (v, q))
    flops = key_tokens * pairs + tokens * (line + rest)
    return once(out, q, k, v, g, beta, state, flops=flops, vector=tokens * vector, dtype="float32")


@gated_delta_rule_backward.costs
def backward_cost(out, grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None, chunk=CHUNK):
    """The forward's without (q e^c) S, P N and the state after a span; then six products with a state or its gradient,
    of chunk by chunk four with the width of v and one with that of k, with gates one of a state with its gradient; per
    head of keys three with the width of k."""
    pairs, line, rest, vector = _work(k, v, chunk)
    d, e = k.shape[3], v.shape[3]
    tokens, key_tokens = (_computed_tokens(x, chunk) for x in (v, q))
    again = key_tokens * pairs + tokens * (line + rest - 2 * d * e - 2 * chunk * e) - 2 * chunk * starts.numel
    new = key_tokens * 3 * 2 * chunk * d + tokens * (6 * 2 * d * e + 2 * chunk * (d + 4 * e))
    new += 0 if g is None else tokens // chunk * 2 * d * e
    tensors = (grad, grad_state, starts, q, k, v, g, beta, state)
    return once(out, *tensors, flops=again + new, vector=3 * tokens * vector, dtype="float32", again=again)


# --------------------------------------------------------------------------- Triton


def _refuse(q, k, v, g, beta, state, chunk):
    sizes = (k.shape[1], k.shape[3], v.shape[1], v.shape[3])
    if not all(isinstance(n, int) for n in sizes):
        return "heads or their widths are symbolic"
    if k.shape[3] > 128:
        return f"keys of {k.shape[3]} elements, the kernel takes up to 128"
    if chunk % 4:
        return f"chunks of {chunk} tokens, the kernel takes multiples of four"
    if any(x.dtype not in triton.DTYPES[1:] for x in (q, k, v)):
        return "q, k or v is no 16-bit type"
    read = (*(rows_of_tokens(x) for x in (q, k, v)), beta, *([] if g is None else [g]))
    if max(hint(x.shape[2]) * hint(x.stride(2)) for x in read) >= 2**31:
        return "a sequence of more elements than offsets of 32 bits reach"
    return triton.refuse_types(v.shape[3], g=g, beta=beta, state=state)


triton.kernel(
    gated_delta_rule,
    fake,
    "gated_delta_rule.forward",
    "triangular systems of all tiles, then a walk through the states",
    lambda q, k, v, g, beta, state, scale, norm_eps=None, chunk=CHUNK: _refuse(q, k, v, g, beta, state, chunk),
)
triton.kernel(
    gated_delta_rule_backward,
    fake_backward,
    "gated_delta_rule_backward.backward",
    "states again, a walk back, then all tiles at once",
    lambda grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None, chunk=CHUNK: (
        _refuse(q, k, v, g, beta, state, chunk) or triton.refuse_types(1, grad=grad, grad_state=grad_state)
    ),
)
triton.on_npu(gated_delta_rule)
triton.on_npu(gated_delta_rule_backward)
