"""What a layout's mode of recompute keeps of values for the backward, and what it computes again."""

from __future__ import annotations

from mindspeed_fx.planning.search.costs import Prices
from mindspeed_fx.planning.search.layouts import NORMS_AND_ACTIVATIONS, Layout
from mindspeed_fx.planning.search.lp_structure import Move
from mindspeed_fx.planning.search.problem import SAVES, Edge, Node, is_cheap
from mindspeed_fx.planning.search.strategy_space import Label, P


class Recomputation:
    """Kept bytes and repeated work of one layout."""

    def __init__(self, prices: Prices, layout: Layout):
        self.prices, self.layout, self.problem = prices, layout, prices.problem
        self._again: dict[Node, bool] = {}
        self._wanted: dict[Move, bool] = {}

    def keeps(self, move: Move, p: Label, t: Label, forth: float, nbytes: float) -> tuple[float, float]:
        """Bytes kept of a move for the backward, and seconds that the backward spends to have it again."""
        if (wanted := self._wanted.get(move)) is None:
            wanted = self._wanted[move] = any(_saves(e) for e in move.readers)
        mode, value = self.layout.recompute, move.value
        inside = value.producer.run >= 0 and move.where[0] == "inside"
        if mode == "full" and not inside and any(e.node.run >= 0 for e in move.readers):
            return (
                min(nbytes, self.prices.space.nbytes(value, self.layout, p) if p != P else nbytes),
                forth if p != P else 0.0,
            )
        if mode == "full" and inside:
            return 0.0, forth
        if not wanted:
            return 0.0, 0.0
        if (
            mode == NORMS_AND_ACTIVATIONS
            and is_cheap(value.producer.op)
            and value.floating
            and inside
            and _inputs_kept(value.producer)
        ):
            return 0.0, forth
        if mode == NORMS_AND_ACTIVATIONS and isinstance(p, int) and p != t:
            return nbytes / self.layout.tp, forth
        return nbytes, 0.0

    def again(self, node: Node) -> bool:
        """Whether the backward computes ``node`` again."""
        if node not in self._again:
            self._again[node] = self._computed_again(node)
        return self._again[node]

    def _computed_again(self, node: Node) -> bool:
        if self.layout.recompute == "full":
            return node.run >= 0
        return (
            self.layout.recompute == NORMS_AND_ACTIVATIONS
            and node.run >= 0
            and is_cheap(node.op)
            and _inputs_kept(node)
            and any(_saves(e) for e in self.problem.edges if e.value.producer is node)
        )


def _saves(edge: Edge) -> bool:
    return edge.value.floating and edge.node.op not in SAVES


def _inputs_kept(node: Node) -> bool:
    return node.op not in SAVES and node.op != "to"
