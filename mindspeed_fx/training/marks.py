"""What the parameters of one graph are marked for: the modules of this folder, as a compilation asks for them."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch.fx as fx

from mindspeed_fx.options import Options
from mindspeed_fx.training import (
    data_parallel,
    freed_weights,
    gradient_ready,
    late_gradients,
    optimizer_in_backward,
    param_gather,
    turns,
)


class Marks:
    """Of one Dynamo graph; none before :meth:`take`.

    Attributes:
        late: which gradients a pipeline's schedule makes later; None where all are made in the backward.
        takes_turns: whether two calls of such graphs run beside each other.
    """

    def __init__(self) -> None:
        self.averaged: list[int] = []
        self.group: str | None = None
        self.steps: optimizer_in_backward.Steps | gradient_ready.Announcements | None = None
        self.gathers, self.freed = param_gather.Gathers(()), freed_weights.FreedWeights(())
        self.late: late_gradients.Late | None = None
        self.takes_turns = False

    def take(self, gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Sequence[Any]:
        """Read the marks of ``inputs``, of a copy of Dynamo's graph, which gets further ones in place.

        Returns:
            What it is traced with.

        Raises:
            OptionError: a mark, or an option, that the other options have no room for.
        """
        if options.data_parallel:
            self.averaged, self.group = data_parallel.parameters(inputs), options.data_parallel
        if options.optimizer:
            self.steps = optimizer_in_backward.Steps(gm, inputs)
        elif gradient_ready.has_listeners(inputs):
            self.steps = gradient_ready.Announcements(gm, inputs)
        self.gathers, self.freed = param_gather.Gathers(inputs), freed_weights.FreedWeights(inputs)
        self.late = late_gradients.take(inputs, options.codegen) or self.late
        self.takes_turns = turns.take(inputs, options.codegen)
        return inputs if self.steps is None else self.steps.inputs

    def __bool__(self) -> bool:
        """Whether any parameter is treated for itself."""
        treated = self.averaged, self.steps, self.gathers, self.freed.positions, self.late, self.takes_turns
        return any(map(bool, treated))

    @property
    def identity(self) -> str:
        """What compile caches must know of them."""
        return self.gathers.identity + self.freed.identity

    def read(self, gm: fx.GraphModule) -> None:
        """Read parameters through what averages their gradients, steps or announces them, in place."""
        if self.averaged and self.group:
            data_parallel.average(gm, self.averaged, self.group)
        if self.steps is not None:
            self.steps.read(gm)

    def mark(self, joint: fx.GraphModule) -> None:
        """What the cut of a joint graph into forward and backward must know, in place."""
        gradient_ready.mark(joint)
        self.gathers.mark(joint)
        self.freed.mark(joint)

    def wait(self, forward: fx.GraphModule) -> None:
        """Wait for parameters that a collective still fills, in place."""
        if self.gathers:
            self.gathers.insert(forward)

    def hand_over(self, gm: fx.GraphModule) -> None:
        """Hand over to the other call, where two run beside each other, in place."""
        if self.takes_turns:
            turns.insert(gm)

    def wrap(self, compiled: Callable) -> Callable:
        """``compiled`` as a function of the graph's own inputs."""
        return compiled if self.steps is None else self.steps.wrap(compiled)
