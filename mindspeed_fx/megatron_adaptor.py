"""One line, as MindSpeed users know it: ``import mindspeed_fx.megatron_adaptor`` before building a Megatron-core model.

Applies :mod:`mindspeed_fx.megatron`; :func:`undo` restores Megatron-core.
"""

from mindspeed_fx.megatron import applied, apply, known_limits, undo

__all__ = ["applied", "apply", "known_limits", "undo"]

apply()
