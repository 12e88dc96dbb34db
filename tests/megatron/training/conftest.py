import pytest


@pytest.fixture(autouse=True)
def adaptor():
    """Takes the place of the fixture for one process: runs have processes of their own."""
