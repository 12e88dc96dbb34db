"""Values that a model fills part by part, under plans: an edge right behind them would place them unfilled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mindspeed_fx.planning.simulate import simulate


class Filled(nn.Module):
    """Latent attention's keys: some of a head's width is its own, the rest one for all heads."""

    def __init__(self, checkpointed: bool = False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(16, 32), nn.Linear(16, 20), nn.Linear(16, 32)
        self.o_proj, self.checkpointed = nn.Linear(32, 16), checkpointed

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, v = (p(x).view(batch, length, 4, 8).transpose(1, 2) for p in (self.q_proj, self.v_proj))
        own, shared = self.k_proj(x).split([16, 4], -1)
        k = q.new_empty(q.shape)
        k[..., :4] = own.view(batch, length, 4, 4).transpose(1, 2)
        k[..., 4:] = shared.unsqueeze(1)
        k[:, 0, :, 0] = 0.5
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return torch.utils.checkpoint.checkpoint(self.attend, x, use_reentrant=False).square().mean()
        return self.attend(x).square().mean()


PLANS = {"kv_allgather": {"cp": 2}, "ulysses": {"cp": 2}, "tp": {"tp": 2}, "zero2+ulysses": {"dp": 2, "cp": 2}}
FAST = [("kv_allgather", False), ("ulysses", True)]


@pytest.mark.parametrize(
    "plan, checkpointed",
    [*FAST, *(pytest.param(p, c, marks=pytest.mark.slow) for p in PLANS for c in (False, True) if (p, c) not in FAST)],
)
def test_filled_keys(plan, checkpointed):
    torch.manual_seed(0)
    model, x = Filled(checkpointed).double(), torch.randn(2, 8, 16, dtype=torch.double)
    loss = model(x)
    loss.backward()
    result = simulate(model, PLANS[plan], plan, x)
    assert (result.outputs[0] - loss).abs() <= 1e-10 * loss.abs()
    for name, p in model.named_parameters():
        scale = p.grad.abs().max()
        assert scale > 0 and (result.gradients[name] - p.grad).abs().max() <= 1e-10 * max(scale, 1e-6), name
