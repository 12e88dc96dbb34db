"""Rows that a mask chooses, as one call that Dynamo keeps in its graph.

``torch.where(mask)``, ``nonzero`` and ``x[mask]`` have results whose size is data, at which Dynamo ends a graph. Here
they are calls of ``mindspeed::chosen_rows``, which is ``nonzero`` with a size that is a symbol. The captured graph has
``chosen_rows.bounded`` in its place, whose size is a number that no value has otherwise, so that every reader may
compare sizes; it cannot be run, and the pass ``canonicalize.expert_loop`` makes products of fixed sizes of what reads
it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from mindspeed_fx.compat import fx_graph, symbols

LIBRARY = torch.library.Library("mindspeed", "FRAGMENT")


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


def places(mask: Tensor) -> tuple[Tensor, ...]:
    """``torch.where(mask)``."""
    return CHOSEN(mask).unbind(1)


def nonzero(x: Tensor, as_tuple: bool = False) -> Any:
    """``torch.nonzero``."""
    return places(x) if as_tuple else CHOSEN(x)


def index(i: Any) -> Any:
    """``i`` as an index, rows that it chooses if it is a mask."""
    return places(i) if isinstance(i, Tensor) and i.dtype == torch.bool else i


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
