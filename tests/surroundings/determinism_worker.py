"""Compiles a model of each kind and prints what was decided: every graph after every pass, what is saved, the plan, the
bits of the step.

``python -m tests.surroundings.determinism_worker KIND``; two processes that differ in hash seed, threads of torch or
names of temporary files have to print the same.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any, Callable

import torch

import mindspeed_fx
from mindspeed_fx.planning.explain import Report
from tests.models import Llama, tokens


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def tell(report: Report) -> None:
    """A line for each pass that ran and for each stage of each graph."""
    for graph in report.graphs:
        for run in graph.runs:
            sites = [(s.module, s.nodes) for s in run.report.rewrites]
            print(graph.index, run.stage, run.report.name, digest(repr(sites)), digest(repr(run.report.saved)))
        for stage, text in graph.stages.items():
            print(graph.index, stage, digest(text))


def budget() -> None:
    """A memory plan and every fusion, trained."""
    torch.manual_seed(0)
    model, inputs = Llama(layers=2), tokens()
    options = {"codegen": "eager", "memory_budget": 0.3}
    tell(mindspeed_fx.explain(model, *inputs, options=options))
    loss = torch.compile(model, backend="mindspeed", options=options)(*inputs)
    loss.backward()
    print(bits(loss), *(bits(p.grad) for p in model.parameters()))


def experts() -> None:
    """A mixture of experts."""
    from tests.zoo.architectures import build

    torch.manual_seed(0)
    model, inputs = build("mixtral")
    tell(mindspeed_fx.explain(model, **inputs, options={"codegen": "eager"}))


def ranks() -> None:
    """One rank's program under a plan, its collectives ordered for an accelerator."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model, inputs = Llama(layers=2), tokens(4)
    model = mindspeed_fx.parallelize(model, mesh, "zero2+tp_sp")
    tell(mindspeed_fx.explain(model, *inputs, options={"codegen": "eager", "hardware": "ascend910b2"}))


def search() -> None:
    """A plan searched."""
    torch.manual_seed(0)
    model, inputs = Llama(layers=4), tokens(8)
    print(mindspeed_fx.plan(model, inputs, devices=8, hardware="ascend910b2"))


KINDS: dict[str, Callable[[], Any]] = {f.__name__: f for f in (budget, experts, ranks, search)}


if __name__ == "__main__":
    KINDS[sys.argv[1]]()
