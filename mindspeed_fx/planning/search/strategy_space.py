"""The strategies of every operator in one layout, and how large a tensor is on one rank."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Iterator

from mindspeed_fx.compat.placements import Even
from mindspeed_fx.planning.search.layouts import Layout, shares
from mindspeed_fx.planning.search.problem import Node, Problem, Value
from mindspeed_fx.planning.search.strategies import BY_EXPERT, EXPERTS, by_expert

R, P, SUMMED = "R", "P", "+"
"""Whole; a sum over the ranks; whole, with a gradient that is a sum over the ranks. A placement else is an atom."""
Label = Any


@dataclass(frozen=True, eq=False)
class Strategy:
    """One way to compute one operator on the ``tp`` dimension."""

    ins: tuple[Label, ...]
    outs: tuple[Label, ...]

    @property
    def divided(self) -> bool:
        return any(isinstance(x, int) for x in (*self.ins, *self.outs))


class StrategySpace:
    """Strategies of one problem; layouts of one kind share them."""

    def __init__(self, problem: Problem):
        self.problem, self.axes = problem, problem.axes
        self._strategies: dict[tuple, list[Strategy]] = {}
        self._choices: dict[tuple, dict[Node, list[Strategy]]] = {}
        self.passes = functools.cache(self._passes)
        self.expert_atoms = set(problem.experts.values())

    # ---------------------------------------------------------------- sizes

    def parts(self, layout: Layout, atom: int, without: str = "") -> int:
        """Into how many parts the dimensions other than tp cut an atom."""
        if atom == self.problem.batch and without != "data":
            return layout.dp * layout.ep * layout.microbatches
        if atom == self.problem.batch:
            return layout.microbatches
        if atom == self.problem.sequence and without != "cp":
            return layout.cp
        return layout.ep if atom in self.expert_atoms else 1

    def local(
        self, dims: list, shape: tuple[int, ...], layout: Layout, labels: dict[Label, int], without: str = ""
    ) -> tuple[int, ...]:
        """Local shape: cut by the layout, and by ``labels`` (atom -> ranks). A size never falls below 1."""
        results = []
        for dim, n in zip(dims, shape):
            for a in dim:
                n = self._padded_part(n, a, self.parts(layout, a, without) * labels.get(a, 1))
                if (expert := self.problem.experts.get(a)) is not None:
                    n //= labels.get(expert, 1)
            results.append(max(1, n))
        return tuple(results)

    def _padded_part(self, n: int, atom: int, parts: int) -> int:
        """What is left of ``n`` elements, atoms of this kind and others, when so many ranks have parts of one size of
        the atom, the last with padding."""
        size = self.axes.size[atom]
        return n // parts if size % parts == 0 or n % size else n // size * -(-size // parts)

    def rest(self, layout: Layout, atom: int, without: str = "") -> int:
        """The largest part of an atom that the dimensions other than tp leave."""
        return -(-self.axes.size[atom] // self.parts(layout, atom, without))

    def nbytes(self, value: Value, layout: Layout, label: Label = R, without: str = "") -> float:
        n = float(value.itemsize)
        for s in self.local(
            value.dims, value.shape, layout, {label: layout.tp} if isinstance(label, int) else {}, without
        ):
            n *= s
        return n

    # ---------------------------------------------------------------- strategies

    def kind(self, layout: Layout) -> tuple:
        """Layouts of one kind have the same strategies: ranks of tp, which of the atoms that a layout cuts tp can cut
        further, whether cp cuts.
        """
        atoms = (self.problem.batch, self.problem.sequence, *self.expert_atoms)
        return (
            layout.tp,
            layout.cp > 1,
            tuple(a is not None and shares(self.rest(layout, a), layout.tp) for a in atoms),
        )

    def choices(self, layout: Layout, allowed: Any = None) -> dict[Node, list[Strategy]]:
        """The strategies of every node that ``allowed(node, strategy)``; one object for all layouts of a kind."""
        key = self.kind(layout), allowed
        if key not in self._choices:
            self._choices[key] = {
                n: [s for s in self.strategies(n, layout) if allowed is None or allowed(n, s)]
                for n in self.problem.nodes
            }
        return self._choices[key]

    def strategies(self, node: Node, layout: Layout) -> list[Strategy]:
        """Every way on tp, the whole first."""
        key = node.name, self.kind(layout)
        if key not in self._strategies:
            results = [Strategy((R,) * len(node.uses), (R,) * len(node.outs))]
            if layout.tp > 1:
                seen = {(results[0].ins, results[0].outs)}
                for result in self.labelled(node, layout.tp, lambda a: self.rest(layout, a)):
                    if (result.ins, result.outs) not in seen and not (layout.cp > 1 and self._strided(node, result)):
                        seen.add((result.ins, result.outs))
                        results.append(result)
            if node.op in ("linear_cross_entropy", "cross_entropy") and layout.cp > 1 and len(results) > 1:
                # DTensor takes whole tokens in parts here because that is free, and then has no gradient for parts of
                # parts.
                results = [x for x in results if is_divided_by_class(node, x)] or results
            if any(x.ins[1:2] and x.ins[1] in self.expert_atoms for x in results if node.op in BY_EXPERT):
                results = [x for x in results if not self.inside(node, x)]
            self._strategies[key] = results
        return self._strategies[key]

    def inside(self, node: Node, strategy: Strategy) -> bool:
        """Whether experts are divided inside, which is modelled alone."""
        return node.op in BY_EXPERT and isinstance(strategy.ins[1], int) and strategy.ins[1] not in self.expert_atoms

    def _strided(self, node: Node, result: Strategy) -> bool:
        """Divided by sequence inside tokens [batch * sequence]: DTensor has no gradient for that where cp divides it
        too.
        """
        s = self.problem.sequence
        pairs = [*zip(result.ins, (u.dims for u in node.uses)), *zip(result.outs, (v.dims for v in node.outs))]
        return any(x == s and any(s in atoms[1:] for atoms in dims) for x, dims in pairs)

    def labelled(self, node: Node, ranks: int, size: Any) -> Iterator[Strategy]:
        """The node's rows in atoms, for ``ranks`` ranks; ``size(atom)`` is what is left of it."""
        for outs, ins in node.rows or ():
            ins = [*ins, *[R] * (len(node.uses) - len(ins))]
            placed = [(u.dims, p) for u, p in zip(node.uses, ins) if not isinstance(p, str)] + [
                (v.dims, p) for v, p in zip(node.outs, outs) if not isinstance(p, str)
            ]
            for atom in self._candidates(node, placed, by_expert(node.op, outs, ins)):
                label = {}
                for i, (dims, p) in enumerate(placed):
                    mine = dims[int(p)] if int(p) < len(dims) else ()
                    chosen = atom if atom in mine or atom in self.expert_atoms else mine[0] if mine else None
                    of = p.of if isinstance(p, Even) else 1
                    if chosen is None or not shares(size(chosen), ranks):
                        break
                    if of > 1 and size(chosen) % (ranks * of if len(mine) == 1 else ranks):
                        break
                    label[i] = chosen
                else:
                    it = iter(range(len(placed)))
                    ins_ = [label[next(it)] if not isinstance(p, str) else R for p in ins]
                    outs_ = [
                        label[next(it)] if not isinstance(p, str) else P if p == "partial" else R
                        for p in [*outs, *["replicated"] * len(node.outs)][: len(node.outs)]
                    ]
                    yield Strategy(
                        tuple(
                            SUMMED if x == R and u.value.floating and not u.value.free else x
                            for x, u in zip(ins_, node.uses)
                        ),
                        tuple(outs_),
                    )

    def _candidates(self, node: Node, placed: list, expert_rows: bool) -> list[int]:
        if expert_rows:
            rows = (node.outs[0] if node.op == "moe_permute" else node.uses[0]).dims[0]
            return [e for a in rows if (e := self.problem.experts.get(a)) is not None]
        dims, p = placed[0] if placed else ([], 0)
        atoms = dims[int(p)] if int(p) < len(dims) else ()
        data = [a for a in atoms if a in (self.problem.batch, self.problem.sequence)]
        expert = [e for a in atoms if (e := self.problem.experts.get(a)) is not None and node.op not in EXPERTS]
        return data + list(atoms[:1] if not data else ()) + expert

    def _passes(self, node: Node, atom: int, ranks: int) -> bool:
        """Whether the node can be computed with ``atom`` divided wherever it occurs."""

        def has(dims: list) -> bool:
            return any(atom in d for d in dims)

        touched = [has(u.dims) for u in node.uses if not u.value.free], [has(v.dims) for v in node.outs]
        if not any(touched[0]) and not any(touched[1]):
            return True
        for result in self.labelled(node, ranks, lambda a: self.axes.size[a]):
            if all(
                (x == atom) == has(u.dims)
                for x, u in zip(result.ins, node.uses)
                if not u.value.free and u.value.parameter is None
            ) and all(x == atom or x == P or not has(v.dims) for x, v in zip(result.outs, node.outs)):
                return True
        return False


def is_divided_by_class(node: Node, strategy: Strategy) -> bool:
    """Whether a cross-entropy is computed with its classes divided."""
    if node.op == "linear_cross_entropy":
        return isinstance(strategy.ins[1], int)
    return node.op == "cross_entropy" and strategy.ins[0] in node.uses[0].dims[1]
