"""Graphs that a graph calls: what they may overwrite."""

from __future__ import annotations

import pytest
import torch


def layer(x, table):
    return x + (x.softmax(-1) * table).sin() * (x.tanh() + table)


@torch.compiler.nested_compile_region
def marked_layer(x, table):
    return layer(x, table)


@pytest.mark.parametrize("each", [layer, marked_layer])
def test_a_called_graph_leaves_its_inputs_as_they_are(each):
    """The table is saved for the backward, which may overwrite it once its last layer has read it, not its first."""

    def loss(x, weight, each):
        y = (x @ weight).sin()
        table = (y @ weight).cos()
        for _ in range(6):
            y = each(y, table)
        return y.square().sum()

    torch.manual_seed(0)
    x, weight = torch.randn(64, 64, dtype=torch.float64), torch.randn(64, 64, dtype=torch.float64) / 8
    weight.requires_grad_()
    (expected,) = torch.autograd.grad(loss(x, weight, layer), weight)
    (got,) = torch.autograd.grad(torch.compile(loss, backend="mindspeed")(x, weight, each), weight)
    torch.testing.assert_close(got, expected)


def test_calls_of_a_graph_that_passes_leave_alone_are_not_evaluated_again(monkeypatch):
    from torch._inductor import fx_utils

    if not hasattr(fx_utils, "_is_fake_tensor_same"):
        pytest.skip("this torch asks nothing of called graphs")
    updated = []
    update = fx_utils.FakeTensorUpdater.incremental_update

    def count(self):
        updated.append((len(self.gm.graph.nodes), update(self)))
        return updated[-1][1]

    monkeypatch.setattr(fx_utils.FakeTensorUpdater, "incremental_update", count)
    torch._dynamo.reset()
    x = torch.randn(8, 8)
    options = {"inductor": {"fx_graph_cache": False}}
    torch.compile(lambda x: stack(x), backend="mindspeed", options=options)(x)
    assert updated and not any(nodes for _, nodes in updated)


def stack(x):
    for _ in range(6):
        x = layer(x, x.cos()) @ x
    return x
