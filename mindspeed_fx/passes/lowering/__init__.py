"""Choices of kernels for single ATen operators, after autograd. One pass per file."""

from mindspeed_fx.passes.lowering import onednn  # noqa: F401
