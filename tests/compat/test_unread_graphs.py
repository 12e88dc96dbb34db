"""AOTAutograd's graphs are written as text where a log takes them, and not for nobody."""

from __future__ import annotations

import pytest
import torch


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
