import pytest


@pytest.fixture(autouse=True)
def adaptor():
    """Flags need neither Megatron-core nor its patches; tests that do ask for them: ``usefixtures("on_one_rank")``."""
