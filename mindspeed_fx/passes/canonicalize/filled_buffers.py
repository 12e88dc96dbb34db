"""A buffer that is filled piece by piece becomes its pieces, joined.

``keys = x.new_empty(...); keys[..., :n].copy_(a); keys[..., n:].copy_(b)``, latent attention of transformers'
DeepSeek-V3, is ``cat([a, b], -1)``; ``out[..., ::2] = a; out[..., 1::2] = b``, a rotation of pairs, is ``stack([a, b],
-1)`` made flat. AOTAutograd would write each piece into a copy of the whole, and take each gradient out of a copy of
the whole again: four kernels forward where there is one, and a zero-filled gradient backward.

Safe because nobody reads the buffer before the last piece is there, and all of it is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.fx as fx

from mindspeed_fx.compat import fake
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.annotate import written_nodes
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.new_call import NewCall
from mindspeed_fx.passes.base import Context, Miss, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "canonicalize.filled_buffers", "pieces joined"

UNWRITTEN = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)
FILLED = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


class Piece(NamedTuple):
    """``buffer[..., start:stop:step].copy_(value)`` along ``dim``."""

    write: fx.Node
    view: fx.Node
    value: fx.Node
    dim: int
    start: int
    stop: int
    step: int


@register(NAME)
def filled_buffers(gm: fx.GraphModule, context: Context) -> PassReport:
    """Buffers that are filled by copies into slices become the pieces, joined."""
    report = PassReport(NAME)
    place = {n: i for i, n in enumerate(gm.graph.nodes)}
    rewrite_each(report, OPERATOR, calls(gm, *UNWRITTEN, *FILLED), lambda node: _rewrite(gm, node, place))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node, place: dict[fx.Node, int]) -> Outcome:
    pieces = [p for user in sorted(node.users, key=place.__getitem__) if (p := _piece(node, user)) is not None]
    if len(pieces) < 2 or not _cover(pieces, match.value(node).shape):
        is_unsaid = not pieces or match.is_call(node, *FILLED)  # a pad or a mask, most often
        return None if is_unsaid else f"copies into slices do not fill {node.name} along one dimension"
    first, last = (f(pieces, key=lambda p: place[p.write]).write for f in (min, max))
    readers = [n for n in node.users if all(n is not p.view for p in pieces)]
    if any(place[n] < place[last] for n in readers):
        return f"{node.name} is read before its last piece is written"
    _refuse_other_writes(first, last, {p.write for p in pieces})
    if len({n.meta["grad_enabled"] for n in (node, *(p.write for p in pieces))}) > 1:
        return "part of the pieces is written with gradients off (torch.no_grad)"
    whole = _joined(last, pieces)
    if fake.layout(whole.meta["val"]) != fake.layout(match.value(node)):
        whole = NewCall(last, aten.contiguous.default, whole)
        if fake.layout(whole.meta["val"]) != fake.layout(match.value(node)):
            return f"{node.name} lies in memory in another order than its pieces, joined"
    outcome = site(OPERATOR, last, [node, *(p.write for p in pieces)])
    new = rewrite.build(whole)
    for reader in readers:
        reader.replace_input_with(node, new)
    for n in (*(p.write for p in pieces), *(p.view for p in pieces), node):
        gm.graph.erase_node(n)
    return outcome


def _piece(buffer: fx.Node, view: fx.Node) -> Piece | None:
    """What ``view`` of ``buffer`` is there for, where that is to be copied into, once, by numbers that are known."""
    if (
        not match.is_call(view, aten.slice.Tensor, aten.narrow.default)
        or view.args[0] is not buffer
        or len(view.users) != 1
    ):
        return None
    (write,) = view.users
    if not match.is_call(write, aten.copy_.default) or write.args[0] is not view or write.users:
        return None
    value = write.args[1]
    dim = match.argument(view, "dim", 0) % match.rank(buffer)
    size, start = match.value(buffer).shape[dim], match.argument(view, "start")
    start = 0 if start is None else start
    stop, length = match.argument(view, "end"), match.argument(view, "length", 0)
    stop = size if stop is None else stop
    numbers = (start, stop, length, match.argument(view, "step", 1), size)
    if any(type(n) is not int for n in numbers) or match.value(value).device != match.value(buffer).device:
        return None
    stop = start + length if length else stop
    start, stop = (min(n + size if n < 0 else n, size) for n in (start, stop))
    return Piece(write, view, value, dim, start, stop, numbers[3])


def _cover(pieces: list[Piece], shape: Any) -> bool:
    """Whether the pieces are all of the buffer, each element once; they are sorted by where they begin."""
    pieces.sort(key=lambda p: p.start)
    dims, steps = {p.dim for p in pieces}, {p.step for p in pieces}
    if len(dims) > 1 or len(steps) > 1:
        return False
    size, step = shape[pieces[0].dim], pieces[0].step
    if step == 1:
        ends = [0, *(p.stop for p in pieces)]
        return [p.start for p in pieces] == ends[:-1] and ends[-1] == size
    # Every step-th element; a slice may end where its last element does.
    last = size - step
    return (
        step == len(pieces)
        and size % step == 0
        and all(p.start == i and p.stop > last + i for i, p in enumerate(pieces))
    )


def _refuse_other_writes(first: fx.Node, last: fx.Node, own: set[fx.Node]) -> None:
    """A value that is changed between being copied and the last copy would be read too late.

    Raises:
        Miss: something else is written in between.
    """
    node = first
    while node is not last:
        if node not in own and written_nodes(node):
            raise Miss(f"{node.name} writes in place between the pieces")
        node = node.next


def _joined(last: fx.Node, pieces: list[Piece]) -> NewCall:
    values: list[Any] = []
    for p in pieces:
        value: Any = p.value
        if match.value(value).dtype != match.value(p.view).dtype:
            value = NewCall(last, aten.to.dtype, value, match.value(p.view).dtype)
        if match.value(value).shape != match.value(p.view).shape:
            value = NewCall(last, aten.expand.default, value, list(match.value(p.view).shape))
        values.append(value)
    dim = pieces[0].dim
    if pieces[0].step == 1:
        return NewCall(last, aten.cat.default, values, dim)
    stacked = NewCall(last, aten.stack.default, values, dim + 1)
    return NewCall(last, aten.flatten.using_ints, stacked, dim, dim + 1)
