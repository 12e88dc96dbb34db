"""A graph's code: one that nobody touched is not written again, and every change is seen."""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.report import code


def graph_of():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    graph.output(y)
    y.meta["val"] = torch.ones(2)
    return fx.GraphModule({}, graph), y


def test_a_graph_is_written_once_until_it_is_touched(monkeypatch):
    written = []
    readable = code.readable
    monkeypatch.setattr(code, "readable", lambda gm: written.append(gm) or readable(gm))
    text_of = code.remembering()
    gm, y = graph_of()
    assert text_of(gm) == text_of(gm) == readable(gm) and len(written) == 1
    changes = (
        lambda: setattr(y, "args", (y.args[0], 3)),
        lambda: setattr(y, "target", torch.ops.aten.add.Tensor),
        lambda: y.meta.update(val=torch.ones(3)),
        lambda: y._rename("other"),
    )
    for number, change in enumerate(changes, 2):
        before = text_of(gm)
        change()
        assert text_of(gm) == readable(gm) != before and len(written) == number
    other, _ = graph_of()
    assert text_of(other) == readable(other)


def test_a_change_inside_of_a_nested_graph_is_seen():
    inner, y = graph_of()
    graph = fx.Graph()
    graph.output(graph.get_attr("inner"))
    gm = fx.GraphModule({"inner": inner}, graph)
    text_of = code.remembering()
    before = text_of(gm)
    y = next(n for n in gm.inner.graph.nodes if n.op == "call_function")
    y.args = (y.args[0], 3)
    assert text_of(gm) == code.readable(gm) != before
