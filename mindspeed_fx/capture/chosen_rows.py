"""Rows that a mask chooses, as one call that Dynamo keeps in its graph.

``torch.where(mask)``, ``nonzero`` and ``x[mask]`` have results whose size is data, at which Dynamo ends a graph. Within
:class:`ChosenRows` they are calls of ``mindspeed::chosen_rows``, which is ``nonzero`` with a size that is a symbol. The
captured graph has ``chosen_rows.bounded`` in its place, whose size is a number that no value has otherwise, so that
every reader may compare sizes; it cannot be run, and the pass ``canonicalize.expert_loop`` makes products of fixed
sizes of what reads it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mindspeed_fx.compat import fx_graph, symbols
from mindspeed_fx.kernels.base import LIBRARY


class ChosenRowsError(RuntimeError):
    """What is done with chosen rows cannot be read; the message says why."""


def _places(mask: Tensor) -> Tensor:
    """int64 [chosen, dimensions of ``mask``]: where it is not zero, in order."""
    return mask.nonzero()


def _fake(mask: Tensor) -> Tensor:
    return mask.new_empty((symbols.new_row_count(), mask.ndim), dtype=torch.int64)


def _bounded(mask: Tensor, size: int) -> Tensor:
    raise ChosenRowsError("rows that a mask chooses were left in a captured graph")


def _bounded_fake(mask: Tensor, size: int) -> Tensor:
    return mask.new_empty((size, mask.ndim), dtype=torch.int64)


LIBRARY.define("chosen_rows(Tensor mask) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define("chosen_rows.bounded(Tensor mask, SymInt size) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("chosen_rows", _places, "CompositeExplicitAutograd")
LIBRARY.impl("chosen_rows.bounded", _bounded, "CompositeExplicitAutograd")
torch.library.register_fake("mindspeed::chosen_rows", _fake, lib=LIBRARY)
torch.library.register_fake("mindspeed::chosen_rows.bounded", _bounded_fake, lib=LIBRARY)
CHOSEN, BOUNDED = torch.ops.mindspeed.chosen_rows.default, torch.ops.mindspeed.chosen_rows.bounded


class ChosenRows(TorchFunctionMode):
    """While a graph is traced: rows chosen by a mask are ``mindspeed::chosen_rows``."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.where and len(args) == 1 and not kwargs:
            return CHOSEN(args[0]).unbind(1)
        if func is torch.argwhere:
            return CHOSEN(args[0])
        if func is torch.nonzero or func is torch.Tensor.nonzero:
            return CHOSEN(args[0]).unbind(1) if kwargs.get("as_tuple") else CHOSEN(args[0])
        if func is torch.Tensor.__getitem__ and _is_mask(args[1]):
            return args[0][CHOSEN(args[1]).unbind(1)]
        if func is torch.Tensor.__setitem__ and _is_mask(args[1]):
            args[0][CHOSEN(args[1]).unbind(1)] = args[2]
            return None
        return func(*args, **kwargs)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def choose_bounded(mask: Tensor) -> Tensor:
    """The call of the captured graph for ``chosen_rows(mask)``."""
    return BOUNDED(mask, 2 * mask.numel() + 1)


def check_sizes_unread(gm: fx.GraphModule) -> None:
    """Refuse a Dynamo graph that computes with the number of rows that a mask chose.

    Raises:
        ChosenRowsError: it does; the bounded size would be taken for that number.
    """
    if not any(n.target is CHOSEN for n in gm.graph.nodes):
        return
    for n in gm.graph.nodes:
        is_size = n.op != "placeholder" and isinstance(fx_graph.example_value_of(n), (torch.SymInt, torch.SymFloat))
        if is_size and not all(_is_asserted_alone(u) for u in n.users):
            raise ChosenRowsError(f"the number of rows that a mask chooses is computed with ({n.name})")


def _is_asserted_alone(n: fx.Node) -> bool:
    """Whether ``n`` is a comparison that only an assertion reads: what torch says of a symbol's range."""
    return bool(n.users) and all(u.target is torch.ops.aten._assert_scalar.default for u in n.users)
