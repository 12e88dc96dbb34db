"""The programs of all ranks side by side, node by node, and the whole program beside them."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field, replace
from typing import Any, Sequence

import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.sharding.audit.relations import (
    collectives,
    linear_losses,
    losses,
    moves,
    routed,
    rows,
    rules,
    vocabulary,
)
from mindspeed_fx.sharding.audit.relations import nodes as nodes_of
from mindspeed_fx.sharding.audit.relations.compare import Failed
from mindspeed_fx.sharding.audit.relations.indexing import INDEXING
from mindspeed_fx.sharding.audit.relations.lookups import Lookup, Lookups
from mindspeed_fx.sharding.audit.relations.numbers import Numbers, Numeric, Place
from mindspeed_fx.sharding.audit.relations.parts import (
    Fill,
    Part,
    Terms,
    Unknown,
    Unproved,
)

SAME = frozenset("detach clone contiguous alias wait_tensor lift_fresh_copy".split())


@dataclass
class Programs:
    """The program of every rank: graphs with equal operators, whose numbers may differ."""

    graphs: Sequence[fx.Graph]
    places: dict[str, tuple[int, ...]]
    """Mesh dimension -> the place of each rank in it."""
    groups: dict[str, str]
    """Name of a process group -> mesh dimension."""
    ranks: dict[str, int] = field(default_factory=dict)


class _Before(Unproved):
    """What is read has no relation already; its reason."""


class Walk:
    """Relations of every node of ``programs`` to whole terms."""

    def __init__(self, terms: Terms, programs: Programs):
        self.terms, self.programs = terms, programs
        self.values: list[Any] = []
        """For each place of the programs: its part, parts or failure."""
        self.at: dict[fx.Node, int] = {}
        """Node of any rank -> its place."""
        self.columns: list[Sequence[fx.Node]] = []
        self.places = [Place(r, {m: at[r] for m, at in programs.places.items()}) for r in range(len(programs.graphs))]
        self.numbers = Numbers(
            terms, self.places, lambda n: self.values[self.at[n]], lambda n: self.columns[self.at[n]], self._members
        )

        self.lookups = Lookups(terms, self.numbers, self._own)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Parts of the results for those of the inputs."""
        columns = [nodes_of.live_nodes(g) for g in self.programs.graphs]
        if len({len(c) for c in columns}) > 1:
            results = columns[0][-1].args[0]
            return [Failed(Unknown("ranks have programs of different lengths"))] * len(results)  # type: ignore[arg-type]
        remaining = iter(inputs)
        for nodes in zip(*columns):
            n = nodes[0]
            self.at.update(dict.fromkeys(nodes, len(self.values)))
            self.columns.append(nodes)
            if n.op == "placeholder":
                self.values.append(next(remaining))
            elif n.op == "output":
                return [self._result(column) for column in zip(*(m.args[0] for m in nodes))]
            else:
                self.values.append(self._value(nodes))
        raise Unknown("a program returns nothing")

    def _result(self, column: Sequence[Any]) -> Any:
        if not isinstance(column[0], fx.Node):
            return None
        try:
            return self._own(self._read(column))
        except Unproved as error:
            return Failed(error.args[0] if isinstance(error, _Before) else error)

    def _value(self, nodes: Sequence[fx.Node]) -> Any:
        n = nodes[0]
        try:
            if any(m.op != n.op or m.target != n.target for m in nodes):
                raise Unknown("ranks run different operators")
            return self._computed(nodes)
        except Unproved as error:
            if isinstance(error, _Before):
                return Failed(error.args[0])
            if nodes_of.is_integer(n):
                return Numeric()
            where = module_path(n) or "the model"
            return Failed(type(error)(f"{n.target} ({where}): {error}"))

    def _read(self, column: Sequence[fx.Node]) -> Any:
        """The value of what each rank reads in one place; ranks may read different pieces of one tensor."""
        read = {self.at[m]: self.values[self.at[m]] for m in column}
        for value in read.values():
            if isinstance(value, Failed):
                raise _Before(value.error)
        first = next(iter(read.values()))
        if len(read) == 1 or all(isinstance(v, Numeric) for v in read.values()):
            return first
        if all(isinstance(v, rows.Order) for v in read.values()):
            return rows.piece_of_each([read[self.at[m]] for m in column])
        if all(isinstance(v, rows.Rows) for v in read.values()):
            return rows.rows_of_each([read[self.at[m]] for m in column])
        if not all(isinstance(p, Part) and p.picked for p in read.values()):
            raise Unknown("ranks read different tensors")
        digit, _, dim = first.picked[-1]
        rest = replace(first, picked=first.picked[:-1])
        if any(replace(p, picked=p.picked[:-1]) != rest or p.picked[-1][0] != digit for p in read.values()):
            raise Unknown("ranks read pieces of different tensors")
        index = tuple(read[self.at[m]].picked[-1][1][rank] for rank, m in enumerate(column))
        return replace(rest, picked=(*rest.picked, (digit, index, dim)))

    def _arguments(self, nodes: Sequence[fx.Node]) -> list:
        """Those of the first rank, with the values of what all ranks read in place of nodes."""
        leaves, spec = pytree.tree_flatten(list(nodes[0].args))
        others = [pytree.tree_leaves(list(m.args)) for m in nodes]
        if any(len(o) != len(leaves) for o in others):
            raise Unknown("ranks read different numbers of tensors")
        read = [self._read(column) if isinstance(column[0], fx.Node) else column[0] for column in zip(*others)]
        return pytree.tree_unflatten(read, spec)

    def _computed(self, nodes: Sequence[fx.Node]) -> Any:
        n = nodes[0]
        if n.op == "get_attr":
            raise Unknown("a constant")
        if n.target is operator.getitem:
            return self._item(nodes)
        name = nodes_of.name_of(n.target)
        short = name.rpartition(".")[2]
        if short in nodes_of.FILLS:
            return nodes_of.filled(n, short)
        args = self._arguments(nodes)
        if short in SAME:
            return args[0]
        if vocabulary.concerns(short, args) or linear_losses.concerns(short, args):
            args = pytree.tree_map(self._own, args)
            if (relation := self._of_ids(nodes, short, args)) is not None:
                return relation
        if routed.concerns(short, args):
            return self._routed(nodes, name, args)
        if name.startswith("_c10d_functional."):
            return self._sent(nodes, short, self._own(args[0]))
        if short == "split" and isinstance(args[1], int):
            if isinstance(args[0], Fill):
                return args[0]
            return ("pieces", self._own(args[0]), args[1], args[2] if len(args) > 2 else 0)
        if short == "cat":
            dim = (args[1] if len(args) > 1 else 0) % len(n.meta["val"].shape)
            whole = collectives.joined(args[0], dim) if all(isinstance(a, Part) for a in args[0]) else None
            if whole is not None:
                return whole
            args[0] = [self._own(a) for a in args[0]]
            if isinstance(args[0][0], Fill) and len({a.value if isinstance(a, Fill) else a for a in args[0]}) == 1:
                return nodes_of.filled(n, short, args[0][0])
            return self._cat(args[0], dim)
        if short in ("slice", "expand", *moves.MOVES) and isinstance(args[0], Fill):
            return nodes_of.filled(n, short, args[0])
        if short == "slice":
            return self._slice(nodes, args)
        if short == "split_with_sizes":
            self._alike(nodes)
            return self._pieces(self._own(args[0]), args[1], args[2] if len(args) > 2 else 0)
        args = pytree.tree_map(lambda a: self._own(a) if isinstance(a, Part) else a, args)
        if short in moves.MOVES:
            return moves.MOVES[short](self.terms, n, args)
        if short not in nodes_of.SIZED:
            self._alike(nodes)
        args = self._spread(args, short)
        read = [a for a in pytree.tree_leaves(args) if isinstance(a, (Part, Fill))]
        if short in INDEXING and all(isinstance(a, Part) for a in read[short.startswith("scatter") :]):
            return INDEXING[short](self.terms, args, n)
        if any(isinstance(a, Fill) for a in read) and short not in rules.POINTWISE:
            raise Unknown("no rule for one number everywhere")
        if name in rules.RULES:
            parts = [a for a in pytree.tree_leaves(args) if isinstance(a, Part)]
            losses.note(self.terms, name, nodes_of.key_of(n), n, parts)
            results = rules.apply(self.terms, name, nodes_of.key_of(n), parts)
            return results if len(n.target._schema.returns) > 1 else results[0]
        if short in moves.PRODUCTS and not (short == "addmm" and n.kwargs):
            return moves.PRODUCTS[short](self.terms, args, n)
        parts = [a for a in args if isinstance(a, Part)]
        if short in rules.POINTWISE and parts and max(len(p.dims) for p in parts) == n.meta["val"].dim():
            commutes = short in ("add", "mul") and n.kwargs.get("alpha", 1) == 1 and len(parts) == len(args)
            fills = tuple((i, a.value) for i, a in enumerate(args) if isinstance(a, Fill))
            if moves.is_identity(short, args):
                return parts[0]
            if fills:  # in none of the arguments linear
                result = rules.pointwise(self.terms, f"{short} of numbers", (nodes_of.key_of(n), fills), parts)
            else:
                result = rules.pointwise(self.terms, short, nodes_of.key_of(n), parts, commutes)
            if short == "div" and len(parts) == 1 and isinstance(args[1], (int, float)):
                self.terms.quotients[result.term] = parts[0], args[1]
            return losses.recognized(self.terms, result)
        if not parts and not any(isinstance(a, Fill) for a in args):
            shape = tuple(n.meta["val"].shape)
            return self.terms.fresh((name, nodes_of.key_of(n), shape), shape, [()] * len(shape), ())
        raise Unknown("no rule")

    def _routed(self, nodes: Sequence[fx.Node], name: str, args: list) -> Any:
        """Where rows are on their way to experts, or integers that send them."""
        context = rows.Context(
            self.terms,
            self.places,
            routed.rule_key(nodes[0]),
            lambda i: self.numbers.of([m.args[i] for m in nodes]),  # type: ignore[misc]
            lambda rank: self._members(nodes[rank], rank),
            lambda: self._mesh(nodes, name),
        )
        return routed.apply(context, nodes, name, [self._own(a) for a in args])

    def _of_ids(self, nodes: Sequence[fx.Node], short: str, args: list) -> Any:
        """Where a vocabulary in parts is read; None where it is not."""
        n = nodes[0]
        x = linear_losses.largest(self.terms, args[0])
        if isinstance(x, vocabulary.Largest) and short == "all_reduce" and args[1] == "max":
            return vocabulary.reduced(x, self._mesh(nodes, short))

        def lookup(at: int) -> Lookup:
            return self.lookups.of([m.args[at] for m in nodes])  # type: ignore[misc]

        of = linear_losses if linear_losses.concerns(short, args) else vocabulary
        return of.apply(vocabulary.Context(self.terms, self.places, n, lookup), short, args)

    def _spread(self, args: list, short: str) -> list:
        """One value everywhere as a part like another argument of that shape; where it is broadcast, as it is."""
        parts = [a for a in args if isinstance(a, Part)]

        def own(a: Any) -> Any:
            if not isinstance(a, Fill) or not isinstance(a.value, Part):
                return a
            like = next((p for p in parts if p.local == a.shape), None)
            if like is None and short not in rules.POINTWISE:
                raise Unknown("one value, in a shape of its own")
            return a.value if like is None or short in rules.POINTWISE else self.terms.spread(a.value, like)

        return [own(a) for a in args]

    # ----------------------------------------------------------- pieces

    def _own(self, x: Any) -> Any:
        if isinstance(x, rows.Order) and x.picked:
            tokens = collectives.piece(x.tokens, 0, *x.picked)
            return replace(x, tokens=self._own(tokens), picked=None)
        if not isinstance(x, Part) or not x.picked:
            return x
        return collectives.own(self.terms, x, self.programs.places, self.programs.ranks)

    def _item(self, nodes: Sequence[fx.Node]) -> Any:
        value = self._read([m.args[0] for m in nodes])
        if isinstance(value, Numeric):
            return value
        if isinstance(value, Fill):
            return nodes_of.filled(nodes[0], "", value)
        if isinstance(value, tuple) and value[0] == "pieces":
            _, x, size, dim = value
            if not isinstance(x, Part):
                return routed.item(value, nodes)
            extent = x.local[dim]
            if extent % size:
                raise Unknown(f"{extent} in pieces of {size}")
            return collectives.piece(x, dim % len(x.dims), extent // size, [m.args[1] for m in nodes])
        return value[nodes[0].args[1]]

    def _slice(self, nodes: Sequence[fx.Node], args: list) -> Part:
        x, dim = self._own(args[0]), (args[1] if len(args) > 1 else 0) % len(args[0].dims)
        extent = x.local[dim]
        bounds = [slice(*m.args[2:4]) if len(m.args) > 3 else slice((*m.args, 0, 0)[2], None) for m in nodes]
        starts, ends, _ = zip(*(b.indices(extent) for b in bounds))
        sizes = {e - s for s, e in zip(starts, ends)}
        size = sizes.pop()
        step = (nodes[0].args[4:] or (1,))[0]
        if size == extent and not sizes and step == 1:
            return x
        if len(set(starts)) == 1 and not sizes and (len(starts) == 1 or not rules.profile(x.dims[dim])):
            return moves.cut(self.terms, x, dim, starts[0], starts[0] + size, step)
        if step != 1 or sizes:
            raise Unknown("a slice that is no piece")
        if extent % size or any(s % size for s in starts):
            raise Unknown("a slice that is no piece")
        return collectives.piece(x, dim, extent // size, [s // size for s in starts])

    def _pieces(self, x: Part, sizes: Sequence[int], dim: int) -> list[Part]:
        ends = list(itertools.accumulate(sizes))
        return [moves.cut(self.terms, x, dim % len(x.dims), e - size, e) for size, e in zip(sizes, ends)]

    def _alike(self, nodes: Sequence[fx.Node]) -> None:
        if any(nodes_of.numbers_of(m) != nodes_of.numbers_of(nodes[0]) for m in nodes):
            raise Unknown("numbers of ranks differ")

    def _cat(self, pieces: list[Part | Fill], dim: int) -> Part:
        """Of parts that are whole along ``dim``, and numbers."""
        parts = [p for p in pieces if isinstance(p, Part)]
        if any(isinstance(p, Fill) and isinstance(p.value, Part) for p in pieces):
            raise Unknown("one value joined to others")
        order = [*(i for i in range(len(parts[0].dims)) if i != dim), dim]
        moved = [replace(p, dims=tuple(p.dims[i] for i in order)) for p in parts]
        if any(d.mesh for p in moved for d in p.dims[-1]):
            raise Unknown("parts are joined along what is divided")
        shared = [rules.profile(d) for d in parts[0].dims]
        for p in parts[1:]:
            if [rules.profile(d) for d in p.dims] != shared:
                raise Unproved("what is joined is divided in different ways")
        if any(p.partial != parts[0].partial for p in parts):
            raise Unproved("a partial sum is joined to what is none")
        sizes = list(parts[0].whole)
        sizes[dim] = sum(p.shape[dim] if isinstance(p, Fill) else p.whole[dim] for p in pieces)
        key = ("cat", dim, *((p.value, p.shape[dim]) if isinstance(p, Fill) else p.arranged for p in pieces))
        if len(parts) < len(pieces) and parts[0].partial and any(p.value for p in pieces if isinstance(p, Fill)):
            raise Unproved("a partial sum is joined to numbers")
        return self.terms.fresh(key, sizes, shared, parts[0].partial)

    def _members(self, node: fx.Node, rank: int) -> list[int]:
        """The ranks that share a collective's group with ``rank``, in order."""
        mesh = self.programs.groups[node.args[-1]]  # type: ignore[index]
        own = {m: at for m, at in self.places[rank].at.items() if m != mesh}
        members = [p for p in self.places if all(p.at[m] == at for m, at in own.items())]
        return [p.rank for p in sorted(members, key=lambda p: p.at[mesh])]

    def _sent(self, nodes: Sequence[fx.Node], short: str, x: Part) -> Part:
        n = nodes[0]
        if short == "wait_tensor":
            return x
        mesh = self._mesh(nodes, short)
        count = self.programs.ranks[mesh]
        if short == "all_reduce":
            return collectives.all_reduce(x, mesh, n.args[1])
        if short == "all_gather_into_tensor":
            return collectives.all_gather(x, mesh)
        if short == "reduce_scatter_tensor":
            return collectives.reduce_scatter(x, mesh, count, n.args[1])
        if short == "all_to_all_single" and len({*n.args[1], *n.args[2]}) == 1:
            return collectives.all_to_all(x, mesh, count)
        raise Unknown("no rule")

    def _mesh(self, nodes: Sequence[fx.Node], short: str) -> str:
        """The mesh dimension of a collective."""
        meshes = {self.programs.groups.get(m.args[-1]) for m in nodes}
        if len(meshes) > 1 or None in meshes:
            raise Unproved(f"{short} over different groups of ranks")
        return str(meshes.pop())
