"""MindSpeed's operators by their names: formulas in float64 and 16 bits, gradients to one buffer, two ranks, errors."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import mindspeed_fx
from mindspeed_fx import ops
from mindspeed_fx.errors import OptionError
from mindspeed_fx.kernels.base import find
from tests import forks, ranks

DTYPES = {torch.float64: 1e-12, torch.bfloat16: 2e-2}
ACTS = {
    "fastgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "geglu": lambda x: F.gelu(x[..., :4]) * x[..., 4:],
    "swiglu": lambda x: F.silu(x[..., :4]) * x[..., 4:],
    "reglu": lambda x: F.relu(x[..., :4]) * x[..., 4:],
}


def near(have, want, tolerance):
    assert have.shape == want.shape
    assert (have.double() - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTS)
def test_ffn(activation, dtype):
    torch.manual_seed(0)
    x, w1, w2 = (torch.randn(*s).to(dtype) for s in ((2, 3, 6), (6, 8), (8 if "glu" not in activation else 4, 5)))
    if activation in ("fastgelu", "gelu", "relu", "silu"):
        w2 = torch.randn(8, 5).to(dtype)
    b1, b2 = torch.randn(8).to(dtype), torch.randn(5).to(dtype)
    wide = [t.double() for t in (x, w1, w2, b1, b2)]
    want = ACTS[activation](wide[0] @ wide[1] + wide[3]) @ wide[2] + wide[4]
    near(ops.npu_ffn(x, w1, w2, activation, bias1=b1, bias2=b2), want, DTYPES[dtype])
    compiled = torch.compile(
        lambda *t: ops.npu_ffn(*t, activation), backend="mindspeed", fullgraph=True, options={"codegen": "eager"}
    )
    near(compiled(x, w1, w2), ACTS[activation](wide[0] @ wide[1]) @ wide[2], DTYPES[dtype])


@pytest.mark.parametrize("index", [True, False])
def test_ffn_of_experts(index):
    x, w1, w2 = torch.randn(7, 3).double(), torch.randn(3, 3, 8).double(), torch.randn(3, 8, 5).double()
    b1 = torch.randn(3, 8).double()
    given = {"expert_tokens_index": [2, 2, 6]} if index else {"expert_tokens": [2, 0, 4]}
    out = ops.npu_ffn(x, w1, w2, "silu", bias1=b1, **given)
    want = [F.silu(x[a:b] @ w1[e] + b1[e]) @ w2[e] for e, (a, b) in enumerate(((0, 2), (2, 2), (2, 6)))]
    torch.testing.assert_close(out, torch.cat([*want, torch.zeros(1, 5).double()]))


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("by_token", [True, False])
def test_quantized_products(kind, by_token):
    def narrow(*shape):
        return (torch.randn(*shape) * 8).round().to(kind)

    x, w, scale = narrow(9, 16), narrow(2, 16, 5), torch.rand(2, 5)
    tokens = torch.rand(9) if by_token else None
    for group_list, call in ((torch.tensor([4, 8]), ops.npu_quant_gmm), (torch.tensor([4, 4]), ops.npu_quant_gmm_v2)):
        out = call(x, w, scale, per_token_scale=tokens, group_list=group_list, output_dtype=torch.bfloat16)
        parts = [x[a:b].double() @ w[e].double() * scale[e].double() for e, (a, b) in enumerate(((0, 4), (4, 8)))]
        want = torch.cat([*parts, torch.zeros(1, 5).double()])
        want = want if tokens is None else want * tokens.double()[:, None]
        assert out.dtype == torch.bfloat16
        near(out, want, 4e-3)
    int32_overflows = torch.full((2, 2**18), 127, dtype=torch.int8)
    product = torch.ops.mindspeed.quant_grouped_matmul(
        int32_overflows,
        int32_overflows.t()[None].contiguous(),
        torch.tensor([2]),
        torch.ones(1, 2),
        None,
        torch.float64,
    )
    assert product[0, 0] == 127 * 127 * 2**18


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_all_groups_are_added_to_one_buffer(compiled):
    torch.manual_seed(0)
    x, w = torch.randn(9, 4, dtype=torch.double, requires_grad=True), torch.randn(3, 4, 5, dtype=torch.double)
    weight = torch.nn.Parameter(w)
    weight.main_grad = torch.ones(60, dtype=torch.double)
    ends = torch.tensor([4, 4, 8])

    def step(x, weight):
        return ops.npu_gmm(x, weight, group_list=ends, gemm_fusion=True).square().sum()

    run = torch.compile(step, backend="mindspeed", options={"codegen": "eager"}) if compiled else step
    for _ in range(2):  # micro-batches
        run(x, weight).backward()
    want_x, want_w = x.detach().clone().requires_grad_(), w.clone().requires_grad_()
    torch.ops.mindspeed.grouped_matmul(want_x, want_w, ends).square().sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad.view(3, 4, 5), 1 + 2 * want_w.grad)
    torch.testing.assert_close(x.grad, 2 * want_x.grad)


def test_added_in_float32_by_group():
    x, dy, grad = torch.randn(8, 4).bfloat16(), torch.randn(8, 5).bfloat16(), torch.randn(2, 4, 5)
    want = grad.double() + torch.stack([x[:3].double().t() @ dy[:3].double(), x[3:7].double().t() @ dy[3:7].double()])
    ops.npu_groupmatmul_add_fp32(x, dy, [3, 7], grad)
    near(grad, want, 1e-6)


def on_rank(rank, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    name = dist.group.WORLD.group_name
    for dtype, tolerance in DTYPES.items():
        x1, x2 = torch.randn(2, 2, 3, 4).to(dtype), torch.randn(2, 4, 6).to(dtype)
        residual, gamma, bias = torch.randn(2, 3, 6).to(dtype), torch.rand(6).to(dtype), torch.randn(6).to(dtype)
        want = sum(x1[r].double() @ x2[r].double() + bias.double() for r in range(2)) + residual.double()
        normal = F.rms_norm(want, (6,), gamma.double(), 1e-6)
        args = x1[rank], x2[rank], residual, gamma, name
        y, out = ops.npu_mm_all_reduce_add_rms_norm(*args, bias=bias)
        near(y, want, tolerance), near(out, normal, tolerance)
        into = residual.clone()
        y, out = ops.npu_mm_all_reduce_add_rms_norm_(*args[:2], into, *args[3:], bias=bias)
        assert y is into
        near(into, want, tolerance), near(out, normal, tolerance)
        left, right = [x1[:, 0], x1[:, 1, :2]], [x2, x2[..., :3]]
        biases = [bias, bias[:3]]
        have = ops.npu_grouped_mat_mul_all_reduce(
            [t[rank].contiguous() for t in left], [t[rank].contiguous() for t in right], name, bias=biases
        )
        for h, a, w, b in zip(have, left, right, biases, strict=True):
            near(h, sum(a[r].double() @ w[r].double() for r in range(2)) + b.double(), tolerance)
        if dtype == torch.bfloat16:
            on_npu(args, bias, want, normal, have, [t[rank].contiguous() for t in left], right, rank, biases, name)
    dist.destroy_process_group()


def on_npu(args, bias, want, normal, have, left, right, rank, biases, name):
    """By torch_npu's calls, emulated."""
    operator = find(torch.ops.mindspeed.mm_all_reduce_add_rms_norm.default)
    given = (*args, 1e-6, bias)
    kernel, reasons = operator.choose("npu", given, {})
    assert kernel.kernel == "npu_mm_all_reduce_base and npu_rms_norm", reasons
    y, out = kernel.build(*given)
    near(y, want, 2e-2), near(out, normal, 2e-2)
    operator = find(torch.ops.mindspeed.grouped_mm_all_reduce.default)
    given = (left, [t[rank].contiguous() for t in right], biases, name)
    kernel, reasons = operator.choose("npu", given, {})
    assert kernel.kernel == "npu_grouped_matmul of pairs, and an all-reduce", reasons
    for h, w in zip(kernel.build(*given), have, strict=True):
        near(h, w.double(), 2e-2)


def test_sums_over_ranks(tmp_path):
    ranks.spawn(on_rank, (tmp_path, str(forks.free_port())))


def test_costs_are_those_of_the_products():
    from torch.utils.flop_counter import FlopCounterMode

    x, w1, w2 = torch.randn(4, 8), torch.randn(8, 16), torch.randn(16, 8)
    with FlopCounterMode(display=False) as count:
        ops.npu_ffn(x, w1, w2, "gelu")
    assert count.get_total_flops() == 2 * 4 * (8 * 16 + 16 * 8)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x: ops.npu_ffn(x, x, x, "tanh"), "npu_ffn"),
        (lambda x: ops.npu_ffn(x.requires_grad_(), x, x, "relu"), "for inference"),
        (lambda x: ops.npu_ffn(x, x[None], x[None], "relu", expert_tokens=[1], expert_tokens_index=[1]), "one of it"),
        (lambda x: ops.npu_ffn(x, x[None], x[None], "relu", expert_tokens=[1, 2]), "one for each expert"),
        (lambda x: ops.npu_gmm(x, x[None], group_list=[1, 2]), "one end for each of 1 groups"),
        (lambda x: ops.npu_gmm(x, x[None], group_list=[4], group_type=2), "0 is expected"),
        (lambda x: ops.npu_gmm(x, x[None], group_list=[4], gemm_fusion=True), "a main_grad of 16 elements is expected"),
        (lambda x: ops.npu_quant_gmm(x, x[None], x, group_list=[4]), "torch.float32 beside"),
        (lambda x: ops.npu_groupmatmul_add_fp32(x, x, [4], torch.zeros(3)), "float32 of [1, 4, 4] is expected"),
        (lambda x: ops.npu_mm_all_reduce_add_rms_norm(x, x, x, x, "g", "max"), "reduce_op"),
        (lambda x: ops.npu_grouped_mat_mul_all_reduce([x], [], "g"), "lists of [1, 0]"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises(OptionError) as error:
        call(torch.ones(4, 4))
    assert words in str(error.value)


def test_the_package_has_them():
    assert mindspeed_fx.ops is ops and "ops" in mindspeed_fx.__all__
