"""Measures the device at hand and fits the cost model's constants to it."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch

from mindspeed_fx import arguments
from mindspeed_fx.cost import calibrated
from mindspeed_fx.cost.calibrated import CalibratedTable
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.hardware import documented, hardware
from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.planning.calibrate import cases, collectives, measure
from mindspeed_fx.planning.calibrate.cases import DTYPES, KINDS, Case, Row
from mindspeed_fx.planning.calibrate.fitting import Fit, fit
from mindspeed_fx.planning.calibrate.timing import BUSY, NOISE

DEVICES = ("cpu", "cuda", "npu")
TYPES = (*DTYPES, "float16", "float64")
SUBSTITUTES = {"cuda": "h100", "npu": "ascend910b2", "cpu": "cpu"}
"""The table that gives what is not measured, such as sizes of caches, to a device that has none."""
NOISY_SHARE = 0.25
"""Share of noisy rows from which on a calibration is refused."""


class NoisyError(RuntimeError):
    """The machine did something else: timings vary too much to be fitted."""


@dataclass(frozen=True)
class Calibration:
    """What was measured, the constants, and where they are."""

    table: CalibratedTable
    fit: Fit
    base: Hardware
    path: Path | None
    """The file; None: nothing was saved."""


def calibrate(
    device: str | None = None,
    *,
    seconds: float = 60.0,
    kinds: tuple[str, ...] = KINDS,
    dtypes: tuple[str, ...] = DTYPES,
    small: bool = False,
    path: str | os.PathLike | None = None,
    save: bool = True,
    accept_noise: bool = False,
    base: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Calibration | None:
    """Measure this machine's device and make it a table of the cost model, which every ``hardware=None`` then means.

    Under torchrun collectives are measured too, and rank 0 goes on alone; the others return None.

    Args:
        device: "cpu", "cuda" or "npu"; None: the accelerator that is here, else the processor.
        seconds: of timing, about; compiling the cases comes to it (on a processor a minute or two).
        kinds: "product", "attention", "vector", "launch"; constants of others stay as documented.
        dtypes: "float32", "bfloat16", "float16", "float64"; types that are left out keep their documented rates.
        small: a few small cases of each kind, to try it out.
        path: of the file; None: where the cost model finds it.
        save: write the file.
        accept_noise: take every timing once, without waiting for a quiet machine, and fit whatever comes of it.
        base: the table that gives what is not measured; None: the device's own, or the nearest.
        progress: told what is timed next.

    Raises:
        OptionError: a bad argument, or no such device.
        NoisyError: a quarter of the timings vary by more than 25 % between their quartiles, or were taken while other
            processes had more than 10 % of the processor.
        ImportError: scipy is not installed.
    """
    target = _device(device)
    for name, values, valid in (("kinds", kinds, KINDS), ("dtypes", dtypes, TYPES)):
        if not values or not set(values) <= set(valid):
            wrong = next((v for v in values if v not in valid), "")
            raise OptionError(f"{name} is {values!r}; valid: {', '.join(valid)}{nearest(wrong, valid)}")
        if len(set(values)) < len(values):
            raise OptionError(f"{name} is {values!r}, which has one twice; valid: each once, of {', '.join(valid)}")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise OptionError(f"seconds is {seconds!r}; valid: a number above 0")
    if path is not None:
        arguments.check_new_file("path", path)
    start = _base(target, base)
    at = torch.device(target, int(os.environ.get("LOCAL_RANK", "0"))) if target != "cpu" else torch.device("cpu")
    if target != "cpu":
        getattr(torch, target).set_device(at)
    started = collectives.start_group(target)
    try:
        rows = collectives.measure_collectives(at, progress)
        node = collectives.local_ranks() if rows else start.node
        is_first = not rows or torch.distributed.get_rank() == 0
    finally:
        if started:
            torch.distributed.destroy_process_group()
    if not is_first:
        return None
    chosen = cases.cases_for(target, kinds, dtypes, small)
    rows += _without_calls(target, at, chosen, seconds, 1 if accept_noise else measure.TRIES, progress)
    check_noise(rows, accept_noise)
    return _table(target, dataclasses.replace(start, node=node), rows, path, save, accept_noise)


def _without_calls(
    target: str, at: torch.device, chosen: list[Case], seconds: float, tries: int, progress: Callable[[str], None]
) -> list[Row]:
    """Rows of the cases, less what a call of a compiled graph costs whatever is in it."""
    share = seconds / (len(chosen) + 1 + 2 * (target != "cpu"))
    forward, backward = measure.measure_case(cases.EMPTY, at, share, tries)
    call = {"forward": forward.seconds, "backward": backward.seconds}
    rows = measure.measure_cases(chosen, at, share, progress, tries)
    rows = [dataclasses.replace(r, seconds=max(r.seconds - call[r.stage], r.seconds / 10)) for r in rows]
    return rows + measure.measure_copies(at, share, progress)


def check_noise(rows: list[Row], accept: bool) -> None:
    """Raises :class:`NoisyError` where too many timings are noisy, unless that is accepted."""
    noisy = [r for r in rows if r.is_noisy]
    if not accept and len(noisy) > NOISY_SHARE * len(rows):
        worst = max(noisy, key=lambda r: r.spread)
        raise NoisyError(
            f"{len(noisy)} of {len(rows)} timings vary by more than {NOISE:.0%} between their quartiles (most: "
            f"{worst.kind} {worst.label}, {worst.spread:.0%}), or other processes took more than {BUSY:.0%} of the "
            "processor meanwhile; stop what else runs on this machine, or accept it by --accept-noise "
            "(accept_noise=True)"
        )


def _table(
    target: str, base: Hardware, rows: list[Row], path: str | os.PathLike | None, save: bool, noisy: bool
) -> Calibration:
    day, name = datetime.date.today(), calibrated.device_name(target)
    source = f"calibrated on {name}, torch {torch.__version__}, {day}"
    result = fit(base, rows, source)
    table = CalibratedTable(
        target=target,
        device=name,
        base=base.name,
        constants=result.constants,
        fitted=tuple(dict.fromkeys(r.kind for r in rows)),
        node=base.node,
        note=f"calibrated {day} with torch {torch.__version__}: {len(rows)} timings, median error of the fit "
        f"{result.median_error():.0%}",
        measured=result.measured(source, noisy),
    )
    where = calibrated.save(table, Path(path) if path is not None else None) if save else None
    return Calibration(table, result, base, where)


def _device(name: str | None) -> str:
    if name is None:
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        name = "cpu" if here is None else {"privateuseone": "npu"}.get(here.type, here.type)
    if name not in DEVICES:
        raise OptionError(f"device is {name!r}; valid: {', '.join(DEVICES)}{nearest(str(name), DEVICES)}")
    module = getattr(torch, name, None)
    if name != "cpu" and (module is None or not module.is_available()):
        raise OptionError(f'device is "{name}", and there is none here; valid: cpu')
    return name


def _base(target: str, name: str | None) -> Hardware:
    """The table that the constants replace some of; the memory is the device's own."""
    known = name or documented(target)
    base = hardware(known or SUBSTITUTES[target])
    if base.target != target:
        raise OptionError(f'base is "{name}", a {base.target}; valid: a table of a {target}')
    return base
