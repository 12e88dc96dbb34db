"""``overlap.mc2``: on npu, a product and its collective become one operator of torch_npu that overlaps them tile by
tile.

    all_gather -> product       npu_all_gather_base_mm       (the gathered input comes out too, where others read it)
    product -> reduce_scatter   npu_mm_reduce_scatter_base
    product -> all_reduce       npu_mm_all_reduce_base       (documented for inference: graphs without a backward alone)

Their limits, from torch_npu's documentation, are checked by :func:`limit_broken`, which names the one that is broken.
Taken where the modelled step is shorter than whole and than in chunks. An operator sums over tiles and ranks in an
order of its own, so the pass is not exact. Traced and modelled; nothing has run on a device.
"""

from __future__ import annotations

import functools
import heapq
import operator
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import npu as npu_compat
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.graph.collectives import group_of, is_start, is_wait, kind
from mindspeed_fx.graph.match import argument, value
from mindspeed_fx.graph.op_sets import RESHAPES
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.graph.rewrite import insert
from mindspeed_fx.kernels import npu
from mindspeed_fx.passes.base import Context, PassReport, register, site, skip
from mindspeed_fx.passes.overlap.chunking.chunk_search import GAIN, Trials
from mindspeed_fx.passes.overlap.chunking.chunk_spec import dense
from mindspeed_fx.passes.overlap.chunking.region import has_static_sizes
from mindspeed_fx.passes.overlap.chunking.windows import best
from mindspeed_fx.passes.overlap.decompose import INEXACT
from mindspeed_fx.passes.overlap.model.costs import FUSED, deciding_device, ranks_of

NAME = "overlap.mc2"
aten = torch.ops.aten
OPERATORS = {
    "all_gather_into_tensor": "npu_all_gather_base_mm",
    "reduce_scatter_tensor": "npu_mm_reduce_scatter_base",
    "all_reduce": "npu_mm_all_reduce_base",
}
_LINEAR, _MM = torch.ops.mindspeed.linear.default, aten.mm.default
_domain: set[str] = set()
"""The communication domain of this process's fused operators: a limit of A2 that holds for the model, not for the
graph.
"""


class Pair(NamedTuple):
    """A collective and the product it becomes one operator with."""

    start: fx.Node
    product: fx.Node
    group: str


@register(NAME)
def overlap_mc2(gm: fx.GraphModule, context: Context) -> PassReport:
    """A product and its collective in one operator of torch_npu, where its limits allow and the model says it pays."""
    names = {k: f"npu::{name}" for k, name in OPERATORS.items()}
    library = Library(
        "torch_npu",
        "npu",
        "torch_npu has these operators",
        names,
        lambda pair, hardware: limit_broken(pair, hardware.name, hardware.node, context.side),
        fuse,
    )
    report, fused = one_operator(gm, context, NAME, library)
    _domain.update(pair.group for pair in fused)
    return report


class Library(NamedTuple):
    """Operators that multiply and communicate in one."""

    name: str
    target: str
    has: str
    """What the report says on another target."""
    operators: Mapping[str, str]
    """Names by kind of collective."""
    refused: Callable[[Pair, Hardware], str | None]
    fuse: Callable[[fx.GraphModule, Pair], None]


def one_operator(gm: fx.GraphModule, context: Context, name: str, library: Library) -> tuple[PassReport, list[Pair]]:
    """Collectives and the products beside them by ``library``, where it refuses nothing and the step is modelled
    shorter than whole and than in chunks; which ones.
    """
    report, names = PassReport(name), library.operators
    if context.options.target != library.target:
        return report.note_reason(f'{library.has}; the target is "{context.options.target}"'), []
    starts = [n for n in gm.graph.nodes if is_start(n) and kind(n) in names]
    if not starts:
        return report.note_reason(f"no collective that {library.name} fuses with a product"), []
    hardware, why = deciding_device(context)
    if torch.are_deterministic_algorithms_enabled():
        hardware, why = None, INEXACT
    pairs: list[Pair] = []
    taken: set[fx.Node] = set()
    for start in starts:
        pair = neighbour_product(start) if hardware is not None else why
        reason = pair if isinstance(pair, str) else library.refused(pair, hardware)
        if reason is None and pair.product in taken:
            reason = "its product is fused with another collective"
        if reason is None:
            taken.add(pair.product)
            pairs.append(pair)
        else:
            report.skipped.append(skip(names[kind(start)], start, reason))
    if not pairs:
        return report, []
    attempts = Trials(gm, context, hardware)
    fused = seconds_fused(attempts, pairs, library.fuse)
    best(attempts, starts)
    told = (
        f"modelled step {attempts.plain.seconds * 1e3:.3f} ms whole, "
        f"{attempts.seconds * 1e3:.3f} ms at best in chunks, "
        f"{fused * 1e3:.3f} ms with {len(pairs)} fused"
        if fused is not None
        else "fused operators need more memory than is allowed"
    )
    report.notes.append(told)
    if fused is None or fused > attempts.plain.seconds * (1 - GAIN) or fused > attempts.seconds:
        report.skipped += [skip(names[kind(p.start)], p.start, told) for p in pairs]
        return report, []
    for pair in pairs:
        report.rewrites.append(site(names[kind(pair.start)], pair.start, [pair.start, pair.product]))
        library.fuse(gm, pair)
    in_order(gm)
    recompile(gm)
    return report, pairs


def neighbour_product(start: fx.Node) -> Pair | str:
    """The product next to a collective with nothing but views between; or why there is none."""
    if not has_static_sizes(start) or not has_static_sizes(start.args[0]):
        return "its sizes are known at run time only (dynamic shapes)"
    if kind(start) == "all_gather_into_tensor":
        results = [path[-1] for path in _paths(start)]
        return (
            Pair(start, max(results, key=lambda n: value(n).numel()), group_of(start))
            if results
            else "no product of matrices reads its rows as they are gathered"
        )
    node, alone = start.args[0], len(start.args[0].users) == 1
    while _keeps_rows(node):
        node = node.args[0]
        alone = alone and len(node.users) == 1
    if node.target not in (_LINEAR, _MM):
        return (
            "no product of matrices makes its rows as they are scattered"
            if kind(start) == "reduce_scatter_tensor"
            else "no product of matrices makes what it reduces"
        )
    return Pair(start, node, group_of(start)) if alone else "the product is read by others too, before it is reduced"


def _keeps_rows(node: fx.Node) -> bool:
    return node.target in RESHAPES and value(node).shape[-1] == value(node.args[0]).shape[-1]


def _paths(node: fx.Node) -> Iterator[list[fx.Node]]:
    """From a collective over waits and views to each product whose rows its result is."""
    for user in node.users:
        if is_wait(user) or _keeps_rows(user):
            yield from ([user, *rest] for rest in _paths(user))
        elif user.target in (_LINEAR, _MM) and user.args[0] is node:
            yield [user]


def _waits(start: fx.Node) -> list[fx.Node]:
    """Waits of a collective, and waits of waits."""
    results = [u for u in start.users if is_wait(u)]
    return results + [w for f in results for w in _waits(f)]


def limit_broken(pair: Pair, hardware: str, machine: int, side: str) -> str | None:
    """The documented limit of the operator that the pair breaks, or None."""
    start, name = pair.start, OPERATORS[kind(pair.start)]
    a = start.args[0] if kind(start) == "all_gather_into_tensor" else pair.product.args[0]
    b, ranks = pair.product.args[1], ranks_of(start)
    k, rows = value(pair.product.args[0]).shape[-1], value(a).numel() // value(a).shape[-1]
    reduces = name == "npu_mm_all_reduce_base"
    worlds = (
        (2, 4, 8)
        if hardware.startswith("ascend910b")
        else (2, 4, 8, 16)
        if hardware.startswith("ascend910c") and not reduces
        else ()
    )
    stored = value(b)
    return npu.first(
        npu.missing((name,)),
        None if worlds else f"documented for Atlas A2{' and A3' * (not reduces)}; the hardware is {hardware}",
        None if len(ranks) in worlds else f"{len(ranks)} ranks; valid on {hardware}: {', '.join(map(str, worlds))}",
        None
        if len({r // machine for r in ranks}) == 1 or not hardware.startswith("ascend910b")
        else "the ranks are in several machines; on Atlas A2 the operator works within one",
        None
        if not _domain - {group_of(start)} or not hardware.startswith("ascend910b")
        else f'on Atlas A2 the fused operators of a model share one communication domain, and group "{min(_domain)}" '
        "has it",
        npu.check_types((torch.float16, torch.bfloat16), x=value(a), weight=stored),
        None
        if value(a).dtype == stored.dtype
        else f"x is {value(a).dtype}, weight {stored.dtype}; valid: one type".replace("torch.", ""),
        npu.within("k", k, *((1, 2**31 - 1) if reduces else (256, 65534))),
        None
        if rows % len(ranks) == 0 or name != "npu_mm_reduce_scatter_base"
        else f"{rows} rows, which {len(ranks)} ranks do not divide",
        None if value(a).is_contiguous() else "x is a transposed view",
        None
        if stored.is_contiguous() or stored.t().is_contiguous()
        else "the weight is neither stored whole nor a transposed view",
        None
        if argument(start, "reduce_op", "sum") == "sum" or kind(start) == "all_gather_into_tensor"
        else f'reduces by "{argument(start, "reduce_op")}"; valid: sum',
        "it has a bias"
        if pair.product.target is _LINEAR and len(pair.product.args) > 2 and pair.product.args[2] is not None
        else None,
        None
        if not reduces or side == "inference"
        else "documented for inference, and this graph belongs to a training step",
    )


class Call(NamedTuple):
    """What an operator that takes the place of a pair is called with."""

    put: Callable[..., fx.Node]
    """(place, target, arguments) -> node."""
    at: fx.Node
    rows: fx.Node
    weight: fx.Node
    start: fx.Node
    others: bool
    """Whether somebody else reads what is gathered."""


def fuse(
    gm: fx.GraphModule, pair: Pair, called: Callable[[Call], tuple[fx.Node, fx.Node | None]] | None = None
) -> None:
    """Put an operator, by default torch_npu's, in the place of the pair; ``called`` gives (product, what is gathered if
    others read it).
    """
    put = functools.partial(insert, gm)
    start, product, group = pair
    gathers = kind(start) == "all_gather_into_tensor"
    path = next(p for p in _paths(start) if p[-1] is product) if gathers else []
    others = any(len(n.users) > 1 for n in (start, *path[:-1]))
    at = product if gathers else start
    a = start.args[0] if gathers else product.args[0]
    rows = put(at, aten.view.default, (dense(put, at, a), [-1, value(a).shape[-1]]))
    weight = put(at, aten.t.default, (product.args[1],)) if product.target is _LINEAR else product.args[1]
    out, gathered = (called or _of_torch_npu)(Call(put, at, rows, weight, start, others))
    result = put(at, aten.view.default, (out, list(value(at).shape)))
    if gathers:
        product.replace_all_uses_with(result)
        whole = put(at, aten.view.default, (gathered, list(value(start).shape))) if others else None
    else:
        whole = result
    views = path[:-1] if gathers else _views_before(start, product)
    for wait in _waits(start):
        if whole is not None:
            wait.replace_all_uses_with(whole)
    for node in (
        (product, *reversed([v for v in views if not is_wait(v)]), *reversed(_waits(start)), start)
        if gathers
        else (*reversed(_waits(start)), start, *views, product)
    ):
        if not node.users:
            gm.graph.erase_node(node)


def _of_torch_npu(c: Call) -> tuple[fx.Node, fx.Node | None]:
    name, gathers, group = OPERATORS[kind(c.start)], kind(c.start) == "all_gather_into_tensor", group_of(c.start)
    args = (c.rows, c.weight, npu_compat.hcom(group)) + (
        (len(ranks_of(c.start)),) if kind(c.start) != "all_reduce" else ()
    )
    new = c.put(c.at, getattr(torch.ops.npu, name).default, args, {"gather_output": c.others} if gathers else None)
    new.meta[FUSED] = (kind(c.start), group)
    if not gathers:
        return new, None
    return c.put(c.at, operator.getitem, (new, 0)), c.put(c.at, operator.getitem, (new, 1)) if c.others else None


def _views_before(start: fx.Node, product: fx.Node) -> list[fx.Node]:
    results, node = [], start.args[0]
    while node is not product:
        results.append(node)
        node = node.args[0]
    return results


def seconds_fused(attempts: Trials, pairs: Sequence[Any], fuse: Callable[[fx.GraphModule, Any], None]) -> float | None:
    """Modelled seconds of the step with all of ``pairs``, tuples with nodes of the graph, put together by ``fuse``;
    None when it does not fit.
    """

    def all_fused(copy: fx.GraphModule, at: Callable[[fx.Node], fx.Node]) -> None:
        for p in [p._make(at(x) if isinstance(x, fx.Node) else x for x in p) for p in pairs]:
            fuse(copy, p)
        in_order(copy)

    return attempts.step(all_fused)


def in_order(gm: fx.GraphModule) -> None:
    """Readers of a gathered input may stand before the product that now gathers it: every node goes behind what it
    reads.
    """
    place = {n: k for k, n in enumerate(gm.graph.nodes)}
    missing = {n: len(n.all_input_nodes) for n in place}
    ready = [(k, n) for n, k in place.items() if not missing[n] and n.op != "output"]
    heapq.heapify(ready)
    last = next(n for n in gm.graph.nodes if n.op == "output")
    while ready:
        _, node = heapq.heappop(ready)
        last.prepend(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user] and user.op != "output":
                heapq.heappush(ready, (place[user], user))
