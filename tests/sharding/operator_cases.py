"""Arguments for every ``mindspeed::`` operator: forward calls, and the backward calls autograd makes of them."""

from __future__ import annotations

from typing import Any, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.kernels import REGISTRY

ops = torch.ops.mindspeed


def randn(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


class Calls(TorchDispatchMode):
    """Collects the calls of our operators, with detached arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in REGISTRY:
            defaults = [a.default_value for a in func._schema.arguments[len(args) :]]
            self.found.append(
                (REGISTRY[func], [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in (*args, *defaults)])
            )
        return func(*args, **(kwargs or {}))


def calls(b: int, s: int, n: int, kv: int, d: int, h: int) -> Iterator[tuple[Any, list[Any]]]:
    """Every operator, forward and backward, at batch ``b``, sequence ``s``, ``n`` heads, ``kv`` of them for keys, head
    width ``d``, hidden size ``h``."""
    with Calls() as collected:
        for loss in _losses(b, s, n, kv, d, h):
            if loss.requires_grad:
                (loss * torch.randn_like(loss)).sum().backward()
    yield from collected.found


def _losses(b: int, s: int, n: int, kv: int, d: int, h: int) -> Iterator[torch.Tensor]:
    x, w, angles = randn(b, s, h), randn(h), (randn(s, d), randn(s, d))
    yield ops.linear(x, randn(d, h), randn(d)) ** 2
    yield ops.linear(x, randn(d, h), None) ** 2
    yield (ops.rms_norm(x, w, 1e-5, True)[0] * randn(b, s, h, grad=False))
    yield (ops.rms_norm(x, None, 1e-5, False)[0] * randn(b, s, h, grad=False))
    y, total, _ = ops.add_rms_norm(x, randn(b, s, h), w, 1e-5, False)
    yield y * randn(b, s, h, grad=False) + total * 2
    yield ops.add_rms_norm(x, randn(b, s, h), w.detach(), 1e-5, False)[0] * randn(b, s, h, grad=False)
    bias = randn(h)
    for given in ((w, bias), (w, None), (None, None)):
        yield ops.layer_norm(x, *given, 1e-5)[0] * randn(b, s, h, grad=False)
    whole = [t.detach() for t in (x, w, bias)]
    ops.layer_norm_aten_backward(whole[0] * 2, *whole[:2], *ops.layer_norm_aten(*whole, 1e-5)[1:], True, True)
    y, total, *_ = ops.add_layer_norm(x, randn(b, s, h), w, bias, 1e-5)
    yield y * randn(b, s, h, grad=False) + total * 2
    yield ops.add_layer_norm(x, randn(b, s, h), w.detach(), None, 1e-5)[0] * randn(b, s, h, grad=False)
    for given in (bias, None):
        yield ops.dropout_add(x, given, randn(b, s, h), 0.0)[0] * randn(
            b, s, h, grad=False
        )  # without drawing, parts can be compared
        yield ops.dropout_add_seeded(x, given, randn(b, s, h), torch.tensor([5, 7], dtype=torch.int32), 0.0) * randn(
            b, s, h, grad=False
        )
    for up in (randn(b, s, h), None):
        yield ops.swiglu(x, up) ** 2
        yield ops.glu(x, up, "gelu") ** 2
        yield ops.clipped_swiglu(x, up, 1.702, 0.7, 1.0, False) ** 2
        yield ops.weighted_swiglu(x, up, randn(b, s, 1)) ** 2
    yield ops.clipped_swiglu(x, None, 1.702, 0.7, 1.0, True) ** 2
    for kind in ("squared_relu", "quick_gelu"):
        yield ops.activation(x, kind) ** 2
    yield ops.rope(randn(b, n, s, d), *angles, False) ** 2
    yield ops.rope(randn(b, n, s, d), *(randn(b, 1, s, d, grad=False) for _ in range(2)), True) ** 2
    q, k, v = randn(b, n, s, d), randn(b, kv, s, d), randn(b, kv, s, d + 1)
    yield ops.attention(q, k, v, None, True, 0.3)[0] ** 2
    yield ops.attention(q, k, v, None, False, 0.3, 0, 2.0)[0] ** 2
    yield ops.attention(q, k, v, torch.rand(b, 1, s, s) < 0.7, False, 0.3)[0] ** 2
    yield ops.attention(q, k, v, randn(n, s, s, grad=False), True, 0.3, 2, 0.0, randn(n))[0] ** 2
    yield ops.attention(q, k, v, randn(n, s, s), True, 0.3)[0] ** 2
    yield ops.attention(q, k, v, randn(b, 1, 1, s), False, 0.3, 0, 2.0, randn(b, n, s))[0] ** 2
    for mask, causal, window in ((None, True, 2), (torch.rand(b, 1, s, s) < 0.7, False, 0)):
        yield (
            ops.attention_seeded(q, k, v, mask, causal, 0.3, window, 0.0)[0] ** 2
        )  # without drawing, parts can be compared
    numbers = (torch.arange(s) >= s // 3).long()[None]
    each = (torch.arange(s) >= torch.arange(1, b + 1)[:, None]).long()  # rows differ, so that a part of them is not all
    for given, ends, causal, window in (
        (each, None, True, 0),
        (numbers, None, False, 0),
        (numbers, torch.tensor([s // 3, s]), True, 2),
    ):
        yield ops.varlen_attention(q, k, v, given, ends, causal, 0.3, window)[0] ** 2
    kept = torch.rand(b, n, s, s) < 0.7
    yield ops.attention_dropout(q, k, v, kept, 0.3, 2, 1.5, 0.3)[0] ** 2
    yield ops.attention_dropout(q, k, v, kept, 0.3, 0, 0.0, 0.3)[0] ** 2
    out, lse = ops.attention(q.detach(), k.detach(), v.detach(), None, False, 0.3)
    ops.ring_attention_update(out, lse, torch.randn_like(out), torch.randn_like(lse))
    out, lse = ops.attention_blocked(q.detach(), k.detach(), v.detach(), 0.3)
    ops.attention_blocked_backward(torch.randn_like(out), q.detach(), k.detach(), v.detach(), out, lse, 0.3)
    out, lse = ops.attention_blocked(q.detach(), k.detach(), v.detach(), 0.3, 0, 0.0, kept, 0.3)
    ops.attention_blocked_backward(
        torch.randn_like(out), q.detach(), k.detach(), v.detach(), out, lse, 0.3, 0, 0.0, kept, 0.3
    )
    out, lse = ops.attention_flash(q.detach(), k.detach(), v.detach(), False, 0.3, 0, 1.5, torch.randn(n))
    ops.attention_flash_backward(
        torch.randn_like(out), q.detach(), k.detach(), v.detach(), out, lse, False, 0.3, 0, 1.5
    )
    for mask in (torch.rand(b, 1, s, s) < 0.3, torch.rand(1, n, 1, s) < 0.3):
        yield ops.scaled_masked_softmax(randn(b, n, s, s), mask, 0.3) ** 2
    keys, gates = (randn(b, kv, s, d), randn(b, kv, s, d)), (randn(b, n, s), torch.rand(b, n, s, dtype=torch.float64))
    for given, eps in ((None, None), (-gates[1], 1e-6)):
        state = randn(b, n, d, d + 1)
        out, final, _ = ops.gated_delta_rule(*keys, randn(b, n, s, d + 1), given, gates[0] / 4, state, 0.3, eps, 4)
        yield out**2 + final.sum(-2, keepdim=True)
    steps, rates = torch.rand(b, s, n, dtype=torch.float64).requires_grad_(), -torch.rand(n, dtype=torch.float64)
    for given in (randn(n), None):
        states = randn(b, n, d, d + 1) if given is None else None
        arguments = randn(b, s, n, d), steps, rates.requires_grad_(), randn(b, s, kv, d + 1), randn(b, s, kv, d + 1)
        out, final, _ = ops.ssd(*arguments, given, states, 4)
        yield out**2 + final.sum(-1).unsqueeze(1)
    for whole in (True, False):
        channels = [randn(h) if whole else None, randn(b, h, s) if whole else None, randn(h) if whole else None]
        arguments = (
            randn(b, h, s),
            torch.rand(b, h, s, dtype=torch.float64).requires_grad_(),
            -randn(h, d).detach().abs(),
        )
        columns = randn(b, d, s), randn(b, d, s)
        states = None if whole else randn(b, h, d)
        out, final, _ = ops.selective_scan(*arguments, *columns, *channels, states, whole)
        yield out**2 + final.sum(-1, keepdim=True)
    for given in (randn(h), None):
        yield ops.causal_conv1d(randn(b, h, s), randn(h, 4), given, given is None) ** 2
    tokens, classes = b * s, 2 * h or 3
    target = torch.randint(0, classes, (tokens,))
    target[:1] = -100
    yield ops.cross_entropy(randn(tokens, classes), target, -100, 0.1)[0] * randn(tokens, grad=False)
    hidden, head, bias = randn(tokens, h), randn(classes, h), randn(classes)
    for given, reduction in ((bias, "sum"), (None, "mean"), (bias, "none")):
        yield ops.linear_cross_entropy(hidden, head, given, target, reduction=reduction) * torch.tensor(1.5)
    numbers = [torch.randn(tokens, dtype=torch.float64) for _ in range(4)]
    yield ops.linear_grpo(hidden, head, bias, target, *numbers, beta=0.1)[0]
    yield ops.linear_grpo(hidden, head, None, target, *numbers[:2], temperature=0.7)[0]
    for beta in (0.0, 0.3, 1.0):
        yield ops.linear_jsd(hidden, head, bias, randn(tokens, d), randn(classes, d), None, numbers[1], beta, 0.7)
    logits = hidden.detach() @ head.detach().t()
    for extra in (torch.randn_like(logits), None):
        ops.linear_cross_entropy_backward(
            torch.randn(tokens, dtype=torch.float64),
            logits,
            target,
            logits.logsumexp(-1),
            extra,
            hidden.detach(),
            head.detach(),
            -100,
            0.1,
            [True, True, extra is None],
        )
    experts, chosen = 3, 2
    offsets = torch.tensor([min(1, tokens), min(1, tokens), tokens])
    for rows, weights in (
        (randn(tokens, h), randn(experts, h, d)),
        (randn(tokens, h, grad=False), randn(experts, h, d)),
    ):
        yield ops.grouped_matmul(rows, weights, offsets) ** 2
    permuted, order = ops.moe_permute(hidden, torch.randint(0, experts, (tokens, chosen)))
    yield permuted**2
    yield ops.moe_unpermute(permuted.detach().requires_grad_(), order, randn(tokens, chosen)) ** 2
    yield ops.moe_unpermute(permuted.detach().requires_grad_(), order, None, chosen) ** 2
    permuted, share, _ = ops.moe_permute_map(
        hidden,
        torch.rand(tokens, experts).argsort(-1) < chosen,
        torch.rand(tokens, experts, dtype=torch.float64, requires_grad=True),
        chosen,
    )
    yield permuted * share.unsqueeze(-1)
    ops.gemm(torch.randn(tokens, h), torch.randn(h, d))
    ops.narrow_product(torch.randn(tokens, h), torch.randn(h, d), torch.randn(d))
    ops.narrow_product(torch.randn(b, s, h), torch.randn(b, h, d))
    for given, sums in ((bias, True), (None, False)):
        lse, picked, total = ops.linear_logsumexp(
            hidden, head, given, torch.where(target == -100, -2, target - 1), 2.0 if sums else 0.0, sums
        )
        yield lse * torch.randn(tokens) + picked * 2 + (total if sums else 0.0)
    for weight, turned, interleaved in ((randn(d), d, False), (None, min(d, max(2, d // 4 * 2)), True)):
        angles = (
            (randn(b, 1, s, turned, grad=False) for _ in range(2))
            if interleaved
            else (randn(s, turned, grad=False) for _ in range(2))
        )
        yield ops.qk_norm_rope(randn(b, n, s, d), weight, *angles, 1e-5, True, interleaved)[0] ** 2
