"""Which compiled graphs torch takes for a second module or function."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from mindspeed_fx.compat import dynamo

SETTINGS = {"backend": "mindspeed", "fullgraph": True, "options": {"codegen": "eager"}}


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@pytest.fixture(autouse=True)
def fresh_counters():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("alone, graphs", [(False, 1), (True, 10)])
def test_modules_alike_share_a_graph_unless_they_are_compiled_alone(alone, graphs):
    """Ten are more than torch compiles of one code object."""
    modules = [Layer() for _ in range(10)]
    for module in modules:
        if alone:
            dynamo.compile_alone(module, **SETTINGS)
        else:
            module.compile(**SETTINGS)
    x = torch.randn(2, 4)
    for module in modules:
        result = module(x)
        assert torch.equal(result, module.forward(x))
        result.sum().backward()
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_fresh_callable_is_compiled_again_however_often():
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    for _ in range(10):
        torch.compile(dynamo.fresh_callable(function), **SETTINGS)(torch.randn(2))
    assert counters["stats"]["unique_graphs"] == 10
