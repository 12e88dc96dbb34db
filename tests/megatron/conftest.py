import pytest

pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")


@pytest.fixture(scope="module")
def undone_at_the_end():
    """Megatron-core is after the tests of a module as it was before: each application looks at all of its functions."""
    import mindspeed_fx.megatron

    yield
    mindspeed_fx.megatron.undo()


@pytest.fixture
def on_one_rank(undone_at_the_end):
    """The adaptor's patches, which tests of a module share, and one rank of Megatron."""
    import mindspeed_fx.megatron
    from tests.megatron.gpt_models import start

    mindspeed_fx.megatron.apply()
    start()


@pytest.fixture(autouse=True)
def adaptor(on_one_rank):
    """What each test has unless its folder says otherwise."""
