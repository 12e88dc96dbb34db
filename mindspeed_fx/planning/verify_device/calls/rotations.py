"""Calls of rotary embeddings, alone and with the norm before them."""

from __future__ import annotations

import itertools
from typing import Iterator

import torch

from mindspeed_fx.planning.verify_device.calls.makers import BNSD, BSND, SBND, normal, stored
from mindspeed_fx.planning.verify_device.calls.table import Call

ops = torch.ops.mindspeed


ROPE_FORMS: list[tuple[str, tuple[int, ...], tuple[int, ...], bool]] = [
    ("11SD", BNSD, (1, 1, 6, 32), True), ("B1SD", BNSD, (2, 1, 6, 32), False), ("BNSD", BNSD, (2, 4, 6, 32), False),
    ("1S1D", BSND, (1, 1, 6, 32), True), ("BS1D", BSND, (2, 1, 6, 32), False), ("BSND", BSND, (2, 4, 6, 32), False),
    ("S11D", SBND, (6, 32), True), ("SB1D", SBND, (2, 1, 6, 32), False), ("SD", BNSD, (6, 32), True),
]  # fmt: skip


def rope_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Rotations in every form of the angles and layout."""
    for (form, order, angles, both), wide in itertools.product(ROPE_FORMS, (False, True)):
        for interleaved in (False, True) if both else (False,):
            x = stored((2, 4, 6, 32), order, dtype)
            cos, sin = (normal(*angles, dtype=torch.float32 if wide else dtype) for _ in range(2))
            y = ops.rope(x, cos, sin, interleaved)
            name = f"{form}-{'interleave' if interleaved else 'half'}-{'wide' if wide else 'same'}"
            yield f"rope-{name}", ops.rope, (x, cos, sin, interleaved), "npu_rotary_mul"
            grad = torch.empty_like(y).copy_(torch.randn(y.shape))
            yield (
                f"rope_backward-{name}",
                ops.rope_backward,
                (grad, x, cos, sin, interleaved, False),
                "npu_rotary_mul_backward",
            )
    x, cos = normal(6, 4, 32, dtype=dtype), normal(6, 1, 32, dtype=dtype)
    yield "rope-TND", ops.rope, (x, cos, cos + 1, False), "npu_rotary_mul"
    x = normal(2, 6, 3 * 4 * 32, dtype=dtype).view(2, 6, 4, 96)[..., :32].transpose(1, 2)
    yield "rope-slice", ops.rope, (x, normal(6, 32, dtype=dtype), normal(6, 32, dtype=dtype), False), "npu_rotary_mul"
    yield (
        "rope-one-token",
        ops.rope,
        (normal(2, 4, 1, 32, dtype=dtype), normal(1, 32, dtype=dtype), normal(1, 32, dtype=dtype), True),
        "npu_rotary_mul",
    )
    for interleaved, rotates_back in itertools.product((False, True), (False, True)):
        q, k = stored((2, 4, 6, 32), BSND, dtype), stored((2, 2, 6, 32), BSND, dtype)
        angles = (normal(6, 32, dtype=dtype), normal(6, 32, dtype=dtype))
        yield (
            f"rope_pair-{interleaved}-{rotates_back}",
            ops.rope_pair,
            (q, k, *angles, interleaved, rotates_back),
            "triton, q and k in one launch",
        )


def qk_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Norm and rotation of heads."""
    for turned, weight in itertools.product((32, 16), (None, dtype, torch.float32)):
        name = f"{turned}-{str(weight)[6:]}"
        x, w = stored((2, 4, 6, 32), BSND, dtype), None if weight is None else normal(32, dtype=weight)
        angles = (normal(6, turned, dtype=dtype), normal(6, turned, dtype=dtype))
        y, rstd = ops.qk_norm_rope(x, w, *angles, 1e-6, True, False)
        yield (
            f"qk_norm_rope-{name}",
            ops.qk_norm_rope,
            (x, w, *angles, 1e-6, True, False),
            "triton, norm and rotation in one read of a head",
        )
        args = (torch.randn_like(y), x, w, rstd, *angles, False, w is not None)
        yield (
            f"qk_norm_rope_backward-{name}",
            ops.qk_norm_rope_backward,
            args,
            "triton, both gradients in one read of a head",
        )
