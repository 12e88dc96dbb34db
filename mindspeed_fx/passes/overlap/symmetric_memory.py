"""``overlap.symmetric_memory``: on cuda, a product and its collective become one operator of torch that overlaps them
over symmetric memory.

    all_gather -> product       symm_mem.fused_all_gather_matmul      (the gathered input comes out too, where others
    read it) product -> reduce_scatter   symm_mem.fused_matmul_reduce_scatter

torch's operators (``torch.distributed._symmetric_memory``) copy the shards of other ranks while they multiply those
that are there. Each rank's memory has to be open to the others: groups for which ``enable_symm_mem_for_group`` was
called, within one machine. Taken where the modelled step is shorter than whole and than in chunks. A reduce_scatter
sums over ranks in an order of its own, so the pass is not exact. Traced and modelled; torch's own fallback of the
operators, a collective and a product, gives the same values; nothing has run on a GPU.
"""

from __future__ import annotations

import functools
import operator

import torch
import torch.fx as fx

from mindspeed_fx.compat import distributed
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.graph.collectives import group_of, kind
from mindspeed_fx.graph.match import argument, value
from mindspeed_fx.passes.base import Context, PassReport, register
from mindspeed_fx.passes.overlap.mc2 import Call, Library, Pair, fuse, one_operator
from mindspeed_fx.passes.overlap.model.costs import FUSED, ranks_of

NAME = "overlap.symmetric_memory"
OPERATORS = {
    "all_gather_into_tensor": "symm_mem::fused_all_gather_matmul",
    "reduce_scatter_tensor": "symm_mem::fused_matmul_reduce_scatter",
}
SUMS = ("sum", "avg")


@register(NAME)
def overlap_symmetric_memory(gm: fx.GraphModule, context: Context) -> PassReport:
    """A product and its collective in one operator of torch, where symmetric memory is enabled and the model says it
    pays.
    """
    library = Library(
        "torch",
        "cuda",
        "torch has these operators on cuda",
        OPERATORS,
        refusal,
        functools.partial(fuse, called=_of_torch),
    )
    return one_operator(gm, context, NAME, library)[0]


def refusal(pair: Pair, hardware: Hardware) -> str | None:
    """Why torch's operator does not take the pair, or None."""
    start, product = pair.start, pair.product
    a, b, ranks = (
        value(start if kind(start) == "all_gather_into_tensor" else product.args[0]),
        value(product.args[1]),
        ranks_of(start),
    )
    if not distributed.has_symmetric_memory(pair.group):
        return (
            f'symmetric memory is not enabled for group "{pair.group}": '
            f'torch.distributed._symmetric_memory.enable_symm_mem_for_group("{pair.group}")'
        )
    if len({r // hardware.node for r in ranks}) > 1:
        return "the ranks are in several machines; symmetric memory is open within one"
    if a.dtype != b.dtype:
        return f"x is {a.dtype}, weight {b.dtype}; valid: one type".replace("torch.", "")
    if product.target is torch.ops.mindspeed.linear.default and len(product.args) > 2 and product.args[2] is not None:
        return "it has a bias"
    if kind(start) != "reduce_scatter_tensor":
        return None
    if argument(start, "reduce_op", "sum") not in SUMS:
        return f'reduces by "{argument(start, "reduce_op")}"; valid: {", ".join(SUMS)}'
    rows = a.numel() // a.shape[-1]
    return None if rows % len(ranks) == 0 else f"{rows} rows, which {len(ranks)} ranks do not divide"


def _of_torch(c: Call) -> tuple[fx.Node, fx.Node | None]:
    group = group_of(c.start)
    if kind(c.start) == "reduce_scatter_tensor":
        new = c.put(
            c.at,
            torch.ops.symm_mem.fused_matmul_reduce_scatter.default,
            (c.rows, c.weight, argument(c.start, "reduce_op", "sum"), 0, group),
        )
        new.meta[FUSED] = (kind(c.start), group)
        return new, None
    new = c.put(
        c.at, torch.ops.symm_mem.fused_all_gather_matmul.default, (c.rows, [c.weight], 0, group), {"return_A": c.others}
    )
    new.meta[FUSED] = (kind(c.start), group)
    products = c.put(c.at, operator.getitem, (new, 1))
    return c.put(c.at, operator.getitem, (products, 0)), c.put(c.at, operator.getitem, (new, 0)) if c.others else None
