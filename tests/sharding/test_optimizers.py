"""Every optimizer of torch under plans: three steps are those of one device, or it is refused by name."""

from __future__ import annotations

import json

import pytest

from mindspeed_fx.sharding.optimizers import REFUSED, REFUSED_FUSED
from tests import ranks
from tests.sharding import optimizer_ranks

pytestmark = pytest.mark.slow  # four processes
TWO_DIMENSIONS = ["tp_2d"]


def results(folder, plans):
    ranks.spawn(
        optimizer_ranks.worker, (str(folder / "store"), str(folder / "results"), plans), nprocs=optimizer_ranks.RANKS
    )
    return json.loads((folder / "results").read_text())


@pytest.mark.parametrize("plans", [TWO_DIMENSIONS, [p for p in optimizer_ranks.PLANS if p not in TWO_DIMENSIONS]])
def test_steps_are_those_of_one_device(plans, tmp_path):
    found = results(tmp_path, plans)
    assert len(found) == len(plans) * (len(optimizer_ranks.OPTIMIZERS) + len(optimizer_ranks.CLIPPED))
    for key, result in found.items():
        plan, row = key.split("|")
        name, settings = optimizer_ranks.OPTIMIZERS.get(row, ("SGD", {}))
        fused = "(fused=True)" if settings.get("fused") and name in REFUSED_FUSED else ""
        if name in REFUSED or fused:
            says = f'ShardingError: torch.optim.{name}{fused} cannot step parameters that plan "{plan}" divides'
            assert result["error"].startswith(says), (key, result)
        elif result.get("alone"):
            alone, divided = (
                result[k].split(":")[0] for k in ("alone", "error")
            )  # torch itself refuses these settings
            assert alone == divided, (key, result)
        else:
            assert result.get("apart", 1) <= 1e-10 and result["state"] <= 1e-10, (key, result)
            assert result["moved"] > 1e-6, (key, result)
