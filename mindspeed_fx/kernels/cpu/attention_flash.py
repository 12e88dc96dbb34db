"""Flash attention on CPU, computed in float32, from C++ of our own: causal or not, grouped-query, sliding window,
soft-cap, sinks, dropout.

ATen's flash kernel multiplies tiles with the BLAS, which unpacks its arguments for each tile, goes through 512 keys at
a time whatever the diagonal leaves of them, and has neither windows nor soft-caps. Here tiles of 64 by 64 are
multiplied by oneDNN's small matrix product, tiles that no query sees are skipped, and no score leaves the first-level
cache.
Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2; measured by benchmarks/attention_cpu.py.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mindspeed_fx.compat import cpp
from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost import operators as cost
from mindspeed_fx.kernels import attention
from mindspeed_fx.kernels.attention_dropout import attention_dropout, attention_dropout_backward, dropout_strategies
from mindspeed_fx.kernels.base import operator
from mindspeed_fx.kernels.sharding import along

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What is read and written, in the order of ``Type`` of cpu/_types.cpp; computed is in float32."""

NARROW = TYPES[1:]
ALLOWED = len(TYPES)
"""Of a boolean mask, in the same order."""

TILE = 64
"""Queries and keys of a tile: ``T`` of cpu/flash_attention.cpp."""


class _Mask(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int64) for name in ("type", "batch", "head", "row")), ("data", ctypes.c_void_p)]


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in "batch heads kv_heads queries keys dim v_dim causal".split()),
        *((name, ctypes.c_int64) for name in "window threads gradient_heads type pairs".split()),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("kept", ctypes.c_float),
        ("mask", _Mask),
        ("keep", _Mask),
    ]


def supports(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> str | None:
    """Why the kernel cannot run on these, real or fake; None when it can. Begins to build it when it can."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in TYPES:
        return f"q, k and v have types {q.dtype}, {k.dtype}, {v.dtype}, not all float32, bfloat16 or float16"
    if mask is not None and mask.dtype not in (torch.bool, *TYPES):
        return f"a mask of type {mask.dtype}"
    if reason := cpp.problem():
        return reason
    cpp.start()
    return None


def supports_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> str | None:
    """As :func:`supports`, of the backward."""
    return f"a gradient of type {grad.dtype}" if grad.dtype != q.dtype else supports(q, k, v, mask)


def _fake(q, k, v, causal, scale, window=0, softcap=0.0, sinks=None, mask=None, keep=None, p=0.0):
    return attention.fake(q, k, v, None, causal, scale)


@operator(
    "attention_flash(Tensor q, Tensor k, Tensor v, bool causal, float scale, int window=0, float softcap=0.0, Tensor? "
    "sinks=None, Tensor? mask=None, Tensor? keep=None, float p=0.0) -> (Tensor, Tensor)",
    _fake,
    opaque=True,
)
def attention_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    keep: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention; arguments and results as those of ``mindspeed::attention``, whose reference runs where
    the kernel cannot.

    Args:
        q: [batch, heads, q_seq, dim], float32, bfloat16 or float16.
        k: [batch, kv_heads, kv_seq, dim]; kv_heads divides heads.
        v: [batch, kv_heads, kv_seq, v_dim].
        causal: query i sees keys 0..i.
        scale: factor on q k^T.
        window: with ``causal``, query i sees the last ``window`` keys up to its own; 0 for all.
        softcap: bound on the scores; 0 for none.
        sinks: [heads], one more score per head without a value, or None.
        mask: boolean (True: attend) or additive float32, bfloat16 or float16, broadcast to [batch, heads, q_seq,
            kv_seq]; tiles in which a boolean one allows nothing are skipped. Or None.
        keep: bool or uint8 [batch, heads, q_seq, kv_seq], False or 0 where a weight is dropped, otherwise 1, or None;
            not beside ``sinks``.
        p: probability with which weights were dropped: those that are kept are divided by 1 - p.

    Returns:
        out [batch, heads, q_seq, v_dim] stored as [batch, q_seq, heads, v_dim]; lse [batch, heads, q_seq].
    """
    if is_empty(q, k, v) or supports(q, k, v, mask) or cpp.function("attention_forward") is None:
        if keep is not None:
            return attention_dropout.reference(q, k, v, keep, mask, causal, scale, window, softcap, p)
        return attention.attention.reference(q, k, v, mask, causal, scale, window, softcap, sinks)
    q, k, v = (_rows(x) for x in (q, k, v))
    out, lse = _fake(q, k, v, causal, scale)
    sinks = None if sinks is None else sinks.float().contiguous()
    packed = torch.empty(v.shape[0] * v.shape[1] * v.shape[3] * -(-v.shape[2] // TILE) * TILE, dtype=torch.float32)
    problem, _alive = _problem(q, k, v, causal, scale, window, softcap, mask, keep, p)
    _call("attention_forward", problem, q, k, v, out, lse, sinks, packed)
    return out, lse


def _fake_backward(grad, q, k, v, out, lse, causal, scale, window=0, softcap=0.0, mask=None, keep=None, p=0.0):
    return attention.fake_backward(grad, q, k, v, out, lse, None, causal, scale)


@operator(
    "attention_flash_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, float "
    "scale, int window=0, float softcap=0.0, Tensor? mask=None, Tensor? keep=None, float p=0.0) -> (Tensor, Tensor, "
    "Tensor)",
    _fake_backward,
    opaque=True,
)
def attention_flash_backward(
    grad, q, k, v, out, lse, causal, scale, window=0, softcap=0.0, mask=None, keep=None, p=0.0
):
    """Gradients (dq, dk, dv) of :func:`attention_flash`, each shaped as its input, stored as [batch, seq, heads,
    dim].
    """
    if is_empty(grad, q, k, v) or supports_backward(grad, q, k, v, mask) or cpp.function("attention_backward") is None:
        if keep is not None:
            return attention_dropout_backward.reference(
                grad, q, k, v, out, lse, keep, mask, causal, scale, window, softcap, p
            )
        return attention.attention_backward.reference(grad, q, k, v, out, lse, mask, causal, scale, window, softcap)
    grad, q, k, v, out = (_rows(x) for x in (grad, q, k, v, out))
    dq, dk, dv = _fake_backward(grad, q, k, v, out, lse, causal, scale)
    problem, _alive = _problem(q, k, v, causal, scale, window, softcap, mask, keep, p)
    shared = problem.batch * problem.kv_heads < problem.threads and problem.heads != problem.kv_heads
    if not shared and q.dtype == torch.float32:
        _call("attention_backward", problem, grad, q, k, v, out, lse, dq, dk, dv)
        return dq, dk, dv
    # A thread takes whole heads: where those that share keys are too few, each query head gets gradients of its own
    # first.
    problem.gradient_heads = problem.heads if shared else problem.kv_heads
    wide = [x.new_empty((x.shape[0], problem.gradient_heads, *x.shape[2:]), dtype=torch.float32) for x in (k, v)]
    _call("attention_backward", problem, grad, q, k, v, out, lse, dq, *wide)
    for one, total in zip(wide, (dk, dv)):
        total.copy_(one.unflatten(1, (total.shape[1], -1)).sum(2) if shared else one)
    return dq, dk, dv


def is_empty(*tensors: Tensor) -> bool:
    """Whether one has no elements, of which small products cannot be made; sizes are numbers here."""
    return any(x.numel() == 0 for x in tensors)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    mask: Tensor | None,
    keep: Tensor | None,
    p: float,
) -> tuple[_Problem, list[Tensor]]:
    """The arguments, and the masks, which have to live as long as they do."""
    batch, heads, queries, dim = q.shape
    problem = _Problem(
        batch,
        heads,
        k.shape[1],
        queries,
        k.shape[2],
        dim,
        v.shape[3],
        causal,
        window if causal else 0,
        torch.get_num_threads(),
        k.shape[1],
        TYPES.index(q.dtype),
        cpp.multiplies_pairs(),
        scale,
        softcap,
        1 / (1 - p),
    )
    alive = []
    for m, into in ((mask, problem.mask), (keep, problem.keep)):
        if m is not None:
            rows = _rows(m.expand(batch, heads, queries, k.shape[2]))
            into.type = TYPES.index(rows.dtype) if rows.dtype in TYPES else ALLOWED
            into.batch, into.head, into.row, _ = rows.stride()
            into.data = rows.data_ptr()
            alive.append(rows)
    return problem, alive


def _call(kernel: str, problem: _Problem, *tensors: Tensor | None) -> None:
    strides = (ctypes.c_int64 * (3 * len(tensors)))()
    for i, x in enumerate(tensors):
        if x is not None and x.dim() > 1:  # the sinks and the work buffer have no rows
            strides[3 * i : 3 * i + 3] = x.stride()[:3]
    data = (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))
    cpp.call(kernel, ctypes.byref(problem), data, strides)


@attention_flash.shard
def _sharding_rule(q, k, v, causal, scale, window=0, softcap=0.0, sinks=None, mask=None, keep=None, p=0.0):
    return [
        ([out, lse], [dq, dk, dv, s, m, kept])
        for (out, lse, dq, dk, dv, m, s, _), kept in dropout_strategies(q, k, keep, mask, causal)
    ]


@attention_flash_backward.shard
def _sharding_rule_backward(grad, q, k, v, out, lse, causal, scale, window=0, softcap=0.0, mask=None, keep=None, p=0.0):
    results = [
        (grads, [o, dq, dk, dv, o, s, m, kept])
        for (o, s, dq, dk, dv, m, _, grads), kept in dropout_strategies(q, k, keep, mask, causal)
    ]
    # Some of the keys are enough, as in attention: the log-sum-exp and the result, of which the kernel makes rowsum(dO
    # * O), are of all.
    masks = [along(m, 3, 4) for m in (mask, keep)]
    keys = ([PARTIAL, 2, 2], [REPLICATED, REPLICATED, 2, 2, REPLICATED, REPLICATED, *masks])
    return results if causal else [*results, keys]


@attention_flash.costs
def _cost(out, q, k, v, causal, scale, window=0, softcap=0.0, sinks=None, mask=None, keep=None, p=0.0):
    return cost.attention(out, q, k, v, causal, sinks, mask, keep, window=window)


@attention_flash_backward.costs
def _backward_cost(out, grad, q, k, v, result, lse, causal, scale, window=0, softcap=0.0, mask=None, keep=None, p=0.0):
    return cost.attention(out, q, k, v, causal, grad, result, lse, mask, keep, window=window, backward=True)
