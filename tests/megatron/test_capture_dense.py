"""A dense Megatron GPT on one process: whole graphs of plain operators, with the gradients of plain PyTorch."""

import pytest
import torch
import torch.distributed as dist

from tests.megatron.gpt_models import batch, start, tiny_gpt, train
from tests.megatron.reference import loss_per_token


def plain(model, inputs):
    """Loss and gradients of the independent model with the same weights, in float64."""
    state = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    loss = loss_per_token(state, inputs, 2, 4, 2).mean()
    grads = torch.autograd.grad(loss, list(state.values()))
    return loss.detach().float(), {n: g.float() for n, g in zip(state, grads)}


def assert_same(actual, expected, rtol=1e-4, atol=1e-6):
    torch.testing.assert_close(actual[0], expected[0], rtol=rtol, atol=1e-5)
    assert actual[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        torch.testing.assert_close(
            actual[1][name], grad, rtol=rtol, atol=atol, msg=lambda m: f"gradient of {name}: {m}"
        )  # noqa: B023


def whole(model, backend="aot_eager"):
    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.fixture
def alone():
    """No torch.distributed at all."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    yield
    start()


def test_without_torch_distributed(alone):
    model, inputs = tiny_gpt(bias_activation_fusion=True, bias_dropout_fusion=True), batch()
    found = torch._dynamo.explain(model)(**inputs)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons
    torch._dynamo.reset()
    expected = plain(model, inputs)
    for backend in ("eager", "aot_eager"):
        assert_same(train(model, inputs, whole(model, backend)), expected)
    assert_same(train(model, inputs), expected)


def test_no_break_in_one_process_group():
    found = torch._dynamo.explain(tiny_gpt())(**batch())
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


def test_graph_is_plain_operators():
    graphs = []

    def keep(gm, _):
        graphs.append(gm)
        return gm

    torch.compile(tiny_gpt(layers=1, bias_activation_fusion=True), backend=keep, fullgraph=True)(**batch())
    (graph,) = graphs
    names = [str(getattr(n.target, "__name__", n.target)) for n in graph.graph.nodes]
    assert (names.count("linear"), names.count("cross_entropy"), names.count("embedding"), names.count("silu")) == (
        5,
        1,
        1,
        1,
    )
    assert not [n for n in names if "autograd_function" in n or "all_reduce" in n or "all_gather" in n]


@pytest.mark.slow  # test_adaptor.py has a dynamic one
def test_sequence_length_that_varies_is_two_graphs():
    """The second length makes it dynamic; later ones need no graph of their own."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = tiny_gpt(seq=64)
    for size, seq in ((2, 16), (3, 24), (4, 40), (2, 33)):
        assert_same(train(model, batch(size, seq), whole(model, counter)), plain(model, batch(size, seq)))
    assert counter.frame_count == 2


def test_bfloat16_as_eager():
    model, inputs = tiny_gpt(bf16=True, params_dtype=torch.bfloat16).bfloat16(), batch()
    assert_same(train(model, inputs, whole(model)), train(model, inputs), rtol=0.05, atol=4e-3)


@pytest.mark.parametrize("settings", [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    pytest.param({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, marks=pytest.mark.slow),
    pytest.param({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, marks=pytest.mark.slow),
], ids=["full", "core_attn", "layernorm", "mlp"])  # fmt: skip
def test_recompute(settings):
    model, inputs = tiny_gpt(**settings), batch()
    expected = plain(model, inputs)
    if "layernorm" not in settings.get("recompute_modules", ()):  # there Megatron's own needs TransformerEngine
        assert_same(train(model, inputs), expected)
    assert_same(train(model, inputs, whole(model)), expected)


def test_frozen_weights():
    model, inputs = tiny_gpt(), batch()
    expected = plain(model, inputs)[1]
    frozen = {n for n, _ in model.named_parameters() if "linear_qkv" in n or "linear_fc2" in n}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    whole(model)(**inputs).mean().backward()
    assert {n for n, p in model.named_parameters() if p.grad is None} == frozen
    for name, p in model.named_parameters():
        if name not in frozen:
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_main_grad_is_left_alone():
    model, inputs = tiny_gpt(), batch()
    for p in model.parameters():
        p.main_grad = torch.full_like(p, 7.0)
    expected = plain(model, inputs)
    assert_same(train(model, inputs, whole(model)), expected)
    assert all((p.main_grad == 7.0).all() for p in model.parameters())


@pytest.mark.parametrize(
    "config",
    [
        {"gated_linear_unit": True, "activation_func": torch.nn.functional.gelu, "bias_activation_fusion": True},
        {
            "gated_linear_unit": False,
            "activation_func": torch.nn.functional.gelu,
            "bias_activation_fusion": True,
            "add_bias_linear": True,
        },
        pytest.param({"bias_activation_fusion": True, "add_bias_linear": True}, marks=pytest.mark.slow),
        {"window_size": (4, 0)},
        {"rotary_interleaved": True},
        {"softmax_type": "off-by-one"},
        {"qk_layernorm": True},
        {"latent": True, "rope_type": "yarn", "original_max_position_embeddings": 8},
        pytest.param(
            {"attention_softmax_in_fp32": True, "apply_query_key_layer_scaling": True}, marks=pytest.mark.slow
        ),
    ],
    ids=[
        "geglu",
        "gelu-bias",
        "swiglu-bias",
        "window",
        "interleaved",
        "off-by-one",
        "qk-norm",
        "latent-yarn",
        "layer-scaling",
    ],
)
def test_other_layers_as_eager(config):
    model, inputs = tiny_gpt(**config), batch()
    assert_same(train(model, inputs, whole(model)), train(model, inputs))
