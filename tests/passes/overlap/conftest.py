"""Process groups without processes."""

import pytest
import torch.distributed as dist


@pytest.fixture
def fake_world():
    """Rank 0 of two: graphs and their order; collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def lone_world():
    """A real group of one rank: every collective runs and gives its input back."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
