"""What needs torch_npu in a process of its own; prints one JSON object on the last line.

python npu_worker.py sites NAME ...    rewrites of models of npu_models.py, traced on npu and on cpu
python npu_worker.py gradients         every npu lowering of a backward operator: gradients that it loses
python npu_worker.py npugraph_ex       a model through torch_npu's npugraph_ex, run without capture
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
import torch_npu  # noqa: F401
from torch.utils import _pytree as pytree

from mindspeed_fx.ascend.npu_graphs import trace_on_npu
from mindspeed_fx.options import Options
from tests.ascend import npu_models
from tests.ascend.gradients import lost as gradients_lost


def sites(*names: str) -> dict[str, Any]:
    """name -> device -> rewrites by pass, products of matrices by graph, and what went wrong."""
    return {name: {device: _sites(name, device) for device in ("npu:0", "cpu")} for name in names}


def _sites(name: str, device: str) -> dict[str, Any]:
    torch._dynamo.reset()
    with torch.device("meta"):
        model, args, kwargs = (*getattr(npu_models, name)(), {})[:3]
    traced = trace_on_npu(model, args, kwargs, Options(codegen="eager"), device)
    products = Counter(
        side
        for _, side, gm in traced.sides
        for n in gm.graph.nodes
        if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    )
    gone = [i for _, side, gm in traced.sides if side == "backward" for i in gradients_lost(gm, ["tangents"])]
    left = Counter(
        str(n.target)
        for _, _, gm in traced.sides
        for n in gm.graph.nodes
        if "matmul" in str(n.target) and "mindspeed" not in str(n.target)
    )
    counts = Counter()
    for record in traced.records:
        counts.update({k: v for k, v in record.counts.items() if v and k.startswith("fusion.")})
    unlowered = [
        f"{row['operator']}: {row['reason']}"
        for r in traced.records
        for row in r.lowered
        if row["kernel"].startswith(("reference", "its own"))
    ]
    return {
        "counts": counts,
        "unlowered": unlowered,
        "products": products,
        "opaque": left,
        "breaks": traced.breaks,
        "without_gradient": traced.without_gradient + gone,
        "graphs": len(traced.records),
    }


def gradients() -> dict[str, Any]:
    """Operators with an npu kernel: gradients that lowered backwards lose, inputs that the operators themselves give
    none, how many cases were checked, operators without a case; and torch_npu's operators of whose derivative we
    believe otherwise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mindspeed_fx.kernels import REGISTRY
    from mindspeed_fx.kernels.base import ADOPTED, find
    from mindspeed_fx.planning.verify_device import calls as npu_cases
    from tests.ascend.gradients import lost_by_lowering, without_gradient

    problems, none, checked, seen = {}, {}, 0, set()
    for family in npu_cases.FAMILIES:
        for name, op, args, _kernel in npu_cases.cases(family, torch.bfloat16):
            operator = find(op.default)
            seen.add(operator.name)
            checked += 1
            with FakeTensorMode():
                fakes = pytree.tree_map(
                    lambda a: (
                        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="npu:0")
                        if isinstance(a, torch.Tensor)
                        else a
                    ),
                    args,
                )
                if not operator.name.endswith("_backward"):
                    none.setdefault(operator.name, set()).update(without_gradient(operator.overload, fakes))
                    continue
                lowering, reasons = operator.choose("npu", fakes, {})
                try:
                    found = lost_by_lowering(lowering.build, operator.overload, fakes)
                except Exception as e:
                    found = [f"{type(e).__name__}: {e}"[:300]]
            if found:
                problems[f"{family} {name}"] = found
    unchecked = [o.name for o in (*REGISTRY.values(), *ADOPTED.values()) if "npu" in o.lowerings and o.name not in seen]
    return {
        "problems": problems,
        "none": {k: sorted(v) for k, v in none.items() if v},
        "checked": checked,
        "unchecked": unchecked,
        "derivatives": derivatives(),
    }


def derivatives() -> dict[str, list[str]]:
    """Operators that have a derivative emulated and none in torch_npu, with which gradients would vanish on a device
    alone; and the reverse.
    """
    from mindspeed_fx.kernels.npu.emulation import registry

    registry.register()
    real = {
        name
        for name in registry.EMULATIONS
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "AutogradPrivateUse1")
    }
    ours = {name for name, made in registry.EMULATIONS.items() if made.backward is not None}
    return {"only emulated": sorted(ours - real), "only torch_npu's": sorted(real - ours)}


def npugraph_ex() -> dict[str, Any]:
    """The sides compiled, and what a bad option says; "force_eager" runs its graphs without capturing them."""
    from mindspeed_fx.compat import npu

    made, compile = [], npu.npugraph_ex
    npu.npugraph_ex = lambda *args: made.append(compile(*args)) or made[-1]
    found: dict[str, Any] = {}
    for name, options in (("good", {"force_eager": True}), ("bad option", {"levle": 1})):
        with torch.device("meta"):
            model, args, kwargs = (*npu_models.norms(), {})[:3]
        try:
            traced = trace_on_npu(model, args, kwargs, Options(codegen="npugraph_ex", npugraph_ex=options))
            found.update(
                sides=[side for _, side, _ in traced.sides],
                without_gradient=traced.without_gradient,
                compiled=len(made),
            )
        except Exception as e:
            found[name] = str(e)
        torch._dynamo.reset()
    return found


if __name__ == "__main__":
    print(json.dumps({"gradients": gradients, "npugraph_ex": npugraph_ex, "sites": sites}[sys.argv[1]](*sys.argv[2:])))
