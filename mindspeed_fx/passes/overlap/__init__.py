"""Communication hidden behind compute: one pass per file, one scheduler for all of them."""

from mindspeed_fx.passes.overlap import bucket, decompose, mc2, mc2_experts, schedule, split, step, symmetric_memory  # noqa: F401  registers the passes
from mindspeed_fx.passes.overlap.scheduler.inductor_order import inductor_settings

__all__ = ["inductor_settings"]
