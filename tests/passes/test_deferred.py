"""The code of a large graph is written once, by whoever calls it."""

import torch
import torch.fx as fx

from mindspeed_fx.graph.recompile import defer_recompile, recompile


def test_code_is_written_when_it_is_called(monkeypatch):
    """After its passes a graph module of any class has its code written once, at the first call; others of its kind
    stay as they are.
    """
    graph, other = (fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())) for _ in range(2))
    written, real = [], fx.Graph.python_code
    monkeypatch.setattr(fx.Graph, "python_code", lambda self, *a, **k: written.append(1) or real(self, *a, **k))
    with defer_recompile(graph):
        for node in graph.graph.find_nodes(op="call_module", target="0"):
            node.op, node.target = "call_function", torch.sigmoid
        recompile(graph)
    assert not written
    x = torch.randn(3)
    assert torch.equal(graph(x), x.sigmoid()) and torch.equal(graph(x), x.sigmoid()) and len(written) == 1
    assert torch.equal(other(x), x.relu()) and "sigmoid" in graph.code and len(written) == 1
