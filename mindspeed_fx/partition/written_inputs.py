"""Inputs that a forward writes and its backward depends on: what the forward read is kept.

A quantized layer follows the greatest activation in a buffer and divides by it; a router adds to its counts of tokens
and divides by them, perhaps in a layer that is recomputed. A backward that makes the quotient again would read the
input, which has other values by then: those that this forward wrote, without any error, or those of a second forward
(the stages of a pipeline run several before the first backward), which autograd ends with an error about an inplace
operation. A copy of the old value is read instead, and kept where it, or what is made of it, is needed.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.compat import aot_inputs, partitioner
from mindspeed_fx.graph.annotate import written_nodes
from mindspeed_fx.graph.storage import owner

aten = torch.ops.aten


def keep_old_values(joint: fx.GraphModule) -> None:
    """Have a joint graph read copies of the inputs that it writes, where its backward depends on what it reads."""
    names = {f"primals_{i + 1}" for i in aot_inputs.written_inputs()}
    backward = _backward(joint.graph)
    written = {owner(w) for n in joint.graph.nodes if n not in backward for w in written_nodes(n)}
    values = [n for n in joint.graph.find_nodes(op="placeholder") if n in written or n.target in names]
    if not values:
        return
    before_backward = _with_ancestors(backward)
    for value in values:
        readers = [u for u in value.users if u.op != "output" and value not in written_nodes(u)]
        if not any(u in before_backward or partitioner.must_recompute(u) for u in readers):
            continue
        with joint.graph.inserting_before(next(n for n in joint.graph.nodes if n in readers)):
            old = joint.graph.call_function(aten.clone.default, (value,))
        old.meta = {"val": value.meta["val"].clone()} if "val" in value.meta else {}
        partitioner.mark_save(old)
        for reader in readers:
            reader.replace_input_with(value, old)


def _backward(graph: fx.Graph) -> set[fx.Node]:
    """The gradients that are given, and what depends on them."""
    results: set[fx.Node] = set()
    for n in graph.nodes:
        is_gradient = n.op == "placeholder" and not partitioner.is_input(n)
        if n.op != "output" and (is_gradient or any(x in results for x in n.all_input_nodes)):
            results.add(n)
    return results


def _with_ancestors(nodes: set[fx.Node]) -> set[fx.Node]:
    results, todo = set(nodes), list(nodes)
    while todo:
        new = [x for x in todo.pop().all_input_nodes if x not in results]
        results.update(new)
        todo += new
    return results
