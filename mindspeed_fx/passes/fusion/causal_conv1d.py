"""A depthwise convolution over a sequence that looks back alone becomes ``mindspeed::causal_conv1d``, with its SiLU.

Zeros before the sequence are the convolution's padding, whose last outputs are cut off, or a pad before it. Safe
because the operator sums the same products, in at least the precision of the model. On an npu, whose library has
kernels for it, the model's convolution stays, and on cpu beside generated code, which takes as long without it (1.02 of
the time, 1.67 of the memory: benchmarks/results/2026-11-25-causal_conv1d.txt). On cuda cuDNN's gradients take four
times as long (benchmarks/results/2026-11-27-gpu_4.txt).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Miss, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import norms

NAME, OPERATOR = "fusion.causal_conv1d", "mindspeed::causal_conv1d"
LARGEST = 8
"""Weights of a channel; the products of more are a loop's work, not a line's."""


@register(NAME)
def causal_conv1d(gm: fx.GraphModule, context: Context) -> PassReport:
    """Causal depthwise convolution and SiLU become one operator."""
    report = PassReport(NAME)
    if context.options.target == "npu":
        if next(iter(calls(gm, aten.conv1d.default)), None) is not None:
            report.note_reason("on npu the model's convolution stays")
        return report
    rewrite_each(report, OPERATOR, calls(gm, aten.conv1d.default), lambda node: _rewrite(gm, context, node))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, context: Context, node: fx.Node) -> Outcome:
    x, weight, bias = (match.argument(node, name) for name in ("input", "weight", "bias"))
    channels, size = match.value(weight).shape[0], match.value(weight).shape[2]
    if (
        match.value(node).dim() != 3
        or match.argument(node, "groups", 1) != channels
        or match.value(weight).shape[1] != 1
    ):
        return None
    if not symbols.statically_known_true(match.value(x).shape[1] == channels):
        return "a channel has several outputs"
    settings = [list(match.argument(node, name, [1])) for name in ("stride", "dilation")]
    if settings != [[1], [1]]:
        return f"stride {settings[0][0]} and dilation {settings[1][0]}: only 1 and 1 are a shift by a token each"
    if size > LARGEST:
        return f"{size} weights for a channel; at most {LARGEST} are fused"
    if context.left_to_inductor(NAME):
        return (
            "on cpu the model's convolution beside generated code was measured no slower, with less memory; "
            f'put "{NAME}" in enable to fuse all the same'
        )
    source, out = _causal(node, x, size)
    activated = norms.only_user(out)
    silu = match.is_call(activated, aten.silu.default)
    out = activated if silu else out
    source, out = _narrow(source, out)
    if reason := match.unsafe([node, out], [source, weight, bias]):
        return reason
    weights = weight.args[0] if _is_column(weight) else rewrite.insert(gm, node, aten.squeeze.dim, (weight, 1))
    arguments = (source, weights, bias, silu)
    new = rewrite.insert(gm, node, torch.ops.mindspeed.causal_conv1d.default, arguments)
    outcome = site(OPERATOR, node, [node, out])
    if reason := rewrite.substitute(gm, out, new):
        raise Miss(reason)
    return outcome


def _is_column(weight: fx.Node) -> bool:
    return match.is_call(weight, aten.unsqueeze.default) and weight.args[1] % 3 == 1


def _causal(node: fx.Node, x: fx.Node, size: int) -> tuple[fx.Node, fx.Node]:
    """(the sequence, the sums of as many tokens)

    Raises:
        Miss: tokens see others behind them, or are not as many.
    """
    padding = match.argument(node, "padding", [0])
    if list(padding) == [0] and size == 1:
        return x, node
    if list(padding) == [0] and match.is_call(x, aten.pad.default):
        zeros = match.argument(x, "mode") in (None, "constant") and not match.argument(x, "value")
        if list(x.args[1]) == [size - 1, 0] and zeros:
            return x.args[0], node
    if list(padding) != [size - 1]:
        raise Miss(f"padding {list(padding)} with {size} weights is not causal")
    cut, seq = norms.only_user(node), match.value(x).shape[2]
    if not match.is_call(cut, aten.slice.Tensor) or match.argument(cut, "dim", 0) % 3 != 2:
        raise Miss("more is read of the convolution than the outputs of its tokens")
    start, end, step = (match.argument(cut, name) for name in ("start", "end", "step"))
    if start not in (0, None) or step not in (1, None) or not _is_seq(end, seq, size):
        raise Miss("more is read of the convolution than the outputs of its tokens")
    return x, cut


def _is_seq(end: Any, seq: Any, size: int) -> bool:
    """Whether a slice of seq + size - 1 elements up to ``end`` has seq."""
    end = match.value(end) if isinstance(end, fx.Node) else end
    return end == 1 - size or (end is not None and symbols.statically_known_true(end == seq))


def _narrow(source: fx.Node, out: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Before the sequence was widened, after the result was narrowed again, where both are."""
    inner, after = norms.strip_widening(source), norms.only_user(out)
    if (
        inner is not source
        and match.is_call(after, aten.to.dtype)
        and match.value(after).dtype == match.value(inner).dtype
    ):
        return inner, after
    return source, out
