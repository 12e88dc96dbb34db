"""Products of 16-bit types summed in float32 on CPU, against float64, and how graphs and losses reach them."""

import operator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.compat import cpp, dispatcher
from mindspeed_fx.kernels import linear_cross_entropy_work
from mindspeed_fx.kernels.cpu import narrow_product
from mindspeed_fx.kernels.cpu.narrow_product import TYPES, multiply
from mindspeed_fx.passes.lowering import narrow_products
from tests.models import explain

ops = torch.ops.mindspeed
served = pytest.mark.skipif(cpp.problem() is not None, reason=str(cpp.problem()))
SIZES = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 300])
NARROW = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def no_instructions(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(dispatcher, "multiplies_narrow", lambda dtype: False)
    monkeypatch.setattr(cpp, "multiplies_pairs", lambda: False)
    yield
    torch.set_num_threads(before)


def operand(batch, rows, cols, dtype, turned):
    shape = (*batch, cols, rows) if turned else (*batch, rows, cols)
    x = torch.randn(shape).to(dtype)
    return x.transpose(-1, -2) if turned else x


HAS_PAIRS = cpp.problem() is None and cpp.multiplies_pairs()


@served
@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.sampled_from([False, True]) if HAS_PAIRS else st.just(False),
    st.sampled_from([(), (1,), (3,)]),
    SIZES,
    SIZES,
    st.sampled_from([1, 7, 16, 255, 256, 257, 600]),
    st.tuples(*[st.sampled_from(TYPES)] * 3),
    st.tuples(*[st.booleans()] * 3),
    st.sampled_from([1.0, -0.5]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 5]),
)
def test_is_the_product_rounded_once(pairs, batch, m, n, k, types, turned, scale, add, has_bias, threads):
    """In float32 tiles, and in pairs of bfloat16, where a float32 operand beside a bfloat16 one is rounded."""
    torch.set_num_threads(threads)
    torch.manual_seed(m * n + k)
    a, b = operand(batch, m, k, types[0], turned[0]), operand(batch, k, n, types[1], turned[1])
    out, bias = operand(batch, m, n, types[2], turned[2]), torch.randn(n) if has_bias else None
    if pairs and torch.bfloat16 in types[:2] and torch.float16 not in types[:2]:
        if turned[2] and has_bias:  # left to torch's product, which rounds nothing
            a, b = (x.bfloat16().to(x.dtype) for x in (a, b))
        want = scale * (a.bfloat16().double() @ b.bfloat16().double())
    else:
        want = scale * a.double() @ b.double()
    want += (out.double() if add else 0) + (bias.double() if has_bias else 0)
    with mock.patch.object(cpp, "multiplies_pairs", lambda: pairs):
        have = multiply(a, b, out, bias, scale, add)
    assert have is out
    eps = torch.finfo(types[2]).eps if types[2] != torch.float32 else 0
    bound = eps * want.abs() + 1e-5 * k**0.5 + 1e-5 * want.abs()
    assert ((have.double() - want).abs() <= bound).all()


@served
@pytest.mark.parametrize("dtype", NARROW)
def test_the_error_is_that_of_rounding(dtype):
    """A float64 product rounded to the type errs as much; ATen's own may err more."""
    a, b = torch.randn(50, 400).to(dtype), torch.randn(400, 70).to(dtype)
    exact = a.double() @ b.double()
    rounded = (exact.to(dtype).double() - exact).abs()
    have = (ops.narrow_product(a, b).double() - exact).abs()
    assert have.max() <= 1.001 * rounded.max() and have.mean() <= 1.01 * rounded.mean()


@served
def test_overflow_and_nan_are_as_in_eager():
    a, b = torch.full((20, 40), 60.0).half(), torch.full((40, 20), 60.0).half()
    a[3, 7], a[5, 2] = float("nan"), float("-inf")
    assert torch.equal(ops.narrow_product(a, b).nan_to_num(7.0), (a @ b).nan_to_num(7.0))
    assert ops.narrow_product(a, b)[0, 0] == float("inf") and ops.narrow_product(a, b)[3].isnan().all()
    wide = torch.full((1, 1), 3.4e38)
    assert multiply(wide, wide.sign(), torch.empty(1, 1, dtype=torch.bfloat16)).isinf().all()  # rounds up to infinity
    assert multiply(-a[3:4].float(), b.float(), torch.empty(1, 20, dtype=torch.bfloat16)).isnan().all()
    tiny = torch.tensor([[3e-8]])  # a subnormal number of float16
    assert multiply(tiny, torch.ones(1, 1), torch.empty(1, 1, dtype=torch.float16)).double() == tiny.half().double()


@served
def test_any_storage_and_nothing_to_multiply():
    a, b = torch.randn(40, 60).bfloat16()[::2, ::3], torch.randn(20, 1).bfloat16().expand(20, 33)
    torch.testing.assert_close(ops.narrow_product(a, b), (a.float() @ b.float()).bfloat16())
    assert torch.equal(ops.narrow_product(a[:, :0], b[:0]), torch.zeros(20, 33).bfloat16())
    assert ops.narrow_product(a[:0], b).shape == (0, 33)
    torch.testing.assert_close(ops.narrow_product(a, b, None, torch.float32), a.float() @ b.float())


@served
def test_the_same_whatever_the_number_of_threads():
    a, b, results = torch.randn(200, 300).bfloat16(), torch.randn(300, 1000).bfloat16(), []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        results.append(ops.narrow_product(a, b))
    assert torch.equal(*results)


def test_what_it_does_not_take_has_a_reason(monkeypatch):
    assert "bfloat16 and float16 on cpu only" in narrow_product.problem(torch.float32, "cpu")
    assert "bfloat16 and float16 on cpu only" in narrow_product.problem(torch.bfloat16, "cuda")
    monkeypatch.setattr(cpp, "problem", lambda: "no compiler")
    assert narrow_product.problem(torch.bfloat16, "cpu") == "no compiler"
    monkeypatch.setattr(dispatcher, "multiplies_narrow", lambda dtype: True)
    assert narrow_product.problem(torch.float16, "cpu") == "this processor multiplies torch.float16 itself"


# --------------------------------------------------------------------------- graphs


def errors(model, inputs, dtype, run):
    """Of the results and gradients of ``run``, in units of the largest exact value, against float64."""
    exact = model.double()
    wanted = [exact(inputs.double())]
    wanted += torch.autograd.grad(wanted[0].square().sum(), exact.parameters())
    model.to(dtype)
    have = [run(inputs.to(dtype))]
    have += torch.autograd.grad(have[0].float().square().sum(), model.parameters())
    return torch.stack([(h.double() - w).norm() / w.norm() for h, w in zip(have, wanted, strict=True)])


@served
@pytest.mark.parametrize("dtype", NARROW)
def test_a_narrow_model_runs_on_it_and_errs_no_more(dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 80, bias=False))
    for p in model.parameters():
        p.data = p.data.to(dtype).float()
    x = torch.randn(128, 64).to(dtype).float()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"})
    eager, ours = errors(model, x, dtype, model), errors(model, x, dtype, compiled)
    assert (ours <= 1.1 * eager + 1e-5).all(), (ours, eager)


@served
def test_sites_and_near_misses():
    linear, small = torch.nn.Linear(64, 96).bfloat16(), torch.nn.Linear(64, 8).bfloat16()
    x, scores = torch.randn(128, 64).bfloat16(), torch.randn(4, 64, 64).bfloat16()

    def f(x, scores):
        y = torch.addmm(torch.ones(128, 96).bfloat16(), x, linear.weight.t())
        y = y + torch.addmm(linear.bias, x, linear.weight.t(), beta=0.5)
        return linear(x) + y, small(x), scores @ scores, x.float() @ x.float().t()

    report = explain(f, x, scores, codegen="eager")
    # The linear layer, its weight's gradient, the batched product.
    assert [s.nodes for s in report.sites(narrow_products.NAME)] == [("addmm_2",), ("bmm",), ("mm_2",)]
    assert sorted(s.reason for s in report.skipped(narrow_products.NAME)) == [
        "128 x 64 x 8 is too small to gain",
        "8 x 128 x 64 is too small to gain",
        "factors {'beta': 0.5} on bias and product",
        "the bias has 2 dimensions",
    ]


@served
def test_autocast_over_float32_weights():
    model, x = torch.nn.Linear(64, 96), torch.randn(128, 64)

    def loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="mindspeed", options={"codegen": "eager"})
    want, have = (torch.autograd.grad(f(), model.parameters()) for f in (loss, compiled))
    for h, w in zip(have, want, strict=True):
        assert h.dtype == w.dtype == torch.float32
        torch.testing.assert_close(h, w, rtol=2e-2, atol=2e-2 * float(w.abs().max()))


# --------------------------------------------------------------------------- losses and experts


@served
@pytest.mark.parametrize("has_instructions", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("width", [40, 48])
def test_losses_of_narrow_logits(monkeypatch, has_instructions, dtype, softcap, width):
    """Of both ways: logits in float32 from our products, and rounded ones from the processor's; all tokens at once,
    which they are where they are at most twice as many as the width, and in chunks whose sums are float32."""
    monkeypatch.setattr(dispatcher, "multiplies_narrow", lambda dtype: has_instructions)
    monkeypatch.setattr(cpp, "multiplies_pairs", lambda: has_instructions and HAS_PAIRS)
    monkeypatch.setattr(linear_cross_entropy_work, "CACHED", 16 * 130)
    monkeypatch.setattr(linear_cross_entropy_work, "ROWS", 1)
    torch.manual_seed(0)
    inputs = [torch.randn(n, width).to(dtype).requires_grad_() for n in (90, 130)] + [
        torch.randn(130).to(dtype).requires_grad_()
    ]
    target = torch.randint(0, 130, (90,))
    target[::7] = -100

    def unfused(hidden, weight, bias):
        logits = F.linear(hidden, weight, bias)
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)

    def fused(hidden, weight, bias):
        return ops.linear_cross_entropy(hidden, weight, bias, target, -100, 0.0, 0.0, softcap)

    exact = [x.detach().double().requires_grad_() for x in inputs]
    values = []
    for f, args in ((unfused, exact), (unfused, inputs), (fused, inputs)):
        loss = f(*args)
        values.append([loss.detach().double(), *(g.double() for g in torch.autograd.grad(loss * 64, args))])
    for want, eager, have in zip(*values, strict=True):
        assert (have - want).norm() <= 1.1 * (eager - want).norm() + 1e-4 * want.norm()


@served
@pytest.mark.parametrize("dtype", NARROW)
def test_experts(dtype):
    x, weight, grad = (torch.randn(*s).to(dtype) for s in ((70, 24), (4, 24, 40), (70, 40)))
    offsets = torch.tensor([20, 20, 63, 65])
    wide = [t.double() for t in (grad, x, weight)]
    for have, want in zip(
        (
            ops.grouped_matmul(x, weight, offsets),
            *ops.grouped_matmul_backward(grad, x, weight, offsets, True, True),
        ),
        (
            ops.grouped_matmul(*wide[1:], offsets),
            *ops.grouped_matmul_backward(*wide, offsets, True, True),
        ),
        strict=True,
    ):
        assert have.dtype == dtype
        torch.testing.assert_close(have.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)


@served
def test_a_bias_of_every_second_number():
    a, b, numbers = torch.randn(4, 8).bfloat16(), torch.randn(8, 6).bfloat16(), torch.randn(12)
    want = a.double() @ b.double() + numbers[::2].double()
    have = multiply(a, b, torch.empty(4, 6), numbers[::2])
    assert (have.double() - want).abs().max() <= 1e-5 * want.abs().max()


def test_the_code_of_a_rewritten_graph_is_written_anew(monkeypatch):
    gm = torch.fx.symbolic_trace(lambda x: x + 1)

    def rewrite(*_):
        next(n for n in gm.graph.nodes if n.target is operator.add).target = operator.sub

    monkeypatch.setattr(narrow_products, "rewrite_each", rewrite)
    narrow_products.narrow_products(gm, mock.Mock(**{"options.target": "cpu"}))
    assert gm(torch.ones(1)) == 0
