"""Elements read of a sum over ranks that is not yet made: the sum of what each rank reads, and no collective."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate

from mindspeed_fx.compat import dtensor
from mindspeed_fx.planning.simulate import _Collectives
from mindspeed_fx.sharding.spmd import aten_rules, parts

aten = torch.ops.aten
ORDER = torch.tensor([3, 1, 0, 3])
CASES = {
    "index": (aten.index.Tensor, lambda order: ([order],)),
    "index_select": (aten.index_select.default, lambda order: (0, order)),
    "gather": (aten.gather.default, lambda order: (0, order.unsqueeze(1).expand(4, 3).contiguous())),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_sum_stays_one(name):
    target, more = CASES[name]
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64)
    expected = target(x, *more(ORDER))
    (expected * weight).sum().backward()
    with dtensor.all_ranks({"ep": 2}) as mesh, dtensor.plain_tensors_as_replicated():
        whole = dtensor.on_every_rank(x.detach()).requires_grad_()
        terms = parts.from_parts(whole / 2, mesh, [Partial()])
        order = parts.from_parts(dtensor.on_every_rank(ORDER), mesh, [Replicate()])
        with _Collectives() as forward:
            result = aten_rules.run(target, (terms, *more(order)), {})
        assert result.placements == (Partial(),) and not forward.counts
        total = result.redistribute(placements=[Replicate()]).to_local()
        assert torch.equal(total.reconcile(), expected)
        (total * weight).sum().backward()
        assert torch.equal(whole.grad.reconcile(), x.grad / 2)
