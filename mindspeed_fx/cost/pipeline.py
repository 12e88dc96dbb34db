"""How long the ranks of a pipeline wait for each other: a step of one schedule, played action by action.

    parts = Parts(forward=1.0, recompute=1.0, inputs=1.0, weights=1.0)
    play(one_f_one_b(4, 8), parts).bubble       # the share of the step in which a rank has nothing to do
    play(zero_bubble(4, 8, recompute=True), parts).bubble

An action is (kind, microbatch) where each rank has one stage, in order, else (kind, stage, microbatch); kinds: "F"
forward, "R" what the backward recomputes, "I" gradients of a stage's inputs, "W" of its weights, "B" = R, I and W in
one piece. A message takes ``send`` seconds and keeps nobody busy. Sources: 1F1B, Narayanan et al. 2019
(PipeDream-Flush); zero bubble (ZB-H1), Qi et al. 2023, arXiv 2401.10241; recomputation ahead of the gradient,
MindSpeed's ripipe; the others are torch's own orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from mindspeed_fx.compat.pipelining import orders_of

Action = tuple[str, int]
StageAction = tuple[str, int, int]
Group = tuple[StageAction, ...]
"""Actions one after the other, whose results are sent when all are done."""


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
    """The most microbatches that any rank has between their forward and their last part at once, each stage's counted:
    what activations cost.
    """


def play(orders: list[list[Action]], parts: Parts) -> Played:
    """The step of ``orders``, one list of actions per rank, each with one stage.

    Raises:
        ValueError: the ranks wait for each other for ever.
    """
    return play_stages(_groups(orders), [parts] * len(orders))


def _groups(orders: list[list[Action]]) -> list[list[Group]]:
    return [[((kind, r, m),) for kind, m in order] for r, order in enumerate(orders)]


def play_stages(orders: list[list[Group]], parts: Sequence[Parts]) -> Played:
    """The step of ``orders``, one list of groups of actions per rank.

    Args:
        parts: of each stage.

    Raises:
        ValueError: the ranks wait for each other for ever.
    """
    rank_of = {stage: r for r, order in enumerate(orders) for group in order for _, stage, _ in group}
    over: dict[StageAction, float] = {}
    now, at, ranks = [0.0] * len(orders), [0] * len(orders), len(orders)
    while any(at[r] < len(orders[r]) for r in range(ranks)):
        moved = False
        for r in range(ranks):
            while at[r] < len(orders[r]):
                group = orders[r][at[r]]
                starts = [_ready(action, rank_of, over, parts) for action in group]
                if any(start is None for start in starts):
                    break
                for start, (kind, stage, _) in zip(starts, group):
                    now[r] = max(now[r], start or 0.0) + parts[stage].of(kind)
                over.update(dict.fromkeys(group, now[r]))
                at[r] += 1
                moved = True
        if not moved:
            stuck = [
                f"rank {r}: {' and '.join(map(str, orders[r][at[r]]))}" for r in range(ranks) if at[r] < len(orders[r])
            ]
            raise ValueError(f"these actions wait for ever: {', '.join(stuck)}")
    seconds = max(now)
    busy = sum(parts[stage].of(kind) for order in orders for group in order for kind, stage, _ in group)
    actions = [[action for group in order for action in group] for order in orders]
    return Played(seconds, 1 - busy / (seconds * ranks), max(_waiting(order) for order in actions))


def torch_order(name: str, ranks: int, stages: int, microbatches: int) -> list[list[Group]]:
    """What each rank does under a schedule of torch.distributed.pipelining, such as "1F1B" or "ZBVZeroBubble".

    Raises:
        ValueError: the schedule does not take these numbers.
    """
    if name == "1F1B":
        return _groups(one_f_one_b(ranks, microbatches))
    return orders_of(name, ranks, stages, microbatches)


def _ready(
    action: StageAction, rank_of: dict[int, int], over: dict[StageAction, float], parts: Sequence[Parts]
) -> float | None:
    """When what ``action`` reads is there; None: not yet known."""
    kind, stage, m = action
    if kind in ("R", "W"):
        return over.get(("F" if kind == "R" else "I", stage, m))
    neighbour = stage - 1 if kind == "F" else stage + 1
    send = parts[stage].send if rank_of.get(neighbour) != rank_of[stage] else 0.0
    if kind == "F":
        return 0.0 if stage == 0 else _later(over.get(("F", neighbour, m)), send)
    own = over.get(("F", stage, m))
    last = neighbour not in rank_of
    known = next((over[k, neighbour, m] for k in ("I", "B") if (k, neighbour, m) in over), None)
    after = 0.0 if last else _later(known, send)
    return None if own is None or after is None else max(own, after)


def _later(time: float | None, send: float) -> float | None:
    return None if time is None else time + send


def _waiting(order: list[StageAction]) -> int:
    last = {(stage, m): i for i, (kind, stage, m) in enumerate(order) if kind != "F"}
    most = alive = 0
    for i, (kind, stage, m) in enumerate(order):
        alive += kind == "F"
        most = max(most, alive)
        alive -= last.get((stage, m)) == i
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
