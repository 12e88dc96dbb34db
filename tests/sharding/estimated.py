"""A router whose scores get a gradient of its own, as Phi-MoE's: an ``autograd.Function`` that stays whole."""

import torch


class Estimated(torch.autograd.Function):
    """Scores of those that are chosen; the gradient also reaches the others, written in place."""

    @staticmethod
    def forward(ctx, scores, kept, chosen):
        ctx.save_for_backward(scores, kept, chosen)
        return scores.gather(-1, chosen) * kept

    @staticmethod
    def backward(ctx, grad):
        scores, kept, chosen = ctx.saved_tensors
        every = scores * (grad * kept).mul(-1)
        every.scatter_add_(dim=-1, index=chosen, src=grad)
        every[:, 0] += 1.0
        return every.view(-1, 2, every.shape[-1] // 2).flatten(1), None, None


class Routed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.router = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 4)
        self.out = torch.nn.Linear(8, 8)

    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        scores = self.router(x).softmax(-1)
        kept, chosen = scores.max(-1, keepdim=True)
        return (self.out(x) * Estimated.apply(scores, kept.detach(), chosen)).square().mean()


PLACEMENTS = {
    "columns of the router": {"router.weight": {"tp": "S(0)"}, "router.bias": {"tp": "S(0)"}},
    "width of the embedding": {"embed.weight": {"tp": "S(1)"}},
    "columns of the output": {"out.weight": {"tp": "S(0)"}, "out.bias": {"tp": "S(0)"}},
}
"""What of the parameters two ranks share. In the second the gradient that comes is a sum that is not yet made."""
