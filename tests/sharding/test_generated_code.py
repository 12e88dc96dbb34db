"""Several layers under a plan, in generated code: what is between their collectives is shared, joined and reordered."""

from __future__ import annotations

import pytest

from tests import ranks
from tests.sharding import dynamic_ranks


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_encoder_and_a_decoder_of_three_layers_each(tmp_path):
    """Loss and gradients of four processes are one device's."""
    sizes = [(4, 16)]
    args = (str(tmp_path / "store"), "t5", {"tp_x": 2, "tp_y": 2}, "tp_2d", sizes, False, 1, "inductor")
    ranks.spawn(dynamic_ranks.worker, args, nprocs=4)
