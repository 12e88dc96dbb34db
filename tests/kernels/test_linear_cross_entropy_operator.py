import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_fx.compat import dispatcher
from mindspeed_fx.kernels import linear_cross_entropy_chunks as chunks
from mindspeed_fx.kernels import linear_cross_entropy_work as work

ops = torch.ops.mindspeed
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
PLAIN = (-100, 0.0, 0.0, 0.0)
EVERYTHING = (3, 0.1, 0.01, 2.0)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(work, "CHUNK", 3 * 7 * 8)  # three rows of seven classes in float64
    monkeypatch.setattr(work, "BLOCK", 2 * 7 * 4)
    monkeypatch.setattr(work, "CACHED", 1)


def inputs(dtype=torch.double, tokens=8, hidden=5, vocab=7, bias=True):
    made = [torch.randn(*shape).to(dtype).requires_grad_() for shape in ((tokens, hidden), (vocab, hidden), (vocab,))]
    target = torch.randint(0, vocab, (tokens,))
    target[1::3] = -100
    return made[0], made[1], made[2] if bias else None, target


def unfused(hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, reduction):
    logits = F.linear(hidden, weight, bias)
    logits = logits.float() if logits.itemsize == 2 else logits
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    kept = target != ignore_index
    losses = F.cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    losses = losses + z_loss * logits.logsumexp(-1) ** 2 * kept
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / kept.sum()}[reduction]


def assert_agrees(tensors, target, variant, reduction):
    """Loss and gradients are the unfused ones, in type, shape and value, for an upstream gradient that is not 1."""
    leaves = [x for x in tensors if x is not None and x.requires_grad]
    have, want = (
        ops.linear_cross_entropy(*tensors, target, *variant, reduction),
        unfused(*tensors, target, *variant, reduction),
    )
    upstream = torch.randn(want.shape, dtype=want.dtype) + 2
    results = [(have, want)]
    if leaves:
        results += zip(
            torch.autograd.grad(have, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
        )
    for a, b in results:
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a - b).abs().max() <= TOLERANCE[tensors[0].dtype] * b.abs().max().clamp_min(1e-12)


@pytest.mark.parametrize(
    "variant", [PLAIN, (-100, 0.1, 0.0, 0.0), (-100, 0.0, 0.01, 0.0), (-100, 0.0, 0.0, 2.0), EVERYTHING]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradient(variant, reduction):
    *tensors, target = inputs()
    target = target.clamp_min(0) if variant[0] == 3 else target
    assert torch.autograd.gradcheck(
        lambda *given: ops.linear_cross_entropy(*given, target, *variant, reduction), tensors
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("variant", [PLAIN, EVERYTHING])
@pytest.mark.parametrize("dtype, bias", [(d, b) for d in TOLERANCE for b in (True, False)])
def test_is_the_unfused_loss(dtype, bias, variant, reduction):
    *tensors, target = inputs(dtype, bias=bias)
    assert_agrees(tensors, target.clamp_min(0) if variant[0] == 3 else target, variant, reduction)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape_and_any_frozen_parameter(data):
    tokens, hidden, vocab = (data.draw(st.integers(1, 9)) for _ in range(3))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    tensors = [
        torch.randn(*shape).to(dtype).requires_grad_(data.draw(st.booleans()))
        for shape in ((tokens, hidden), (vocab, hidden), (vocab,))
    ]
    tensors[2] = tensors[2] if data.draw(st.booleans()) else None
    target = torch.tensor(data.draw(st.lists(st.integers(0, vocab - 1), min_size=tokens, max_size=tokens)))
    ignore = data.draw(st.sampled_from([-100, int(target[0])]))
    variant = (ignore, data.draw(st.sampled_from([0.0, 0.2])), data.draw(st.sampled_from([0.0, 0.1])), 0.0)
    reductions = ["mean", "sum", "none"] if (target != ignore).any() else ["sum", "none"]
    assert_agrees(tensors, target, variant, data.draw(st.sampled_from(reductions)))


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch is built without oneDNN")
@pytest.mark.parametrize("onednn, cpp", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("reduction, variant", [("mean", PLAIN), ("mean", EVERYTHING), ("none", EVERYTHING)])
def test_either_library_of_matrix_products_and_either_way(monkeypatch, onednn, cpp, reduction, variant):
    monkeypatch.setattr(dispatcher, "onednn_beats_blas", lambda: onednn)
    if not cpp:
        monkeypatch.setattr(work, "in_cpp", lambda *_: "torch's operators")
    *tensors, target = inputs(torch.float32)
    assert_agrees(tensors, target.clamp_min(0), variant, reduction)
    with torch.no_grad():
        assert_agrees([x.detach() for x in tensors], target.clamp_min(0), variant, reduction)


def test_rules_of_custom_operators():
    hidden, weight, bias, target = inputs()
    cases = [
        (ops.linear_cross_entropy.default, (hidden, weight, bias, target, *EVERYTHING, r))
        for r in ("mean", "sum", "none")
    ]
    cases = [(op, (*args[:3], target.clamp_min(0), *args[4:])) for op, args in cases]
    cases += [
        (ops.linear_cross_entropy_total.default, (hidden, weight, bias, target, *PLAIN, True, [True, True, True]))
    ]
    cases += [
        (
            ops.linear_cross_entropy_total.default,
            (hidden, weight.detach(), None, target, *PLAIN, False, [True, False, False]),
        )
    ]
    cases += [(ops.linear_cross_entropy_tokens.default, (hidden, weight, bias, target, *PLAIN))]
    with torch.no_grad():
        plain = [x.detach() for x in (hidden, weight, bias)]
        cases += [(ops.linear_cross_entropy_total_backward.default, (torch.tensor(2.0), *plain))]
        cases += [
            (
                ops.linear_cross_entropy_tokens_backward.default,
                (torch.randn(8).double(), *plain, target, *PLAIN, [True, False, True]),
            )
        ]
    for op, args in cases:
        results = torch.library.opcheck(op, args, raise_exception=False)
        assert set(results.values()) == {"SUCCESS"}, (op, results)


@pytest.mark.parametrize("ignored, gathered", [(0, False), (2, False), (3, True)])
def test_where_few_tokens_are_ignored_none_is_gathered(ignored, gathered):
    target = torch.arange(40)
    target[5 : 5 + ignored] = -100
    way = work.InCpp(torch.zeros(40, 3), torch.zeros(50, 3), None, (0.0, 0.0, 0.0), True)
    way.rows = 16
    targets, places, marked = chunks._places(target, -100, 50, way)
    assert marked == (0 < ignored and not gathered)
    assert [isinstance(at, torch.Tensor) for at in places] == [gathered] * 3
    assert torch.equal(targets, target.where(target != -100, -1) if marked else target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [7, 64])
@pytest.mark.parametrize("reduction, variant", [("mean", PLAIN), ("sum", EVERYTHING), ("none", EVERYTHING)])
def test_few_ignored_tokens_in_some_chunks(dtype, rows, reduction, variant, monkeypatch):
    monkeypatch.setattr(work, "CACHED", 4 * 50 * rows)
    monkeypatch.setattr(work, "ROWS", 1)
    hidden, weight, bias = (torch.randn(*n).to(dtype).requires_grad_() for n in ((48, 9), (50, 9), (50,)))
    target = torch.randint(4, 50, (48,))
    target[[4, 30]] = variant[0]
    assert_agrees([hidden, weight, bias], target, variant, reduction)


def test_ignored_alone():
    hidden, weight, _, target = inputs(bias=False)
    target[:] = -100
    for reduction in ("mean", "sum"):
        have, want = (f(hidden, weight, None, target, *PLAIN, reduction) for f in (ops.linear_cross_entropy, unfused))
        assert have.isnan() == want.isnan() == (reduction == "mean")
        torch_s = F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction)
        for a, b in zip(
            torch.autograd.grad(have, (hidden, weight)), torch.autograd.grad(torch_s, (hidden, weight)), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [7, -1])
def test_a_target_that_is_no_class_is_an_error(bad):
    hidden, weight, bias, target = inputs()
    target[0] = bad
    with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
        F.cross_entropy(F.linear(hidden, weight, bias), target)
    for reduction in ("mean", "none"):
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            ops.linear_cross_entropy(hidden, weight, bias, target, *PLAIN, reduction)


def test_an_unknown_reduction_is_an_error():
    with pytest.raises(ValueError, match="'avg'; valid: mean, sum, none"):
        ops.linear_cross_entropy(*inputs(), *PLAIN, "avg")


class Seen(TorchDispatchMode):
    """The operators called, and the largest tensor any of them returned, work buffers of products (flat) aside."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args))
        self.largest = max(
            [
                self.largest,
                *(
                    t.numel()
                    for t in torch.utils._pytree.tree_leaves(out)
                    if isinstance(t, torch.Tensor) and t.dim() > 1
                ),
            ]
        )
        return out


def test_only_gradients_that_somebody_needs_are_computed():
    def needed(hidden, weight, bias, target):
        with Seen() as seen:
            ops.linear_cross_entropy(hidden, weight, bias, target)
        (args,) = [args for func, args in seen.calls if func == ops.linear_cross_entropy_total.default]
        return args[-1]

    hidden, weight, bias, target = inputs()
    assert needed(hidden, weight, bias, target) == [True, True, True]
    assert needed(hidden, weight.detach(), None, target) == [True, False, False]
    assert needed(hidden.detach(), weight, bias, target) == [False, True, True]
    with torch.no_grad():
        assert needed(hidden, weight, bias, target) == [False, False, False]


@pytest.mark.parametrize(
    "needed, products",
    [
        ((False,) * 3, 1),
        ((True, False, False), 2),
        ((False, True, False), 2),
        ((False, False, True), 1),
        ((True,) * 3, 3),
    ],
)
def test_matrix_products_are_counted_as_they_are_done(needed, products):
    hidden, weight, bias, target = inputs()
    args = ([x.detach() for x in (hidden, weight, bias)], target.clamp_min(0))
    with FlopCounterMode(display=False) as done, torch.no_grad():
        chunks.run_in_chunks(*args[0], args[1], *PLAIN, 1.0, needed)
    with FlopCounterMode(display=False) as counted:
        ops.linear_cross_entropy_total(*args[0], args[1], *PLAIN, True, list(needed))
    with FlopCounterMode(display=False) as again:
        ops.linear_cross_entropy_tokens(*args[0], args[1], *PLAIN)
        ops.linear_cross_entropy_tokens_backward(torch.ones(8).double(), *args[0], args[1], *PLAIN, list(needed))
    assert done.get_total_flops() == counted.get_total_flops() == products * 2 * 8 * 5 * 7
    assert again.get_total_flops() == counted.get_total_flops() + 2 * 8 * 5 * 7


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_logits_never_exist_whole(dtype):
    hidden, weight, bias, target = (x.detach() for x in inputs(dtype, tokens=40, vocab=7))
    with Seen() as seen, torch.no_grad():
        chunks.run_in_chunks(hidden, weight, bias, target, *PLAIN, 1.0, (True,) * 3)
    rows = 3 * 8 // max(4, dtype.itemsize)
    assert seen.largest == max(hidden.numel(), rows * 7) < 40 * 7


def test_autocast_around_the_operator_changes_nothing():
    *tensors, target = inputs(torch.float32)
    want = ops.linear_cross_entropy(*tensors, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        have = ops.linear_cross_entropy(*tensors, target)
    for a, b in zip(
        (have, *torch.autograd.grad(have, tensors)), (want, *torch.autograd.grad(want, tensors)), strict=True
    ):
        assert torch.equal(a, b)


def test_float16_gradients_wait_for_the_loss_scale():
    hidden, weight, _, target = inputs(torch.float16, tokens=512, bias=False)
    with torch.no_grad():
        hidden.mul_(1e-3)  # the weight's gradient for an upstream gradient of 1 is below what float16 resolves
    have, want = (
        f(x, w, None, target, *PLAIN, "mean")
        for f, x, w in ((ops.linear_cross_entropy, hidden, weight), (unfused, hidden.double(), weight.double()))
    )
    a, b = (torch.autograd.grad(loss, weight, torch.tensor(2.0**14, dtype=loss.dtype))[0] for loss in (have, want))
    assert (a - b).abs().max() <= 5e-3 * b.abs().max()


def test_a_gradient_that_the_forward_was_not_asked_for_is_an_error():
    hidden, weight, bias, target = inputs()
    loss = ops.linear_cross_entropy_total(hidden, weight, bias, target, *PLAIN, True, [True, False, True])[0]
    with pytest.raises(RuntimeError, match="was not told that weight needs a gradient"):
        loss.backward()


def test_the_launch_that_stands_for_all_is_of_a_full_chunk(monkeypatch):
    monkeypatch.setattr(chunks.triton, "DTYPES", {torch.double})
    hidden, weight, _, _ = inputs(tokens=2, hidden=9)
    ((_, (logits, target, *_)),) = chunks.parts(hidden, weight, True, 0.0, 0.0, 0.0, [True] * 3)
    assert logits.shape == (2, 7) and target.shape == (2,)  # not nine rows, nor three, which a chunk could hold
