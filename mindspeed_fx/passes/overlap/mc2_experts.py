"""``overlap.mc2_experts``: on Ascend A3, an all-to-all of tokens and the experts' product next to it become one
operator of torch_npu.

    all_to_all -> tokens by expert -> bmm     npu_alltoallv_gmm   (the tokens by expert come out too, where others read
    them) bmm -> tokens by rank -> all_to_all       npu_gmm_alltoallv

The operators take how many tokens each rank sends to each expert as numbers, so that they serve experts of a fixed
capacity, [ranks, experts, capacity, hidden], forward and backward. Of what a router decides while the program runs, the
host knows the splits of the all-to-all, a number for each rank; the counts for each expert of each rank are on the
device, and torch_npu documents its arguments that would take them there (``send_counts_tensor``,
``recv_counts_tensor``) as not yet supported. So dropless routing stays apart. Their limits, from torch_npu's
documentation, are checked by :func:`limit_broken`. Taken where the modelled step is shorter. Traced, emulated and
modelled; nothing has run on a device.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.compat import npu as npu_compat
from mindspeed_fx.graph.collectives import group_of, is_start, is_wait, kind
from mindspeed_fx.graph.match import argument, value
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.graph.rewrite import insert
from mindspeed_fx.kernels import npu
from mindspeed_fx.passes.base import Context, PassReport, register, site, skip
from mindspeed_fx.passes.overlap.chunking.chunk_search import GAIN, Trials
from mindspeed_fx.passes.overlap.chunking.chunk_spec import dense
from mindspeed_fx.passes.overlap.chunking.region import has_static_sizes
from mindspeed_fx.passes.overlap.decompose import INEXACT
from mindspeed_fx.passes.overlap.mc2 import _waits, in_order, seconds_fused
from mindspeed_fx.passes.overlap.model.costs import FUSED, deciding_device, ranks_of

NAME = "overlap.mc2_experts"
aten = torch.ops.aten
DISPATCH, COMBINE = "npu_alltoallv_gmm", "npu_gmm_alltoallv"
WORLDS = (8, 16, 32, 64)
UNKNOWN = (
    "how much each rank sends is known only when the program runs, and the host knows it by rank; the operator takes a "
    "list of numbers for every expert of every rank, "
    "and torch_npu documents its counts as tensors as not yet supported"
)
MOVES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.clone.default,
)


class Found(NamedTuple):
    """An all-to-all and the product of matrices that it becomes one operator with."""

    start: fx.Node
    product: fx.Node
    operator: str
    tokens: fx.Node
    """[experts, ranks * capacity, width], what the product reads (dispatch) or makes."""


@register(NAME)
def overlap_mc2_experts(gm: fx.GraphModule, context: Context) -> PassReport:
    """An all-to-all and the experts' product in one operator of torch_npu, where its limits allow and the model says it
    pays.
    """
    report = PassReport(NAME)
    if context.options.target != "npu":
        return report.note_reason(f'torch_npu has these operators; the target is "{context.options.target}"')
    starts = [n for n in gm.graph.nodes if is_start(n) and kind(n) == "all_to_all_single"]
    if not starts:
        return report.note_reason("no all-to-all")
    hardware, why = deciding_device(context)
    if torch.are_deterministic_algorithms_enabled():
        hardware, why = None, INEXACT
    pairs: list[Found] = []
    for start in starts:
        result = neighbour_product(start) if hardware is not None else why
        reason = result if isinstance(result, str) else limit_broken(result, hardware.name)
        if reason is None and any(result.product is other.product for other in pairs):
            reason = "its product is fused with another all-to-all"
        if reason is None:
            pairs.append(result)
        else:
            report.skipped.append(skip("all_to_all", start, reason))
    if not pairs:
        return report
    attempts = Trials(gm, context, hardware)
    fused = seconds_fused(attempts, pairs, fuse)
    told = (
        f"modelled step {attempts.plain.seconds * 1e3:.3f} ms apart, {fused * 1e3:.3f} ms with {len(pairs)} fused"
        if fused is not None
        else "fused operators need more memory than is allowed"
    )
    report.notes.append(told)
    if fused is None or fused > attempts.plain.seconds * (1 - GAIN):
        report.skipped += [skip(p.operator, p.start, told) for p in pairs]
        return report
    for pair in pairs:
        report.rewrites.append(site(f"npu::{pair.operator}", pair.start, [pair.start, pair.product]))
        fuse(gm, pair)
    in_order(gm)
    recompile(gm)
    return report


# --------------------------------------------------------------------------- which product it is


def neighbour_product(start: fx.Node) -> Found | str:
    """The batched product before or after an all-to-all with tokens put in order between; or why there is none."""
    shares = [argument(start, name) for name in ("output_split_sizes", "input_split_sizes")]
    if not has_static_sizes(start) or not all(isinstance(n, int) for s in shares for n in s):
        return UNKNOWN
    if len({n for s in shares for n in s}) > 1:
        return "the ranks' shares differ, and how many tokens each expert gets is not in the graph"
    ranks, rest = len(shares[0]), "no batched product of matrices reads the tokens by expert, or makes them"
    node, path = start, []
    while True:
        users = [u for u in node.users if not _dead(u)]
        if len(users) == 1 and (is_wait(users[0]) or users[0].target in MOVES):
            node = users[0]
            path.append(node)
            continue
        products = [u for u in users if u.target is aten.bmm.default and u.args[0] is node]
        if products and path:
            product = products[0]
            ordered = _by_expert(path, ranks, value(node))
            return (
                Found(start, product, DISPATCH, node)
                if ordered
                else "the tokens are not put in the order [experts, ranks, capacity] between"
            )
        break
    node, path = start.args[0], []
    while node.target in MOVES and len(node.users) == 1:
        path.insert(0, node)
        node = node.args[0]
    if node.target is not aten.bmm.default or not path:
        return rest
    if len(node.users) != 1:
        return "the product is read by others too, before it is sent"
    return (
        Found(start, node, COMBINE, node)
        if _by_rank(path, ranks, value(node))
        else "the tokens are not put in the order [ranks, experts, capacity] between"
    )


def _dead(node: fx.Node) -> bool:
    return node.op != "output" and not node.users


def _by_expert(path: list[fx.Node], ranks: int, tokens: torch.Tensor) -> bool:
    """Received [ranks, experts, capacity, width], read as [experts, ranks, capacity, width] and stored so."""
    experts, rows, width = tokens.shape
    capacity = rows // ranks
    return _is_reordering(
        path, (experts, ranks, capacity, width), (capacity * width, experts * capacity * width, width, 1), tokens
    )


def _by_rank(path: list[fx.Node], ranks: int, tokens: torch.Tensor) -> bool:
    """Made [experts, ranks, capacity, width], sent as [ranks, experts, capacity, width]."""
    experts, rows, width = tokens.shape
    capacity = rows // ranks
    return _is_reordering(
        path, (ranks, experts, capacity, width), (capacity * width, ranks * capacity * width, width, 1), value(path[-1])
    )


def _is_reordering(path: list[fx.Node], shape: tuple[int, ...], strides: tuple[int, ...], last: torch.Tensor) -> bool:
    """Whether ``path`` views what is contiguous as ``shape`` with ``strides``, copies that once, and only views it
    then.
    """
    copies = [i for i, n in enumerate(path) if n.target is aten.clone.default and not value(n.args[0]).is_contiguous()]
    kept = (
        all(value(n).is_contiguous() for n in path if n.target is aten.clone.default or is_wait(n))
        and last.is_contiguous()
    )
    if not copies:  # one expert or one rank: nothing is moved
        return kept and all(value(n).is_contiguous() for n in path) and 1 in shape[:2]
    result = value(path[copies[0]].args[0])
    plain = [(n, s) for n, s in zip(result.shape, result.stride()) if n != 1]
    return (
        kept
        and len(copies) == 1
        and plain == [(n, s) for n, s in zip(shape, strides) if n != 1]
        and all(value(n).is_contiguous() for n in path[copies[0] :])
    )


def limit_broken(result: Found, hardware: str) -> str | None:
    """The documented limit of the operator that is broken, or None."""
    x, weight = value(result.product.args[0]), _stored_weight(result.product.args[1])[0]
    ranks = ranks_of(result.start)
    name = npu_compat.hcom(group_of(result.start))
    return npu.first(
        npu.missing((result.operator,)),
        None if hardware.startswith("ascend910c") else f"documented for Atlas A3; the hardware is {hardware}",
        None if len(ranks) in WORLDS else f"{len(ranks)} ranks; valid: {', '.join(map(str, WORLDS))}",
        npu.within("characters of the communicator's name", len(name), 1, 127),
        npu.check_types((torch.float16, torch.bfloat16), x=x, weight=value(weight)),
        None
        if x.dtype == value(weight).dtype
        else f"x is {x.dtype}, weight {value(weight).dtype}; valid: one type".replace("torch.", ""),
        None if x.is_contiguous() else "the tokens are not stored by expert",
    )


# --------------------------------------------------------------------------- the rewrite


def _stored_weight(weight: fx.Node) -> tuple[fx.Node, bool]:
    """The weight as it is stored, and whether the product reads it transposed."""
    transposes = (
        weight.target is aten.permute.default
        and list(weight.args[1]) == [0, 2, 1]
        or weight.target is aten.transpose.int
        and {d % 3 for d in weight.args[1:]} == {1, 2}
    )
    return (weight.args[0], True) if transposes and value(weight).dim() == 3 else (weight, False)


def fuse(gm: fx.GraphModule, result: Found) -> None:
    """Put the operator in the place of the pair; what nobody reads any more is erased."""
    put = functools.partial(insert, gm)
    start, product, name, tokens = result
    at = product if name == DISPATCH else start
    x = start.args[0] if name == DISPATCH else product.args[0]
    experts, rows, _ = value(product).shape
    ranks = len(argument(start, "output_split_sizes"))
    counts = [rows // ranks] * (experts * ranks)
    weight, transposed = _stored_weight(product.args[1])
    others = name == DISPATCH and any(u is not product for u in tokens.users)
    args = (
        put(at, aten.view.default, (dense(put, at, x), [-1, value(x).shape[-1]])),
        dense(put, at, weight),
        npu_compat.hcom(group_of(start)),
        ranks,
        counts,
        counts,
    )
    new = put(
        at,
        getattr(torch.ops.npu, name).default,
        args,
        {"trans_gmm_weight": transposed, **({"permute_out_flag": others} if name == DISPATCH else {})},
    )
    new.meta[FUSED] = (kind(start), group_of(start))
    output = put(at, operator.getitem, (new, 0))
    if name == DISPATCH:
        product.replace_all_uses_with(put(at, aten.view.default, (output, list(value(product).shape))))
        if others:
            again = put(at, aten.view.default, (put(at, operator.getitem, (new, 2)), list(value(tokens).shape)))
            tokens.replace_all_uses_with(again, delete_user_cb=lambda u: u is not product)
    else:
        whole = put(at, aten.view.default, (output, list(value(start).shape)))
        for wait in _waits(start):
            wait.replace_all_uses_with(whole, delete_user_cb=lambda u: not is_wait(u))
    for wait in _waits(start)[:1]:
        _erase_after(gm, wait)
    for node in (product, start, product):  # whichever comes last is free last
        _erase(gm, node)


def _erase_after(gm: fx.GraphModule, node: fx.Node) -> None:
    """``node``, and the waits and moves after it, where nobody reads them."""
    for user in list(node.users):
        if user.target in MOVES or is_wait(user):
            _erase_after(gm, user)
    if not node.users:
        gm.graph.erase_node(node)


def _erase(gm: fx.GraphModule, node: fx.Node) -> None:
    """``node``, and the waits and moves before it, where nobody reads them."""
    if node.users or node._erased:
        return
    before = [a for a in node.all_input_nodes if a.target in MOVES or is_wait(a)]
    gm.graph.erase_node(node)
    for a in before:
        _erase(gm, a)
