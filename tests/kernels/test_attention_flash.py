"""Our own flash attention on CPU against the reference in float64: every option, sizes around its tiles, and where it
does not serve.
"""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx import kernels
from mindspeed_fx.compat import cpp
from mindspeed_fx.kernels.cpu import attention_flash
from mindspeed_fx.kernels.cpu.weight_gradient import weight_gradient

ops = torch.ops.mindspeed
served = pytest.mark.skipif(cpp.problem() is not None, reason=str(cpp.problem()))
SIZES = st.sampled_from([1, 2, 63, 64, 65, 130, 200])


HAS_PAIRS = cpp.problem() is None and cpp.multiplies_pairs()


@pytest.fixture(autouse=True)
def threads_as_before(monkeypatch):
    """Without pairs of bfloat16, but in the tests that say so."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpp, "multiplies_pairs", lambda: False)
    yield
    torch.set_num_threads(before)


def both(q, k, v, grad, causal, scale, window, softcap, sinks):
    """Results and gradients of the kernel, and of the reference in float64."""
    out, lse = ops.attention_flash(q, k, v, causal, scale, window, softcap, sinks)
    have = [out, lse, *ops.attention_flash_backward(grad, q, k, v, out, lse, causal, scale, window, softcap)]
    q, k, v, grad, sinks = (None if x is None else x.double() for x in (q, k, v, grad, sinks))
    out, lse = ops.attention(q, k, v, None, causal, scale, window, softcap, sinks)
    return have, [out, lse, *ops.attention_backward(grad, q, k, v, out, lse, None, causal, scale, window, softcap)]


@served
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    SIZES,
    SIZES,
    st.sampled_from([(8, 8), (40, 24), (17, 33)]),
    st.sampled_from([0, 0, 1, 50, 300]),
    st.sampled_from([0.0, 0.0, 3.0]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 5]),
)
def test_is_the_reference(batch, heads, queries, keys, dims, window, softcap, causal, sinks, stored_bsnd, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(queries * 1000 + keys)

    def made(n, s, d):
        return torch.randn(batch, s, n, d).transpose(1, 2) if stored_bsnd else torch.randn(batch, n, s, d)

    q, k, v, grad = (
        made(heads[0], queries, dims[0]),
        made(heads[1], keys, dims[0]),
        made(heads[1], keys, dims[1]),
        made(heads[0], queries, dims[1]),
    )
    have, want = both(
        q,
        k,
        v,
        grad,
        causal,
        dims[0] ** -0.5,
        window if causal else 0,
        softcap,
        torch.randn(heads[0]) if sinks else None,
    )
    for h, w in zip(have, want, strict=True):
        assert h.shape == w.shape and h.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(h.double(), w, rtol=2e-5, atol=2e-5)


@served
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.sampled_from([torch.bool, torch.float32, torch.bfloat16]),
    st.sampled_from([(2, 4, 1), (1, 1, 1), (1, 4, 0), (2, 1, 0)]),
    st.sampled_from([1, 64, 130, 200]),
    st.sampled_from([1, 65, 200]),
    st.sampled_from([(8, 8), (40, 24), (17, 80)]),
    st.booleans(),
    st.sampled_from([1, 5]),
)
def test_masks_beside_float32(dtype, shape, queries, keys, dims, causal, threads):
    """Of a boolean one whole tiles allow nothing, and a row of another tile."""
    torch.set_num_threads(threads)
    torch.manual_seed(queries * 1000 + keys)
    batch, heads, rows = shape
    mask = torch.randn(batch, heads, queries if rows else 1, keys)
    if dtype == torch.bool:
        mask = mask > 0
        mask[:, :, :, 64:128], mask[:, :, :64, 128:], mask[:, :, -1] = False, False, False
    sizes = (4, queries, dims[0]), (2, keys, dims[0]), (2, keys, dims[1]), (4, queries, dims[1])
    q, k, v, grad = (torch.randn(2, *size) for size in sizes)
    options = (causal, dims[0] ** -0.5)
    out, lse = ops.attention_flash(q, k, v, *options, 0, 0.0, None, mask.to(dtype))
    have = [out, lse, *ops.attention_flash_backward(grad, q, k, v, out, lse, *options, 0, 0.0, mask.to(dtype))]
    wide, mask = [x.double() for x in (q, k, v)], mask.to(dtype) if dtype == torch.bool else mask.to(dtype).double()
    out, lse = ops.attention(*wide, mask, *options)
    want = [out, lse, *ops.attention_backward(grad.double(), *wide, out, lse, mask, *options)]
    for h, w in zip(have, want, strict=True):
        torch.testing.assert_close(h.double(), w, rtol=2e-5, atol=2e-5)


@served
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.sampled_from([None, torch.bool, torch.float32]),
    st.booleans(),
    st.sampled_from([(4, 4), (4, 1)]),
    st.sampled_from([1, 64, 130, 200]),
    st.sampled_from([1, 65, 200]),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1, 3]),
)
def test_dropped_weights(masked, causal, heads, queries, keys, softcap, dtype, threads):
    """The kernel against the reference, also where the mask, or dropout, leaves a row nothing."""
    torch.set_num_threads(threads)
    torch.manual_seed(queries * 1000 + keys)
    (n, kv), p = heads, 0.3
    sizes = (n, queries, 24), (kv, keys, 24), (kv, keys, 40), (n, queries, 40)
    q, k, v, grad = (torch.randn(2, *size).to(dtype) for size in sizes)
    keep = (torch.rand(2, queries, n, keys) > p).transpose(1, 2)
    keep[:, 0, queries // 2] = False
    mask = None if masked is None else torch.randn(2, 1, 1, keys)
    if masked == torch.bool:
        mask = mask > 0
        mask[1] = False
    elif masked is not None:
        mask[1] = -1e30  # hides all of a sequence by a number: the weights are uniform
    options = (mask, causal, 0.2, 0, softcap)
    out, lse = ops.attention_flash(q, k, v, *options[1:], None, mask, keep, p)
    have = [
        out,
        lse,
        *ops.attention_flash_backward(grad, q, k, v, out, lse, *options[1:], mask, keep, p),
    ]
    wide = [x.double() for x in (q, k, v)]
    want = ops.attention_dropout(*wide, keep, *options, p)
    saved = (out.double(), lse.double())  # rounded, of which the gradient is made
    want += ops.attention_dropout_backward(grad.double(), *wide, *saved, keep, *options, p)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for h, w in zip(have, want, strict=True):
        torch.testing.assert_close(h.double(), w, rtol=tolerance, atol=tolerance)


@served
def test_any_storage_and_gradient():
    q, k, v = (
        torch.randn(2, 4, 16, 70).transpose(2, 3),
        torch.randn(2, 2, 70, 32)[..., ::2],
        torch.randn(1, 2, 70, 16).expand(2, 2, 70, 16),
    )
    have, want = both(q, k, v, torch.ones(()).expand(2, 4, 70, 16), True, 0.25, 0, 0.0, None)
    for h, w in zip(have, want, strict=True):
        torch.testing.assert_close(h.double(), w, rtol=2e-5, atol=2e-5)


@served
@pytest.mark.parametrize(
    "queries, keys, causal", [(0, 5, True), (0, 5, False), (5, 0, False), (70, 3, True), (3, 200, True)]
)
def test_rows_and_keys_that_meet_nothing_are_zero(queries, keys, causal):
    q, k, v, grad = (torch.randn(1, 2, n, 8) for n in (queries, keys, keys, queries))
    have, want = both(q, k, v, grad, causal, 0.3, 2 if causal else 0, 0.0, None)
    for h, w in zip(have, want, strict=True):
        torch.testing.assert_close(h.double(), w, rtol=2e-5, atol=2e-5)
    assert have[0].isfinite().all() and all(g.isfinite().all() for g in have[2:])


@served
def test_large_scores_are_exact_and_nan_is_not_hidden():
    q, k, v, grad = (torch.randn(1, 1, 80, 8) for _ in range(4))
    have, want = both(
        100 * q, 100 * k, v, grad, True, 1.0, 0, 0.0, None
    )  # scores of tens of thousands: all weight on one key
    torch.testing.assert_close(have[0].double(), want[0], rtol=1e-4, atol=1e-4)
    q[0, 0, 70, 3] = float("nan")
    out, _ = ops.attention_flash(q, k, v, True, 1.0)
    assert out[0, 0, 70].isnan().all() and not out[0, 0, :70].isnan().any()


@served
def test_the_same_whatever_the_number_of_threads():
    q, k, v, grad = (torch.randn(2, n, 130, 16) for n in (4, 4, 4, 4))
    found = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        out, lse = ops.attention_flash(q, k, v, True, 0.25)
        found.append([out, lse, *ops.attention_flash_backward(grad, q, k, v, out, lse, True, 0.25)])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@served
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    SIZES,
    SIZES,
    st.sampled_from([(8, 8), (40, 24), (17, 33)]),
    st.sampled_from([0, 0, 1, 50]),
    st.sampled_from([0.0, 3.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, torch.bool, torch.float32, torch.bfloat16]),
    st.sampled_from([(2, 1, 1), (1, 1, 0), (2, 3, 0), (1, 3, 1)]),
    st.sampled_from([1, 2, 5]),
)
def test_narrow_types_are_the_reference_in_float32_rounded_once(
    dtype, heads, queries, keys, dims, window, softcap, causal, sinks, kind, shape, threads
):
    """``shape`` of the mask: 2 of the batch, 3 of the heads, 0 of the queries; 1 is broadcast."""
    torch.set_num_threads(threads)
    torch.manual_seed(queries * 1000 + keys)
    q, grad = (torch.randn(2, heads[0], queries, d).to(dtype) for d in dims)
    k, v = (torch.randn(2, heads[1], keys, d).to(dtype) for d in dims)
    sizes = [{2: 2, 3: heads[0], 0: queries, 1: 1}[n] for n in shape] + [keys]
    mask = None if kind is None else torch.rand(sizes) > 0.2 if kind == torch.bool else torch.randn(sizes).to(kind)
    sinks = torch.randn(heads[0]).to(dtype) if sinks else None
    settings = (causal, dims[0] ** -0.5, window if causal else 0, softcap)
    have = ops.attention_flash(q, k, v, *settings, sinks, mask)
    want = ops.attention(q, k, v, mask, *settings, sinks)
    have = [*have, *ops.attention_flash_backward(grad, q, k, v, *have, *settings, mask)]
    want = [*want, *ops.attention_backward(grad, q, k, v, *want, mask, *settings)]
    for h, w in zip(have, want, strict=True):
        assert h.shape == w.shape and h.dtype == w.dtype and h.transpose(1, 2).is_contiguous()
        # Two float32 results of other rounding are at most one 16-bit number apart.
        eps = max(torch.finfo(h.dtype).eps, 1e-5)
        torch.testing.assert_close(h.float(), w.float(), rtol=2 * eps, atol=1e-5 + eps * float(w.abs().max()) / 4)


@pytest.mark.skipif(not HAS_PAIRS, reason="this processor has no products of bfloat16")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    SIZES,
    SIZES,
    st.sampled_from([(8, 8), (40, 24), (16, 160), (17, 33)]),
    st.sampled_from([0, 0, 1, 50]),
    st.sampled_from([0.0, 3.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, torch.bool, torch.bfloat16]),
    st.sampled_from([1, 2, 5]),
)
def test_pairs_of_bfloat16_err_by_the_rounding_of_weights(
    heads, queries, keys, dims, window, softcap, causal, sinks, kind, threads
):
    """Against float64: weights and their gradients are rounded once more than where tiles are float32."""
    torch.set_num_threads(threads)
    torch.manual_seed(queries * 1000 + keys)
    q, grad = (torch.randn(2, heads[0], queries, d).bfloat16() for d in dims)
    k, v = (torch.randn(2, heads[1], keys, d).bfloat16() for d in dims)
    shape = (2, 1, queries, keys)
    mask = None if kind is None else torch.rand(shape) > 0.2 if kind == torch.bool else torch.randn(shape).to(kind)
    options = (causal, dims[0] ** -0.5, window if causal else 0, softcap)
    sinks = torch.randn(heads[0]).bfloat16() if sinks else None
    with mock.patch.object(cpp, "multiplies_pairs", lambda: True):
        have = ops.attention_flash(q, k, v, *options, sinks, mask)
        have = [*have, *ops.attention_flash_backward(grad, q, k, v, *have, *options, mask)]
    q, k, v, grad, sinks = (None if x is None else x.double() for x in (q, k, v, grad, sinks))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    want = ops.attention(q, k, v, mask, *options, sinks)
    want = [*want, *ops.attention_backward(grad, q, k, v, *want, mask, *options)]
    eps = torch.finfo(torch.bfloat16).eps
    # A gradient of scores is a difference, which vanishes where there is one key: its error is that of its parts.
    parts = [0.0, 0.0, k.abs().amax(), q.abs().amax(), 0.0]
    for h, w, part in zip(have, want, parts, strict=True):
        finite = w.isfinite()
        assert torch.equal(h[~finite].double(), w[~finite])
        error = (h.double() - w)[finite].square().mean().sqrt() if finite.any() else torch.zeros(())
        scale = w[finite].square().mean().sqrt() if finite.any() else torch.zeros(())
        assert error <= eps * (2 * scale + part * grad.abs().amax() / 2) + 1e-5


@served
@pytest.mark.parametrize("dtype, pairs", [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
def test_narrow_errors_are_at_most_those_of_aten(dtype, pairs, monkeypatch):
    monkeypatch.setattr(cpp, "multiplies_pairs", lambda: pairs and HAS_PAIRS)
    q, k, v, grad = (torch.randn(2, 4, 200, 32).to(dtype) for _ in range(4))
    aten = torch.ops.aten
    have, exact = both(q, k, v, grad, True, 0.2, 0, 0.0, None)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=0.2)
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True, scale=0.2)
    for h, a, w in zip(have, (out, lse, *gradients), exact, strict=True):
        assert (h.double() - w).norm() <= 1.01 * (a.double() - w).norm() + 1e-6 * w.norm()


@served
def test_large_float16_scores_and_values_behave_as_in_float32():
    q, k, v, grad = (torch.randn(1, 2, 80, 16).half() for _ in range(4))
    q, k = q * 300, k * 300  # products beyond what float16 holds, which scores in float32 are not
    have, want = both(q, k, v, grad, True, 1.0, 0, 0.0, None)
    assert all(h.isfinite().all() for h in have[:2])
    torch.testing.assert_close(have[0].double(), want[0], rtol=2e-3, atol=2e-3)
    v[0, 0, 3, 5] = float("inf")  # infinity where its weight is not 0, NaN where it is
    out, want = ops.attention_flash(q, k, v, True, 1.0)[0], ops.attention(q, k, v, None, True, 1.0)[0]
    torch.testing.assert_close(out, want, equal_nan=True)


def test_other_types_run_the_reference():
    q, k, v = (torch.randn(1, 2, 9, 8).double() for _ in range(3))
    assert "not all float32, bfloat16 or float16" in attention_flash.supports(q, k, v)
    for have, want in zip(ops.attention_flash(q, k, v, True, 0.3), ops.attention(q, k, v, None, True, 0.3)):
        assert torch.equal(have, want)


@pytest.mark.parametrize("capability, word", [("DEFAULT", "has DEFAULT"), ("AVX2", "no C++ compiler: none here")])
def test_where_it_cannot_be_built_it_says_why_and_atens_kernel_serves(monkeypatch, capability, word):
    def no_compiler():
        raise RuntimeError("none here")

    monkeypatch.setattr(cpp, "capability", lambda: capability)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    for cached in (cpp._processor_problem, cpp._search_compiler):
        cached.cache_clear()
    cpp.forget()
    try:
        q = torch.empty(1, 2, 9, 8, device="meta")
        chosen, reasons = kernels.REGISTRY[ops.attention.default].choose(
            "cpu", (q, q, q, None, True, 0.3, 0, 0.0, None), {}
        )
        assert chosen.kernel == "aten flash attention"
        assert len(reasons) == 1 and reasons[0].startswith("flash attention in C++: ") and word in reasons[0]
    finally:
        for cached in (cpp._processor_problem, cpp._search_compiler):
            cached.cache_clear()


@served
def test_halves_of_the_keys_give_parts_of_the_gradients():
    """What the sharding rule says of the kernel; its exhaustive test runs the reference."""
    q, grad = torch.randn(2, 4, 70, 16), torch.randn(2, 4, 70, 24)
    k, v = torch.randn(2, 2, 130, 16), torch.randn(2, 2, 130, 24)
    out, lse = ops.attention_flash(q, k, v, False, 0.25, 0, 2.0)
    whole = ops.attention_flash_backward(grad, q, k, v, out, lse, False, 0.25, 0, 2.0)
    (dq0, dk0, dv0), (dq1, dk1, dv1) = (
        ops.attention_flash_backward(grad, q, k[:, :, part], v[:, :, part], out, lse, False, 0.25, 0, 2.0)
        for part in (slice(0, 65), slice(65, None))
    )
    for have, want in zip((dq0 + dq1, torch.cat([dk0, dk1], 2), torch.cat([dv0, dv1], 2)), whole):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_a_failed_build_is_told_and_the_reference_runs(monkeypatch):
    import concurrent.futures

    broken = concurrent.futures.Future()
    broken.set_exception(RuntimeError("ld: cannot find -lgomp"))
    told = []
    monkeypatch.setattr(cpp, "_library", lambda: broken)
    monkeypatch.setattr(cpp, "problem", lambda: None)
    monkeypatch.setattr(cpp.log, "warning", lambda text, *args: told.append(text % args))
    cpp.forget()
    try:
        q, k, v, grad = (torch.randn(1, 2, 9, 8) for _ in range(4))
        out, lse = ops.attention_flash(q, k, v, True, 0.3)
        assert torch.equal(out, ops.attention(q, k, v, None, True, 0.3)[0])
        for have, want in zip(
            ops.attention_flash_backward(grad, q, k, v, out, lse, True, 0.3),
            ops.attention_backward(grad, q, k, v, out, lse, None, True, 0.3),
        ):
            assert torch.equal(have, want)
        a, b, into = torch.randn(5, 3), torch.randn(5, 4), torch.randn(3, 4)
        want = into + 0.5 * a.t() @ b
        torch.testing.assert_close(weight_gradient(a, b, into, 0.5, add=True), want)
        torch.testing.assert_close(weight_gradient(a, b), a.t() @ b)
        assert len(told) == 1 and "cannot find -lgomp" in told[0]
    finally:
        cpp.forget()


@served
def test_the_build_leaves_inductors_search_for_instruction_sets_alone(monkeypatch):
    """It is not made for two threads: both would add their finds to one list of flags, and the next process would miss
    every kernel.
    """
    import threading

    from torch._inductor import codecache

    asked, pick = [], codecache.pick_vec_isa
    pick()  # torch before 2.13 asks whatever it is told, and finds this answer
    monkeypatch.setattr(codecache, "pick_vec_isa", lambda: asked.append(threading.current_thread()) or pick())
    cpp.forget()
    try:
        cpp._library().result()
        assert not asked or torch.__version__ < "2.13"
    finally:
        cpp.forget()


@served
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 70])
def test_keys_that_no_query_may_see_may_be_infinite(dtype, rows):
    q, k, v, grad = (torch.randn(1, 2, 70, 8, dtype=dtype) for _ in range(4))
    mask = torch.rand(rows, 70) < 0.5
    mask[:, 0], mask[:, 33:35] = True, False
    k[:, :, 33], k[:, :, 34] = float("inf"), float("nan")
    settings = False, 0.3, 0, 0.0
    out, lse = ops.attention_flash(q, k, v, *settings, None, mask.expand(1, 1, 70, 70))
    hidden = k.masked_fill(~k.isfinite(), 0.0)
    want, want_lse = ops.attention_flash(q, hidden, v, *settings, None, mask.expand(1, 1, 70, 70))
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    _, dk, dv = ops.attention_flash_backward(grad, q, k, v, out, lse, *settings, mask.expand(1, 1, 70, 70))
    want = ops.attention_flash_backward(grad, q, hidden, v, out, lse, *settings, mask.expand(1, 1, 70, 70))
    assert torch.equal(dk, want[1]) and torch.equal(dv, want[2])
