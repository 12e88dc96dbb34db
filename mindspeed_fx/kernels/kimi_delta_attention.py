"""Kimi Delta Attention, chunk by chunk: the gated delta rule with a gate for every channel of the keys.

Per head, with a state S [k_dim, v_dim] that starts at ``state`` and, token by token,

    S <- Diag(e^g) S;  S <- S + beta k (v - S^T k)^T;  out = scale S^T q

Within a chunk of C tokens this is a triangular system, as that of the gated delta rule is (gated_delta_rule.py). With
c = cumsum(g) [C, k_dim] and the products of pairs <x, k>_ij = sum_d x_id k_jd e^(c_id - c_jd) for i >= j,
A = tril(beta <k, k>, -1) and T = (I + A)^-1:

    U = T (beta v);  W = T (beta k * e^c);  N = U - W S
    out = scale (q * e^c) S + P N with P = scale <q, k>;  S <- Diag(e^(c_C)) S + (k * e^(c_C - c))^T N

Source: Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture" (arXiv 2510.26692), section 3.
"""

from __future__ import annotations

import math

from torch import Tensor

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels import gated_delta_rule, triton
from mindspeed_fx.kernels.base import operator
from mindspeed_fx.kernels.gated_delta_rule_chunks import Span, run_backward, run_forward
from mindspeed_fx.kernels.kimi_delta_attention_chunks import CHUNK, Block, block_gradients
from mindspeed_fx.kernels.recurrence import check_shapes, register_gradient, rows_of_tokens

SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state, float scale, float? norm_eps=None"


def fake(q, k, v, g, beta, state, scale, norm_eps=None):
    return gated_delta_rule.fake(q, k, v, g, beta, state, scale, norm_eps, CHUNK)


@operator(f"kimi_delta_attention({SCHEMA}) -> (Tensor, Tensor, Tensor)", fake, opaque=True)
def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
    norm_eps: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Kimi Delta Attention over a sequence; the formula stands at the top of this file.

    Args:
        q, k: [batch, heads, seq, k_dim], float.
        v: [batch, heads, seq, v_dim].
        g: [batch, heads, seq, k_dim], the logarithm of what the rows of the state are multiplied with, at most 0.
        beta: [batch, heads, seq], how much of a key's value is replaced.
        state: [batch, heads, k_dim, v_dim] at the start; None: zeros.
        scale: factor on q.
        norm_eps: q and k become x / sqrt(sum(x^2) + norm_eps) first; None: they are taken as they are.

    Returns:
        out [batch, heads, seq, v_dim] of the type of v, stored as [batch, seq, heads, v_dim], and the state at the end
        [batch, heads, k_dim, v_dim] in float32 (float64 where an argument is); of that type, too, for the gradient,
        the states before each span of chunks [batch, heads, spans, k_dim, v_dim].

    Raises:
        ValueError: shapes that do not fit.
    """
    check(q, k, v, g, beta, state)
    results = fake(q, k, v, g, beta, state, scale, norm_eps)

    def block_of(span: Span, start: Tensor) -> Block:
        return Block(span, q, k, v, g, beta, start, scale, norm_eps, results[1].dtype)

    return run_forward(block_of, q, v, state, results, CHUNK)


def fake_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None):
    return gated_delta_rule.fake_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps, CHUNK)


@operator(
    f"kimi_delta_attention_backward(Tensor grad, Tensor? grad_state, Tensor starts, {SCHEMA}) -> (Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor)",
    fake_backward,
    opaque=True,
)
def kimi_delta_attention_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None):
    """Gradients of q, k, v, g, beta and the state at the start, each as its argument, the first five stored with the
    sequence before the heads. ``grad`` is that of the result, ``grad_state`` that of the last state.

    What stands inside a chunk is computed again, a span of chunks at a time from the state before it, ``starts``.
    """
    check(q, k, v, g, beta, state)
    results = fake_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps)

    def block_of(span: Span, start: Tensor) -> Block:
        return Block(span, q, k, v, g, beta, start, scale, norm_eps, starts.dtype)

    return run_backward(block_of, block_gradients, (grad, grad_state), starts, q, v, results, CHUNK)


def check(q, k, v, g, beta, state):
    wanted = {
        "k": (k, q.shape),
        "v": (v, (*q.shape[:3], v.shape[3])),
        "g": (g, q.shape),
        "beta": (beta, q.shape[:3]),
        "state": (state, (*q.shape[:2], q.shape[3], v.shape[3])),
    }
    check_shapes("kimi_delta_attention", wanted)


# --------------------------------------------------------------------------- gradient, placements, cost


register_gradient("kimi_delta_attention", 6)

_PLACEMENTS = [(0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (REPLICATED, PARTIAL, 3, 3, 4)]
"""(q, k, g and beta, their gradients, v and its like, the state, the states of spans): by batch; by heads; by the width
of v. A sequence stays whole."""


@kimi_delta_attention.shard
def strategies(q, k, v, g, beta, state, scale, norm_eps=None):
    return [
        ([values, final, states], [keys, keys, values, keys, keys, final])
        for keys, _, values, final, states in _PLACEMENTS
    ]


@kimi_delta_attention_backward.shard
def strategies_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None):
    return [
        (
            [dkeys, dkeys, values, dkeys, dkeys, final],
            [values, final, states, keys, keys, values, keys, keys, final],
        )
        for keys, dkeys, values, final, states in _PLACEMENTS
    ]


def _computed_tokens(v):
    """Of all heads together; the last chunk is computed whole."""
    return math.prod(v.shape[:2]) * -(-v.shape[2] // CHUNK) * CHUNK


def _work(k, v):
    """FLOP per token of a head: (matrix, those of them for (q e^c) S and P N, vector)."""
    d, e = k.shape[3], v.shape[3]
    pairs, states, triangles = 2 * d * (CHUNK - 1), 3 * 2 * d * e, 2 * CHUNK * (d + 2 * e) + CHUNK * CHUNK
    levels = CHUNK.bit_length() - 1
    return pairs + states + triangles, 2 * d * e + 2 * CHUNK * e, SPECIAL * d * (levels + 2)


@kimi_delta_attention.costs
def cost(out, q, k, v, g, beta, state, scale, norm_eps=None):
    """Products of pairs of k and of q; W S, (k e^..)^T N, (q e^c) S, T (U, W), P N and the inverse."""
    matrix, _, vector = _work(k, v)
    tokens = _computed_tokens(v)
    return once(out, q, k, v, g, beta, state, flops=tokens * matrix, vector=tokens * vector, dtype="float32")


@kimi_delta_attention_backward.costs
def backward_cost(out, grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None):
    """The forward's without (q e^c) S, P N and the state after a span; then six products with a state or its gradient,
    of chunk by chunk four with the width of v and one with that of k; two for each of the products of pairs."""
    matrix, results, vector = _work(k, v)
    d, e = k.shape[3], v.shape[3]
    tokens = _computed_tokens(v)
    again = tokens * (matrix - results) - 2 * CHUNK * starts.numel
    new = tokens * (6 * 2 * d * e + 2 * CHUNK * (d + 4 * e) + 4 * d * (CHUNK - 1))
    tensors = (grad, grad_state, starts, q, k, v, g, beta, state)
    return once(out, *tensors, flops=again + new, vector=3 * tokens * vector, dtype="float32", again=again)


# --------------------------------------------------------------------------- Triton


def _refuse(q, k, v, g, beta, state):
    if not all(isinstance(n, int) for n in v.shape[1::2] + k.shape[3:]):
        return "heads or their widths are symbolic"
    if k.shape[3] > 128:
        return f"keys of {k.shape[3]} elements, the kernel takes up to 128"
    if any(x.dtype not in triton.DTYPES[1:] for x in (q, k, v)):
        return "q, k or v is no 16-bit type"
    read = (*(rows_of_tokens(x) for x in (q, k, v, g)), beta)
    if max(hint(x.shape[2]) * hint(x.stride(2)) for x in read) >= 2**31:
        return "a sequence of more elements than offsets of 32 bits reach"
    return triton.refuse_types(v.shape[3], g=g, beta=beta, state=state)


triton.kernel(
    kimi_delta_attention,
    fake,
    "kimi_delta_attention.forward",
    "triangular systems of all tiles, then a walk through the states",
    lambda q, k, v, g, beta, state, scale, norm_eps=None: _refuse(q, k, v, g, beta, state),
)
triton.kernel(
    kimi_delta_attention_backward,
    fake_backward,
    "kimi_delta_attention_backward.backward",
    "states again, a walk back, then all tiles at once",
    lambda grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None: (
        _refuse(q, k, v, g, beta, state) or triton.refuse_types(1, grad=grad, grad_state=grad_state)
    ),
)
triton.on_npu(kimi_delta_attention)
triton.on_npu(kimi_delta_attention_backward)
