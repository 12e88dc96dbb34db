"""Memory of a step from its final graphs, counted by hand."""

from __future__ import annotations

import torch
from torch import nn

from mindspeed_fx.report import modelled
from mindspeed_fx.report.step_memory import step_memory
from tests.models import explain

N = 4 * 1000  # bytes of every result


def memory_of(model, *inputs, **options):
    record = explain(model, *inputs, hardware="cpu", **options).graphs[0]
    return step_memory(modelled.estimates(record))


def operators(memory):
    return [operator for _, operator in memory.curve.labels]


def test_what_is_saved_lives_to_its_last_reader():
    """tanh(exp(x)): the gradients read the results of both."""
    x = torch.randn(1000, requires_grad=True)
    memory = memory_of(lambda x: x.exp().tanh(), x)
    assert operators(memory)[:2] == ["aten.exp", "aten.tanh"] and memory.curve.forward == 2
    assert operators(memory)[-1] == "aten.mul" and memory.curve.input_bytes == 0
    assert memory.curve.bytes[:2] == [N, 2 * N]
    # While the last kernel makes the gradient of x: exp's result, the gradient of tanh, and what it makes.
    assert memory.curve.bytes[2:] == [3 * N, 3 * N]
    assert [(x.operator, x.bytes) for x in memory.live][:2] == [("aten.exp", N), ("aten.tanh", N)]
    assert memory.curve.peak == sum(x.bytes for x in memory.live) == 3 * N


def test_views_take_no_memory_and_what_is_given_is_not_counted():
    weight = nn.Linear(10, 10, bias=False)
    memory = memory_of(weight, torch.randn(100, 10))
    # The result, 100 x 10, is the caller's; the backward makes the gradient of the weight alone.
    assert memory.curve.bytes == [N, N + 400] and operators(memory) == ["aten.mm", "aten.mm"]


def test_what_a_fused_kernel_keeps_to_itself_is_not_in_memory():
    x = torch.randn(1000, requires_grad=True)
    with torch.no_grad():
        memory = memory_of(lambda x: x.exp().tanh().sin(), x, codegen="inductor")
    assert memory.curve.bytes == [N] and memory.curve.forward == 0


def test_a_graph_without_kernels_has_no_memory():
    assert step_memory({}) is None
