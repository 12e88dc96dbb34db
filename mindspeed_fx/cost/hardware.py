"""Devices as the cost model sees them: rates, sizes and links, each with its unit, source and confidence.

    hw = hardware("Ascend910B2")
    hw.matrix_rate("bfloat16"), hw.memory_rate        # what a good kernel reaches: FLOP/s, bytes/s
    hw.matrix["bfloat16"].source                      # where the peak comes from

Names are matched whatever their case, blanks, "-" and "_"; :func:`detect` finds the name of the device at hand, whose
table ``mindspeed-fx calibrate`` may have measured (:mod:`mindspeed_fx.cost.calibrated`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import warnings
from pathlib import Path
from typing import Any

from mindspeed_fx.cost import calibrated, measured
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.errors import OptionError, nearest

MAKERS = ("ascend", "nvidia", "cpu")


@functools.cache
def _tables() -> tuple[dict[str, Hardware], dict[str, str]]:
    results, aliases = {}, {}
    for maker in MAKERS:
        module = importlib.import_module(f"mindspeed_fx.cost.tables.{maker}")
        results.update({hw.name: hw for hw in (*module.HARDWARE, *getattr(module, "DIES", ()))})
        aliases.update(module.ALIASES)
        rows = Path(str(module.__file__)).with_name(f"{maker}_measured.csv")
        for name, kernels in (measured.read_rows(rows) if rows.exists() else {}).items():
            results[name] = dataclasses.replace(results[name], measured=kernels)
    return results, aliases


def names() -> tuple[str, ...]:
    """The names of every device that has a table, without aliases and without single dies of the 950."""
    dies = {hw.name for hw in _ascend().DIES}
    return tuple(name for name in _tables()[0] if name not in dies)


def _ascend() -> Any:
    return importlib.import_module("mindspeed_fx.cost.tables.ascend")


def canonical(name: str) -> str | None:
    """The table's name for ``name`` ("Ascend910B2", "910b2", "NVIDIA H100 80GB HBM3"); None when there is no table."""
    result, aliases = _tables()
    key = re.sub(r"[\s_-]+", "", str(name).lower())
    keys = {re.sub(r"[\s_-]+", "", k.lower()): v for k, v in (*((n, n) for n in result), *aliases.items())}
    return keys.get(key) or keys.get(f"ascend{key}")


def hardware(name: "str | Hardware") -> Hardware:
    """The device called ``name``; a :class:`Hardware` is returned as it is.

    Raises:
        OptionError: no table has that name; the message has the nearest one and all of them.
    """
    if isinstance(name, Hardware):
        return name
    known = canonical(name) if isinstance(name, str) else None
    if known is None and isinstance(name, str) and _torch_npu_takes(name):
        known = substitute_of(name)
    if known is None and isinstance(name, str):
        known = next((_add(table) for table in calibrated.every() if table.name == name), None)
    if known is None:
        valid = names()
        raise OptionError(
            f'option "hardware" is {name!r}; valid: '
            f"{', '.join(valid)}{nearest(str(name).lower(), (*valid, *_tables()[1]))}"
        )
    return _tables()[0][known]


def _add(table: calibrated.CalibratedTable) -> str:
    """The name of a calibrated table, which :func:`hardware` knows from now on."""
    if table.name not in _tables()[0]:
        _tables()[0][table.name] = table.hardware(hardware(table.base))
    return table.name


def _torch_npu_takes(name: str) -> bool:
    """True for names that torch_npu accepts from a driver: a list of its own, and all that begin as the 950."""
    key = name.lower()
    return key.startswith("ascend950") or key in {n.lower() for n in _ascend().KNOWN_WITHOUT_TABLE}


@functools.cache
def substitute_of(name: str) -> str:
    """The table that stands for an Ascend device without one, by how its name begins; says so in one warning."""
    result = next(table for start, table in _ascend().FAMILIES if name.lower().startswith(start))
    warnings.warn(
        f'the cost model has no table for "{name}"; it is taken for {result}, so that modelled times are those of '
        f'{result}. options={{"hardware": ...}} names another of {", ".join(n for n in names() if "ascend" in n)}',
        stacklevel=3,
    )
    return result


def register(hw: Hardware, replace: bool = False) -> Hardware:
    """Add a device of the user's own under ``hw.name``; ``mindspeed-fx calibrate`` makes one of the device at hand.

    Raises:
        OptionError: the name is taken and ``replace`` is not set.
    """
    if not isinstance(hw, Hardware):
        raise OptionError(f"register: hw is {hw!r}; a Hardware is expected, as in dataclasses.replace(hardware(...))")
    if canonical(hw.name) and not replace:
        raise OptionError(f'hardware "{hw.name}" is there already; register(..., replace=True) replaces it')
    _tables()[0][canonical(hw.name) or hw.name] = hw
    return hw


def detect(target: str) -> tuple[str | None, str]:
    """The name of the device at hand for ``target`` ("cpu", "cuda", "npu") and "", or None and why there is none.

    Nothing is measured: a table that was calibrated here comes first, then the driver is asked for the device's name,
    and a processor is always "cpu". An Ascend device without a table is taken for the nearest of its generation, which
    one warning says.
    """
    import torch

    if target != "cpu":
        device = torch.cuda if target == "cuda" else getattr(torch, "npu", None)
        example = f'options={{"hardware": "{"ascend910b2" if target == "npu" else "h100"}"}}'
        if device is None or not device.is_available():
            return None, f"no {target} device is here; name one: {example}"
    try:
        table = calibrated.find(target)
    except RuntimeError as e:
        return None, f"the {target} driver does not say its name ({e}); give it: {example}"
    if table is not None:
        try:
            return _add(table), ""
        except ValueError as e:  # of another version of the package, with other names
            path = calibrated.path_of(table.target, table.device)
            warnings.warn(f"{path} cannot be used: {e}; the documented table is taken", stacklevel=3)
    result = documented(target)
    return (
        (result, "")
        if result
        else (
            None,
            f'no table for "{calibrated.device_name(target)}"; `mindspeed-fx calibrate` makes one, or name the nearest '
            f"of {', '.join(names())}: {example}",
        )
    )


def documented(target: str) -> str | None:
    """The name of the documented table for the device at hand; None where there is none."""
    if target == "cpu":
        return "cpu"
    name = calibrated.device_name(target)
    known = canonical(name)
    return substitute_of(name) if known is None and target == "npu" else known
