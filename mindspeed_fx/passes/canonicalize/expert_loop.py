"""A loop over a list of experts -> tokens sorted by expert, one product of stacked weights for all, and the way back.

For each expert a loop takes the rows that chose it, runs a module and adds what comes to a result
(:mod:`mindspeed_fx.passes.fusion.analysis.expert_loop`). Where all experts do the same with weights of their own, their
rows are ``moe_permute(tokens, choices)``, a linear layer is ``grouped_matmul`` of the stacked weights (a bias: of a
column of ones), what works row by row runs on the rows of all, and the sum is ``moe_unpermute``. The sizes of all of
these are known, so that plans can divide them; the weights stay parameters of their own.

Safe because each row meets the same weights: a choice is never negative and comes from ``topk`` or the like, choices
that are joined ("any of a token's choices") are different numbers, and every expert of the loop is met once. Sums are
made in the order of a token's choices. A loop that is read is only in graphs of parallelized models
(:mod:`mindspeed_fx.sharding.expert_lists`); one that cannot be read raises, and is run as it is written.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.capture.chosen_rows import BOUNDED, ChosenRowsError
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels.base import TAGGED
from mindspeed_fx.passes.base import Context, Miss, PassReport, register, site
from mindspeed_fx.passes.fusion.analysis import expert_loop as read
from mindspeed_fx.passes.fusion.gathered_experts import insert_ends, is_never_negative
from mindspeed_fx.passes.fusion.moe_permute import match_repeat

NAME, OPERATOR = "canonicalize.expert_loop", "experts at once"
ops = torch.ops.mindspeed

ROWWISE = frozenset((
    aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.mul.Tensor,
    aten.mul.Scalar, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar, aten.clamp.default,
    aten.to.dtype, match.operator.getitem, aten.clone.default, aten.contiguous.default,
))  # fmt: skip
"""Operators each of whose rows of results is made of the same row of the arguments."""

ALONG_LAST = (aten.chunk.default, aten.split.Tensor, aten.slice.Tensor, aten.narrow.default)
"""The same along the last dimension."""


@register(NAME)
def expert_loop(gm: fx.GraphModule, context: Context) -> PassReport:
    """Loops over a list of experts become products of all of them."""
    report = PassReport(NAME)
    if not any(n.target is BOUNDED for n in gm.graph.nodes):
        return report
    try:
        report.rewrites += [_rewrite(gm, chain) for chain in read.chains(gm)]
    except Miss as miss:
        raise ChosenRowsError(str(miss)) from None
    rewrite.finish(gm)
    if left := next((n for n in gm.graph.nodes if n.target is BOUNDED), None):
        user = next(iter(left.users), left)
        raise ChosenRowsError(f"rows that a mask chooses are read by something else than experts ({user.name})")
    return report


def _rewrite(gm: fx.GraphModule, chain: list[read.Added]) -> Any:
    loop = _Loop(gm, chain)
    new = loop.emit()
    if reason := rewrite.substitute(gm, chain[-1].node, new):
        raise Miss(reason)
    return site(OPERATOR, chain[-1].node, [a.node for a in chain])


class _Loop:
    """One chain on its way to products of all experts; new nodes stand before the last of the chain."""

    def __init__(self, gm: fx.GraphModule, chain: list[read.Added]):
        self.gm, self.at = gm, chain[-1].node
        self.chain = sorted(chain, key=lambda a: a.mask.expert or 0)
        self.base = chain[0].base
        self.choices = chain[0].mask.choices
        self.experts = len(chain)
        self.lifted: dict[tuple[fx.Node, ...], fx.Node] = {}
        self.source: fx.Node | None = None
        self.k = 0
        self._check()

    def _check(self) -> None:
        first = self.chain[0]
        if [a.mask.expert for a in self.chain] != list(range(self.experts)) or self.experts < 2:
            raise Miss("the loop does not meet experts 0, 1, 2, ... once each")
        for a in self.chain:
            alike = a.mask.choices is self.choices and a.mask.dims == first.mask.dims and a.adds == first.adds
            if not alike or any(c.mask != a.mask for c in a.coordinates):
                raise Miss("the experts of the loop are not chosen alike")
        if not is_never_negative(self.choices):
            raise Miss(f"the choices ({self.choices.name}) come from no topk, sort or argmax, and may be negative")
        once = first.mask.joins or (first.adds and match.is_call(first.node, aten.index_put.default))
        if once and not _are_distinct(self.choices):
            raise Miss(f"a token's choices ({self.choices.name}) may name an expert twice")
        if not first.adds and _numbers(self.choices) != self.experts:
            raise Miss("rows are written, and may be left unwritten where a choice is no expert of the loop")
        region = [a.node for a in self.chain]
        if reason := match.unsafe(region, [self.choices]):
            raise Miss(reason)

    def _check_gradients(self, nodes: Sequence[Any]) -> None:
        with_gradients = {n.meta.get("grad_enabled", True) for n in (*nodes, self.at) if isinstance(n, fx.Node)}
        if len(with_gradients) > 1:
            raise Miss("part of the loop runs with gradients off (torch.no_grad) and part with them on")

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return rewrite.insert(self.gm, self.at, target, args, kwargs)

    # ---------------------------------------------------------------- the way back

    def emit(self) -> fx.Node:
        """What the last node of the chain computes."""
        per_token = read.tokens_of(self.base, self.chain[0].coordinates)
        if per_token is None:
            raise Miss("results are not added to the tokens that they come from")
        if per_token > 1 and not self.chain[0].adds:
            raise Miss("rows of one token are written by several experts, and not added")
        rows, weights = self._weighted()
        value = self.lift(rows)
        count = match.value(self.base).shape[0] if len(self.chain[0].coordinates) == 1 else None
        pairs = match.value(self.choices).numel()
        tokens = pairs // per_token if count is None else count
        if weights is not None:
            weights = self.call(aten.reshape.default, weights, [tokens, per_token])
            dtype = torch.promote_types(match.value(value).dtype, match.value(weights).dtype)
            if torch.promote_types(dtype, match.value(self.at).dtype) != dtype:
                value = self.call(aten.to.dtype, value, match.value(self.at).dtype)
        out = self.call(ops.moe_unpermute.default, value, self.order, weights, per_token)
        if tuple(match.value(out).shape) != tuple(match.value(self.at).shape):
            out = self.call(aten.reshape.default, out, list(match.value(self.at).shape))
        if self.chain[0].adds and not match.is_zeros(self.base):
            out = self.call(aten.add.Tensor, self.base, out)
        return out

    def _weighted(self) -> tuple[list[fx.Node], fx.Node | None]:
        """Each expert's rows without the weights of the pairs that they are multiplied by, and the weights of all."""
        values = [match.uncast(a.rows) for a in self.chain]
        for place in (0, 1):
            factors = [match.operands(v, aten.mul.Tensor) for v in values]
            if not all(factors):
                break
            rows, shares = zip(*(f[place] for f in factors))
            if (weights := self._weights(shares)) is not None:
                return [match.uncast(r) for r in rows], weights
        return values, None

    def _weights(self, shares: Sequence[Any]) -> fx.Node | None:
        """The weight of each pair, as the choices lie, where each expert takes those of its own pairs."""
        taken = [self._uncolumn(s) for s in shares]
        self._check_gradients(taken)
        reads = [read.taken(t) if isinstance(t, fx.Node) else None for t in taken]
        if None in reads or any(c.mask != a.mask for r, a in zip(reads, self.chain) for c in r[1]):
            return None
        sources, shape = [r[0] for r in reads], match.value(self.choices).shape
        x = sources[0]
        if all(s is x or _alike(s, x) for s in sources):
            size = [s for i, s in enumerate(match.value(x).shape) if i < len(shape) or s != 1]
            dims = [c.dim for c in reads[0][1]]
            whole = dims == list(range(len(shape))) and all(c.divisor == 1 for c in reads[0][1])
            return x if whole and tuple(size) == tuple(shape) else None
        if (summed := self._summed(sources)) is not None:
            return summed
        columns = [s.args for s in sources if match.is_call(s, aten.select.int)]
        if len(columns) < self.experts or [c[2] for c in columns] != list(range(self.experts)):
            return None
        table, rank = columns[0][0], match.value(columns[0][0]).dim()
        last = all(c[0] is table and c[1] % rank == rank - 1 for c in columns)
        tokens = read.tokens_of(x, reads[0][1])
        if not last or tokens is None or tuple(match.value(table).shape[:-1]) != tuple(shape[: rank - 1]):
            return None
        return self.call(aten.gather.default, table, rank - 1, self.choices) if len(shape) == rank else None

    @staticmethod
    def _uncolumn(n: Any) -> Any:
        while match.is_call(n, aten.unsqueeze.default, aten.to.dtype, *match.RESHAPES):
            n = n.args[0]
        return n

    def _summed(self, sources: list[fx.Node]) -> fx.Node | None:
        """W when each source is the sum of W where the choice is the expert: one pair's weight each."""
        tables: list[Any] = []
        if not _are_distinct(self.choices):
            return None
        for source, added in zip(sources, self.chain):
            if not match.is_call(source, aten.sum.dim_IntList) or not match.is_call(source.args[0], aten.mul.Tensor):
                return None
            whole = [w for w, m in match.operands(source.args[0], aten.mul.Tensor) if self._is_of(m, added)]
            rank = match.value(source.args[0]).dim()
            if not whole or [d % rank for d in source.args[1]] != [rank - 1]:
                return None
            tables.append(whole[0])
        same = all(t is tables[0] for t in tables)
        return tables[0] if same and match.value(tables[0]).shape == match.value(self.choices).shape else None

    def _is_of(self, m: Any, added: read.Added) -> bool:
        mask = read.read_mask(m)
        return mask is not None and not mask.joins and mask.choices is self.choices and mask.expert == added.mask.expert

    # ---------------------------------------------------------------- what experts compute

    def lift(self, nodes: list[Any]) -> fx.Node:
        """What each expert computes of its rows, of all rows sorted by expert.

        Raises:
            Miss: the experts compute different things, or something that joins rows.
        """
        key = tuple(nodes)
        if key not in self.lifted:
            self.lifted[key] = self._lift(nodes)
        return self.lifted[key]

    def _lift(self, nodes: list[Any]) -> fx.Node:
        first = nodes[0]
        if any(not isinstance(n, fx.Node) or n.target != first.target for n in nodes):
            raise Miss(f"the experts do not compute alike ({getattr(first, 'name', first)})")
        if any(n.meta.get("mutated") for n in nodes):
            raise Miss(f"{first.name} is changed in place")
        self._check_gradients(nodes)
        gathered = [read.taken(n) for n in nodes]
        if gathered[0] is not None:
            return self._tokens(nodes, gathered)
        if match.is_call(first, aten.linear.default):
            return self._linear([n.args[:2] for n in nodes], [match.argument(n, "bias") for n in nodes])
        if match.is_call(first, aten.matmul.default, aten.mm.default) and not self._is_rows(first.args[1]):
            return self._product(self.lift([n.args[0] for n in nodes]), [n.args[1] for n in nodes], False)
        if match.is_call(first, aten.dropout.default) and all(not (n.args[1] and n.args[2]) for n in nodes):
            return self.lift([n.args[0] for n in nodes])
        if match.is_call(first, *match.RESHAPES) and match.value(first).shape == match.value(first.args[0]).shape:
            return self.lift([n.args[0] for n in nodes])
        along = first.target in ALONG_LAST and match.argument(first, "dim", 0) % match.value(first.args[0]).dim() > 0
        if not along and first.target not in ROWWISE and first.target not in TAGGED["activation"]:
            raise Miss(f"an expert's {first.target} does not work row by row")
        return self._rowwise(nodes)

    def _is_rows(self, n: Any) -> bool:
        """Whether ``n`` has a row for each pair that its expert was chosen in."""
        todo, seen = [n], set()
        while todo:
            n = todo.pop()
            if n in seen or not isinstance(n, fx.Node):
                continue
            seen.add(n)
            if n.target is BOUNDED:
                return True
            todo += n.all_input_nodes if n not in [a.node for a in self.chain] else []
        return False

    def _rowwise(self, nodes: list[fx.Node]) -> fx.Node:
        first = nodes[0]
        arguments = []
        for values in zip(*(n.args for n in nodes), strict=True):
            if isinstance(values[0], fx.Node) and self._is_rows(values[0]):
                arguments.append(self.lift(list(values)))
            elif all(v is values[0] or (not isinstance(v, fx.Node) and v == values[0]) for v in values):
                if isinstance(values[0], fx.Node) and match.value(values[0]).dim() > 0:
                    raise Miss(f"rows of experts meet {values[0].name}, which has none")
                arguments.append(values[0])
            else:
                raise Miss(f"the experts' {first.target} have different settings")
        if any(n.kwargs != first.kwargs for n in nodes):
            raise Miss(f"the experts' {first.target} have different settings")
        return self.call(first.target, *arguments, **first.kwargs)

    def _tokens(self, nodes: list[fx.Node], gathered: list[Any]) -> fx.Node:
        source, coordinates = gathered[0]
        for taken, added in zip(gathered, self.chain):
            alike = taken is not None and taken[0] is source and all(c.mask == added.mask for c in taken[1])
            if not alike or [c.dim for c in taken[1]] != [c.dim for c in coordinates]:
                raise Miss("the experts do not take rows of one value")
        k = read.tokens_of(source, coordinates)
        again = self.source is not None and self.source is not source
        if k is None or again or match.value(nodes[0]).dim() != 2:
            raise Miss(f"rows of {source.name} are not taken as those of tokens")
        if self.source is None:
            self.source = source
            self._sort(source, len(coordinates))
        return self.rows

    def _sort(self, source: fx.Node, dims: int) -> None:
        copies = match_repeat(source) if dims == 1 else None
        tokens = copies[0] if copies else source
        if match.value(tokens).dim() != 2:
            tokens = self.call(aten.reshape.default, tokens, [-1, match.value(tokens).shape[-1]])
        flat = self.choices
        if match.value(flat).dim() != 1:
            flat = self.call(aten.reshape.default, flat, [-1])
        both = self.call(ops.moe_permute.default, tokens, flat)
        self.rows, self.order = (self.call(match.operator.getitem, both, i) for i in (0, 1))
        self.ends = insert_ends(self.gm, self.at, flat, self.experts)

    def _linear(self, pairs: list[tuple], biases: list[Any]) -> fx.Node:
        out = self._product(self.lift([x for x, _ in pairs]), [w for _, w in pairs], True)
        if biases[0] is None:
            return out
        stacked = self._stack(biases)
        column = self.call(aten.slice.Tensor, out, 1, 0, 1)
        ones = self.call(aten.full_like.default, column, 1)
        if match.value(ones).dtype != match.value(stacked).dtype:
            ones = self.call(aten.to.dtype, ones, match.value(stacked).dtype)
        shares = self.call(ops.grouped_matmul.default, ones, self.call(aten.unsqueeze.default, stacked, 1), self.ends)
        return self.call(aten.add.Tensor, out, shares)

    def _product(self, x: fx.Node, weights: list[fx.Node], transposed: bool) -> fx.Node:
        if transposed is False and all(match.is_call(w, aten.t.default) for w in weights):
            weights, transposed = [w.args[0] for w in weights], True
        stacked = self._stack(weights)
        if match.value(x).dtype != match.value(stacked).dtype:
            raise Miss(f"rows are {match.value(x).dtype}, weights {match.value(stacked).dtype}")
        if transposed:
            stacked = self.call(aten.transpose.int, stacked, 1, 2)
        return self.call(ops.grouped_matmul.default, x, stacked, self.ends)

    def _stack(self, weights: list[Any]) -> fx.Node:
        """[experts, ...] of a weight of each."""
        if any(not isinstance(w, fx.Node) or self._is_rows(w) for w in weights):
            raise Miss("an expert's weights depend on its rows")
        if len({match.value(w).shape for w in weights}) > 1 or len({match.value(w).dtype for w in weights}) > 1:
            raise Miss("the experts' weights have different shapes")
        parts = [w.args for w in weights if match.is_call(w, aten.select.int)]
        if [p[1:] for p in parts] == [(0, e) for e in range(self.experts)] and len({p[0] for p in parts}) == 1:
            if match.value(parts[0][0]).shape[0] == self.experts:
                return parts[0][0]
        return self.call(aten.stack.default, list(weights))


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes are the same view of one value."""
    return a.target == b.target and match.is_call(a, aten.unsqueeze.default) and a.args == b.args


def _topk_of(n: fx.Node) -> fx.Node | None:
    """The call whose second result ``n`` is, whatever its shape and type."""
    while match.is_call(n, *match.RESHAPES, aten.to.dtype, aten.clone.default, aten.contiguous.default):
        n = n.args[0]
    chosen = match.is_call(n, match.operator.getitem) and n.args[1] == 1 and match.is_call(n.args[0], aten.topk.default)
    return n.args[0] if chosen else None


def _are_distinct(choices: fx.Node) -> bool:
    """Whether the last dimension names no number twice: that of ``topk``."""
    top = _topk_of(choices)
    last = top is not None and match.argument(top, "dim", -1) % match.value(top.args[0]).dim()
    return (
        top is not None
        and last == match.value(top.args[0]).dim() - 1
        and (
            match.value(choices).shape[-1] == match.value(top.args[0]).shape[-1]
            or match.value(choices).shape[-1] == match.argument(top, "k")
        )
    )


def _numbers(choices: fx.Node) -> int | None:
    """How many different numbers there may be."""
    top = _topk_of(choices)
    return None if top is None else match.value(top.args[0]).shape[match.argument(top, "dim", -1)]
