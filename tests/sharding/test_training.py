"""Training under plans is training on one device: thirty steps of AdamW with dropout, accumulation and clipping, in
float64; and a checkpoint of any plan loads under any other.
"""

from __future__ import annotations

import json

import pytest

from tests import ranks
from tests.sharding import training_ranks

TOLERANCE = 1e-7
pytestmark = pytest.mark.slow  # four processes


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("experts", [False, True])
def test_thirty_steps_and_every_checkpoint_under_every_plan(experts, tmp_path):
    plans = list(training_ranks.EXPERTS if experts else training_ranks.PLANS)
    folder = tmp_path / "saved"
    folder.mkdir()
    args = (str(tmp_path / "store"), str(folder), plans, experts, training_ranks.STEPS)
    ranks.spawn(training_ranks.worker, args, nprocs=training_ranks.RANKS)
    found = json.loads((folder / "results").read_text())
    assert len(found) == len(plans) + len(plans) ** 2
    for key, result in found.items():
        print(key, result)
        assert 5 <= result.pop("clipped", 10) < 30 and result.pop("moved", 1) > 0.1, "nothing was clipped, or moved"
        assert max(result.values()) <= TOLERANCE, (key, result)
