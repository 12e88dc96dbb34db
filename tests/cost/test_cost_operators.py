"""The cost of every operator: FLOP as torch counts them on the reference, bytes as the tensors' sizes."""

import math

import pytest
import sympy
import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_fx.cost import aten
from mindspeed_fx.cost.calibrated import with_constants
from mindspeed_fx.cost.device import Constant
from mindspeed_fx.cost.hardware import hardware, names
from mindspeed_fx.cost.operators import SOFTMAX, Cost, attention, spec, visible_scores
from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.kernels.dropout_add_seeded import DRAWN
from mindspeed_fx.kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_backward
from mindspeed_fx.kernels.kimi_delta_attention import kimi_delta_attention, kimi_delta_attention_backward
from mindspeed_fx.kernels.linear_cross_entropy_work import LEAST
from mindspeed_fx.planning.verify_device.operators import calls

SIZES = (2, 10, 4, 2, 4, 8)
NOT_ONCE = {
    "lightning_indexer_backward",
    "sparse_attention",
    "sparse_attention_backward",
    "chosen_weights",
    "linear_logsumexp",
    "linear_logsumexp_backward",
    "linear_cross_entropy_total",
    "linear_grpo_total",
    "linear_jsd_total",
    "linear_cross_entropy_tokens",
    "linear_cross_entropy_tokens_backward",
    "moe_permute",
    "moe_permute_map",
    "moe_unpermute_backward",
}
"""Operators that move more than their inputs and outputs, as their files explain."""
UNREAD = {"rope_backward": {1}, "varlen_attention": {4}, "varlen_attention_backward": {7}}
"""Arguments that an operator only needs the shape or type of, at least for some flags."""


def specs(value):
    return pytree.tree_map(lambda t: spec(t, int) if isinstance(t, torch.Tensor) else t, value)


def cases():
    torch.manual_seed(0)
    for operator, args in calls(*SIZES):
        yield operator, args


def test_every_operator_has_a_cost():
    assert not [o.name for o in REGISTRY.values() if o.cost is None], "operators without a cost: see Operator.costs"


def _in_place(x, a, b, out_shape=None, **_):
    return 2 * a[0] * a[1] * a[2] * b[2]


def _triangular(a, b, *_, out_shape=None, **__):
    return math.prod(b[:-1]) * a[-1] * b[-1]


UNKNOWN_TO_TORCH = {torch.ops.aten.baddbmm_: _in_place, torch.ops.aten.linalg_solve_triangular: _triangular}
"""Products that references launch and torch's counter has no formula of."""
OUTSIDE_TORCH = {
    "mindspeed.gemm": lambda a, b, *_: a @ b,
    "mindspeed.narrow_product": lambda a, b, *_: a @ b,
    "mindspeed.delta_tiles": gated_delta_rule.reference,
    "mindspeed.delta_tiles_backward": gated_delta_rule_backward.reference,
    "mindspeed.kimi_delta_tiles": kimi_delta_attention.reference,
    "mindspeed.kimi_delta_tiles_backward": kimi_delta_attention_backward.reference,
}
"""Those whose reference is C++, as products that torch counts."""


def test_flops_are_those_of_the_reference():
    seen_flops = 0
    for operator, args in cases():
        # Ignored tokens and rows without a group are skipped by the kernels; the cost cannot know of them.
        args = [
            a.clamp(min=0)
            if isinstance(a, torch.Tensor)
            and a.dtype == torch.int64
            and any(word in operator.name for word in ("entropy", "logsumexp", "grpo"))
            else a
            for a in args
        ]
        run = OUTSIDE_TORCH.get(operator.name, operator.reference)
        with FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as counter:
            out = run(*args)
        cost = operator.cost(specs(out), *specs(args))
        assert cost.flops == counter.get_total_flops(), operator.name
        assert cost.matrix <= cost.flops and (cost.matrix > 0) == (cost.flops > 0)
        seen_flops += cost.flops > 0
        with FlopCounterMode(display=False) as counter:
            operator.overload(*args)
        assert cost.flops == counter.get_total_flops(), f"{operator.name}: what torch's counter is told"
    assert seen_flops > 10


def test_bytes_are_those_of_inputs_and_outputs():
    once = set()
    for operator, args in cases():
        out, name = operator.reference(*args), operator.name.removeprefix("mindspeed.")
        cost = operator.cost(specs(out), *specs(args))
        tensors = lambda value: sum(
            t.numel() * t.itemsize for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)
        )  # noqa: E731
        everything = tensors(args)
        if name in NOT_ONCE:
            assert not cost.once and cost.write >= tensors(out)
            continue
        once.add(name)
        assert cost.once and cost.write == tensors(out), name
        left_out = sum(tensors(args[i]) for i in UNREAD.get(name, ()))
        if name == "grouped_matmul_backward":
            left_out = everything - cost.read  # see its own test
        assert cost.read in (everything, everything - left_out), name
    assert len(once) > 15


def test_grouped_backward_reads_what_each_gradient_needs():
    grad, x, w, offsets = (specs(torch.empty(*s)) for s in ((6, 5), (6, 4), (3, 4, 5), (3,)))
    cost = REGISTRY[torch.ops.mindspeed.grouped_matmul_backward.default].cost
    only_x, only_w = cost((x, w), grad, x, w, offsets, True, False), cost((x, w), grad, x, w, offsets, False, True)
    assert only_x.read - only_w.read == w.bytes - x.bytes and only_x.flops == only_w.flops == 2 * 6 * 4 * 5


@pytest.mark.parametrize("queries, keys, window", [(7, 7, 0), (5, 9, 0), (9, 5, 0), (8, 8, 3), (4, 8, 6), (1, 1, 1)])
def test_scores_behind_a_causal_mask(queries, keys, window):
    keep = torch.ones(queries, keys, dtype=torch.bool).tril()
    assert visible_scores(queries, keys, True, window) == (keep.triu(1 - window) if window else keep).sum()
    assert visible_scores(queries, keys, False) == queries * keys


def test_causal_attention_does_half_the_work_and_counts_all():
    q = specs(torch.empty(1, 2, 1024, 64, dtype=torch.bfloat16, device="meta"))
    full, half = (attention(q, q, q, q, causal) for causal in (False, True))
    assert full.flops == half.flops == full.matrix and half.matrix / full.matrix == pytest.approx(0.5, abs=1e-3)
    assert half.vector == pytest.approx(SOFTMAX * 2 * 1024 * 1024 / 2, rel=1e-2)


def test_chunks_of_linear_cross_entropy_read_the_weight_again():
    cost = REGISTRY[torch.ops.mindspeed.linear_cross_entropy_tokens.default].cost
    make = lambda tokens: [
        specs(torch.empty(*s, device="meta", dtype=d))
        for s, d in (((tokens, 64), torch.float32), ((32768, 64), torch.float32), ((tokens,), torch.int64))
    ]  # noqa: E731
    one, many = (cost(t, h, w, None, t, -100, 0.0, 0.0, 0.0) for h, w, t in (make(LEAST), make(10 * LEAST)))
    assert one.launches == 3 and many.launches == 30
    assert many.read - 10 * one.read == 0 and many.flops == 10 * one.flops


def test_a_gradient_of_the_weight_makes_chunks_of_linear_cross_entropy_larger():
    """So many rows that their logits take the memory of the sum: of 4,096 columns all 8,192 tokens are one chunk."""
    cost = REGISTRY[torch.ops.mindspeed.linear_cross_entropy_total.default].cost
    shapes = ((8192, 4096), torch.bfloat16), ((131072, 4096), torch.bfloat16), ((8192,), torch.int64)
    hidden, weight, target = (specs(torch.empty(*s, device="meta", dtype=d)) for s, d in shapes)
    frozen, trained = (
        cost(target, hidden, weight, None, target, -100, 0.0, 0.0, 0.0, True, (True, needed, False))
        for needed in (False, True)
    )
    assert frozen.launches == 24 and trained.launches == 3


def test_products_of_a_chunk_and_what_reads_them_take_turns():
    """And run at the rate of their shape, where the device has one (on cpu 2.0 times what the peak says)."""
    hidden, weight, logits, target, lse = (
        specs(torch.empty(*s, device="meta", dtype=d))
        for s, d in (
            ((1024, 512), torch.float32),
            ((8192, 512), torch.float32),
            ((1024, 8192), torch.float32),
            ((1024,), torch.int64),
            ((1024,), torch.float32),
        )
    )
    backward = REGISTRY[torch.ops.mindspeed.linear_cross_entropy_backward.default].cost(
        [hidden, weight], lse, logits, target, lse, None, hidden, weight, -100, 0.0, (True, True, False)
    )
    assert backward.matrix == 4 * 1024 * 512 * 8192 and backward.shape == (1024, 512, 2048) and backward.launches == 8
    hw = with_constants(hardware("cpu"), {"product_ramp": Constant(176.0, "", "a test", "high")})
    terms = backward.terms(hw)
    assert terms["matrix"] == pytest.approx(
        (1 + 176 * (3 / 2048 + 1 / 512)) * backward.matrix / hw.matrix_rate("float32")
    )
    assert backward.seconds(hw) == pytest.approx(
        terms["launch"] + terms["matrix"] + max(terms["vector"], terms["memory"])
    )
    nothing = specs(torch.empty(0, 512, device="meta"))
    tokens = REGISTRY[torch.ops.mindspeed.linear_cross_entropy_tokens.default].cost
    assert tokens(target, nothing, weight, None, target, -100, 0.0, 0.0, 0.0).matrix == 0


def test_time_is_the_longest_term_and_the_launch():
    hw = hardware("h100")
    cost = Cost(flops=1e12, matrix=1e12, vector=1, read=1, write=1, dtype="bfloat16")
    assert (
        cost.seconds(hw) == pytest.approx(1e12 / hw.matrix_rate("bfloat16") + hw.launch) and cost.bound(hw) == "matrix"
    )
    assert (
        Cost(read=1e12).bound(hw) == "memory"
        and Cost(vector=1e15).bound(hw) == "vector"
        and Cost(read=1).bound(hw) == "launch"
    )
    n = sympy.Symbol("n", positive=True)
    symbolic = Cost(matrix=n**3, read=n**2, dtype="bfloat16").seconds(hw)
    for value in (10, 10**6):
        assert float(symbolic.subs(n, value)) == pytest.approx(
            Cost(matrix=value**3, read=value**2, dtype="bfloat16").seconds(hw)
        )


def test_costs_are_arithmetic_in_symbols():
    s, b = sympy.symbols("s b", positive=True, integer=True)
    for operator, args in cases():
        out = operator.reference(*args)
        swap = {SIZES[1]: s, SIZES[0] * SIZES[1]: b * s}
        named = lambda value: pytree.tree_map(
            lambda t: spec(t, lambda n: swap.get(int(n), int(n))) if isinstance(t, torch.Tensor) else t, value
        )  # noqa: E731
        cost, number = operator.cost(named(out), *named(args)), operator.cost(specs(out), *specs(args))
        for field in ("flops", "matrix", "vector", "read", "write", "launches"):
            value = sympy.sympify(getattr(cost, field)).subs({s: SIZES[1], b: SIZES[0]})
            assert value == getattr(number, field), (operator.name, field)


@pytest.mark.parametrize("name", names())
def test_every_device_times_every_operator(name):
    for operator, args in cases():
        cost = operator.cost(specs(operator.reference(*args)), *specs(args))
        assert 0 < cost.seconds(hardware(name)) < 1


def test_every_operator_of_torch_npu_that_is_called_is_known():
    """Else a report says that its cost was guessed."""
    from mindspeed_fx.cost import aten
    from mindspeed_fx.kernels.npu.schemas import SCHEMAS

    assert not [n for n in SCHEMAS if aten.kind(n.rstrip("_")) == "other"]


def test_of_attentions_results_output_and_logsumexp_are_counted_alone():
    """ATen's operators return states of random numbers too, which nothing reads without dropout."""
    q, lse = torch.empty(1, 2, 8, 4), torch.empty(1, 2, 8)
    out, more = specs((q, lse)), specs((q, lse, lse, lse))
    assert aten._flash(more, *specs((q, q, q))) == aten._flash(out, *specs((q, q, q)))


def test_a_seeded_dropout_draws_compares_chooses_scales_and_adds():
    x, seed = (spec(torch.empty(n, device="meta"), int) for n in (8, 1))
    cost = REGISTRY[torch.ops.mindspeed.dropout_add_seeded.default].cost(x, x, None, x, seed, 0.1)
    assert cost.vector == 8 * (DRAWN + 4)


def test_a_gradient_in_another_type_is_read_and_not_written():
    wide, narrow = (spec(torch.empty(8, dtype=dtype, device="meta"), int) for dtype in (torch.float32, torch.bfloat16))
    cost = REGISTRY[torch.ops.mindspeed.activation_backward.default].cost(narrow, wide, narrow, "squared_relu")
    assert (cost.read, cost.write) == (8 * 4 + 8 * 2, 8 * 2)
