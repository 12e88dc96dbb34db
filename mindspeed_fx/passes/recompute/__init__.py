"""Recompute: what the forward saves for the backward, and what the backward recomputes."""

from mindspeed_fx.passes.recompute import budget, pointwise, policy  # noqa: F401
