import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def adaptor():
    """The adaptor, and no process groups: a rank is a fork of this process and makes its own."""
    import mindspeed_fx.megatron

    mindspeed_fx.megatron.apply()
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    yield
    mindspeed_fx.megatron.undo()
