"""Every kernel that can serve a step of a ring, for every form of attention: the result and the gradients of one
device.

A step has some of the keys of a row; its log-sum-exp and its result are of all. A kernel that makes rowsum(P dP) of the
keys it has, instead of rowsum(dO * O), is right on one device and wrong here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mindspeed_fx  # noqa: F401  registers the operators
from mindspeed_fx.compat import dtensor
from mindspeed_fx.kernels.base import find
from mindspeed_fx.kernels.sharding import register_sharding_rules
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.spmd import operators

ops = torch.ops.mindspeed
SEQ = 16
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
TOLERANCE = {F64: 1e-10, F32: 2e-6, BF16: 2e-2}
"""Of the norm of the difference, in parts of the norm of what is right."""
CPP, FLASH, BLOCKS = "in C++", "aten flash", "blocks of rows"
MESHES = {
    "ring": ({"cp": 2}, [Shard(2)], {}),
    "ring:2": ({"cp": 4}, [Shard(2)], {0: 2}),
    "hybrid": ({"cp_ring": 2, "cp_ulysses": 2}, [Shard(2), Shard(1)], {}),
}
"""Plan -> sizes of the mesh, placements of q, k and v, inner rings."""


@dataclass(frozen=True)
class Form:
    """One form of attention; ``mask`` names what :func:`mask_of` makes."""

    dims: tuple[int, int] = (4, 4)
    heads: tuple[int, int] = (4, 2)
    causal: bool = True
    scale: float = 0.5
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    mask: str = ""

    def serves(self, kernel: str, dtype: torch.dtype) -> bool:
        """Whether ``kernel`` takes a part of this form."""
        masked = bool(self.window or self.mask)
        if kernel == CPP:
            return dtype == F32 and not masked
        if kernel == FLASH:
            return not self.softcap and self.mask not in ("float", "bias") and self.dims[1] <= self.dims[0]
        return kernel != BLOCKS or (self.causal and not masked)


FORMS = {
    "causal": Form(),
    "full": Form(causal=False),
    "scale": Form(scale=1.7),
    "softcap": Form(softcap=2.0),
    "full softcap": Form(causal=False, softcap=2.0),
    "wide values": Form(dims=(3, 5)),
    "narrow values": Form(dims=(5, 3)),
    "odd": Form(dims=(7, 7)),
    "heads alike": Form(heads=(4, 4)),
    "wide softcap": Form(dims=(3, 5), softcap=2.0),
    "sinks": Form(sinks=True),
    "full sinks": Form(causal=False, sinks=True),
    "sinks softcap": Form(sinks=True, softcap=2.0, dims=(5, 3)),
    "window": Form(window=5),
    "window sinks softcap": Form(window=5, sinks=True, softcap=2.0),
    "window wide": Form(window=5, dims=(3, 5)),
    "bool mask": Form(causal=False, mask="bool"),
    "float mask": Form(causal=False, mask="float"),
    "causal mask": Form(mask="bool"),
    "position bias": Form(mask="bias"),
    "masked softcap": Form(mask="bool", softcap=2.0),
    "documents": Form(mask="documents"),
    "documents window": Form(mask="documents", window=4),
}


class Runs(TorchDispatchMode):
    """Attention of local tensors by the kernel whose name has ``kernel`` in it, where it takes them; else by the
    reference.
    """

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel, self.served = kernel, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.kernel and func in (ops.attention.default, ops.attention_backward.default):
            args = (*args, *(a.default_value for a in func._schema.arguments[len(args) :]))
            for lowering in find(func).lowerings["cpu"]:
                if self.kernel in lowering.kernel and lowering.supports(*args) is None:
                    self.served.add(func)
                    return lowering.build(*args)
        return func(*args, **(kwargs or {}))


def mask_of(form: Form, dtype: torch.dtype) -> torch.Tensor | None:
    i, j = torch.arange(SEQ).unsqueeze(1), torch.arange(SEQ)
    if form.mask == "documents":
        return (torch.arange(SEQ) // 6).expand(2, SEQ)
    if form.mask == "bias":  # as ALiBi's: by head and distance
        return -(torch.arange(1, form.heads[0] + 1) / 8).view(1, -1, 1, 1).to(dtype) * (i - j).abs().to(dtype)
    keep = (torch.rand(2, 1, SEQ, SEQ) > 0.4) | (i == j)
    if form.mask == "float":
        return torch.where(keep, torch.randn(2, 1, SEQ, SEQ).to(dtype), torch.finfo(dtype).min)
    return keep if form.mask == "bool" else None


def one_device(q, k, v, sinks, form: Form, mask: torch.Tensor | None) -> torch.Tensor:
    """By definition, in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = form.scale * q @ k.transpose(2, 3)
    if form.softcap:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    ahead = torch.arange(SEQ) - torch.arange(SEQ).unsqueeze(1)
    keep = ahead <= 0 if form.causal else torch.ones(SEQ, SEQ, dtype=torch.bool)
    if form.window:
        keep = keep & (ahead > -form.window)
    if form.mask == "documents":
        keep = keep & (mask.unsqueeze(2) == mask.unsqueeze(1)).unsqueeze(1)
    elif mask is not None and mask.dtype == torch.bool:
        keep = keep & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~keep, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    return scores.softmax(3)[..., :SEQ] @ v


def in_parts(
    kernel: str, plan: str, form: Form, inputs: list[torch.Tensor], mask: torch.Tensor | None, sinks: bool
) -> tuple[list[torch.Tensor], set]:
    """Result and gradients of ``inputs`` (q, k, v, and sinks), whole, and the operators that the kernel ran."""
    sizes, placed, inner = MESHES[plan]
    register_sharding_rules()
    with Runs(kernel) as runs, dtensor.all_ranks(sizes) as mesh:
        whole = [Replicate()] * len(placed)

        def divided(x: torch.Tensor, placements: list) -> torch.Tensor:
            return distribute_tensor(x.detach(), mesh, placements, src_data_rank=None)

        given = [divided(x, placed if x.dim() == 4 else whole).requires_grad_() for x in inputs]
        mask = None if mask is None else divided(mask, whole)
        if form.mask == "documents":
            out = operators.varlen_attention(*given[:3], mask, None, form.causal, form.scale, form.window, inner=inner)[
                0
            ]
        else:
            out = operators.attention(
                *given[:3],
                mask,
                form.causal,
                form.scale,
                form.window,
                form.softcap,
                given[3] if sinks else None,
                inner=inner,
            )[0]
        gradients = torch.autograd.grad((out * out).sum(), given)
        return [x.full_tensor().reconcile() for x in (out, *gradients)], runs.served


def check(kernel: str, dtype: torch.dtype, plan: str, name: str) -> None:
    form = FORMS[name]
    torch.manual_seed(0)
    inputs = [
        torch.randn(2, h, SEQ, d).to(dtype) for h, d in zip((*form.heads, form.heads[1]), (form.dims[0], *form.dims))
    ]
    inputs += [torch.randn(form.heads[0]).to(dtype)] * form.sinks
    mask = mask_of(form, dtype)
    exact = [x.double().requires_grad_() for x in inputs]
    out = one_device(*exact[:3], exact[3] if form.sinks else None, form, mask)
    expected = [out, *torch.autograd.grad((out * out).sum(), exact)]
    # Probabilities are made again from scores and the logarithm of their sum: three numbers rounded at
    # the size of a score.
    keys = exact[1].repeat_interleave(form.heads[0] // form.heads[1], 1)
    eps = torch.finfo(torch.promote_types(dtype, F32)).eps
    rounded = 3 * eps * form.scale * (exact[0] @ keys.transpose(2, 3)).abs().max().item()
    found, served = in_parts(kernel, plan, form, inputs, mask, form.sinks)
    for what, have, want in zip(("out", "q", "k", "v", "sinks"), found, expected):
        assert want.norm() > 1e-2, what
        error = (have.double() - want).norm() / want.norm()
        assert error <= max(TOLERANCE[dtype], rounded), (what, error.item(), rounded)
    assert not kernel or ops.attention_backward.default in served, "another kernel ran"


@pytest.mark.parametrize(
    "kernel, dtype, name",
    [
        *((BLOCKS, F64, n) for n in ("causal", "softcap", "wide values")),
        *((BLOCKS, BF16, n) for n in ("sinks", "wide softcap")),
        (CPP, F32, "causal"),
        (CPP, F32, "sinks softcap"),
        (FLASH, BF16, "narrow values"),
        (FLASH, F64, "causal mask"),
        ("", F64, "position bias"),
        ("", F64, "window sinks softcap"),
        ("", F32, "documents"),
    ],
)
def test_ring(kernel, dtype, name):
    check(kernel, dtype, "ring", name)


@pytest.mark.parametrize("plan, name", [("hybrid", "wide softcap"), ("ring:2", "softcap")])
def test_other_rings(plan, name):
    check(BLOCKS, F64, plan, name)


EVERY = [
    (k, d, p, n)
    for k in ("", CPP, FLASH, BLOCKS)
    for d in (F64, F32, BF16)
    for p in MESHES
    for n, form in FORMS.items()
    if form.serves(k, d)
]


@pytest.mark.slow
@pytest.mark.parametrize("kernel, dtype, plan, name", EVERY)
def test_every_form_by_every_kernel(kernel, dtype, plan, name):
    check(kernel, dtype, plan, name)


def test_a_trained_bias_is_refused():
    q = torch.randn(2, 4, SEQ, 4)
    register_sharding_rules()
    with dtensor.all_ranks({"cp": 2}) as mesh:
        given = [distribute_tensor(q, mesh, [Shard(2)], src_data_rank=None) for _ in "qkv"]
        bias = distribute_tensor(torch.randn(1, 4, SEQ, SEQ), mesh, [Replicate()], src_data_rank=None).requires_grad_()
        with pytest.raises(ShardingError, match="gives an additive mask no gradient; divide heads or the batch"):
            operators.attention(*given, bias, False, 0.5)
