"""``--moe-router-load-balancing-type sparsemixer_topk``: SparseMixer's choice of two experts (Liu et al. 2023,
arXiv 2310.00811; for the second expert Liu et al. 2024, arXiv 2409.12136), as MindSpeed-LLM has it for Phi-3.5-MoE.

Scores s of a token; those further from the largest than 2 JITTER of the larger of it and |s| count as minus infinity.
Training draws one expert i of softmax(s) (the largest of s plus Gumbel noise), evaluation takes the largest. The weight
is w = softmax(s)_i, in training times ONE_THIRD where i is not the largest, three times in four (Heun's third-order
estimate); its gradient is that of w. The second expert is chosen so of the scores without the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

JITTER = 0.01
ONE_THIRD = 0.3333
"""MindSpeed-LLM's constants, whatever --moe-input-jitter-eps says."""


def route(router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``TopKRouter.routing`` by SparseMixer.

    Args:
        router: a TopKRouter.
        logits: [seq, batch, experts].
        padding_mask: must be None.

    Returns:
        Weights [tokens, experts], and bool where a token goes.

    Raises:
        NotImplementedError: there is padding.
    """
    if padding_mask is not None:
        raise NotImplementedError("--moe-router-load-balancing-type sparsemixer_topk has no mask of padding")
    scores = router.apply_z_loss(logits.view(-1, logits.shape[-1]))
    first, weight = _choose(scores, scores, router.training)
    second, weight_of_second = _choose(scores.scatter(-1, first, float("-inf")), scores, router.training)
    chosen, weights = torch.cat([first, second], -1), torch.cat([weight, weight_of_second], -1)
    probs = torch.zeros_like(scores).scatter(1, chosen, weights)
    return probs, torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)


def _choose(candidates: Tensor, scores: Tensor, is_training: bool) -> tuple[Tensor, Tensor]:
    """One expert of each token, and its weight, both [tokens, 1].

    Args:
        candidates: scores, minus infinity for experts that cannot be chosen [tokens, experts].
        scores: all of them.
    """
    with torch.no_grad():
        top, best = candidates.max(-1, keepdim=True)
        is_far = (top - candidates) / scores.abs().clamp(min=top) > 2 * JITTER
    near = candidates.masked_fill(is_far, float("-inf"))
    shares = near.softmax(-1)
    if not is_training:
        return best, shares.gather(-1, best)
    with torch.no_grad():  # one draw, of what was computed: draws of a graph stay in this order
        noise = torch.cat([near, top], -1).exponential_()
        chosen = (near - noise[:, :-1].log()).argmax(-1, keepdim=True)
        is_whole = (chosen == best) | (torch.exp(-noise[:, -1:]) > 0.75)
    weight = shares.gather(-1, chosen)
    held = torch.where(is_whole, weight, weight * ONE_THIRD).detach()
    return chosen, held + (weight - weight.detach())
