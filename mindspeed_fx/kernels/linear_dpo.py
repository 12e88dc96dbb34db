"""Linear and the loss of direct preference optimization in one, whose logits never exist whole.

With l the sums of log-probabilities of the chosen and the rejected sequences of pairs, and d = (l_chosen - l_rejected)
less the same of the reference model,

    loss = mean over pairs of -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d)

Sources: Rafailov et al. 2023, "Direct Preference Optimization" (arXiv 2305.18290), equation 7; the smoothing s:
Mitchell 2023, "A note on DPO with noisy preferences". The gradient of a token's logits needs both sums of its pair, so
that logits are made again in the backward (``mindspeed::linear_cross_entropy_tokens``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.kernels.base import LIBRARY
from mindspeed_fx.kernels.linear_cross_entropy import linear_cross_entropy


def linear_dpo(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reference: Tensor | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """The loss of DPO from hidden states; the formula stands at the top of this file.

    Args:
        hidden: [2 * pairs, seq, hidden], float: the chosen sequences, then the rejected ones in the same order.
        weight: [vocab, hidden], of the same type.
        bias: [vocab] of the same type, or None.
        target: [2 * pairs, seq], int64, the class of each token, shifted by the caller; ``ignore_index`` marks tokens
            that do not count.
        reference: [2 * pairs], sums of log-probabilities of the reference model; None: zeros.
        beta: how strongly preferences count.
        label_smoothing: share in [0, 0.5) of pairs that are labelled wrongly.

    Returns:
        the loss [] and the sums of log-probabilities [2 * pairs], in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes that do not fit, or a share that is none.
        IndexError: a target is neither a class nor ``ignore_index``.
    """
    torch._check_value(
        hidden.dim() == 3 and hidden.shape[0] % 2 == 0 and target.shape == hidden.shape[:2],
        lambda: (
            f"linear_dpo: hidden is {list(hidden.shape)} and target {list(target.shape)}; valid: [2 * pairs, seq, "
            "hidden] and [2 * pairs, seq]"
        ),
    )
    torch._check_value(
        0 <= label_smoothing < 0.5,
        lambda: f"linear_dpo: label_smoothing={label_smoothing}; valid: from 0 to less than 0.5",
    )
    torch._check_value(
        reference is None or reference.shape == hidden.shape[:1],
        lambda: f"linear_dpo: reference is {list(reference.shape)}; valid: [{hidden.shape[0]}]",
    )
    losses = linear_cross_entropy(
        hidden.flatten(0, 1), weight, bias, target.flatten(), ignore_index, reduction="none"
    ).view(target.shape)
    sums = -losses.sum(1)
    chosen, rejected = (sums if reference is None else sums - reference.to(sums.dtype)).chunk(2)
    margin = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return loss.mean(), sums


LIBRARY.define(
    "linear_dpo(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? reference=None, float beta=0.1, "
    "float label_smoothing=0.0, int ignore_index=-100) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("linear_dpo", linear_dpo, "CompositeImplicitAutograd")
