"""Sizes that ranks cannot share evenly are refused under every named plan, by module or tensor, size and mesh
dimension.
"""

from __future__ import annotations

import pytest
import torch

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import ShardingError
from tests.sharding.llama import Llama
from tests.sharding.mixtral import Mixtral

HEADS = dict(hidden=24, heads=3, kv_heads=3)


def evenly(what, dim, size, ranks, over):
    return rf"{what}.* dimension {dim} has {size} elements, which {ranks} ranks of {over} cannot share evenly"


@pytest.mark.parametrize(
    "plan,mesh,sizes,batch,says",
    [
        (
            "tp",
            {"tp": 2},
            HEADS,
            (4, 16),
            r'module "layers.0.attention".* divided along dimension 2 over 2 ranks of "tp", '
            r"which cannot share it evenly as \(4, 16, 3, 8\)",
        ),
        ("tp", {"tp": 2}, dict(vocab=63), (4, 16), evenly('parameter "embed.weight"', 0, 63, 2, '"tp"')),
        ("tp_sp", {"tp": 2}, {}, (4, 15), evenly('module "embed"', 1, 15, 2, '"tp"')),
        (
            "tp_2d",
            {"tp_x": 2, "tp_y": 2},
            HEADS,
            (4, 16),
            r'module "layers.0.attention".* over 2 ranks of "tp_x".* which cannot share it evenly as',
        ),
        ("ulysses", {"cp": 2}, HEADS, (4, 16), evenly('module "layers.0.attention"', 1, 3, 2, '"cp"')),
        ("kv_allgather", {"cp": 2}, {}, (4, 15), evenly('input "ids"', 1, 15, 2, '"cp"')),
        (
            "ring",
            {"cp": 2},
            {},
            (4, 14),
            r'module "layers.0.attention".*14 elements do not divide into 4, for 2 ranks of "cp"',
        ),
        (
            "hybrid",
            {"cp_ring": 2, "cp_ulysses": 2},
            {},
            (4, 14),
            evenly('input "ids"', 1, 14, 4, '"cp_ring", "cp_ulysses"'),
        ),
        ("zero1", {"dp": 2}, {}, (3, 16), evenly('input "ids"', 0, 3, 2, '"dp"')),
        (
            "zero2",
            {"dp": 2},
            dict(ffn=63),
            (4, 16),
            evenly('parameter "layers.0.mlp.gate_proj.weight"', 0, 63, 2, '"dp"'),
        ),
        (
            "zero3",
            {"dp": 2},
            dict(ffn=63),
            (4, 16),
            evenly('parameter "layers.0.mlp.gate_proj.weight"', 0, 63, 2, '"dp"'),
        ),
        ("ep", {"ep": 2}, dict(experts=3), (4, 16), evenly('parameter "layers.0.mlp.experts.gate"', 0, 3, 2, '"ep"')),
        ("ep_alltoall", {"ep": 2}, dict(experts=3), (3, 16), evenly("", 0, 3, 2, '"ep"')),
    ],
)
def test_uneven_sizes_are_refused(plan, mesh, sizes, batch, says):
    model = (Mixtral if plan.startswith("ep") else Llama)(1, **sizes).double()
    with pytest.raises(ShardingError, match=says):
        simulate(model, mesh, plan, *(torch.randint(0, 60, batch) for _ in range(2)))
