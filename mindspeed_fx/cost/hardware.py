"""Devices as the cost model sees them: rates, sizes and links, each with its unit, source and confidence.

    hw = hardware("Ascend910B2")
    hw.matrix_rate("bfloat16"), hw.memory_rate        # what a good kernel reaches: FLOP/s, bytes/s
    hw.matrix["bfloat16"].source                      # where the peak comes from

Names are matched whatever their case, blanks, "-" and "_"; :func:`detect` finds the name of the device at hand.
"""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import dataclass, field, fields
from typing import Any, Mapping

from mindspeed_fx.options import OptionError, nearest

CONFIDENCES = ("high", "medium", "low")
MAKERS = ("ascend", "nvidia", "cpu")


class Constant(float):
    """A number that knows where it comes from; in arithmetic a plain float.

    Attributes:
        unit: "FLOP/s", "B/s", "B", "s", "Hz" or "" for counts and fractions.
        source: document or repository, or "derived: ..." / "assumed: ...".
        confidence: "high" (vendor, or several sources agree), "medium" (one good source), "low" (quoted or assumed).
    """

    unit: str
    source: str
    confidence: str

    def __new__(cls, value: float, unit: str, source: str, confidence: str) -> "Constant":
        if confidence not in CONFIDENCES:
            raise ValueError(f"confidence is {confidence!r}; valid: {', '.join(CONFIDENCES)}")
        self = super().__new__(cls, value)
        self.unit, self.source, self.confidence = unit, source, confidence
        return self

    def __getnewargs__(self) -> tuple:
        return float(self), self.unit, self.source, self.confidence

    def __repr__(self) -> str:
        return f"{float(self):g} {self.unit} ({self.confidence}: {self.source})"


@dataclass(frozen=True)
class Tier:
    """One level of the network: what connects ``ranks`` ranks that the level below does not."""

    name: str
    topology: str
    """"mesh": every pair of ranks has one link of its own, so that a rank uses as many links as it has peers in the group.
    "switch": each rank has one port, whole for any peer."""
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
    matrix_cores: int = 0
    vector_cores: int = 0
    notes: tuple[str, ...] = field(default=())

    def matrix_rate(self, dtype: Any) -> float:
        """FLOP/s that matrix products of this type reach. Types that the table lacks: see :meth:`substitute`."""
        return self.matrix[self.substitute("matrix", dtype)] * self.matrix_efficiency

    def vector_rate(self, dtype: Any) -> float:
        """FLOP/s that pointwise work in this type reaches."""
        return self.vector[self.substitute("vector", dtype)] * self.vector_efficiency

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
        found: dict[str, Constant] = {}

        def visit(path: str, value: Any) -> None:
            if isinstance(value, Constant):
                found[path] = value
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
        return found


@functools.cache
def _tables() -> tuple[dict[str, Hardware], dict[str, str]]:
    made, aliases = {}, {}
    for maker in MAKERS:
        module = importlib.import_module(f"mindspeed_fx.cost.tables.{maker}")
        made.update({hw.name: hw for hw in module.HARDWARE})
        aliases.update(module.ALIASES)
    return made, aliases


def names() -> tuple[str, ...]:
    """The names of every device that has a table, without aliases."""
    return tuple(_tables()[0])


def canonical(name: str) -> str | None:
    """The table's name for ``name`` ("Ascend910B2", "910b2", "NVIDIA H100 80GB HBM3"); None when there is no table."""
    made, aliases = _tables()
    key = re.sub(r"[\s_-]+", "", str(name).lower())
    keys = {re.sub(r"[\s_-]+", "", k.lower()): v for k, v in (*((n, n) for n in made), *aliases.items())}
    return keys.get(key) or keys.get(f"ascend{key}")


def hardware(name: "str | Hardware") -> Hardware:
    """The device called ``name``; a :class:`Hardware` is returned as it is.

    Raises:
        OptionError: no table has that name; the message has the nearest one and all of them.
    """
    if isinstance(name, Hardware):
        return name
    known = canonical(name) if isinstance(name, str) else None
    if known is None:
        valid = names()
        raise OptionError(f'option "hardware" is {name!r}; valid: {", ".join(valid)}{nearest(str(name).lower(), (*valid, *_tables()[1]))}')
    return _tables()[0][known]


def register(hw: Hardware, replace: bool = False) -> Hardware:
    """Add a device of the user's own, for example what :func:`measure_cpu` found, under ``hw.name``.

    Raises:
        OptionError: the name is taken and ``replace`` is not set.
    """
    if canonical(hw.name) and not replace:
        raise OptionError(f'hardware "{hw.name}" is there already; register(..., replace=True) replaces it')
    _tables()[0][canonical(hw.name) or hw.name] = hw
    return hw


def detect(target: str) -> tuple[str | None, str]:
    """The name of the device at hand for ``target`` ("cpu", "cuda", "npu") and "", or None and why there is none.

    Nothing is measured: the driver is asked for the device's name, and a processor is always "cpu".
    """
    if target == "cpu":
        return "cpu", ""
    import torch

    device = torch.cuda if target == "cuda" else getattr(torch, "npu", None)
    example = f'options={{"hardware": "{"ascend910b2" if target == "npu" else "h100"}"}}'
    if device is None or not device.is_available():
        return None, f"no {target} device is here; name one: {example}"
    try:
        found = device.get_device_name()
    except RuntimeError as e:
        return None, f"the {target} driver does not say its name ({e}); give it: {example}"
    known = canonical(found)
    return (known, "") if known else (None, f'no table for "{found}"; name the nearest of {", ".join(names())}: {example}')


def measure_cpu(name: str = "cpu-measured", seconds: float = 1.0) -> Hardware:
    """A table for this machine, measured now with the threads that torch uses; not registered.

    Args:
        name: of the table.
        seconds: time to spend, about; more is steadier.

    Returns:
        the documented "cpu" table with matrix, vector and memory rates and the launch cost replaced; efficiencies are 1,
        since what is measured is what is reached.
    """
    from mindspeed_fx.cost.tables.cpu import measured

    return measured(hardware("cpu"), name, seconds)
