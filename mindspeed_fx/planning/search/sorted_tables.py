"""What rows sorted by expert take from a table of the experts, such as biases (GPT-OSS's), as one operator of the
search's graph: it goes where the rows go (:mod:`mindspeed_fx.sharding.spmd.rows_by_expert`), and nothing is sorted for
it.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import replace

import torch
import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.passes.sharding.sorted_rows import sorted_table
from mindspeed_fx.planning.search.problem import Node
from mindspeed_fx.sharding.spmd.rows_by_expert import rows_by_expert

PERMUTE = torch.ops.mindspeed.moe_permute.default


def with_sorted_tables(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``gm`` with such rows as calls of :func:`rows_by_expert`, of the rows as they were sorted; ``gm``
    itself where there are none."""
    if not _taken(gm.graph):
        return gm
    named = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node, table, permute in _taken(named.graph):
        rows = next(u for u in permute.users if u.target is operator.getitem and u.args[1] == 0)
        with named.graph.inserting_before(node):
            new = named.graph.call_function(rows_by_expert, (rows, table, permute.args[1]))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
    named.graph.eliminate_dead_code()
    return named


def price_as_gather(node: Node) -> None:
    """Price a :func:`rows_by_expert` as ``aten.index_select``, in place: rows of the table are read, and which they
    are."""
    node.args, args = ((table, 0, indices) for _, table, indices in (node.args, node.call.args))
    node.call = replace(node.call, operator="aten.index_select", kind="gather", args=args)


def _taken(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """(rows of a table, the table, what sorted the rows that they meet)."""
    permutes = graph.find_nodes(op="call_function", target=PERMUTE)
    if not permutes:
        return []
    return [
        (node, rows[0], permute)
        for node in graph.nodes
        if match.indexed_rows(node) is not None
        for permute in permutes
        if (rows := sorted_table(node, permute.args[1])) is not None
    ]
