"""Linear cross-entropy as an accelerator does it, in a few large chunks and without the host's waiting for any of
them; on CPU in Triton's interpreter, and on CUDA.
"""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F

from mindspeed_fx.kernels import linear_cross_entropy as operator
from mindspeed_fx.kernels import linear_cross_entropy_chunks as chunks
from mindspeed_fx.kernels import linear_cross_entropy_work as work

TOKENS, WIDTH, VOCAB, IGNORED = 23, 16, 61, -100
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def distances(device: str) -> dict[str, float]:
    """Largest difference from float64 of losses and gradients, in tolerances of their largest element, by type,
    reduction and size of a chunk."""
    found = {}
    for dtype in TOLERANCE:
        for mean in (True, False):
            for rows in (5, TOKENS):
                with (
                    mock.patch.object(work, "LEAST", rows),
                    mock.patch.object(work, "CHUNK", 1),
                    mock.patch.object(chunks, "is_waited_for", lambda _: False),
                    mock.patch.object(operator, "is_waited_for", lambda _: False),
                    mock.patch.object(work, "SUMMED", 0),
                ):
                    found[f"{dtype} {'mean' if mean else 'sum'} {rows}".removeprefix("torch.")] = _distance(
                        device, dtype, mean
                    )
    return found


def _distance(device: str, dtype: torch.dtype, mean: bool) -> float:
    torch.manual_seed(0)
    x, w, b = (torch.randn(*s, dtype=torch.float64).to(dtype) for s in ((TOKENS, WIDTH), (VOCAB, WIDTH), (VOCAB,)))
    target = torch.randint(VOCAB, (TOKENS,))
    target[[0, 7, 8, TOKENS - 1]] = IGNORED
    exact = [t.double().requires_grad_() for t in (x, w, b)]
    want = F.cross_entropy(exact[0] @ exact[1].t() + exact[2], target, reduction="mean" if mean else "sum")
    want = [want.detach(), *torch.autograd.grad(want, exact)]
    have = torch.ops.mindspeed.linear_cross_entropy_total(
        *(t.to(device) for t in (x, w, b, target)), IGNORED, 0.0, 0.0, 0.0, mean, [True, True, True]
    )
    return (
        max(((h.cpu().double() - e).abs().max() / e.abs().max()).item() for h, e in zip(have, want)) / TOLERANCE[dtype]
    )


def what_is_not_finite(device: str) -> list[bool]:
    """Whether logits of an ignored token that are not finite stay out of the gradients, so does a factor of its loss,
    and a target that is no class has NaN for a loss.
    """
    from mindspeed_fx.kernels.triton import PARTS, load

    logits = torch.randn(3, VOCAB, device=device)
    logits[1] = float("nan")
    target = torch.tensor([3, -1, VOCAB], device=device)
    losses = load(PARTS["linear_cross_entropy_chunk"])(logits, target, None, 0.0, 0.0, 0.0, True)
    below = chunks._mark_ignored(torch.tensor([2, IGNORED, -5, VOCAB]), IGNORED, VOCAB)
    assert below.tolist() == [2, -1, VOCAB, VOCAB]  # a negative class is none, not an ignored token
    found = [not logits[1].any().item(), losses[1].item() == 0, losses[2].isnan().item(), losses[0].isfinite().item()]
    x, w = torch.randn(4, WIDTH, device=device), torch.randn(VOCAB, WIDTH, device=device)
    target = torch.tensor([1, IGNORED, 2, 3], device=device)
    factors = torch.where(target == IGNORED, float("inf"), 2.0)
    with mock.patch.object(chunks, "is_waited_for", lambda _: False):
        _, dx, dw, _ = chunks.run_in_chunks(
            x, w, None, target, IGNORED, 0.0, 0.0, 0.0, 1.0, [True, True, False], lambda at, _: factors[at]
        )
    exact = [t.double().requires_grad_() for t in (x, w)]
    loss = 2 * F.cross_entropy(exact[0] @ exact[1].t(), target, reduction="sum")
    wanted = torch.autograd.grad(loss, exact)
    return found + [torch.allclose(a.double(), b, atol=1e-4) for a, b in zip((dx, dw), wanted, strict=True)]
