"""Every operator in variants of one spelling: order of operands, type, eps, layout, frozen inputs, shared weights,
other readers of intermediate values, parts cut off from the gradient, no gradient at all, dynamic sizes."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mindspeed_fx.passes.fusion import linear_cross_entropy, merged_linear
from tests.passes.fusion.variant_spellings import (
    add_layer_norm,
    add_rms_norm,
    attention,
    attention_alibi,
    attention_by_a_trained_scale,
    attention_by_sums,
    attention_called,
    attention_capped,
    attention_dropout,
    attention_gated,
    attention_grouped,
    attention_in_five_dimensions,
    attention_with_mask,
    attention_with_sinks,
    by_hand,
    clipped_swiglu,
    cross_entropy,
    dropout_add,
    gathered_experts,
    geglu,
    gelu_erf,
    gelu_erfc,
    gelu_tanh,
    grouped_called,
    grouped_loop,
    half,
    layer_norm,
    layer_norm_annotated,
    layer_norm_called,
    layer_norm_unbiased,
    linear_loss,
    linear_z_loss,
    merged,
    moe,
    neighbours,
    one_hot_dispatch,
    one_hot_loss,
    packed,
    qk_norm_rope,
    quick_gelu,
    quick_gelu_divided,
    reglu,
    relu_times_x,
    rms_norm,
    rms_norm_by_norm,
    rms_norm_called,
    rms_norm_eps_beside,
    rms_norm_normalized,
    rms_norm_weight_inside,
    rms_norm_widely_weighted,
    scaled_linear_loss,
    scaled_masked_softmax,
    smoothed_loss,
    squared_relu,
    swiglu,
    swiglu_divided,
    swiglu_in_parts,
    swiglu_tanh,
    swiglu_widened,
    weighted_gate,
    weighted_swiglu,
    weighted_up,
    z_loss,
)
from tests.passes.fusion.variants import Case, Table, Variant, Weight, check, variants

HALVES = (torch.float64, torch.float32, torch.bfloat16)
WIDE = (torch.float64, torch.float32)


def integers(*values, dtype=torch.int64):
    return lambda generator: torch.tensor(values, dtype=dtype)


def scores(*shape):
    return lambda generator: torch.rand(*shape, generator=generator, dtype=torch.float64).mul(1e6).long()


TARGET, HEADS, TABLES = integers(1, 2, -100, 0, 3, 4), (2, 2, 6, 4), (Weight((6, 4)), Weight((6, 4)))
ANY_SIZE = (lambda: patch.multiple(linear_cross_entropy, SMALLEST=0, SMALLEST_CPP=0),)

CASES = {
    "rms_norm": Case("fusion.rms_norm", rms_norm, ((2, 3, 8), Weight((8,)))),
    "rms_norm, wide weight": Case("fusion.rms_norm", rms_norm_widely_weighted, ((2, 3, 8), Weight((8,)))),
    "rms_norm, called": Case("fusion.rms_norm", rms_norm_called, ((3, 8), Weight((8,)))),
    "add_rms_norm": Case("fusion.add_rms_norm", add_rms_norm, ((2, 3, 8), (2, 3, 8), Weight((8,)))),
    "layer_norm": Case("fusion.layer_norm", layer_norm, ((2, 3, 8), Weight((8,)), Weight((8,)))),
    "layer_norm, called": Case("fusion.layer_norm", layer_norm_called, ((3, 8), Weight((8,)), Weight((8,)))),
    "add_layer_norm": Case("fusion.add_layer_norm", add_layer_norm, ((2, 3, 8), (2, 3, 8), Weight((8,)), Weight((8,)))),
    "dropout_add": Case("fusion.dropout_add", dropout_add, ((2, 3, 8), (2, 3, 8), Weight((8,))), draws=True),
    "swiglu": Case("fusion.swiglu", swiglu, ((2, 3, 8), (2, 3, 8))),
    "swiglu, parts": Case("fusion.swiglu", swiglu_in_parts, ((3, 8), Weight((6, 8)))),
    "swiglu, widened": Case("fusion.swiglu", swiglu_widened, ((3, 8), (3, 8))),
    "weighted_swiglu": Case("fusion.weighted_swiglu", weighted_swiglu, ((3, 8), (3, 8), (3, 1))),
    "clipped_swiglu": Case("fusion.clipped_swiglu", clipped_swiglu, ((3, 8), (3, 8))),
    "geglu": Case("fusion.glu", geglu("none"), ((3, 8), (3, 8))),
    "geglu, tanh": Case("fusion.glu", geglu("tanh"), ((3, 8), (3, 8))),
    "reglu": Case("fusion.glu", reglu, ((3, 8), Weight((4, 8)), Weight((4, 8)))),
    "gelu, tanh": Case("canonicalize.gelu", gelu_tanh, ((3, 8),)),
    "gelu, erf": Case("canonicalize.gelu", gelu_erf, ((3, 8),)),
    "quick_gelu": Case("fusion.activation", quick_gelu, ((3, 8),)),
    "squared_relu": Case("fusion.activation", squared_relu, ((3, 8),)),
    "rope, halves": Case("fusion.rope", half, (HEADS, *TABLES)),
    "rope, neighbours": Case("fusion.rope", neighbours, (HEADS, *TABLES)),
    "qk_norm_rope": Case(
        "fusion.qk_norm_rope", qk_norm_rope, ((2, 6, 2, 4), Weight((4,)), Table((6, 4)), Table((6, 4)))
    ),
    "attention": Case("fusion.attention", attention, (HEADS, HEADS, HEADS)),
    "attention, mask": Case("fusion.attention", attention_with_mask, (HEADS, HEADS, HEADS, (2, 1, 6, 6)), slack=2.0),
    "attention, called": Case("fusion.attention", attention_called, (HEADS, (2, 1, 6, 4), (2, 1, 6, 4))),
    "attention, grouped": Case("fusion.attention", attention_grouped, ((2, 4, 6, 4), HEADS, HEADS)),
    "attention, capped": Case("fusion.attention", attention_capped, (HEADS, HEADS, HEADS)),
    "attention, sinks": Case("fusion.attention", attention_with_sinks, (HEADS, HEADS, HEADS, Weight((2,)))),
    "attention, alibi": Case("fusion.attention", attention_alibi, (HEADS, HEADS, HEADS), slack=2.0),
    "attention, sums": Case("fusion.attention", attention_by_sums, (HEADS, HEADS, HEADS)),
    "attention, trained scale": Case(
        "fusion.attention", attention_by_a_trained_scale, (HEADS, HEADS, HEADS, Weight((2, 1, 1)))
    ),
    "attention, five dimensions": Case("fusion.attention", attention_in_five_dimensions, ((2, 4, 6, 4), HEADS, HEADS)),
    "attention, gated": Case("fusion.attention", attention_gated, (HEADS, HEADS, HEADS), slack=2.0),
    "attention, dropout": Case(
        "fusion.attention",
        attention_dropout,
        (HEADS, HEADS, HEADS),
        draws=True,
        dtypes=WIDE,
        reasons=("equal and fixed sequence lengths",),
    ),
    "attention, packed": Case(
        "fusion.attention",
        packed,
        (HEADS, HEADS, HEADS, lambda g: torch.tensor([[3, 1, 0, 4, 0, 2], [1, 0, 5, 5, 5, 5]])),
    ),
    "scaled_masked_softmax": Case(
        "fusion.scaled_masked_softmax",
        scaled_masked_softmax,
        ((2, 2, 6, 6),),
        options=(("enable", ["fusion.scaled_masked_softmax"]),),
    ),
    "cross_entropy": Case("fusion.cross_entropy", cross_entropy, ((6, 7), TARGET)),
    "cross_entropy, by hand": Case("fusion.cross_entropy", by_hand, ((6, 7), TARGET)),
    "cross_entropy, z-loss": Case("fusion.cross_entropy", z_loss, ((6, 7), TARGET), count=2),
    "cross_entropy, one-hot": Case("fusion.cross_entropy", one_hot_loss, ((6, 7), TARGET)),
    "cross_entropy, smoothed": Case("fusion.cross_entropy", smoothed_loss, ((6, 7), TARGET)),
    "linear_cross_entropy, scaled": Case(
        "fusion.linear_cross_entropy", scaled_linear_loss, ((6, 5), Weight((7, 5)), TARGET), patches=ANY_SIZE
    ),
    "linear_cross_entropy": Case(
        "fusion.linear_cross_entropy", linear_loss, ((6, 5), Weight((7, 5)), TARGET), patches=ANY_SIZE
    ),
    "linear_cross_entropy, z-loss": Case(
        "fusion.linear_cross_entropy", linear_z_loss, ((6, 5), Weight((7, 5)), TARGET), patches=ANY_SIZE
    ),
    "grouped_matmul": Case(
        "fusion.grouped_matmul",
        grouped_called,
        ((6, 8), Weight((3, 8, 16)), integers(2, 2, 6, dtype=torch.int32)),
        dtypes=(torch.bfloat16,),
        layouts=("plain",),
    ),
    "grouped_matmul, loop": Case(
        "fusion.grouped_matmul",
        grouped_loop,
        ((6, 8), Weight((3, 8, 4))),
        options=(("enable", ["fusion.grouped_matmul"]),),
        dynamic=False,
    ),
    "moe_permute": Case(
        "fusion.moe_permute",
        moe,
        ((5, 4), (5, 2), Weight((4, 4)), scores(5, 3)),
        count=2,
        reasons=("sorted choices are not", "rows are not"),
    ),
    "gathered_experts": Case("fusion.gathered_experts", gathered_experts, ((6, 4), Weight((3, 4, 5)), scores(3, 3))),
    "one_hot_dispatch": Case(
        "fusion.one_hot_dispatch", one_hot_dispatch, ((6, 5), (6, 3), scores(6, 3)), count=2, dynamic=False
    ),
    "merged_linear": Case(
        "fusion.merged_linear",
        merged,
        ((3, 8), Weight((6, 8)), Weight((6, 8))),
        options=(("target", "cuda"), ("hardware", "h100"), ("enable", ["fusion.merged_linear"])),
        patches=(lambda: patch.object(merged_linear, "_unpaid", lambda group, device: None),),
        reasons=("a weight is computed in the graph", "some weights are trained and some are not"),
    ),
}
SPELLINGS = {
    "rms_norm, norm": Case("fusion.rms_norm", rms_norm_by_norm, ((2, 3, 8), Weight((8,)))),
    "rms_norm, normalized": Case("fusion.rms_norm", rms_norm_normalized, ((2, 3, 8), Weight((8,)))),
    "rms_norm, weight inside": Case("fusion.rms_norm", rms_norm_weight_inside, ((2, 3, 8), Weight((8,)))),
    "rms_norm, eps beside": Case(
        "fusion.rms_norm",
        rms_norm_eps_beside,
        ((2, 3, 8), Weight((8,))),
        reasons=("eps is added to the root mean square",),
    ),
    "layer_norm, n - 1": Case("fusion.layer_norm", layer_norm_unbiased, ((2, 3, 8), Weight((8,)), Weight((8,)))),
    "layer_norm, annotated": Case(
        "fusion.layer_norm",
        layer_norm_annotated,
        ((2, 3, 8), Weight((8,)), Weight((8,))),
        reasons=("eps is added to the standard deviation",),
    ),
    "swiglu, divided": Case("fusion.swiglu", swiglu_divided, ((3, 8), (3, 8))),
    "swiglu, tanh": Case("fusion.swiglu", swiglu_tanh, ((3, 8), (3, 8))),
    "weighted_swiglu, up": Case("fusion.weighted_swiglu", weighted_up, ((3, 8), (3, 8), (3, 1))),
    "weighted_swiglu, gate": Case("fusion.weighted_swiglu", weighted_gate, ((3, 8), (3, 8), (3, 1))),
    "gelu, erfc": Case("canonicalize.gelu", gelu_erfc, ((3, 8),)),
    "quick_gelu, divided": Case("fusion.activation", quick_gelu_divided, ((3, 8),)),
    "squared_relu, product": Case("fusion.activation", relu_times_x, ((3, 8),)),
}
"""Other spellings of the same, most of them for the slow tests alone."""


FOUND = {
    "memory of other elements was read where those of a head do not lie side by side": (
        "attention, packed",
        Variant(torch.float32, layouts=("strided", "plain", "plain", "plain")),
    ),
    "the stored order of a result changed two sums before the output": (
        "layer_norm",
        Variant(torch.bfloat16, layouts=("strided", "plain", "plain"), stopped=1, train=False),
    ),
    "a scaled input was taken for a part of the formula": ("gelu, tanh", Variant(sites=2)),
    "a copy that keeps the model's layout stood between two operators": (
        "qk_norm_rope",
        Variant(layouts=("strided", "strided", "plain", "plain")),
    ),
    "no reason": ("weighted_swiglu", Variant(extra=("read", 1))),
    "no reason where the product is stored in another order": (
        "weighted_swiglu",
        Variant(torch.float16, swaps=1, layouts=("padded", "turned", "turned"), extra=("read", 1)),
    ),
    "no reason where a norm is read before its weight": (
        "qk_norm_rope",
        Variant(swaps=241, layouts=("plain", "strided", "expanded", "every other"), extra=("read", 5), dynamic=True),
    ),
    "a view of the copy and its detach were both returned": (
        "rms_norm, normalized",
        Variant(torch.float32, layouts=("strided", "turned"), swaps=102, frozen=1, stopped=2, extra=("returned", 5)),
    ),
    "a log-sum-exp was inserted before what was erased": (
        "cross_entropy, by hand",
        Variant(swaps=63, extra=("overwritten", 4), dynamic=True),
    ),
    "a factor was no longer expanded": (
        "weighted_swiglu, gate",
        Variant(torch.float32, layouts=("every other", "turned", "expanded"), sites=2),
    ),
    "a cast stood between the loss and its z-loss": ("linear_cross_entropy, z-loss", Variant(torch.float16)),
}


@pytest.mark.parametrize("what", FOUND)
def test_found_once(what):
    name, variant = FOUND[what]
    check((CASES | SPELLINGS)[name], variant)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=1, deadline=None, derandomize=True, phases=[Phase.generate], database=None)
@given(st.data())
def test_one_variant(name, data):
    """Another one for each operator: what is simplest differs with its place in the list."""
    check(CASES[name], data.draw(variants(CASES[name], turn=list(CASES).index(name))))


@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate], database=None)
@given(st.sampled_from(list(SPELLINGS)), st.data())
def test_other_spellings(name, data):
    check(SPELLINGS[name], data.draw(variants(SPELLINGS[name], turn=list(SPELLINGS).index(name))))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES | SPELLINGS)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_many_variants(name, data):
    case = (CASES | SPELLINGS)[name]
    check(case, data.draw(variants(case)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES | SPELLINGS)
def test_as_it_comes(name):
    case = (CASES | SPELLINGS)[name]
    check(case, Variant(dtype=case.dtypes[0]))
