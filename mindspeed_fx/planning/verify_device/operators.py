"""A call of every ``mindspeed::`` operator, forward, and the backward call that autograd makes of it.

Sizes are free: of a few elements they show values, of a model's size they are timed.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.kernels.base import Operator
from mindspeed_fx.kernels.linear_fp8 import RECIPES

ops = torch.ops.mindspeed
Losses = Iterator[torch.Tensor]


class Maker:
    """Makes the arguments of one set of sizes.

    Attributes:
        b, s, n, kv, d, h: batch, sequence, heads, heads of keys, width of a head, hidden size.
        dtype: of the floating-point arguments.
    """

    def __init__(self, sizes: tuple[int, int, int, int, int, int], dtype: torch.dtype):
        self.b, self.s, self.n, self.kv, self.d, self.h = sizes
        self.dtype = dtype

    def randn(self, *shape: int, grad: bool = True) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, requires_grad=grad)

    def rand(self, *shape: int, grad: bool = False) -> torch.Tensor:
        return torch.rand(*shape, dtype=self.dtype, requires_grad=grad)

    def far(self, *shape: int) -> torch.Tensor:
        """Just below powers of two that fall along every dimension: of those that share a scale the first alone leaves
        the range, in a part of them another one."""
        below = 1.9 + 0.09 * torch.rand(*shape, dtype=self.dtype)  # with three bits 1.875 or 2, and 1.75 out of range
        places = torch.cartesian_prod(*(torch.arange(n) for n in shape)).sum(-1).view(shape)
        return (below * (-places).to(self.dtype).exp2()).requires_grad_()

    def hidden(self, grad: bool = True) -> torch.Tensor:
        """[b, s, h]."""
        return self.randn(self.b, self.s, self.h, grad=grad)


class Calls(TorchDispatchMode):
    """Collects the calls of our operators, with detached arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Operator, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in REGISTRY:
            defaults = [a.default_value for a in func._schema.arguments[len(args) :]]
            self.calls.append(
                (REGISTRY[func], [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in (*args, *defaults)])
            )
        return func(*args, **(kwargs or {}))


def calls(
    b: int, s: int, n: int, kv: int, d: int, h: int, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Operator, list[Any]]]:
    """Every operator, forward and backward, at batch ``b``, sequence ``s``, ``n`` heads, ``kv`` of them for keys, head
    width ``d``, hidden size ``h``."""
    for family in FAMILIES:
        yield from calls_of(family, (b, s, n, kv, d, h), dtype)


def calls_of(
    family: str, sizes: tuple[int, int, int, int, int, int], dtype: torch.dtype
) -> list[tuple[Operator, list[Any]]]:
    """The calls of one of :data:`FAMILIES`; sizes as of :func:`calls`."""
    with Calls() as collected:
        for loss in FAMILIES[family](Maker(sizes, dtype)):
            if loss.requires_grad:
                (loss * torch.randn_like(loss)).sum().backward()
    return collected.calls


def _layers(m: Maker) -> Losses:
    x, w = m.hidden(), m.randn(m.h)
    yield ops.linear(x, m.randn(m.d, m.h), m.randn(m.d)) ** 2
    yield ops.linear(x, m.randn(m.d, m.h), None) ** 2
    for recipe in RECIPES:
        make = m.far if recipe in ("mx", "mx_square") else m.randn
        yield ops.linear_fp8(make(m.b, m.s, m.h), make(m.d, m.h), recipe) * 2
    yield ops.rms_norm(x, w, 1e-5, True)[0] * m.hidden(grad=False)
    yield ops.rms_norm(x, None, 1e-5, False)[0] * m.hidden(grad=False)
    y, total, _ = ops.add_rms_norm(x, m.hidden(), w, 1e-5, False)
    yield y * m.hidden(grad=False) + total * 2
    yield ops.add_rms_norm(x, m.hidden(), w.detach(), 1e-5, False)[0] * m.hidden(grad=False)
    bias = m.randn(m.h)
    for parameters in ((w, bias), (w, None), (None, None)):
        yield ops.layer_norm(x, *parameters, 1e-5)[0] * m.hidden(grad=False)
    y, total, *_ = ops.add_layer_norm(x, m.hidden(), w, bias, 1e-5)
    yield y * m.hidden(grad=False) + total * 2
    yield ops.add_layer_norm(x, m.hidden(), w.detach(), None, 1e-5)[0] * m.hidden(grad=False)
    for shift in (bias, None):  # probability 0: without drawing, parts can be compared
        yield ops.dropout_add(x, shift, m.hidden(), 0.0)[0] * m.hidden(grad=False)
        seed = torch.tensor([5, 7], dtype=torch.int32)
        yield ops.dropout_add_seeded(x, shift, m.hidden(), seed, 0.0) * m.hidden(grad=False)


def _norms_of_aten(m: Maker) -> Losses:
    whole = [t.detach() for t in (m.hidden(), m.randn(m.h), m.randn(m.h))]
    ops.layer_norm_aten_backward(whole[0] * 2, *whole[:2], *ops.layer_norm_aten(*whole, 1e-5)[1:], True, True)
    return iter(())


def _gates(m: Maker) -> Losses:
    x = m.hidden()
    for up in (m.hidden(), None):
        yield ops.swiglu(x, up) ** 2
        yield ops.glu(x, up, "gelu") ** 2
        yield ops.clipped_swiglu(x, up, 1.702, 0.7, 1.0, False) ** 2
        yield ops.weighted_swiglu(x, up, m.randn(m.b, m.s, 1)) ** 2
    yield ops.clipped_swiglu(x, None, 1.702, 0.7, 1.0, True) ** 2
    for kind in ("squared_relu", "quick_gelu"):
        yield ops.activation(x, kind) ** 2


def _rotations(m: Maker) -> Losses:
    b, s, n, d = m.b, m.s, m.n, m.d
    yield ops.rope(m.randn(b, n, s, d), m.randn(s, d), m.randn(s, d), False) ** 2
    yield ops.rope(m.randn(b, n, s, d), *(m.randn(b, 1, s, d, grad=False) for _ in range(2)), True) ** 2
    for rotates_back in (False, True):
        pair = m.randn(b, n, s, d, grad=False), m.randn(b, m.kv, s, d, grad=False)
        ops.rope_pair(*pair, *(m.randn(s, d, grad=False) for _ in range(2)), rotates_back, rotates_back)
    for weight, turned, interleaved in ((m.randn(d), d, False), (None, min(d, max(2, d // 4 * 2)), True)):
        shape = (b, 1, s, turned) if interleaved else (s, turned)
        angles = (m.randn(*shape, grad=False) for _ in range(2))
        yield ops.qk_norm_rope(m.randn(b, n, s, d), weight, *angles, 1e-5, True, interleaved)[0] ** 2


def _heads(m: Maker) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values; the last wider by one."""
    return (m.randn(m.b, m.n, m.s, m.d), m.randn(m.b, m.kv, m.s, m.d), m.randn(m.b, m.kv, m.s, m.d + 1))


def _attention(m: Maker) -> Losses:
    b, s, n = m.b, m.s, m.n
    q, k, v = _heads(m)
    keep = torch.rand(b, 1, s, s) < 0.7
    yield ops.attention(q, k, v, None, True, 0.3)[0] ** 2
    yield ops.attention(q, k, v, None, False, 0.3, 0, 2.0)[0] ** 2
    yield ops.attention(q, k, v, keep, False, 0.3)[0] ** 2
    yield ops.attention(q, k, v, m.randn(n, s, s, grad=False), True, 0.3, 2, 0.0, m.randn(n))[0] ** 2
    yield ops.attention(q, k, v, m.randn(n, s, s), True, 0.3)[0] ** 2
    yield ops.attention(q, k, v, m.randn(b, 1, 1, s), False, 0.3, 0, 2.0, m.randn(b, n, s))[0] ** 2
    for mask, causal, window in ((None, True, 2), (keep, False, 0)):  # without drawing, parts can be compared
        yield ops.attention_seeded(q, k, v, mask, causal, 0.3, window, 0.0)[0] ** 2
    numbers = (torch.arange(s) >= s // 3).long()[None]
    each = (torch.arange(s) >= torch.arange(1, b + 1)[:, None]).long()  # rows differ, so that a part of them is not all
    for document, ends, causal, window in (
        (each, None, True, 0),
        (numbers, None, False, 0),
        (numbers, torch.tensor([s // 3, s]), True, 2),
    ):
        yield ops.varlen_attention(q, k, v, document, ends, causal, 0.3, window)[0] ** 2
    kept = torch.rand(b, n, s, s) < 0.7
    yield ops.attention_dropout(q, k, v, kept, None, True, 0.3, 2, 1.5, 0.3)[0] ** 2
    yield ops.attention_dropout(q, k, v, kept, None, True, 0.3, 0, 0.0, 0.3)[0] ** 2
    for mask in (keep, m.randn(b, 1, 1, s, grad=False)):
        yield ops.attention_dropout(q, k, v, kept, mask, False, 0.3, 0, 0.0, 0.3)[0] ** 2
    for mask in (torch.rand(b, 1, s, s) < 0.3, torch.rand(1, n, 1, s) < 0.3):
        yield ops.scaled_masked_softmax(m.randn(b, n, s, s), mask, 0.3) ** 2


def _parts_of_attention(m: Maker) -> Losses:
    q, k, v = (t.detach() for t in _heads(m))
    kept = torch.rand(m.b, m.n, m.s, m.s) < 0.7
    out, lse = ops.attention(q, k, v, None, False, 0.3)
    ops.attention_lse(*(m.rand(*q.shape[:3], 8) for _ in range(2)))
    ops.ring_attention_update(out, lse, torch.randn_like(out), torch.randn_like(lse))
    for dropout in ((), (0, 0.0, kept, 0.3)):
        out, lse = ops.attention_blocked(q, k, v, 0.3, *dropout)
        ops.attention_blocked_backward(torch.randn_like(out), q, k, v, out, lse, 0.3, *dropout)
    return iter(())


def _attention_in_cpp(m: Maker) -> Losses:
    q, k, v = (t.detach() for t in _heads(m))
    out, lse = ops.attention_flash(q, k, v, False, 0.3, 0, 1.5, torch.randn(m.n))
    ops.attention_flash_backward(torch.randn_like(out), q, k, v, out, lse, False, 0.3, 0, 1.5)
    return iter(())


def _delta_rule(m: Maker) -> Losses:
    b, s, n, d = m.b, m.s, m.n, m.d
    keys = (m.randn(b, m.kv, s, d), m.randn(b, m.kv, s, d))
    strength, gate = m.randn(b, n, s), m.rand(b, n, s)
    for decay, eps in ((None, None), (-gate, 1e-6)):
        state, values = m.randn(b, n, d, d + 1), m.randn(b, n, s, d + 1)
        out, final, _ = ops.gated_delta_rule(*keys, values, decay, strength / 4, state, 0.3, eps, 4)
        yield out**2 + final.sum(-2, keepdim=True)
    keys, decay, state = (m.randn(b, n, s, d), m.randn(b, n, s, d)), -m.rand(b, n, s, d), m.randn(b, n, d, d + 1)
    values = m.randn(b, n, s, d + 1)
    out, final, _ = ops.kimi_delta_attention(*keys, values, decay, strength / 4, state, 0.3, 1e-6)
    yield out**2 + final.sum(-2, keepdim=True)


def _delta_rule_in_cpp(m: Maker) -> Losses:
    b, s, n, d = m.b, m.s, m.n, m.d
    keys, values = torch.randn(2, b, m.kv, s, d), torch.randn(b, n, s, d + 1)
    arguments = (*keys, values, -torch.rand(b, n, s), torch.rand(b, n, s), None, 0.3, 1e-6, 4)
    out, final, starts = ops.delta_tiles(*arguments)
    ops.delta_tiles_backward(torch.randn_like(out), torch.randn_like(final), starts, *arguments)
    keys, decay = torch.randn(2, b, n, s, d), -torch.rand(b, n, s, d)
    arguments = (*keys, values, decay, torch.rand(b, n, s), None, 0.3, 1e-6)
    out, final, starts = ops.kimi_delta_tiles(*arguments)
    ops.kimi_delta_tiles_backward(torch.randn_like(out), torch.randn_like(final), starts, *arguments)
    return iter(())


def _state_spaces(m: Maker) -> Losses:
    b, s, n, d, h = m.b, m.s, m.n, m.d, m.h
    steps, rates = m.rand(b, s, n, grad=True), (-m.rand(n)).requires_grad_()
    for skip in (m.randn(n), None):
        states = m.randn(b, n, d, d + 1) if skip is None else None
        columns = m.randn(b, s, m.kv, d + 1), m.randn(b, s, m.kv, d + 1)
        out, final, _ = ops.ssd(m.randn(b, s, n, d), steps, rates, *columns, skip, states, 4)
        yield out**2 + final.sum(-1).unsqueeze(1)
    for whole in (True, False):
        channels = [m.randn(h), m.randn(b, h, s), m.randn(h)] if whole else [None, None, None]
        arguments = m.randn(b, h, s), m.rand(b, h, s, grad=True), -m.randn(h, d, grad=False).abs()
        states = None if whole else m.randn(b, h, d)
        out, final, _ = ops.selective_scan(*arguments, m.randn(b, d, s), m.randn(b, d, s), *channels, states, whole)
        yield out**2 + final.sum(-1, keepdim=True)
    for iterations in (1, 4):
        yield ops.sinkhorn_knopp(m.randn(b, s, n, n), iterations, 1e-6) ** 2
    keys, scores = m.randn(b, s, d), m.randn(b, s, n)
    best, chosen = ops.lightning_indexer(m.randn(b, s, n, d), keys, scores, min(s, 4))
    yield best[:, -1:] ** 2
    for values in (None, m.randn(b, s, m.kv, d)):
        heads = 1 if values is None else m.kv
        q, k = m.randn(b, s, n, d), m.randn(b, s, heads, d)
        out, sums = ops.sparse_attention(q, k, values, chosen, 0.3, d)
        weights = ops.chosen_weights(q.detach(), k.detach(), chosen, sums.detach(), 0.3)
        yield out**2 * weights.sum(-1)[..., None, None]
    for bias in (m.randn(h), None):
        yield ops.causal_conv1d(m.randn(b, h, s), m.randn(h, 4), bias, bias is None) ** 2


def _preference_losses(m: Maker) -> Losses:
    tokens, classes = m.b * m.s, 2 * m.h or 3
    target = torch.randint(0, classes, (tokens,))
    target[:1] = -100
    hidden, head, bias = m.randn(tokens, m.h), m.randn(classes, m.h), m.randn(classes)
    numbers = [m.randn(tokens, grad=False) for _ in range(4)]
    yield ops.linear_grpo(hidden, head, bias, target, *numbers, beta=0.1)[0]
    yield ops.linear_grpo(hidden, head, None, target, *numbers[:2], temperature=0.7)[0]
    for beta in (0.0, 0.3, 1.0):
        teacher = m.randn(tokens, m.d), m.randn(classes, m.d)
        yield ops.linear_jsd(hidden, head, bias, *teacher, None, numbers[1], beta, 0.7)


def _losses(m: Maker) -> Losses:
    tokens, classes = m.b * m.s, 2 * m.h or 3
    target = torch.randint(0, classes, (tokens,))
    target[:1] = -100
    yield ops.cross_entropy(m.randn(tokens, classes), target, -100, 0.1)[0] * m.randn(tokens, grad=False)
    hidden, head, bias = m.randn(tokens, m.h), m.randn(classes, m.h), m.randn(classes)
    for shift, reduction in ((bias, "sum"), (None, "mean"), (bias, "none")):
        yield ops.linear_cross_entropy(hidden, head, shift, target, reduction=reduction) * torch.tensor(1.5)
    logits = hidden.detach() @ head.detach().t()
    for extra in (torch.randn_like(logits), None):
        ops.linear_cross_entropy_backward(
            torch.randn(tokens, dtype=m.dtype),
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
    for shift, sums in ((bias, True), (None, False)):
        lse, picked, total = ops.linear_logsumexp(
            hidden, head, shift, torch.where(target == -100, -2, target - 1), 2.0 if sums else 0.0, sums
        )
        yield lse * torch.randn(tokens) + picked * 2 + (total if sums else 0.0)


def _experts(m: Maker) -> Losses:
    tokens, experts, chosen = m.b * m.s, 3, 2
    hidden = m.randn(tokens, m.h)
    offsets = torch.tensor([min(1, tokens), min(1, tokens), tokens])
    for rows in (m.randn(tokens, m.h), m.randn(tokens, m.h, grad=False)):
        yield ops.grouped_matmul(rows, m.randn(experts, m.h, m.d), offsets) ** 2
    permuted, order = ops.moe_permute(hidden, torch.randint(0, experts, (tokens, chosen)))
    yield permuted**2
    for probs in (m.randn(tokens, chosen), None):
        yield ops.moe_unpermute(permuted.detach().requires_grad_(), order, probs, chosen) ** 2
    for bias, score, eps in (
        (None, "softmax", 0.0),
        (m.randn(8, grad=False), "sigmoid", 1e-20),
        (None, "softmax", None),
    ):
        groups = (1, 1, 1) if bias is None else (2, 1, 2)
        yield ops.router_topk(m.randn(tokens, 8), bias, chosen, score, *groups, eps, 2.5)[0] ** 2
    routing = torch.rand(tokens, experts).argsort(-1) < chosen
    permuted, share, _ = ops.moe_permute_map(hidden, routing, m.rand(tokens, experts, grad=True), chosen)
    yield permuted * share.unsqueeze(-1)


def _inference(m: Maker) -> Losses:
    tokens, inner = m.b * m.s, 2 * m.d
    x, biases = m.hidden(grad=False), (m.randn(inner, grad=False), m.randn(m.d, grad=False))
    for activation, bias in (("silu", (None, None)), ("gelu", biases), ("swiglu", (None, None))):
        rows = m.d if activation == "swiglu" else inner
        weights = m.randn(m.h, inner, grad=False), m.randn(rows, m.d, grad=False)
        ops.ffn(x, *weights, *bias, None, activation)
    counts = [tokens // 2, tokens - tokens // 2]
    weights = m.randn(2, m.h, inner, grad=False), m.randn(2, inner, m.d, grad=False)
    ops.ffn(m.randn(tokens, m.h, grad=False), *weights, None, m.randn(2, m.d, grad=False), counts, "relu")
    rows, matrices = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((tokens, m.h), (3, m.h, m.d)))
    offsets, scale = torch.tensor([min(1, tokens), min(1, tokens), tokens]), torch.rand(3, m.d)
    for of_tokens in (torch.rand(tokens), None):
        ops.quant_grouped_matmul(rows, matrices, offsets, scale, of_tokens, m.dtype)
    return iter(())


def _products_of_cpu(m: Maker) -> Losses:
    tokens = m.b * m.s
    ops.gemm(torch.randn(tokens, m.h), torch.randn(m.h, m.d))
    ops.narrow_product(torch.randn(tokens, m.h), torch.randn(m.h, m.d), torch.randn(m.d))
    ops.narrow_product(torch.randn(m.b, m.s, m.h), torch.randn(m.b, m.h, m.d), None, torch.float32)
    gate, weight = torch.randn(tokens, 2 * m.d), torch.rand(tokens, 1)
    ops.gate_gradient(ops.gate_product(gate, None, weight), gate, None, weight)
    return iter(())


FAMILIES: dict[str, Callable[[Maker], Losses]] = {
    "layers": _layers,
    "norms of aten": _norms_of_aten,
    "gates": _gates,
    "rotations": _rotations,
    "attention": _attention,
    "parts of attention": _parts_of_attention,
    "attention in C++": _attention_in_cpp,
    "delta rule": _delta_rule,
    "delta rule in C++": _delta_rule_in_cpp,
    "state spaces": _state_spaces,
    "losses": _losses,
    "preference losses": _preference_losses,
    "experts": _experts,
    "inference": _inference,
    "products of cpu": _products_of_cpu,
}
"""Operators that belong together."""
OF_CPU = ("attention in C++", "delta rule in C++", "products of cpu")
"""Families of kernels that exist on a processor alone."""
