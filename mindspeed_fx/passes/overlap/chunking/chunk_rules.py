"""Which operators work chunk by chunk, and how a cut of a result follows from a cut of an input, and back.

``mindspeed::`` operators say so themselves: a chunk is a shard in time, so their sharding rules hold. ATen operators
and collectives are listed here; what is not listed is computed whole.
"""

from __future__ import annotations

import operator
from typing import Any, Iterable, Iterator

import torch
import torch.fx as fx

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED, Even
from mindspeed_fx.graph import op_sets
from mindspeed_fx.graph.collectives import is_wait
from mindspeed_fx.graph.op_sets import IDENTITIES, REORDERINGS, TO_SHAPE, order_of
from mindspeed_fx.graph.schema import all_arguments, argument
from mindspeed_fx.kernels.base import find
from mindspeed_fx.kernels.sharding import strategies
from mindspeed_fx.passes.overlap.chunking.chunk_spec import ChunkSpec, Sum, through_view

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

SAME_CUT = (*IDENTITIES, aten._to_copy.default, c10d.all_reduce.default)
"""Results that are cut as their one input is."""
REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)
PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    torch.ops.mindspeed.linear.default,
    torch.ops.mindspeed.gemm.default,
)
_MOVES = (c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default)


def inputs(node: fx.Node, out: Any) -> dict[fx.Node, Any] | None:
    """How each input is cut when the result is cut as ``out`` says: input -> Cut or None (the whole of it); None: it
    can't be.
    """
    try:
        wanted = list(_inputs(node, out))
    except (_Whole, IndexError):
        return None
    results: dict[fx.Node, Any] = {}
    for source, cut in wanted:
        if results.setdefault(source, cut) != cut:
            return None
    return results


def complete_specs(node: fx.Node, out: Any) -> Any:
    """``out``, of which some results may be left open, with what they are."""
    if not isinstance(out, tuple):
        return out
    if _own(node) is None:
        return (next(o for o in out if o is not None),) * len(out)
    source, cut = next((s, c) for s, c in inputs(node, out).items() if c is not None)
    return next((o for o in _rule_results(node, source, cut) if agree(o, out)), out)


def agree(a: Any, b: Any) -> bool:
    """Whether two cuts of one result are the same, where both are known."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return all(x is None or y is None or x == y for x, y in zip(a, b))
    return a == b


def results(node: fx.Node, source: fx.Node, cut: Any) -> Iterator[Any]:
    """Cuts of the result of ``node`` for which its input ``source`` is cut as ``cut``; most likely first."""
    for out in _candidates(node, source, cut):
        result = inputs(node, out)
        if result is not None and (
            agree(result.get(source), cut) if isinstance(cut, tuple) else result.get(source) == cut
        ):
            yield out


class _Whole(Exception):
    """The operator needs the whole."""


def _inputs(node: fx.Node, out: Any) -> Iterator[tuple[fx.Node, Any]]:
    if node.op != "call_function":
        raise _Whole
    f, args = node.target, node.args
    if f is operator.getitem:
        many = args[0].meta.get("val")
        if many is None:  # torch's partitioner says nothing of a call whose random state it saves
            raise _Whole
        yield args[0], tuple(out if k == args[1] % len(many) else None for k in range(len(many)))
        return
    shape = _shape(node)
    if is_wait(node) or f in SAME_CUT:
        yield args[0], out
    elif f in _MOVES:
        yield args[0], _collective_rule(node, out, backward=True)
    elif _own(node) is not None:
        yield from _by_rule(node, out)
    elif f is aten.split.Tensor or f is aten.split_with_sizes.default:
        yield args[0], _join_pieces(node, out)
    elif isinstance(out, Sum):
        yield from _summands(node, out)
    elif not isinstance(out, ChunkSpec):
        raise _Whole
    elif f in TO_SHAPE:
        yield args[0], _or_whole(through_view(out, shape, _shape(args[0])))
    elif f in REORDERINGS:
        yield args[0], ChunkSpec(order_of(node)[out.dim], out.blocks)
    elif f is aten.unsqueeze.default:
        yield (
            args[0],
            ChunkSpec(
                out.dim - (out.dim > args[1] % len(shape)),
                _or_whole(out.blocks if out.dim != args[1] % len(shape) else None),
            ),
        )
    elif f is aten.squeeze.dim:
        gone = len(_shape(args[0])) > len(shape)  # a dimension longer than one stays
        yield args[0], ChunkSpec(out.dim + (gone and out.dim >= args[1] % len(_shape(args[0]))), out.blocks)
    elif f is aten.slice.Tensor:
        yield args[0], _or_whole(out if (argument(node, "dim") % len(shape)) != out.dim else None)
    elif f is aten.cat.default:
        yield from _pieces(node, out)
    elif f in (aten.mm.default, torch.ops.mindspeed.gemm.default):
        yield from ((args[0], _or_whole(out if out.dim == 0 else None)), (args[1], None))
    elif f is aten.addmm.default:
        yield from (
            (args[0], out if len(_shape(args[0])) == 2 and _shape(args[0])[0] != 1 else None),
            (args[1], _or_whole(out if out.dim == 0 else None)),
            (args[2], None),
        )
    elif f is aten.bmm.default:
        yield from ((args[0], _or_whole(out if out.dim < 2 else None)), (args[1], out if out.dim == 0 else None))
    elif f in REDUCTIONS:
        yield args[0], _unreduced_dims(node, out)
    elif f is aten.embedding.default:
        yield from ((args[0], None), (args[1], _or_whole(out if out.dim < len(_shape(args[1])) else None)))
    elif f is aten._softmax.default:
        yield args[0], _or_whole(out if args[1] % len(shape) != out.dim else None)
    elif is_pointwise(f):
        for source in node.all_input_nodes:
            if isinstance(source.meta.get("val"), torch.Tensor):
                own = out.dim - (len(shape) - len(_shape(source)))
                yield source, ChunkSpec(own, out.blocks) if own >= 0 and _shape(source)[own] != 1 else None
    else:
        raise _Whole


def _candidates(node: fx.Node, source: fx.Node, cut: Any) -> Iterator[Any]:
    if node.op != "call_function":
        return
    f, here = node.target, source.meta.get("val")
    if f is operator.getitem:
        if isinstance(cut, tuple):
            yield cut[node.args[1] % len(cut)]
    elif _own(node) is not None:
        yield from _rule_results(node, source, cut)
    elif not isinstance(cut, ChunkSpec) or not isinstance(here, torch.Tensor):
        return
    elif f in _MOVES:
        moved = _collective_rule(node, cut, backward=False)
        if moved is not None:
            yield moved
    elif f in TO_SHAPE:
        existing = through_view(cut, here.shape, _shape(node))
        if existing is not None:
            yield existing
    elif f in (aten.split.Tensor, aten.split_with_sizes.default):
        n = len(node.meta["val"])
        along = argument(node, "dim") % here.dim() == cut.dim
        if not along or cut.blocks % n == 0:
            yield (ChunkSpec(cut.dim, cut.blocks // n if along else cut.blocks),) * n
    else:
        if f in (aten.mm.default, aten.sum.dim_IntList):
            yield Sum(cut.blocks)
        value = node.meta.get("val")
        for dim in (
            sorted(range(value.dim()), key=lambda d: abs(d - (value.dim() - here.dim()) - cut.dim))
            if isinstance(value, torch.Tensor)
            else ()
        ):
            yield ChunkSpec(dim, cut.blocks)
            if f is aten.cat.default:
                yield ChunkSpec(dim, cut.blocks * len(node.args[0]))


def _collective_rule(node: fx.Node, cut: Any, backward: bool) -> ChunkSpec | None:
    """Through a collective: along dimension 0 the ranks' parts are blocks, of the result of all_gather, of the input of
    reduce_scatter.
    """
    if not isinstance(cut, ChunkSpec):
        raise _Whole
    if cut.dim > 0:
        return cut
    if node.target is c10d.all_to_all_single.default:
        ranks = len(argument(node, "input_split_sizes"))
        return _or_whole(cut if _even(node) and cut.blocks % ranks == 0 else None, quiet=not backward)
    ranks = argument(node, "group_size")
    if (node.target is c10d.all_gather_into_tensor.default) != backward:
        return ChunkSpec(0, cut.blocks * ranks)
    return _or_whole(ChunkSpec(0, cut.blocks // ranks) if cut.blocks % ranks == 0 else None, quiet=not backward)


def _even(node: fx.Node) -> bool:
    sizes = [*argument(node, "input_split_sizes"), *argument(node, "output_split_sizes")]
    return all(isinstance(s, int) for s in sizes) and len(set(sizes)) == 1


def _join_pieces(node: fx.Node, out: Any) -> ChunkSpec:
    """The cut of what was split into pieces that are cut so."""
    named = {o for o in out if o is not None}
    if len(named) != 1:
        raise _Whole
    (piece,), n = named, len(out)
    if argument(node, "dim") % len(_shape(node.args[0])) != piece.dim:
        return piece
    return _or_whole(
        ChunkSpec(piece.dim, piece.blocks * n) if _alike(v.shape[piece.dim] for v in node.meta["val"]) else None
    )


def _pieces(node: fx.Node, out: ChunkSpec) -> Iterator[tuple[fx.Node, ChunkSpec]]:
    parts = node.args[0]
    if argument(node, "dim") % len(_shape(node)) != out.dim:
        yield from ((p, out) for p in parts)
    else:
        even = _alike(_shape(p)[out.dim] for p in parts) and out.blocks % len(parts) == 0
        yield from ((p, _or_whole(ChunkSpec(out.dim, out.blocks // len(parts)) if even else None)) for p in parts)


def _summands(node: fx.Node, out: Sum) -> Iterator[tuple[fx.Node, Any]]:
    """A product whose summands are cut, a sum over what is cut."""
    if node.target is aten.mm.default:
        yield from ((node.args[0], ChunkSpec(1, out.blocks)), (node.args[1], ChunkSpec(0, out.blocks)))
    elif node.target is aten.sum.dim_IntList and len(argument(node, "dim") or ()) == 1:
        yield node.args[0], ChunkSpec(argument(node, "dim")[0] % len(_shape(node.args[0])), out.blocks)
    else:
        raise _Whole


def _unreduced_dims(node: fx.Node, out: ChunkSpec) -> ChunkSpec:
    dims = len(_shape(node.args[0]))
    gone = {d % dims for d in (argument(node, "dim") or range(dims))}
    kept = list(range(dims)) if argument(node, "keepdim") else [d for d in range(dims) if d not in gone]
    return ChunkSpec(kept[out.dim], _or_whole(out.blocks if kept[out.dim] not in gone else None))


def is_pointwise(f: Any) -> bool:
    """Whether a chunk of the result is made of that chunk of each argument, whenever it is made."""
    return op_sets.is_pointwise(f) and not op_sets.is_random(f) and not op_sets.may_write(f)


# --------------------------------------------------------------------------- mindspeed:: operators


def _own(node: fx.Node) -> Any:
    result = find(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
    return result if result is not None and result.sharding is not None and not op_sets.is_random(node.target) else None


def _rows(node: fx.Node) -> Iterator[tuple[list, list[tuple[fx.Node, Any]]]]:
    """The operator's ways, that of computing it whole left out: placements of the results, and of each tensor
    argument's node.
    """
    schema = node.target._schema.arguments
    arg = all_arguments(node.target, node.args, node.kwargs)
    fakes = [g.meta["val"] if isinstance(g, fx.Node) else g for g in arg]
    tensors = [g for g, a in zip(arg, schema) if "Tensor" in str(a.type) and isinstance(g, fx.Node)]
    if any("Tensor[]" in str(a.type) or "List[Tensor" in str(a.type) for a in schema):
        return
    for outs, ins in strategies(_own(node), fakes)[1:]:
        if PARTIAL not in ins:
            yield outs, list(zip(tensors, ins, strict=True))


def _by_rule(node: fx.Node, out: Any) -> Iterator[tuple[fx.Node, Any]]:
    wanted = out if isinstance(out, tuple) else (out,)
    blocks = {o.blocks for o in wanted if isinstance(o, ChunkSpec)}
    if len(blocks) != 1:
        raise _Whole
    blocks = blocks.pop()
    for outs, ins in _rows(node):
        if all(
            w is None
            or (isinstance(w, Sum) and o == PARTIAL)
            or (isinstance(w, ChunkSpec) and not isinstance(o, (str, Even)) and o == w.dim)
            for w, o in zip(wanted, outs)
        ):
            yield from ((source, None if p == REPLICATED else ChunkSpec(int(p), blocks)) for source, p in ins)
            return
    raise _Whole


def _rule_results(node: fx.Node, source: fx.Node, cut: Any) -> Iterator[Any]:
    if not isinstance(cut, ChunkSpec):
        return
    for outs, ins in _rows(node):
        if any(s is source and not isinstance(p, (str, Even)) and p == cut.dim for s, p in ins):
            results = tuple(
                Sum(cut.blocks) if o == PARTIAL else None if o == REPLICATED else ChunkSpec(int(o), cut.blocks)
                for o in outs
            )
            if any(isinstance(m, ChunkSpec) for m in results):
                yield results if isinstance(node.meta["val"], (list, tuple)) else results[0]


def _shape(node: fx.Node) -> tuple:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _alike(sizes: Iterable[Any]) -> bool:
    """Whether sizes are one, as text: symbols are asked no guard, and are no elements of sets."""
    return len({str(size) for size in sizes}) == 1


def _or_whole(result: Any, quiet: bool = False) -> Any:
    if result is None and not quiet:
        raise _Whole
    return result
