"""Passes: named, ordered, reported rewrites of a graph. See :mod:`mindspeed_fx.passes.base` to write one."""

from mindspeed_fx.passes.base import (
    Context,
    Pass,
    PassError,
    PassReport,
    Site,
    Skip,
    calls,
    module_path,
    register,
    registered,
    site,
    skip,
    source_line,
    unregister,
)
<<<<<<< HEAD
from mindspeed_fx.passes import fusion, inline, lowering, overlap, sharding  # noqa: F401  registers the built-in passes
=======
from mindspeed_fx.passes import fusion, inline, lowering, overlap, recompute  # noqa: F401  registers the built-in passes
>>>>>>> 48906ab (The forward saves what pays on cpu: one priced minimum cut)

__all__ = [
    "Context", "Pass", "PassError", "PassReport", "Site", "Skip", "calls", "module_path", "register", "registered", "site",
    "skip", "source_line", "unregister",
]  # fmt: skip
