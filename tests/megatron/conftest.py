import pytest

pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")


@pytest.fixture(autouse=True)
def adaptor():
    """The adaptor for this test alone; Megatron-core is as it was afterwards."""
    import mindspeed_fx.megatron
    from tests.megatron.gpt_models import start

    mindspeed_fx.megatron.apply()
    start()
    yield
    mindspeed_fx.megatron.undo()
