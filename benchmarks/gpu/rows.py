"""Norms, gates, rotations and losses: one read and one write of each row."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from .problem import Problem, new, optional, present, size

HEAD = 128


def _norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rms_norm(device: str, elements: int, width: int) -> Problem:
    x, w = new(elements // width, width, device=device), new(width, device=device)
    liger = optional("liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    rivals = present(
        liger=liger and (lambda x, w: liger.apply(x, w, 1e-5, 0.0, "llama", False)),
        torch=lambda x, w: F.rms_norm(x, (width,), w, 1e-5),
    )
    return Problem(_norm, [x, w], moved=(2 * size(x), 3 * size(x)), rivals=rivals)


def add_rms_norm(device: str, elements: int, width: int) -> Problem:
    def define(x, r, w):
        total = x + r
        return _norm(total, w), total

    x, r = (new(elements // width, width, device=device) for _ in range(2))
    liger = optional("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    rivals = present(liger=liger and (lambda x, r, w: liger.apply(x, r, w, 1e-5, 0.0, "llama", False)))
    return Problem(define, [x, r, new(width, device=device)], moved=(4 * size(x), 4 * size(x)), rivals=rivals)


def layer_norm(device: str, elements: int, width: int) -> Problem:
    x, w, b = new(elements // width, width, device=device), new(width, device=device), new(width, device=device)
    liger = optional("liger_kernel.ops.layer_norm", "LigerLayerNormFunction")
    rivals = present(liger=liger and (lambda x, w, b: liger.apply(x, w, b, 1e-5)))
    define = partial(_layer_norm, width)
    return Problem(define, [x, w, b], moved=(2 * size(x), 3 * size(x)), rivals=rivals)


def _layer_norm(width, x, w, b):
    return F.layer_norm(x, (width,), w, b, 1e-5)


def add_layer_norm(device: str, elements: int, width: int) -> Problem:
    def define(x, r, w, b):
        total = x + r
        return _layer_norm(width, total, w, b), total

    x, r = (new(elements // width, width, device=device) for _ in range(2))
    leaves = [x, r, new(width, device=device), new(width, device=device)]
    return Problem(define, leaves, moved=(4 * size(x), 4 * size(x)))


def swiglu(device: str, elements: int, width: int) -> Problem:
    gate, up = (new(elements // width, width, device=device) for _ in range(2))
    liger = optional("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    rivals = present(liger=liger and (lambda gate, up: liger.apply(gate, up)))
    return Problem(
        lambda gate, up: F.silu(gate) * up, [gate, up], moved=(3 * size(gate), 5 * size(gate)), rivals=rivals
    )


def geglu(device: str, elements: int, width: int) -> Problem:
    gate, up = (new(elements // width, width, device=device) for _ in range(2))
    liger = optional("liger_kernel.ops.geglu", "LigerGELUMulFunction")
    rivals = present(liger=liger and (lambda gate, up: liger.apply(gate, up)))
    moved = (3 * size(gate), 5 * size(gate))
    return Problem(lambda gate, up: F.gelu(gate, approximate="tanh") * up, [gate, up], moved=moved, rivals=rivals)


def packed_swiglu(device: str, elements: int, width: int) -> Problem:
    """Gate and up as the halves of one product, as Megatron has them."""

    def define(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    x = new(elements // width, 2 * width, device=device)
    return Problem(define, [x], moved=(size(x) * 3 // 2, size(x) * 5 // 2))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _angles(tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(tokens, device=device)[:, None] * torch.rand(HEAD // 2, device=device)
    cos, sin = (f(torch.cat((angle, angle), -1)).to(torch.bfloat16) for f in (torch.cos, torch.sin))
    return cos, sin


def rope(device: str, elements: int, width: int) -> Problem:
    """Queries [1, tokens, heads, 128] of ``width`` and keys of a quarter, as Hugging Face models transpose them."""

    def define(q, k, cos, sin):
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    tokens = elements // width
    liger = optional("liger_kernel.ops.rope", "LigerRopeFunction")
    q, k = (new(1, tokens, n // HEAD, HEAD, device=device).transpose(1, 2) for n in (width, width // 4))
    cos, sin = _angles(tokens, device)
    # Liger's rotates in place: it is given copies, laid out as a projection leaves them.
    rivals = present(liger=liger and (lambda q, k, cos, sin: liger.apply(*map(_copy, (q, k)), cos[None], sin[None])))
    moved = 2 * size(q, k, cos)
    return Problem(define, [q, k], [cos, sin], moved=(moved, moved), rivals=rivals)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def qk_norm_rope(device: str, elements: int, width: int) -> Problem:
    """Norms of the heads of queries and keys, and their rotation, as Qwen3 has them."""

    def define(q, k, wq, wk, cos, sin):
        q, k = (_norm(x, w).transpose(1, 2) for x, w in ((q, wq), (k, wk)))
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    tokens = elements // width
    q, k = (new(1, tokens, n // HEAD, HEAD, device=device) for n in (width, width // 4))
    cos, sin = _angles(tokens, device)
    leaves = [q, k, new(HEAD, device=device), new(HEAD, device=device)]
    return Problem(define, leaves, [cos, sin], moved=(2 * size(q, k, cos), 3 * size(q, k) + 2 * size(cos)))


def cross_entropy(device: str, elements: int, width: int) -> Problem:
    logits = new(4 * elements // width, width, device=device)
    target = torch.randint(width, (logits.shape[0],), device=device)
    liger = optional("liger_kernel.ops.cross_entropy", "LigerCrossEntropyFunction")
    # Liger's writes the gradient over the logits in its forward: compare the sum of both.
    rivals = present(
        liger=liger and (lambda logits, target: liger.apply(logits.clone(), target, None, -100, 0.0, 0.0, "mean")[0])
    )

    def define(logits, target):
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)

    return Problem(define, [logits], [target], moved=(size(logits), 2 * size(logits)), rivals=rivals)


def linear_cross_entropy(device: str, elements: int, width: int) -> Problem:
    """The last product and the loss; ``width`` is the vocabulary, hidden 2048."""
    hidden, tokens = 2048, 8 * elements // width
    x, w = new(tokens, hidden, device=device), new(width, hidden, device=device) / hidden**0.5
    target = torch.randint(width, (tokens,), device=device)
    liger = optional("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    rivals = present(liger=liger and (lambda x, w, target: liger.apply(x, w, target)[0]))

    def define(x, w, target):
        logits = x @ w.t()
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)

    flop = 2 * tokens * hidden * width
    return Problem(
        define,
        [x, w],
        [target],
        flop=(flop, 2 * flop),
        rivals=rivals,
        options={"enable": ["fusion.linear_cross_entropy"]},
        exact=torch.float32,
    )


PROBLEMS = {
    f"{make.__name__} {width}": partial(make, width=width)
    for make, widths in {
        rms_norm: (2048, 4096, 16384),
        add_rms_norm: (4096, 16384),
        layer_norm: (4096, 12288, 16384),
        add_layer_norm: (4096, 12288),
        swiglu: (14336,),
        geglu: (14336,),
        packed_swiglu: (14336,),
        rope: (4096,),
        qk_norm_rope: (4096,),
        cross_entropy: (32768, 131072),
        linear_cross_entropy: (131072,),
    }.items()
    for width in widths
}
