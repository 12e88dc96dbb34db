"""The gated delta rule in tiles on CPU against its definition in float64, token by token: values and gradients."""

import pytest
import torch

from mindspeed_fx.compat import cpp
from mindspeed_fx.kernels import gated_delta_rule as definition
from mindspeed_fx.kernels.cpu import gated_delta_rule as in_tiles
from tests.kernels.test_gated_delta_rule_operator import arguments, by_token

ops = torch.ops.mindspeed
served = pytest.mark.skipif(cpp.problem() is not None, reason=str(cpp.problem()))


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tensors(*shape, dtype=torch.float32, make=arguments, **options):
    """Arguments of ``make`` with keys short enough for states that stay small where they are not normalized."""
    q, k, *rest = (x if x is None else x.detach() for x in make(*shape, **options))
    return [x if x is None else x.to(dtype) for x in (q, k / k.shape[3] ** 0.5, *rest)]


def run(args, scale, eps, chunk, grad=None, grad_state=None):
    """Results of the kernels and, where they have one, gradients."""
    out, final, starts = ops.delta_tiles(*args, scale, eps, chunk)
    grad = torch.randn_like(out) if grad is None else grad
    return grad, (out, final), ops.delta_tiles_backward(grad, grad_state, starts, *args, scale, eps, chunk)


def expected(args, scale, eps, grad, grad_state=None, rule=by_token):
    """The same of the recurrence in float64; None is the gradient of what is not there."""
    leaves = [x if x is None else x.double().requires_grad_() for x in args]
    out, final = rule(*leaves, scale, eps)
    loss = (out * grad.double()).sum() + (0 if grad_state is None else (final * grad_state.double()).sum())
    grads = iter(torch.autograd.grad(loss, [x for x in leaves if x is not None]))
    return (out, final), [None if x is None else next(grads) for x in leaves]


def assert_close(have, want, limit):
    """Each within ``limit`` of the largest element; gradients of what is not there are not looked at."""
    for h, w in zip(have, want, strict=True):
        if w is not None:
            assert h.shape == w.shape and (h.double() - w).abs().max() <= limit * w.abs().max()


SHAPES = [
    (2, 2, 4, 11, 3, 5, True, True),
    (1, 1, 1, 64, 16, 16, True, False),
    (1, 1, 3, 65, 17, 33, False, True),
    (1, 2, 2, 130, 32, 8, False, False),
    (1, 2, 4, 150, 8, 140, True, True),
    (1, 1, 2, 1, 4, 3, True, False),
]


@served
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("chunk", [3, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_are_the_recurrence(shape, chunk, eps):
    args = tensors(*shape)
    grad_state = torch.randn(shape[0], shape[2], *shape[4:6])
    grad, results, grads = run(args, 0.7, eps, chunk, grad_state=grad_state)
    want, want_grads = expected(args, 0.7, eps, grad, grad_state)
    assert_close(results, want, 1e-5)
    assert_close(grads[: 6 if shape[7] else 5], want_grads[: 6 if shape[7] else 5], 2e-5)
    assert grads[3].numel() or not shape[6]


@served
def test_kept_states_are_the_definition_s():
    args = tensors(1, 2, 4, 150, 8, 16, True, True)
    have, want = (f(*args, 0.7, 1e-3, 16) for f in (ops.delta_tiles, ops.gated_delta_rule))
    for h, w in zip(have, want, strict=True):
        assert h.shape == w.shape and h.stride() == w.stride()
        torch.testing.assert_close(h, w, rtol=1e-4, atol=1e-5)


@served
@pytest.mark.parametrize("threads", [2, 5])
def test_heads_that_share_a_key_on_several_threads(threads):
    args = tensors(1, 2, 6, 70, 8, 16)
    grad, results, grads = run(args, 0.7, 1e-6, 16)
    torch.set_num_threads(threads)
    _, results_of_threads, grads_of_threads = run(args, 0.7, 1e-6, 16, grad)
    for h, w in zip((*results_of_threads, *grads_of_threads), (*results, *grads), strict=True):
        assert h.stride() == w.stride()
        torch.testing.assert_close(h, w, rtol=1e-5, atol=1e-5)


@served
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_computed_in_float32(dtype):
    q, k, v, g, beta, state = tensors(1, 2, 4, 150, 16, 16, True, True, dtype=dtype)
    args = (q, k, v, g.float(), beta, state)  # as the models have it
    grad, (out, final), grads = run(args, 0.25, 1e-6, 64)
    assert out.dtype == dtype and final.dtype == torch.float32
    assert [x.dtype for x in grads] == [dtype, dtype, dtype, torch.float32, dtype, dtype]
    want, want_grads = expected(args, 0.25, 1e-6, grad)
    limit = torch.finfo(dtype).eps
    assert_close((out, final), want, limit)
    assert_close(grads, want_grads, limit)


@served
def test_any_storage():
    args = [x.detach().float() for x in arguments(2, 2, 4, 20, 8, 6, True, True)]
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in args]
    turned[4] = args[4][:, :, :1].expand(2, 4, 20)
    grad = torch.ones(()).expand(2, 4, 20, 6)
    _, results, grads = run(turned, 0.7, 1e-3, 16, grad)
    want, want_grads = expected(turned, 0.7, 1e-3, grad)
    assert_close(results, want, 1e-5)
    assert_close(grads, want_grads, 2e-5)


@served
def test_strong_gates_and_equal_keys():
    """Differences of gates above the diagonal overflow; powers of a system of equal keys grow like binomials."""
    q, k, v, g, beta, _ = tensors(1, 1, 1, 128, 8, 8)
    _, results, grads = run((q, k, v, g * 100, beta, None), 1.0, 1e-6, 64)
    assert all(x.isfinite().all() for x in (*results, *grads))
    args = (q, torch.ones_like(k) / 8**0.5, v, None, torch.ones_like(beta), None)
    grad, results, grads = run(args, 1.0, None, 64)
    want, want_grads = expected(args, 1.0, None, grad)
    assert_close(results, want, 1e-5)
    assert_close(grads[:5], want_grads[:5], 1e-4)


def test_what_is_not_served_is_the_definition():
    args = tensors(1, 1, 2, 5, 3, 4, True, True, dtype=torch.float64)
    assert "torch.float64 on cpu" in in_tiles.problem(*args)
    assert "bfloat16 on meta" in in_tiles.problem(torch.empty(1, device="meta", dtype=torch.bfloat16))
    grad, results, grads = run(args, 0.7, 1e-3, 4)
    want, want_grads = expected(args, 0.7, 1e-3, grad)
    assert_close((*results, *grads), (*want, *want_grads), 1e-12)
    empty = tensors(1, 1, 2, 0, 3, 4, True, True)
    assert ops.delta_tiles(*empty, 1.0)[1].equal(empty[5])
    with pytest.raises(ValueError, match="beta is"):
        ops.delta_tiles(*args[:4], args[4][:, :1].float(), None, 1.0)
    with pytest.raises(ValueError, match="chunk=0"):
        ops.delta_tiles(*(x.float() for x in args), 1.0, None, 0)


def test_without_the_library_the_definition_runs(monkeypatch):
    monkeypatch.setattr(cpp, "function", lambda name: None)
    args = tensors(1, 1, 2, 9, 3, 4, True, True)
    grad, results, grads = run(args, 0.7, 1e-3, 4)
    want, want_grads = expected(args, 0.7, 1e-3, grad)
    assert_close((*results, *grads), (*want, *want_grads), 1e-5)


@served
def test_the_compiled_step_is_these_kernels(monkeypatch):
    calls, call = [], cpp.call
    monkeypatch.setattr(cpp, "call", lambda name, *args: (calls.append(name), call(name, *args))[1])
    leaves = [x.requires_grad_() for x in tensors(1, 1, 2, 9, 3, 4, True, True)]

    def loss(*args):
        out, final, _ = ops.gated_delta_rule(*args, 0.7, 1e-3, 4)
        return out.square().sum() + final.sum()

    compiled = torch.compile(loss, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    for have, want in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, loss))):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    assert calls == ["delta_rule_forward", "delta_rule_backward"]


def test_rules_of_custom_operators():
    args = tensors(2, 2, 4, 7, 3, 5, True, True)
    for f, more in ((ops.delta_tiles, ()), (ops.delta_tiles_backward, None)):
        if more is None:
            out, final, starts = ops.delta_tiles(*args, 0.7, 1e-6, 4)
            more = (out, final, starts)
        results = torch.library.opcheck(f.default, (*more, *args, 0.7, 1e-6, 4), raise_exception=False)
        assert set(results.values()) == {"SUCCESS"}, results
    assert definition.gated_delta_rule.lowerings["cpu"][0].kernel == "tiles of 64 tokens"


@served
@pytest.mark.parametrize("wrong", ["grad", "grad_state", "starts"])
def test_gradients_of_other_shapes_are_refused(wrong):
    """The kernel would read past their ends."""
    args = tensors(*SHAPES[0])
    out, final, starts = ops.delta_tiles(*args, 0.3, None, 16)
    of_results = {"grad": out, "grad_state": final, "starts": starts}
    of_results[wrong] = of_results[wrong][:1]
    with pytest.raises(ValueError, match=f"{wrong} is"):
        ops.delta_tiles_backward(*of_results.values(), *args, 0.3, None, 16)
