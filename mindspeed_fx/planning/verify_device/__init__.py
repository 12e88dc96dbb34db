"""``mindspeed-fx verify-device``: what a user with a new device runs first, and can send back.

Every operator, every kernel of the device's target and every fusion is executed forward and backward and compared with
its reference in float64 on the processor; under torchrun every collective too; then kernels and fusions are timed
beside their unfused forms and the cost model. One file has all of it.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import time
import traceback
from typing import Any, Callable, Iterable

import torch
import torch.distributed as dist

from mindspeed_fx.cost import calibrated
from mindspeed_fx.cost.hardware import documented
from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.planning.calibrate import collectives as groups
from mindspeed_fx.planning.verify_device import checks, collectives, times
from mindspeed_fx.planning.verify_device.checks import Check, Outcome
from mindspeed_fx.planning.verify_device.journal import Journal
from mindspeed_fx.planning.verify_device.place import Place

TARGETS = ("cpu", "cuda", "npu")
KINDS = ("operator", "kernel", "fusion", "collective", "time")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMULATED_HARDWARE = {"cuda": "h100", "npu": "ascend910b2", "cpu": "cpu"}
"""Whose times the cost model gives where the device is not here."""


def verify_device(
    target: str | None = None,
    *,
    out: str = "verify_device.json",
    minutes: float = 10.0,
    kinds: tuple[str, ...] = KINDS,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    only: str = "",
    emulated: bool = False,
    small: bool = False,
    fresh: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any] | None:
    """Run the checks and write ``out``; what another call with the same ``out`` had no time for is run by the next.

    Under torchrun all ranks run the collectives, then rank 0 alone the rest; the others return None.

    Args:
        target: "cpu", "cuda" or "npu"; None: the accelerator that is here, else the processor.
        out: the file; beside it a journal lies until all has been run.
        minutes: after which no check is started; those are "not run", and the journal stays.
        kinds: of :data:`KINDS`.
        dtypes: "float32", "bfloat16", "float16"; the last one is timed.
        only: a regular expression that the key of a check ("kernel/rms_norm 1: npu_rms_norm/bfloat16") has to match.
        emulated: run the target's graphs on the processor: torch_npu's calls by their documented formulas.
        small: time tensors of a few elements, to try it out.
        fresh: forget an earlier journal.
        progress: told the key of each check.

    Returns:
        what the file has.

    Raises:
        OptionError: a bad argument, or no such device.
    """
    _check(minutes, kinds, dtypes, only)
    place = find_place(target, emulated)
    started = groups.start_group("cpu" if emulated else place.target)
    try:
        return _run(place, out, minutes, kinds, tuple(DTYPES[d] for d in dtypes), only, small, fresh, progress)
    finally:
        if started and dist.is_initialized():
            dist.destroy_process_group()


def _run(
    place: Place,
    out: str,
    minutes: float,
    kinds: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
    only: str,
    small: bool,
    fresh: bool,
    progress: Callable[[str], None],
) -> dict[str, Any] | None:
    end = time.monotonic() + 60 * minutes
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    pattern = re.compile(only)
    among = []
    if "collective" in kinds and ranks > 1:
        among = [(c, _outcome(c, place)) for c in collectives.checks(place.target, dtypes) if pattern.search(c.key)]
    if ranks > 1 and dist.get_rank() != 0:
        return None
    journal = Journal(out, _about(place, ranks, kinds, dtypes, only, small), fresh)
    for check, outcome in among:
        journal.finish(check.key, *_state(outcome), **_row(check, outcome))
    rest: list[Iterable[Check]] = [checks.checks(place.target, dtypes)]
    rest += [times.checks(place.target, dtypes[-1], small)] if "time" in kinds else []
    missing = []
    for check in (c for part in rest for c in part if c.kind in kinds and pattern.search(c.key)):
        if check.key in journal.results:
            continue
        if time.monotonic() > end:
            missing.append(check.key)
            continue
        progress(check.key)
        journal.start(check.key)
        outcome = _outcome(check, place)
        journal.finish(check.key, *_state(outcome), **_row(check, outcome))
    if "collective" in kinds and ranks == 1:
        for kind in collectives.KINDS:
            reason = "one rank: torchrun --nproc-per-node=N -m mindspeed_fx.cli verify-device runs it"
            journal.finish(f"collective/{kind}", "not run", kind="collective", name=kind, dtype="all", reason=reason)
    return journal.save(missing)


def _outcome(check: Check, place: Place) -> Outcome:
    """Of a check that may raise anything: a device that refuses a call is what is to be found out."""
    try:
        return check.run(place)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:500]
        return Outcome(problem=f"{text} ({os.path.basename(last.filename)}:{last.lineno})")


def _state(outcome: Outcome) -> tuple[str]:
    return ("failed" if outcome.problem else "not run" if outcome.reason else "passed",)


def _row(check: Check, outcome: Outcome) -> dict[str, Any]:
    row = {
        "kind": check.kind,
        "name": check.name,
        "dtype": check.dtype,
        "error": _number(outcome.error),
        "tolerance": _number(outcome.tolerance),
        "problem": outcome.problem,
        "reason": outcome.reason or None,
        **(outcome.detail or {}),
    }
    return {k: v for k, v in row.items() if v is not None}


def _number(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return value if value is None or math.isfinite(value) else str(value)


def find_place(target: str | None, emulated: bool) -> Place:
    """The device that is asked for.

    Raises:
        OptionError: there is none, or none of that name.
    """
    if target is None:
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        target = "cpu" if here is None else {"privateuseone": "npu"}.get(here.type, here.type)
    if target not in TARGETS:
        raise OptionError(f"device is {target!r}; valid: {', '.join(TARGETS)}{nearest(str(target), TARGETS)}")
    if emulated or target == "cpu":
        return Place(target, torch.device("cpu"), EMULATED_HARDWARE[target], emulated and target != "cpu")
    module = getattr(torch, target, None)
    if module is None or not module.is_available():
        raise OptionError(f'device is "{target}", and there is none here; valid: cpu, or --emulated with {target}')
    device = torch.device(target, int(os.environ.get("LOCAL_RANK", "0")))
    module.set_device(device)
    return Place(target, device, documented(target))


def _about(
    place: Place, ranks: int, kinds: tuple[str, ...], dtypes: tuple[torch.dtype, ...], only: str, small: bool
) -> dict[str, Any]:
    """What the results depend on."""
    packages = ("mindspeed-fx", "torch", "torch_npu", "triton", "triton-ascend")
    return {
        "device": "emulated on the processor" if place.is_emulated else calibrated.device_name(place.target),
        "target": place.target,
        "is_emulated": place.is_emulated,
        "cost_model": place.hardware,
        "ranks": ranks,
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}, **_toolkits()},
        "asked": {"kinds": list(kinds), "dtypes": [str(d)[6:] for d in dtypes], "only": only, "small": small},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _toolkits() -> dict[str, str | None]:
    cann = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    return {"cuda": torch.version.cuda, "cann": cann}


def _check(minutes: Any, kinds: tuple[str, ...], dtypes: tuple[str, ...], only: str) -> None:
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not 0 < minutes < math.inf:
        raise OptionError(f"minutes is {minutes!r}; valid: a number above 0")
    for name, values, valid in (("kinds", kinds, KINDS), ("dtypes", dtypes, tuple(DTYPES))):
        wrong = [v for v in values if v not in valid]
        if wrong or not values or len(set(values)) < len(values):
            close = nearest(str(wrong[0]), valid) if wrong else ""
            raise OptionError(f"{name} is {','.join(values)!r}; valid: {', '.join(valid)}, each once{close}")
    try:
        re.compile(only)
    except re.error as error:
        expected = "one as in rms_norm is expected"
        raise OptionError(f"only is {only!r}, no regular expression ({error}); {expected}") from None
