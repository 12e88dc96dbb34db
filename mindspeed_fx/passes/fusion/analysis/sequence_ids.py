"""Numbers of packed sequences (documents), one per token, compared along rows and columns: a mask keeps them apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis.bands import Index


def long_dims(n: fx.Node) -> list[int]:
    """Dimensions of ``n`` that are not 1, counted from the end (1 is the last)."""
    shape = match.value(n).shape
    return [len(shape) - d for d, size in enumerate(shape) if not (isinstance(size, int) and size == 1)]


def find_sequence_ids(n: fx.Node, of) -> fx.Node | None:
    """d when ``n`` compares d[i] with d[j], or their difference with zero, for integers d of one or two dimensions."""
    a, b = n.args[:2]
    if match.number(b) == 0 and match.is_call(a, aten.sub.Tensor) and not a.kwargs:
        a, b = a.args
    (x, i), (y, j) = (_ids_along(m, of) for m in (a, b))
    return x if x is not None and y is not None and {i, j} == {1, 2} and match.same(x, y) else None


def _ids_along(n: Any, of) -> tuple[fx.Node | None, int]:
    """(d, the dimension from the end along which it runs) when ``n`` is d, a number per token, laid along rows or
    columns.
    """
    if not isinstance(n, fx.Node) or not isinstance(match.value(n), torch.Tensor) or match.value(n).is_floating_point():
        return None, 0
    if match.is_call(n, aten.index.Tensor) and match.value(n).dim() >= 2:
        at = [of(i) if i is not None else None for i in n.args[1]]
        whole = len(at) == match.value(n.args[0]).dim() and all(isinstance(i, Index) and i.offset == 0 for i in at)
        rows = [match.value(i).shape[match.value(i).dim() - at[-1].dim] for i in n.args[1][-1:]] if whole else []
        if (
            whole
            and rows[0] == match.value(n.args[0]).shape[-1]
            and (len(at) == 1 or (len(at) == 2 and at[0].dim == 4))
        ):
            return n.args[0], at[-1].dim
        return None, 0
    dims = long_dims(n)
    along = next((d for d in dims if d in (1, 2)), 0)
    if not along or any(d in (1, 2) for d in dims if d != along):
        return None, 0
    source = n
    while (
        match.value(source).dim() > 1
        and match.is_call(source, aten.unsqueeze.default, aten.transpose.int, aten.to.dtype, *match.RESHAPES)
        and match.value(source.args[0]).dim() >= 1
    ):
        inner = source.args[0]
        if (
            match.is_call(source, aten.transpose.int)
            and match.value(source).shape[-2] != 1
            and match.value(source).shape[-1] != 1
        ):
            break
        if (
            match.value(inner).numel() != match.value(source).numel()
            or match.value(inner).is_floating_point()
            or match.value(inner).dim() > match.value(source).dim()
        ):
            break
        source = inner
    shape, whole = list(match.value(source).shape), list(match.value(n).shape)
    if (
        len(shape) > 2
        or shape[-1] != whole[-along]
        or (len(shape) == 2 and shape[0] != 1 and whole[0] != shape[0])
        or match.value(source).numel() != match.value(n).numel()
    ):
        return None, 0
    return source, along
