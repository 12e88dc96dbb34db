"""Higher-order operators that passes read: what calls a graph, and what scans with one."""

from __future__ import annotations

from typing import Any


def wrap_operator() -> Any:
    """The higher-order operator that calls a graph and does nothing else."""
    from torch._higher_order_ops.wrap import wrap

    return wrap


def associative_scan_operator() -> Any:
    """The higher-order operator that ``associative_scan`` with combine_mode="pointwise", for CUDA alone, is kept as: of
    a body, a list of values that are scanned along their first dimension, and what else the body reads.
    """
    from torch._higher_order_ops.associative_scan import associative_scan_op

    return associative_scan_op
