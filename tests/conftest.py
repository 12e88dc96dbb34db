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
