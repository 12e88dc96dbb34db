"""Gradients of weights that a pipeline's schedule makes later than the gradient of a stage's input.

A module whose parameters are put off (:func:`put_off`) compiles to a backward in parts
(:mod:`mindspeed_fx.partition.split`): autograd runs the one that the stage before waits for, and the other waits in a
queue until the schedule runs it. Autograd sees no gradient of the weights; the queue adds them to ``main_grad`` where a
parameter has one (Megatron's float32 buffer), else to ``grad``. Oldest first, so that sums are those of a whole
backward to the bit. Zero bubble: Qi et al. 2023, arXiv 2401.10241.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Sequence

import torch
import torch.fx as fx
from torch import Tensor

from mindspeed_fx.compat.dtensor import as_parts_of
from mindspeed_fx.errors import OptionError
from mindspeed_fx.partition.split import Part, SplitError, split
from mindspeed_fx.training import late_gradients_swap

logger = logging.getLogger(__name__)

KEY = "_mindspeed_fx_late_gradients"


class Queue:
    """What backwards have left to do: one entry a backward of a graph.

    Args:
        swaps: what an entry reads waits in host memory, from the next entry on.
        smallest: bytes below which a tensor stays on the device; None: MindSpeed's.
    """

    def __init__(self, swaps: bool = False, smallest: int | None = None) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
        self.in_parts = True
        """Whether the backwards that run now leave the gradients of weights; where not, they make them themselves."""
        self.swaps, self.smallest = swaps, smallest
        self.away: deque[late_gradients_swap.Entry] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def put(self, weights: list[Tensor], run: Callable, values: list[Any]) -> None:
        """``run(*values)`` gives the gradients of ``weights``, later."""
        if not self.swaps:
            self.waiting.append(lambda: _add(weights, run, values))
            return
        if self.away:
            self.away[-1].leave()
        entry = late_gradients_swap.Entry(values, weights, self.smallest)
        entry.begin_leaving()
        self.away.append(entry)
        self.waiting.append(lambda: self._run_away(weights, run))

    def _run_away(self, weights: list[Tensor], run: Callable) -> None:
        values = self.away.popleft().take()
        if self.away:
            self.away[0].begin_return()
        _add(weights, run, values)

    def run_one(self) -> None:
        """The oldest.

        Raises:
            IndexError: none waits.
        """
        self.waiting.popleft()()

    def run_newest(self, count: int) -> None:
        """The ``count`` that were put last, in their order, before older ones; of a queue that does not swap."""
        newest = [self.waiting.pop() for _ in range(count)]
        for run in reversed(newest):
            run()

    def take(self) -> Callable[[], None]:
        """What the last backward left, to be run whenever; nothing where it left nothing."""
        return self.waiting.pop() if self.waiting else _nothing


def _nothing() -> None:
    pass


def put_off(parameters: Iterable[Tensor], queue: Queue) -> None:
    """Have graphs of these parameters leave their gradients to ``queue``. A graph is then one module's alone."""
    for parameter in parameters:
        setattr(parameter, KEY, queue)


@dataclass
class Late:
    """Of one graph: which gradients may be made late, and what they are added to."""

    queue: Queue
    positions: list[int]
    """Of the weights among the inputs of the forward, and so of their gradients among the results of the backward."""
    weights: Callable[[], list[Tensor]]
    may_be_whole: bool = False
    """Whether a backward that cannot be taken apart makes all gradients at once, where it is asked for some."""


def take(inputs: Sequence[Any], codegen: str) -> Late | None:
    """Of a graph with these inputs: its parameters that are put off (:func:`put_off`); None without such.

    Raises:
        OptionError: ``codegen`` leaves no backward to be taken apart.
    """
    queue = next((getattr(x, KEY) for x in inputs if hasattr(x, KEY)), None)
    if queue is None:
        return None
    if codegen != "eager":
        raise OptionError(
            f'option "codegen" is "{codegen}"; valid where gradients of weights are made late (--use-nanopipe): "eager"'
        )
    weights = {i: x for i, x in enumerate(inputs) if hasattr(x, KEY) and x.requires_grad}
    return Late(queue, list(weights), lambda: list(weights.values()))


def run_in_parts(
    backward: fx.GraphModule,
    late: Late,
    lower: Callable[[fx.GraphModule], Callable],
    prepare: Callable[[fx.GraphModule], None] | None = None,
) -> Callable:
    """What runs instead of ``backward``: where the queue asks for parts, gradients of the weights are None, and wait
    in it. A function of one list, which it empties.

    Args:
        lower: makes of a graph such a function; called when one first runs.
        prepare: called before with each part but that of the weights.

    Raises:
        SplitError: ``backward`` writes in place.
    """
    try:
        parts, after = split(backward, late.positions), set(late.positions)
    except SplitError as error:
        if not late.may_be_whole:
            raise
        logger.warning("%s: gradients of weights are not made late", error)
        return lower(backward)
    names = [n.name for n in backward.graph.nodes if n.op == "placeholder"]
    returned = len(next(n for n in reversed(backward.graph.nodes) if n.op == "output").args[0])
    early = [i for i in range(returned) if i not in after]
    runs: dict[str, Callable] = {}

    def part(name: str, gm: fx.GraphModule) -> Callable:
        if name not in runs:
            if prepare is not None and name != "weights":
                prepare(gm)
            runs[name] = lower(gm)
        return runs[name]

    def run(args: list[Any]) -> Sequence[Any]:
        if not late.queue.in_parts:
            return part("whole", backward)(args)
        values = dict(zip(names, args))
        args.clear()
        for name, graph in (("recompute", parts.recompute), ("inputs", parts.inputs)):
            result = part(name, graph.gm)([values[n] for n in graph.reads]) if graph.makes else ()
            values.update((n, v) for n, v in zip(graph.makes, result) if n)
        rest = [_strided(values[n], node) for n, node in zip(parts.weights.reads, _placeholders(parts.weights))]
        values.clear()
        later = part("weights", parts.weights.gm)
        late.queue.put(late.weights(), lambda *args: later(list(args)), rest)
        gradients = dict(zip(early, result))
        return [gradients.get(i) for i in range(returned)]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _placeholders(part: Part) -> list[fx.Node]:
    return [n for n in part.gm.graph.nodes if n.op == "placeholder"]


def _strided(value: Any, node: fx.Node) -> Any:
    """``value`` in the strides that ``node`` was traced with; a compiled part may return others."""
    traced = node.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(traced, Tensor) or value.stride() == traced.stride():
        return value
    if any(isinstance(s, torch.SymInt) for s in (*traced.shape, *traced.stride())):
        return value
    return torch.empty_strided(value.shape, traced.stride(), dtype=value.dtype, device=value.device).copy_(value)


@torch.no_grad()
def _add(weights: list[Tensor], run: Callable, values: list[Any]) -> None:
    for weight, gradient in zip(weights, run(*values)):
        if gradient is None:
            continue
        gradient = as_parts_of(weight, gradient)
        if (buffer := getattr(weight, "main_grad", None)) is not None:
            buffer.add_(gradient)
        elif weight.grad is None:
            weight.grad = gradient.clone()
        else:
            weight.grad += gradient
