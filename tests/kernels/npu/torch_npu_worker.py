"""Runs where torch_npu is imported, over stub libraries and on fake tensors of device npu:0; prints what it found as
JSON.
"""

import json

import torch
import torch_npu  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import mindspeed_fx  # noqa: F401
from mindspeed_fx.kernels.base import find
from mindspeed_fx.kernels.npu import schemas
from mindspeed_fx.kernels.npu.emulation import registry
from mindspeed_fx.planning.verify_device import calls as npu_cases
from tests.kernels.npu import npu_graphs


def schema_differences():
    """Pinned lines that are not what torch_npu declares."""
    found = []
    for name, line in schemas.SCHEMAS.items():
        real = str(getattr(torch.ops.npu, name).default._schema)
        if str(torch._C.parse_schema(f"npu::{line}")) != real:
            found.append(real)
    return found


def on_npu(args):
    return pytree.tree_map(
        lambda a: (
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="npu:0")
            if isinstance(a, torch.Tensor)
            else a
        ),
        args,
    )


def layout(x):
    return [s for s, n in zip(x.stride(), x.shape) if n > 1]


def describe(results):
    return [(str(x.dtype), list(x.shape), layout(x)) for x in pytree.tree_leaves(results) if x is not None]


def case_differences():
    """Cases whose lowering gives another shape, type or layout on npu, by torch_npu's meta kernels, than on CPU,
    emulated.
    """
    found, count = [], 0
    for family in npu_cases.FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            for name, op, args, kernel in npu_cases.cases(family, dtype):
                if not kernel:
                    continue
                operator, count = find(op.default), count + 1
                try:
                    with FakeTensorMode():
                        fakes = on_npu(args)
                        lowering, reasons = operator.choose("npu", fakes, {})
                        have = describe(lowering.build(*fakes))
                        assert lowering.kernel == kernel, (lowering.kernel, reasons)
                    want = describe(lowering.build(*args))
                except Exception as e:
                    found.append(f"{family} {name}: {type(e).__name__}: {str(e)[:300]}")
                    continue
                if have != want:
                    found.append(f"{family} {name}: npu {have}, cpu {want}")
    return found, count


def fused_differences():
    """Operators that multiply and communicate in one, which no lowering calls but overlap.mc2: shapes and types by
    torch_npu's meta kernels and by ours.
    """
    found = []
    for name, shapes, args, kwargs in (
        ("npu_all_gather_base_mm", ((64, 256), (256, 96)), ("group", 8), {"gather_output": True}),
        ("npu_mm_reduce_scatter_base", ((64, 256), (256, 96)), ("group", 8), {}),
        ("npu_mm_all_reduce_base", ((64, 256), (256, 96)), ("group",), {}),
        ("npu_alltoallv_gmm", ((64, 32), (2, 32, 48)), ("group", 8, [4] * 16, [4] * 16), {"permute_out_flag": True}),
        ("npu_alltoallv_gmm", ((64, 32), (2, 48, 32)), ("group", 8, [4] * 16, [4] * 16), {"trans_gmm_weight": True}),
        ("npu_gmm_alltoallv", ((64, 32), (2, 32, 48)), ("group", 8, [4] * 16, [4] * 16), {}),
    ):
        with FakeTensorMode():
            tensors = [torch.empty(s, dtype=torch.bfloat16, device="npu:0") for s in shapes]
            have = describe(getattr(torch.ops.npu, name)(*tensors, *args, **kwargs))
        want = describe(
            registry.EMULATIONS[name].fake(
                *(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes), *args, **kwargs
            )
        )
        if have != [w for w in want if w[1] != [0]]:  # what is not asked for: nothing there, empty here
            found.append(f"{name}: npu {have}, cpu {want}")
    return found


def model_calls(dtype):
    """npu calls of a Llama's forward and backward, on fake npu tensors and on CPU tensors, and parameters without
    gradients.
    """
    from tests import models

    calls = {}
    torch.manual_seed(0)
    model = models.Llama().to(dtype)
    with npu_graphs.lowered() as graphs:
        npu_graphs.step(torch.compile(model, backend="mindspeed", options=npu_graphs.OPTIONS), model, models.tokens())
    calls["cpu"] = {side: graphs.npu(side) for side in ("forward", "backward")}
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), npu_graphs.lowered() as graphs:
        torch.set_default_dtype(dtype)
        with torch.device("npu:0"):
            model, ids = models.Llama(), models.tokens()
        torch.set_default_dtype(torch.float32)
        _, grads = npu_graphs.step(torch.compile(model, backend="mindspeed", fullgraph=True), model, ids)
    calls["npu"] = {side: graphs.npu(side) for side in ("forward", "backward")}
    return {
        "calls": calls,
        "unlowered": graphs.unlowered() + graphs.left(),
        "lost": [n for n, g in grads.items() if g is None],
    }


def main():
    registry.register()
    differences, count = case_differences()
    print(
        json.dumps(
            {
                "schemas": schema_differences(),
                "cases": differences + fused_differences(),
                "count": count,
                "model": {str(d): model_calls(d) for d in (torch.float32, torch.bfloat16)},
            }
        )
    )


main()
