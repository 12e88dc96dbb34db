"""Models that tests search plans for, and the run that a plan must stand."""

from __future__ import annotations

import torch

from mindspeed_fx.planning.search.model_graph import trace_model
from mindspeed_fx.planning.search.problem import Problem
from mindspeed_fx.planning.simulate import simulate
from tests.sharding.llama import Llama
from tests.sharding.mixtral import Mixtral


def large(layers=8, batch=8, seq=4096, **sizes):
    """A Llama of useful width on the meta device, with its batch; modules are called as in the small one."""
    with torch.device("meta"):
        model = Llama(
            layers, **{"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32768, **sizes}
        ).bfloat16()
        return model, (torch.zeros(batch, seq, dtype=torch.long), torch.zeros(batch, seq, dtype=torch.long))


def mixture_problem() -> Problem:
    """Four layers of four experts."""
    with torch.device("meta"):
        model, ids = (
            Mixtral(4, hidden=1024, ffn=2048, heads=8, kv_heads=8, experts=4, vocab=4096).bfloat16(),
            torch.zeros(8, 4096, dtype=torch.long),
        )
    return trace_model(model, (ids, ids.clone()), {})


def runs_as_one_device(plan, mesh, model=None):
    """Runs ``plan`` for every rank on a small model of the same modules; compares it with one device."""
    model, (ids, labels) = model or Llama(layers=2).double(), (torch.randint(0, 64, (8, 16)) for _ in range(2))
    loss = model(ids, labels)
    loss.backward()
    result = simulate(model, mesh, plan, ids, labels)
    assert (result.outputs[0] - loss).abs() <= 1e-10 * loss.abs()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert result.gradients.keys() == gradients.keys()
    for name, g in gradients.items():
        assert g.abs().max() > 0 and (result.gradients[name] - g).abs().max() <= 1e-10 * g.abs().max(), name
    return result
