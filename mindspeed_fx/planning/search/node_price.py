"""What one choice for one operator costs."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_fx.planning.search.strategy_space import Label


@dataclass
class NodePrice:
    """What one operator costs per microbatch on one rank, in seconds and bytes."""

    forward: float = 0.0
    backward: float = 0.0
    moved: float = 0.0
    """Seconds of collectives inside, and around it on dimensions other than tp."""
    gather: float = 0.0
    """Seconds of its parameters' gathers, forward."""
    reduce: float = 0.0
    """Seconds of its parameters' gathers and its gradients' reductions, backward."""
    update: float = 0.0
    """Seconds of the optimizer."""
    state: float = 0.0
    """Bytes of parameters, gradients and optimizer states."""
    gathered: float = 0.0
    """Bytes of parameters that are made whole for its use."""
    kept: float = 0.0
    """Bytes kept for its backward that are no argument of it."""
    transient: float = 0.0
    """Bytes at hand while it runs backward."""
    how: str = ""
    """How it is computed on cp, where there is a choice."""
    weights: float = 0.0
    """Seconds of :attr:`backward` for gradients of weights, which a schedule may put off."""
    around: tuple[tuple[Label, ...], tuple[Label, ...]] = ((), ())
    """Of arguments and results, what is divided over cp where :attr:`how` says that the sequence is not."""


NOTHING = NodePrice()
