"""Graphs are written as text where a log takes them, and not for nobody."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._inductor import codecache
from torch._inductor.utils import fresh_cache


@pytest.mark.parametrize("is_read", [False, True])
def test_graphs_are_written_for_a_log_alone(is_read, monkeypatch):
    written = []
    whole = torch.fx.GraphModule.print_readable
    monkeypatch.setattr(
        torch.fx.GraphModule, "print_readable", lambda self, *a, **k: written.append(1) or whole(self, *a, **k)
    )
    torch._logging.set_logs(aot_joint_graph=is_read)
    try:
        x = torch.ones(3, requires_grad=True)
        step = torch.compile(lambda x: (x * 2).sum(), backend="mindspeed", options={"codegen": "eager"})
        step(x).backward()
    finally:
        torch._logging.set_logs()
    assert bool(written) is is_read and torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.skipif(torch.torch_version.TorchVersion(torch.__version__) < (2, 13), reason="keys are not made here")
@pytest.mark.parametrize("is_read", [False, True])
def test_keys_of_the_cache_are_explained_for_a_log_alone(is_read, monkeypatch):
    explained = []
    whole = codecache.FxGraphCachePickler.debug_lines

    def explain(self, details):
        explained.extend([details] if type(details) is codecache.FxGraphHashDetails else [])  # AOTAutograd's are others
        return whole(self, details)

    monkeypatch.setattr(codecache.FxGraphCachePickler, "debug_lines", explain)
    monkeypatch.setattr(codecache.log, "level", logging.DEBUG if is_read else logging.WARNING)
    codecache.log.manager._clear_cache()
    torch._dynamo.reset()
    with fresh_cache():  # a graph that AOTAutograd's cache holds asks for no key of Inductor's
        y = torch.compile(lambda x: x.sin() + is_read, backend="mindspeed")(torch.zeros(3))
    assert bool(explained) is is_read and torch.equal(y, torch.full((3,), float(is_read)))
