"""Operators that keep rows divided where DTensor alone would gather them: linear layers, attention by query."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mindspeed_fx.compat import dtensor
from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.spmd import aten_rules, ring
from mindspeed_fx.sharding.spmd.kept_whole import keep_whole
from mindspeed_fx.sharding.spmd.parts import Strategy, run_in_parts, run_whole, sum_partials, whole
from mindspeed_fx.sharding.spmd.redistribute import placed_at, reshape

aten = torch.ops.aten


def linear(x: DTensor, weight: DTensor, bias: DTensor | None = None) -> DTensor:
    """``aten.linear`` with a placement for every leading dimension."""
    return torch.ops.mindspeed.linear(x, weight, bias)


def matmul(x: DTensor, y: DTensor) -> DTensor:
    """``aten.matmul``; by a matrix it is a linear layer. Where several mesh dimensions may divide one of a batch, or of
    the gradient alone, DTensor (2.13) cannot view that for a product of three dimensions, and each rank multiplies its
    parts."""
    if y.ndim == 2 and x.ndim >= 2:
        return linear(x, y.t())
    if min(x.ndim, y.ndim) > 1 and aten_rules.may_be_in_pieces([x, y]):
        return run_in_parts(torch.matmul, (x, y), {}, _product_strategies(x.shape, y.shape))
    return torch.matmul(x, y)


def _product_strategies(x: torch.Size, y: torch.Size) -> list[Strategy]:
    """Of products of matrices: by every dimension of the batch, which one of them may have alone, by rows, by columns,
    and by what is summed."""
    rows, columns, ndim = len(x) - 2, len(y) - 1, max(len(x), len(y))
    strategies: list[Strategy] = [(ndim - 2, [rows, REPLICATED]), (ndim - 1, [REPLICATED, columns])]
    for back in range(3, ndim + 1):
        own = [len(s) - back if back <= len(s) and s[-back] != 1 else REPLICATED for s in (x, y)]
        strategies.append((ndim - back, own))
    return [*strategies, (PARTIAL, [rows + 1, columns - 1])]


def repeat(x: DTensor, repeats: Sequence[int]) -> DTensor:
    """``aten.repeat`` and ``aten.tile``, as views: DTensor (2.13) views the gradient of a divided dimension that was
    repeated as parts of another."""
    sizes = [1] * (len(repeats) - x.ndim) + list(x.shape)
    times = [1] * (x.ndim - len(repeats)) + list(repeats)
    apart = reshape(x, [n for size in sizes for n in (1, size)])
    repeated = apart.expand([n for both in zip(times, sizes) for n in both])
    return reshape(repeated, [n * size for n, size in zip(times, sizes)])


def rms_norm(x: DTensor, weight: DTensor | None, eps: float, cast_first: bool) -> Any:
    """``mindspeed::rms_norm``. Of rows divided by width, each rank gives its squares, one number per row is summed."""
    if not any(p == Shard(x.ndim - 1) for p in x.placements):
        return torch.ops.mindspeed.rms_norm(x, weight, eps, cast_first)
    over = [i for i, p in enumerate(x.placements) if p == Shard(x.ndim - 1)]
    local = None
    if weight is not None:
        tokens = [
            Partial() if p.is_shard() and i not in over else Shard(0) if i in over else Replicate()
            for i, p in enumerate(x.placements)
        ]
        local = weight.redistribute(
            placements=[Shard(0) if i in over else Replicate() for i in range(x.device_mesh.ndim)]
        ).to_local(grad_placements=tokens)
    y, rstd = _DividedNorm.apply(x.to_local(), local, x.device_mesh, over, x.shape[-1], eps, cast_first)
    placed = [Replicate() if i in over else p for i, p in enumerate(x.placements)]
    return DTensor.from_local(
        y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    ), DTensor.from_local(rstd, x.device_mesh, placed, run_check=False)


class _DividedNorm(torch.autograd.Function):
    """RMSNorm of rows of which each rank has a part: one number per row is summed over the ranks, forward and backward.

    With n = x rstd and h = dy w: dx = rstd (h - n mean(h n)), dw = sum of dy n over rows. Written for local tensors: of
    partial sums that autograd makes of rstd's gradient, DTensor would expand each to the whole width before it adds
    them up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        mesh: Any,
        over: list[int],
        width: int,
        eps: float,
        cast_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.to(accumulation_dtype(x.dtype))
        rstd = torch.rsqrt(dtensor.all_reduce((wide * wide).sum(-1, keepdim=True), mesh, over) / width + eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mesh, ctx.over, ctx.width, ctx.cast_first = mesh, over, width, cast_first
        ctx.mark_non_differentiable(rstd)
        normed = wide * rstd
        if weight is None:
            return normed.to(x.dtype), rstd
        return (normed.to(x.dtype) * weight if cast_first else (normed * weight.to(wide.dtype)).to(x.dtype)), rstd

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _grad_rstd: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        wide, dweight = rstd.dtype, None
        normed = x.to(wide) * rstd
        if weight is None:
            scaled = grad.to(wide)
        elif ctx.cast_first:
            scaled, dweight = (
                (grad * weight).to(wide),
                (grad * normed.to(x.dtype)).flatten(0, -2).sum(0).to(weight.dtype),
            )
        else:
            scaled, dweight = (
                grad.to(wide) * weight.to(wide),
                (grad.to(wide) * normed).flatten(0, -2).sum(0).to(weight.dtype),
            )
        mean = dtensor.all_reduce((scaled * normed).sum(-1, keepdim=True), ctx.mesh, ctx.over) / ctx.width
        return (rstd * (scaled - normed * mean)).to(x.dtype), dweight, None, None, None, None, None


def add_rms_norm(x: DTensor, residual: DTensor, weight: DTensor | None, eps: float, cast_first: bool) -> Any:
    """``mindspeed::add_rms_norm``; see :func:`rms_norm`."""
    if not any(p == Shard(x.ndim - 1) for p in x.placements):
        return torch.ops.mindspeed.add_rms_norm(x, residual, weight, eps, cast_first)
    total = x + residual
    y, rstd = rms_norm(total, weight, eps, cast_first)
    return y, total, rstd


def mean(x: DTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> DTensor:
    """``aten.mean``. Of a mean over what ranks share, autograd expands the gradient to the whole and divides that, on
    every rank; here it is divided first, and every rank expands its part."""
    dims = (
        list(range(x.ndim))
        if dim is None or dim == []
        else [d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)]
    )
    if any(map(dtensor.is_strided, x.placements)) or not any(p.is_shard() and p.dim in dims for p in x.placements):
        return torch.mean(x, dims, keepdim, dtype=dtype)
    return _Mean.apply(x, dims, keepdim, dtype)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.like, ctx.dims, ctx.keepdim = (
            (x.shape, x.dtype, [Replicate() if p.is_partial() else p for p in x.placements]),
            dims,
            keepdim,
        )
        return torch.mean(x, dims, keepdim, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None, None
        shape, dtype, placements = ctx.like
        grad = (sum_partials(grad) / math.prod(shape[d] for d in ctx.dims)).to(dtype)
        for d in sorted(ctx.dims) if not ctx.keepdim else ():
            grad = grad.unsqueeze(d)
        return grad.expand(shape).redistribute(placements=placements), None, None, None


def locally(target: Any) -> Any:
    """``target`` on each rank's own part, for operators of one tensor that work along one dimension (position 1, or 2
    for top-k).

    Tokens of [batch, sequence] that two mesh dimensions divide are parts of parts once they are flattened: DTensor
    (2.13) does not keep them for top-k and the like, and what it gathers instead is wrong on a mesh of three
    dimensions. Elsewhere its rule is ours too: DTensor's cache does not ask for how many top-k is (2.13), and gives the
    shape of a call before.
    """

    def run(x: DTensor, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[at] if len(args) > at else -1) % max(x.ndim, 1)
        if not any(map(dtensor.is_strided, x.placements)) or any(
            p.is_partial() or dtensor.is_divided(p, dim) for p in x.placements
        ):
            return aten_rules.run(target, (x, *args), kwargs)
        results = target(x.to_local(), *args, **kwargs)

        def result(local: torch.Tensor) -> DTensor:
            shape = torch.Size((*x.shape[:dim], local.shape[dim], *x.shape[dim + 1 :]))
            return DTensor.from_local(
                local,
                x.device_mesh,
                x.placements,
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )

        return result(results) if isinstance(results, torch.Tensor) else tuple(map(result, results))

    at = 1 if target is aten.topk.default else 0
    return run


def attention(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    mask: DTensor | None,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: DTensor | None = None,
    known: torch.Tensor | None = None,
    inner: Mapping[int, int] | None = None,
) -> Any:
    """``mindspeed::attention``. Where the sequences of all three are divided, keys and values go round; where only the
    queries are, causal means a mask of this rank's rows.

    Args:
        known: see :func:`ring.attention`.
        inner: mesh dimension -> ranks of an inner ring.
    """
    if (dim := ring.over(q, k, v)) is not None:
        try:
            return ring.attention(
                q, k, v, dim, mask, causal, scale, window, softcap, sinks, known, (inner or {}).get(dim, 0)
            ), None  # no pass reads the log-sum-exp, which would have to be sent back too
        except ShardingError as error:
            keep_whole(error)
        k, v = (placed_at(t, [Replicate() if i == dim else p for i, p in enumerate(t.placements)]) for t in (k, v))
    q, k, v = _shared_heads(q, k, v)
    if causal and _queries_divided(q, k):
        mask, causal, window = _rows_of_causal(q, k, mask, window), False, 0
    return torch.ops.mindspeed.attention(q, k, v, mask, causal, scale, window, softcap, sinks)


def varlen_attention(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    documents: DTensor,
    ends: DTensor | None,
    causal: bool,
    scale: float,
    window: int = 0,
    known: torch.Tensor | None = None,
    inner: Mapping[int, int] | None = None,
) -> Any:
    """``mindspeed::varlen_attention``; where the sequence is divided, attention with a mask of the documents."""
    if not any(p == Shard(2) for p in q.placements):
        return torch.ops.mindspeed.varlen_attention(q, k, v, documents, ends, causal, scale, window)
    documents = documents.redistribute(placements=[Replicate() if p == Shard(1) else p for p in documents.placements])
    return attention(
        q, k, v, (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1), causal, scale, window, known=known
    )


def scaled_dot_product_attention(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    attn_mask: DTensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    known: torch.Tensor | None = None,
    inner: Mapping[int, int] | None = None,
) -> DTensor:
    """``aten.scaled_dot_product_attention``, which DTensor would take apart. With dropout every rank computes the
    whole: what it drops is drawn inside, for all heads and rows at once."""
    if dropout_p:
        arguments = (q, k, v, attn_mask, dropout_p, is_causal)
        return run_whole(
            aten.scaled_dot_product_attention.default, arguments, {"scale": scale, "enable_gqa": enable_gqa}
        )
    lead = q.ndim - 4
    if lead < 0:
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    out = attention(
        q, k, v, attn_mask, is_causal, q.shape[-1] ** -0.5 if scale is None else scale, known=known, inner=inner
    )[0]
    return out.squeeze(0) if lead < 0 else out


def _shared_heads(q: DTensor, k: DTensor, v: DTensor) -> tuple[DTensor, DTensor, DTensor]:
    """Where ranks have heads of ``q`` and all of the fewer ones of ``k`` and ``v``: these repeated until every rank has
    those that its queries read, and divided alike; their gradients are summed over the copies.
    """
    over = [
        i for i, p in enumerate(q.placements) if p == Shard(1) and k.placements[i] == v.placements[i] == Replicate()
    ]
    if not over or k.shape[1] == q.shape[1]:
        return q, k, v
    heads = math.lcm(k.shape[1], math.prod(q.device_mesh.size(i) for i, p in enumerate(q.placements) if p == Shard(1)))
    heads = heads if q.shape[1] % heads == 0 else q.shape[1]
    placed = [Shard(1) if i in over else p for i, p in enumerate(k.placements)]
    repeated = (t.repeat_interleave(heads // t.shape[1], 1) if heads != t.shape[1] else t for t in (k, v))
    k, v = (placed_at(t, placed) for t in repeated)
    return q, k, v


def _queries_divided(q: DTensor, k: DTensor) -> bool:
    return any(p == Shard(2) and kept.is_replicate() for p, kept in zip(q.placements, k.placements))


def _rows_of_causal(q: DTensor, k: DTensor, mask: DTensor | None, window: int) -> DTensor:
    rows = (
        whole(torch.arange(q.shape[2], device=q.device), q)
        .redistribute(placements=[Shard(0) if p == Shard(2) else Replicate() for p in q.placements])
        .unsqueeze(1)
    )
    columns = whole(torch.arange(k.shape[2], device=q.device), q).unsqueeze(0)
    keep = rows >= columns
    if window:
        keep = keep & (rows - columns < window)
    if mask is None:
        return keep
    return keep & mask if mask.dtype == torch.bool else torch.where(keep, mask, torch.full_like(mask, float("-inf")))
