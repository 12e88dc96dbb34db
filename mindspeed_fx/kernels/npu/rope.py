"""Rotary position embedding on NPU: ``npu_rotary_mul`` and its backward.

The kernel reads x as 4-D in the order in which it lies in memory (BNSD, BSND or SBND), and broadcasts the angles in the
forms that the documentation lists for each order. Its backward computes the gradients of the angles only where both
require gradients, which compiled code does not carry, so trained angles are refused. One documented limit is left to
the model: cosines and sines lie in [-1, 1], which no shape shows, and which tables that are scaled (YaRN) leave.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.kernels.npu import check_types, dense_order, first, lowering, promote_types, within
from mindspeed_fx.kernels.rope import rope, rope_backward

npu = torch.ops.npu
LIMIT = 895
"""Largest head_dim: "D < 896"."""


LAYOUTS = {
    "BNSD": ((0, 1), ((2,), (0, 2), (0, 1, 2))),
    "BSND": ((0, 2), ((1,), (0, 1), (0, 1, 2))),
    "SBND": ((1, 2), ((0,), (0, 1), (0, 1, 2))),
}
"""Layout -> where batch and heads are, and along which leading dimensions the angles may vary; the first alone where
pairs are interleaved."""


class _View(NamedTuple):
    """How the kernel sees x: 4-D, in the order of its memory."""

    missing: int
    order: list[int]

    def of(self, t: Tensor) -> Tensor:
        return (t[(None,) * (4 - t.dim())] if t.dim() < 4 else t).permute(self.order)

    def back(self, t: Tensor) -> Tensor:
        t = t.permute([self.order.index(i) for i in range(4)])
        return t[(0,) * self.missing] if self.missing else t


def _view(x: Tensor) -> _View:
    missing = 4 - x.dim()
    return _View(missing, [*range(missing), *(missing + i for i in dense_order(x.stride()[:-1])), 3])


def _supports(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, op: str = "npu_rotary_mul") -> str | None:
    if not 2 <= x.dim() <= 4 or cos.dim() > x.dim():
        return f"{op}: x has {x.dim()} dimensions, the angles {cos.dim()}; valid: 2 to 4, and no more than x"
    dim = x.shape[-1]
    if cos.shape != sin.shape or cos.shape[-1] != dim:
        return (
            f"{op}: x is {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; valid: angles of one "
            "shape, as long as a head"
        )
    if reason := first(
        check_types(x=x, cos=cos, sin=sin),
        within(f"{op}: head_dim", dim, 2, LIMIT),
        f"{op}: head_dim is {dim}; valid: even" if hint(dim) % 2 else None,
    ):
        return reason
    sizes, angles = ([[*[1] * (4 - t.dim()), *map(hint, t.shape)][i] for i in _view(x).order[:3]] for t in (x, cos))
    free = {i for i in range(3) if sizes[i] == 1}
    varying = {i for i in range(3) if angles[i] != 1}
    refused = None
    for layout, ((batch, heads), forms) in LAYOUTS.items():
        if not any(varying <= set(form) <= varying | free for form in (forms[:1] if interleaved else forms)):
            continue
        reason = _limits(op, layout, sizes[batch], sizes[heads], dim * promote_types(x, cos).itemsize, interleaved)
        if reason is None:
            return None
        refused = refused or reason
    return (
        refused
        or f"{op}: x is {sizes} in memory and the angles {angles}{', interleaved' * interleaved}; valid: "
        f"{_valid(interleaved)}"
    )


def _limits(op: str, layout: str, batch: int, heads: int, row: Any, interleaved: bool) -> str | None:
    if interleaved:
        return within(f"{op}: B * N of interleaved {layout}", batch * heads, 1, 999)
    unaligned = (
        f"{op}: rows of {hint(row)} bytes in BNSD; valid: multiples of 32 (the documentation advises against others)"
        if layout == "BNSD" and hint(row) % 32
        else None
    )
    return first(
        within(f"{op}: B of {layout}", batch, 1, 999), within(f"{op}: N of {layout}", heads, 1, 999), unaligned
    )


def _valid(interleaved: bool) -> str:
    def spelled(layout: str, form: tuple[int, ...]) -> str:
        return "".join(c if i in (*form, 3) else "1" for i, c in enumerate(layout))

    return ", ".join(
        spelled(layout, form)
        for layout, (_, forms) in LAYOUTS.items()
        for form in (forms[:1] if interleaved else forms)
    )


def _angles(view: _View, dtype: torch.dtype, *angles: Tensor) -> list[Tensor]:
    return [view.of(t.to(dtype)) for t in angles]


@lowering(rope, "npu_rotary_mul", _supports, ("npu_rotary_mul",))
def _rope(x, cos, sin, interleaved):
    view, dtype = _view(x), promote_types(x, cos)
    return view.back(
        npu.npu_rotary_mul(
            view.of(x.to(dtype)), *_angles(view, dtype, cos, sin), "interleave" if interleaved else "half"
        )
    )


def _supports_backward(grad, x, cos, sin, interleaved, need_angles):
    if need_angles:
        return (
            "npu_rotary_mul_backward: the angles need gradients, which it computes only for tensors that say so; "
            "compiled graphs do not"
        )
    return _supports(grad, cos, sin, interleaved, "npu_rotary_mul_backward")


@lowering(rope_backward, "npu_rotary_mul_backward", _supports_backward, ("npu_rotary_mul_backward",))
def _rope_backward(grad, x, cos, sin, interleaved, need_angles):
    view, dtype = _view(grad), promote_types(grad, cos)
    g = view.of(grad.to(dtype))
    # The second argument serves the gradients of the angles alone.
    dx = npu.npu_rotary_mul_backward(g, g, *_angles(view, dtype, cos, sin), "interleave" if interleaved else "half")[0]
    return view.back(dx).to(x.dtype), x.new_empty(0), x.new_empty(0)
