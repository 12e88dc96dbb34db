"""Gradients of weights that a pipeline's schedule makes later than the gradient of a stage's input.

A module whose parameters are put off (:func:`put_off`) compiles to a backward in parts
(:mod:`mindspeed_fx.partition.split`): autograd runs the one that the stage before waits for, and the other waits in a
queue until the schedule runs it. Autograd sees no gradient of the weights; the queue adds them to ``main_grad`` where a
parameter has one (Megatron's float32 buffer), else to ``grad``. Oldest first, so that sums are those of a whole
backward to the bit. Zero bubble: Qi et al. 2023, arXiv 2401.10241.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Iterable, Sequence

import torch
import torch.fx as fx
from torch import Tensor

from mindspeed_fx.errors import OptionError
from mindspeed_fx.partition.split import split
from mindspeed_fx.training import late_gradients_swap

KEY = "_mindspeed_fx_late_gradients"


class Queue:
    """What backwards have left to do: one entry a backward of a graph.

    Args:
        swaps: what an entry reads waits in host memory, from the next entry on.
        smallest: bytes below which a tensor stays on the device; None: MindSpeed's.
    """

    def __init__(self, swaps: bool = False, smallest: int | None = None) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
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


def put_off(parameters: Iterable[Tensor], queue: Queue) -> None:
    """Have graphs of these parameters leave their gradients to ``queue``. A graph is then one module's alone."""
    for parameter in parameters:
        setattr(parameter, KEY, queue)


def take(inputs: Sequence[Any], codegen: str) -> tuple[Queue, dict[int, Tensor]] | None:
    """The queue of the parameters among the inputs of a graph, and those that are put off, by their position; None
    where none has one.

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
    return queue, {i: x for i, x in enumerate(inputs) if hasattr(x, KEY) and x.requires_grad}


def run_in_parts(
    backward: fx.GraphModule,
    held: list[Tensor],
    positions: list[int],
    queue: Queue,
    prepare: Callable[[fx.GraphModule], None] | None = None,
) -> Callable:
    """What runs instead of ``backward``: gradients of the weights are None, and wait in ``queue``.

    Args:
        held: the weights.
        positions: of their gradients among what ``backward`` returns.
        prepare: called with each part but that of the weights.

    Raises:
        SplitError: ``backward`` writes in place.
    """
    parts, late = split(backward, positions), set(positions)
    if prepare is not None:
        for part in (parts.recompute, parts.inputs):
            prepare(part.gm)
    names = [n.name for n in backward.graph.nodes if n.op == "placeholder"]
    returned = len(next(n for n in reversed(backward.graph.nodes) if n.op == "output").args[0])
    early = [i for i in range(returned) if i not in late]

    def run(*args: Any) -> list[Any]:
        values = dict(zip(names, args))
        for part in (parts.recompute, parts.inputs):
            result = part.gm(*(values[n] for n in part.reads))
            values.update((n, v) for n, v in zip(part.makes, result) if n)
        rest = [values[n] for n in parts.weights.reads]
        values.clear()
        queue.put(held, parts.weights.gm, rest)
        gradients = dict(zip(early, result))
        return [gradients.get(i) for i in range(returned)]

    return run


@torch.no_grad()
def _add(weights: list[Tensor], run: Callable, values: list[Any]) -> None:
    for weight, gradient in zip(weights, run(*values)):
        if gradient is None:
            continue
        if (buffer := getattr(weight, "main_grad", None)) is not None:
            buffer.add_(gradient)
        elif weight.grad is None:
            weight.grad = gradient.clone()
        else:
            weight.grad += gradient
