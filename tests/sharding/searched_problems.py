"""Models that tests search plans for."""

from __future__ import annotations

import torch

from mindspeed_fx.planning.search.model_graph import trace_model
from mindspeed_fx.planning.search.problem import Problem
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
