"""Tables of devices that were measured here (``mindspeed-fx calibrate``): their files, and how they are found.

A file is JSON, one for each device and, for a processor, number of threads; it holds the constants that were fitted,
the name of the table that has the others, and the products and attention kernels that were timed. Its name in
:func:`mindspeed_fx.cost.hardware.hardware` ends in a digest of these, so that what was compiled for an earlier
calibration is not taken for this one, and ranks with different tables are noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import platform
import re
import warnings
from typing import Any, Mapping

from mindspeed_fx.cost.device import Constant, Hardware
from mindspeed_fx.cost.measured import MeasuredRow
from mindspeed_fx.private_files import make_private, write_whole

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class CalibratedTable:
    """What a file holds."""

    target: str
    """"cpu", "cuda" or "npu"."""
    device: str
    """As :func:`device_name` gives it."""
    base: str
    """The documented table that the constants replace some of."""
    constants: Mapping[str, Constant]
    """Path of :meth:`Hardware.constants` -> value."""
    fitted: tuple[str, ...]
    """Kinds of measurement behind the constants."""
    node: int
    """Ranks in one machine."""
    note: str
    """When, with which torch, and how well the fit explains its measurements."""
    measured: tuple[MeasuredRow, ...] = ()
    """Kernels that correct the formulas; those of the base, of another machine, do not."""

    @property
    def name(self) -> str:
        """Of the device in the cost model."""
        kernels = [dataclasses.astuple(row) for row in self.measured]
        constants = {k: float(v) for k, v in sorted(self.constants.items())}
        values = json.dumps([self.base, self.device, constants, *kernels])
        return f"{self.base}-calibrated-{hashlib.sha256(values.encode()).hexdigest()[:8]}"

    def hardware(self, base: Hardware) -> Hardware:
        """``base`` with the constants of this table."""
        result = dataclasses.replace(with_constants(base, self.constants), name=self.name, title=self.device)
        values = {"fitted": self.fitted, "node": self.node, "notes": (*base.notes, self.note)}
        return dataclasses.replace(result, **values, measured=self.measured)


def with_constants(base: Hardware, constants: Mapping[str, Constant]) -> Hardware:
    """``base`` with other constants, by their paths ("launch", "matrix.bfloat16", "tiers.ethernet.bandwidth").

    Raises:
        ValueError: the device has no constant of that path.
    """
    values: dict[str, Any] = {}
    tiers = {tier.name: tier for tier in base.tiers}
    for path, constant in constants.items():
        first, *rest = path.split(".")
        if first in ("matrix", "vector") and len(rest) == 1:
            values.setdefault(first, dict(getattr(base, first)))[rest[0]] = constant
        elif first == "tiers" and len(rest) == 2 and rest[0] in tiers and hasattr(tiers[rest[0]], rest[1]):
            tiers[rest[0]] = dataclasses.replace(tiers[rest[0]], **{rest[1]: constant})
        elif not rest and isinstance(getattr(base, first, first), (Constant, type(None))):
            values[first] = constant
        else:
            raise ValueError(f"{base.name} has no constant {path!r}; it has: {', '.join(base.constants())}")
    return dataclasses.replace(base, **values, tiers=tuple(tiers[tier.name] for tier in base.tiers))


def directory() -> pathlib.Path:
    """$MINDSPEED_FX_HARDWARE, else ``mindspeed_fx/hardware`` in the user's cache directory."""
    if own := os.environ.get("MINDSPEED_FX_HARDWARE"):
        return pathlib.Path(own)
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache, "mindspeed_fx", "hardware")


def device_name(target: str) -> str:
    """What tells the device at hand from others: the driver's name of it, or the processor's with torch's threads.

    Raises:
        RuntimeError: there is no such device.
    """
    import torch

    if target == "cpu":
        return f"{_processor()}, {torch.get_num_threads()} threads"
    return str((torch.cuda if target == "cuda" else torch.npu).get_device_name())  # type: ignore[attr-defined]


def _processor() -> str:
    """Linux keeps the model's name in a file; elsewhere Python knows at least the architecture."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def path_of(target: str, device: str) -> pathlib.Path:
    """The file of a device."""
    return directory() / f"{target}-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def save(table: CalibratedTable, path: pathlib.Path | None = None) -> pathlib.Path:
    """Write a table whole or not at all; returns the file, by default the one that :func:`load` finds."""
    path = path or path_of(table.target, table.device)
    make_private(path.parent)
    values = dataclasses.asdict(table)
    values["constants"] = {
        k: {
            "value": float(c),
            **{name: getattr(c, name) for name in ("unit", "source", "confidence", "spread")},
        }
        for k, c in table.constants.items()
    }
    write_whole(path, json.dumps({"format": FORMAT, **values}, indent=1) + "\n", 0o644)
    return path


def read(path: str | os.PathLike) -> CalibratedTable:
    """The table in a file.

    Raises:
        ValueError: the file is no table, or one of another version; the message names it.
        OSError: it cannot be read.
    """
    data = pathlib.Path(path).read_bytes()
    again = "; `mindspeed-fx calibrate` writes it anew"
    try:
        values = json.loads(data)
        if values.pop("format") != FORMAT:
            raise ValueError("another version of the package wrote it")
        constants = {k: Constant(c.pop("value"), **c) for k, c in values.pop("constants").items()}
        kernels = tuple(MeasuredRow(**{**row, "sizes": tuple(row["sizes"])}) for row in values.pop("measured", ()))
        table = CalibratedTable(**{**values, "fitted": tuple(values["fitted"])}, constants=constants, measured=kernels)
        _check(table)
        return table
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise ValueError(f"{path} is no calibrated table ({type(e).__name__}: {e}){again}") from None


def _check(table: CalibratedTable) -> None:
    """What no calibration writes, and what would make times of any sign.

    Raises:
        ValueError: which value is wrong.
    """
    if table.target not in ("cpu", "cuda", "npu"):
        raise ValueError(f"target is {table.target!r}; valid: cpu, cuda, npu")
    if isinstance(table.node, bool) or not isinstance(table.node, int) or table.node < 1:
        raise ValueError(f"node is {table.node!r}; a number of ranks from 1 on is expected")
    for name, constant in table.constants.items():
        if not 0 <= constant < math.inf:
            raise ValueError(f"{name} is {float(constant)}; a number from 0 on is expected")


def find(target: str) -> CalibratedTable | None:
    """The table of the device at hand, if it was calibrated; a file that cannot be used is named in one warning."""
    path = path_of(target, device_name(target))
    if not path.exists():
        return None
    try:
        return read(path)
    except (ValueError, OSError) as e:
        warnings.warn(f"{e}; the documented table is taken", stacklevel=3)
        return None


def every() -> list[CalibratedTable]:
    """All tables that can be read, of any device."""
    tables = []
    for path in sorted(directory().glob("*.json")):
        try:
            tables.append(read(path))
        except (ValueError, OSError):  # :func:`find` says so, if it is the one that is asked for
            continue
    return tables
