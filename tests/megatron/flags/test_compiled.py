"""Options that flags ask for, on a model of Megatron's: what is made again or moved, the same loss and gradients."""

from __future__ import annotations

import pytest
import torch

import mindspeed_fx
from mindspeed_fx.megatron import flags
from tests.megatron.flags.words import parse

pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")

pytestmark = pytest.mark.usefixtures("on_one_rank")

CASES = {
    "--recompute-activation-function": ("recompute.policy", "recomputed", ".mlp"),
    "--recompute-norm": ("recompute.policy", "recomputed", "layernorm"),
    "--swap-attention": ("recompute.budget", "offloaded", ".self_attention"),
    "--recompute-norm --recompute-norm-num-layers 1": ("recompute.policy", "recomputed", "norm"),
    "--swap-attention --recompute-norm": ("recompute.budget", "offloaded", ".self_attention"),
}
"""Words -> the pass, what it does to a value, and the module that each such value is of."""


@pytest.mark.parametrize("words", list(CASES))
def test_values_are_made_again_or_moved_where_the_flag_says(words):
    from tests.megatron.gpt_models import batch, tiny_gpt, train

    name, verb, module = CASES[words]
    two = " --num-layers 2"
    args = parse((words + two).split())
    flags.apply(args, words.split())
    options = {**flags.backend_options(args), "codegen": "eager"}
    model, inputs = tiny_gpt(layers=2 if "num-layers" in words else 1), batch()
    loss, gradients = train(model, inputs)
    report = mindspeed_fx.explain(model, options=options, **inputs)
    sites = [site for site in report.sites(name) if site.operator == verb]
    assert sites and all(module in site.module for site in sites), [site.module for site in sites]
    if "num-layers" in words:
        assert any("layers.0." in site.module for site in sites) and not any("layers.1." in s.module for s in sites)
    compiled = torch.compile(model, backend="mindspeed", options=options, fullgraph=True)
    new_loss, new_gradients = train(model, inputs, compiled)
    torch.testing.assert_close(new_loss, loss, rtol=1e-5, atol=1e-6)
    assert set(new_gradients) == set(gradients)
    for parameter, gradient in gradients.items():
        assert gradient.abs().max() > 0, parameter
        torch.testing.assert_close(new_gradients[parameter], gradient, rtol=1e-4, atol=1e-6)
