"""``--fp8-format`` and ``--fp8-recipe`` without TransformerEngine: which products are of 8 bits, what they give, and
what is refused.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.megatron import fp8_linears
from mindspeed_fx.megatron.flags import parser
from tests.megatron import gpt_models
from tests.megatron.launch import test_models

ops = torch.ops.mindspeed
RECIPES = [(f, r, ours) for (f, r), ours in fp8_linears.RECIPES.items()]
EXPERTS = f"{test_models.MOE} --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 16"
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def marked(model) -> list[str]:
    return [n.removesuffix(".weight") for n, p in model.named_parameters() if fp8_linears.recipe_of(p)]


@pytest.mark.usefixtures("on_one_rank")
@pytest.mark.parametrize("form, name, recipe", RECIPES)
@pytest.mark.parametrize("codegen", [None, "eager"])
@pytest.mark.parametrize("experts", [None, 3], ids=["dense", "experts"])
def test_linears_of_layers_and_no_others(form, name, recipe, codegen, experts, monkeypatch):
    """The loss and all gradients are those of a model whose linears are the operator, one after another; in float64,
    where no order of sums rounds a number of 8 bits to its neighbour."""
    from megatron.core.tensor_parallel import layers

    torch.manual_seed(1)
    model, inputs = gpt_models.tiny_gpt(experts=experts, fp8=form, fp8_recipe=name).double(), gpt_models.batch()
    assert [n.split(".")[-1] for n in marked(model)] == [LINEARS[1], LINEARS[0], *LINEARS[2:] * (experts or 1)] * 2
    torch.manual_seed(1)
    plain = gpt_models.tiny_gpt(experts=experts).double()
    plain.load_state_dict(model.state_dict())
    compiled = codegen and torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": codegen})
    loss, grads = gpt_models.train(model, inputs, compiled)
    assert (loss - gpt_models.train(plain, inputs)[0]).abs() > 1e-6
    eight = [p for n, p in plain.named_parameters() if n.removesuffix(".weight") in marked(model)]

    def linear(input, weight, *unused, **unused_too):
        return ops.linear_fp8(input, weight, recipe) if any(weight is p for p in eight) else F.linear(input, weight)

    with monkeypatch.context() as patch:  # before the adaptor takes its own back
        patch.setattr(layers, "linear_with_grad_accumulation_and_async_allreduce", linear)
        want, want_grads = gpt_models.train(plain, inputs)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    for n, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[n], rtol=2e-3, atol=2e-5)


@pytest.mark.usefixtures("on_one_rank")
def test_products_of_all_experts_are_one_operator():
    model, inputs = gpt_models.tiny_gpt(experts=3, fp8="e4m3", fp8_recipe="mxfp8"), gpt_models.batch()
    compiled = torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    gpt_models.train(model, inputs, compiled)
    with torch.profiler.profile() as profile:
        gpt_models.train(model, inputs, compiled)
    counts = {e.key.removeprefix("mindspeed::"): e.count for e in profile.key_averages()}
    assert (counts["grouped_linear_fp8"], counts["grouped_linear_fp8_backward"]) == (4, 4)
    assert "grouped_linear" not in counts and counts["linear_fp8"] == 4  # of attention


@pytest.mark.usefixtures("on_one_rank")
def test_linears_of_tokens_ahead_are_of_8_bits_whatever_stays_wide():
    """As Megatron has it, which asks for no layer's number there."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    wide = dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)
    made = gpt_models.tiny_gpt(fp8="hybrid", fp8_recipe="tensorwise", bf16=True, params_dtype=torch.bfloat16, **wide)
    config = dataclasses.replace(made.config, mtp_num_layers=1)
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    spec = get_gpt_mtp_block_spec(config, made.decoder.submodules.layer_specs[-1], use_transformer_engine=False)
    ahead = MultiTokenPredictionBlock(config, spec)
    assert not marked(made) and sorted(n.split(".")[-1] for n in marked(ahead)) == sorted(["eh_proj", *LINEARS])


@pytest.mark.usefixtures("on_one_rank")
@pytest.mark.parametrize("experts", [None, 3])
def test_a_configuration_of_another_recipe_is_no_model_in_16_bits(experts):
    with pytest.raises(ValueError, match="--fp8-format hybrid --fp8-recipe delayed needs .* tensorwise, --fp8-format"):
        gpt_models.tiny_gpt(experts=experts, fp8="hybrid", fp8_recipe="delayed")


@pytest.mark.usefixtures("on_one_rank")
def test_first_and_last_layers_may_stay_wide():
    wide = dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0)
    model = gpt_models.tiny_gpt(fp8="hybrid", fp8_recipe="tensorwise", bf16=True, params_dtype=torch.bfloat16, **wide)
    assert {n.split(".")[2] for n in marked(model)} == {"1"}


def arguments(**given) -> Namespace:
    return Namespace(**{"fp8": "hybrid", "fp8_recipe": "tensorwise", **given})


@pytest.mark.parametrize(
    "given, words",
    [
        ({"fp8_recipe": "delayed"}, "--fp8-format hybrid --fp8-recipe delayed needs TransformerEngine, .* tensorwise"),
        ({"fp8": "e4m3"}, "--fp8-format e4m3 --fp8-recipe tensorwise needs .*e4m3 --fp8-recipe blockwise"),
        ({"fp8_recipe": "mxfp8"}, "--fp8-format hybrid --fp8-recipe mxfp8 needs .*e4m3 --fp8-recipe mxfp8-32x32"),
        ({"fp8_wgrad": False}, "--no-fp8-wgrad needs"),
        ({"fp8_param_gather": True}, "--fp8-param-gather beside --fp8-format needs"),
        ({"moe_use_legacy_grouped_gemm": True}, "--moe-use-legacy-grouped-gemm beside --fp8-format needs"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 beside --fp8-format needs"),
        ({"fp8": None, "fp4": "e2m1"}, "--fp4-format e2m1 needs TransformerEngine"),
    ],
)
def test_what_is_not_done_is_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        fp8_linears.refuse(arguments(**given))


DONE = [{"fp8": form, "fp8_recipe": name} for form, name, _ in RECIPES]


@pytest.mark.parametrize("given", [{}, {"fp8": None, "tp_2d": True}, {"num_experts": 4}, *DONE])
def test_what_is_done_is_not(given):
    fp8_linears.refuse(arguments(**given))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, world, extra",
    [
        ("--fp8-format hybrid --fp8-recipe tensorwise", 1, 0),
        ("--fp8-format e4m3 --fp8-recipe blockwise --tensor-model-parallel-size 2 --sequence-parallel", 2, 0),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --use-distributed-optimizer", 2, 0),
        ("--fp8-format e4m3 --fp8-recipe mxfp8-32x32 --tensor-model-parallel-size 2 --sequence-parallel", 2, 0),
        (
            "--fp8-format hybrid --fp8-recipe tensorwise --use-distributed-optimizer --overlap-grad-reduce "
            "--overlap-param-gather --gemm-gradient-accumulation-fusion --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
            2,
            0,
        ),
        (
            "--fp8-format hybrid --fp8-recipe tensorwise --num-layers 2 --mtp-num-layers 1 "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            1,
            1,
        ),
        (
            "--fp8-format e4m3 --fp8-recipe blockwise --recompute-granularity selective "
            "--recompute-modules mlp layernorm core_attn",
            1,
            0,
        ),
        (
            f"--fp8-format e4m3 --fp8-recipe mxfp8 {EXPERTS} --moe-grouped-gemm --moe-router-padding-for-quantization "
            "--gemm-gradient-accumulation-fusion --use-distributed-optimizer",
            2,
            0,
        ),
        (
            f"--fp8-format e4m3 --fp8-recipe blockwise {EXPERTS} --recompute-granularity selective "
            "--recompute-modules moe shared_experts",
            2,
            0,
        ),
        (f"--fp8-format e4m3 --fp8-recipe mxfp8-32x32 {EXPERTS} --moe-zero-memory level0", 2, 0),
        (
            f"--fp8-format e4m3 --fp8-recipe mxfp8 {EXPERTS} --balanced-moe-experts --balanced-moe-hot-expert-num 1",
            2,
            0,
        ),
        (
            "--fp8-format e4m3 --fp8-recipe blockwise --moe-model-type deepspeed_moe --num-experts 4 "
            "--expert-model-parallel-size 2 --moe-train-capacity-factor 1.0 --use-pipe-experts "
            "--pipe-experts-multi-data 2",
            2,
            0,
        ),
        (
            f"--fp8-format hybrid --fp8-recipe tensorwise {test_models.MOE} "
            "--tensor-model-parallel-size 2 --sequence-parallel",
            2,
            0,
        ),
    ],
)
def test_a_run_is_eager_megatrons(flags, world, extra):
    test_models.compare(test_models.modern(flags), world, extra=extra)


def test_what_becomes_of_the_flags_is_told_before_a_run():
    words = "--fp8-format hybrid --fp8-recipe".split()
    told = {a.flag: a for a in parser.explain([*words, "tensorwise"])}
    assert "mindspeed::linear_fp8" in told["--fp8-format"].text and not told["--fp8-format"].is_refused
    (refused,) = [a for a in parser.explain([*words, "delayed"]) if a.is_refused]
    assert refused.flag == "--fp8-format" and "--fp8-recipe tensorwise" in refused.text
