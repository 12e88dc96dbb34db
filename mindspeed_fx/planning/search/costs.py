"""Seconds and bytes of every choice, for one layout on one device, by the cost model (``mindspeed_fx.cost``).

Assumptions, beside those of the cost model: the backward of an edge is the edge backwards (as plans execute it); a
product costs twice its forward in the backward, other operators read what they read and wrote and write what they read;
gathers of parameters hide behind the forward of the same kind of layer and reductions of gradients behind its backward,
every other collective is waited for; experts get equal numbers of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Iterator

from mindspeed_fx.cost.collectives import collective
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.operators import Cost, Spec
from mindspeed_fx.kernels.base import REGISTRY
from mindspeed_fx.planning.search import stacked_experts
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.node_price import NOTHING, NodePrice
from mindspeed_fx.planning.search.problem import Node, Problem, Use, localize
from mindspeed_fx.planning.search.stage_loads import layer_order, parts_of
from mindspeed_fx.planning.search.strategies import is_told_by_name
from mindspeed_fx.planning.search.strategy_space import (
    SUMMED,
    Label,
    P,
    R,
    Strategy,
    StrategySpace,
    is_divided_by_class,
)

OPTIMIZERS = {"adam": 8, "sgd": 0, "momentum": 4}
"""Bytes of optimizer state for each parameter; 16-bit parameters have a float32 copy on top."""


BY_SHAPE = frozenset(
    "attention scaled_dot_product_attention rope qk_norm_rope moe_permute moe_unpermute grouped_matmul cumsum".split()
)
"""Operators whose price is not a matter of the number of tokens alone."""

AROUND = {
    R: ("all_gather",),
    SUMMED: ("all_gather", "reduce_scatter"),
    P: ("reduce_scatter", "all_gather"),
}
"""Collectives on cp of what is no part of the sequence, forward and backward; one of a result that is whole is of its
gradient. An all-to-all, where other dimensions are divided, has what a rank holds, the others the whole."""


def is_trained_product(node: Node) -> bool:
    """Whether the backward multiplies for the gradient of a matrix of weights, which takes what the forward took."""
    return node.op != "embedding" and any(
        (parameter := u.value.parameter) is not None and parameter.trained and len(parameter.shape) > 1
        for u in node.uses
    )


class Prices:
    """Prices for one problem on one device; what does not depend on the layout is computed once."""

    def __init__(self, problem: Problem, hw: Hardware, optimizer: str = "adam", strategies: tuple[str, ...] = ()):
        self.sequence_strategies = strategies
        self.problem, self.hw, self.state_bytes = problem, hw, OPTIMIZERS[optimizer]
        self.space = StrategySpace(problem)
        self._compute: dict[tuple, tuple[float, float]] = {}
        self._prices: dict[tuple, NodePrice] = {}
        self._stored: dict[tuple, NodePrice] = {}
        self._sizes: dict[tuple, tuple[float, float]] = {}
        self.moves: list | None = None
        self.flows: dict[int, Any] = {}
        """Of the programs of this problem (``solve.py``): values on their way; id of ``space.choices`` -> rows and
        columns.
        """
        self.parts, self.order = parts_of(problem), layer_order(problem)
        self.stores = {
            n.name: [i for i, u in enumerate(n.uses) if u.value.parameter is not None] for n in problem.nodes
        }
        self.line = functools.cache(self._line)

    # ---------------------------------------------------------------- collectives

    def _line(self, kind: str, ranks: int, near: int) -> tuple[float, float]:
        """Seconds of a collective as (fixed, per byte)."""
        if ranks == 1:
            return 0.0, 0.0
        result = collective(kind, 2**30, ranks, self.hw, near)
        return float(result.launch + result.alpha), float(result.beta) / 2**30

    def seconds(self, kind: str, nbytes: float, layout: Layout, dim: str) -> float:
        fixed, each = self.line(kind, *layout.ranks_per_node(dim, self.hw.node))
        return fixed + each * nbytes

    # ---------------------------------------------------------------- operators

    def price(self, node: Node, strategy: Strategy, layout: Layout) -> NodePrice:
        """What ``node`` costs by ``strategy``, once per microbatch (the optimizer and reductions: once per step)."""
        base, (kept, transient) = self.activations(node, strategy, layout), self.sizes(node, strategy, layout)
        stored = self.stored(node, strategy, layout) if self.stores[node.name] else NOTHING
        return NodePrice(
            base.forward,
            base.backward,
            base.moved,
            stored.gather,
            stored.reduce,
            stored.update,
            stored.state,
            stored.gathered,
            kept,
            transient,
            base.how,
            base.weights,
            base.around,
        )

    def stored(self, node: Node, strategy: Strategy, layout: Layout) -> NodePrice:
        """The part of :meth:`price` that has to do with parameters alone: a matter of the ranks that hold copies,
        however they are factored.
        """
        node_size = self.hw.node
        key = (
            strategy,
            layout.tp,
            layout.ep,
            layout.ranks_per_node("data", node_size),
            layout.ranks_per_node("expert", node_size),
            layout.zero,
        )
        if (result := self._stored.get(key)) is None:
            result = self._stored[key] = NodePrice()
            for i in self.stores[node.name]:
                self._parameter(node, i, strategy.ins[i], layout, result)
        return result

    def activations(self, node: Node, strategy: Strategy, layout: Layout) -> NodePrice:
        """The seconds of :meth:`price` that have nothing to do with parameters; often a matter of tokens and tp
        alone.
        """
        key = self._key(node, strategy, layout)
        if (result := self._prices.get(key)) is None:
            result = self._prices[key] = self._activations(node, strategy, layout)
        return result

    def sizes(self, node: Node, strategy: Strategy, layout: Layout) -> tuple[float, float]:
        """The bytes of :meth:`price` that are kept, and those at hand in the backward."""
        key = self._key(node, strategy, layout)
        if (result := self._sizes.get(key)) is None:
            result = self._sizes[key] = self._sized(node, strategy, layout)
        return result

    def _key(self, node: Node, strategy: Strategy, layout: Layout) -> tuple:
        rows = layout.dp * layout.microbatches * layout.ep * layout.cp
        alone = node.op not in BY_SHAPE and (
            layout.cp == 1 or self.problem.sequence is None or self.space.passes(node, self.problem.sequence, layout.cp)
        )
        return (strategy, layout.tp, rows) if alone else (strategy, layout.tp, layout.ep, layout.cp, rows)

    def _activations(self, node: Node, strategy: Strategy, layout: Layout) -> NodePrice:
        result = NodePrice()
        best = None
        for how, other, without, moved, tag in self._around(node, strategy, layout):
            forward, backward = self._time(node, strategy, layout, other, without, tag)
            if best is None or forward + backward + moved < best[0]:
                best = (forward + backward + moved, forward, backward, moved, how, other)
        _, result.forward, result.backward, result.moved, result.how, other = best
        result.around = (other.ins, other.outs) if other else ((), ())
        result.weights = min(result.forward, result.backward) if is_trained_product(node) else 0.0
        result.moved += self._inside(node, strategy, layout)
        return result

    def _sized(self, node: Node, strategy: Strategy, layout: Layout) -> tuple[float, float]:
        labels = {x: layout.tp for x in (*strategy.ins, *strategy.outs) if isinstance(x, int)}
        kept = 0.0
        shapes = [self.space.nbytes(v, layout, x) for v, x in zip(node.outs, strategy.outs)]
        transient = 2 * (
            sum(shapes)
            + sum(
                self.space.nbytes(u.value, layout, x)
                for u, x in zip(node.uses, strategy.ins)
                if u.value.producer is not None
            )
        )
        if node.op == "attention" and len(shapes) > 1:
            kept = shapes[1]
        if node.op == "linear_cross_entropy":
            tokens, width = self.space.local(node.uses[0].dims, node.uses[0].shape, layout, labels)
            kept = tokens * width * node.uses[0].value.itemsize  # logits are made in chunks, divided or not
        return kept, transient

    def _time(
        self, node: Node, strategy: Strategy, layout: Layout, other: Strategy | None, without: str, tag: str
    ) -> tuple[float, float]:
        b, s = layout.dp * layout.ep * layout.microbatches, layout.cp
        rows = (b, s) if node.op in BY_SHAPE else (b * s,)
        key = (
            node.name,
            strategy.ins,
            strategy.outs,
            layout.tp,
            rows,
            layout.ep if node.op == "grouped_matmul" else 1,
            tag,
            layout.cp if tag else 1,
        )
        if key not in self._compute:
            self._compute[key] = self._timed(node, strategy, layout, other, without, tag)
        return self._compute[key]

    def _timed(
        self, node: Node, strategy: Strategy, layout: Layout, other: Strategy | None, without: str, tag: str
    ) -> tuple[float, float]:
        if node.call.kind == "free":
            return 0.0, 0.0
        outs = [Use(v, v.dims, v.shape) for v in node.outs]
        labels: dict[int, dict] = {}
        for chosen, ranks in ((strategy, layout.tp), (other, layout.cp)):
            for use, x in zip((*node.uses, *outs), (*chosen.ins, *chosen.outs) if chosen else ()):
                if isinstance(x, int):
                    mine = labels.setdefault(id(use), {})
                    mine[x] = mine.get(x, 1) * ranks

        def size(use: Any, spec: Spec) -> Spec:
            if not isinstance(use, Use):
                return spec
            return dataclasses.replace(
                spec, shape=self.space.local(use.dims, use.shape, layout, labels.get(id(use), {}), without), expanded=()
            )

        args = localize(node.args, node.call.args, size)
        out = localize(outs[0] if isinstance(node.call.out, Spec) else outs, node.call.out, size)
        if node.op == "attention" and len(args) > 4 and args[4] and self._by_query(node, strategy, other):
            args = (*args[:4], False, *args[5:])  # a mask of the rank's rows: nothing is skipped
        call = dataclasses.replace(node.call, args=args, out=out)
        cost = call.cost()
        forward = float(cost.seconds(self.hw))
        return forward, self._backward(node, call, cost, forward)

    def _by_query(self, node: Node, strategy: Strategy, other: Strategy | None) -> bool:
        queries = node.uses[0].dims[2]
        return strategy.ins[0] in queries or (other is not None and other.ins[0] in queries)

    def _backward(self, node: Node, call: Any, cost: Cost, forward: float) -> float:
        if not any(v.floating for v in node.outs):
            return 0.0
        if node.op == "attention":
            known = next((o for o in REGISTRY.values() if o.name == "mindspeed.attention_backward"), None)
            if known is not None and known.cost is not None:
                q, k, v = call.args[:3]
                grads = known.cost((q, k, v), call.out[0], q, k, v, *call.out[:2], *call.args[3:8][:5])
                return float(grads.seconds(self.hw))
        if cost.matrix:
            trained = sum(
                1
                for u in node.uses
                if u.value.floating
                and (u.value.producer is not None or (u.value.parameter is not None and u.value.parameter.trained))
                and len(u.shape) > 1
            )
            return max(1, min(2, trained)) * forward
        write = (
            sum(s.bytes for s in call.reads[: len(node.uses)])
            if node.op != "embedding"
            else call.reads[0].bytes + cost.write
        )
        return float(
            Cost(vector=2 * cost.vector, read=cost.read + cost.write, write=write, wide=cost.wide).seconds(self.hw)
        )

    def _inside(self, node: Node, strategy: Strategy, layout: Layout) -> float:
        """Collectives that the operator itself makes: three numbers for each token where classes are divided."""
        if is_divided_by_class(node, strategy):
            tokens = self.space.local(node.uses[0].dims, node.uses[0].shape, layout, {})[0]
            return self.seconds("all_reduce", 4 * tokens, layout, "tp") + self.seconds(
                "all_reduce", 8 * tokens, layout, "tp"
            )
        return 0.0

    # ---------------------------------------------------------------- dimensions without a choice of their own

    def _around(
        self, node: Node, strategy: Strategy, layout: Layout
    ) -> Iterator[tuple[str, Strategy | None, str, float, str]]:
        """Ways on cp: name, what is divided instead of the sequence, "cp" if something is, seconds of the exchange
        there and back, and a word for all that."""
        moved = self._exchange(node, strategy, layout)
        if layout.cp == 1 or self.problem.sequence is None or self.space.passes(node, self.problem.sequence, layout.cp):
            yield "", None, "", moved, ""
            return
        taken = {x: layout.tp for x in (*strategy.ins, *strategy.outs) if isinstance(x, int)}
        parts = lambda a: -(-self.space.rest(layout, a, "cp") // taken.get(a, 1))
        for other in self.space.labelled(node, layout.cp, parts) if is_told_by_name(node) else ():
            factor = {x for x in (*other.ins, *other.outs) if isinstance(x, int)}
            if self.problem.batch in factor:
                continue
            how = "ulysses" if isinstance(other.ins[0], int) else "inside heads"
            how = "kv_allgather" if self.problem.sequence in factor else how
            if self.sequence_strategies and how not in self.sequence_strategies:
                continue
            yield (
                how,
                other,
                "cp",
                moved + self._there_and_back(node, strategy, other, layout),
                f"cp{sorted(factor)}",
            )
        whole = Strategy((R,) * len(node.uses), (R,) * len(node.outs))
        yield "whole", whole, "cp", moved + self._there_and_back(node, strategy, whole, layout), "cp whole"

    def _there_and_back(self, node: Node, strategy: Strategy, other: Strategy, layout: Layout) -> float:
        s = self.problem.sequence
        uses = [
            (u.value, x, mine)
            for u, x, mine in zip(node.uses, other.ins, strategy.ins)
            if u.value.producer is not None and any(s in d for d in u.dims)
        ]
        total = 0.0
        for value, x, mine in (*uses, *zip(node.outs[:1], other.outs, strategy.outs)):
            n = self.space.nbytes(value, layout, mine, without="cp") / (layout.cp if isinstance(x, int) else 1)
            kinds = () if x == s else AROUND.get(x, ("all_to_all", "all_to_all"))
            total += sum(self.seconds(k, n, layout, "cp") for k in kinds[: 2 if value.floating else 1])
        return total

    def _exchange(self, node: Node, strategy: Strategy, layout: Layout) -> float:
        """The exchange of tokens before and after the experts on ep, forward and backward."""
        if layout.ep == 1 or node.op not in ("moe_permute", "moe_unpermute"):
            return 0.0
        value, label = (
            (node.outs[0], strategy.outs[0]) if node.op == "moe_permute" else (node.uses[0].value, strategy.ins[0])
        )
        return 2 * self.seconds("all_to_all", self.space.nbytes(value, layout, label), layout, "ep")

    # ---------------------------------------------------------------- parameters

    def _parameter(self, node: Node, i: int, label: Label, layout: Layout, result: NodePrice) -> None:
        parameter = node.uses[i].value.parameter
        expert = any(a in self.space.expert_atoms for d in node.uses[i].value.dims for a in d)
        n = parameter.bytes / (layout.tp if isinstance(label, int) else 1) / (layout.ep if expert else 1)
        dim = "expert" if expert else "data"
        ranks = layout.ranks_per_node(dim, self.hw.node)[0]
        zero = layout.zero if ranks > 1 else "never"
        share = n / (ranks if zero != "never" else 1)
        if parameter.stacked:
            share = stacked_experts.bytes_at_rest(parameter, layout, isinstance(label, int))
            dims = ("ep", "tp") if isinstance(label, int) else ("ep",)
            exchange = sum(self.seconds("all_to_all", n, layout, d) for d in dims)
            result.gather += exchange
            result.reduce += exchange if parameter.trained else 0.0
            result.state += n  # whole experts, kept for the backward
        if parameter.users[0][0] is node or len(parameter.users) == 1:
            count = share / parameter.itemsize
            states = (
                count * (self.state_bytes + (4 if parameter.itemsize == 2 and self.state_bytes else 0))
                if parameter.trained
                else 0
            )
            result.state += share + states + (share if parameter.trained else 0) + (n if zero == "zero2" else 0)
            if parameter.trained:
                result.update += (2 * states + 3 * share) / self.hw.memory_rate
        if zero != "never":
            gather = self.seconds("all_gather", n, layout, dim)
            result.gather += gather
            result.reduce += gather if zero == "zero3" else 0.0
            result.gathered += n if zero == "zero3" else 0.0
        if not parameter.trained:
            return
        if zero != "never":
            result.reduce += self.seconds("reduce_scatter", n, layout, dim)
        else:
            result.reduce += self.seconds("all_reduce", n, layout, dim)
        if label == SUMMED:
            result.reduce += self.seconds("all_reduce", share, layout, "tp")
