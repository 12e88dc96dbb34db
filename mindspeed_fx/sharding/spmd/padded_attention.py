"""Attention of padded values: by batch, by heads and by query; keys that are padding get no weight.

Heads of keys that fewer ranks could share are repeated to those of the queries before these are padded.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor

from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.spmd import aten_rules, kept_whole, ring
from mindspeed_fx.sharding.spmd.padded import (
    Padded,
    as_stored,
    dims_of,
    stored_of,
    undivided,
    wrap,
)
from mindspeed_fx.sharding.spmd.padded_axes import Axes, is_padded_axes, plain
from mindspeed_fx.sharding.spmd.redistribute import placed_at

aten = torch.ops.aten
BATCH, HEADS, SEQUENCE = 0, 1, 2


def attention(called: Callable, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """``mindspeed::attention`` and ``aten.scaled_dot_product_attention``; q, k, v [batch, heads, sequence, dim]."""
    arg = aten_rules.bind_arguments(target, args, kwargs)
    names = ["query", "key", "value"] if target is aten.scaled_dot_product_attention.default else ["q", "k", "v"]
    mask_name = "attn_mask" if names[0] == "query" else "mask"
    q, k, v = (arg[n] for n in names)
    sinks, mask = arg.get("sinks"), arg.get(mask_name)
    if any(x.ndim != 4 or is_padded_axes(dims_of(x)[3]) for x in (q, k, v)) or arg.get("dropout_p"):
        return NotImplemented
    causal = arg["is_causal" if names[0] == "query" else "causal"]
    if not _goes_round(q, k, v, causal, mask, arg.get("window")):
        if any(_is_padded(x, SEQUENCE) for x in (k, v)):
            kept_whole.note("keys and values are gathered, for their sequence is padded")
        k, v = (undivided(x, [SEQUENCE]) if is_padded_axes(dims_of(x)[SEQUENCE]) else x for x in (k, v))
    heads, batch = dims_of(q)[HEADS], next((dims_of(x)[BATCH] for x in (q, k, v) if _is_padded(x, BATCH)), None)
    batch = batch or dims_of(q)[BATCH]
    if is_padded_axes(heads) or any(_is_padded(x, HEADS) for x in (k, v)):
        k, v = (_repeated(x, q.shape[HEADS]) for x in (k, v))
    q = as_stored(q, {BATCH: batch, HEADS: heads, SEQUENCE: dims_of(q)[SEQUENCE]})
    keys = dims_of(k)[SEQUENCE]
    k, v = (as_stored(x, {BATCH: batch, HEADS: _same(x, heads), SEQUENCE: keys}) for x in (k, v))
    if k.shape[HEADS] == q.shape[HEADS]:
        k, v = (
            placed_at(x, [p if p.is_shard(HEADS) else own for p, own in zip(q.placements, x.placements)])
            for x in (k, v)
        )
    rows = dims_of(arg[names[0]])[SEQUENCE]
    if mask is not None:
        lead = 4 - mask.ndim
        wanted = {BATCH: batch, HEADS: heads, SEQUENCE: rows, 3: keys}
        arg[mask_name] = as_stored(
            mask, {d - lead: a for d, a in wanted.items() if d >= lead and mask.shape[d - lead] > 1}
        )
    if sinks is not None:
        arg["sinks"] = as_stored(sinks, {0: heads} if sinks.ndim == 1 else {BATCH: batch, 1: heads, 2: rows})
    arg |= dict(zip(names, (q, k, v)))
    values = list(arg.values())
    if names[0] == "query":
        result = called(target, tuple(values[:4]), dict(list(arg.items())[4:]))
        return wrap(result, (batch, heads, rows, dims_of(v)[3]))
    out, lse = called(target, tuple(values), {k: v for k, v in kwargs.items() if k in ("known", "inner")})
    return wrap(out, (batch, heads, rows, dims_of(v)[3])), None if lse is None else wrap(lse, (batch, heads, rows))


def _is_padded(x: Any, dim: int) -> bool:
    return is_padded_axes(dims_of(x)[dim])


def _same(x: Any, heads: Axes) -> Axes:
    return heads if x.shape[HEADS] == sum(a.size for a in heads) else dims_of(x)[HEADS]


def _repeated(x: Any, count: int) -> DTensor | Padded:
    """Keys or values for each head of the queries."""
    if x.shape[HEADS] == count:
        return x
    x = undivided(x, [HEADS])
    dims = dims_of(x)
    stored = stored_of(x).repeat_interleave(count // x.shape[HEADS], HEADS)
    return wrap(stored, [plain(count) if d == HEADS else a for d, a in enumerate(dims)])


def _goes_round(q: Any, k: Any, v: Any, causal: bool, mask: Any, window: Any) -> bool:
    """Whether a ring may take keys that are padding: those behind the last query, where attention is causal."""
    if not causal or mask is not None or window or dims_of(q)[SEQUENCE] != dims_of(k)[SEQUENCE]:
        return False
    stored = [stored_of(x) for x in (q, k, v)]
    try:
        dim = ring.over(*stored)
    except ShardingError:
        return False
    return dim is not None and stored[0].shape[SEQUENCE] % (2 * stored[0].device_mesh.size(dim)) == 0
