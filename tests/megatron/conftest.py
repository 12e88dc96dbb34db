import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")


@pytest.fixture(autouse=True)
def adaptor():
    """The adaptor for this test alone; Megatron-core is as it was afterwards."""
    import mindspeed_fx.megatron
    from gpt_models import start

    mindspeed_fx.megatron.apply()
    start()
    yield
    mindspeed_fx.megatron.undo()

