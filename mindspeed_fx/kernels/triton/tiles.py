"""Which tiles of a Triton kernel are worth trying on an NPU, and which of those that compiled is best.

The launchers of :mod:`mindspeed_fx.kernels.triton` choose tiles for CUDA: powers of two that fit registers. A vector
core has 192 KiB of buffer and takes tiles of any width; a tile as wide as the row has no masked tail, so that its
transfers have a fixed size. How much of the buffer a kernel needs is not a formula (the compiler changes its strategy),
so tiles are compiled, widest first.
"""

from __future__ import annotations

from typing import Any, Iterator

_THRESHOLDS = ({"FORWARD_WHOLE": 2**30, "BACKWARD_WHOLE": 2**30}, {"FORWARD_WHOLE": 0, "BACKWARD_WHOLE": 0})
VARIANTS: dict[str, tuple[str, tuple[dict[str, int], ...]]] = {
    **dict.fromkeys(("rms_norm", "add_rms_norm"), ("rms_norm", _THRESHOLDS)),
    **dict.fromkeys(("layer_norm", "add_layer_norm"), ("layer_norm", _THRESHOLDS)),
}
"""Operator -> launcher file, and settings of its thresholds that lead to another kernel, in order of preference: whole
rows, then column blocks."""

TRIES = 5
"""Tiles of a kernel that are compiled at most."""

SYNC = 16
"""Cycles of one synchronization against one of a vector repeat of 256 bytes: assumed, not measured."""

_WIDEST = 16384
_TOGETHER = 32768
"""Elements of the largest tile tried: more fits no kernel that computes in float32."""


def candidates(constants: dict[str, Any]) -> list[dict[str, int]]:
    """Tiles for a launch with ``constants``, best guess first; [{}] when it has no tile to choose.

    A tile is ROWS whole rows of N, or BLOCK columns of N (or V), or BLOCK elements of a flat buffer, or HEADS heads.
    """
    width = constants.get("N", constants.get("V"))
    if "HEADS" in constants:
        tracks = 2 * constants["HALF"]
        return [{"HEADS": h} for h in _powers(constants["HEADS"]) if h * tracks <= _TOGETHER][:TRIES]
    if "BLOCK" not in constants:
        return [{}]
    if width is None:
        return [{"BLOCK": b} for b in (8192, 4096, 2048, 1024, 512)]
    if "ROWS" in constants and constants["BLOCK"] >= width:
        return [{"ROWS": r, "BLOCK": width} for r in _powers(16) if r * width <= _TOGETHER][:TRIES] or [
            {"ROWS": 1, "BLOCK": width}
        ]
    blocks = list(_blocks(width))
    if "ROWS" in constants:
        return [{"ROWS": 4, "BLOCK": b} for b in blocks if 4 * b <= _TOGETHER][:TRIES]
    return [{"BLOCK": b} for b in blocks][:TRIES]


def _blocks(width: int) -> Iterator[int]:
    """Column blocks, widest first: divisors of the width in whole vectors of 16 elements, and 8192, 4096 and 2048
    beside them.
    """
    divisors = {width // n for n in range(1, 33) if width % n == 0 and width // n % 16 == 0}
    powers = {b for b in (8192, 4096, 2048) if b < width}
    results = sorted((b for b in divisors | powers if 1024 <= b <= _WIDEST), reverse=True)
    # Without a divisor to take, one padded block.
    yield from results or [min(_WIDEST, -(-width // 16) * 16)]


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(max(1, most).bit_length() - 1, -1, -1)]


def trips(constants: dict[str, Any]) -> float:
    """Trips of the outermost loop for each row (or token, or element of a flat buffer) of the work."""
    width = constants.get("N", constants.get("V", 1))
    if "HEADS" in constants:
        return 1 / constants["HEADS"]
    if "N" not in constants and "V" not in constants:
        return 1 / constants.get("BLOCK", 1)
    rows = 1 / constants["ROWS"] if "ROWS" in constants else 1.0
    return rows * (1 if constants.get("BLOCK", width) >= width else -(-width // constants["BLOCK"]))


def cycles(results: dict[str, Any], constants: dict[str, Any]) -> float:
    """Modelled vector and synchronization cycles for each row: what the tile changes; bytes moved it does not change.

    A statement in an inner loop counts once for each column block.
    """
    width = constants.get("N", constants.get("V", 1))
    inner = -(-width // constants.get("BLOCK", width))
    nested = "2" in results["work"]
    total = 0.0
    for depth, counts in results["work"].items():
        if depth != "0":
            total += (counts["repeats"] + SYNC * counts["sync"]) * (inner if nested and depth != "1" else 1)
    return total * (trips(constants) if not nested else 1 / constants.get("ROWS", 1))


def best(tried: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of tiles that compiled, the one with fewest :func:`cycles`: double-buffered and without scalar loops first."""
    usable = [t for t in tried if t["outcome"] in ("ok", "single-buffered")]
    return min(
        usable,
        key=lambda t: (t["outcome"] != "ok", t["scalar_loops"], t["cycles"], -sum(t["on_chip"].values())),
        default=None,
    )
