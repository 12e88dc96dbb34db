import pytest
import torch.distributed as dist


@pytest.fixture
def ranks():
    """``ranks(n)``: a fake process group of ``n`` ranks, and all of them in this process (LocalTensorMode)."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(n):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
        return LocalTensorMode(n)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
