"""Writes in place to a tensor whose dimensions were permuted (compat/permuted_writes.py)."""

from __future__ import annotations

import copy

import pytest
import torch

from mindspeed_fx.compat.permuted_writes import CONTIGUOUS
from tests.scenarios.compare import largest_of

PLACE = torch.tensor([1])
ROWS = torch.zeros(2, 2, 1, 4, dtype=torch.long)
WRITES = {
    "cumprod_": lambda v, mask, new: v.cumprod_(2),
    "cumsum_": lambda v, mask, new: v.cumsum_(2),
    "index_add_": lambda v, mask, new: v.index_add_(2, PLACE, new),
    "index_copy_": lambda v, mask, new: v.index_copy_(2, PLACE, new),
    "masked_fill_": lambda v, mask, new: v.masked_fill_(mask, 0.5),
    "masked_scatter_": lambda v, mask, new: v.masked_scatter_(mask, new.expand(2, 2, 8, 4)),
    "renorm_": lambda v, mask, new: v.renorm_(2, 0, 1.0),
    "scatter_": lambda v, mask, new: v.scatter_(2, ROWS, new),
    "scatter_add_": lambda v, mask, new: v.scatter_add_(2, ROWS, new),
    "scatter_reduce_": lambda v, mask, new: v.scatter_reduce_(2, ROWS, new, "sum"),
    "tril_": lambda v, mask, new: v.tril_(),
    "triu_": lambda v, mask, new: v.triu_(1),
}


class Heads(torch.nn.Module):
    """Values by heads, of which some are written (as performer-pytorch hides those of padded tokens)."""

    def __init__(self, name):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.write = WRITES[name]

    def forward(self, x, mask, new):
        heads = self.linear(x).view(2, 8, 2, 4).permute(0, 2, 1, 3)
        same = self.write(heads, mask, new)
        return (same * heads).sum(-1), heads.transpose(1, 2).flatten(2).tanh(), new.sin()


def step(run, model, inputs):
    x, mask, new = (v.detach().clone() for v in inputs)
    results = run(x.requires_grad_(), mask, new.requires_grad_())
    sum(r.square().sum() for r in results).backward()
    return *results, x.grad, new.grad, *(p.grad for p in model.parameters())


@pytest.mark.parametrize("name", CONTIGUOUS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 4e-2)])
def test_what_is_written_through_a_permuted_view(name, dtype, tolerance):
    torch.manual_seed(0)
    model = Heads(name).to(dtype)
    inputs = torch.randn(2, 8, 8, dtype=dtype), torch.rand(2, 1, 8, 1) > 0.5, torch.randn(2, 2, 1, 4, dtype=dtype)
    expected = step(model, model, inputs)
    other = copy.deepcopy(model)
    other.zero_grad()
    compiled = torch.compile(other, backend="mindspeed", options={"codegen": "eager"})
    for want, have in zip(expected, step(compiled, other, inputs), strict=True):
        assert have.dtype == dtype and largest_of(have - want) <= tolerance * largest_of(want)


def test_writes_that_torch_undoes_stay():
    """To a contiguous tensor, and to rows of one."""
    from torch._dynamo.testing import EagerAndRecordGraphs

    from mindspeed_fx.compat.permuted_writes import write_by_copy

    def writes(x, mask):
        x = x * 2
        x.masked_fill_(mask, 0.0)
        x[1:].masked_fill_(mask[1:], 1.0)
        x.mT.masked_fill_(mask.mT, 2.0)
        return x

    recorded = EagerAndRecordGraphs()
    torch.compile(writes, backend=recorded)(torch.randn(4, 4), torch.rand(4, 4) > 0.5)
    graph = recorded.graphs[0]
    write_by_copy(graph)
    methods = [n.target for n in graph.graph.nodes if n.op == "call_method"]
    assert methods == ["masked_fill_", "masked_fill_", "clone", "masked_fill", "copy_"]
