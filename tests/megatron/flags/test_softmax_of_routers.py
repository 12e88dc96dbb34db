"""--topk-softmax-in-fp32 and --moe-revert-type-after-topk: experts are chosen, and weighted, by float32."""

from __future__ import annotations

import pytest
import torch

from mindspeed_fx.megatron import flags
from mindspeed_fx.megatron.model_parts import add_parts
from tests.megatron.flags.words import parse
from tests.megatron.gpt_models import tiny_gpt

pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")
pytestmark = pytest.mark.usefixtures("on_one_rank")


def router_of(words):
    """The router of a bfloat16 model with eight experts, of which three are chosen, as the flags make it."""
    args = parse([*words.split(), "--moe-router-topk", "3"])
    flags.apply(args, words.split())
    kind, before = args.moe_router_load_balancing_type, args.moe_router_pre_softmax
    model = tiny_gpt(
        layers=1,
        experts=8,
        moe_router_topk=3,
        moe_router_load_balancing_type=kind,
        moe_router_pre_softmax=before,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    args.num_layers, args.hidden_size = model.config.num_layers, model.config.hidden_size
    add_parts(model, args)
    return model.decoder.layers[0].mlp.router


AUX, NONE = "--moe-router-load-balancing-type aux_loss", "--moe-router-load-balancing-type none"
BEFORE, SOFTMAX_TOPK = "--moe-router-pre-softmax", "--moe-router-load-balancing-type softmax_topk"


@pytest.mark.parametrize(
    "words, dtype, normalized",
    [
        (f"--topk-softmax-in-fp32 {NONE} {BEFORE}", torch.float32, False),
        (f"--topk-softmax-in-fp32 {AUX} {BEFORE}", torch.bfloat16, False),
        (f"--topk-softmax-in-fp32 {AUX} --norm-topk-prob", torch.bfloat16, True),
        (f"--moe-revert-type-after-topk {SOFTMAX_TOPK}", torch.float32, False),
        (f"--moe-revert-type-after-topk {SOFTMAX_TOPK} --norm-topk-prob", torch.float32, True),
    ],
)
def test_softmax_in_float32(words, dtype, normalized):
    """Small probabilities of many experts are equal in 16 bits, and differ here."""
    torch.manual_seed(0)
    logits = (torch.randn(512, 8) * 0.02).bfloat16().requires_grad_()
    probs, chosen = router_of(words).routing(logits)
    scores = logits.float().softmax(-1)
    values, indices = scores.topk(3, dim=1)
    if normalized:
        values = values / values.sum(-1, keepdim=True)
    right = torch.zeros_like(scores).scatter(1, indices, values)
    assert probs.dtype == dtype and chosen.sum() == 3 * 512
    exact = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(probs.float().sort(1).values, right.sort(1).values, rtol=exact, atol=0)
    (gradient,) = torch.autograd.grad((probs.float() * torch.arange(8)).sum(), logits)
    assert gradient.abs().max() > 0
