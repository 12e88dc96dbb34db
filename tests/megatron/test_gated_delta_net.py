"""Megatron's gated delta nets without flash-linear-attention and TransformerEngine: built, one graph, as eager."""

import pytest
import torch

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.gated_delta_net import RULE, chunk_gated_delta_rule, l2norm
from tests.megatron.gpt_models import batch, tiny_gpt, train

LINEAR = dict(
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq=2,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    transformer_impl="local",
)


def test_one_graph_as_eager():
    model, inputs = tiny_gpt(layers=2, **LINEAR), batch(seq=70)
    kinds = [type(layer.self_attention).__name__ for layer in model.decoder.layers]
    assert kinds == ["GatedDeltaNet", "SelfAttention"]
    loss, grads = train(model, inputs)
    compiled = torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    have = train(model, inputs, compiled)
    torch.testing.assert_close(have[0], loss)
    for name, grad in grads.items():
        assert grad.abs().sum() > 0, name
        torch.testing.assert_close(have[1][name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normalize, state", [(False, False), (True, True)])
def test_rule_is_megatrons_own_without_a_kernel(normalize, state):
    """Values and gradients of the function that Megatron has for deterministic mode."""
    theirs = patches.original(f"{RULE}:torch_chunk_gated_delta_rule")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 21, 4, d, requires_grad=True) for d in (6, 6, 5))
    g, beta = (-torch.rand(2, 21, 4)).requires_grad_(), torch.rand(2, 21, 4, requires_grad=True)
    first = torch.randn(2, 4, 6, 5) if state else None
    results = []
    for f in (theirs, chunk_gated_delta_rule):
        out, final = f(q, k, v, g, beta, 8, first, True, normalize)
        grads = torch.autograd.grad((out.sin().sum() + final.cos().sum()), (q, k, v, g, beta))
        results.append((out, final, *grads))
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5 * float(want.detach().abs().max().clamp(1, 10)))
    assert chunk_gated_delta_rule(q, k, v, g, beta)[1] is None


def test_norm_of_sixteen_bits():
    x = torch.randn(3, 8)
    torch.testing.assert_close(l2norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    assert l2norm(x.bfloat16()).dtype == torch.bfloat16
