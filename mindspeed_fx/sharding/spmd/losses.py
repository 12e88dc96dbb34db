"""Losses and reductions whose DTensor rules are wrong or gather everything: elements or rows on each rank's parts, then
our mean or sum.

DTensor (2.13) gives each rank's part to the loss's own backward, which divides by the elements of the part
(``mse_loss``), and makes a rank's own mean the whole's where the divisor is a sum of weights (``nll_loss``).
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from mindspeed_fx.compat import dtensor
from mindspeed_fx.compat.placements import REPLICATED
from mindspeed_fx.sharding.spmd import operators
from mindspeed_fx.sharding.spmd.aten_rules import (
    bind_arguments,
    dimensions,
    is_divided_along,
    pointwise_strategies,
    run,
)
from mindspeed_fx.sharding.spmd.parts import Strategy, from_parts, run_in_parts, sum_partials

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers of reductions."""


def _reduce(x: DTensor, reduction: int) -> DTensor:
    if reduction == NONE:
        return x
    return operators.mean(x) if reduction == MEAN else x.sum()


def _loss(target: Any, strategies: Callable[[list[DTensor]], list[Strategy]]) -> Callable:
    """``target`` without its reduction on each rank's parts, then the reduction."""

    def loss(*args: Any, **kwargs: Any) -> DTensor:
        arg = bind_arguments(target, args, kwargs)
        reduction = arg.pop("reduction")
        tensors = [v for v in arg.values() if isinstance(v, DTensor)]
        x = run_in_parts(lambda **local: target(**local, reduction=NONE), (), arg, strategies(tensors))
        return _reduce(x, reduction)

    return loss


def _by_leading(tensors: list[DTensor]) -> list[Strategy]:
    """By all dimensions but the last, if all arguments have the same shape."""
    x = tensors[0]
    return [(d, [d] * len(tensors)) for d in range(x.ndim - 1)] if all(t.shape == x.shape for t in tensors) else []


def _margin_rows(tensors: list[DTensor]) -> list[Strategy]:
    return [(0, [0, 0, *[REPLICATED] * (len(tensors) - 2)])] if tensors[0].ndim == 2 else []


def _cosine_rows(tensors: list[DTensor]) -> list[Strategy]:
    return [(0, [0, 0, 0])] if tensors[0].ndim == 2 else []


# ------------------------------------------------------------------ losses of classes


def _classes(target: Any) -> Callable:
    """``target``: nll_loss or cross_entropy_loss of x [N, C, ...]; a mean's divisor counts the weights of all ranks'
    targets.
    """

    def loss(*args: Any, **kwargs: Any) -> DTensor:
        arg = bind_arguments(target, args, kwargs)
        reduction, x, labels, weight = arg.pop("reduction"), arg["self"], arg["target"], arg.get("weight")
        shift = 0 if labels.is_floating_point() else 1
        weights = [REPLICATED] * (weight is not None)
        results = (
            []
            if x.ndim < 2
            else [(0, [0, 0, *weights]), *((d - 1, [d, d - shift, *weights]) for d in range(2, x.ndim))]
        )
        losses = run_in_parts(lambda **local: target(**local, reduction=NONE), (), arg, results)
        if reduction == NONE or (shift == 0 and reduction == MEAN):
            # of probabilities the mean is over all rows, whatever their weights
            return _reduce(losses, reduction)
        total = losses.sum()
        return total if reduction == SUM else total / _count_targets(labels, weight, arg["ignore_index"], total.dtype)

    return loss


def _count_targets(labels: DTensor, weight: DTensor | None, ignore_index: int, dtype: torch.dtype) -> DTensor:
    """The sum of the weights of all targets that count."""

    def counts(labels: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        kept = labels != ignore_index
        return kept.to(dtype) if weight is None else torch.where(kept, weight.detach()[labels.where(kept, 0)], 0)

    results = [(d, [d, *[REPLICATED] * (weight is not None)]) for d in range(labels.ndim)]
    return run_in_parts(counts, (labels, weight), {}, results).sum()


# ------------------------------------------------------------------ along divided dimensions


def _top(x: DTensor, dims: list[int]) -> DTensor:
    """The largest of ``x`` along ``dims``, kept, whole along them and finite; without gradient."""
    x = sum_partials(x.detach())
    placements = [Partial("max") if dtensor.is_divided(p) and p.dim in dims else p for p in x.placements]
    divided = [p if not p.is_partial() else Replicate() for p in placements]
    top = from_parts(x.to_local().amax(dims, keepdim=True), x.device_mesh, divided)
    top = DTensor.from_local(
        top.to_local(), x.device_mesh, placements, run_check=False, shape=top.shape, stride=top.stride()
    )
    top = top.redistribute(placements=divided)
    return torch.where(top.abs() == float("inf"), torch.zeros_like(top), top)


def _exponentials(x: DTensor, dims: list[int]) -> tuple[DTensor, DTensor, DTensor]:
    """x less its largest along ``dims``, that, and the sum of exponentials."""
    x = sum_partials(x)
    top = _top(x, dims)
    below = x - top
    return below, top, sum_partials(below.exp().sum(dims, keepdim=True))


def logsumexp(x: DTensor, dim: Any, keepdim: bool = False) -> DTensor:
    """``aten.logsumexp``; of a divided dimension each rank gives its largest and its sum of exponentials."""
    dims = dimensions({"dim": dim}, x.ndim)
    if dims is None or not is_divided_along(x, dims):
        return run(aten.logsumexp.default, (x, dim, keepdim), {})
    _, top, total = _exponentials(x, dims)
    out = total.log() + top
    for d in reversed(dims) if not keepdim else ():
        out = out.squeeze(d)
    return out


def softmax(x: DTensor, dim: int, dtype: torch.dtype | None = None) -> DTensor:
    """``aten.softmax``; see :func:`logsumexp`."""
    if not x.ndim or not is_divided_along(x, [dim % x.ndim]):
        return run(aten.softmax.int, (x, dim, dtype), {})
    below, _, total = _exponentials(x if dtype is None else x.to(dtype), [dim % x.ndim])
    return below.exp() / total


def log_softmax(x: DTensor, dim: int, dtype: torch.dtype | None = None) -> DTensor:
    """``aten.log_softmax``; see :func:`logsumexp`."""
    if not x.ndim or not is_divided_along(x, [dim % x.ndim]):
        return run(aten.log_softmax.int, (x, dim, dtype), {})
    below, _, total = _exponentials(x if dtype is None else x.to(dtype), [dim % x.ndim])
    return below - total.log()


HANDLERS: dict[Any, Callable] = {
    **{
        op: _loss(op, pointwise_strategies)
        for op in (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.binary_cross_entropy.default,
            aten.kl_div.default,
            aten.binary_cross_entropy_with_logits.default,
            aten.poisson_nll_loss.default,
            aten.hinge_embedding_loss.default,
            aten.margin_ranking_loss.default,
            aten.soft_margin_loss.default,
        )
    },
    aten.multi_margin_loss.default: _loss(aten.multi_margin_loss.default, _margin_rows),
    aten.multilabel_margin_loss.default: _loss(aten.multilabel_margin_loss.default, _margin_rows),
    aten.cosine_embedding_loss.default: _loss(aten.cosine_embedding_loss.default, _cosine_rows),
    aten.triplet_margin_loss.default: _loss(aten.triplet_margin_loss.default, _by_leading),
    **{
        op: _classes(op)
        for op in (
            aten.nll_loss.default,
            aten.nll_loss_nd.default,
            aten.nll_loss2d.default,
            aten.cross_entropy_loss.default,
        )
    },
    aten.logsumexp.default: logsumexp,
    aten.softmax.int: softmax,
    aten.log_softmax.int: log_softmax,
}
