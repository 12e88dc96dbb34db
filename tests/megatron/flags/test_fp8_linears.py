"""``--fp8-format`` and ``--fp8-recipe`` without TransformerEngine: which products are of 8 bits, what they give, and
what is refused.
"""

from __future__ import annotations

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
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def marked(model) -> list[str]:
    return [n.removesuffix(".weight") for n, p in model.named_parameters() if fp8_linears.recipe_of(p)]


@pytest.mark.usefixtures("on_one_rank")
@pytest.mark.parametrize("form, name, recipe", RECIPES)
@pytest.mark.parametrize("codegen", [None, "eager"])
def test_linears_of_layers_and_no_others(form, name, recipe, codegen, monkeypatch):
    """The loss and all gradients are those of a model whose linears are the operator."""
    from megatron.core.tensor_parallel import layers

    torch.manual_seed(1)
    model, inputs = gpt_models.tiny_gpt(fp8=form, fp8_recipe=name), gpt_models.batch()
    assert [n.split(".")[-1] for n in marked(model)] == [*(LINEARS[i] for i in (1, 0, 2, 3))] * 2
    torch.manual_seed(1)
    plain = gpt_models.tiny_gpt()
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
        ({"num_experts": 4}, "--num-experts beside --fp8-format needs"),
        ({"recompute_modules": ["core_attn", "mlp"]}, "--recompute-modules mlp beside --fp8-format needs"),
        ({"mtp_num_layers": 1, "recompute_granularity": "full"}, "--mtp-num-layers with --recompute-granularity full"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 beside --fp8-format needs"),
        ({"fp8": None, "fp4": "e2m1"}, "--fp4-format e2m1 needs TransformerEngine"),
    ],
)
def test_what_is_not_done_is_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        fp8_linears.refuse(arguments(**given))


DONE = [{"fp8": form, "fp8_recipe": name} for form, name, _ in RECIPES]


@pytest.mark.parametrize("given", [{}, {"fp8": None, "num_experts": 4}, *DONE])
def test_what_is_done_is_not(given):
    fp8_linears.refuse(arguments(**given))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, world",
    [
        ("--fp8-format hybrid --fp8-recipe tensorwise", 1),
        ("--fp8-format e4m3 --fp8-recipe blockwise --tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --use-distributed-optimizer", 2),
        ("--fp8-format e4m3 --fp8-recipe mxfp8-32x32 --tensor-model-parallel-size 2 --sequence-parallel", 2),
        (
            "--fp8-format hybrid --fp8-recipe tensorwise --use-distributed-optimizer --overlap-grad-reduce "
            "--overlap-param-gather --gemm-gradient-accumulation-fusion --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
            2,
        ),
    ],
)
def test_a_run_is_eager_megatrons(flags, world):
    test_models.compare(test_models.modern(flags), world)


def test_what_becomes_of_the_flags_is_told_before_a_run():
    words = "--fp8-format hybrid --fp8-recipe".split()
    told = {a.flag: a for a in parser.explain([*words, "tensorwise"])}
    assert "mindspeed::linear_fp8" in told["--fp8-format"].text and not told["--fp8-format"].is_refused
    (refused,) = [a for a in parser.explain([*words, "delayed"]) if a.is_refused]
    assert refused.flag == "--fp8-format" and "--fp8-recipe tensorwise" in refused.text
