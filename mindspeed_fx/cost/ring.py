"""Time of ring attention, with one ring or with inner rings inside machines (``sharding/spmd/ring.py``)."""

from __future__ import annotations

from mindspeed_fx.cost.collectives import collective_seconds
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.hardware import hardware as device
from mindspeed_fx.errors import OptionError


def ring_seconds(step: float, bytes: float, ranks: int, hardware: "str | Hardware", inner: int = 0) -> float:
    """Modelled seconds of the forward over all keys; ranks are neighbours in their machines.

    Every message is under way while attention is computed. One ring: of all its links the slowest sets the pace, in
    every step. Inner rings of
    ``inner`` neighbours: messages inside a window have a step to hide behind, and those between windows a whole round
        of them; both use links of their own.

    Args:
        step: seconds of attention with one rank's keys.
        bytes: of one rank's keys and values.
        ranks: of the whole ring.
        inner: ranks of an inner ring, a divisor of ``ranks``; 0: there is one ring.

    Raises:
        OptionError: ``inner`` does not divide ``ranks``.

    Source: Gu et al. 2024, "LoongTrain" (double-ring attention).
    """
    hw, inner = device(hardware), inner or ranks
    if inner < 1 or ranks % inner:
        raise OptionError(f"inner is {inner}; valid: a divisor of {ranks} ranks")
    rounds = ranks // inner
    near = float(collective_seconds("send_recv", bytes, inner, hw)) if inner > 1 else 0.0
    far = float(collective_seconds("send_recv", bytes, ranks, hw)) if rounds > 1 else 0.0
    inside = (inner - 1) * max(step, near) + step
    return (rounds - 1) * max(inside, far) + inside
