"""Scenarios that go wrong, for the tests of the runner; in no table."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from tests.scenarios.table import scenario


@scenario("faulty/{}", ("right", "wrong", "raises", "dies", "hangs"))
def run_faulty(run: Any, kind: str) -> Any:
    if kind == "raises":
        raise ValueError("on purpose")
    if kind == "dies":
        os._exit(7)
    if kind == "hangs":
        time.sleep(60)
    return {"x": torch.ones(3), "y": torch.tensor([1.0, 2.0 + (kind == "wrong" and run.name is not None)])}
