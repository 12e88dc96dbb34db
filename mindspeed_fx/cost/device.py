"""A device as the cost model sees it: rates, sizes and links, each with its unit, source and confidence."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Mapping

from mindspeed_fx.cost.measured import MeasuredRow

CONFIDENCES = ("high", "medium", "low")


class Constant(float):
    """A number that knows where it comes from; in arithmetic a plain float.

    Attributes:
        unit: "FLOP/s", "B/s", "B", "s" or "" for counts and fractions.
        source: document or repository, or "derived: ..." / "assumed: ...".
        confidence: "high" (vendor, or several sources agree), "medium" (one good source), "low" (quoted or assumed).
        spread: relative standard deviation of a fitted constant; 0: not fitted.
    """

    unit: str
    source: str
    confidence: str
    spread: float

    def __new__(cls, value: float, unit: str, source: str, confidence: str, spread: float = 0.0) -> "Constant":
        if confidence not in CONFIDENCES:
            raise ValueError(f"confidence is {confidence!r}; valid: {', '.join(CONFIDENCES)}")
        self = super().__new__(cls, value)
        self.unit, self.source, self.confidence, self.spread = unit, source, confidence, spread
        return self

    def __getnewargs__(self) -> tuple:
        return float(self), self.unit, self.source, self.confidence, self.spread

    def __repr__(self) -> str:
        spread = f" +- {100 * self.spread:.0f} %" if self.spread else ""
        return f"{float(self):g} {self.unit}{spread} ({self.confidence}: {self.source})"


def fitted_constant(value: float, unit: str, source: str, spread: float) -> Constant:
    """A constant of a fit, as sure as its spread is small."""
    confidence = "high" if spread <= 0.1 else "medium" if spread <= 0.3 else "low"
    return Constant(value, unit, source, confidence, spread)


@dataclass(frozen=True)
class Tier:
    """One level of the network: what connects ``ranks`` ranks that the level below does not."""

    name: str
    topology: str
    """"mesh": every pair of ranks has one link of its own, so that a rank uses as many links as it has peers in the
    group. "switch": each rank has one port, whole for any peer."""
    bandwidth: Constant
    """B/s in one direction: of one link in a mesh, of a rank's port at a switch."""
    efficiency: Constant
    """Share of ``bandwidth`` that collectives reach."""
    latency: Constant
    """Seconds of one message."""
    ranks: int | None = None
    """How many ranks it reaches, those of the tiers below included; None: all."""

    @property
    def rate(self) -> float:
        """B/s reached, in one direction."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, eq=False)
class Hardware:
    """One rank's device: a card, a GPU, one die of a package of two, or a processor."""

    name: str
    title: str
    target: str
    """"npu", "cuda" or "cpu"."""
    matrix: Mapping[str, Constant]
    """dtype name ("bfloat16") -> peak FLOP/s of the cube or tensor cores; on a cpu of its vector units."""
    vector: Mapping[str, Constant]
    """dtype name -> peak FLOP/s of the vector units."""
    memory_bandwidth: Constant
    """B/s of device memory."""
    memory: Constant
    """Bytes of device memory."""
    matrix_efficiency: Constant
    vector_efficiency: Constant
    memory_efficiency: Constant
    launch: Constant
    """Seconds that each kernel costs whatever its size."""
    host_bandwidth: Constant
    """B/s between device memory and host memory, one direction."""
    tiers: tuple[Tier, ...]
    """The network, from the inside out."""
    node: int
    """Ranks in one machine."""
    cache: Constant | None = None
    """Bytes of the last-level cache."""
    cache_bandwidth: Constant | None = None
    """B/s at which kernels read what an earlier kernel left in the cache; None: graphs are modelled without a cache."""
    product_ramp: Constant | None = None
    """Rows, columns or terms at which a product runs at half its rate: rate / (1 + ramp (1/m + 1/n + 1/k)); None: at
    its full rate whatever its shape."""
    attention_forward: Constant | None = None
    """Share of the matrix peak that flash attention reaches on long sequences; None: as products."""
    attention_backward: Constant | None = None
    attention_ramp: Constant | None = None
    """Keys at which attention runs at half its rate."""
    matrix_cores: int = 0
    vector_cores: int = 0
    notes: tuple[str, ...] = field(default=())
    fitted: tuple[str, ...] = ()
    """Kinds of measurement that the constants are fitted to."""
    measured: tuple[MeasuredRow, ...] = ()
    """Kernels that were timed alone, which correct the formulas near them (:mod:`mindspeed_fx.cost.measured`)."""

    def matrix_rate(self, dtype: Any, kind: str = "", shape: tuple = ()) -> Any:
        """FLOP/s that matrix products of this type reach. Types that the table lacks: see :meth:`substitute`.

        Args:
            kind: "product", "attention" or "attention_backward" where the work has a name.
            shape: m, n and k of a product; of attention keys first: see :class:`mindspeed_fx.cost.operators.Cost`.
        """
        peak = self.matrix[self.substitute("matrix", dtype)]
        if kind == "product" and self.product_ramp is not None:
            return peak * self.matrix_efficiency / (1 + self.product_ramp * sum(1 / n for n in shape))
        if kind.startswith("attention") and self.attention_forward is not None:
            share = self.attention_forward if kind == "attention" else self.attention_backward
            ramp = self.attention_ramp / shape[0] if self.attention_ramp is not None else 0
            return peak * (share or self.attention_forward) / (1 + ramp)
        return peak * self.matrix_efficiency

    def vector_rate(self, dtype: Any) -> float:
        """FLOP/s that pointwise work in this type reaches."""
        return self.vector[self.substitute("vector", dtype)] * self.vector_efficiency

    @property
    def basis(self) -> str:
        """What stands behind the constants, for every page that shows a time."""
        return f"fitted to {', '.join(self.fitted)}" if len(self.fitted) >= 3 else "by data sheet alone"

    @property
    def memory_rate(self) -> float:
        """B/s that kernels limited by memory reach."""
        return self.memory_bandwidth * self.memory_efficiency

    @property
    def cache_rate(self) -> float:
        """B/s that kernels reach from the cache: the efficiency is that of memory, for lack of a source."""
        return (self.cache_bandwidth or self.memory_bandwidth) * self.memory_efficiency

    def substitute(self, unit: str, dtype: Any) -> str:
        """The row of table ``unit`` ("matrix", "vector") that stands for ``dtype``: itself, else float32, which is the
        slowest row of every device but too fast for float64 where that has none (:mod:`graph` then says so)."""
        table, name = getattr(self, unit), str(dtype).removeprefix("torch.")
        return name if name in table else "float32"

    def constants(self) -> dict[str, Constant]:
        """Every constant by path, such as "matrix.bfloat16" or "tiers.hccs.bandwidth"."""
        results: dict[str, Constant] = {}

        def visit(path: str, value: Any) -> None:
            if isinstance(value, Constant):
                results[path] = value
            elif isinstance(value, Mapping):
                for k, v in value.items():
                    visit(f"{path}.{k}", v)
            elif isinstance(value, Tier):
                for f in fields(value):
                    visit(f"{path}.{value.name}.{f.name}", getattr(value, f.name))
            elif isinstance(value, tuple):
                for v in value:
                    visit(path, v)

        for f in fields(self):
            visit(f.name, getattr(self, f.name))
        return results
