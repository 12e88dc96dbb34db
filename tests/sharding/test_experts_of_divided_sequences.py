"""Mixtures of experts under plans that divide the sequence, over two mesh dimensions too: every token meets its own
router's choices, and its own place.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mindspeed_fx  # noqa: F401  registers the operators
from mindspeed_fx.planning.simulate import simulate
from tests.sharding.test_experts import SMALL, Loss, checked

ops = torch.ops.mindspeed
WIDTH, EXPERTS, CHOSEN = 8, 4, 2


class Experts(nn.Module):
    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.gate_up, self.down = (
            nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 3),
            nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3),
        )

    def forward(self, x, chosen, weights):
        return getattr(self, self.form)(x, chosen, weights)

    def one(self, x, expert: int):
        gate, up = (x @ self.gate_up[expert].t()).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down[expert].t()

    def loop(self, x, chosen, weights):
        return sum(self.one(x, e) * (weights * (chosen == e)).sum(-1, keepdim=True) for e in range(EXPERTS))

    def gathered(self, x, chosen, weights):
        tokens, flat = x.repeat_interleave(CHOSEN, 0), chosen.reshape(-1)
        gate, up = torch.bmm(self.gate_up[flat], tokens.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        out = torch.bmm(self.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out * weights.reshape(-1, 1)).view(-1, CHOSEN, WIDTH).sum(1)

    def permuted(self, x, chosen, weights):
        tokens, order = ops.moe_permute(x, chosen)
        ends = (chosen.reshape(-1, 1) <= torch.arange(EXPERTS)).sum(0).to(torch.int32)
        gate, up = ops.grouped_matmul(tokens, self.gate_up.transpose(1, 2), ends).chunk(2, -1)
        return ops.moe_unpermute(
            ops.grouped_matmul(F.silu(gate) * up, self.down.transpose(1, 2), ends), order, weights, CHOSEN
        )


class SharedExpert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """As Hugging Face's: attention, tokens in one line, a router, experts, and Qwen2's shared expert behind a gate."""

    def __init__(self, form: str):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts(form)
        self.shared_expert, self.shared_gate = SharedExpert(), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = (p(x).view(*ids.shape, 4, 2).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        tokens = x.view(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        mixed = self.experts(tokens, chosen, weights) + torch.sigmoid(self.shared_gate(tokens)) * self.shared_expert(
            tokens
        )
        return F.cross_entropy(self.head(x + mixed.view(x.shape)).view(-1, 32), ids.flip(1).reshape(-1))


def check(form: str, sizes: dict[str, int], plan: str) -> None:
    torch.manual_seed(0)
    model, ids = Mixture(form).double(), torch.randint(0, 32, (4, 8))
    loss = model(ids)
    loss.backward()
    result = simulate(model, sizes, plan, ids)
    assert (result.outputs[0] - loss).abs() <= 1e-12
    for name, p in model.named_parameters():
        assert p.grad.norm() > 0, name
        assert (result.gradients[name] - p.grad).norm() <= 1e-10 * p.grad.norm(), name


CP, TP = {"cp_ring": 2, "cp_ulysses": 2}, {"cp": 2, "tp": 2}
EVERY = {
    "hybrid": CP,
    "hybrid:2": {"cp_ring": 4, "cp_ulysses": 2},
    "ulysses+tp_sp": TP,
    "ring+tp_sp": TP,
    "kv_allgather+tp_sp": TP,
    "ep+ulysses": {"ep": 2, "cp": 2},
    "zero2+hybrid": {"dp": 2, **CP},
    "ep+hybrid": {"ep": 2, **CP},
    "ep_alltoall+hybrid": {"ep": 2, **CP},
    "ep+ulysses+tp_sp": {"ep": 2, **TP},
    "ep_alltoall+ring+tp_sp": {"ep": 2, **TP},
}

REFUSED = {
    ("loop", "ep_alltoall+hybrid"): "no mixture was found in this graph",
    ("loop", "ep_alltoall+ring+tp_sp"): "no mixture was found in this graph",
    ("gathered", "ep_alltoall+ring+tp_sp"): "all-to-all sends tokens over one mesh dimension",
}
"""What is said by name instead."""


@pytest.mark.parametrize("form, plan", [("permuted", "hybrid"), ("loop", "ulysses+tp_sp"), ("gathered", "ep+ulysses")])
def test_equals_one_device(form, plan):
    check(form, EVERY[plan], plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", EVERY)
@pytest.mark.parametrize("form", ["loop", "gathered", "permuted"])
def test_every_plan(form, plan):
    refusal = REFUSED.get((form, plan))
    if refusal is None:
        check(form, EVERY[plan], plan)
        return
    with pytest.raises(Exception, match=refusal):
        check(form, EVERY[plan], plan)


MORE = {
    "Mixtral": dict(num_local_experts=4),
    "Olmoe": dict(num_experts=4),
    "GptOss": dict(num_local_experts=4, head_dim=8, layer_types=["full_attention"]),
    "Qwen2Moe": dict(num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_hugging_face(kind, implementation):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **MORE[kind], use_cache=False, eos_token_id=None)
    config._attn_implementation = "eager" if kind == "GptOss" else "sdpa"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    checked(Loss(model, implementation), CP, "hybrid", torch.randint(0, 32, (2, 8)))
