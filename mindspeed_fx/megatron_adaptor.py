"""One line, as MindSpeed users know it: ``import mindspeed_fx.megatron_adaptor`` before building a Megatron-core model.

Applies :mod:`mindspeed_fx.megatron`; :func:`undo` restores Megatron-core. :func:`compile_chunk` compiles one chunk of a
model in its wrappers, as Megatron-LM's script has each of them compiled.
"""

from mindspeed_fx.megatron import applied, apply, known_limits, undo

__all__ = ["applied", "apply", "compile_chunk", "known_limits", "undo"]

apply()

from mindspeed_fx.megatron.training.compile_chunks import compile_chunk  # noqa: E402  it imports Megatron-core
