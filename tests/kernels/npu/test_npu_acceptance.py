"""The emulated operators on the inputs and tolerances of MindSpeed's own unit tests, against references written out
here; and for every test of theirs, whatever it is about, where it stands here or why it does not."""

import pathlib
import re

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.kernels.npu.emulation import registry

registry.define()
npu = torch.ops.npu
HALF = pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float16, 1e-3), (torch.bfloat16, 4e-3)], ids=["float16", "bfloat16"]
)


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


TYPES = pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float32, 1e-4), (torch.float16, 1e-3), (torch.bfloat16, 5e-3)],
    ids=["float32", "float16", "bfloat16"],
)


@TYPES
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("shape, angles", [((2, 16, 5, 128), (1, 16, 1, 128)), ((2, 2, 5, 128), (1, 2, 1, 128))])
def test_rotary(mode, shape, angles, dtype, tolerance):
    x, cos, sin = (torch.randn(s).to(dtype) for s in (shape, angles, angles))
    wide, c, s = x.float(), cos.float(), sin.float()
    turned = (
        torch.cat((-wide[..., 64:], wide[..., :64]), -1)
        if mode == "half"
        else torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    )
    close(npu.npu_rotary_mul(x, cos, sin, mode), (wide * c + turned * s).to(dtype), tolerance)


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


@TYPES
@pytest.mark.parametrize("heads", [32, 64])
def test_ring_attention_update(heads, dtype, tolerance):
    """Two attentions over different keys, [seq, batch, hidden], statistics eight times: the sequence is 64 here, 8192
    and more there.
    """
    outs = [torch.randn(64, 1, heads * 128).to(dtype) for _ in range(2)]
    tops, sums = (
        [x.unsqueeze(-1).expand(-1, -1, -1, 8).contiguous() for x in made]
        for made in ([torch.randn(1, heads, 64) for _ in range(2)], [1 + torch.rand(1, heads, 64) for _ in range(2)])
    )
    out, top, total = npu.npu_ring_attention_update(outs[0], tops[0], sums[0], outs[1], tops[1], sums[1])
    both = torch.maximum(*tops)
    shares = [s * (m - both).exp() for s, m in zip(sums, tops)]
    weights = [(s / sum(shares))[..., 0].permute(2, 0, 1).unsqueeze(-1) for s in shares]
    want = sum(o.float().unflatten(2, (heads, 128)) * w for o, w in zip(outs, weights)).flatten(2)
    close(out, want.to(dtype), tolerance)
    close(top, both, 1e-6)
    close(total, sum(shares), 1e-5)


def test_product_added_in_float32():
    """``npu_matmul_add_fp32``: C += w^T x, which torch_npu has for groups of rows alone."""
    w, x, into = torch.randn(64, 128).half(), torch.randn(64, 96).half(), torch.randn(128, 96)
    want = into + w.float().t() @ x.float()
    assert npu.npu_grouped_matmul_add_(into.unsqueeze(0), w, x, torch.tensor([64])).data_ptr() == into.data_ptr()
    close(into, want, 5e-3)


def test_grouped_products_added_in_float32():
    x, grad, ends, into = (
        torch.randn(64, 128).bfloat16(),
        torch.randn(64, 32).bfloat16(),
        torch.tensor([31, 64]),
        torch.randn(2, 128, 32),
    )
    want = into + torch.stack([x[i:j].float().t() @ grad[i:j].float() for i, j in ((0, 31), (31, 64))])
    npu.npu_grouped_matmul_add_(into, x, grad, ends)
    close(into, want, 5e-3)


@HALF
def test_sum_and_norm(dtype, tolerance):
    """``npu_dropout_add_rms_norm`` where nothing is dropped: the norm of the sum and the sum, eps 1e-5."""
    x, residual, weight = (
        torch.randn(6, 60, 1024, dtype=dtype),
        torch.randn(6, 60, 1024, dtype=dtype),
        torch.randn(1024).to(dtype),
    )
    y, rstd, total = npu.npu_add_rms_norm(x, residual, weight, 1e-5)
    wide = x.float() + residual.float()
    close(total, wide.to(dtype), tolerance)
    close(y, (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()).to(dtype), 2 * tolerance)


def test_reduced_product_sum_and_norm(ranks):
    """``npu_mm_all_reduce_add_rms_norm`` as torch_npu's two operators, on two ranks of which each has half of what is
    summed.
    """
    from torch.distributed._local_tensor import LocalTensor

    x, w, residual, weight = torch.randn(24, 16), torch.randn(16, 8), torch.randn(24, 8), torch.randn(8)
    with ranks(2), torch.no_grad():
        parts = (LocalTensor(dict(enumerate(t.contiguous() for t in given))) for given in (x.chunk(2, 1), w.chunk(2)))
        y = registry.EMULATIONS["npu_mm_all_reduce_base"].run(*parts, "0")
        summed = [
            registry.EMULATIONS["npu_add_rms_norm"].run(part, residual, weight, 1e-5)
            for part in y._local_tensors.values()
        ]
    wide = x @ w + residual
    for have, _, total in summed:
        close(total, wide, 1e-4)
        close(have, wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight, 1e-4)


def test_pairs_of_products():
    """``npu_grouped_mat_mul_all_reduce`` is this and a sum over ranks, which the test above has."""
    pairs = [(torch.randn(32, 256), torch.randn(256, 32)), (torch.randn(64, 128), torch.randn(128, 64))]
    for have, (x, w) in zip(npu.npu_grouped_matmul(*map(list, zip(*pairs)), group_type=-1), pairs, strict=True):
        close(have, x @ w, 5e-3)


def test_fused_products_count_as_products():
    """``--op-cal-tflops``: an operator that also communicates has the FLOP of its product, and every version of
    attention the same.
    """
    from mindspeed_fx.cost import aten
    from mindspeed_fx.cost.operators import Spec

    make = lambda *shape: Spec(shape, "bfloat16", 2)  # noqa: E731
    product = aten.cost("mm", make(64, 48), (make(64, 32), make(32, 48)), {}).flops
    assert (
        aten.cost("npu_mm_reduce_scatter_base", make(8, 48), (make(64, 32), make(32, 48), "0", 8), {}).flops == product
    )
    assert (
        aten.cost("npu_all_gather_base_mm", (make(64, 48), make(64, 32)), (make(8, 32), make(32, 48), "0", 8), {}).flops
        == product
    )
    q = make(2, 8, 64, 16)
    counts = {
        aten.cost(name, out, (q, q, q, 8, "BNSD"), {}).flops
        for name, out in (("npu_fusion_attention", [q, q, q]), ("npu_fusion_attention_v3", [q, q, q]))
    }
    assert counts == {aten.cost("scaled_dot_product_attention", q, (q, q, q), {}).flops}


UPSTREAM = {
    "adaptive_recomputing": [
        "passes/recompute/test_recompute_upstream.py::test_within_the_budget_and_never_worse_than_upstream"
    ],
    "adaptive_memory_solver": [
        "passes/recompute/test_recompute_offload.py",
        "passes/recompute/test_recompute_budget.py",
    ],  # ours plans values, not its nine policies per layer
    "ringattn kv cache by layer": "the backward of a ring asks for the keys again (sharding/spmd/ring.py); no layer "
    "keeps those of other ranks",
    "npu_rms_norm": ["::test_thirty_norms"],
    "npu_swiglu": ["::test_swiglu"],
    "npu_rotary_position_embedding": ["::test_rotary"],
    "fused_rotary": ["::test_rotary"],
    "ring_attention_update": [
        "::test_ring_attention_update",
        "sharding/test_ring.py::test_update_joins_two_sets_of_keys",
    ],
    "fusion_attention": ["::test_attention_of_flat_heads"],
    "gmm": ["::test_grouped_products"],
    "permute, unpermute": ["::test_permuted_and_back", "kernels/test_moe_permute_operator.py::test_there_and_back"],
    "matmul_add": [
        "::test_product_added_in_float32",
        "megatron/test_main_grad.py::test_weight_gradients_are_added_to_main_grad",
    ],
    "groupmatmul_add": ["::test_grouped_products_added_in_float32"],
    "mm_all_reduce_add_rms_norm": ["::test_reduced_product_sum_and_norm"],
    "grouped_mat_mul_all_reduce": ["::test_pairs_of_products"],
    "a2a_ag_bmm, bmm_rs_a2a": ["passes/overlap/test_overlap_mc2_experts.py::test_emulated_values_on_every_rank"],
    "ring, Ulysses, adaptive CP": [
        "sharding/test_ring.py::test_equals_one_device",
        "sharding/test_ring_masks.py::test_equals_one_device",
        "sharding/test_simulated.py::test_plan_equals_one_device_with_the_fewest_collectives",
    ],
    "mc2, coc, unaligned": [
        "passes/overlap/test_overlap_mc2.py::test_emulated_values",
        "passes/overlap/test_overlap_decompose.py::test_every_rank_has_the_rows_it_had",
        "sharding/test_simulated.py::test_sizes_that_do_not_fit",
    ],
    "lcal_coc": ["passes/overlap/test_overlap_decompose.py::test_every_rank_has_the_rows_it_had"],
    "layernorm2d, rmsnorm2d": [
        "sharding/test_simulated.py::test_plan_equals_one_device_with_the_fewest_collectives",
        "sharding/test_operator_rules.py::test_every_way_gives_the_whole_result",
    ],
    "recomputing activation, norm": [
        "passes/recompute/test_recompute_policy.py::test_a_policy_makes_its_own_again_and_changes_no_bit"
    ],
    "reuse optimizer": "float32 weights that share memory with their 16-bit copy are not built; the weights of "
    "kernels/adamw.py have buffers of their own",
    "token rearrange": ["passes/fusion/test_one_hot_dispatch.py::test_dispatch_and_combine"],
    "dropout_add_rms_norm": ["::test_sum_and_norm"],
    "tflops": ["::test_fused_products_count_as_products"],
}
"""MindSpeed's unit test -> ours that show the same, or why there is none."""


@pytest.mark.parametrize("theirs", UPSTREAM)
def test_where_upstreams_tests_are(theirs):
    tests, ours = pathlib.Path(__file__).parents[2], UPSTREAM[theirs]
    for where in [] if isinstance(ours, str) else ours:  # else the reason why there is none
        file, _, name = where.partition("::")
        text = (tests / file if file else pathlib.Path(__file__)).read_text()
        assert not name or re.search(rf"^def {name}\(", text, re.M), where
