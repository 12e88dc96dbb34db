"""Kimi Delta Attention in tiles on CPU against its definition in float64: values and gradients."""

import functools

import pytest
import torch

from mindspeed_fx.compat import cpp
from mindspeed_fx.kernels import kimi_delta_attention as definition
from mindspeed_fx.kernels.cpu import kimi_delta_attention as in_tiles
from tests.kernels import test_gated_delta_rule_cpu as sibling
from tests.kernels.test_gated_delta_rule_cpu import assert_close
from tests.kernels.test_kimi_delta_attention_operator import arguments, by_token

ops = torch.ops.mindspeed
served = pytest.mark.skipif(cpp.problem() is not None, reason=str(cpp.problem()))


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


tensors = functools.partial(sibling.tensors, make=arguments)
expected = functools.partial(sibling.expected, rule=by_token)


def run(args, scale, eps, grad=None, grad_state=None):
    """The gradient of the result, the results of the kernels and their gradients."""
    out, final, starts = ops.kimi_delta_tiles(*args, scale, eps)
    grad = torch.randn_like(out) if grad is None else grad
    return grad, (out, final), ops.kimi_delta_tiles_backward(grad, grad_state, starts, *args, scale, eps)


SHAPES = [
    (2, 3, 11, 3, 5, True),
    (1, 1, 64, 16, 16, False),
    (1, 2, 65, 17, 33, True),
    (1, 2, 112, 32, 8, False),
    (1, 2, 150, 8, 140, True),
    (1, 1, 600, 20, 4, True),
    (1, 1, 1, 4, 3, False),
]
"""(batch, heads, seq, k_dim, v_dim, whether there is a state): tiles of one to four blocks, up to three spans."""


@served
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_are_the_recurrence(shape, eps):
    args = tensors(*shape)
    grad_state = torch.randn(*shape[:2], *shape[3:5])
    grad, results, grads = run(args, 0.7, eps, grad_state=grad_state)
    want, want_grads = expected(args, 0.7, eps, grad, grad_state)
    assert_close(results, want, 5e-6)
    assert_close(grads, want_grads, 5e-6)


@served
def test_kept_states_are_the_definition_s():
    args = tensors(1, 2, 300, 8, 16, True)
    have, want = (f(*args, 0.7, 1e-3) for f in (ops.kimi_delta_tiles, ops.kimi_delta_attention))
    for h, w in zip(have, want, strict=True):
        assert h.shape == w.shape and h.stride() == w.stride()
        torch.testing.assert_close(h, w, rtol=1e-4, atol=1e-5)


@served
@pytest.mark.parametrize("threads", [2, 5])
def test_heads_on_several_threads(threads):
    args = tensors(2, 3, 70, 8, 16, True)
    torch.set_num_threads(1)
    grad, results, grads = run(args, 0.7, 1e-6)
    torch.set_num_threads(threads)
    _, results_of_threads, grads_of_threads = run(args, 0.7, 1e-6, grad)
    for h, w in zip((*results_of_threads, *grads_of_threads), (*results, *grads), strict=True):
        assert h.stride() == w.stride() and h.equal(w)


@served
@pytest.mark.parametrize("of_gates", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_computed_in_float32(dtype, of_gates):
    q, k, v, g, beta, state = tensors(1, 2, 150, 16, 16, True, dtype=dtype)
    args = (q, k, v, g.to(of_gates or dtype), beta, state)  # models have gates in float32
    grad, (out, final), grads = run(args, 0.25, 1e-6)
    assert out.dtype == dtype and final.dtype == torch.float32
    assert [x.dtype for x in grads] == [x.dtype for x in args]
    want, want_grads = expected(args, 0.25, 1e-6, grad)
    limit = torch.finfo(dtype).eps
    assert_close((out, final), want, limit)
    assert_close(grads, want_grads, limit)


@served
def test_each_argument_has_a_type_of_its_own():
    types = (torch.float32, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.float16)
    args = [x.to(dtype) for x, dtype in zip(tensors(2, 2, 70, 8, 6, True), types)]
    grad, results, grads = run(args, 0.7, 1e-3)
    assert [x.dtype for x in (*results, *grads)] == [torch.float16, torch.float32, *types]
    want, want_grads = expected(args, 0.7, 1e-3, grad)
    limit = torch.finfo(torch.bfloat16).eps
    assert_close(results, want, limit)
    assert_close(grads, want_grads, limit)


@served
def test_any_storage():
    args = [x.detach().float() for x in arguments(2, 4, 20, 8, 6, True)]
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in args]
    turned[3] = args[3][:, :, :1].expand(2, 4, 20, 8)
    turned[4] = args[4][:, :, :1].expand(2, 4, 20)
    grad = torch.ones(()).expand(2, 4, 20, 6)
    _, results, grads = run(turned, 0.7, 1e-3, grad)
    want, want_grads = expected(turned, 0.7, 1e-3, grad)
    assert_close(results, want, 1e-5)
    assert_close(grads, want_grads, 2e-5)


@served
@pytest.mark.parametrize("strength", [3.0, 30.0, 1000.0])
def test_strong_gates(strength):
    """Sums of gates pass what e^x can hold and lose the small gates beside them; every other channel has small ones."""
    args = tensors(1, 2, 300, 16, 8)
    args[3][..., ::2] *= strength
    args[3][:, :, 5::7] *= strength  # tokens that forget all, among those that forget little
    grad, results, grads = run(args, 1.0, 1e-6)
    want, want_grads = expected(args, 1.0, 1e-6, grad)
    assert_close(results, want, 1e-5)
    assert_close(grads, want_grads, 1e-5)


@served
def test_gates_that_forget_all():
    args = tensors(1, 1, 70, 16, 8)
    args[3][:, :, 20] = float("-inf")
    args[3][..., 40, 3] = float("-inf")
    grad, results, grads = run(args, 1.0, 1e-6)
    want, _ = expected(args, 1.0, 1e-6, grad)
    assert_close(results, want, 1e-5)
    assert all(x.isfinite().all() for x in grads)


@served
def test_no_gates_and_equal_keys():
    """Powers of a system of equal keys grow like binomials."""
    q, k, v, g, beta, _ = tensors(1, 1, 128, 8, 8)
    args = (q, torch.ones_like(k) / 8**0.5, v, torch.zeros_like(g), torch.ones_like(beta), None)
    grad, results, grads = run(args, 1.0, None)
    want, want_grads = expected(args, 1.0, None, grad)
    assert_close(results, want, 1e-5)
    assert_close(grads, want_grads, 1e-4)


@served
def test_small_numbers_are_as_before_afterwards():
    """The kernels take numbers below the smallest normal one for zero, on their own threads and for their own time."""
    tiny = torch.tensor([torch.finfo(torch.float32).tiny])
    torch.set_num_threads(1)
    run(tensors(1, 1, 5, 4, 4), 1.0, None)
    assert (tiny / 2 > 0).all()


def test_what_is_not_served_is_the_definition():
    args = tensors(1, 2, 5, 3, 4, True, dtype=torch.float64)
    assert "torch.float64 on cpu" in in_tiles.problem(*args)
    assert "bfloat16 on meta" in in_tiles.problem(torch.empty(1, device="meta", dtype=torch.bfloat16))
    grad, results, grads = run(args, 0.7, 1e-3)
    want, want_grads = expected(args, 0.7, 1e-3, grad)
    assert_close((*results, *grads), (*want, *want_grads), 1e-12)
    empty = tensors(1, 2, 0, 3, 4, True)
    assert ops.kimi_delta_tiles(*empty, 1.0)[1].equal(empty[5])
    with pytest.raises(ValueError, match="beta is"):
        ops.kimi_delta_tiles(*(x.float() for x in args[:4]), args[4][:, :1].float(), None, 1.0)


def test_without_the_library_the_definition_runs(monkeypatch):
    monkeypatch.setattr(cpp, "function", lambda name: None)
    args = tensors(1, 2, 9, 3, 4, True)
    grad, results, grads = run(args, 0.7, 1e-3)
    want, want_grads = expected(args, 0.7, 1e-3, grad)
    assert_close((*results, *grads), (*want, *want_grads), 1e-5)


@served
def test_the_compiled_step_is_these_kernels(monkeypatch):
    calls, call = [], cpp.call
    monkeypatch.setattr(cpp, "call", lambda name, *args: (calls.append(name), call(name, *args))[1])
    leaves = [x.requires_grad_() for x in tensors(1, 2, 9, 3, 4, True)]

    def loss(*args):
        out, final, _ = ops.kimi_delta_attention(*args, 0.7, 1e-3)
        return out.square().sum() + final.sum()

    compiled = torch.compile(loss, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    for have, want in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, loss))):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    assert calls == ["kimi_delta_forward", "kimi_delta_backward"]


def test_rules_of_custom_operators():
    args = tensors(2, 3, 7, 3, 5, True)
    results = ops.kimi_delta_tiles(*args, 0.7, 1e-6)
    for f, more in ((ops.kimi_delta_tiles, ()), (ops.kimi_delta_tiles_backward, results)):
        checks = torch.library.opcheck(f.default, (*more, *args, 0.7, 1e-6), raise_exception=False)
        assert set(checks.values()) == {"SUCCESS"}, checks
    for operator in (definition.kimi_delta_attention, definition.kimi_delta_attention_backward):
        assert operator.lowerings["cpu"][0].kernel == "tiles of 64 tokens"


@served
@pytest.mark.parametrize("wrong", ["grad", "grad_state", "starts"])
def test_gradients_of_other_shapes_are_refused(wrong):
    """The kernel would read past their ends."""
    args = tensors(*SHAPES[0])
    out, final, starts = ops.kimi_delta_tiles(*args, 0.3, None)
    of_results = {"grad": out, "grad_state": final, "starts": starts}
    of_results[wrong] = of_results[wrong][:1]
    with pytest.raises(ValueError, match=f"{wrong} is"):
        ops.kimi_delta_tiles_backward(*of_results.values(), *args, 0.3, None)
