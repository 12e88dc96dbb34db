import pytest


@pytest.fixture(autouse=True)
def adaptor():
    """Flags need neither Megatron-core nor its patches; tests that do ask for them."""


@pytest.fixture
def on_one_rank():
    """The adaptor's patches, and one rank of Megatron; ``pytest.mark.usefixtures("on_one_rank")`` asks for them."""
    import mindspeed_fx.megatron
    from tests.megatron.gpt_models import start

    mindspeed_fx.megatron.apply()
    start()
    yield
    mindspeed_fx.megatron.undo()
