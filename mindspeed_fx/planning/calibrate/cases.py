"""What is timed: small functions, compiled as a model would be, of the kinds that training steps are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn.functional as F

from mindspeed_fx.cost.operators import Cost

KINDS = ("product", "attention", "vector", "launch")
"""Of :class:`Case`; copies to the host and collectives have files of their own."""
DTYPES = ("float32", "bfloat16")
CHAIN = 24
"""Kernels in a row that show what a launch costs."""


@dataclass(frozen=True)
class Case:
    """A function and its inputs."""

    kind: str
    label: str
    dtype: torch.dtype
    function: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Leaves of the case's type; small numbers, so that no result overflows."""
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) * 0.1 for shape in self.shapes]
        return tuple(t.to(device, self.dtype).requires_grad_() for t in values)


@dataclass(frozen=True)
class Row:
    """One timing and the kernels behind it."""

    kind: str
    label: str
    dtype: str
    stage: str
    """"forward", "backward"; "" for a copy or a collective."""
    seconds: float
    spread: float
    kernels: tuple[Cost, ...] = ()
    is_noisy: bool = False


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """An activation of a feed-forward layer."""
    return F.silu(gate) * up


def residual_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What stands between two layers."""
    return F.rms_norm(x + residual, (x.shape[-1],), weight) * 2


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Rows of exponentials."""
    return F.softmax(scores, -1)


def head_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of queries and keys: rows as short as a head is wide."""
    return F.rms_norm(x, (x.shape[-1],), weight)


def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Of queries and keys by their positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def nll(logits: torch.Tensor) -> torch.Tensor:
    """A loss over a vocabulary, of the first word."""
    return logits.logsumexp(-1) - logits[:, 0]


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of [batch, heads, sequence, width]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def chain(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Products so small that their launches are all they cost, none fusible with the next."""
    for weight in weights:
        x = x @ weight
    return x


def twice(x: torch.Tensor) -> torch.Tensor:
    """Nothing worth its call."""
    return x * 2


EMPTY = Case("launch", "an empty graph", torch.float32, twice, ((8,),))
"""What a call of any compiled graph costs."""
SIZES: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = {
    "cpu": {
        "product": ((256, 256, 256), (512, 512, 512), (1024, 512, 1408), (1024, 1408, 512), (1024, 1024, 4096)),
        "attention": ((2, 8, 512, 64), (1, 8, 2048, 64), (1, 4, 1024, 128)),
        "swiglu": ((256, 512), (1024, 1408), (2048, 2048)),
        "residual_norm": ((256, 512), (1024, 512), (2048, 2048)),
        "softmax": ((1024, 512), (2048, 2048)),
        "head_norm": ((8192, 64), (4096, 128)),
        "rotation": ((8192, 64), (4096, 128)),
        "nll": ((512, 8192), (1024, 8192)),
    },
    "device": {
        "product": (
            (1024, 1024, 1024),
            (2048, 2048, 2048),
            (4096, 4096, 4096),
            (8192, 4096, 14336),
            (4096, 16384, 4096),
        ),
        "attention": ((4, 16, 2048, 128), (1, 16, 8192, 128), (1, 16, 16384, 128), (8, 16, 1024, 64)),
        "swiglu": ((1024, 4096), (8192, 4096), (8192, 14336)),
        "residual_norm": ((1024, 4096), (8192, 4096), (8192, 8192)),
        "softmax": ((8192, 2048), (8192, 8192)),
        "head_norm": ((131072, 128), (262144, 128)),
        "rotation": ((131072, 128), (262144, 128)),
        "nll": ((2048, 32768), (8192, 32768)),
    },
}
"""m, k, n of products; batch, heads, sequence, width of attention; rows and columns."""
POINTWISE: dict[str, tuple[Callable[..., torch.Tensor], int, bool]] = {
    "swiglu": (swiglu, 2, False),
    "residual_norm": (residual_norm, 2, True),
    "softmax": (softmax, 1, False),
    "head_norm": (head_norm, 1, True),
    "rotation": (rotation, 3, False),
    "nll": (nll, 1, False),
}
"""Function, tensors of the whole size, whether it has a weight of a row's size."""


def cases_for(device: str, kinds: tuple[str, ...], dtypes: tuple[str, ...] = DTYPES, small: bool = False) -> list[Case]:
    """The cases of some kinds for "cpu", "cuda" or "npu" in some types; ``small``: the first two sizes of each."""
    sizes = SIZES["cpu" if device == "cpu" else "device"]
    take = slice(2 if small else None)
    results: list[Case] = []
    for dtype in (getattr(torch, name) for name in dtypes):
        if "product" in kinds:
            for m, k, n in sizes["product"][take]:
                results.append(Case("product", f"{m} x {k} x {n}", dtype, F.linear, ((m, k), (n, k))))
        if "attention" in kinds:
            for shape in sizes["attention"][take]:
                label = " x ".join(map(str, shape))
                results.append(Case("attention", label, dtype, causal_attention, (shape,) * 3))
        if "vector" in kinds:
            for name, (function, count, weighted) in POINTWISE.items():
                for shape in sizes[name][take]:
                    shapes: tuple[Any, ...] = (shape,) * count + (((shape[-1],),) if weighted else ())
                    results.append(Case("vector", f"{name} {shape[0]} x {shape[1]}", dtype, function, shapes))
        if "launch" in kinds:
            results.append(Case("launch", f"{CHAIN} small products", dtype, chain, ((8, 8),) * (CHAIN + 1)))
    return results
