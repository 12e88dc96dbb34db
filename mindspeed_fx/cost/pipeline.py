"""How long the ranks of a pipeline wait for each other: a step of one schedule, played action by action.

    parts = Parts(forward=1.0, recompute=1.0, inputs=1.0, weights=1.0)
    play(one_f_one_b(4, 8), parts).bubble       # the share of the step in which a rank has nothing to do
    play(zero_bubble(4, 8, recompute=True), parts).bubble

An action is (kind, microbatch); kinds: "F" forward, "R" what the backward recomputes, "I" gradients of a stage's
inputs, "W" of its weights, "B" = R, I and W in one piece. One stage per rank, in order; a message takes ``send``
seconds and keeps nobody busy. Sources: 1F1B, Narayanan et al. 2019 (PipeDream-Flush); zero bubble (ZB-H1), Qi et al.
2023, arXiv 2401.10241; recomputation ahead of the gradient, MindSpeed's ripipe.
"""

from __future__ import annotations

from dataclasses import dataclass

Action = tuple[str, int]


@dataclass(frozen=True)
class Parts:
    """Seconds of one microbatch on one stage."""

    forward: float
    recompute: float
    inputs: float
    weights: float
    send: float = 0.0

    def of(self, kind: str) -> float:
        return {
            "F": self.forward,
            "R": self.recompute,
            "I": self.inputs,
            "W": self.weights,
            "B": self.recompute + self.inputs + self.weights,
        }[kind]


@dataclass(frozen=True)
class Played:
    """One step."""

    seconds: float
    bubble: float
    """Share of ranks x seconds in which nothing runs."""
    waiting: int
    """The most microbatches that any rank has between their forward and their last part at once: what activations
    cost.
    """


def play(orders: list[list[Action]], parts: Parts) -> Played:
    """The step of ``orders``, one list of actions per rank.

    Raises:
        ValueError: the ranks wait for each other for ever.
    """
    over: dict[tuple[str, int, int], float] = {}
    now, at, ranks = [0.0] * len(orders), [0] * len(orders), len(orders)
    while any(at[r] < len(orders[r]) for r in range(ranks)):
        moved = False
        for r in range(ranks):
            while (
                at[r] < len(orders[r]) and (start := _ready(orders[r][at[r]], r, ranks, over, parts.send)) is not None
            ):
                kind, m = orders[r][at[r]]
                now[r] = over[kind, m, r] = max(now[r], start) + parts.of(kind)
                at[r] += 1
                moved = True
        if not moved:
            stuck = [f"rank {r}: {orders[r][at[r]]}" for r in range(ranks) if at[r] < len(orders[r])]
            raise ValueError(f"these actions wait for ever: {', '.join(stuck)}")
    seconds, busy = max(now), sum(parts.of(kind) for order in orders for kind, _ in order)
    return Played(seconds, 1 - busy / (seconds * ranks), max(_waiting(order) for order in orders))


def _ready(action: Action, r: int, ranks: int, over: dict[tuple[str, int, int], float], send: float) -> float | None:
    """When what ``action`` reads is there; None: not yet known."""
    kind, m = action
    if kind == "F":
        return 0.0 if r == 0 else _later(over.get(("F", m, r - 1)), send)
    if kind in ("R", "W"):
        return over.get(("F" if kind == "R" else "I", m, r))
    own = over.get(("F", m, r))
    after = (
        0.0
        if r == ranks - 1
        else _later(next((over[k, m, r + 1] for k in ("I", "B") if (k, m, r + 1) in over), None), send)
    )
    return None if own is None or after is None else max(own, after)


def _later(time: float | None, send: float) -> float | None:
    return None if time is None else time + send


def _waiting(order: list[Action]) -> int:
    last = {m: i for i, (kind, m) in enumerate(order) if kind != "F"}
    most = alive = 0
    for i, (kind, m) in enumerate(order):
        alive += kind == "F"
        most = max(most, alive)
        alive -= last.get(m) == i
    return most


def one_f_one_b(ranks: int, microbatches: int) -> list[list[Action]]:
    """One forward, one backward: each rank warms up with a forward for every rank behind it."""
    orders = []
    for r in range(ranks):
        warm = min(ranks - 1 - r, microbatches)
        order = [("F", m) for m in range(warm)]
        for m in range(microbatches - warm):
            order += [("F", warm + m), ("B", m)]
        orders.append(order + [("B", m) for m in range(microbatches - warm, microbatches)])
    return orders


def recompute_ahead(ranks: int, microbatches: int) -> list[list[Action]]:
    """1F1B where what a backward recomputes is made before its gradient arrives; inputs and weights in one piece."""
    orders = []
    for order in one_f_one_b(ranks, microbatches):
        orders.append(
            [part for kind, m in order for part in ([(kind, m)] if kind == "F" else [("R", m), ("I", m), ("W", m)])]
        )
    return orders


def zero_bubble(ranks: int, microbatches: int, recompute: bool = False) -> list[list[Action]]:
    """ZB-H1: gradients of weights are put off until they fill what would be idle, on rank r by r microbatches.

    On no rank do more microbatches wait at once than on the first rank of 1F1B.

    Args:
        recompute: something is recomputed, which is done before the gradient arrives.
    """
    orders = []
    for r in range(ranks):
        warm = min(ranks - r, microbatches)
        order = [("F", m) for m in range(warm)]
        for m in range(microbatches):
            order += [("R", m)] * recompute + [("I", m)]
            if m >= r:
                order.append(("W", m - r))
            if warm + m < microbatches:
                order.append(("F", warm + m))
        orders.append(order + [("W", m) for m in range(max(0, microbatches - r), microbatches)])
    return orders
