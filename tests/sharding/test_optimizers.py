"""Every optimizer of torch under plans: three steps are those of one device, or it is refused by name."""

from __future__ import annotations

import json

import pytest
import torch.multiprocessing as mp

import optimizer_ranks
from mindspeed_fx.passes.sharding.optimizers import REFUSED


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    mp.spawn(optimizer_ranks.worker, (str(folder / "store"), str(folder / "results")), nprocs=optimizer_ranks.RANKS)
    return json.loads((folder / "results").read_text())


@pytest.mark.parametrize("row", [*optimizer_ranks.OPTIMIZERS, *optimizer_ranks.CLIPPED])
def test_steps_are_those_of_one_device(results, row):
    name = optimizer_ranks.OPTIMIZERS.get(row, ("SGD", {}))[0]
    for plan in optimizer_ranks.PLANS:
        result = results[f"{plan}|{row}"]
        if name in REFUSED:
            assert result["error"].startswith(f'ShardingError: torch.optim.{name} cannot step the parameters of a model that plan "{plan}" divides'), (plan, result)
        elif result.get("alone"):
            assert result["error"].split(":")[0] == result["alone"].split(":")[0], (plan, result)  # torch itself refuses these settings
        else:
            assert result.get("apart", 1) <= 1e-10 and result["state"] <= 1e-10 and result["moved"] > 1e-6, (plan, result)
