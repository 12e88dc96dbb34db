"""Attention on cuda: torch chooses among flash kernels behind ``scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat.symbols import statically_known_true
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Miss
from mindspeed_fx.passes.fusion.analysis import mask
from mindspeed_fx.passes.fusion.analysis.attention_scores import Scores
from mindspeed_fx.passes.fusion.analysis.bands import Band, is_causal, is_window
from mindspeed_fx.passes.fusion.emit import fully_masked_rows
from mindspeed_fx.passes.fusion.emit.attention_operands import operands, put, widen


def emit(
    gm: fx.GraphModule, root: fx.Node, scores: Scores, q: fx.Node, k: fx.Node, v: fx.Node, *, notes: list[str]
) -> list[fx.Node]:
    """``aten.scaled_dot_product_attention`` in the place of ``root``; it takes causality or one mask. A call of it
    stays unless its mask is causal, which flash kernels take by a flag and compute half of, or its heads are repeated.
    """
    if scores.drop is not None:
        raise Miss(
            f"dropout of {scores.p} on the attention weights: scaled_dot_product_attention would draw other numbers"
        )
    if scores.softcap or scores.sinks is not None:
        raise Miss(f"no flash kernel on cuda takes {'a soft-cap' if scores.softcap else 'sinks'}")
    masks, keys = scores.blocking, match.value(k).shape[2]
    causal = all(_hides_later_keys(mask.kept_band(m, kind), keys) for kind, m, _ in masks) if masks else scores.causal
    times = match.value(q).shape[1] // match.value(k).shape[1]
    if times != 1 and not _takes_groups(match.value(q), match.value(v), bool(masks) and not causal):
        k, v = (rewrite.insert(gm, root, aten.repeat_interleave.self_int, (x, times, 1)) for x in (k, v))
        times = 1
    if root.target is aten.scaled_dot_product_attention.default and not (causal if masks else times != 1):
        raise Miss(
            "scaled_dot_product_attention chooses among flash kernels itself on cuda"
            + (", with a mask that is not known while compiling to be causal" if masks else "")
        )
    q, k, m, visible_rows = operands(gm, root, scores, q, k, v, [] if causal else masks, notes)
    if m is not None and match.value(m).dtype != torch.bool:
        m = widen(gm, root, m, match.value(q).dtype)
    options = {"scale": scores.scale, **({"enable_gqa": True} if times != 1 else {})}
    out = rewrite.insert(gm, root, aten.scaled_dot_product_attention.default, (q, k, v, m, 0.0, causal), options)
    return put(
        gm, root, scores, out if visible_rows is None else fully_masked_rows.with_means(gm, root, out, visible_rows, v)
    )


def _takes_groups(q: torch.Tensor, v: torch.Tensor, masked: bool) -> bool:
    """Whether a flash kernel takes fewer heads of keys than of queries, none with a mask on every device; without
    one torch would compose it, which it does in float64 anyway.
    """
    if q.dtype == torch.float64:
        return True
    old = q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0)
    return not masked and q.dtype != torch.float32 and q.shape[-1] == v.shape[-1] <= 256 and not old


def _hides_later_keys(keep: Band | None, keys: Any) -> bool:
    """Whether what a mask allows is causal: without a window, or with one that reaches every one of the ``keys``."""
    return is_causal(keep) or (is_window(keep) and statically_known_true(1 - keep.low >= keys))
