"""Every operator: gradients against finite differences, the rules of torch's custom operators, kernels against the
reference.
"""

import itertools

import pytest
import torch
from torch.utils import _pytree as pytree

from mindspeed_fx import kernels
from mindspeed_fx.compat import cpp, dispatcher
from mindspeed_fx.kernels import REGISTRY, activation, glu
from mindspeed_fx.kernels.base import TAGGED, TAGS
from mindspeed_fx.kernels.cpu import attention_blocked
from mindspeed_fx.planning.verify_device import operators as device_operators
from tests.models import double

ops = torch.ops.mindspeed


def cases():
    target = torch.tensor([1, 2, -100, 0])
    for cast_first, weight in itertools.product((True, False), (True, False)):
        yield (
            f"rms_norm-{cast_first}-{weight}",
            ops.rms_norm.default,
            (double(2, 3, 8), double(8) if weight else None, 1e-5, cast_first),
        )
        yield (
            f"add_rms_norm-{cast_first}-{weight}",
            ops.add_rms_norm.default,
            (double(2, 3, 8), double(2, 3, 8), double(8) if weight else None, 1e-5, cast_first),
        )
    for weight, bias in itertools.product((True, False), repeat=2):
        parameters = double(8) if weight else None, double(8) if bias else None
        yield f"layer_norm-{weight}-{bias}", ops.layer_norm.default, (double(2, 3, 8), *parameters, 1e-5)
        yield (
            f"add_layer_norm-{weight}-{bias}",
            ops.add_layer_norm.default,
            (double(2, 3, 8), double(2, 3, 8), *parameters, 1e-5),
        )
    yield "swiglu-packed", ops.swiglu.default, (double(3, 8),)
    yield "swiglu-two", ops.swiglu.default, (double(3, 4), double(3, 4))
    for gated in glu.ACTIVATIONS:
        yield f"glu-packed-{gated}", ops.glu.default, (double(3, 8), None, gated)
        yield f"glu-two-{gated}", ops.glu.default, (double(3, 4), double(3, 4), gated)
    for kind in activation.KINDS:
        yield f"activation-{kind}", ops.activation.default, (double(3, 4), kind)
    for interleaved in (True, False):
        yield (
            f"clipped_swiglu-packed-{interleaved}",
            ops.clipped_swiglu.default,
            (double(3, 8), None, 1.702, 0.8, 1.0, interleaved),
        )
    yield "clipped_swiglu-two", ops.clipped_swiglu.default, (double(3, 4), double(3, 4), 1.0, 0.5, 0.0, False)
    yield "weighted_swiglu-packed", ops.weighted_swiglu.default, (double(3, 8), None, double(3, 1))
    yield "weighted_swiglu-two", ops.weighted_swiglu.default, (double(3, 4), double(3, 4), double(3, 1))
    for score, eps, bias in itertools.product(("softmax", "sigmoid"), (None, 0.0, 0.3), (True, False)):
        groups = (3, 2, 2) if bias else (1, 1, 1)
        yield (
            f"router_topk-{score}-{eps}-{bias}",
            ops.router_topk.default,
            (double(3, 6), double(6, grad=False) if bias else None, 2, score, *groups, eps, 1.0 if bias else 2.5),
        )
    for iterations in (1, 5):
        yield f"sinkhorn_knopp-{iterations}", ops.sinkhorn_knopp.default, (double(2, 3, 4, 4), iterations, 1e-3)
    chosen = torch.tensor([[[0, -1], [1, 0], [0, 2]], [[0, -1], [1, -1], [2, 1]]], dtype=torch.int32)
    yield "lightning_indexer", ops.lightning_indexer.default, (double(2, 3, 2, 4), double(2, 4, 4), double(2, 3, 2), 2)
    for keys, values in ((1, None), (2, 5)):
        v = None if values is None else double(2, 3, keys, values)
        q, k = double(2, 3, 2, 4), double(2, 3, keys, 4)
        yield f"sparse_attention-{keys}", ops.sparse_attention.default, (q, k, v, chosen, 0.3, values or 3)
    for interleaved in (True, False):
        yield (
            f"rope-{interleaved}",
            ops.rope.default,
            (double(2, 2, 3, 8), double(3, 8), double(1, 1, 3, 8), interleaved),
        )
        for turned, weight in ((8, True), (4, True), (8, False)):
            angles = double(3, turned, grad=False), double(1, 1, 3, turned, grad=False)
            x, weight = double(2, 3, 2, 8), double(8) if weight else None
            yield (
                f"qk_norm_rope-{interleaved}-{turned}-{weight is not None}",
                ops.qk_norm_rope.default,
                (x.transpose(1, 2), weight, *angles, 1e-5, True, interleaved),
            )
    for heads, causal in itertools.product((4, 2, 1), (True, False)):
        yield (
            f"attention-{heads}-{causal}",
            ops.attention.default,
            (double(1, 4, 5, 4), double(1, heads, 5, 4), double(1, heads, 5, 4), None, causal, 0.4),
        )
    keep = torch.rand(1, 1, 5, 6) < 0.7
    keep[..., 0] = True
    yield (
        "attention-mask",
        ops.attention.default,
        (double(2, 2, 5, 4), double(2, 2, 6, 4), double(2, 2, 6, 3), keep, False, 0.5),
    )
    yield (
        "attention-bias",
        ops.attention.default,
        (
            double(1, 2, 5, 4),
            double(1, 2, 6, 4),
            double(1, 2, 6, 4),
            torch.randn(5, 6, dtype=torch.double)[None, None],
            False,
            0.5,
        ),
    )
    for shape, kv_heads, softcap in (((2, 1, 6), 2, 0.0), ((1, 2, 5, 6), 1, 1.5)):
        q, k, v = double(1, 2, 5, 4), double(1, kv_heads, 6, 4), double(1, kv_heads, 6, 3)
        yield (
            f"attention-trained-bias-{kv_heads}",
            ops.attention.default,
            (q, k, v, double(*shape), False, 0.5, 0, softcap),
        )
    yield (
        "attention-sinks-by-query",
        ops.attention.default,
        (*(double(1, 2, 4, 4) for _ in range(3)), None, True, 0.7, 0, 0.0, double(1, 2, 4)),
    )
    for window, softcap, sinks in ((2, 0.0, False), (0, 1.5, False), (3, 1.5, True), (0, 0.0, True)):
        yield (
            f"attention-{window}-{softcap}-{sinks}",
            ops.attention.default,
            (
                double(1, 2, 4, 4),
                double(1, 1, 4, 4),
                double(1, 1, 4, 3),
                None,
                True,
                0.7,
                window,
                softcap,
                double(2) if sinks else None,
            ),
        )
    allowed, added = torch.rand(1, 1, 1, 4) < 0.7, torch.randn(2, 4, 4)
    for kv_heads, mask, causal, window, softcap in (
        (2, None, True, 0, 0.0),
        (1, None, True, 2, 1.5),
        (1, allowed, False, 0, 0.0),
        (2, added, True, 0, 1.5),
    ):
        q, k, v = double(1, 2, 4, 4), double(1, kv_heads, 4, 4), double(1, kv_heads, 4, 3)
        yield (
            f"attention_dropout-{kv_heads}-{'no' if mask is None else mask.dtype} mask-{causal}-{window}",
            ops.attention_dropout.default,
            (q, k, v, torch.rand(1, 2, 4, 4) < 0.6, mask, causal, 0.7, window, softcap, 0.4),
        )
    for smoothing in (0.0, 0.1):
        yield f"cross_entropy-{smoothing}", ops.cross_entropy.default, (double(4, 7), target, -100, smoothing)
    for softcap, sums in ((0.0, True), (2.0, False)):
        yield (
            f"linear_logsumexp-{softcap}-{sums}",
            ops.linear_logsumexp.default,
            (double(4, 5), double(7, 5), double(7) if sums else None, torch.tensor([1, -1, -2, 6]), softcap, sums),
        )


CASES = list(cases())


@pytest.mark.parametrize("op, args", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_gradient(op, args):
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]

    def f(*given):
        given = iter(given)
        out = op(*(next(given) if isinstance(a, torch.Tensor) and a.requires_grad else a for a in args))
        return out[0] if isinstance(out, tuple) else out

    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize("op, args", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_rules_of_custom_operators(op, args):
    results = torch.library.opcheck(op, args, raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


class _Unread(torch.autograd.Function):
    """A number whose gradient nobody has."""

    @staticmethod
    def forward(ctx, *values):
        ctx.count = len(values)
        return values[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return (None,) * ctx.count


@pytest.mark.parametrize("op, args", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_without_a_gradient_there_is_none(op, args):
    out = op(*args)
    results = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    grads = torch.autograd.grad(_Unread.apply(*results), leaves, allow_unused=True)
    assert all(g is None or not g.any() for g in grads)


def layout(x):
    return [s for s, n in zip(x.stride(), x.shape) if n > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "heads, causal, mask", [(4, True, None), (2, True, None), (1, False, None), (2, False, "bool"), (4, False, "bias")]
)
@pytest.mark.parametrize("stored", ["bsnd", "bnsd"])
def test_cpu_attention_kernel_is_the_reference(dtype, heads, causal, mask, stored):
    q, k, v, grad = (
        torch.randn(2, s, n, 16).transpose(1, 2).to(dtype) for s, n in ((9, 4), (9, heads), (9, heads), (9, 4))
    )
    if stored == "bnsd":
        q, k, v, grad = (x.contiguous() for x in (q, k, v, grad))
    given = {
        None: None,
        "bool": torch.ones(1, 1, 9, 9, dtype=torch.bool).tril(2),
        "bias": torch.randn(1, 1, 9, 9).to(dtype),
    }[mask]
    operator, backward = kernels.REGISTRY[ops.attention.default], kernels.REGISTRY[ops.attention_backward.default]
    args = (q, k, v, given, causal, 0.25)
    kernel, reasons = operator.choose("cpu", args, {})
    assert kernel is not None and all(r.startswith("flash attention in C++: ") for r in reasons)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    out, lse = operator.reference(*args)
    for have, want in zip(kernel.build(*args), (out, lse), strict=True):
        assert have.dtype == want.dtype and layout(have) == layout(want)
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
    args = (grad, q, k, v, out, lse, given, causal, 0.25)
    for have, want in zip(backward.choose("cpu", args, {})[0].build(*args), backward.reference(*args), strict=True):
        assert layout(have) == layout(want)
        torch.testing.assert_close(have, want, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("seq", [1, 64, 200])
@pytest.mark.parametrize("kv_heads, v_dim", [(4, 16), (2, 8), (1, 24)])
@pytest.mark.parametrize(
    "window, softcap, budget",
    [(0, 0.0, 1), (0, 0.0, 2**20), (1, 0.0, 2**20), (7, 2.0, 1), (64, 0.0, 2**20), (100, 3.0, 2**20), (300, 0.0, 1)],
)
@pytest.mark.filterwarnings("error:An output with one or more elements was resized")  # buffers of the wrong size
def test_attention_in_blocks_is_the_reference(monkeypatch, seq, kv_heads, v_dim, window, softcap, budget):
    monkeypatch.setattr(attention_blocked, "SCORES", budget)  # 1: a batch at a time
    shapes = ((4, 16), (kv_heads, 16), (kv_heads, v_dim), (4, v_dim))
    q, k, v, grad = (torch.randn(3, seq, n, d, dtype=torch.double).transpose(1, 2) for n, d in shapes)
    out, lse = ops.attention(q, k, v, None, True, 0.25, window, softcap)
    want = [out, lse, *ops.attention_backward(grad, q, k, v, out, lse, None, True, 0.25, window, softcap)]
    have = [
        *ops.attention_blocked(q, k, v, 0.25, window, softcap),
        *ops.attention_blocked_backward(grad, q, k, v, out, lse, 0.25, window, softcap),
    ]
    keep, p = torch.rand(3, 4, seq, seq) < 0.7, 0.3
    options = (None, True, 0.25, window, softcap, p)
    out, lse = ops.attention_dropout(q, k, v, keep, *options)
    want += [out, lse, *ops.attention_dropout_backward(grad, q, k, v, out, lse, keep, *options)]
    have += [
        *ops.attention_blocked(q, k, v, 0.25, window, softcap, keep, p),
        *ops.attention_blocked_backward(grad, q, k, v, out, lse, 0.25, window, softcap, keep, p),
    ]
    for h, w in zip(have, want, strict=True):
        assert layout(h) == layout(w)
        torch.testing.assert_close(h, w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_blocks_computes_16_bit_inputs_in_float32(dtype):
    q, k, v, grad = (torch.randn(2, n, 130, 16).to(dtype) for n in (4, 2, 2, 4))
    out, lse = ops.attention_blocked(q, k, v, 0.25, 40, 5.0)
    grads = ops.attention_blocked_backward(grad, q, k, v, out, lse, 0.25, 40, 5.0)
    wide = [x.double() for x in (q, k, v, grad)]
    out64, lse64 = ops.attention(*wide[:3], None, True, 0.25, 40, 5.0)
    for h, w in zip(
        (out, *grads),
        (out64, *ops.attention_backward(wide[3], *wide[:3], out64, lse64, None, True, 0.25, 40, 5.0)),
        strict=True,
    ):
        assert h.dtype == dtype
        assert (h.double() - w).abs().max() <= 2 * torch.finfo(dtype).eps * w.abs().max()


@pytest.mark.parametrize(
    "seq, options, dtype, built, backward, forward",
    [
        (512, {}, torch.float32, True, "C++", "C++"),
        (64, {"window": 8}, torch.float32, True, "C++", "C++"),
        (64, {"softcap": 5.0}, torch.float32, True, "C++", "C++"),
        (512, {}, torch.float32, False, "blocks", "aten flash"),
        (128, {}, torch.float32, False, "aten flash", "aten flash"),
        (1024, {}, torch.float32, False, "aten flash", "aten flash"),
        (512, {}, torch.bfloat16, True, "C++", "C++"),
        (512, {}, torch.float16, False, "aten flash", "aten flash"),
        (64, {"window": 8}, torch.float32, False, "blocks", "blocks"),
        (64, {"softcap": 5.0}, torch.bfloat16, True, "C++", "C++"),
        (64, {"softcap": 5.0}, torch.bfloat16, False, "blocks", "blocks"),
    ],
)
def test_which_kernel_runs_attention_on_cpu(monkeypatch, seq, options, dtype, built, backward, forward):
    monkeypatch.setattr(dispatcher, "onednn_beats_blas", lambda: True)
    monkeypatch.setattr(cpp, "problem", lambda: None if built else "not here")
    q, k, v, grad = (torch.empty(1, 4, seq, 16, dtype=dtype, device="meta") for _ in range(4))
    given = (None, True, 0.25, options.get("window", 0), options.get("softcap", 0.0))
    assert forward in kernels.REGISTRY[ops.attention.default].choose("cpu", (q, k, v, *given), {})[0].kernel
    lowering, reasons = kernels.REGISTRY[ops.attention_backward.default].choose(
        "cpu", (grad, q, k, v, grad, q[..., 0].float(), *given), {}
    )
    assert backward in lowering.kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_dim", [16, 8])
@pytest.mark.parametrize("name", ["C++", "aten flash"])
def test_flash_with_sinks_and_narrow_values_is_the_reference(dtype, v_dim, name, monkeypatch):
    if name == "aten flash":
        monkeypatch.setattr(cpp, "problem", lambda: "not here")
    elif cpp.problem():
        pytest.skip(str(cpp.problem()))
    q, k, v = (torch.randn(2, 9, n, d).transpose(1, 2).to(dtype) for n, d in ((4, 16), (2, 16), (2, v_dim)))
    grad, sinks = torch.randn(2, 9, 4, v_dim).transpose(1, 2).to(dtype), torch.randn(4).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    args = (q, k, v, None, True, 0.25, 0, 0.0, sinks)
    operator, backward = kernels.REGISTRY[ops.attention.default], kernels.REGISTRY[ops.attention_backward.default]
    kernel, _ = operator.choose("cpu", args, {})
    out, lse = operator.reference(*args)
    assert name in kernel.kernel
    for have, want in zip(kernel.build(*args), (out, lse), strict=True):
        assert have.dtype == want.dtype and layout(have) == layout(want)
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
    args = (grad, q, k, v, out, lse, None, True, 0.25)
    for have, want in zip(backward.choose("cpu", args, {})[0].build(*args), backward.reference(*args), strict=True):
        assert layout(have) == layout(want)
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight, bias", list(itertools.product((True, False), repeat=2)))
def test_cpu_layer_norm_kernel_is_the_reference(dtype, weight, bias):
    x, grad = torch.randn(2, 3, 8).to(dtype), torch.randn(3, 2, 8).to(dtype).transpose(0, 1)
    parameters = [torch.randn(8).to(dtype) if has else None for has in (weight, bias)]
    want = ops.layer_norm(x, *parameters, 1e-5)
    have = ops.layer_norm_aten(x, *parameters, 1e-5)
    need = [has and dtype.itemsize > 2 for has in (weight, bias)]  # of 16 bits it is not asked for those
    want = [*want, *ops.layer_norm_backward(grad, x, parameters[0], *want[1:], *need)]
    have = [*have, *ops.layer_norm_aten_backward(grad, x, parameters[0], *have[1:], *need)]
    for h, w in zip(have, want, strict=True):
        assert h.dtype == w.dtype and h.shape == w.shape and layout(h) == layout(w)
        torch.testing.assert_close(h, w)


def test_where_generated_code_is_as_good_the_layer_norm_kernel_is_not_taken():
    def chosen(shape, codegen, dtype=torch.float32):
        x, w = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape[-1:], dtype=dtype, device="meta")
        forward = kernels.REGISTRY[ops.layer_norm.default].choose("cpu", (x, w, w, 1e-5), {}, codegen)
        backward = kernels.REGISTRY[ops.layer_norm_backward.default].choose(
            "cpu", (x, x, w, x[..., :1], x[..., :1], True, True), {}, codegen
        )
        return [lowering is not None for lowering, _ in (forward, backward)], " ".join((*forward[1], *backward[1]))

    assert chosen((1024, 512), True)[0] == [True, True] and chosen((64, 512), False)[0] == [True, True]
    assert chosen((64, 512), True)[0] == [False, False] and "fewer than" in chosen((64, 512), True)[1]
    assert chosen((1024, 512), True, torch.bfloat16)[0] == [False, False]
    assert (
        chosen((1024, 512), False, torch.bfloat16)[0] == [True, False]
        and "in 16 bits" in chosen((64, 512), False, torch.bfloat16)[1]
    )


def test_a_kernel_that_cannot_says_why():
    operator = kernels.REGISTRY[ops.attention.default]
    kernel, reasons = operator.choose(
        "cpu",
        (double(1, 2, 3, 4), double(1, 2, 3, 4), double(1, 2, 3, 5), torch.ones(3, 3) > 0, False, 1.0),
        {},
    )
    assert (
        kernel is None
        and reasons[0].endswith("not all float32, bfloat16 or float16")
        and "head_dim of v (5) is larger" in reasons[1]
    )


def test_a_fully_masked_row_is_zero_and_has_no_gradient():
    q, k, v = (double(1, 1, 2, 4) for _ in range(3))
    mask = torch.tensor([[True, True], [False, False]])[None, None]
    out = ops.attention(q, k, v, mask, False, 1.0)[0]
    out.sum().backward()
    assert out[0, 0, 1].eq(0).all() and q.grad[0, 0, 1].eq(0).all() and all(t.grad.isfinite().all() for t in (q, k, v))


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = double(1, 4, 8, 16), double(1, 2, 8, 16), double(1, 2, 8, 16)
    with FlopCounterMode(display=False) as counter:
        ops.attention(q, k, v, None, True, 1.0)[0].sum().backward()
    assert counter.get_total_flops() == 2 * (2 + 5) * 4 * 8 * 8 * 16


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch is built without oneDNN")
def test_gemm():
    a, b = torch.randn(33, 47), torch.randn(65, 47)
    torch.testing.assert_close(ops.gemm(a, b.t()), a @ b.t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ops.gemm(a, b.t().contiguous()), a @ b.t(), rtol=1e-5, atol=1e-5)
    assert isinstance(dispatcher.onednn_beats_blas(), bool)


def test_operators_say_what_they_are():
    """Activations, gates and norms are told by their tags; backwards have none."""
    names = {tag: {str(o).removeprefix("mindspeed.").removesuffix(".default") for o in TAGGED[tag]} for tag in TAGS}
    assert names["activation"] == {"activation", "swiglu", "clipped_swiglu", "weighted_swiglu", "glu"}
    assert names["norm"] == {"rms_norm", "add_rms_norm", "layer_norm", "layer_norm_aten", "add_layer_norm"}
    unsaid = {
        name
        for o in REGISTRY
        if (name := str(o).removeprefix("mindspeed.").removesuffix(".default")) not in set().union(*names.values())
        and ("norm" in name or "glu" in name)
        and not name.endswith(("_backward", "_triton"))
    }
    assert not unsaid


def test_gradients_of_a_weighted_gate_have_rows_in_order():
    """Whatever the layout of what they are computed from, as its fake result says."""
    grad, x, up = (torch.randn(3, 2, 8).transpose(0, 1) for _ in range(3))
    weight = torch.rand(3, 2, 1).transpose(0, 1)
    results = torch.ops.mindspeed.weighted_swiglu_backward(grad, x, up, weight)
    assert [r.is_contiguous() for r in results] == [True] * 3


def test_gradients_of_a_gate_have_rows_in_order():
    grad, x, up = (torch.randn(3, 2, 8).transpose(0, 1) for _ in range(3))
    assert [r.is_contiguous() for r in torch.ops.mindspeed.glu_backward(grad, x, up, "gelu")] == [True] * 2


@pytest.mark.parametrize("family", device_operators.FAMILIES)
def test_results_may_be_written_in_place(family):
    """As those of any operator: a view of what a reference made may not, says autograd."""
    for operator, args in device_operators.calls_of(family, (2, 8, 4, 2, 8, 32), torch.float32):
        for result in pytree.tree_leaves(operator.overload(*args)):
            assert not (isinstance(result, torch.Tensor) and result._is_view()), operator.name


def test_what_is_added_in_place_to_a_result_has_its_gradient():
    x, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 6), (3, 6), (3,)))
    out = torch.ops.mindspeed.linear(x, weight, None)
    out += bias
    grads = torch.autograd.grad((out**2).sum(), (x, weight, bias))
    want = torch.autograd.grad((torch.nn.functional.linear(x, weight, bias) ** 2).sum(), (x, weight, bias))
    torch.testing.assert_close(grads, want)
