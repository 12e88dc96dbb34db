"""What callers pass to a parallelized model, in two gloo processes: the scenarios of input_ranks.py."""

from __future__ import annotations

import pytest

from tests import ranks
from tests.sharding import input_ranks


@pytest.mark.parametrize("scenarios", [
    "parts checked alone grad_modes_fast",
    pytest.param("copied seeds", marks=pytest.mark.slow),
    pytest.param("nested uneven misused", marks=pytest.mark.slow),
    pytest.param("grad_modes", marks=pytest.mark.slow),
    pytest.param("autocast autocast_attention", marks=pytest.mark.slow),
])  # fmt: skip
def test_scenarios(scenarios, tmp_path):
    ranks.spawn(input_ranks.worker, (str(tmp_path / "store"), scenarios.split()), nprocs=input_ranks.RANKS)
