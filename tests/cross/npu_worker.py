"""What needs torch_npu in a process of its own; prints one JSON object on the last line.

    python npu_worker.py sites NAME ...    rewrites of models of npu_models.py, traced on npu and on cpu
    python npu_worker.py npugraph_ex       a model through torch_npu's npugraph_ex, run without capture
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


def npugraph_ex() -> dict[str, Any]:
    """The sides compiled, and what a bad option says; "force_eager" runs its graphs without capturing them."""
    from mindspeed_fx import compat_npu

    made, compile = [], compat_npu.npugraph_ex
    compat_npu.npugraph_ex = lambda *args: made.append(compile(*args)) or made[-1]
    found: dict[str, Any] = {}
    for name, options in (("good", {"force_eager": True}), ("bad option", {"levle": 1})):
        with torch.device("meta"):
            model, args, kwargs = (*npu_models.norms(), {})[:3]
        try:
            traced = trace(model, args, kwargs, Options(codegen="npugraph_ex", npugraph_ex=options))
            found.update(sides=[side for _, side, _ in traced.sides], without_gradient=traced.without_gradient, compiled=len(made))
        except Exception as e:
            found[name] = str(e)
        torch._dynamo.reset()
    return found


if __name__ == "__main__":
    print(json.dumps({"npugraph_ex": npugraph_ex, "sites": sites}[sys.argv[1]](*sys.argv[2:])))
