"""Making code plain that the other passes could not see into. One pass per file."""

from mindspeed_fx.passes.inline import autograd_function, npu_attention, varlen_attention  # noqa: F401
