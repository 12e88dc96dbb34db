"""Masks that the backward reads are saved as bytes, not as bools, which Inductor's code for the CPU writes and
reads one element at a time.

A mask of 3.2 million elements takes 26 ms to write and 10 to 18 ms to read as bool, 0.3 and 0.3 to 1.5 ms as uint8
(torch 2.13, one thread, AVX512): ``at::vec::VecMask`` goes through an array of single elements. By way of float32 both
are vectors.
"""

from __future__ import annotations

from typing import Any, Iterable

import torch
import torch.fx as fx

from mindspeed_fx.compat import partitioner
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.new_call import call_meta
from mindspeed_fx.graph.storage import read_from_memory
from mindspeed_fx.partition.offload import refusal

CONVERT = torch.ops.prims.convert_element_type.default


def is_mask(node: fx.Node) -> bool:
    """Whether ``node`` is a mask that generated code computes."""
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.dtype == torch.bool
        and partitioner.is_fusible(node)
    )


def save_as_bytes(
    forward: fx.GraphModule, backward: fx.GraphModule, names: Iterable[str]
) -> tuple[list[fx.Node], dict[str, str]]:
    """Rewrites both graphs in place: a mask leaves the forward as uint8, 1 where it is set.

    Args:
        names: masks of the joint graph; those that the forward does not save are left out.

    Returns:
        The masks that were rewritten, and name -> why of those that stay bools.
    """
    saved = {n.name: n for n in forward.graph.output_node().args[0] if isinstance(n, fx.Node)}
    taken = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    done, kept = [], {}
    for name in names:
        mask, arg = saved.get(name), taken.get(name)
        if mask is None or arg is None or not arg.users:
            continue
        if reason := refusal(mask, forward) or _read_as_it_is(arg):
            kept[name] = reason
            continue
        _write(forward, mask)
        _read(backward, arg)
        done.append(mask)
    for gm in (forward, backward) if done else ():
        gm.graph.lint()
        gm.recompile()
    return done, kept


def _read_as_it_is(arg: fx.Node) -> str:
    return "a call of the backward reads it from memory, as bool" if read_from_memory(arg) else ""


def _write(gm: fx.GraphModule, mask: fx.Node) -> None:
    byte = _call(gm, mask, CONVERT, _call(gm, mask, CONVERT, mask, torch.float32), torch.uint8)
    gm.graph.output_node().replace_input_with(mask, byte)


def _read(gm: fx.GraphModule, arg: fx.Node) -> None:
    readers, like = list(arg.users), next(iter(arg.users))
    arg.meta["val"] = arg.meta["val"].to(torch.uint8)
    arg.meta.pop("tensor_meta", None)
    mask = _call(gm, like, aten.ne.Scalar, _call(gm, like, CONVERT, arg, torch.float32), 0.0)
    for reader in readers:
        reader.replace_input_with(arg, mask)


def _call(gm: fx.GraphModule, like: fx.Node, target: Any, x: fx.Node, argument: Any) -> fx.Node:
    """A call of two arguments that says of its origin what ``like`` says."""
    after = x if x.op != "placeholder" else next(n for n in gm.graph.nodes if n.op != "placeholder").prev
    with gm.graph.inserting_after(after):
        new = gm.graph.call_function(target, (x, argument))
    new.meta = call_meta(like, target, new.args, {})
    return new
