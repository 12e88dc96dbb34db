"""A mixture's indices are saved as int32 on npu and read as int64; values stay what they were."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.compat import partitioner
from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.lowering.narrow_indices import narrow_indices
from mindspeed_fx.report import recorder

ops = torch.ops.mindspeed


def mixture(x, logits, w):
    """Two experts of four for each token, whose rows are sorted, multiplied and summed with float32 weights."""
    weights, ids = ops.router_topk(logits, None, 2, "softmax")
    rows, places = ops.moe_permute(x, ids)
    counts = torch.bincount(ids.reshape(-1), minlength=4)
    return ops.moe_unpermute(torch.tanh(rows) @ w, places, weights.float(), 2), counts


def arguments(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator).to(dtype).requires_grad_() for s in ((6, 8), (6, 4), (8, 8))]


@pytest.mark.parametrize("target, pairs", [("npu", 2), ("cuda", 0)])
def test_indices_are_cast_down_and_up(target, pairs):
    args = arguments()
    gm = make_fx(lambda *a: mixture(*a)[0], tracing_mode="fake")(*args)
    want = gm(*args)
    narrow_indices(gm, Context(Options.parse({"target": target, "codegen": "eager"}).resolve("cpu"), "joint"))
    types = [n.kwargs["dtype"] for n in gm.graph.nodes if n.target is torch.ops.aten._to_copy.default]
    assert types.count(torch.int32) == types.count(torch.int64) == pairs
    assert pairs == sum(partitioner.must_recompute(n) for n in gm.graph.nodes)
    assert torch.equal(gm(*args), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_on_npu(dtype):
    """Weights in float32 beside tokens in bfloat16 take the Triton kernel, which widens nothing."""

    def gradients(f):
        args = arguments(dtype)
        loss = f(*args)[0].float().square().sum()
        return [loss, *torch.autograd.grad(loss, args)]

    with recorder.collecting() as records:
        have = gradients(torch.compile(mixture, backend="mindspeed", options={"target": "npu"}))
    for h, w in zip(have, gradients(mixture), strict=True):
        torch.testing.assert_close(h, w, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)
    kernels = {row["operator"]: row["kernel"] for r in records for row in r.lowered}
    mixed = dtype == torch.bfloat16
    for operator, kernel in (("", "npu_moe_token_unpermute"), ("_backward", "npu_moe_token_unpermute_grad_v2")):
        chosen = kernels[f"mindspeed.moe_unpermute{operator}"]
        assert chosen.startswith("triton") if mixed else chosen == kernel, chosen
