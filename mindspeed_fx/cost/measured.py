"""Kernels that were timed alone, by operator, type and shape: their rows, and what they make of the formulas near them.

    time of a shape = launch + formula of the shape x correction
    correction = exp(sum_i w_i log(measured_i / formula_i) / (1 + sum_i w_i)),   w_i = ((FAR - d_i) / d_i)^2

d_i is the distance of row i, in the logarithms to base 2 of the sizes; rows from ``FAR`` on have no weight (Franke and
Little's modification of Shepard's interpolation, with the formula as one more row of weight one). So a shape of the
table has its measured time, one far from all rows that of the formula.

    rows 4096^3 (measured / formula 0.97) and 8192^3 (1.02); shape 8192 x 4096 x 4096: distances 1 and 1.41
    weights 1 and 0.17, correction exp((1 log 0.97 + 0.17 log 1.02) / (1 + 1.17)) = 0.988
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Sequence

SIZES = {
    "product": ("m", "n", "k"),
    "attention": ("heads", "queries", "keys", "width"),
    "attention_backward": ("heads", "queries", "keys", "width"),
}
"""Operator -> its sizes: [m, k] x [k, n]; heads of all sequences of the batch, queries and keys of one of them."""
FAR = 2.0
"""Distance from which on a row says nothing: a factor of four in one size. Assumed: rates of products change by a third
between 1024 and 2048 cubed and by a twentieth beyond."""
LARGEST = 2**40
"""Of a size."""
COLUMNS = ("device", "operator", "dtype", "sizes", "causal", "microseconds", "less", "source")
"""Of a file. ``sizes`` is "4096 x 4096 x 4096"; ``less``: microseconds that timing added."""


@dataclass(frozen=True)
class MeasuredRow:
    """One kernel and its time, in a loop of nothing else."""

    operator: str
    dtype: str
    sizes: tuple[int, ...]
    """See :data:`SIZES`."""
    seconds: float
    source: str
    causal: bool = False

    def __post_init__(self) -> None:
        names = SIZES.get(self.operator) if isinstance(self.operator, str) else None
        if names is None:
            raise ValueError(f"operator is {self.operator!r}; valid: {', '.join(SIZES)}")
        sizes = self.sizes if isinstance(self.sizes, tuple) else ()
        if len(sizes) != len(names) or not all(type(n) is int and 0 < n <= LARGEST for n in sizes):
            raise ValueError(f"sizes of {self.operator} are {self.sizes!r}; valid: {', '.join(names)}, each from 1 on")
        if type(self.seconds) not in (int, float) or not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds of {self.operator} are {self.seconds!r}; a number above 0 is expected")
        if not (isinstance(self.dtype, str) and isinstance(self.source, str) and type(self.causal) is bool):
            raise ValueError(f"a row of {self.operator} has {self.dtype!r}, {self.causal!r}, {self.source!r}")

    @property
    def name(self) -> str:
        """ "product 4096 x 4096 x 4096 bfloat16"."""
        causal = "causal " if self.causal else ""
        return f"{causal}{self.operator.replace('_', ' ')} {' x '.join(map(str, self.sizes))} {self.dtype}"


@dataclass(frozen=True)
class Correction:
    """What the rows near a shape make of its formula."""

    row: MeasuredRow
    """The nearest one."""
    rate: float
    """FLOP/s that it reached."""
    distance: float
    factor: float
    share: float
    """Weight of the rows against the formula: 1 at a row, 0 far from all."""

    def __str__(self) -> str:
        near = "" if self.distance == 0 else f"{100 * self.share:.0f} % by rows near "
        speed = f"{self.rate / 1e12:.4g} T" if self.rate >= 1e12 else f"{self.rate / 1e9:.4g} G"
        return f"{near}{self.row.name}, measured {speed}FLOP/s ({self.row.source})"


Point = tuple[float, ...]
"""Logarithms to base 2 of a shape."""


def point(kind: str, shape: Sequence[float]) -> Point:
    """Where the ``shape`` of a :class:`mindspeed_fx.cost.operators.Cost` is. What a mask leaves of the keys counts
    threefold, so that a row without a mask says nothing of a causal one."""
    if kind == "product":
        return tuple(math.log2(n) for n in shape)
    keys, width, heads, queries, seen = (max(1.0, n) for n in shape)
    return math.log2(keys), math.log2(width), math.log2(heads), math.log2(queries), 3 * math.log2(keys / seen)


def interpolate(at: Point, rows: Iterable[tuple[Point, float, MeasuredRow, float]]) -> Correction | None:
    """The correction at a point; None where every row is far.

    Args:
        rows: where each is, its measured time over its formula, the row, its FLOP/s.
    """
    total = mean = 0.0
    nearest: tuple[float, MeasuredRow, float] | None = None
    for where, ratio, row, rate in rows:
        distance = math.dist(at, where)
        if distance < 1e-6:
            return Correction(row, rate, 0.0, ratio, 1.0)
        if distance < FAR:
            weight = ((FAR - distance) / distance) ** 2
            total += weight
            mean += weight * math.log(ratio)
            if nearest is None or distance < nearest[0]:
                nearest = distance, row, rate
    if nearest is None:
        return None
    return Correction(nearest[1], nearest[2], nearest[0], math.exp(mean / (1 + total)), total / (1 + total))


def read_rows(path: Path) -> dict[str, tuple[MeasuredRow, ...]]:
    """Device -> its rows, of a file with :data:`COLUMNS`; lines that begin with # are remarks.

    Raises:
        ValueError: a line is no row; the message has file and line.
    """
    results: dict[str, list[MeasuredRow]] = {}
    with open(path, newline="") as file:
        lines = [(k, line) for k, line in enumerate(file, 1) if line.strip() and not line.startswith("#")]
    for (number, _), values in zip(lines, csv.reader(line for _, line in lines)):
        if number == lines[0][0]:
            if tuple(values) != COLUMNS:
                raise ValueError(f"{path.name}:{number}: columns are {values}; valid: {', '.join(COLUMNS)}")
            continue
        try:
            row = _row(dict(zip(COLUMNS, values, strict=True)))
        except ValueError as e:
            raise ValueError(f"{path.name}:{number}: {e}") from None
        results.setdefault(values[0], []).append(row)
    return {device: tuple(rows) for device, rows in results.items()}


def _row(texts: dict[str, Any]) -> MeasuredRow:
    sizes = tuple(int(n) for n in texts["sizes"].split("x"))
    if texts["causal"] not in ("0", "1"):
        raise ValueError(f"causal is {texts['causal']!r}; valid: 0, 1")
    seconds = (float(texts["microseconds"]) - float(texts["less"])) * 1e-6
    causal = texts["causal"] == "1"
    return MeasuredRow(texts["operator"], texts["dtype"], sizes, seconds, texts["source"], causal)
