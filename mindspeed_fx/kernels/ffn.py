"""A feed-forward layer as one operator for inference: ``y = act(x W1 + b1) W2 + b2``, also of experts.

Source: MindSpeed's ``ffn`` and torch_npu's ``npu_ffn``. No gradient, as there: what is trained stays two products.
"""

from __future__ import annotations

import math
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels.base import operator

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "fastgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}
GATED: dict[str, Callable[[Tensor], Tensor]] = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu}
"""Of the first half of the columns; the second half is multiplied."""
ACTIVATIONS = (*PLAIN, *GATED)


def activate(x: Tensor, activation: str) -> Tensor:
    """[..., n] -> [..., n], or [..., n / 2] of a gate."""
    if activation in PLAIN:
        return PLAIN[activation](x)
    gate, up = x.chunk(2, -1)
    return GATED[activation](gate) * up


def _fake(x, weight1, weight2, bias1, bias2, counts, activation):
    return x.new_empty((*x.shape[:-1], weight2.shape[-1]))


@operator(
    "ffn(Tensor x, Tensor weight1, Tensor weight2, Tensor? bias1, Tensor? bias2, int[]? counts, str activation) -> "
    "Tensor",
    _fake,
)
def ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    counts: list[int] | None,
    activation: str,
) -> Tensor:
    """Two products with an activation between, computed in float32 or wider and rounded once.

    Args:
        x: [..., k], float; with ``counts`` [tokens, k], sorted by expert.
        weight1: [k, n], with ``counts`` [experts, k, n]; n is twice the rows of ``weight2`` for a gate.
        weight2: [n, m] or [experts, n, m].
        bias1, bias2: [n], [m] or [experts, n], [experts, m]; or None.
        counts: rows of each expert; None: no experts.
        activation: one of :data:`ACTIVATIONS`.

    Returns:
        [..., m], contiguous; rows beyond the sum of ``counts`` are zero.
    """
    if counts is None:
        return _layer(x, weight1, weight2, bias1, bias2, activation)
    parts = [
        _layer(rows, weight1[i], weight2[i], *(None if b is None else b[i] for b in (bias1, bias2)), activation)
        for i, rows in enumerate(x[: sum(counts)].split(list(counts)))
    ]
    rest = x.new_zeros(x.shape[0] - sum(counts), weight2.shape[-1])
    return torch.cat([*parts, rest])


def _layer(
    x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor | None, bias2: Tensor | None, activation: str
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    inner = x.to(wide) @ weight1.to(wide)
    inner = activate(inner if bias1 is None else inner + bias1.to(wide), activation)
    out = inner @ weight2.to(wide)
    return (out if bias2 is None else out + bias2.to(wide)).to(x.dtype)


@ffn.costs
def _cost(out, x, weight1, weight2, bias1, bias2, counts, activation):
    """Every row passes two matrices, whichever expert's they are."""
    inner = weight1.shape[-1]
    flops = 2 * (x.numel * inner + out.numel * weight2.shape[-2])
    vector = SPECIAL * math.prod(x.shape[:-1]) * inner
    return once(out, x, weight1, weight2, bias1, bias2, flops=flops, vector=vector, dtype=x.dtype)


@ffn.shard
def _sharding_rule(x, weight1, weight2, bias1, bias2, counts, activation):
    """Rows without experts; columns of the second matrix; for an activation of single elements also the inner columns,
    whose results are sums."""
    experts = int(counts is not None)
    biases = [b for b in (bias1, bias2) if b is not None]
    ways = [([1 if experts else x.ndim - 1], [REPLICATED, REPLICATED, 1 + experts, *_bias_ways(bias1, bias2, experts)])]
    if not experts:
        ways += [([d], [d, REPLICATED, REPLICATED, *[REPLICATED for _ in biases]]) for d in range(x.ndim - 1)]
    if activation in PLAIN and bias2 is None:
        ways.append(([PARTIAL], [REPLICATED, 1 + experts, experts, *([experts] if bias1 is not None else [])]))
    return ways


def _bias_ways(bias1, bias2, experts):
    return ([REPLICATED] if bias1 is not None else []) + ([experts] if bias2 is not None else [])
