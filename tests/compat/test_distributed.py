"""Process groups."""

from __future__ import annotations

import torch.distributed as dist

from mindspeed_fx.compat import distributed
from mindspeed_fx.compat.dtensor import one_of_fake_ranks


def test_ranks_of_a_group_stay_in_their_order():
    with one_of_fake_ranks({"pp": 4}):
        group = distributed.ordered_group([3, 1, 0])
        assert dist.get_process_group_ranks(group) == [3, 1, 0] and dist.get_rank(group) == 2
        assert dist.get_process_group_ranks(dist.new_group([3, 1, 0])) == [0, 1, 3]
