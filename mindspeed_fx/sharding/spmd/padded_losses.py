"""Sums and losses of padded values, which leave the padding out (:mod:`padded`)."""

from __future__ import annotations

import math
from typing import Any, Sequence

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor

from mindspeed_fx.graph.schema import argument
from mindspeed_fx.sharding.spmd import aten_rules, losses, vocabulary
from mindspeed_fx.sharding.spmd.padded import (
    Called,
    Padded,
    aligned,
    as_stored,
    broadcast,
    dims_of,
    masked,
    stored_of,
    tensors_of,
    wrap,
)
from mindspeed_fx.sharding.spmd.padded_axes import Axes, is_padded_axes, plain, stored_size
from mindspeed_fx.sharding.spmd.parts import sum_partials

aten = torch.ops.aten
NEUTRAL = {
    "sum": 0.0, "mean": 0.0, "amax": -math.inf, "amin": math.inf, "any": 0.0, "all": 1.0, "logsumexp": -math.inf,
    "count_nonzero": 0.0, "prod": 1.0,
}  # fmt: skip
"""Reductions, and what changes none of them."""

BY_ELEMENT = (
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy.default, aten.kl_div.default, aten.binary_cross_entropy_with_logits.default,
    aten.poisson_nll_loss.default, aten.soft_margin_loss.default,
)  # fmt: skip

BY_CLASS = (
    aten.nll_loss.default, aten.nll_loss_nd.default, aten.nll_loss2d.default, aten.cross_entropy_loss.default
)  # fmt: skip


def reduction(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    x, name, value = args[0], aten_rules.name_of(target), node.meta["val"]
    if not isinstance(x, Padded) or not isinstance(value, torch.Tensor):
        return NotImplemented
    arg = aten_rules.bind_arguments(target, args, kwargs)
    over = aten_rules.dimensions(arg, x.ndim) or list(range(x.ndim))
    fill = NEUTRAL[name]
    if not x.is_floating_point() and math.isinf(fill):
        return NotImplemented
    padded = [d for d in x.padded_dims if d in over]
    stored = masked(x, fill, padded) if padded else x.stored
    result = called(target, (stored, *args[1:]), kwargs)
    if name == "mean" and padded:
        more = math.prod(stored_size(x.dims[d]) for d in padded) / math.prod(x.shape[d] for d in padded)
        result = sum_partials(result) * more
    kept = [plain(1) if d in over else axes for d, axes in enumerate(x.dims) if arg.get("keepdim") or d not in over]
    return wrap(result, kept)


def softmax(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Along a padded dimension nothing is likely there."""
    x = args[0]
    dim = argument(node, "dim") % x.ndim
    if not is_padded_axes(x.dims[dim]):
        return wrap(called(target, (x.stored, *args[1:]), kwargs), x.dims)
    result = called(target, (masked(x, -math.inf, [dim]), *args[1:]), kwargs)
    only = tuple(axes if d == dim else plain(stored_size(axes)) for d, axes in enumerate(x.dims))
    return wrap(masked(Padded(result, only), 0.0), x.dims)


def loss_by_element(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    arg = aten_rules.bind_arguments(target, args, kwargs)
    reduction = arg.pop("reduction")
    tensors = tensors_of(arg)
    dims = aligned(tensors, torch.broadcast_shapes(*(t.shape for t in tensors)))
    own = {k: broadcast(v, dims) if isinstance(v, (DTensor, Padded)) else v for k, v in arg.items()}
    x = Padded(called(target, (), {**own, "reduction": losses.NONE}), tuple(dims))
    if reduction == losses.NONE:
        return wrap(x.stored, dims)
    stored = masked(x, 0.0)
    if reduction == losses.SUM:
        return stored.sum()
    return sum_partials(called(aten.mean.default, (stored,), {})) * (stored.numel() / math.prod(x.shape))


def loss_by_class(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """``nll_loss`` and ``cross_entropy``: labels that are padding do not count."""
    arg = aten_rules.bind_arguments(target, args, kwargs)
    x, labels = arg["self"], arg["target"]
    if x.ndim < 2 or labels.is_floating_point() or is_padded_axes(dims_of(x)[1]):
        return NotImplemented
    own = dims_of(x)
    rows = aligned([labels, Padded(stored_of(x), (own[0], *own[2:]))], labels.shape)
    arg["target"] = _ignored(labels, rows, arg["ignore_index"])
    arg["self"] = as_stored(x, {0: rows[0], **{d + 1: a for d, a in enumerate(rows) if d}})
    if isinstance(arg.get("weight"), Padded):
        return NotImplemented
    result = called(target, (), arg)
    return wrap(result, rows) if arg["reduction"] == losses.NONE else result


def _ignored(labels: Any, rows: Sequence[Axes], ignore_index: int) -> DTensor:
    """Labels whose padding is ``ignore_index``."""
    return masked(Padded(as_stored(labels, dict(enumerate(rows))), tuple(rows)), ignore_index)


def cross_entropy(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """``mindspeed::cross_entropy`` of logits [tokens, classes]."""
    logits, labels, *rest = args
    (rows,) = aligned([labels, Padded(stored_of(logits), dims_of(logits)[:1])], labels.shape)
    classes = dims_of(logits)[1]
    stored, labels = as_stored(logits, {0: rows, 1: classes}), as_stored(labels, {0: rows})
    if is_padded_axes(classes):
        results = vocabulary.cross_entropy(stored, labels, *rest, **{**kwargs, "classes": logits.shape[1]})
    else:
        results = called(target, (stored, labels, *rest), kwargs)
    return tuple(wrap(x, [rows]) for x in results)


def linear_cross_entropy(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """``mindspeed::linear_cross_entropy`` of hidden [tokens, width] and weight [classes, width]."""
    arg = aten_rules.bind_arguments(target, args, kwargs)
    hidden, weight, bias, labels = (arg[n] for n in ("hidden", "weight", "bias", "target"))
    if any(is_padded_axes(dims_of(x)[1]) for x in (hidden, weight)):
        return NotImplemented
    (rows,) = aligned([labels, Padded(stored_of(hidden), dims_of(hidden)[:1])], labels.shape)
    classes = dims_of(weight)[0]
    arg["hidden"], arg["weight"] = as_stored(hidden, {0: rows}), as_stored(weight, {0: classes})
    arg["bias"] = None if bias is None else as_stored(bias, {0: classes})
    arg["target"] = _ignored(labels, [rows], arg["ignore_index"])
    if is_padded_axes(classes):
        result = vocabulary.linear_cross_entropy(**arg, classes=weight.shape[0])
    else:
        result = called(target, tuple(arg.values()), {})
    return wrap(result, [rows]) if result.ndim else result
