"""The linear in front of a loss, and what is done to its logits before the loss, done to its inputs instead.

Casts, views, slices and transposes of tokens (the shift of a language model) and scales (Granite, Cohere; a trained
temperature; one number for each token) go to the hidden states, which are smaller than the logits; a bias to the
linear's own; a slice of the classes (a padded vocabulary) to the weight. A soft-cap is the operator's. Used by
``fusion.linear_cross_entropy``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match
from mindspeed_fx.graph.layout import strip_transpose
from mindspeed_fx.graph.match import aten

PLAIN = (*match.RESHAPES, aten.to.dtype, aten.contiguous.default, aten.clone.default)
"""What keeps every row as it is."""


class Head(NamedTuple):
    """The linear in front of a loss: ``logits = steps(product(hidden, weight, bias))``."""

    product: fx.Node
    steps: list["HeadStep"]
    """From the product to the logits."""
    region: list[fx.Node]
    """Every node from the product to the logits."""


class HeadStep(NamedTuple):
    """What is done to logits, and done to a linear's inputs instead."""

    kind: str
    """"rows": ``node`` takes or orders rows; "scale": a product with, or a quotient by, ``other``; "bias": ``other`` is
    added; "classes": the slice ``other``; "cap": ``other`` * tanh(logits / ``other``)."""
    node: fx.Node
    other: Any = None


def head_of(logits: fx.Node) -> Head | str | None:
    """The linear that makes ``logits``; why it is out of reach; None when there is none."""
    n, steps, region, capped = logits, [], [], False
    while product(n) is None:
        result = _step(n)
        if result is None or (capped and result[0][0].kind == "cap"):
            if not _near(n):
                return None
            if match.is_call(
                n,
                *PLAIN,
                aten.slice.Tensor,
                aten.narrow.default,
                aten.select.int,
                aten.transpose.int,
                aten.permute.default,
            ):
                return f"{n.name} ({n.target}) rearranges the classes"
            return (
                f"{n.name} ({n.target}) stands between the linear and the loss; only casts, views, slices, scales, "
                "a bias and a soft-cap may"
            )
        output, n, nodes = result
        capped = capped or output[0].kind == "cap"
        steps += output
        region += nodes
    steps.reverse()
    after = steps[next((i for i, step in enumerate(steps) if step.kind == "cap"), len(steps)) :]
    if any(step.kind == "bias" or (step.kind == "scale" and match.number(step.other) is None) for step in after):
        return "a bias, or a scale that is no number, is applied after the soft-cap"
    b = product(n)[2]
    for _i, step in enumerate(steps):
        b = step.other if step.kind == "bias" else b
        if step.kind == "scale" and b is not None and isinstance(step.other, fx.Node):
            if not isinstance(match.value(step.other), torch.Tensor):
                return "the linear has a bias, which would be scaled by a number that changes from call to call"
            if match.value(step.other).numel() != 1:
                return "the linear has a bias, which would be scaled token by token"
    return Head(n, steps, [n, *region[::-1]])


def _step(n: Any) -> tuple[list[HeadStep], fx.Node, list[fx.Node]] | None:
    """(steps, last first; what they are done to; nodes) when ``n`` is reached over a step."""
    if match.is_call(
        n, *PLAIN, aten.slice.Tensor, aten.narrow.default, aten.select.int, aten.transpose.int, aten.permute.default
    ):
        if acts_on_rows(n):
            return [HeadStep("rows", n)], n.args[0], [n]
        piece = match.part(n)
        cut = piece is not None and piece.step == 1 and piece.dim == match.value(n).dim() - 1
        return ([HeadStep("classes", n, (piece.start, piece.stop))], piece.source, [n]) if cut else None
    if (capped := _softcap(n)) is not None:
        return capped
    if match.is_call(n, *match.MUL, *match.DIV) and not n.kwargs:
        pairs = match.operands(n, *match.MUL) or [(n.args[0], n.args[1])]
        for x, other in pairs:
            if (
                match.is_float(x)
                and match.value(x).shape == match.value(n).shape
                and _one_for_all_classes(other, n)
                and (_reaches(x) or not _reaches(other))
            ):
                return [HeadStep("scale", n, other)], x, [n]
    for x, other in match.operands(n, aten.add.Tensor):
        vector = (
            match.is_float(x)
            and match.is_float(other)
            and match.value(other).dim() == 1
            and match.value(other).shape[0] == match.value(n).shape[-1]
        )
        if vector and match.value(x).shape == match.value(n).shape and match.value(x).dtype == match.value(n).dtype:
            return [HeadStep("bias", n, other)], x, [n]
    return None


def _one_for_all_classes(other: Any, n: fx.Node) -> bool:
    if match.number(other) is not None:
        return match.number(other) != 0
    shape = match.value(other).shape if match.is_float(other) else None
    return (
        shape is not None
        and (len(shape) == 0 or symbols.statically_known_true(shape[-1] == 1))
        and match.value(n).dim() >= len(shape)
    )


def _reaches(n: Any, depth: int = 8) -> bool:
    """Whether a linear feeds ``n``."""
    return (
        isinstance(n, fx.Node)
        and n.op == "call_function"
        and (product(n) is not None or (depth > 0 and any(_reaches(a, depth - 1) for a in n.all_input_nodes)))
    )


def product(n: Any) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """(hidden, matrix, bias, transposed) when ``n`` is hidden @ matrix (+ bias); ``transposed``: matrix is [classes,
    hidden].
    """
    if match.is_call(n, aten.linear.default):
        x, w, b, transposed = n.args[0], n.args[1], match.argument(n, "bias"), True
    elif match.is_call(n, aten.matmul.default, aten.mm.default):
        x, w, b, transposed = n.args[0], n.args[1], None, False
    elif match.is_call(n, aten.addmm.default) and match.argument(n, "beta") == 1 and match.argument(n, "alpha") == 1:
        b, x, w, transposed = *n.args, False
    else:
        return None
    if match.value(x).dim() < 2 or match.value(w).dim() != 2 or (b is not None and match.value(b).dim() != 1):
        return None
    if not transposed:
        w, transposed = strip_transpose(w)
    return x, w, b, transposed


def _near(n: fx.Node, depth: int = 3) -> bool:
    """True when a linear feeds ``n`` over at most ``depth`` other calls."""
    return n.op == "call_function" and any(
        product(a) is not None or (depth > 0 and _near(a, depth - 1)) for a in n.all_input_nodes
    )


def acts_on_rows(n: fx.Node) -> bool:
    """True when ``n`` leaves the last dimension, the classes, alone."""
    before, after = match.value(n.args[0]), match.value(n)
    last = before.dim() - 1
    if not match.is_float(n) or after.dim() == 0 or before.shape[-1] != after.shape[-1]:
        return False
    if match.is_call(n, aten.permute.default):
        return n.args[1][-1] % (last + 1) == last
    if match.is_call(n, aten.transpose.int):
        return all(d % (last + 1) != last for d in n.args[1:])
    if match.is_call(n, aten.slice.Tensor, aten.narrow.default, aten.select.int):
        return match.argument(n, "dim", 0) % (last + 1) != last
    return True


def _softcap(n: fx.Node) -> tuple[list[HeadStep], fx.Node, list[fx.Node]] | None:
    """The steps, last first, and nodes of cap * tanh(x / cap), or of cap * tanh(y), which is the same of y times the
    cap.
    """
    tanh, cap = match.unscale(n)
    if not match.is_call(tanh, aten.tanh.default) or cap <= 0:
        return None
    x = next((x for x, inverse in match.unscalings(tanh.args[0]) if abs(cap * inverse - 1) <= 1e-6), None)
    steps = [HeadStep("cap", n, float(cap))]
    if x is None:
        x = tanh.args[0]
        steps.append(HeadStep("scale", n, float(cap)))
    nodes, inside = [], n
    while inside is not x:
        nodes.append(inside)
        inside = next(a for a in inside.args if isinstance(a, fx.Node) and match.number(a) is None)
    return steps, x, nodes


def _single(call: Any, other: Any) -> Any:
    """A scale [1, ..., 1] as one of a vector."""
    return (
        other
        if not isinstance(other, fx.Node) or match.value(other).dim() < 2
        else call(aten.reshape.default, other, [1])
    )
