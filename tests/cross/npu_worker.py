"""What needs torch_npu in a process of its own; prints one JSON object on the last line.

    python npu_worker.py sites NAME ...    rewrites of models of npu_models.py, traced on npu and on cpu
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
import torch_npu  # noqa: F401

import npu_models
from mindspeed_fx.cross.trace import trace
from mindspeed_fx.options import Options


def sites(*names: str) -> dict[str, Any]:
    """name -> device -> rewrites by pass, products of matrices by graph, and what went wrong."""
    return {name: {device: _sites(name, device) for device in ("npu:0", "cpu")} for name in names}


def _sites(name: str, device: str) -> dict[str, Any]:
    torch._dynamo.reset()
    with torch.device("meta"):
        model, args, kwargs = (*getattr(npu_models, name)(), {})[:3]
    traced = trace(model, args, kwargs, Options(codegen="eager"), device)
    products = Counter(side for _, side, gm in traced.sides for n in gm.graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default))
    left = Counter(str(n.target) for _, _, gm in traced.sides for n in gm.graph.nodes if "matmul" in str(n.target) and "mindspeed" not in str(n.target))
    counts = Counter()
    for record in traced.records:
        counts.update({k: v for k, v in record.counts.items() if v and k.startswith("fusion.")})
    return {"counts": counts, "products": products, "opaque": left, "breaks": traced.breaks, "without_gradient": traced.without_gradient, "graphs": len(traced.records)}


if __name__ == "__main__":
    print(json.dumps({"sites": sites}[sys.argv[1]](*sys.argv[2:])))
