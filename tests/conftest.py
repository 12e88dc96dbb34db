import functools
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests import forks, slow_cases

ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(
    [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
)  # processes that tests start
os.environ["MINDSPEED_FX_HARDWARE"] = os.path.join(ROOT, "build", "no_hardware")  # documented tables alone

LONG = (
    "tests/test_cache.py",
    "tests/test_example.py",
    "tests/ascend/test_npu_kernels.py",
    "tests/ascend/test_sites.py",
    "tests/megatron/test_two_ranks.py",
    "tests/passes/overlap/test_overlap_two_ranks.py",
)
"""Files of long tests: begun first, so that no process has one left when the others are done."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    slow_cases.mark(items)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish():
    forks.time_no_guards()
    forks.leave_imports_alone()


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


@pytest.fixture
def ranks():
    """``ranks(n)``: a fake process group of ``n`` ranks, and all of them in this process (LocalTensorMode)."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(n):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
        return LocalTensorMode(n)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def browser():
    """Chromium, for pages."""
    pytest.importorskip("selenium.webdriver", reason="selenium is not installed (extra browser)")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium and chromedriver are not installed")
    from benchmarks.browser import start_browser

    driver = start_browser()
    yield driver
    driver.quit()


READERS = os.path.join("passes", "fusion", "analysis", "")


@pytest.fixture(autouse=True)
def readers_do_not_write(request, monkeypatch):
    """Where graphs are fused, no graph is edited while a reader of passes/fusion/analysis runs."""
    if not request.node.nodeid.startswith(("tests/passes/fusion", "tests/zoo")):
        yield
        return
    edits = []

    @functools.cache  # of a hundred frames each of a graph's thousands of nodes has
    def is_reader(code):
        return READERS in code.co_filename

    def watched(owner, name):
        edit = getattr(owner, name)

        def run(*args, **kwargs):
            frame = sys._getframe(1)
            while frame is not None and not is_reader(frame.f_code):
                frame = frame.f_back
            if frame is not None:
                edits.append(f"{frame.f_code.co_filename}: {frame.f_code.co_name} calls {name}")
            return edit(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    watched(torch.fx.Graph, "create_node")
    watched(torch.fx.Graph, "erase_node")
    watched(torch.fx.Node, "replace_all_uses_with")
    watched(torch.fx.Node, "replace_input_with")
    yield edits
    assert not edits, edits
