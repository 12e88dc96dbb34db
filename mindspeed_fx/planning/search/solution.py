"""One choice for every operator of a layout, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.lp_structure import Move
from mindspeed_fx.planning.search.node_price import NodePrice
from mindspeed_fx.planning.search.problem import Node
from mindspeed_fx.planning.search.strategy_space import Label, Strategy


class Unsayable(Exception):
    """A combination of choices in which a value cannot go where it is wanted; rounding can make one."""


@dataclass
class Solution:
    """A choice for every operator, and what it costs."""

    layout: Layout
    strategies: dict[Node, Strategy]
    prices: dict[Node, NodePrice]
    moves: list[tuple[Move, Label, Label, float, float]]
    """Value, placement made, placement wanted, seconds (once per microbatch and layer), bytes kept."""
    seconds: float
    bound: float
    """No choice in this layout is faster: the optimum of the linear relaxation."""
    memory: float
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of a step on the fullest rank: compute, recompute, collectives, exposed, update, bubble."""
    bytes: dict[str, float] = field(default_factory=dict)
    """What :attr:`memory` is made of: states, kept, operator, gathered."""
    widest: Node | None = None
    """The operator that needs most at hand while it runs backward."""
    layers: tuple[int, ...] | None = None
    """Of each stage, where that is not as equal as can be."""
    even: float = 0.0
    """Seconds with layers as equal as can be."""

    @property
    def gap(self) -> float:
        return max(0.0, self.seconds / self.bound - 1) if self.bound else 0.0
