"""One spelling for each meaning in a captured graph, bitwise: no rewrite here changes a value or a gradient.

* in-place and ``out=`` operators on a fresh intermediate become functional; the ones that touch an input, a view or
  a value across a change of grad mode stay, and :func:`annotate` marks what they touch, so that no pass reads it late
* casts (``float``, ``type_as``, ``to(other)`` ...) become ``aten.to.dtype``; casts, dropouts, expands and slices
  that do nothing disappear
* ``square(x)``, ``x * x`` and ``x ** 2`` become ``pow(x, 2)``
* ``chunk``, ``split``, ``tensor_split`` become ``split_with_sizes``
* ``cat`` loses the tensors without elements, with which caches of keys begin and compressed ones end before their first
  block; of one tensor that lies as it did it disappears
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake
from mindspeed_fx.graph.annotate import _differentiable, annotate, bodies, written_nodes
from mindspeed_fx.graph.edit import drop_dead
from mindspeed_fx.graph.schema import argument

aten = torch.ops.aten


def normalize(gm: fx.GraphModule) -> fx.GraphModule:
    """Canonical spelling for ``gm`` and the bodies of its higher-order operators, in place."""
    for body in bodies(gm):
        normalize(body)
    annotate(gm)
    _drop_detachments(gm)
    _functionalize(gm)
    for node in list(gm.graph.nodes):
        if (
            node.op == "call_function"
            and node.target in _SPELLINGS
            and isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))
        ):
            _SPELLINGS[node.target](node)
    drop_dead(gm)
    gm.recompile()
    annotate(gm)
    return gm


# --------------------------------------------------------------------------- in-place -> functional


def _drop_detachments(gm: fx.GraphModule) -> None:
    """Remove ``detach_`` of values without a gradient, which ``torch.tensor`` leaves behind.

    As ``detach`` it would be a view: what AOTAutograd makes of two views of the tensor had two bases then, and the next
    graph may not write inputs that share memory and no base.
    """
    for node in list(gm.graph.nodes):
        if node.target is aten.detach_.default and not node.args[0].meta["needs_grad"]:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def _functionalize(gm: fx.GraphModule) -> None:
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}
    for n in gm.graph.nodes:
        if isinstance(n.meta.get("val"), torch.Tensor):
            sharing.setdefault(fake.storage_of(n.meta["val"]), []).append(n)
    for node in list(gm.graph.nodes):
        written = written_nodes(node)
        functional = _functional_form(node) if len(written) == 1 else None
        if functional is None:
            continue
        buffer = written[0]
        peers = [p for p in sharing[fake.storage_of(buffer.meta["val"])] if p is not node and p is not buffer]
        live_peers = [p for p in peers if order[p] < order[node] and any(order[u] >= order[node] for u in p.users)]
        owned = buffer.op == "call_function" and not any(p.op in ("placeholder", "get_attr") for p in peers)
        same_mode = buffer.meta["grad_enabled"] == node.meta["grad_enabled"]
        if not owned or live_peers or not same_mode:
            continue
        target, args, kwargs = functional
        with gm.graph.inserting_after(node):
            new = gm.graph.call_function(target, args, kwargs)
        new.meta = dict(node.meta)
        order[new] = order[node]
        buffer.replace_all_uses_with(
            new, delete_user_cb=lambda u: u is not new and u is not node and order[u] > order[node]
        )
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        storage = fake.storage_of(buffer.meta["val"])
        sharing[storage] = [new if p is node else p for p in sharing[storage] if p is not buffer]


def _functional_form(node: fx.Node) -> tuple[Callable, tuple, dict] | None:
    """The functional operator that computes what the in-place or ``out=`` ``node`` computes; None if there is none."""
    packet, overload = node.target._schema.name.split("::")[1], node.target._overloadname
    if node.target.namespace != "aten":
        return None
    value = node.meta.get("val")
    if packet.endswith("_") and not packet.startswith("_"):
        functional = getattr(getattr(aten, packet[:-1], None), overload, None)
        args, kwargs, buffer = node.args, dict(node.kwargs), node.args[0]
    elif "out" in node.kwargs:
        plain = "default" if overload == "out" else overload.removesuffix("_out")
        functional = getattr(getattr(aten, packet, None), plain, None)
        args, kwargs = node.args, {k: v for k, v in node.kwargs.items() if k != "out"}
        buffer = node.kwargs["out"]
    else:
        return None
    if functional is None or torch.Tag.nondeterministic_seeded in functional.tags:
        return None
    if functional is aten.copy.default and node.meta["needs_grad"]:
        return None  # ``copy_`` has a derivative, ``copy`` has none
    with fake.fake_like(value):
        computed = functional(*_values(args), **_values(kwargs))
    before = buffer.meta["val"]
    if not isinstance(computed, torch.Tensor) or (computed.dtype, computed.shape, computed.stride()) != (
        before.dtype,
        before.shape,
        before.stride(),
    ):
        return None
    return functional, args, kwargs


def _values(tree: Any) -> Any:
    return fx.map_arg(tree, lambda n: n.meta.get("val"))


# --------------------------------------------------------------------------- spellings


def _replace(node: fx.Node, target: Callable, args: tuple) -> None:
    node.target, node.args, node.kwargs = target, args, {}


def _bypass(node: fx.Node, source: fx.Node, same_object: bool) -> None:
    """Let what reads ``node``, which aliases ``source`` entirely, read ``source`` itself, where none can tell them
    apart. Unless they are the ``same_object``, an output stays the node beside the source, another alias of it, or an
    input: callers see which tensors are one, and may give one of them another shape or other memory. So may the graph;
    and a view that was taken without gradients has none."""
    if not same_object:
        users = [*node.users, *source.users]
        if any(_changes_layout(u) for u in users) or node.meta["needs_grad"] != source.meta["needs_grad"]:
            return
    output = node.graph.output_node()
    visible = source.op in ("placeholder", "get_attr") or output in source.users
    if same_object or output not in node.users or not visible:
        node.replace_all_uses_with(source)
    else:
        node.replace_all_uses_with(source, delete_user_cb=lambda user: user is not output)


def _changes_layout(user: fx.Node) -> bool:
    return torch.Tag.inplace_view in getattr(user.target, "tags", ())


def _same_storage(node: fx.Node, source: Any) -> bool:
    a, b = node.meta.get("val"), source.meta.get("val") if isinstance(source, fx.Node) else None
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and fake.storage_of(a) == fake.storage_of(b)


def _cast(node: fx.Node) -> None:
    source, value = node.args[0], node.meta["val"]
    if value is source.meta["val"] or (value.dtype == source.meta["val"].dtype and _same_storage(node, source)):
        _bypass(node, source, same_object=True)
    elif value.device == source.meta["val"].device and value.dtype != source.meta["val"].dtype:
        format_kept = argument(node, "memory_format") in (None, torch.preserve_format)
        if format_kept and not argument(node, "copy"):
            _replace(node, aten.to.dtype, (source, value.dtype))


def _bypass_if_alias(node: fx.Node) -> None:
    source = node.args[0]
    if _same_storage(node, source) and _place(node) == _place(source):
        _bypass(node, source, same_object=node.target is aten.contiguous.default)


def _place(node: fx.Node) -> tuple:
    """Where in its storage a value lies, and as what; as text, so that comparing symbols asks for no guard."""
    value = node.meta["val"]
    return value.dtype, str(value.shape), str(value.stride()), str(value.storage_offset())


def _dropout(node: fx.Node) -> None:
    p, training = node.args[1], node.args[2]
    if (p == 0 or not training) and not node.meta["mutated"] and not node.args[0].meta["mutated"]:
        node.replace_all_uses_with(node.args[0])
        node.graph.erase_node(node)  # draws no random numbers, which its tag alone cannot tell


def _square(node: fx.Node) -> None:
    same = len(node.args) == 1 or node.args[0] is node.args[1]
    if (
        same
        and not node.kwargs
        and _differentiable(node.meta["val"])
        and node.meta["val"].dtype == node.args[0].meta["val"].dtype
    ):
        _replace(node, aten.pow.Tensor_Scalar, (node.args[0], 2))


def _split(node: fx.Node) -> None:
    source = node.args[0]
    dim = argument(node, "dim")
    sizes = [piece.shape[dim] for piece in node.meta["val"]]
    if all(isinstance(s, int) for s in sizes):
        _replace(node, aten.split_with_sizes.default, (source, sizes, dim % source.meta["val"].dim()))


def _concatenate(node: fx.Node) -> None:
    tensors, value = node.args[0], node.meta["val"]
    kept = [
        n
        for n in tensors
        if n.meta["needs_grad"] or not any(isinstance(s, int) and s == 0 for s in n.meta["val"].shape)
    ]
    if not kept or all(n.meta["val"].dtype != value.dtype for n in kept):
        return
    source = kept[0]
    laid_out_alike = str(value.stride()) == str(source.meta["val"].stride()) and value.dtype == source.meta["val"].dtype
    if len(kept) == 1 and laid_out_alike and not _are_seen_outside(node, source):
        node.replace_all_uses_with(source)
    elif len(kept) < len(tensors):
        _replace(node, aten.cat.default, (kept, argument(node, "dim")))


def _are_seen_outside(*nodes: fx.Node) -> bool:
    """Whether a caller could tell the memory of one of them from that of a copy: it is written, an input or a
    result."""
    graph = nodes[0].graph
    inputs = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    outside = [*inputs, *graph.output_node().all_input_nodes]
    return any(n.meta["mutated"] or any(_same_storage(n, other) for other in outside) for n in nodes)


_SPELLINGS: dict[Any, Callable[[fx.Node], None]] = {
    **dict.fromkeys(
        (
            aten.to.dtype,
            aten.to.dtype_layout,
            aten.to.other,
            aten.to.device,
            aten._to_copy.default,
            aten.type_as.default,
        ),
        _cast,
    ),
    **dict.fromkeys(
        (
            aten.contiguous.default,
            aten.alias.default,
            aten.expand.default,
            aten.reshape.default,
            aten.view.default,
            aten.slice.Tensor,  # of everything, which only a symbolic size leaves in a graph (``x[:, 1]``)
        ),
        _bypass_if_alias,
    ),
    **dict.fromkeys(
        (
            aten.chunk.default,
            aten.split.Tensor,
            aten.split.sizes,
            aten.split_with_sizes.default,
            aten.tensor_split.sections,
            aten.tensor_split.indices,
        ),
        _split,
    ),
    aten.cat.default: _concatenate,
    aten.dropout.default: _dropout,
    aten.mul.Tensor: _square,
    aten.square.default: _square,
}
