"""The emulated operators on the inputs and tolerances of MindSpeed's own unit tests, against references written out here."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.kernels.npu import emulate

emulate.define()
npu = torch.ops.npu
HALF = pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 1e-3), (torch.bfloat16, 4e-3)], ids=["float16", "bfloat16"])


def close(have, want, tolerance):
    torch.testing.assert_close(have.float(), want.float(), rtol=tolerance, atol=tolerance)


@HALF
def test_thirty_norms(dtype, tolerance):
    x, weight = torch.randn(6, 60, 1024, dtype=dtype), torch.ones(1024, dtype=dtype)
    have = want = x
    for _ in range(30):
        have = npu.npu_rms_norm(have, weight, 1e-6)[0]
        wide = want.float()
        want = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight
    close(have, want, tolerance)


@HALF
def test_swiglu(dtype, tolerance):
    torch.manual_seed(123)
    x = torch.randn(32, 2, 24, dtype=dtype, requires_grad=True)
    a, b = x.chunk(2, -1)
    want = F.silu(a) * b
    close(npu.npu_swiglu(x, -1), want, 2 * tolerance)
    grad = torch.randn_like(want)
    close(torch.autograd.grad(npu.npu_swiglu(x, -1), x, grad)[0], torch.autograd.grad(want, x, grad)[0], 4 * tolerance)


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("shape, angles", [((2, 16, 5, 128), (1, 16, 1, 128)), ((2, 2, 5, 128), (1, 2, 1, 128))])
def test_rotary(mode, shape, angles):
    x, cos, sin = torch.randn(shape), torch.randn(angles), torch.randn(angles)
    turned = torch.cat((-x[..., 64:], x[..., :64]), -1) if mode == "half" else torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    close(npu.npu_rotary_mul(x, cos, sin, mode), x * cos + turned * sin, 1e-4)


def test_attention_of_flat_heads():
    q, k, v = (torch.randn(1, 128, 32 * 128, dtype=torch.float16) for _ in range(3))
    heads = [t.float().unflatten(-1, (32, 128)).transpose(1, 2) for t in (q, k, v)]
    want = ((heads[0] @ heads[1].transpose(-1, -2) * 0.08838).softmax(-1) @ heads[2]).transpose(1, 2).flatten(2)
    for op in (npu.npu_fusion_attention, npu.npu_fusion_attention_v3):
        close(op(q, k, v, 32, "BSH", scale=0.08838)[0], want, 1e-3)


@pytest.mark.parametrize("counts", [[1, 2, 3, 4, 5, 6, 7, 4], [1, 3, 5, 7, 9, 6, 7, 4], [9, 0, 0, 7, 9, 6, 7, 4]])
@pytest.mark.parametrize("kind", [0, 1])
def test_grouped_products(counts, kind):
    x, weight = torch.randn(sum(counts), 64, dtype=torch.float16), torch.randn(8, 64, 32, dtype=torch.float16)
    groups = torch.tensor(counts) if kind else torch.tensor(counts).cumsum(0)
    rows = x.float().split(counts)
    y = npu.npu_grouped_matmul([x], [weight], group_list=groups, split_item=3, group_type=0, group_list_type=kind)[0]
    close(y, torch.cat([r @ w.float() for r, w in zip(rows, weight)]), 5e-3)
    dw = npu.npu_grouped_matmul([x.t()], [y], group_list=groups, split_item=3, group_type=2, group_list_type=kind)[0]
    close(dw, torch.stack([r.t() @ g for r, g in zip(rows, y.float().split(counts))]), 5e-3)


@pytest.mark.parametrize("k, experts", [(1, 4), (4, 4), (1, 128), (4, 128)])
def test_permuted_and_back(k, experts):
    tokens = torch.randn(128, 48, dtype=torch.bfloat16)
    indices = torch.stack([torch.randperm(experts)[:k] for _ in range(128)])
    permuted, order = npu.npu_moe_token_permute(tokens, indices)
    assert order.dtype == torch.int32 and torch.equal(permuted[order.long()], tokens.repeat_interleave(k, 0))
    back = npu.npu_moe_token_unpermute(permuted, order, torch.full((128, k), 1 / k, dtype=torch.bfloat16))
    assert torch.equal(back, tokens) if k == 1 else (back - tokens).abs().max() < 5e-3 * tokens.abs().max()
