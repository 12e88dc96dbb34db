"""Embeddings whose rows ranks share, and what is no number."""

import torch
from torch import nn

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Plan


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(8, 4, padding_idx=0).double(), nn.Linear(4, 4).double()

    def forward(self, ids):
        x = self.embed(ids)
        return self.norm(x).sum() + torch.where((ids == 0).unsqueeze(-1), x.abs().sqrt(), x).sum()


def test_what_is_no_number_for_a_padded_token_reaches_no_row():
    """Its gradient here; the padded row takes none, and so does what stands in its place on the other rank."""
    model, ids = Embedded(), torch.tensor([[0, 1, 5, 0], [6, 2, 7, 0]])
    model(ids).backward()
    plan = Plan("vocabulary", ("tp",), {"embed.weight": {"tp": "S(0)"}})
    result = simulate(model, {"tp": 2}, plan, ids)
    for name, p in model.named_parameters():
        assert p.grad.isfinite().all()
        torch.testing.assert_close(result.gradients[name], p.grad)


def test_what_is_no_number_is_a_result():
    model, ids = Embedded(), torch.tensor([[0, 1, 5, 0], [6, 2, 7, 0]])
    with torch.no_grad():
        model.norm.bias.fill_(torch.nan)
    result = simulate(model, {"tp": 2}, Plan("vocabulary", ("tp",), {"embed.weight": {"tp": "S(0)"}}), ids)
    assert result.outputs[0].isnan() and result.gradients["norm.bias"].isfinite().all()
