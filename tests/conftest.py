import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Each test compiles anew, from seed 0, with no options in the environment."""
    for name in ("MINDSPEED_FX_OPTIONS", "MINDSPEED_FX_DUMP"):
        monkeypatch.delenv(name, raising=False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_groups_of_others(request):
    """Megatron's tests share process groups, which end before a test that may start its own."""
    if "tests/megatron" not in request.node.nodeid and "torch.distributed" in sys.modules:
        dist = sys.modules["torch.distributed"]
        if dist.is_available() and dist.is_initialized():
            if "megatron.core.parallel_state" in sys.modules:
                sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
            dist.destroy_process_group()
