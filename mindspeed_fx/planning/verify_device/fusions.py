"""A small graph for every pass that joins operators, as a model would spell what the pass reads."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
import torch.nn.functional as F

from mindspeed_fx.planning.verify_device import delta_rules

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Size:
    """Of the tensors; ``batch * seq`` tokens."""

    batch: int
    seq: int
    heads: int
    dim: int
    hidden: int
    vocab: int
    experts: int = 4

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


SMALL = Size(batch=2, seq=32, heads=4, dim=16, hidden=64, vocab=96)
"""For values."""
OF_A_MODEL = {"cpu": Size(1, 256, 8, 64, 512, 8192), "device": Size(2, 2048, 16, 128, 2048, 32768, 8)}
"""For times."""


@dataclass(frozen=True)
class Fusion:
    """What one pass is shown."""

    name: str
    """The pass."""
    function: Callable[..., Any]
    inputs: Callable[[Size, torch.dtype], Inputs]
    """Tensors on the processor; those that require gradients are leaves."""
    targets: tuple[str, ...] = ("cpu", "cuda", "npu")
    """Where the pass does something."""
    options: dict[str, Any] = field(default_factory=dict)
    """Besides target and codegen."""
    is_random: bool = False
    """Dropout of numbers of its own: compared by what it keeps, see :func:`kept_alike`."""
    reference: Callable[..., Any] | None = None
    """What takes float64 where the function does not."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Types that it is for; (): all."""


def _divided_in_turn(x):
    """Sinkhorn's algorithm as models with hyper-connections have it."""
    x = x.softmax(-1) + 1e-6
    x = x / (x.sum(-2, keepdim=True) + 1e-6)
    for _ in range(3):
        x = x / (x.sum(-1, keepdim=True) + 1e-6)
        x = x / (x.sum(-2, keepdim=True) + 1e-6)
    return x


def _routed(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3's router without groups; a row of all experts, so that their order is not seen."""
    scores = _wide(logits).sigmoid()
    ids = (scores + bias).topk(2, -1, sorted=False)[1]
    weights = scores.gather(-1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    return torch.zeros_like(scores).scatter(-1, ids, weights)


def _leaf(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def _hidden(s: Size, dtype: torch.dtype, count: int = 1, *vectors: int) -> Inputs:
    """``count`` tensors [batch, seq, hidden] and ``vectors`` of the given lengths."""
    return tuple(_leaf(dtype, s.batch, s.seq, s.hidden) for _ in range(count)) + tuple(_leaf(dtype, n) for n in vectors)


def _heads(s: Size, dtype: torch.dtype, count: int = 3) -> Inputs:
    return tuple(_leaf(dtype, s.batch, s.heads, s.seq, s.dim) for _ in range(count))


def _angles(s: Size, dtype: torch.dtype) -> Inputs:
    turns = torch.outer(torch.arange(s.seq).float(), 1e4 ** (-torch.arange(0, s.dim, 2) / s.dim)).repeat(1, 2)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(mask, -math.inf).softmax(-1, dtype=_wide(q).dtype).to(q.dtype) @ v


def _returned_weights(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (_wide(q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5).masked_fill(mask, -10000.0)
    weights = scores.softmax(-1).to(q.dtype)
    return weights @ v, weights * 2


def _clipped(x: torch.Tensor) -> torch.Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def _nll(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_wide(logits).flatten(0, -2), target.flatten())


def _head(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _nll(F.linear(x, weight), target)


def _head_and_logits(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Any:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits


def _loss_inputs(s: Size, dtype: torch.dtype) -> Inputs:
    return (*_hidden(s, dtype), _leaf(dtype, s.vocab, s.hidden), torch.randint(0, s.vocab, (s.batch, s.seq)))


def _ends(s: Size) -> torch.Tensor:
    return torch.linspace(0, s.tokens, s.experts + 1)[1:].to(torch.int32)


def _grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x, weight, offs=ends)


def _grouped_in_parts(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows @ w for rows, w in zip(x.tensor_split(ends[:-1].long()), weight)])


def _sorted(x: torch.Tensor, probs: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """k experts a token, here one layer for all: what is fused is the way there and back."""
    k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    rows = x[order // k] @ weight
    sorted_back = torch.empty_like(rows)
    sorted_back[order] = rows
    return (sorted_back.view(*experts.shape, -1) * probs.unsqueeze(-1)).sum(1)


def _sorted_inputs(s: Size, dtype: torch.dtype) -> Inputs:
    tokens = s.tokens
    experts = torch.rand(tokens, s.experts).topk(2)[1]
    return (
        _leaf(dtype, tokens, s.hidden),
        torch.rand(tokens, 2).to(dtype).requires_grad_(),
        _leaf(dtype, s.hidden, s.hidden),
        experts,
    )


def _gathered(x: torch.Tensor, weight: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.unsqueeze(1), weight[scores.topk(1)[1].reshape(-1)]).squeeze(1)


def _gathered_inputs(s: Size, dtype: torch.dtype) -> Inputs:
    rows = min(s.tokens, 64)
    return _leaf(dtype, rows, s.hidden), _leaf(dtype, s.experts, s.hidden, s.dim), torch.rand(rows, s.experts)


def _one_hot(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """GShard's products with one-hot masks; places in the order of the tokens, half the tokens fit."""
    experts, capacity = weight.shape[0], 2 * x.shape[0] // weight.shape[0]
    mask = F.one_hot(chosen, experts)
    order = mask.cumsum(0) - 1
    kept = mask * (order < capacity)
    place = F.one_hot((order * kept).sum(1), capacity).to(x.dtype)
    combine = gate[:, None, None] * kept.to(x.dtype).unsqueeze(-1) * place.unsqueeze(1)
    rows = torch.einsum("sec,sm->ecm", combine.bool().to(x.dtype), x)
    return torch.einsum("sec,ecm->sm", combine, torch.bmm(rows, weight))


def _one_hot_inputs(s: Size, dtype: torch.dtype) -> Inputs:
    gate = (torch.rand(s.tokens) + 0.1).to(dtype).requires_grad_()
    chosen = torch.randint(0, s.experts, (s.tokens,))
    return _leaf(dtype, s.tokens, s.hidden), gate, _leaf(dtype, s.experts, s.hidden, s.hidden), chosen


def _drop(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + F.dropout(x + bias, 0.25, training=True)


class _Double(torch.autograd.Function):
    """A user's function, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * 2 * s * (1 + x * (1 - s))


def _delta_rules(by_channel: bool) -> Callable[[Size, torch.dtype], Inputs]:
    return lambda s, dtype: delta_rules.tensors(s.batch, s.heads, s.seq, s.dim, dtype, by_channel)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    wide = _wide(x)
    centered = wide - wide.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5)
    return y.to(x.dtype) * weight + bias


def _merged(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


FLOATS = (torch.float32, torch.float64)
FUSIONS = (
    Fusion("fusion.gated_delta_rule", delta_rules.chunked, _delta_rules(False), dtypes=FLOATS),
    Fusion("fusion.kimi_delta_attention", delta_rules.chunked, _delta_rules(True), dtypes=FLOATS),
    Fusion(
        "fusion.grouped_matmul",
        _grouped,
        lambda s, t: (_leaf(t, s.tokens, s.hidden), _leaf(t, s.experts, s.hidden, s.dim), _ends(s)),
        targets=("cpu", "npu"),
        reference=_grouped_in_parts,
        dtypes=(torch.bfloat16,),
    ),
    Fusion("fusion.moe_permute", _sorted, _sorted_inputs),
    Fusion(
        "fusion.router_topk",
        _routed,
        lambda s, t: (_leaf(t, s.tokens, 4 * s.experts), torch.randn(4 * s.experts) / 4),
        targets=("npu",),
    ),
    Fusion("fusion.gathered_experts", _gathered, _gathered_inputs),
    Fusion("canonicalize.autograd_function", _Double.apply, lambda s, t: _hidden(s, t)),
    Fusion("fusion.clipped_swiglu", _clipped, lambda s, t: _hidden(s, t)),
    Fusion("fusion.layer_norm", _layer_norm, lambda s, t: _hidden(s, t, 1, s.hidden, s.hidden)),
    Fusion(
        "fusion.merged_linear",
        _merged,
        lambda s, t: (*_hidden(s, t), _leaf(t, 2 * s.hidden, s.hidden), _leaf(t, 2 * s.hidden, s.hidden)),
        targets=("cuda", "npu"),
        options={"enable": ["fusion.merged_linear"]},
    ),
    Fusion("fusion.one_hot_dispatch", _one_hot, _one_hot_inputs),
    Fusion("fusion.rms_norm", _rms, lambda s, t: _hidden(s, t, 1, s.hidden)),
    Fusion("fusion.rope", _turn, lambda s, t: (*_heads(s, t, 1), *_angles(s, t))),
    Fusion(
        "fusion.add_layer_norm",
        lambda x, r, w, b: (_layer_norm(x + r, w, b), (x + r) * 2),
        lambda s, t: _hidden(s, t, 2, s.hidden, s.hidden),
    ),
    Fusion(
        "fusion.add_rms_norm",
        lambda x, r, w: (_rms(x + r, w), (x + r) * 2),
        lambda s, t: _hidden(s, t, 2, s.hidden),
    ),
    Fusion("fusion.dropout_add", _drop, lambda s, t: (*_hidden(s, t, 1, s.hidden), *_hidden(s, t)), is_random=True),
    Fusion(
        "fusion.dropout_add_seeded",
        _drop,
        lambda s, t: (*_hidden(s, t, 1, s.hidden), *_hidden(s, t)),
        targets=("npu",),
        is_random=True,
    ),
    Fusion(
        "fusion.qk_norm_rope",
        lambda x, w, cos, sin: _turn(_rms(x, w), cos, sin),
        lambda s, t: (*_heads(s, t, 1), _leaf(t, s.dim), *_angles(s, t)),
    ),
    Fusion(
        "canonicalize.row_layout",
        lambda x, w: F.layer_norm(x.mT + 1, (x.shape[-2],), w),
        lambda s, t: (_leaf(t, s.batch, s.hidden, s.seq), _leaf(t, s.hidden)),
    ),
    Fusion("canonicalize.silu", lambda x: x / (1 + torch.exp(-x)), lambda s, t: _hidden(s, t)),
    Fusion(
        "canonicalize.gelu",
        lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951)),
        lambda s, t: _hidden(s, t),
    ),
    Fusion(
        "canonicalize.softmax",
        lambda x: x.exp() / x.exp().sum(-1, keepdim=True) * x,  # alone, its gradient is a difference of equals
        lambda s, t: _hidden(s, t),
    ),
    Fusion("fusion.attention", _attention, _heads),
    Fusion("fusion.cross_entropy", _nll, lambda s, t: (_leaf(t, s.tokens, s.vocab), torch.arange(s.tokens) % s.vocab)),
    Fusion("fusion.linear_cross_entropy", _head, _loss_inputs, options={"enable": ["fusion.linear_cross_entropy"]}),
    Fusion("fusion.scaled_masked_softmax", _returned_weights, _heads, targets=("npu",)),
    Fusion("fusion.swiglu", lambda a, b: F.silu(a) * b, lambda s, t: _hidden(s, t, 2)),
    Fusion("fusion.activation", lambda x: F.relu(x).square(), lambda s, t: _hidden(s, t)),
    Fusion("fusion.glu", lambda a, b: F.gelu(a) * b, lambda s, t: _hidden(s, t, 2)),
    Fusion(
        "fusion.sinkhorn_knopp",
        _divided_in_turn,
        lambda s, t: (_leaf(t, s.batch, s.seq, 4, 4),),
    ),
    Fusion(
        "fusion.weighted_swiglu",
        lambda a, b, w: F.silu(a) * b * w,
        lambda s, t: (*_hidden(s, t, 2), _leaf(t, s.batch, s.seq, 1)),
    ),
    Fusion(
        "fusion.linear_cross_entropy_backward",
        _head_and_logits,
        lambda s, t: _loss_inputs(dataclasses.replace(s, vocab=max(s.vocab, 2**22 // s.tokens)), t),
        options={"enable": ["fusion.linear_cross_entropy_backward"]},
    ),
)
"""By the pass that it is for; what a pass needs of others (a silu, a norm) is part of its graph."""


WITHOUT_GRAPH = {
    **dict.fromkeys(
        (
            "canonicalize.batched_arithmetic",
            "canonicalize.stacked_rows",
            "fusion.causal_conv1d",
            "fusion.selective_scan",
            "fusion.ssd",
        ),
        "no graph of a state-space model is here yet: see the operator's own calls",
    ),
    "canonicalize.expert_loop": "only graphs of parallelized models have loops over experts",
    "canonicalize.filled_buffers": "pieces are joined by cat and stack, which graphs of rotations and of attention run",
    "canonicalize.forward_substitution": "becomes torch's own linalg.solve_triangular, of float32 alone",
    "canonicalize.npu_attention": "torch_npu's own call becomes another of its calls: see the kernels of attention",
    "canonicalize.varlen_attention": "torch's varlen_attn runs on cuda alone: see the operator varlen_attention",
}
"""Passes that no graph here shows, and why."""


def kept_alike(y: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, residual: torch.Tensor) -> str | None:
    """What is wrong with ``y = residual + dropout(x)`` and the gradient of its sum by ``x``; None: nothing.

    What is kept is scaled alike and kept in both directions, and the share that is kept is within five standard
    deviations of three quarters.
    """
    kept = grad != 0
    wanted = residual.double() + torch.where(kept, x.double() / 0.75, 0.0)
    scale = wanted.abs().max().item()
    off = (y.double() - wanted).abs().max().item() / scale
    share, n = kept.double().mean().item(), kept.numel()
    if off > 4 * torch.finfo(y.dtype).eps:
        return f"off by {off:.2e} of the largest element: forward and backward do not keep the same elements"
    if abs(share - 0.75) > 5 * math.sqrt(0.75 * 0.25 / n):
        return f"{share:.3f} of {n} elements are kept; expected 0.75"
    return None
