"""Times, sizes and kernels in words."""

from __future__ import annotations

from typing import Any


def kernel_text(row: dict[str, Any]) -> str:
    """One compiled kernel in a line: tile, outcome, on-chip memory and what slows it down."""
    tile = " ".join(f"{k}={v}" for k, v in row["tile"].items())
    chip = ", ".join(f"{space} {size(used)}" for space, used in row["on_chip"].items())
    slow = [f"{row['dynamic']} transfers of dynamic size"] * bool(row["dynamic"]) + [
        f"{row['scalar_loops']} SCALAR LOOPS"
    ] * bool(row["scalar_loops"])
    return f"{row['kernel']:<24} {tile:<22} {row['outcome']:<16} {chip}" + "".join(f"; {s}" for s in slow)


def milliseconds(seconds: float) -> str:
    """Seconds as text."""
    return f"{seconds * 1e3:,.2f} ms"


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError
