"""``--enable-mla-absorb`` without an indexer: Megatron's latent attention, with one key and one value for all heads."""

from __future__ import annotations

import pytest
import torch

from mindspeed_fx.megatron import absorbed_attention
from mindspeed_fx.megatron.model_parts import add_parts
from tests.megatron.flags.layer_effects import MLA
from tests.megatron.flags.values import apply
from tests.megatron.gpt_models import batch, tiny_gpt, train

pytestmark = pytest.mark.usefixtures("on_one_rank")


def build(absorbs: bool):
    args = apply(f"{MLA} {'--enable-mla-absorb' if absorbs else ''}")
    torch.manual_seed(0)
    model = tiny_gpt(latent=True, init_method_std=0.4).double()
    add_parts(model, args)
    return model


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_values_are_those_of_latent_attention(way):
    """Loss and gradients; no product of up-projections with tokens is made."""
    plain, model = build(False), build(True)
    model.load_state_dict(plain.state_dict())
    linear = model.decoder.layers[0].self_attention.linear_kv_up_proj
    assert isinstance(linear, absorbed_attention.NotMultiplied)
    core = model.decoder.layers[0].self_attention.core_attention
    shapes = []
    core.register_forward_pre_hook(lambda module, args: shapes.append([tuple(t.shape[2:]) for t in args[:3]]))
    call = None
    if way == "graph":
        call = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    expected, result = train(plain, batch()), train(model, batch(), call)
    torch.testing.assert_close(result[0], expected[0], rtol=2e-7, atol=0)  # logits and loss are float32
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(result[1][name], gradient, rtol=1e-5, atol=1e-7)
    assert shapes[0] == [(4, 24), (1, 24), (1, 16)]  # queries of four heads; a key and a value for all of them
