"""A process for some of the problems: what it compiled stays in it, so that times are taken without compiling."""

from __future__ import annotations

import logging
import signal
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from . import models
from .measure import OURS, Kernel, told
from .problem import LATE, Late

TRIES = 4
"""Others' values may fill the device for a moment."""


def serve(names: list[str], device: str, elements: int, deadline: float, pipe: Connection) -> None:
    """Compiles and compares ``names``, then times those that are asked for.

    Args:
        deadline: seconds since the epoch, after which nothing is compiled.
        pipe: gets (name, values, (bytes, operations) that it must do or None) of each name, then None. From there on
            it brings (name, rounds), to be answered with times or why there are none, and None, which ends the process.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch._dynamo.config.recompile_limit = 64
    signal.signal(signal.SIGALRM, _late)
    ready: dict[str, Any] = {}
    for name in names:
        values = _prepare(name, device, elements, deadline, ready)
        pipe.send((name, values, getattr(ready.get(name), "work", None)))
    pipe.send(None)
    while (request := pipe.recv()) is not None:
        name, rounds = request
        try:
            pipe.send(ready[name].times(rounds))
        except Exception as error:  # noqa: BLE001  one problem less in the table
            pipe.send(f"failed: {told(error)}")
        if device == "cuda":
            torch.cuda.empty_cache()


def _prepare(name: str, device: str, elements: int, deadline: float, ready: dict[str, Any]) -> dict[str, float | str]:
    for left in reversed(range(TRIES)):
        try:
            signal.setitimer(signal.ITIMER_REAL, max(deadline - time.time(), 1e-3))
            what = models.WholeModel(name) if name in models.MODELS else Kernel(name, device, elements)
            result = what.values()
            signal.setitimer(signal.ITIMER_REAL, 0)
            full = any("OutOfMemory" in str(value) for value in result.values())
            if not full or not left:
                ready[name] = what
                return result
        except Late:
            return {OURS: LATE}
        except Exception as error:  # noqa: BLE001  the table tells it
            result = {OURS: f"failed: {told(error)}"}
            if "OutOfMemory" not in str(result) or not left:
                return result
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if device == "cuda":
                torch.cuda.empty_cache()
        time.sleep(2)
    raise AssertionError


def _late(*_: Any) -> None:
    raise Late
