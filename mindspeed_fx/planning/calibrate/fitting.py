"""The constants of a device from timings: those of the cost model's own formulas, all at once.

Minimised over the logarithms x of the constants, with the modelled time t(x) and the measured one T of every row:

    sum_i rho((log t_i(x) - log T_i) / s) + sum_j ((x_j - x0_j) / spread_j)^2

rho is the soft absolute value, s = 10 %, x0 what the documented table says, its spread wide: it decides only what the
rows do not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from mindspeed_fx.cost.calibrated import with_constants
from mindspeed_fx.cost.collectives import collective
from mindspeed_fx.cost.device import Constant, Hardware, fitted_constant
from mindspeed_fx.cost.measured import SIZES, MeasuredRow
from mindspeed_fx.cost.operators import Cost
from mindspeed_fx.planning.calibrate.cases import Row
from mindspeed_fx.planning.calibrate.measure import COPY

SCALE = 0.1
START = Constant(16.0, "", "assumed: a small start", "low")
"""Of a ramp that the table lacks."""
WIDE = 2.0
"""Spread of a prior's logarithm: a factor of seven either way."""


@dataclass(frozen=True)
class Fit:
    """Fitted constants, and what they make of the rows."""

    constants: dict[str, Constant]
    hardware: Hardware
    rows: tuple[Row, ...]

    def modelled(self, row: Row) -> float:
        """Seconds."""
        return modelled_seconds(row, self.hardware)

    def errors(self, kind: str | None = None) -> list[float]:
        """Relative errors of the model, of all rows or of one kind."""
        return [self.modelled(r) / r.seconds - 1 for r in self.rows if kind in (None, r.kind)]

    def measured(self, source: str, noisy: bool = False) -> tuple[MeasuredRow, ...]:
        """The products and attention kernels that were timed. Of several kernels timed together, such as the two
        products of a gradient, each has the share that the formulas give it; of one shape that was timed several times
        the mean of the logarithms counts.

        Args:
            source: where and when they were timed.
            noisy: noisy timings too.
        """
        times: dict[MeasuredRow, list[float]] = defaultdict(list)
        for row in self.rows:
            kernels = [c for c in row.kernels if c.kind in SIZES and c.shape]
            if not kernels or row.kind not in SIZES or (row.is_noisy and not noisy):
                continue
            factor = row.seconds / self.modelled(row)
            for cost in kernels:
                times[measured_row(cost, 1.0, source)].append(factor * float(cost.seconds(self.hardware)))
        return tuple(replace(row, seconds=float(np.exp(np.mean(np.log(each))))) for row, each in times.items())

    def median_error(self, kind: str | None = None) -> float:
        """Of the absolute relative errors."""
        return float(np.median(np.abs(self.errors(kind))))


def measured_row(cost: Cost, seconds: float, source: str) -> MeasuredRow:
    """A kernel of the cost model with a time."""
    if cost.kind == "product":
        return MeasuredRow(cost.kind, cost.dtype, tuple(int(n) for n in cost.shape), seconds, source)
    keys, width, heads, queries, seen = cost.shape
    sizes = (int(heads), int(queries), int(keys), int(width))
    return MeasuredRow(cost.kind, cost.dtype, sizes, seconds, source, causal=seen < keys)


def modelled_seconds(row: Row, hw: Hardware) -> float:
    """What the cost model says that a row takes."""
    if row.kind == "copy":
        return COPY / hw.host_bandwidth
    if row.kind == "collective":
        name, size, ranks, per_node = row.label.split()
        return float(collective(name, int(size), int(ranks), hw, int(per_node)).seconds)
    return sum(float(cost.seconds(hw)) for cost in row.kernels)


def fit(base: Hardware, rows: list[Row], source: str) -> Fit:
    """The constants that the rows tell of; all others stay those of ``base``. They are those of the formulas alone.

    Args:
        source: where and when the rows were measured.

    Raises:
        ImportError: scipy is not installed.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise ImportError('fits need scipy: pip install "mindspeed-fx[plans]"') from None
    start = reached(base, rows)
    free = free_constants(start, rows)
    units = {path: start.constants()[path].unit for path in free}
    prior = np.log([float(start.constants()[path]) for path in free])
    measured = np.log([row.seconds for row in rows])

    def device(x: np.ndarray) -> Hardware:
        values = {p: Constant(float(v), units[p], source, "medium") for p, v in zip(free, np.exp(x))}
        return with_constants(start, values)

    def residuals(x: np.ndarray) -> np.ndarray:
        hw = device(x)
        misses = (np.log([modelled_seconds(row, hw) for row in rows]) - measured) / SCALE
        soft = np.sign(misses) * np.sqrt(2 * (np.sqrt(1 + misses**2) - 1))
        return np.concatenate([soft, (x - prior) / WIDE])

    result = least_squares(residuals, prior, method="trf", max_nfev=60, diff_step=1e-3)
    spread = np.sqrt(np.diag(np.linalg.inv(result.jac.T @ result.jac)))
    constants = {
        path: fitted_constant(float(value), units[path], source, round(float(s), 4))
        for path, value, s in zip(free, np.exp(result.x), spread)
    }
    fixed = {path: c for path, c in start.constants().items() if path not in free and c != base.constants().get(path)}
    return Fit({**fixed, **constants}, with_constants(start, constants), tuple(rows))


def free_constants(hw: Hardware, rows: list[Row]) -> list[str]:
    """Paths of the constants that rows of these kinds tell of."""
    kinds = {row.kind for row in rows}
    free = []
    if "product" in kinds:
        free += [f"matrix.{d}" for d in sorted({r.dtype for r in rows if r.kind == "product"})] + ["product_ramp"]
    if "attention" in kinds:
        free += ["attention_forward", "attention_backward", "attention_ramp"]
    if "vector" in kinds:
        free += ["memory_bandwidth", "vector.float32"]
    free += ["launch"] * ("launch" in kinds) + ["host_bandwidth"] * ("copy" in kinds)
    for name in sorted(tiers_measured(hw, rows)):
        free += [f"tiers.{name}.bandwidth", f"tiers.{name}.latency"]
    return free


def tiers_measured(hw: Hardware, rows: list[Row]) -> set[str]:
    """The tiers that the measured collectives cross."""
    results = set()
    for row in rows:
        if row.kind == "collective":
            _, _, ranks, per_node = row.label.split()
            results.add(collective("all_gather", 1, int(ranks), hw, int(per_node)).tier)
    return results


def reached(base: Hardware, rows: list[Row]) -> Hardware:
    """``base`` where the rates that will be fitted are those that are reached: their efficiencies become one.

    Types that were measured and have no rate in the table begin with float32's; constants that the table lacks begin
    with values that change nothing.
    """
    one = Constant(1.0, "", "what was measured is what is reached", "high")
    kinds = {row.kind for row in rows}
    hw = replace(base, measured=())  # by kernels of another machine
    if "product" in kinds or "attention" in kinds:
        rates = {k: scaled(c, base.matrix_efficiency) for k, c in base.matrix.items()}
        for dtype in {r.dtype for r in rows if r.kind in ("product", "attention")} - set(rates):
            rates[dtype] = rates["float32"]
        hw = replace(
            hw,
            matrix=rates,
            matrix_efficiency=one,
            product_ramp=hw.product_ramp or START,
            attention_forward=hw.attention_forward and scaled(hw.attention_forward, 1 / base.matrix_efficiency),
            attention_backward=hw.attention_backward and scaled(hw.attention_backward, 1 / base.matrix_efficiency),
        )
    if "attention" in kinds:
        hw = replace(
            hw,
            attention_forward=hw.attention_forward or one,
            attention_backward=hw.attention_backward or one,
            attention_ramp=hw.attention_ramp or START,
        )
    if "vector" in kinds:
        hw = replace(
            hw,
            vector={k: scaled(c, base.vector_efficiency) for k, c in base.vector.items()},
            vector_efficiency=one,
            memory_bandwidth=scaled(base.memory_bandwidth, base.memory_efficiency),
            cache_bandwidth=base.cache_bandwidth and scaled(base.cache_bandwidth, base.memory_efficiency),
            memory_efficiency=one,
        )
    crossed = tiers_measured(hw, rows)
    tiers = [
        replace(t, bandwidth=scaled(t.bandwidth, t.efficiency), efficiency=one) if t.name in crossed else t
        for t in hw.tiers
    ]
    return replace(hw, tiers=tuple(tiers))


def scaled(constant: Constant, factor: float) -> Constant:
    """A constant times a number, from the same source."""
    return Constant(constant * factor, constant.unit, constant.source, constant.confidence, constant.spread)


def spread_of_kind(rows: list[Row]) -> dict[str, float]:
    """Kind -> median spread of its timings."""
    kinds = defaultdict(list)
    for row in rows:
        kinds[row.kind].append(row.spread)
    return {kind: float(np.median(values)) for kind, values in kinds.items()}
