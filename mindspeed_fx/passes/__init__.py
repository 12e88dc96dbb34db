"""Passes: named, ordered, reported rewrites of a graph. See :mod:`mindspeed_fx.passes.base` to write one."""

from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.passes import canonicalize, fusion, lowering, overlap, recompute, sharding  # noqa: F401  registers the built-in passes
from mindspeed_fx.passes.base import (
    Context,
    Pass,
    PassError,
    PassReport,
    Site,
    Skip,
    calls,
    register,
    registered,
    site,
    skip,
    source_line,
    unregister,
)

__all__ = [
    "Context",
    "Pass",
    "PassError",
    "PassReport",
    "Site",
    "Skip",
    "calls",
    "module_path",
    "register",
    "registered",
    "site",
    "skip",
    "source_line",
    "unregister",
]
