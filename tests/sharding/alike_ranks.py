"""What gloo processes compare of the graphs that they compile; run by test_alike_ranks.py."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import mindspeed_fx
from mindspeed_fx.backend import Compilation
from tests.sharding.llama import Attention, Llama, Masked, sliding_window
from tests.sharding.mixtral import Mixtral


class Dropping(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, dropout_p=0.1)


def dropping() -> Llama:
    model = Llama(1)
    model.layers[0].attention.__class__ = Dropping
    return model


MODELS = {
    "llama": lambda: Llama(1),
    "layers": lambda: Llama(2),
    "dropping": dropping,
    "masked": lambda: Masked(sliding_window),
    "mixtral": lambda: Mixtral(1),
}


def structure(gm: fx.GraphModule) -> list[tuple]:
    """Of each node in order what it calls, of which nodes, and what tensors that gives: all but numbers and names."""
    place = {n: k for k, n in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
        target = str(node.target) if node.op == "call_function" else node.op
        lines.append((target, [place[n] for n in node.all_input_nodes], [(str(v.dtype), str(v.shape)) for v in values]))
    return lines


def worker(rank: int, store: str, kind: str, mesh: dict[str, int], plan: str, dynamic: bool) -> None:
    """Forward and backward graph of a step have the same structure, and order, on every rank."""
    torch.set_num_threads(1)
    ranks = math.prod(mesh.values())
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    graphs: list[Any] = []
    run = Compilation.run_eagerly

    def watched(self, gm, inputs, side):
        graphs.append((side, structure(gm)))
        return run(self, gm, inputs, side)

    Compilation.run_eagerly = watched
    torch.manual_seed(0)
    devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    model = mindspeed_fx.parallelize(MODELS[kind]().double(), devices, plan)
    step = torch.compile(model, backend="mindspeed", dynamic=dynamic, options={"codegen": "eager"})
    ids = torch.randint(0, 64, (4, 8 * ranks), generator=torch.Generator().manual_seed(1))
    step(ids, ids.roll(1, 1)).backward()
    results: list[Any] = [None] * ranks
    dist.all_gather_object(results, graphs)
    assert [side for side, _ in graphs] == ["forward", "backward"]
    for other, result in enumerate(results):
        for (side, own), (_, there) in zip(graphs, result, strict=True):
            at = next((k for k, (a, b) in enumerate(zip(own, there)) if a != b), None)
            assert at is None, f"{side}, node {at}: rank {rank} has {own[at]}, rank {other} {there[at]}"
            assert len(own) == len(there), f"{side}: {len(own)} nodes on rank {rank}, {len(there)} on rank {other}"
    dist.destroy_process_group()
